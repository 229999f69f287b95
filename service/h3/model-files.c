/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/suffix.h"

/* From files in memory to one table of tensors. Bytes are copied once before they are looked at: the writer
 * of a file may be hostile and still at work. */

#define JSON_MAX (64u << 20) /* of an index or a config: 100 bytes for each of half a million tensors */
#define START_BYTES 512      /* enough to recognise foreign formats */

DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

typedef enum FileKind {
        FILE_OTHER,
        FILE_TENSORS,
        FILE_INDEX,
        FILE_CONFIG,
} FileKind;

static FileKind file_kind(const H3File *file) {
        if (strcmp(file->name, "config.json") == 0)
                return FILE_CONFIG;
        if (has_suffix(file->name, ".index.json"))
                return FILE_INDEX;
        return has_suffix(file->name, ".safetensors") ? FILE_TENSORS : FILE_OTHER;
}

static int no_memory(const char *what, Fault *f) {
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for %s; free some and try again.", what);
}

static int copy_json(const H3File *file, char **ret, Fault *f) {
        char *copy;

        if (file->size > JSON_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%.200s has %llu bytes; expected at most %u.", file->name,
                        (unsigned long long) file->size, JSON_MAX);
        copy = malloc(file->size + 1);
        if (!copy)
                return no_memory(file->name, f);
        memcpy(copy, file->bytes, file->size);
        copy[file->size] = '\0';
        *ret = copy;
        return 0;
}

static int parse_header(const H3File *file, StHeader **ret, Fault *f) {
        CLEANUP_FREE void *copy = NULL;
        uint8_t start[START_BYTES];
        size_t n = file->size < sizeof(start) ? file->size : sizeof(start);
        uint64_t size;
        int r;

        memcpy(start, file->bytes, n);
        r = st_header_size(start, n, file->size, file->name, &size, f);
        if (r < 0)
                return r;
        if (size > file->size) /* promised by the parser; what follows reads this much */
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%.200s: the header is longer than the file.", file->name);

        copy = malloc(size);
        if (!copy)
                return no_memory(file->name, f);
        memcpy(copy, file->bytes, size);
        return st_header_parse(copy, size, file->size, file->name, ret, f);
}

static const H3File *find_file(const H3File *files, size_t n_files, const char *name) {
        for (size_t i = 0; i < n_files; i++)
                if (file_kind(files + i) == FILE_TENSORS && strcmp(files[i].name, name) == 0)
                        return files + i;
        return NULL;
}

static int compare_names(const void *a, const void *b) {
        const H3Tensor *x = a, *y = b;

        return strcmp(x->entry->name, y->entry->name);
}

static void add_tensor(H3TensorSet *s, const StTensor *t, const H3File *file) {
        s->tensors[s->n_tensors++] = (H3Tensor){
                .entry = t,
                .data = (const uint8_t *) file->bytes + t->offset,
                .file = file->name,
        };
}

static int reserve(H3TensorSet *s, size_t n_headers, size_t n_tensors, Fault *f) {
        s->headers = calloc(n_headers, sizeof(*s->headers));
        if (!s->headers)
                return no_memory("the list of shards", f);
        if (n_tensors > 0) {
                s->tensors = calloc(n_tensors, sizeof(*s->tensors));
                if (!s->tensors)
                        return no_memory("the list of tensors", f);
        }
        return 0;
}

/* Every name that the index names must be there, in the file it names: a copy in another shard does not
 * count. */
static int read_indexed(
        H3TensorSet *s, const H3File *files, size_t n_files, const char *index_name, Fault *f) {
        const StIndex *x = s->index;
        char absent[500] = "";
        size_t n = 0, count = 0;
        int r;

        for (size_t i = 0; i < x->n_files; i++)
                if (!find_file(files, n_files, x->files[i])) {
                        count++;
                        if (n < sizeof(absent) - 1)
                                n += (size_t) snprintf(
                                        absent + n, sizeof(absent) - n, "%s%s", n ? ", " : "", x->files[i]);
                }
        if (count > 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "%.200s names %zu of its %zu files that are not there: %s. Give all shards of the "
                        "model.",
                        index_name, count, x->n_files, absent);

        r = reserve(s, x->n_files, x->n_entries, f);
        if (r < 0)
                return r;
        for (size_t i = 0; i < x->n_files; i++) {
                r = parse_header(find_file(files, n_files, x->files[i]), s->headers + i, f);
                if (r < 0)
                        return r;
                s->n_headers++;
        }
        for (size_t i = 0; i < x->n_entries; i++) {
                const StIndexEntry *e = x->entries + i;
                const StTensor *t = NULL;

                for (size_t j = 0; j < x->n_files && !t; j++)
                        if (strcmp(x->files[j], e->file) == 0)
                                t = st_header_find(s->headers[j], e->tensor);
                if (!t)
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "%.200s says that tensor %.200s is in %.200s, but it is not. Load the files "
                                "of one "
                                "download.",
                                index_name, e->tensor, e->file);
                add_tensor(s, t, find_file(files, n_files, e->file));
        }
        return 0;
}

