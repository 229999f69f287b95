/* SPDX-License-Identifier: Apache-2.0 */
/* Added tokens, and what tokenizer.json says of normaliser and word pattern: small parts, read as trees. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/tokenizer-private.h"
#include "service/shared/cleanup.h"

/* A tree takes up to 75 bytes for each of the text. */
#define CONFIG_MAX (UINT64_C(1) << 20)

const char tokenizer_word_pattern[] =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

static void json_unref(json_t **j) {
        json_decref(*j);
}

static int parse(const char *file, const char *json, size_t n, json_t **ret, Fault *f) {
        json_error_t e;

        *ret = json_loadb(json, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &e);
        return *ret ? 0 : tokenizer_fail(file, f, "malformed at byte %d: %.200s", e.position, e.text);
}

static bool is_string(const json_t *object, const char *key, const char *expected) {
        const char *s = json_string_value(json_object_get(object, key));

        return s && strcmp(s, expected) == 0;
}

static bool is_off(const json_t *object, const char *key) {
        const json_t *v = json_object_get(object, key);

        return !v || json_is_false(v) || json_is_null(v);
}

static int unsupported(const char *file, Fault *f, const char *what, const char *is, const char *expected) {
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "'%.200s': the %s is %.300s; only %s is supported.", file, what, is, expected);
}

int tokenizer_check_normalizer(const char *file, const TokenizerPart *part, Fault *f) {
        CLEANUP(json_unref) json_t *j = NULL;
        int r;

        if (!part->json)
                return unsupported(file, f, "normaliser", "not there", "NFC");
        r = parse(file, part->json, part->n, &j, f);
        if (r < 0)
                return r;
        if (is_string(j, "type", "NFC"))
                return 0;
        return unsupported(file, f, "normaliser",
                json_is_string(json_object_get(j, "type")) ? json_string_value(json_object_get(j, "type"))
                                                           : "not named",
                "NFC");
}

static int check_split(const char *file, const json_t *split, Fault *f) {
        const json_t *pattern = json_object_get(json_object_get(split, "pattern"), "Regex");

        if (!is_string(split, "type", "Split") || !json_is_string(pattern) ||
                !is_string(split, "behavior", "Isolated") || !is_off(split, "invert"))
                return unsupported(file, f, "first pre-tokenizer", "another one",
                        "a Split by a Regex with the behaviour Isolated");
        if (strcmp(json_string_value(pattern), tokenizer_word_pattern) != 0)
                return unsupported(
                        file, f, "word pattern", json_string_value(pattern), "the one of Qwen2 and Qwen3");
        return 0;
}

int tokenizer_check_words(const char *file, const TokenizerPart *part, Fault *f) {
        CLEANUP(json_unref) json_t *j = NULL;
        const json_t *list, *bytes;
        int r;

        if (!part->json)
                return unsupported(file, f, "pre-tokenizer", "not there", "a Split, then ByteLevel");
        r = parse(file, part->json, part->n, &j, f);
        if (r < 0)
                return r;
        list = json_object_get(j, "pretokenizers");
        if (!is_string(j, "type", "Sequence") || json_array_size(list) != 2)
                return unsupported(
                        file, f, "pre-tokenizer", "no sequence of two", "a Split, then ByteLevel");
        r = check_split(file, json_array_get(list, 0), f);
        if (r < 0)
                return r;
        bytes = json_array_get(list, 1);
        if (!is_string(bytes, "type", "ByteLevel") || !is_off(bytes, "add_prefix_space") ||
                !json_is_false(json_object_get(bytes, "use_regex")))
                return unsupported(file, f, "second pre-tokenizer", "another one",
                        "ByteLevel with add_prefix_space and use_regex false");
        return 0;
}

/* One that adds tokens is another tokenizer; ByteLevel moves offsets only. */
int tokenizer_check_processor(const char *file, const TokenizerPart *part, Fault *f) {
        CLEANUP(json_unref) json_t *j = NULL;
        int r;

        if (!part->json)
                return 0;
        r = parse(file, part->json, part->n, &j, f);
        if (r < 0)
                return r;
        if (json_is_null(j) || is_string(j, "type", "ByteLevel"))
                return 0;
        return unsupported(file, f, "post-processor",
                json_is_string(json_object_get(j, "type")) ? json_string_value(json_object_get(j, "type"))
                                                           : "not named",
                "none, or ByteLevel,");
}

