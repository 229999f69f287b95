/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/rope-cache.h"

#include <stdlib.h>
#include <string.h>

#include "service/worker/crew.h"

/* A thread for fewer rows would take longer to begin than they do. */
#define ROWS_PER_THREAD 2048u

void rope_cache_clear(RopeCache *c) {
        free(c->position);
        free(c->table);
        *c = (RopeCache){};
}

static bool holds(const RopeCache *c, const H3Config *config, const H3Layout *l, bool bf16) {
        return c->table && c->rows == l->rows && c->bf16 == bf16 && c->freqs == config->rope_freqs &&
               memcmp(c->inv_freq, config->rope_inv_freq, config->rope_freqs * sizeof(float)) == 0 &&
               memcmp(c->position, l->position, l->rows * sizeof(*c->position)) == 0;
}

typedef struct Making {
        RopeCache *cache;
        const H3Config *config;
        const H3Layout *layout;
} Making;

static void make_rows(void *userdata, uint32_t i, uint32_t n) {
        const Making *x = userdata;
        RopeCache *c = x->cache;
        uint64_t begin = c->rows * i / n, end = c->rows * (i + 1) / n, row = UINT64_C(3) * c->freqs;

        h3_rope_table(x->config, x->layout, NULL, begin, end, c->bf16, c->table + begin * row, c->table + (c->rows + begin) * row);
}

const float *rope_cache_get(RopeCache *c, const H3Config *config, const H3Layout *l, H3Compute compute) {
        uint64_t threads = (l->rows + ROWS_PER_THREAD - 1) / ROWS_PER_THREAD, n = l->rows * 3 * config->rope_freqs;
        bool bf16 = compute == H3_COMPUTE_BF16;
        Making making = {c, config, l};
        Crew crew;

        if (holds(c, config, l, bf16))
                return c->table;

        rope_cache_clear(c);
        c->position = malloc(l->rows * sizeof(*c->position));
        c->table = malloc(2 * n * sizeof(float));
        if (!c->position || !c->table) {
                rope_cache_clear(c);
                return NULL;
        }
        memcpy(c->position, l->position, l->rows * sizeof(*c->position));
        memcpy(c->inv_freq, config->rope_inv_freq, config->rope_freqs * sizeof(float));
        c->rows = l->rows;
        c->freqs = config->rope_freqs;
        c->bf16 = bf16;
        crew_begin(&crew, threads < CREW_MAX ? (uint32_t) threads : CREW_MAX, make_rows, &making);
        crew_end(&crew);
        return c->table;
}
