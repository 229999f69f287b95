/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/rope-cache.h"

#include <stdlib.h>
#include <string.h>

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

const float *rope_cache_get(RopeCache *c, const H3Config *config, const H3Layout *l, H3Compute compute) {
        bool bf16 = compute == H3_COMPUTE_BF16;
        uint64_t n = l->rows * 3 * config->rope_freqs;

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
        h3_rope_table(config, l, NULL, 0, l->rows, bf16, c->table, c->table + n);
        return c->table;
}
