/* SPDX-License-Identifier: Apache-2.0 */
/* The header parser. Reading keeps what an entry says; st_header_check() then judges names and numbers, so
 * that a name that is there twice is reported as that and not as the overlap that follows from it. */
#include "service/shared/safetensors.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/json-reader.h"
#include "service/shared/safetensors-internal.h"

/* The root, an entry and its lists take three; one more, and a list in the wrong place is reported with its
 * tensor. */
#define HEADER_DEPTH 4

#define TYPES_TEXT "BOOL U8 I8 U16 I16 F16 BF16 U32 I32 F32 U64 I64 F64 F8_E4M3 F8_E5M2 F8_E8M0"

DEFINE_CLEANUP(StHeader *, st_header_free)

typedef struct Parser {
        JsonReader json;
        const char *file_name;
        Fault *fault;
        StHeader *header;
        char *free; /* in header->text: room for the next string */
        size_t tensors_cap, meta_cap;
        bool has_meta;
} Parser;

static uint64_t read_length(const void *p) {
        uint64_t v;

        memcpy(&v, p, sizeof(v));
        return le64toh(v);
}

static int fail_foreign(const char *file_name, const char *what, Fault *f) {
        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                "file '%.200s' is not a safetensors file, it looks like %s", file_name, what);
}

int st_header_size(const void *start, size_t n, uint64_t file_size, const char *file_name,
        uint64_t *ret_size, Fault *f) {
        const char *what;
        uint64_t length;

        if (n < 8 && n < file_size)
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "%zu bytes of file '%.200s' given, 8 needed", n,
                        file_name);

        what = st_foreign_format(start, n);
        length = n >= 8 ? read_length(start) : 0;

        /* The magic bytes of another format may be a length by chance: then what follows decides. */
        if (what && (n < 8 || length > ST_HEADER_MAX || length > file_size - 8 ||
                            (n > 8 && ((const char *) start)[8] != '{')))
                return fail_foreign(file_name, what, f);

        if (file_size < 8)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s' is truncated: it has %" PRIu64 " bytes, the length of a safetensors "
                        "header alone takes 8",
                        file_name, file_size);
        if (length > ST_HEADER_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s': the header length is %" PRIu64
                        " bytes, at most %u are allowed; it is "
                        "not a safetensors file or it is damaged",
                        file_name, length, ST_HEADER_MAX);
        if (length > file_size - 8)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s' is truncated: its header ends at byte %" PRIu64
                        ", expected at least as "
                        "many bytes, it has %" PRIu64 " (incomplete download?)",
                        file_name, length + 8, file_size);
        if (length < 2)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s': the header length is %" PRIu64
                        " bytes, at least 2 expected (\"{}\")",
                        file_name, length);

        *ret_size = length + 8;
        return 0;
}

static int fail_json(Parser *p) {
        return fault_set(p->fault, -EBADMSG, FAULT_INVALID_FILE,
                "file '%.200s': malformed header at byte %zu: %s", p->file_name, p->json.at + 8,
                p->json.rule);
}

__attribute__((format(printf, 3, 4))) static int fail_tensor(
        const Parser *p, const char *tensor, const char *format, ...) {
        char rule[400];
        va_list ap;

        va_start(ap, format);
        (void) vsnprintf(rule, sizeof(rule), format, ap);
        va_end(ap);

        return fault_set(p->fault, -EBADMSG, FAULT_INVALID_FILE, "file '%.200s': tensor '%.200s': %s",
                p->file_name, tensor, rule);
}

static int fail_memory(const Parser *p) {
        return fault_set(p->fault, -ENOMEM, FAULT_DOES_NOT_FIT,
                "file '%.200s': no memory for its header of %zu bytes", p->file_name, p->json.n);
}

/* Reads a string into the header's text. It stays there if `keep`, else until the next string. */
static int read_string(Parser *p, bool keep, const char **ret) {
        char *s = p->free;
        size_t n;
        int r;

        r = reader_string(&p->json, s, &n);
        if (r < 0)
                return fail_json(p);

        if (keep)
                p->free = s + n + 1;
        *ret = s;
        return 0;
}

static int read_member(Parser *p, bool keep, const char **ret_key) {
        int r;

        r = read_string(p, keep, ret_key);
        if (r < 0)
                return r;

        return reader_take(&p->json, ':') < 0 ? fail_json(p) : 0;
}

