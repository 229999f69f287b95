/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A run of the conditioner on several ranks: their threads, the exchange between them, the first error of
 * all of them. As split.h for the denoiser; the split itself is the model's (text.h). */

#include "service/h3/text.h"
#include "service/worker/exchange.h"
#include "service/worker/rank.h"

typedef struct TextSplit {
        const LkOps *ops;
        const H3TextModel *model;
        const H3TextInput *in;
        uint64_t ranks; /* of the group: bits, at least one */
        ExchangeKind exchange;

        /* As in SplitStep; on_begin may be NULL. */
        int (*on_begin)(void *userdata, uint32_t rank, H3Rank *to);
        int (*on_block)(void *userdata, uint32_t rank, uint32_t done, uint32_t total);
        void (*on_stuck)(void *userdata, const Fault *f);
        void *userdata;

        ExchangeHook hook;      /* for tests */
        uint64_t deadline_usec; /* for tests; 0: from the size of the run */
} TextSplit;

/* Bytes that a run of this size takes over all ranks, with what lies between them; *ret_device: those of them that are the ranks'
 * devices'. -EOVERFLOW. */
int text_split_memory(const H3TextModel *m, const H3TextSize *size, ExchangeKind exchange, uint64_t *ret, uint64_t *ret_device);

/* Runs it. ret_hidden: as h3_text_run(). *ret_bytes: what the ranks received from each other. On failure the
 * first real error, with f. */
int text_split_run(RankGroup *g, const TextSplit *s, void *ret_hidden, uint64_t *ret_bytes, Fault *f);
