/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/tokenizer.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/nfc.h"
#include "service/h3/tokenizer-private.h"
#include "service/h3/tokenizer-split.h"
#include "service/h3/tokenizer-word.h"
#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"

H3Tokenizer *h3_tokenizer_free(H3Tokenizer *t) {
        if (!t)
                return NULL;
        vocab_done(&t->vocab);
        free(t->added);
        pcre2_code_free(t->words);
        free(t);
        return NULL;
}
DEFINE_CLEANUP(H3Tokenizer *, h3_tokenizer_free)

static TokenizerFiles find_files(const H3File *files, size_t n_files) {
        TokenizerFiles found = {};
        const struct {
                const char *name;
                const H3File **place;
        } kinds[] = {{"tokenizer.json", &found.tokenizer}, {"vocab.json", &found.vocab},
                {"merges.txt", &found.merges}, {"tokenizer_config.json", &found.config},
                {"added_tokens.json", &found.added}};

        for (size_t i = 0; i < n_files; i++) {
                const char *slash = strrchr(files[i].name, '/');
                const char *name = slash ? slash + 1 : files[i].name;

                for (size_t k = 0; k < ELEMENTSOF(kinds); k++)
                        if (strcmp(name, kinds[k].name) == 0)
                                *kinds[k].place = &files[i];
        }
        return found;
}

static void vocab_donep(Vocab *v) {
        vocab_done(v);
}

static int read_files(const TokenizerFiles *files, H3Tokenizer *t, Fault *f) {
        CLEANUP(vocab_donep) Vocab lists = {};
        int r;

        if (!files->tokenizer && (!files->vocab || !files->merges))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The tokenizer has no %s. Expected tokenizer.json, or vocab.json and merges.txt, "
                        "with "
                        "tokenizer_config.json.",
                        files->vocab    ? "merges.txt"
                        : files->merges ? "vocab.json"
                                        : "files");
        if (!files->tokenizer) {
                r = tokenizer_read_lists(files, &t->vocab, f);
                return r < 0 ? r : tokenizer_read_added(t, files, f);
        }
        if (files->vocab && files->merges) {
                r = tokenizer_read_lists(files, &lists, f);
                if (r < 0)
                        return r;
        }
        r = tokenizer_read_whole(files->tokenizer, lists.n_ids > 0 ? &lists : NULL, t, f);
        if (r < 0)
                return r;
        return tokenizer_read_added(t, files, f);
}

static int compare_added(const void *a, const void *b, void *userdata) {
        const AddedToken *x = a, *y = b;
        const char *text = userdata;
        uint32_t n = x->content.n < y->content.n ? x->content.n : y->content.n;
        int r = memcmp(text + x->content.at, text + y->content.at, n);

        return r != 0 ? r : (x->content.n > y->content.n) - (x->content.n < y->content.n);
}

/* What encoding needs besides the vocabulary. */
static int finish(H3Tokenizer *t, Fault *f) {
        size_t offset;
        int error;

        for (unsigned b = 0; b < 256; b++) {
                char c = (char) b;

                t->byte_ids[b] = vocab_find(&t->vocab, &c, 1);
        }
        free(t->vocab.sorted);
        t->vocab.sorted = NULL;
        t->vocab.n_sorted = 0;

        if (t->n_added > 0)
                qsort_r(t->added, t->n_added, sizeof(*t->added), compare_added, t->vocab.text);
        for (size_t i = 0; i < t->n_added; i++)
                t->added_start[(uint8_t) t->vocab.text[t->added[i].content.at]] = true;

        if (split_compile(&t->words, &error, &offset) < 0)
                return fault_set(f, -ENOTRECOVERABLE, FAULT_INTERNAL,
                        "PCRE2 does not compile the word pattern: error %d at %zu", error, offset);
        return 0;
}

