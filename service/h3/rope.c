/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "service/h3/layout.h"
#include "service/shared/fmath.h"

/* A sequence has few distinct coordinates per axis (frames, grid lines), but each in thousands of rows. */
#define MEMO_SIZE 256

typedef struct Memo {
        bool filled;
        float coordinate;
        float cos[H3_ROPE_FREQS_MAX], sin[H3_ROPE_FREQS_MAX];
} Memo;

static float round_to_bf16(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof(bits)); /* cos and sin are finite */
        bits += 0x7fff + (bits >> 16 & 1);
        bits &= 0xffff0000u;
        memcpy(&x, &bits, sizeof(x));
        return x;
}

static const Memo *memo_get(Memo *memo, const H3Config *c, float coordinate, bool round_bf16) {
        uint32_t bits;
        Memo *m;

        memcpy(&bits, &coordinate, sizeof(bits));
        m = memo + (bits * 2654435761u >> 24) % MEMO_SIZE;
        if (m->filled && memcmp(&m->coordinate, &coordinate, sizeof(coordinate)) == 0)
                return m;

        for (uint32_t k = 0; k < c->rope_freqs; k++) {
                float angle = coordinate * c->rope_inv_freq[k];

                m->cos[k] = (float) fmath_cos((double) angle);
                m->sin[k] = (float) fmath_sin((double) angle);
                if (round_bf16) {
                        m->cos[k] = round_to_bf16(m->cos[k]);
                        m->sin[k] = round_to_bf16(m->sin[k]);
                }
        }
        m->coordinate = coordinate;
        m->filled = true;
        return m;
}

void h3_rope_table(const H3Config *c, const H3Layout *l, const uint64_t *order, uint64_t row_begin, uint64_t row_end,
        bool round_bf16, float *ret_cos, float *ret_sin) {
        size_t bytes = c->rope_freqs * sizeof(float);
        Memo memo[MEMO_SIZE]; /* 66 kB of stack */

        for (uint32_t axis = 0; axis < 3; axis++) {
                memset(memo, 0, sizeof(memo));
                for (uint64_t row = row_begin; row < row_end; row++) {
                        const Memo *m = memo_get(memo, c, (float) l->position[order ? order[row] : row][axis], round_bf16);
                        uint64_t at = ((row - row_begin) * 3 + axis) * c->rope_freqs;

                        memcpy(ret_cos + at, m->cos, bytes);
                        memcpy(ret_sin + at, m->sin, bytes);
                }
        }
}
