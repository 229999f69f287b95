/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens by id and by bytes, merges by pair. Sorted tables, not hashed ones: a file made to collide would
 * cost time without end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/tokenizer-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"

void vocab_done(Vocab *v) {
        free(v->text);
        free(v->tokens);
        free(v->sorted);
        free(v->merges);
        free(v->rows);
        free(v->entries);
        *v = (Vocab){};
}

int tokenizer_grow(void *p, size_t n, size_t *cap, size_t size) {
        void **array = p, *larger;
        size_t want = *cap < 16 ? 32 : *cap * 2, bytes;

        if (n < *cap)
                return 0;
        if (__builtin_mul_overflow(want, size, &bytes))
                return -ENOMEM;
        larger = realloc(*array, bytes);
        if (!larger)
                return -ENOMEM;
        *array = larger;
        *cap = want;
        return 0;
}

static int add_text(Vocab *v, const char *bytes, size_t n) {
        if (n > INT32_MAX || v->text_n > INT32_MAX - n)
                return -E2BIG;
        if (v->text_n + n > v->text_cap) {
                size_t want = (v->text_n + n) * 2 + 4096;
                char *larger = realloc(v->text, want);

                if (!larger)
                        return -ENOMEM;
                v->text = larger;
                v->text_cap = want;
        }
        if (n > 0)
                memcpy(v->text + v->text_n, bytes, n);
        v->text_n += n;
        return 0;
}

int vocab_add(Vocab *v, const char *bytes, size_t n, uint64_t id) {
        TokenSpan span = {.at = (uint32_t) v->text_n, .n = (uint32_t) n};
        int r;

        if (id >= H3_TOKEN_IDS_MAX)
                return -E2BIG;
        if (id < v->n_ids && v->tokens[id].n != NO_TOKEN) {
                TokenSpan s = v->tokens[id];

                return s.n == n && memcmp(v->text + s.at, bytes, n) == 0 ? 0 : -EEXIST;
        }
        r = add_text(v, bytes, n);
        if (r < 0)
                return r;
        while (v->n_ids <= id) {
                r = tokenizer_grow(&v->tokens, v->n_ids, &v->ids_cap, sizeof(*v->tokens));
                if (r < 0)
                        return r;
                v->tokens[v->n_ids++] = (TokenSpan){.n = NO_TOKEN};
        }
        v->tokens[id] = span;
        v->n_tokens++;
        return 0;
}

static uint64_t prefix_of(const char *bytes, size_t n) {
        uint64_t p = 0;

        for (size_t i = 0; i < 8; i++)
                p = p << 8 | (i < n ? (uint8_t) bytes[i] : 0);
        return p;
}

static int compare_bytes(const char *a, size_t a_n, const char *b, size_t b_n) {
        int r = memcmp(a, b, a_n < b_n ? a_n : b_n);

        return r != 0 ? r : (a_n > b_n) - (a_n < b_n);
}

static int compare_keys(const void *a, const void *b, void *userdata) {
        const TokenKey *x = a, *y = b;
        const Vocab *v = userdata;

        if (x->prefix != y->prefix)
                return x->prefix < y->prefix ? -1 : 1;
        return compare_bytes(v->text + v->tokens[x->id].at, v->tokens[x->id].n,
                v->text + v->tokens[y->id].at, v->tokens[y->id].n);
}

int vocab_sort(Vocab *v, uint32_t ret_ids[2]) {
        CLEANUP_FREE TokenKey *keys = NULL;
        size_t n = 0;

        keys = calloc(v->n_tokens + 1, sizeof(*keys));
        if (!keys)
                return -ENOMEM;
        for (size_t id = 0; id < v->n_ids; id++)
                if (v->tokens[id].n != NO_TOKEN)
                        keys[n++] = (TokenKey){.id = (uint32_t) id,
                                .prefix = prefix_of(v->text + v->tokens[id].at, v->tokens[id].n)};
        qsort_r(keys, n, sizeof(*keys), compare_keys, v);
        for (size_t i = 1; i < n; i++)
                if (compare_keys(&keys[i - 1], &keys[i], v) == 0) {
                        ret_ids[0] = keys[i - 1].id;
                        ret_ids[1] = keys[i].id;
                        return -EEXIST;
                }
        free(v->sorted);
        v->sorted = STEAL_PTR(keys);
        v->n_sorted = n;
        return 0;
}

