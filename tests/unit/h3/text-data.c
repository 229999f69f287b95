/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/text-data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

static bool is_in(const char *folder, const char *name) {
        char path[4096];

        if (!folder)
                return false;
        (void) snprintf(path, sizeof(path), "%s/%s", folder, name);
        return access(path, R_OK) == 0;
}

static const char *folder_of(const char *name) {
        return is_in(getenv("LATENT_TEST_DATA"), name) ? getenv("LATENT_TEST_DATA")
                                                       : getenv("LATENT_TEST_TEXT");
}

bool text_exists(const char *name) {
        return is_in(folder_of(name), name);
}

char *text_read(const char *name, uint64_t *ret_size) {
        return (char *) golden_read(folder_of(name), name, ret_size);
}

json_t *text_json(const char *name) {
        CLEANUP_FREE char *text = NULL;
        json_error_t e;
        uint64_t size;
        json_t *j;

        text = text_read(name, &size);
        j = json_loadb(text, size, JSON_ALLOW_NUL, &e);
        if (!j)
                fail_msg("%s:%d: %s", name, e.line, e.text);
        return j;
}

Golden *text_golden(const char *name) {
        Golden *g = calloc(1, sizeof(*g));
        uint64_t size, header_size;
        Fault f = {};

        assert_non_null(g);
        g->bytes = (uint8_t *) text_read(name, &size);
        if (st_header_size(g->bytes, size, size, name, &header_size, &f) < 0 ||
                st_header_parse(g->bytes, header_size, size, name, &g->header, &f) < 0)
                fail_msg("%s: %s", name, f.text);
        return g;
}

void text_files_set(TextFiles *t, const char *name, char *content) {
        size_t i;

        for (i = 0; i < t->n; i++)
                if (strcmp(t->files[i].name, name) == 0)
                        break;
        if (i < t->n)
                free(t->bytes[i]);
        if (!content) {
                assert_true(i < t->n);
                t->n--;
                t->files[i] = t->files[t->n];
                t->bytes[i] = t->bytes[t->n];
                return;
        }
        assert_true(i < TEXT_FILES_MAX);
        t->bytes[i] = content;
        t->files[i] = (H3File){.name = name, .bytes = content, .size = strlen(content)};
        t->n += i == t->n;
}

const char *text_files_get(const TextFiles *t, const char *name) {
        for (size_t i = 0; i < t->n; i++)
                if (strcmp(t->files[i].name, name) == 0)
                        return t->bytes[i];
        fail_msg("no %s", name);
        return NULL;
}

TextFiles *text_files_published(void) {
        TextFiles *t = calloc(1, sizeof(*t));
        uint64_t size;

        assert_non_null(t);
        text_files_set(t, "vocab.json", text_read("text/tokenizer/vocab.json", &size));
        text_files_set(t, "merges.txt", text_read("text/tokenizer/merges.txt", &size));
        text_files_set(t, "tokenizer_config.json", text_read("text/tokenizer/tokenizer_config.json", &size));
        return t;
}

TextFiles *text_files_demo(void) {
        static const char *const names[] = {
                "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"};
        const char *source = getenv("LATENT_SOURCE_DIR");
        TextFiles *t = calloc(1, sizeof(*t));
        char folder[4096];
        uint64_t size;

        assert_non_null(t);
        if (!source) {
                free(t);
                skip();
        }
        (void) snprintf(folder, sizeof(folder), "%s/tests/demo-model/tokenizer", source);
        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                text_files_set(t, names[i], (char *) golden_read(folder, names[i], &size));
        return t;
}

TextFiles *text_files_free(TextFiles *t) {
        if (!t)
                return NULL;
        for (size_t i = 0; i < t->n; i++)
                free(t->bytes[i]);
        free(t);
        return NULL;
}

void text_files_freep(TextFiles **t) {
        (void) text_files_free(*t);
}

H3Tokenizer *text_open(const TextFiles *t) {
        H3Tokenizer *tokenizer = NULL;
        Fault f = {};

        if (h3_tokenizer_open(t->files, t->n, &tokenizer, &f) < 0)
                fail_msg("%s: %s", f.name, f.text);
        return tokenizer;
}
