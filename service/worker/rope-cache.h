/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The rope table of the last sequence (H3StepInput.rope): steps of one layout follow each other, and on a GPU its making
 * would be a good part of what passes before the first kernel. On the steps' thread. */

#include <stdbool.h>

#include "service/h3/dit.h"

typedef struct RopeCache {
        double (*position)[3]; /* [rows]: the key, with what follows */
        uint64_t rows;
        uint32_t freqs;
        float inv_freq[H3_ROPE_FREQS_MAX];
        bool bf16;
        float *table; /* NULL: empty */
} RopeCache;

void rope_cache_clear(RopeCache *c);

/* The table for a layout, owned by the cache until the next call; NULL: there is no memory for it. */
const float *rope_cache_get(RopeCache *c, const H3Config *config, const H3Layout *l, H3Compute compute);
