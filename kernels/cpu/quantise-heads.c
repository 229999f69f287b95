/* SPDX-License-Identifier: Apache-2.0 */
/* Queries, keys and values to int8 for attention, by the steps of ops.h. A task of keys is one tile of one
 * head. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

#define MOST_MIN 1e-30f
#define F32_MOST 0x7f7fffffu /* bits of the largest finite number */
#define TILE_NUMBERS (LK_I8_KEYS * LK_I8_DIM)

typedef struct KeysJob {
        const LkQuantiseKeys *args;
        uint64_t tiles;
        float *tile; /* TILE_NUMBERS for each thread */
} KeysJob;

static void load_head(const void *x, LkType t, uint64_t at, float *v) {
        x = (const uint8_t *) x + at * lk_type_size(t);
        for (uint64_t i = 0; i < LK_I8_DIM; i += VT_N)
                vt_store(v + i, vt_get(x, t, i, LK_I8_DIM));
}

static void rotate_head(float *v) {
        rotate(v, LK_I8_DIM, 64);
        for (uint32_t i = 0; i < 64; i++) {
                float a = v[i], b = v[i + 64];

                v[i] = a + b;
                v[i + 64] = a - b;
        }
}

/* Bits of the largest magnitude of n numbers, `step` apart; a NaN is above all. */
static uint32_t largest_bits(const float *v, uint64_t n, uint64_t step) {
        uint32_t most = 0;

        for (uint64_t i = 0; i < n; i++) {
                uint32_t u = f32_bits(v[i * step]) & 0x7fffffffu;

                most = u > most ? u : most;
        }

        return most;
}

/* What numbers are multiplied by, and their scale. */
static float factor_of(uint32_t most, float *ret_scale) {
        float m = f32_from_bits(most);

        if (most > F32_MOST) {
                *ret_scale = f32_from_bits(0x7fc00000u);
                return 0;
        }

        m = m > MOST_MIN ? m : MOST_MIN;
        *ret_scale = m * (1.0f / 127.0f);
        return 127.0f / m;
}

/* |v * factor| is 127 at most, but for a rounding; a factor of 0 stands for integers of 0. */
static int8_t integer_of(float v, float factor) {
        const float round = 0x1.8p23f;

        return factor == 0 ? 0 : (int8_t) (int32_t) ((v * factor + round) - round);
}

static void queries_row(const void *arg, uint64_t row) {
        const LkQuantiseQueries *a = arg;
        float v[LK_I8_DIM];

        for (uint32_t h = 0; h < a->heads; h++) {
                int8_t *q = a->q + row * a->q_ld + (uint64_t) h * LK_I8_DIM;
                float *scale = a->scale + row * (a->q_ld / LK_I8_DIM) + h, factor;

                load_head(a->x, a->type, row * a->x_ld + (uint64_t) h * LK_I8_DIM, v);
                rotate_head(v);
                factor = factor_of(largest_bits(v, LK_I8_DIM, 1), scale);
                for (uint32_t i = 0; i < LK_I8_DIM; i++)
                        q[i] = integer_of(v[i], factor);
        }
}

int LK_ISA(quantise_queries)(LkContext *c, const LkQuantiseQueries *a) {
        if (!c || !a || !check_quantise_queries(a))
                return -EINVAL;

        return rows_run(c, a->n, (uint64_t) a->heads * LK_I8_DIM, queries_row, a);
}

static void offset_head(const void *arg, uint64_t head) {
        const LkQuantiseKeys *a = arg;
        float sum[LK_I8_DIM] = {}, v[LK_I8_DIM];

        for (uint64_t i = 0; i < LK_I8_SAMPLES; i++) {
                load_head(a->k, a->type, i * a->to.n / LK_I8_SAMPLES * a->k_ld + head * LK_I8_DIM, v);
                for (uint32_t d = 0; d < LK_I8_DIM; d++)
                        sum[d] = sum[d] + v[d];
        }
        for (uint32_t d = 0; d < LK_I8_DIM; d++)
                a->to.offset[head * LK_I8_DIM + d] = sum[d] * (1.0f / LK_I8_SAMPLES);
}

static void keys_tile(
        const LkQuantiseKeys *a, uint64_t head, uint64_t tile, uint64_t at, uint64_t n, float *v) {
        const float *offset = a->to.offset + head * LK_I8_DIM;
        int8_t *q = a->to.k + at * TILE_NUMBERS;
        float factor;

        for (uint64_t i = 0; i < n; i++) {
                float *row = v + i * LK_I8_DIM;

                load_head(a->k, a->type, (tile * LK_I8_KEYS + i) * a->k_ld + head * LK_I8_DIM, row);
                for (uint32_t d = 0; d < LK_I8_DIM; d++)
                        row[d] = row[d] - offset[d];
                rotate_head(row);
        }

        factor = factor_of(largest_bits(v, n * LK_I8_DIM, 1), a->to.k_scale + at);
        for (uint64_t i = 0; i < TILE_NUMBERS; i++)
                q[i] = i < n * LK_I8_DIM ? integer_of(v[i], factor) : 0;
}

static void values_tile(
        const LkQuantiseKeys *a, uint64_t head, uint64_t tile, uint64_t at, uint64_t n, float *v) {
        for (uint64_t i = 0; i < n; i++)
                load_head(a->v, a->type, (tile * LK_I8_KEYS + i) * a->v_ld + head * LK_I8_DIM,
                        v + i * LK_I8_DIM);

        for (uint32_t d = 0; d < LK_I8_DIM; d++) {
                int8_t *q = a->to.v + at * TILE_NUMBERS + d * LK_I8_KEYS;
                float factor =
                        factor_of(largest_bits(v + d, n, LK_I8_DIM), a->to.v_scale + at * LK_I8_DIM + d);

                for (uint32_t p = 0; p < LK_I8_KEYS; p++)
                        q[p] = lk_i8_key(p) < n ? integer_of(v[lk_i8_key(p) * LK_I8_DIM + d], factor) : 0;
        }
}

static void keys_task(void *userdata, uint64_t task, uint32_t thread) {
        const KeysJob *j = userdata;
        const uint64_t head = task / j->tiles, tile = task % j->tiles,
                       left = j->args->to.n - tile * LK_I8_KEYS;
        const uint64_t n = left < LK_I8_KEYS ? left : LK_I8_KEYS;
        float *v = j->tile + (uint64_t) thread * TILE_NUMBERS;

        keys_tile(j->args, head, tile, task, n, v);
        values_tile(j->args, head, tile, task, n, v);
}

int LK_ISA(quantise_keys)(LkContext *c, const LkQuantiseKeys *a) {
        KeysJob j = {.args = a};
        void *scratch;
        int r;

        if (!c || !a || !check_quantise_keys(a))
                return -EINVAL;
        if (a->to.heads == 0)
                return 0;

        r = context_scratch(c, threads_count(c->threads) * TILE_NUMBERS * sizeof(float), &scratch);
        if (r < 0)
                return r;

        j.tile = scratch;
        j.tiles = lk_i8_tiles(a->to.n);
        r = rows_run(c, a->to.heads, LK_I8_SAMPLES * LK_I8_DIM, offset_head, a);
        return r < 0 ? r : threads_run(c->threads, j.tiles * a->to.heads, keys_task, &j);
}
