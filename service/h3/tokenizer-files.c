/* SPDX-License-Identifier: Apache-2.0 */
/* Vocabulary and merges from vocab.json and merges.txt, or from tokenizer.json's model. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/tokenizer-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/json-reader.h"

/* tokenizer.json: model, pre_tokenizer and what post_processors nest. */
#define JSON_DEPTH 16
/* Of the parts that are not lists of tokens. */
#define PART_MAX (UINT64_C(1) << 20)

int tokenizer_fail(const char *file, Fault *f, const char *format, ...) {
        char rule[700];
        va_list ap;

        va_start(ap, format);
        (void) vsnprintf(rule, sizeof(rule), format, ap);
        va_end(ap);
        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "'%.200s': %s", file, rule);
}

int tokenizer_no_memory(const char *file, Fault *f) {
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "'%.200s': no memory for the tokenizer", file);
}

int tokenizer_copy(const H3File *file, char **ret, Fault *f) {
        char *copy;

        if (file->size > TOKENIZER_FILE_MAX)
                return tokenizer_fail(file->name, f, "%llu bytes; expected at most %llu",
                        (unsigned long long) file->size, (unsigned long long) TOKENIZER_FILE_MAX);
        copy = malloc(file->size + 1);
        if (!copy)
                return tokenizer_no_memory(file->name, f);
        if (file->size > 0)
                memcpy(copy, file->bytes, file->size);
        copy[file->size] = '\0';
        *ret = copy;
        return 0;
}

/* One file being read. */
typedef struct Reader {
        const char *file;
        Fault *fault;
        JsonReader json;
        char *room; /* for two strings of the file with terminators, unescaped */
        Vocab *vocab;
        uint64_t line; /* merges: which one */
} Reader;

static int fail_json(const Reader *r) {
        return tokenizer_fail(r->file, r->fault, "malformed at byte %zu: %s", r->json.at, r->json.rule);
}

/* What vocab_add() and its like return, as a fault. */
static int fail_vocab(const Reader *r, int error) {
        if (error == -E2BIG)
                return tokenizer_fail(r->file, r->fault,
                        "more than %u token ids, or more merges or text than those can have",
                        H3_TOKEN_IDS_MAX);
        return tokenizer_no_memory(r->file, r->fault);
}

static int read_token(Reader *r) {
        uint64_t id;
        size_t n;
        int e;

        if (reader_string(&r->json, r->room, &n) < 0 || reader_take(&r->json, ':') < 0 ||
                reader_integer(&r->json, &id) < 0)
                return fail_json(r);
        if (id >= H3_TOKEN_IDS_MAX)
                return tokenizer_fail(r->file, r->fault, "token '%.100s' has the id %llu; ids are below %u",
                        r->room, (unsigned long long) id, H3_TOKEN_IDS_MAX);
        /* The message needs the characters: the bytes come behind them. */
        memcpy(r->room + n + 1, r->room, n);
        if (n == 0 || !vocab_bytes_of(r->room + n + 1, n, &n))
                return tokenizer_fail(r->file, r->fault,
                        "token '%.100s' (id %llu) has a character that stands for no byte, or none", r->room,
                        (unsigned long long) id);
        e = vocab_add(r->vocab, r->room + strlen(r->room) + 1, n, id);
        if (e == -EEXIST)
                return tokenizer_fail(r->file, r->fault, "two tokens have the id %llu; one is '%.100s'",
                        (unsigned long long) id, r->room);
        return e < 0 ? fail_vocab(r, e) : 0;
}

/* Every byte has a token, so that any text has ids. */
static int check_bytes(const Reader *r) {
        for (unsigned b = 0; b < 256; b++) {
                char c = (char) b, character[5];

                if (vocab_find(r->vocab, &c, 1) != NO_TOKEN)
                        continue;
                vocab_character((uint8_t) b, character);
                return tokenizer_fail(r->file, r->fault,
                        "no token for the byte 0x%02x ('%s'); a byte-level vocabulary has all 256", b,
                        character);
        }
        return 0;
}