static int read_shape(Parser *p, StTensor *t) {
        bool first = true;
        uint64_t v;
        int r;

        if (reader_take(&p->json, '[') < 0)
                return fail_tensor(
                        p, t->name, "'shape' must be a list of integers (byte %zu)", p->json.at + 8);

        while ((r = reader_next(&p->json, ']', &first)) > 0) {
                if (reader_integer(&p->json, &v) < 0)
                        return fail_tensor(
                                p, t->name, "'shape' at byte %zu: %s", p->json.at + 8, p->json.rule);
                if (t->n_dims == ST_DIMS_MAX)
                        return fail_tensor(p, t->name, "'shape' has more than %d dimensions", ST_DIMS_MAX);
                t->shape[t->n_dims++] = v;
        }

        return r < 0 ? fail_json(p) : 0;
}

/* Keeps the two offsets in t->offset and t->size until check_entry() makes the final values of them. */
static int read_offsets(Parser *p, StTensor *t) {
        uint64_t v[2];
        bool first = true;
        size_t n = 0;
        int r;

        if (reader_take(&p->json, '[') < 0)
                return fail_tensor(p, t->name, "'data_offsets' must be a list of two integers (byte %zu)",
                        p->json.at + 8);

        while ((r = reader_next(&p->json, ']', &first)) > 0) {
                if (n == 2)
                        return fail_tensor(p, t->name, "'data_offsets' has more than two numbers");
                if (reader_integer(&p->json, &v[n]) < 0)
                        return fail_tensor(
                                p, t->name, "'data_offsets' at byte %zu: %s", p->json.at + 8, p->json.rule);
                n++;
        }

        if (r < 0)
                return fail_json(p);
        if (n != 2)
                return fail_tensor(p, t->name, "'data_offsets' has %zu numbers, two expected", n);

        t->offset = v[0];
        t->size = v[1];
        return 0;
}

static int read_type(Parser *p, StTensor *t) {
        const char *name = NULL;
        int r;

        if (reader_peek(&p->json) != '"')
                return fail_tensor(p, t->name, "'dtype' must be a string (byte %zu)", p->json.at + 8);

        r = read_string(p, false, &name);
        if (r < 0)
                return r;

        t->type = st_type_parse(name);
        if (t->type == ST_TYPE_INVALID)
                return fail_tensor(
                        p, t->name, "dtype '%.40s' is not supported, known are: " TYPES_TEXT, name);

        return 0;
}

static int read_entry(Parser *p, const char *name, StTensor *ret) {
        static const char *const keys[] = {"dtype", "shape", "data_offsets"};
        static int (*const readers[])(Parser *, StTensor *) = {read_type, read_shape, read_offsets};
        StTensor t = {.name = name, .type = ST_TYPE_INVALID};
        bool seen[ELEMENTSOF(keys)] = {}, first = true;
        const char *key = NULL;
        size_t k;
        int r;

        if (reader_take(&p->json, '{') < 0)
                return fail_tensor(p, name,
                        "an object with 'dtype', 'shape' and 'data_offsets' expected (byte %zu)",
                        p->json.at + 8);

        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                r = read_member(p, false, &key);
                if (r < 0)
                        return r;

                for (k = 0; k < ELEMENTSOF(keys) && strcmp(key, keys[k]) != 0;)
                        k++;
                if (k == ELEMENTSOF(keys))
                        return fail_tensor(p, name,
                                "unknown key '%.80s', 'dtype', 'shape' and 'data_offsets' expected", key);
                if (seen[k])
                        return fail_tensor(p, name, "duplicate key '%s'", keys[k]);
                seen[k] = true;

                r = readers[k](p, &t);
                if (r < 0)
                        return r;
        }
        if (r < 0)
                return fail_json(p);

        for (k = 0; k < ELEMENTSOF(keys); k++)
                if (!seen[k])
                        return fail_tensor(p, name, "'%s' is missing", keys[k]);

        *ret = t;
        return 0;
}