/* The added token of that content, or NULL. */
static const AddedToken *find_added(const H3Tokenizer *t, const char *content, size_t n) {
        for (size_t i = 0; i < t->n_added; i++) {
                TokenSpan s = t->added[i].content;

                if (s.n == n && memcmp(t->vocab.text + s.at, content, n) == 0)
                        return &t->added[i];
        }
        return NULL;
}

/* id: NO_TOKEN for the next free one. */
static int add_token(H3Tokenizer *t, const char *file, const char *content, uint64_t id, Fault *f) {
        size_t n = strlen(content);
        const AddedToken *known = find_added(t, content, n);
        uint32_t in_vocab = vocab_find(&t->vocab, content, n);
        int r;

        if (n == 0 || n > ADDED_TOKEN_BYTES_MAX)
                return tokenizer_fail(
                        file, f, "an added token has %zu bytes; expected 1 to %u", n, ADDED_TOKEN_BYTES_MAX);
        if (known && (id == NO_TOKEN || id == known->id))
                return 0;
        if (id == NO_TOKEN)
                id = in_vocab != NO_TOKEN ? in_vocab : t->vocab.n_ids;
        if (known || (in_vocab != NO_TOKEN && in_vocab != id))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "'%.200s': the added token '%.100s' has the id %llu here and %u elsewhere. Use the "
                        "files of one model.",
                        file, content, (unsigned long long) id, known ? known->id : in_vocab);
        if (id >= H3_TOKEN_IDS_MAX || t->n_added >= ADDED_TOKENS_MAX)
                return tokenizer_fail(file, f,
                        "the added token '%.100s' has the id %llu and %zu are before it; ids are below %u, "
                        "and at most %u tokens are added",
                        content, (unsigned long long) id, t->n_added, H3_TOKEN_IDS_MAX, ADDED_TOKENS_MAX);
        r = vocab_add(&t->vocab, content, n, id);
        if (r == -EEXIST)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "'%.200s': the added token '%.100s' has the id %llu, which another token has. Use "
                        "the files of one model.",
                        file, content, (unsigned long long) id);
        if (r == -E2BIG)
                return tokenizer_fail(file, f, "the tokens have too much text");
        if (r < 0 || tokenizer_grow(&t->added, t->n_added, &t->added_cap, sizeof(*t->added)) < 0)
                return tokenizer_no_memory(file, f);
        t->added[t->n_added++] = (AddedToken){.id = (uint32_t) id, .content = t->vocab.tokens[id]};
        return 0;
}

/* Flags that change where a token matches; the Qwen family has none of them. */
static int add_object(H3Tokenizer *t, const char *file, const json_t *token, uint64_t id, Fault *f) {
        static const char *const flags[] = {"lstrip", "rstrip", "single_word", "normalized"};
        const char *content = json_string_value(json_object_get(token, "content"));

        if (!content)
                return tokenizer_fail(file, f, "an added token has no 'content'");
        for (size_t i = 0; i < ELEMENTSOF(flags); i++)
                if (!is_off(token, flags[i]))
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "'%.200s': the added token '%.100s' has %s; only added tokens without it "
                                "are supported.",
                                file, content, flags[i]);
        return add_token(t, file, content, id, f);
}

