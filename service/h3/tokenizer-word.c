/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/tokenizer-word.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

void word_done(WordBuffer *b) {
        free(b->symbols);
        free(b->heap);
        *b = (WordBuffer){};
}

/* Each of n symbols has at most one pair at first, and each of n - 1 merges adds two. */
static size_t heap_size(size_t n) {
        return 3 * n;
}

static int reserve(WordBuffer *b, size_t n) {
        CLEANUP_FREE WordSymbol *symbols = NULL;
        CLEANUP_FREE uint64_t *heap = NULL;

        if (n <= b->cap)
                return 0;
        n = n < 64 ? 64 : n;
        symbols = calloc(n, sizeof(*symbols));
        heap = calloc(heap_size(n), sizeof(*heap));
        if (!symbols || !heap)
                return -ENOMEM;
        word_done(b);
        b->symbols = STEAL_PTR(symbols);
        b->heap = STEAL_PTR(heap);
        b->cap = n;
        return 0;
}

static void push(WordBuffer *b, uint64_t key) {
        size_t i = b->n_heap++;

        while (i > 0 && b->heap[(i - 1) / 2] > key) {
                b->heap[i] = b->heap[(i - 1) / 2];
                i = (i - 1) / 2;
        }
        b->heap[i] = key;
}

static uint64_t pop(WordBuffer *b) {
        uint64_t top = b->heap[0], last = b->heap[--b->n_heap];
        size_t i = 0;

        for (;;) {
                size_t child = 2 * i + 1;

                if (child >= b->n_heap)
                        break;
                if (child + 1 < b->n_heap && b->heap[child + 1] < b->heap[child])
                        child++;
                if (b->heap[child] >= last)
                        break;
                b->heap[i] = b->heap[child];
                i = child;
        }
        b->heap[i] = last;
        return top;
}

/* The pair that starts at place i, if it has a merge. */
static void push_pair(const H3Tokenizer *t, WordBuffer *b, int32_t i) {
        uint32_t rank;

        if (i < 0 || b->symbols[i].next < 0)
                return;
        rank = vocab_merge(&t->vocab, b->symbols[i].id, b->symbols[b->symbols[i].next].id);
        if (rank != NO_TOKEN)
                push(b, (uint64_t) rank << 32 | (uint32_t) i);
}

int word_encode(
        const H3Tokenizer *t, WordBuffer *b, const char *word, size_t n, int32_t *ret_ids, size_t *ret_n) {
        size_t count = 0;

        if (reserve(b, n) < 0)
                return -ENOMEM;
        b->n_heap = 0;
        for (size_t i = 0; i < n; i++)
                b->symbols[i] = (WordSymbol){.id = t->byte_ids[(uint8_t) word[i]],
                        .previous = (int32_t) i - 1,
                        .next = i + 1 < n ? (int32_t) i + 1 : -1};
        for (size_t i = 0; i + 1 < n; i++)
                push_pair(t, b, (int32_t) i);

        while (b->n_heap > 0) {
                uint64_t key = pop(b);
                const TokenMerge *merge = &t->vocab.merges[key >> 32];
                int32_t place = (int32_t) (uint32_t) key;
                WordSymbol *left = &b->symbols[place], *right;

                /* The pair may have changed since it was pushed. */
                if (left->id != merge->left || left->next < 0)
                        continue;
                right = &b->symbols[left->next];
                if (right->id != merge->right)
                        continue;
                left->id = merge->result;
                left->next = right->next;
                right->id = NO_TOKEN;
                if (left->next >= 0)
                        b->symbols[left->next].previous = place;
                push_pair(t, b, left->previous);
                push_pair(t, b, place);
        }

        for (int32_t i = 0; i >= 0; i = b->symbols[i].next)
                ret_ids[count++] = (int32_t) b->symbols[i].id;
        *ret_n = count;
        return 0;
}