static int read_meta(Parser *p) {
        StHeader *h = p->header;
        bool first = true;
        const char *key = NULL;
        int r;

        if (p->has_meta)
                return fail_tensor(p, "__metadata__", "duplicate name");
        p->has_meta = true;

        if (reader_take(&p->json, '{') < 0)
                return fail_tensor(p, "__metadata__",
                        "this name is reserved for an object of strings (byte %zu)", p->json.at + 8);

        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                r = read_member(p, true, &key);
                if (r < 0)
                        return r;

                if (reader_peek(&p->json) != '"')
                        return fail_tensor(p, "__metadata__",
                                strcmp(key, "shape") == 0 || strcmp(key, "data_offsets") == 0
                                        ? "this name is reserved for an object of strings, a tensor cannot "
                                          "have it ('%.80s')"
                                        : "this name is reserved for an object of strings, '%.80s' is not a "
                                          "string",
                                key);

                if (st_grow((void **) &h->meta, h->n_meta, &p->meta_cap, sizeof(*h->meta)) < 0)
                        return fail_memory(p);

                h->meta[h->n_meta].key = key;
                r = read_string(p, true, &h->meta[h->n_meta].value);
                if (r < 0)
                        return r;
                h->n_meta++;
        }

        return r < 0 ? fail_json(p) : 0;
}

static int read_header(Parser *p) {
        StHeader *h = p->header;
        bool first = true;
        const char *name = NULL;
        int r;

        if (p->json.text[0] != '{') {
                p->json.rule = "a header begins with '{'";
                return fail_json(p);
        }
        (void) reader_take(&p->json, '{');

        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                r = read_member(p, true, &name);
                if (r < 0)
                        return r;

                if (strcmp(name, "__metadata__") == 0) {
                        r = read_meta(p);
                        if (r < 0)
                                return r;
                        continue;
                }

                if (st_grow((void **) &h->tensors, h->n_tensors, &p->tensors_cap, sizeof(*h->tensors)) < 0)
                        return fail_memory(p);

                r = read_entry(p, name, &h->tensors[h->n_tensors]);
                if (r < 0)
                        return r;
                h->n_tensors++;
        }

        return r < 0 || reader_end(&p->json) < 0 ? fail_json(p) : 0;
}

static int compare_tensors(const void *a, const void *b) {
        return strcmp(((const StTensor *) a)->name, ((const StTensor *) b)->name);
}

static int compare_meta(const void *a, const void *b) {
        return strcmp(((const StMeta *) a)->key, ((const StMeta *) b)->key);
}

static int sort_names(const Parser *p) {
        StHeader *h = p->header;

        if (h->n_tensors > 0)
                qsort(h->tensors, h->n_tensors, sizeof(*h->tensors), compare_tensors);
        for (size_t i = 1; i < h->n_tensors; i++)
                if (strcmp(h->tensors[i - 1].name, h->tensors[i].name) == 0)
                        return fail_tensor(p, h->tensors[i].name, "duplicate name");

        if (h->n_meta > 0)
                qsort(h->meta, h->n_meta, sizeof(*h->meta), compare_meta);
        for (size_t i = 1; i < h->n_meta; i++)
                if (strcmp(h->meta[i - 1].key, h->meta[i].key) == 0)
                        return fail_tensor(p, "__metadata__", "duplicate key '%.80s'", h->meta[i].key);

        return 0;
}

/* bytes = product of the shape x size of an element. A zero among the dimensions does not excuse the others
 * from fitting: strides are made from them. */
static int tensor_bytes(const StTensor *t, uint64_t *ret_bytes) {
        uint64_t v = st_type_size(t->type);
        bool empty = false;

        for (uint32_t i = 0; i < t->n_dims; i++) {
                if (t->shape[i] == 0) {
                        empty = true;
                        continue;
                }
                if (__builtin_mul_overflow(v, t->shape[i], &v) || v > INT64_MAX)
                        return -EOVERFLOW;
        }

        *ret_bytes = empty ? 0 : v;
        return 0;
}

/* Turns [begin, end) behind the header into an offset in the file and a size. */
static int check_entry(const Parser *p, StTensor *t) {
        uint64_t begin = t->offset, end = t->size, bytes;

        if (tensor_bytes(t, &bytes) < 0)
                return fail_tensor(p, t->name,
                        "the product of its shape and the %" PRIu64 " bytes of %s is above 2^63 - 1",
                        st_type_size(t->type), st_type_name(t->type));
        if (begin > end)
                return fail_tensor(
                        p, t->name, "data_offsets are reversed: %" PRIu64 ", %" PRIu64, begin, end);
        if (end - begin != bytes)
                return fail_tensor(p, t->name,
                        "data_offsets span %" PRIu64 " bytes, shape and dtype %s need %" PRIu64, end - begin,
                        st_type_name(t->type), bytes);

        t->offset = p->header->data_offset + begin; /* < 2^63 + 2^27 */
        t->size = bytes;
        return 0;
}