uint32_t vocab_find(const Vocab *v, const char *bytes, size_t n) {
        uint64_t prefix = prefix_of(bytes, n);
        size_t low = 0, high = v->n_sorted;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                const TokenKey *k = &v->sorted[middle];
                TokenSpan s;
                int r;

                if (k->prefix != prefix)
                        r = k->prefix < prefix ? -1 : 1;
                else {
                        s = v->tokens[k->id];
                        r = compare_bytes(v->text + s.at, s.n, bytes, n);
                }
                if (r == 0)
                        return k->id;
                if (r < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return NO_TOKEN;
}

int vocab_add_merge(Vocab *v, uint32_t left, uint32_t right, uint32_t result) {
        int r;

        if (v->n_merges >= 4 * (size_t) H3_TOKEN_IDS_MAX)
                return -E2BIG;
        r = tokenizer_grow(&v->merges, v->n_merges, &v->merges_cap, sizeof(*v->merges));
        if (r < 0)
                return r;
        v->merges[v->n_merges++] = (TokenMerge){left, right, result};
        return 0;
}

static int compare_entries(const void *a, const void *b) {
        const MergeEntry *x = a, *y = b;

        if (x->right != y->right)
                return x->right < y->right ? -1 : 1;
        return (x->rank > y->rank) - (x->rank < y->rank);
}

int vocab_index_merges(Vocab *v, uint32_t ret_ranks[2]) {
        CLEANUP_FREE uint32_t *at = NULL;

        v->rows = calloc(v->n_ids + 1, sizeof(*v->rows));
        v->entries = calloc(v->n_merges + 1, sizeof(*v->entries));
        at = calloc(v->n_ids + 1, sizeof(*at));
        if (!v->rows || !v->entries || !at)
                return -ENOMEM;
        for (size_t i = 0; i < v->n_merges; i++)
                v->rows[v->merges[i].left + 1]++;
        for (size_t id = 0; id < v->n_ids; id++)
                v->rows[id + 1] += v->rows[id];
        memcpy(at, v->rows, (v->n_ids + 1) * sizeof(*at));
        for (size_t i = 0; i < v->n_merges; i++)
                v->entries[at[v->merges[i].left]++] = (MergeEntry){v->merges[i].right, (uint32_t) i};
        for (size_t id = 0; id < v->n_ids; id++) {
                MergeEntry *row = v->entries + v->rows[id];
                size_t n = v->rows[id + 1] - v->rows[id];

                if (n > 1)
                        qsort(row, n, sizeof(*row), compare_entries);
                for (size_t i = 1; i < n; i++)
                        if (row[i - 1].right == row[i].right) {
                                ret_ranks[0] = row[i - 1].rank;
                                ret_ranks[1] = row[i].rank;
                                return -EEXIST;
                        }
        }
        v->n_rows = v->n_ids;
        return 0;
}

/* Bytes that are printable in Latin-1 stand for themselves, the others for characters from U+0100 on, in
 * order. */
static bool is_itself(uint32_t c) {
        return (c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff);
}

static uint32_t character_of(uint8_t byte) {
        uint32_t c = 0x100;

        if (is_itself(byte))
                return byte;
        for (uint32_t b = 0; b < byte; b++)
                c += !is_itself(b);
        return c;
}

static int byte_of(uint32_t c) {
        uint32_t n = 0x100;

        if (is_itself(c))
                return (int) c;
        for (int b = 0; b < 256; b++)
                if (!is_itself((uint32_t) b) && n++ == c)
                        return b;
        return -1;
}

bool vocab_bytes_of(char *characters, size_t n, size_t *ret_n) {
        size_t out = 0;

        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t len = utf8_decode(characters + i, n - i, &c);
                int byte = len > 0 ? byte_of(c) : -1;

                if (byte < 0)
                        return false;
                characters[out++] = (char) byte;
                i += len;
        }
        *ret_n = out;
        return true;
}

void vocab_character(uint8_t byte, char ret[5]) {
        ret[utf8_encode(character_of(byte), ret)] = '\0';
}
