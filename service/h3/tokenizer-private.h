/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a tokenizer is made of, for its own files: the vocabulary with its merges (tokenizer-vocab.c), read
 * from the files (tokenizer-files.c, tokenizer-added.c), used by tokenizer.c. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "service/h3/tokenizer-split.h"
#include "service/h3/tokenizer.h"

#define NO_TOKEN UINT32_MAX

/* Bytes of a token in the vocabulary's text. */
typedef struct TokenSpan {
        uint32_t at, n; /* n == NO_TOKEN: the id has no token */
} TokenSpan;

/* Two tokens side by side become one. Its rank is its place in the list: the lowest goes first. */
typedef struct TokenMerge {
        uint32_t left, right, result;
} TokenMerge;

/* The merges of one left token, by their right one. */
typedef struct MergeEntry {
        uint32_t right, rank;
} MergeEntry;

/* Tokens by their bytes: the first eight as a number, most comparisons need no more. */
typedef struct TokenKey {
        uint64_t prefix;
        uint32_t id;
} TokenKey;

typedef struct Vocab {
        char *text;
        size_t text_n, text_cap;
        TokenSpan *tokens; /* by id */
        size_t n_ids, ids_cap, n_tokens;
        TokenKey *sorted; /* [n_sorted] of the tokens there were at vocab_sort() */
        size_t n_sorted;
        TokenMerge *merges; /* by rank */
        size_t n_merges, merges_cap;
        uint32_t *rows; /* [n_ids + 1] where a left token's entries start */
        size_t n_rows;
        MergeEntry *entries;
} Vocab;

void vocab_done(Vocab *v);

/* Adds a token of n bytes; ids come in any order. -EEXIST: the id has other bytes, -E2BIG: id or all the
 * text too large, -ENOMEM. */
int vocab_add(Vocab *v, const char *bytes, size_t n, uint64_t id);
/* Makes vocab_find() work. -EEXIST: two ids have the same bytes (both given), -ENOMEM. */
int vocab_sort(Vocab *v, uint32_t ret_ids[2]);
uint32_t vocab_find(const Vocab *v, const char *bytes, size_t n); /* NO_TOKEN */
/* -ENOMEM, -E2BIG. */
int vocab_add_merge(Vocab *v, uint32_t left, uint32_t right, uint32_t result);
/* Makes vocab_merge() work. -EEXIST: two merges of the same pair (their ranks), -ENOMEM. */
int vocab_index_merges(Vocab *v, uint32_t ret_ranks[2]);

/* The rank of a pair's merge, or NO_TOKEN. */
static inline uint32_t vocab_merge(const Vocab *v, uint32_t left, uint32_t right) {
        uint32_t low, high;

        if (left >= v->n_rows)
                return NO_TOKEN;
        low = v->rows[left];
        high = v->rows[left + 1];
        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (v->entries[middle].right < right)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low < v->rows[left + 1] && v->entries[low].right == right ? v->entries[low].rank : NO_TOKEN;
}

/* Bytes written as characters (byte-level BPE): in place, the result is never longer. Sets *ret_n; false: a
 * character stands for no byte. */
bool vocab_bytes_of(char *characters, size_t n, size_t *ret_n);
/* The character that stands for a byte, UTF-8 and terminated, for messages. */
void vocab_character(uint8_t byte, char ret[5]);

typedef struct AddedToken {
        uint32_t id;
        TokenSpan content;
} AddedToken;

#define ADDED_TOKENS_MAX 16384u
#define ADDED_TOKEN_BYTES_MAX 1024u

struct H3Tokenizer {
        Vocab vocab;
        uint32_t byte_ids[256]; /* the token of each byte */
        AddedToken *added;      /* sorted by content */
        size_t n_added, added_cap;
        bool added_start[256]; /* an added token begins with this byte */
        pcre2_code *words;
};

/* The word pattern of the Qwen2 family as tokenizer.json spells it: the only one there is. */
extern const char tokenizer_word_pattern[];

#define TOKENIZER_FILE_MAX (UINT64_C(1) << 28)

typedef struct TokenizerFiles {
        const H3File *tokenizer, *vocab, *merges, *config, *added; /* NULL: not there */
} TokenizerFiles;

/* vocab.json and merges.txt. */
int tokenizer_read_lists(const TokenizerFiles *files, Vocab *v, Fault *f);
/* tokenizer.json: its model, which lists (may be NULL: there are none) must agree with, or -EINVAL
 * (InvalidModel); its other parts are checked and its added tokens added. */
int tokenizer_read_whole(const H3File *file, const Vocab *lists, H3Tokenizer *t, Fault *f);

/* The parts of tokenizer.json around the model, as JSON: normaliser, word pattern, added tokens. */
typedef struct TokenizerPart {
        const char *key, *json; /* json NULL: not there */
        size_t n;
} TokenizerPart;

int tokenizer_check_normalizer(const char *file, const TokenizerPart *part, Fault *f);
int tokenizer_check_words(const char *file, const TokenizerPart *part, Fault *f);
int tokenizer_check_processor(const char *file, const TokenizerPart *part, Fault *f);
int tokenizer_add_list(H3Tokenizer *t, const char *file, const TokenizerPart *part, Fault *f);
/* added_tokens.json, tokenizer_config.json. */
int tokenizer_read_added(H3Tokenizer *t, const TokenizerFiles *files, Fault *f);

/* A file's bytes in memory of our own, freed by the caller, with a NUL behind them. -EBADMSG: too large. */
int tokenizer_copy(const H3File *file, char **ret, Fault *f);
__attribute__((format(printf, 3, 4))) int tokenizer_fail(
        const char *file, Fault *f, const char *format, ...); /* -EBADMSG, InvalidFile */
int tokenizer_no_memory(const char *file, Fault *f);

/* Makes room for one more of `size` bytes in *p, which has room for *cap. -ENOMEM. */
int tokenizer_grow(void *p, size_t n, size_t *cap, size_t size);