int tokenizer_add_list(H3Tokenizer *t, const char *file, const TokenizerPart *part, Fault *f) {
        CLEANUP(json_unref) json_t *j = NULL;
        const json_t *token;
        size_t i;
        int r;

        if (!part->json)
                return 0;
        r = parse(file, part->json, part->n, &j, f);
        if (r < 0)
                return r;
        if (!json_is_array(j))
                return tokenizer_fail(file, f, "'added_tokens' is not a list");
        json_array_foreach(j, i, token) {
                const json_t *id = json_object_get(token, "id");

                if (!json_is_integer(id) || json_integer_value(id) < 0)
                        return tokenizer_fail(file, f, "added token %zu has no 'id' from 0 up", i);
                r = add_object(t, file, token, (uint64_t) json_integer_value(id), f);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int load(const H3File *file, json_t **ret, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        int r;

        if (file->size > CONFIG_MAX)
                return tokenizer_fail(file->name, f, "%llu bytes; expected at most %llu",
                        (unsigned long long) file->size, (unsigned long long) CONFIG_MAX);
        r = tokenizer_copy(file, &text, f);
        if (r < 0)
                return r;
        r = parse(file->name, text, file->size, ret, f);
        if (r < 0)
                return r;
        return json_is_object(*ret) ? 0 : tokenizer_fail(file->name, f, "not an object");
}

/* added_tokens.json: content to id. */
static int read_added_file(H3Tokenizer *t, const H3File *file, Fault *f) {
        CLEANUP(json_unref) json_t *j = NULL;
        const char *content;
        json_t *id;
        int r;

        r = load(file, &j, f);
        if (r < 0)
                return r;
        json_object_foreach(j, content, id) {
                if (!json_is_integer(id) || json_integer_value(id) < 0)
                        return tokenizer_fail(file->name, f, "'%.100s' has no id from 0 up", content);
                r = add_token(t, file->name, content, (uint64_t) json_integer_value(id), f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* added_tokens_decoder: id to token. */
static int read_decoder(H3Tokenizer *t, const char *file, json_t *decoder, Fault *f) {
        const char *key;
        json_t *token;
        int r;

        if (decoder && !json_is_object(decoder))
                return tokenizer_fail(file, f, "'added_tokens_decoder' is not an object");
        json_object_foreach(decoder, key, token) {
                char *end;
                unsigned long long id;

                errno = 0;
                id = strtoull(key, &end, 10);
                if (key[0] < '0' || key[0] > '9' || *end != '\0' || errno != 0 || id >= NO_TOKEN)
                        return tokenizer_fail(file, f, "added_tokens_decoder: '%.100s' is no token id", key);
                r = add_object(t, file, token, id, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* A token without an id: a string, or an object with its content. */
static int add_nameless(H3Tokenizer *t, const char *file, const char *key, const json_t *token, Fault *f) {
        if (json_is_null(token))
                return 0;
        if (json_is_string(token))
                return add_token(t, file, json_string_value(token), NO_TOKEN, f);
        if (json_is_object(token))
                return add_object(t, file, token, NO_TOKEN, f);
        return tokenizer_fail(file, f, "'%s' is no token", key);
}

/* Special tokens that no list gave an id get the next ones, in the order in which transformers looks. */
static int read_nameless(H3Tokenizer *t, const char *file, const json_t *config, Fault *f) {
        static const char *const single[] = {
                "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};
        static const char *const lists[] = {"additional_special_tokens", "extra_special_tokens"};
        const json_t *token;
        size_t k;
        int r;

        for (size_t i = 0; i < ELEMENTSOF(single); i++) {
                token = json_object_get(config, single[i]);
                r = token ? add_nameless(t, file, single[i], token, f) : 0;
                if (r < 0)
                        return r;
        }
        for (size_t i = 0; i < ELEMENTSOF(lists); i++)
                json_array_foreach(json_object_get(config, lists[i]), k, token) {
                        r = add_nameless(t, file, lists[i], token, f);
                        if (r < 0)
                                return r;
                }
        return 0;
}

static int check_config(const char *file, const json_t *config, bool whole, Fault *f) {
        static const char *const off[] = {"add_prefix_space", "add_bos_token", "add_eos_token"};
        const char *class = json_string_value(json_object_get(config, "tokenizer_class"));

        for (size_t i = 0; i < ELEMENTSOF(off); i++)
                if (!is_off(config, off[i]))
                        return unsupported(file, f, off[i], "on", "false");
        /* tokenizer.json says itself what it is. */
        if (!whole && class && strcmp(class, "Qwen2Tokenizer") != 0 &&
                strcmp(class, "Qwen2TokenizerFast") != 0)
                return unsupported(file, f, "tokenizer_class", class, "Qwen2Tokenizer");
        return 0;
}

int tokenizer_read_added(H3Tokenizer *t, const TokenizerFiles *files, Fault *f) {
        CLEANUP(json_unref) json_t *config = NULL;
        int r;

        if (files->added) {
                r = read_added_file(t, files->added, f);
                if (r < 0)
                        return r;
        }
        if (!files->config)
                return 0;
        r = load(files->config, &config, f);
        if (r < 0)
                return r;
        r = check_config(files->config->name, config, files->tokenizer, f);
        if (r < 0)
                return r;
        r = read_decoder(t, files->config->name, json_object_get(config, "added_tokens_decoder"), f);
        return r < 0 ? r : read_nameless(t, files->config->name, config, f);
}