static int read_plain(H3TensorSet *s, const H3File *files, size_t n_files, Fault *f) {
        CLEANUP_FREE const H3File **sources = NULL;
        size_t n = 0, total = 0;
        int r;

        r = reserve(s, n_files, 0, f);
        if (r < 0)
                return r;
        sources = calloc(n_files, sizeof(*sources));
        if (!sources)
                return no_memory("the list of files", f);

        for (size_t i = 0; i < n_files; i++) {
                if (file_kind(files + i) != FILE_TENSORS)
                        continue;
                r = parse_header(files + i, s->headers + n, f);
                if (r < 0)
                        return r;
                sources[n] = files + i;
                total += s->headers[n]->n_tensors;
                s->n_headers = ++n;
        }

        s->tensors = calloc(total ? total : 1, sizeof(*s->tensors));
        if (!s->tensors)
                return no_memory("the list of tensors", f);
        for (size_t i = 0; i < n; i++)
                for (size_t j = 0; j < s->headers[i]->n_tensors; j++)
                        add_tensor(s, s->headers[i]->tensors + j, sources[i]);
        return 0;
}

static int check_distinct(const H3TensorSet *s, Fault *f) {
        for (size_t i = 1; i < s->n_tensors; i++) {
                const H3Tensor *a = s->tensors + i - 1, *b = s->tensors + i;

                if (strcmp(a->entry->name, b->entry->name) == 0)
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "Tensor %.200s is in %.200s and in %.200s and no index says which one "
                                "counts. Give the "
                                "files of one model, or its *.index.json too.",
                                a->entry->name, a->file, b->file);
        }
        return 0;
}

/* The index and the config among the files; a second one of a kind, or no tensors at all, is refused. */
static int sort_files(
        const H3File *files, size_t n_files, const H3File **ret_index, const H3File **ret_config, Fault *f) {
        size_t shards = 0;

        for (size_t i = 0; i < n_files; i++) {
                FileKind kind = file_kind(files + i);
                const H3File **slot = kind == FILE_INDEX    ? ret_index
                                      : kind == FILE_CONFIG ? ret_config
                                                            : NULL;

                shards += kind == FILE_TENSORS;
                if (kind == FILE_TENSORS && find_file(files, i, files[i].name))
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL, "File %.200s was given twice.",
                                files[i].name);
                if (!slot)
                        continue;
                if (*slot)
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "There are two files of one kind, %.200s and %.200s; give those of one "
                                "model.",
                                (*slot)->name, files[i].name);
                *slot = files + i;
        }
        if (shards == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "No *.safetensors file among the %zu files given; a model is one or more of them.",
                        n_files);
        return 0;
}

int h3_tensor_set_new(const H3File *files, size_t n_files, H3TensorSet **ret, Fault *f) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        const H3File *index = NULL, *config = NULL;
        int r;

        r = sort_files(files, n_files, &index, &config, f);
        if (r < 0)
                return r;
        s = calloc(1, sizeof(*s));
        if (!s)
                return no_memory("the model", f);

        if (config) {
                r = copy_json(config, &s->config, f);
                if (r < 0)
                        return r;
                s->config_size = config->size;
        }
        if (index) {
                CLEANUP_FREE char *json = NULL;

                r = copy_json(index, &json, f);
                if (r < 0)
                        return r;
                r = st_index_parse(json, index->size, index->name, &s->index, f);
                if (r < 0)
                        return r;
                r = read_indexed(s, files, n_files, index->name, f);
        } else
                r = read_plain(s, files, n_files, f);
        if (r < 0)
                return r;

        if (s->n_tensors > 0)
                qsort(s->tensors, s->n_tensors, sizeof(*s->tensors), compare_names);
        r = check_distinct(s, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(s);
        return 0;
}

H3TensorSet *h3_tensor_set_free(H3TensorSet *s) {
        if (!s)
                return NULL;
        for (size_t i = 0; i < s->n_headers; i++)
                (void) st_header_free(s->headers[i]);
        free(s->headers);
        free(s->tensors);
        (void) st_index_free(s->index);
        free(s->config);
        free(s);
        return NULL;
}

H3Tensor *h3_tensor_set_find(const H3TensorSet *s, const char *name) {
        StTensor entry = {.name = name};
        H3Tensor key = {.entry = &entry};

        return s->n_tensors ? bsearch(&key, s->tensors, s->n_tensors, sizeof(key), compare_names) : NULL;
}