static int read_vocab(Reader *r) {
        bool first = true;
        uint32_t ids[2];
        int e;

        if (reader_take(&r->json, '{') < 0)
                return fail_json(r);
        while ((e = reader_next(&r->json, '}', &first)) > 0) {
                e = read_token(r);
                if (e < 0)
                        return e;
        }
        if (e < 0)
                return fail_json(r);
        e = vocab_sort(r->vocab, ids);
        if (e == -EEXIST)
                return tokenizer_fail(
                        r->file, r->fault, "the ids %u and %u have the same token", ids[0], ids[1]);
        return e < 0 ? fail_vocab(r, e) : check_bytes(r);
}

/* Bytes of both tokens, one behind the other. */
static int add_merge(Reader *r, char *pair, size_t left_n, size_t right_n) {
        uint32_t left = vocab_find(r->vocab, pair, left_n),
                 right = vocab_find(r->vocab, pair + left_n, right_n),
                 result = vocab_find(r->vocab, pair, left_n + right_n);
        int e;

        if (left == NO_TOKEN || right == NO_TOKEN || result == NO_TOKEN)
                return tokenizer_fail(r->file, r->fault, "merge %llu: %s is not in the vocabulary",
                        (unsigned long long) r->line,
                        left == NO_TOKEN    ? "its left part"
                        : right == NO_TOKEN ? "its right part"
                                            : "what it makes");
        e = vocab_add_merge(r->vocab, left, right, result);
        return e < 0 ? fail_vocab(r, e) : 0;
}

/* Both tokens as characters, with one space between. */
static int add_merge_line(Reader *r, char *line, size_t n) {
        char *space = memchr(line, ' ', n);
        size_t left_n, right_n;

        if (!space || memchr(space + 1, ' ', n - (size_t) (space + 1 - line)))
                return tokenizer_fail(r->file, r->fault, "merge %llu is not two tokens with a space between",
                        (unsigned long long) r->line);
        left_n = (size_t) (space - line);
        right_n = n - left_n - 1;
        if (left_n == 0 || right_n == 0 || !vocab_bytes_of(space + 1, right_n, &right_n) ||
                !vocab_bytes_of(line, left_n, &left_n))
                return tokenizer_fail(r->file, r->fault,
                        "merge %llu has a character that stands for no byte, or an empty part",
                        (unsigned long long) r->line);
        memmove(line + left_n, space + 1, right_n);
        return add_merge(r, line, left_n, right_n);
}

static int index_merges(const Reader *r) {
        uint32_t ranks[2];
        int e;

        e = vocab_index_merges(r->vocab, ranks);
        if (e == -EEXIST)
                return tokenizer_fail(r->file, r->fault, "the merges %u and %u are of the same pair",
                        ranks[0] + 1, ranks[1] + 1);
        return e < 0 ? fail_vocab(r, e) : 0;
}

static int read_merge_lines(Reader *r, char *text, size_t n) {
        int e;

        for (size_t at = 0; at < n;) {
                char *line = text + at, *end = memchr(line, '\n', n - at);
                size_t len = end ? (size_t) (end - line) : n - at;

                at += len + 1;
                if (len > 0 && line[len - 1] == '\r')
                        len--;
                if (len == 0 || (len >= 8 && memcmp(line, "#version", 8) == 0))
                        continue;
                r->line++;
                e = add_merge_line(r, line, len);
                if (e < 0)
                        return e;
        }
        return index_merges(r);
}

int tokenizer_read_lists(const TokenizerFiles *files, Vocab *v, Fault *f) {
        CLEANUP_FREE char *text = NULL, *room = NULL, *lines = NULL;
        Reader r = {.file = files->vocab->name, .fault = f, .vocab = v};
        int e;

        e = tokenizer_copy(files->vocab, &text, f);
        if (e < 0)
                return e;
        room = malloc(2 * files->vocab->size + 8);
        if (!room)
                return tokenizer_no_memory(r.file, f);
        r.room = room;
        r.json = (JsonReader){.text = text, .n = files->vocab->size};
        if (reader_check(&r.json, 1) < 0)
                return fail_json(&r);
        e = read_vocab(&r);
        if (e < 0)
                return e;
        if (reader_end(&r.json) < 0)
                return fail_json(&r);

        r.file = files->merges->name;
        e = tokenizer_copy(files->merges, &lines, f);
        return e < 0 ? e : read_merge_lines(&r, lines, files->merges->size);
}

