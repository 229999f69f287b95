/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Byte pair encoding of one word: the pair with the lowest rank first, of equals the first, until no two
 * neighbours have a merge. A list of symbols and a heap of pairs: n log n. */

#include "service/h3/tokenizer-private.h"

typedef struct WordSymbol {
        uint32_t id; /* NO_TOKEN: went into the one before */
        int32_t previous, next;
} WordSymbol;

/* Memory kept from one word to the next. */
typedef struct WordBuffer {
        WordSymbol *symbols;
        uint64_t *heap; /* rank, then place */
        size_t cap, n_heap;
} WordBuffer;

void word_done(WordBuffer *b);

/* Writes the ids of n > 0 bytes to ret_ids, which has room for n; sets *ret_n. -ENOMEM. */
int word_encode(
        const H3Tokenizer *t, WordBuffer *b, const char *word, size_t n, int32_t *ret_ids, size_t *ret_n);
