/* SPDX-License-Identifier: Apache-2.0 */
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/shared/utf8.h"

/* The index of an element in the caller's array beside what it is sorted by. */
typedef struct Place {
        const char *name;
        size_t index;
} Place;

static int compare_places(const void *a, const void *b) {
        return strcmp(((const Place *) a)->name, ((const Place *) b)->name);
}

/* -EINVAL: a name twice. */
static int sort_places(Place *p, size_t n) {
        if (n > 0)
                qsort(p, n, sizeof(*p), compare_places);
        for (size_t i = 1; i < n; i++)
                if (strcmp(p[i - 1].name, p[i].name) == 0)
                        return -EINVAL;

        return 0;
}

static bool is_text(const char *s) {
        return s && utf8_is_valid(s, strlen(s));
}

/* Type, name and size by the rules that the parser has. */
static int check_tensor(const StTensor *t, const void *data) {
        uint64_t v = st_type_size(t->type);
        bool empty = false;

        if (v == 0 || t->n_dims > ST_DIMS_MAX || !is_text(t->name) || strcmp(t->name, "__metadata__") == 0)
                return -EINVAL;

        for (uint32_t i = 0; i < t->n_dims; i++) {
                if (t->shape[i] > INT64_MAX)
                        return -EINVAL;
                if (t->shape[i] == 0)
                        empty = true;
                else if (__builtin_mul_overflow(v, t->shape[i], &v) || v > INT64_MAX)
                        return -EINVAL;
        }

        if (t->size != (empty ? 0 : v) || (!data && t->size > 0))
                return -EINVAL;

        return 0;
}

static void print_string(FILE *f, const char *s) {
        (void) fputc('"', f);
        for (; *s != '\0'; s++)
                if (*s == '"' || *s == '\\')
                        (void) fprintf(f, "\\%c", *s);
                else if ((unsigned char) *s < 0x20)
                        (void) fprintf(f, "\\u%04x", (unsigned) *s);
                else
                        (void) fputc(*s, f);
        (void) fputc('"', f);
}

static int print_meta(FILE *f, const StMeta *meta, size_t n) {
        CLEANUP_FREE Place *order = NULL;
        int r;

        order = calloc(n, sizeof(*order));
        if (!order)
                return -ENOMEM;

        for (size_t i = 0; i < n; i++) {
                if (!is_text(meta[i].key) || !is_text(meta[i].value))
                        return -EINVAL;
                order[i] = (Place){meta[i].key, i};
        }

        r = sort_places(order, n);
        if (r < 0)
                return r;

        (void) fputs("\"__metadata__\":{", f);
        for (size_t i = 0; i < n; i++) {
                if (i > 0)
                        (void) fputc(',', f);
                print_string(f, meta[order[i].index].key);
                (void) fputc(':', f);
                print_string(f, meta[order[i].index].value);
        }
        (void) fputc('}', f);
        return 0;
}

static int print_tensors(FILE *f, const StTensor *tensors, const Place *order, size_t n, bool comma) {
        uint64_t begin = 0;

        for (size_t i = 0; i < n; i++) {
                const StTensor *t = &tensors[order[i].index];
                uint64_t end;

                if (__builtin_add_overflow(begin, t->size, &end) || end > INT64_MAX)
                        return -EFBIG;

                if (comma || i > 0)
                        (void) fputc(',', f);
                print_string(f, t->name);
                (void) fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", st_type_name(t->type));
                for (uint32_t d = 0; d < t->n_dims; d++)
                        (void) fprintf(f, "%s%" PRIu64, d > 0 ? "," : "", t->shape[d]);
                (void) fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, end);
                begin = end;
        }

        return 0;
}

/* The 8 length bytes and the JSON, padded. */
static int print_header(const StTensor *tensors, const Place *order, size_t n, const StMeta *meta,
        size_t n_meta, char **ret_text, size_t *ret_size) {

        CLEANUP_FREE char *text = NULL;
        uint64_t length = 0;
        size_t size = 0;
        FILE *f;
        int r = 0;

        f = open_memstream(&text, &size);
        if (!f)
                return -errno;

        (void) fwrite(&length, sizeof(length), 1, f);
        (void) fputc('{', f);
        if (n_meta > 0)
                r = print_meta(f, meta, n_meta);
        if (r >= 0)
                r = print_tensors(f, tensors, order, n, n_meta > 0);
        (void) fputc('}', f);
        for (long at = ftell(f); at >= 0 && at % 8 != 0; at++)
                (void) fputc(' ', f);

        if (ferror(f) && r >= 0)
                r = -ENOMEM;
        if (fclose(f) < 0 && r >= 0)
                r = -errno;
        if (r < 0)
                return r;
        if (size - 8 > ST_HEADER_MAX)
                return -EFBIG;

        length = htole64(size - 8);
        memcpy(text, &length, sizeof(length));
        *ret_text = STEAL_PTR(text);
        *ret_size = size;
        return 0;
}

static int write_all(int fd, const void *data, uint64_t size) {
        const char *p = data;

        while (size > 0) {
                ssize_t n = write(fd, p, size < SSIZE_MAX ? size : SSIZE_MAX);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n < 0)
                        return -errno;
                if (n == 0)
                        return -EIO;
                p += n;
                size -= (uint64_t) n;
        }

        return 0;
}

/* Checks and sorts the tensors, and makes the header. data: NULL: comes later. */
static int prepare(const StTensor *tensors, const void *const *data, size_t n, const StMeta *meta, size_t n_meta,
        Place **ret_order, char **ret_header, size_t *ret_size) {
        CLEANUP_FREE Place *order = NULL;
        int r;

        order = calloc(n > 0 ? n : 1, sizeof(*order));
        if (!order)
                return -ENOMEM;

        for (size_t i = 0; i < n; i++) {
                r = check_tensor(&tensors[i], data ? data[i] : "");
                if (r < 0)
                        return r;
                order[i] = (Place){tensors[i].name, i};
        }

        r = sort_places(order, n);
        if (r < 0)
                return r;

        r = print_header(tensors, order, n, meta, n_meta, ret_header, ret_size);
        if (r < 0)
                return r;

        *ret_order = STEAL_PTR(order);
        return 0;
}

int st_write_header(int fd, const StTensor *tensors, size_t n, const StMeta *meta, size_t n_meta) {
        CLEANUP_FREE Place *order = NULL;
        CLEANUP_FREE char *header = NULL;
        size_t size = 0;
        int r;

        r = prepare(tensors, NULL, n, meta, n_meta, &order, &header, &size);
        return r < 0 ? r : write_all(fd, header, size);
}

int st_write(int fd, const StTensor *tensors, const void *const *data, size_t n, const StMeta *meta,
        size_t n_meta) {
        CLEANUP_FREE Place *order = NULL;
        CLEANUP_FREE char *header = NULL;
        size_t size = 0;
        int r;

        r = prepare(tensors, data, n, meta, n_meta, &order, &header, &size);
        if (r < 0)
                return r;

        r = write_all(fd, header, size);
        for (size_t i = 0; i < n && r >= 0; i++)
                r = write_all(fd, data[order[i].index], tensors[order[i].index].size);

        return r;
}