/* A merge of tokenizer.json: "a b", or ["a", "b"] since 2024. */
static int read_merge(Reader *r) {
        size_t left_n, right_n;
        bool first = true;
        int e;

        r->line++;
        if (reader_peek(&r->json) == '"') {
                if (reader_string(&r->json, r->room, &left_n) < 0)
                        return fail_json(r);
                return add_merge_line(r, r->room, left_n);
        }
        if (reader_take(&r->json, '[') < 0 || reader_next(&r->json, ']', &first) < 1 ||
                reader_string(&r->json, r->room, &left_n) < 0 || reader_next(&r->json, ']', &first) < 1)
                return r->json.rule ? fail_json(r)
                                    : tokenizer_fail(r->file, r->fault, "merge %llu has under two tokens",
                                              (unsigned long long) r->line);
        r->room[left_n] = ' ';
        if (reader_string(&r->json, r->room + left_n + 1, &right_n) < 0)
                return fail_json(r);
        e = reader_next(&r->json, ']', &first);
        if (e != 0)
                return e < 0 ? fail_json(r)
                             : tokenizer_fail(r->file, r->fault, "merge %llu has over two tokens",
                                       (unsigned long long) r->line);
        return add_merge_line(r, r->room, left_n + 1 + right_n);
}

static int read_merge_list(Reader *r) {
        bool first = true;
        int e;

        if (reader_take(&r->json, '[') < 0)
                return fail_json(r);
        while ((e = reader_next(&r->json, ']', &first)) > 0) {
                e = read_merge(r);
                if (e < 0)
                        return e;
        }
        return e < 0 ? fail_json(r) : index_merges(r);
}

/* Notes where each of `parts` stands in the object that is next, and reads past it. */
static int read_parts(Reader *r, TokenizerPart *parts, size_t n_parts) {
        bool first = true;
        int e;

        if (reader_take(&r->json, '{') < 0)
                return fail_json(r);
        while ((e = reader_next(&r->json, '}', &first)) > 0) {
                TokenizerPart *part = NULL;
                size_t n;

                if (reader_string(&r->json, r->room, &n) < 0 || reader_take(&r->json, ':') < 0)
                        return fail_json(r);
                for (size_t i = 0; i < n_parts; i++)
                        if (strcmp(parts[i].key, r->room) == 0)
                                part = &parts[i];
                (void) reader_peek(&r->json);
                if (part && part->json)
                        return tokenizer_fail(r->file, r->fault, "'%s' stands there twice", part->key);
                if (part)
                        part->json = r->json.text + r->json.at;
                if (reader_skip(&r->json) < 0)
                        return fail_json(r);
                if (part)
                        part->n = (size_t) (r->json.text + r->json.at - part->json);
        }
        return e < 0 ? fail_json(r) : 0;
}

/* Another reader of the same file, for a part of it. */
static int enter(const Reader *r, const TokenizerPart *part, Reader *ret) {
        if (!part->json)
                return tokenizer_fail(r->file, r->fault, "'%s' is missing", part->key);
        *ret = *r;
        ret->json = (JsonReader){.text = r->json.text, .n = (size_t) (part->json - r->json.text) + part->n};
        ret->json.at = (size_t) (part->json - r->json.text);
        return 0;
}

static bool is_text(const TokenizerPart *part, const char *json) {
        return part->json && part->n == strlen(json) && memcmp(part->json, json, part->n) == 0;
}

/* Options of a BPE model that would give other ids. */
static int check_model(const Reader *r, const TokenizerPart *parts, size_t n) {
        static const char *const none[] = {"null", "false", "\"\"", "0.0", "0"};

        for (size_t i = 0; i < n; i++) {
                bool is_none = !parts[i].json || (i == 0 && is_text(&parts[i], "\"BPE\""));

                for (size_t k = 0; i > 0 && k < ELEMENTSOF(none); k++)
                        is_none = is_none || is_text(&parts[i], none[k]);
                if (!is_none)
                        return fault_set(r->fault, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "'%.200s': the model's %s is %.*s; only byte-level BPE without it is "
                                "supported.",
                                r->file, parts[i].key, parts[i].n < 80 ? (int) parts[i].n : 80,
                                parts[i].json);
        }
        return 0;
}