int h3_tokenizer_open(const H3File *files, size_t n_files, H3Tokenizer **ret, Fault *f) {
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = NULL;
        TokenizerFiles found = find_files(files, n_files);
        int r;

        t = calloc(1, sizeof(*t));
        if (!t)
                return tokenizer_no_memory("tokenizer", f);
        r = read_files(&found, t, f);
        if (r < 0)
                return r;
        r = finish(t, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(t);
        return 0;
}

/* One text on its way to ids. */
typedef struct Encoder {
        const H3Tokenizer *t;
        NfcBuffer nfc;
        WordBuffer word;
        Splitter split;
        int32_t *ids;
        size_t n_ids, ids_cap;
} Encoder;

static void encoder_done(Encoder *e) {
        nfc_done(&e->nfc);
        word_done(&e->word);
        split_done(&e->split);
        free(e->ids);
}

static int reserve_ids(Encoder *e, size_t n) {
        size_t want = (e->n_ids + n) * 3 / 2 + 64;
        int32_t *larger;

        if (e->n_ids + n < e->ids_cap)
                return 0;
        larger = realloc(e->ids, want * sizeof(*larger));
        if (!larger)
                return -ENOMEM;
        e->ids = larger;
        e->ids_cap = want;
        return 0;
}

/* The longest added token that s starts with; its length, 0: none. */
static size_t match_added(const H3Tokenizer *t, const char *s, size_t n, uint32_t *ret_id) {
        size_t low = 0, high = t->n_added, found = 0;

        if (!t->added_start[(uint8_t) s[0]])
                return 0;
        /* Those that agree with s in their first `depth` bytes are [low, high); the shortest comes first. */
        for (size_t depth = 0; depth < n && low < high; depth++) {
                size_t a = low, b = high;

                while (a < b) { /* to the first whose byte is not below that of s */
                        size_t middle = a + (b - a) / 2;
                        TokenSpan c = t->added[middle].content;

                        if (c.n <= depth || (uint8_t) t->vocab.text[c.at + depth] < (uint8_t) s[depth])
                                a = middle + 1;
                        else
                                b = middle;
                }
                low = a;
                b = high;
                while (a < b) { /* behind the last whose byte is that of s */
                        size_t middle = a + (b - a) / 2;

                        if ((uint8_t) t->vocab.text[t->added[middle].content.at + depth] <=
                                (uint8_t) s[depth])
                                a = middle + 1;
                        else
                                b = middle;
                }
                high = a;
                if (low < high && t->added[low].content.n == depth + 1) {
                        found = depth + 1;
                        *ret_id = t->added[low].id;
                }
        }
        return found;
}

/* Text between added tokens. */
static int encode_piece(Encoder *e, const char *piece, size_t piece_n) {
        const char *s;
        size_t n;
        int r;

        r = nfc_of(&e->nfc, piece, piece_n, &s, &n);
        if (r < 0)
                return r;
        for (size_t at = 0; at < n;) {
                size_t len, count;

                r = split_next(&e->split, s, n, at, &len);
                if (r < 0)
                        return r;
                r = reserve_ids(e, len);
                if (r < 0)
                        return r;
                r = word_encode(e->t, &e->word, s + at, len, e->ids + e->n_ids, &count);
                if (r < 0)
                        return r;
                e->n_ids += count;
                at += len;
        }
        return 0;
}

static int encode(Encoder *e, const char *text, size_t n) {
        size_t begin = 0;
        int r;

        for (size_t i = 0; i < n;) {
                uint32_t id = 0;
                size_t len = match_added(e->t, text + i, n - i, &id);

                if (len == 0) {
                        i++;
                        continue;
                }
                r = encode_piece(e, text + begin, i - begin);
                if (r < 0)
                        return r;
                r = reserve_ids(e, 1);
                if (r < 0)
                        return r;
                e->ids[e->n_ids++] = (int32_t) id;
                i += len;
                begin = i;
        }
        return encode_piece(e, text + begin, n - begin);
}

static int check_text(const char *text, size_t n, Fault *f) {
        if (n > H3_TOKENIZER_TEXT_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The text has %zu bytes; at most %llu can be encoded.", n,
                        (unsigned long long) H3_TOKENIZER_TEXT_MAX);
        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t len = (uint8_t) text[i] < 0x80 ? 1 : utf8_decode(text + i, n - i, &c);

                if (len == 0)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "The text is not UTF-8: byte %zu (0x%02x) starts no character.", i,
                                (uint8_t) text[i]);
                i += len;
        }
        return 0;
}

int h3_tokenizer_encode(
        const H3Tokenizer *t, const char *text, size_t n, int32_t **ret_ids, size_t *ret_n, Fault *f) {
        CLEANUP(encoder_done) Encoder e = {.t = t};
        int r;

        r = check_text(text, n, f);
        if (r < 0)
                return r;
        r = split_init(&e.split, t->words);
        if (r == 0)
                r = reserve_ids(&e, n / 4);
        if (r == 0)
                r = encode(&e, text, n);
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT, "No memory to encode %zu bytes of text.", n);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "PCRE2 finds no word in the text.");
        *ret_ids = STEAL_PTR(e.ids);
        *ret_n = e.n_ids;
        return 0;
}

const char *h3_tokenizer_token(const H3Tokenizer *t, int32_t id, size_t *ret_n) {
        if (id < 0 || (size_t) id >= t->vocab.n_ids || t->vocab.tokens[id].n == NO_TOKEN)
                return NULL;
        *ret_n = t->vocab.tokens[id].n;
        return t->vocab.text + t->vocab.tokens[id].at;
}

int h3_tokenizer_decode(
        const H3Tokenizer *t, const int32_t *ids, size_t n, char **ret, size_t *ret_n, Fault *f) {
        size_t size = 0, len, at = 0;
        char *text;

        for (size_t i = 0; i < n; i++) {
                if (!h3_tokenizer_token(t, ids[i], &len))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Token %zu is %d, which the vocabulary does not have; ids are below %zu.", i,
                                ids[i], t->vocab.n_ids);
                if (__builtin_add_overflow(size, len, &size) || size == SIZE_MAX)
                        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the text.");
        }
        text = malloc(size + 1);
        if (!text)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for a text of %zu bytes.", size);
        for (size_t i = 0; i < n; i++) {
                const char *token = h3_tokenizer_token(t, ids[i], &len);

                memcpy(text + at, token, len);
                at += len;
        }
        text[size] = '\0';
        *ret = text;
        *ret_n = size;
        return 0;
}

int h3_tokenizer_added(const H3Tokenizer *t, const char *content, int32_t *ret_id) {
        size_t n = strlen(content);

        for (size_t i = 0; i < t->n_added; i++) {
                TokenSpan s = t->added[i].content;

                if (s.n == n && memcmp(t->vocab.text + s.at, content, n) == 0) {
                        *ret_id = (int32_t) t->added[i].id;
                        return 0;
                }
        }
        return -ENOENT;
}

uint32_t h3_tokenizer_n_ids(const H3Tokenizer *t) {
        return (uint32_t) t->vocab.n_ids;
}