/* By place; an empty tensor stands before one that begins where it does. */
static int compare_places(const void *a, const void *b) {
        const StTensor *x = *(const StTensor *const *) a, *y = *(const StTensor *const *) b;

        if (x->offset != y->offset)
                return x->offset < y->offset ? -1 : 1;
        if (x->size != y->size)
                return x->size < y->size ? -1 : 1;
        return strcmp(x->name, y->name);
}

static int check_layout(const Parser *p, uint64_t file_size) {
        const StHeader *h = p->header;
        CLEANUP_FREE const StTensor **places = NULL;
        const StTensor *last = NULL;
        uint64_t end = h->data_offset;

        if (h->n_tensors > 0) {
                places = reallocarray(NULL, h->n_tensors, sizeof(*places));
                if (!places)
                        return fail_memory(p);
                for (size_t i = 0; i < h->n_tensors; i++)
                        places[i] = &h->tensors[i];
                qsort(places, h->n_tensors, sizeof(*places), compare_places);
        }

        for (size_t i = 0; i < h->n_tensors; i++) {
                const StTensor *t = places[i];

                if (t->offset < end)
                        return fail_tensor(p, t->name, "it overlaps with tensor '%.80s'", last->name);
                if (t->offset > end)
                        return fail_tensor(p, t->name, "a hole of %" PRIu64 " bytes in front of its data",
                                t->offset - end);
                end += t->size;
                last = t;
        }

        if (end > file_size)
                return fault_set(p->fault, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s' is truncated: tensor '%.200s' ends at byte %" PRIu64
                        ", expected as many "
                        "bytes, it has %" PRIu64 " (incomplete download?)",
                        p->file_name, last->name, end, file_size);
        if (end < file_size)
                return fault_set(p->fault, -EBADMSG, FAULT_INVALID_FILE,
                        "file '%.200s': %" PRIu64 " bytes behind the last tensor: expected %" PRIu64
                        " bytes, it "
                        "has %" PRIu64,
                        p->file_name, file_size - end, end, file_size);
        return 0;
}

static int check_header(const Parser *p, uint64_t file_size) {
        int r;

        r = sort_names(p);
        if (r < 0)
                return r;

        for (size_t i = 0; i < p->header->n_tensors; i++) {
                r = check_entry(p, &p->header->tensors[i]);
                if (r < 0)
                        return r;
        }

        return check_layout(p, file_size);
}

int st_header_parse(const void *bytes, uint64_t size, uint64_t file_size, const char *file_name,
        StHeader **ret, Fault *f) {
        CLEANUP(st_header_freep) StHeader *h = NULL;
        Parser p = {.file_name = file_name, .fault = f};
        uint64_t expected;
        int r;

        r = st_header_size(bytes, size, file_size, file_name, &expected, f);
        if (r < 0)
                return r;
        if (expected != size)
                return fault_set(f, -EBADMSG, FAULT_FILE_CHANGED,
                        "file '%.200s' changed while it was read: its header took %" PRIu64
                        " bytes, now %" PRIu64,
                        file_name, size, expected);

        p.json = (JsonReader){.text = (const char *) bytes + 8, .n = size - 8};
        r = reader_check(&p.json, HEADER_DEPTH);
        if (r < 0)
                return fail_json(&p);

        /* Unescaped, a string is no longer than its text, and its two quotes leave room for the terminator.
         */
        h = calloc(1, sizeof(*h));
        if (!h || !(h->text = malloc(p.json.n)))
                return fail_memory(&p);
        h->data_offset = size;
        p.header = h;
        p.free = h->text;

        r = read_header(&p);
        if (r < 0)
                return r;

        r = check_header(&p, file_size);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(h);
        return 0;
}

StHeader *st_header_free(StHeader *h) {
        if (!h)
                return NULL;

        free(h->tensors);
        free(h->meta);
        free(h->text);
        free(h);
        return NULL;
}

const StTensor *st_header_find(const StHeader *h, const char *name) {
        StTensor key = {.name = name};

        return h->n_tensors > 0 ? bsearch(&key, h->tensors, h->n_tensors, sizeof(key), compare_tensors)
                                : NULL;
}

const char *st_header_meta(const StHeader *h, const char *key) {
        StMeta wanted = {.key = key}, *m;

        m = h->n_meta > 0 ? bsearch(&wanted, h->meta, h->n_meta, sizeof(wanted), compare_meta) : NULL;
        return m ? m->value : NULL;
}