static int read_model(const Reader *r, const TokenizerPart *model) {
        TokenizerPart parts[] = {{.key = "type"}, {.key = "dropout"}, {.key = "continuing_subword_prefix"},
                {.key = "end_of_word_suffix"}, {.key = "byte_fallback"}, {.key = "ignore_merges"},
                {.key = "vocab"}, {.key = "merges"}};
        const size_t n_options = 6;
        Reader part;
        int e;

        e = enter(r, model, &part);
        if (e < 0)
                return e;
        e = read_parts(&part, parts, ELEMENTSOF(parts));
        if (e < 0)
                return e;
        e = check_model(r, parts, n_options);
        if (e < 0)
                return e;
        e = enter(r, &parts[n_options], &part);
        if (e < 0)
                return e;
        e = read_vocab(&part);
        if (e < 0)
                return e;
        e = enter(r, &parts[n_options + 1], &part);
        return e < 0 ? e : read_merge_list(&part);
}

static int read_around(const Reader *r, const TokenizerPart *parts, H3Tokenizer *t) {
        int e;

        for (size_t i = 1; i < 5; i++)
                if (parts[i].n > PART_MAX)
                        return tokenizer_fail(r->file, r->fault, "'%s' has %zu bytes; expected at most %llu",
                                parts[i].key, parts[i].n, (unsigned long long) PART_MAX);
        e = tokenizer_check_normalizer(r->file, &parts[1], r->fault);
        if (e < 0)
                return e;
        e = tokenizer_check_words(r->file, &parts[2], r->fault);
        if (e < 0)
                return e;
        e = tokenizer_check_processor(r->file, &parts[3], r->fault);
        return e < 0 ? e : tokenizer_add_list(t, r->file, &parts[4], r->fault);
}

static int disagree(Fault *f, const char *what, size_t at) {
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "tokenizer.json and %s %zu disagree. Use the files of one model, or tokenizer.json alone.",
                what, at);
}

/* Before added tokens come to it. */
static int compare(const Vocab *whole, const Vocab *lists, Fault *f) {
        size_t n = lists->n_merges < whole->n_merges ? lists->n_merges : whole->n_merges;

        for (size_t id = 0; id < lists->n_ids || id < whole->n_ids; id++) {
                TokenSpan a = {.n = NO_TOKEN}, b = {.n = NO_TOKEN};

                if (id < whole->n_ids)
                        a = whole->tokens[id];
                if (id < lists->n_ids)
                        b = lists->tokens[id];
                if (a.n != b.n ||
                        (a.n != NO_TOKEN && memcmp(whole->text + a.at, lists->text + b.at, a.n) != 0))
                        return disagree(f, "vocab.json about the token with id", id);
        }
        for (size_t i = 0; i < n; i++)
                if (whole->merges[i].left != lists->merges[i].left ||
                        whole->merges[i].right != lists->merges[i].right)
                        return disagree(f, "merges.txt about merge", i + 1);
        return whole->n_merges == lists->n_merges
                       ? 0
                       : disagree(f, "merges.txt about the existence of merge", n + 1);
}

int tokenizer_read_whole(const H3File *file, const Vocab *lists, H3Tokenizer *t, Fault *f) {
        TokenizerPart parts[] = {{.key = "model"}, {.key = "normalizer"}, {.key = "pre_tokenizer"},
                {.key = "post_processor"}, {.key = "added_tokens"}};
        CLEANUP_FREE char *text = NULL, *room = NULL;
        Reader r = {.file = file->name, .fault = f, .vocab = &t->vocab};
        int e;

        e = tokenizer_copy(file, &text, f);
        if (e < 0)
                return e;
        room = malloc(2 * file->size + 8);
        if (!room)
                return tokenizer_no_memory(r.file, f);
        r.room = room;
        r.json = (JsonReader){.text = text, .n = file->size};
        if (reader_check(&r.json, JSON_DEPTH) < 0)
                return fail_json(&r);
        e = read_parts(&r, parts, ELEMENTSOF(parts));
        if (e < 0)
                return e;
        if (reader_end(&r.json) < 0)
                return fail_json(&r);
        e = read_model(&r, &parts[0]);
        if (e == 0 && lists)
                e = compare(&t->vocab, lists, f);
        return e < 0 ? e : read_around(&r, parts, t);
}
