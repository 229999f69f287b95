/* SPDX-License-Identifier: Apache-2.0 */
/* The shard index. Only weight_map counts; "metadata" and whatever else a writer adds is read past. */
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/json-reader.h"
#include "service/shared/safetensors-internal.h"
#include "service/shared/safetensors.h"

/* weight_map needs two; the rest is for what is ignored. */
#define INDEX_DEPTH 16

DEFINE_CLEANUP(StIndex *, st_index_free)

typedef struct Parser {
        JsonReader json;
        const char *file_name;
        Fault *fault;
        StIndex *index;
        char *free; /* in index->text: room for the next string */
        size_t cap;
} Parser;

__attribute__((format(printf, 2, 3))) static int fail(const Parser *p, const char *format, ...) {
        char rule[600];
        va_list ap;

        va_start(ap, format);
        (void) vsnprintf(rule, sizeof(rule), format, ap);
        va_end(ap);

        return fault_set(p->fault, -EBADMSG, FAULT_INVALID_FILE, "index '%.200s': %s", p->file_name, rule);
}

static int fail_json(const Parser *p) {
        return fail(p, "malformed at byte %zu: %s", p->json.at, p->json.rule);
}

static int fail_memory(const Parser *p) {
        return fault_set(p->fault, -ENOMEM, FAULT_DOES_NOT_FIT,
                "index '%.200s': no memory for its %zu bytes", p->file_name, p->json.n);
}

/* NULL, or why a shard's name is refused: it is looked up in the folder of the index and must not lead out
 * of it. */
static const char *name_rule(const char *name) {
        if (name[0] == '\0')
                return "it is empty";
        if (strchr(name, '/'))
                return "it holds a '/': a plain name in the folder of the index expected";
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
                return "it is a folder: a plain name in the folder of the index expected";
        if (strlen(name) > NAME_MAX)
                return "it is longer than 255 bytes";
        for (const char *s = name; *s != '\0'; s++)
                if ((unsigned char) *s < 0x20 || *s == 0x7f)
                        return "it holds a control character";

        return NULL;
}

static int read_string(Parser *p, const char **ret) {
        char *s = p->free;
        size_t n;
        int r;

        r = reader_string(&p->json, s, &n);
        if (r < 0)
                return fail_json(p);

        p->free = s + n + 1;
        *ret = s;
        return 0;
}

static int read_entry(Parser *p, StIndexEntry *e) {
        const char *rule;
        int r;

        r = read_string(p, &e->tensor);
        if (r < 0)
                return r;
        if (reader_take(&p->json, ':') < 0)
                return fail_json(p);

        if (reader_peek(&p->json) != '"')
                return fail(
                        p, "tensor '%.200s': the name of a file expected (byte %zu)", e->tensor, p->json.at);
        r = read_string(p, &e->file);
        if (r < 0)
                return r;

        rule = name_rule(e->file);
        return rule ? fail(p, "tensor '%.200s': file name '%.200s' is refused: %s", e->tensor, e->file, rule)
                    : 0;
}

static int read_weight_map(Parser *p) {
        StIndex *x = p->index;
        bool first = true;
        int r;

        if (reader_take(&p->json, '{') < 0)
                return fail(
                        p, "'weight_map' must be an object of tensor and file names (byte %zu)", p->json.at);

        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                if (st_grow((void **) &x->entries, x->n_entries, &p->cap, sizeof(*x->entries)) < 0)
                        return fail_memory(p);

                r = read_entry(p, &x->entries[x->n_entries]);
                if (r < 0)
                        return r;
                x->n_entries++;
        }

        return r < 0 ? fail_json(p) : 0;
}

static int read_index(Parser *p) {
        bool first = true, seen = false;
        const char *key = NULL;
        int r;

        if (reader_take(&p->json, '{') < 0)
                return fail(p, "an object with 'weight_map' expected (byte %zu)", p->json.at);

        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                r = read_string(p, &key);
                if (r < 0)
                        return r;
                if (reader_take(&p->json, ':') < 0)
                        return fail_json(p);

                if (strcmp(key, "weight_map") != 0) {
                        if (reader_skip(&p->json) < 0)
                                return fail_json(p);
                        continue;
                }

                if (seen)
                        return fail(p, "duplicate key 'weight_map'");
                seen = true;
                r = read_weight_map(p);
                if (r < 0)
                        return r;
        }

        if (r < 0 || reader_end(&p->json) < 0)
                return fail_json(p);

        return seen ? 0 : fail(p, "'weight_map' is missing");
}

static int compare_entries(const void *a, const void *b) {
        return strcmp(((const StIndexEntry *) a)->tensor, ((const StIndexEntry *) b)->tensor);
}

static int compare_files(const void *a, const void *b) {
        return strcmp(*(const char *const *) a, *(const char *const *) b);
}

static int sort_entries(const Parser *p) {
        StIndex *x = p->index;

        if (x->n_entries == 0)
                return 0;

        qsort(x->entries, x->n_entries, sizeof(*x->entries), compare_entries);
        for (size_t i = 1; i < x->n_entries; i++)
                if (strcmp(x->entries[i - 1].tensor, x->entries[i].tensor) == 0)
                        return fail(p, "tensor '%.200s': duplicate name", x->entries[i].tensor);

        x->files = reallocarray(NULL, x->n_entries, sizeof(*x->files));
        if (!x->files)
                return fail_memory(p);

        for (size_t i = 0; i < x->n_entries; i++)
                x->files[i] = x->entries[i].file;
        qsort(x->files, x->n_entries, sizeof(*x->files), compare_files);

        x->n_files = 1;
        for (size_t i = 1; i < x->n_entries; i++)
                if (strcmp(x->files[x->n_files - 1], x->files[i]) != 0)
                        x->files[x->n_files++] = x->files[i];

        return 0;
}

int st_index_parse(const void *json, uint64_t size, const char *file_name, StIndex **ret, Fault *f) {
        CLEANUP(st_index_freep) StIndex *x = NULL;
        Parser p = {.json = {.text = json, .n = size}, .file_name = file_name, .fault = f};
        const char *what;
        int r;

        if (size > ST_HEADER_MAX)
                return fail(&p, "it has more than %u bytes", ST_HEADER_MAX);

        what = st_foreign_format(json, size);
        if (what && reader_peek(&p.json) != '{')
                return fail(&p, "it is not a shard index, it looks like %s", what);

        r = reader_check(&p.json, INDEX_DEPTH);
        if (r < 0)
                return fail_json(&p);

        x = calloc(1, sizeof(*x));
        if (!x || !(x->text = malloc(size > 0 ? size : 1)))
                return fail_memory(&p);
        p.index = x;
        p.free = x->text;

        r = read_index(&p);
        if (r < 0)
                return r;

        r = sort_entries(&p);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(x);
        return 0;
}

StIndex *st_index_free(StIndex *x) {
        if (!x)
                return NULL;

        free(x->entries);
        free(x->files);
        free(x->text);
        free(x);
        return NULL;
}

const char *st_index_file_of(const StIndex *x, const char *tensor) {
        StIndexEntry key = {.tensor = tensor}, *e;

        e = x->n_entries > 0 ? bsearch(&key, x->entries, x->n_entries, sizeof(key), compare_entries) : NULL;
        return e ? e->file : NULL;
}
