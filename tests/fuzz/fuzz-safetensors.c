/* SPDX-License-Identifier: Apache-2.0 */
/* Input: decimal digits, a line break, a header: a file with that header and so many bytes of data. Anything
 * else is the beginning of a file as it is. What is accepted must hold the promises of safetensors.h, be
 * JSON for another parser and survive being written and read again. */
#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <jansson.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/shared/utf8.h"
#include "tests/fuzz/target.h"

DEFINE_CLEANUP(StHeader *, st_header_free)

#define WRITE_MAX (1u << 16)

static void check_fault(int r, const Fault *f) {
        if (r == 0) {
                CHECK(f->name[0] == '\0');
                return;
        }

        CHECK(r == -EBADMSG);
        CHECK(strcmp(f->name, FAULT_INVALID_FILE) == 0 || strcmp(f->name, FAULT_FILE_CHANGED) == 0);
        CHECK(strstr(f->text, "fuzz.safetensors"));
        CHECK(utf8_is_valid(f->text, strlen(f->text)));
        for (const char *s = f->text; *s != '\0'; s++)
                CHECK((unsigned char) *s >= 0x20 && *s != 0x7f);
}

static void check_header(const StHeader *h, uint64_t file_size) {
        uint64_t sum = h->data_offset;

        for (size_t i = 0; i < h->n_tensors; i++) {
                const StTensor *t = &h->tensors[i];
                uint64_t bytes = st_type_size(t->type);

                CHECK(bytes > 0 && t->n_dims <= ST_DIMS_MAX);
                for (uint32_t d = 0; d < t->n_dims; d++)
                        CHECK(!__builtin_mul_overflow(bytes, t->shape[d], &bytes));
                CHECK(bytes == t->size);
                CHECK(t->offset >= h->data_offset && t->offset <= file_size &&
                        t->size <= file_size - t->offset);
                CHECK(st_header_find(h, t->name) == t);
                CHECK(i == 0 || strcmp(h->tensors[i - 1].name, t->name) < 0);
                sum += t->size;
        }

        CHECK(sum == file_size);
        for (size_t i = 0; i < h->n_meta; i++) {
                CHECK(st_header_meta(h, h->meta[i].key) == h->meta[i].value);
                CHECK(i == 0 || strcmp(h->meta[i - 1].key, h->meta[i].key) < 0);
        }
}

/* No second opinion exists on our limits, but whatever we accept is JSON without duplicates. */
static void check_json(const char *json, size_t n) {
        json_error_t e;
        json_t *j;

        j = json_loadb(json, n, JSON_REJECT_DUPLICATES, &e);
        CHECK(j && json_is_object(j));
        json_decref(j);
}

static void check_written(const StHeader *h) {
        static const unsigned char zeros[WRITE_MAX];
        CLEANUP(st_header_freep) StHeader *again = NULL;
        CLEANUP_FREE const void **data = NULL;
        CLEANUP_FREE unsigned char *file = NULL;
        CLEANUP_CLOSE int fd = -EBADF;
        uint64_t size;
        Fault f = {};
        off_t n;

        for (size_t i = 0; i < h->n_tensors; i++)
                if (h->tensors[i].size > WRITE_MAX)
                        return;

        data = calloc(h->n_tensors > 0 ? h->n_tensors : 1, sizeof(*data));
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(data && fd >= 0);
        for (size_t i = 0; i < h->n_tensors; i++)
                data[i] = zeros;

        CHECK(st_write(fd, h->tensors, data, h->n_tensors, h->meta, h->n_meta) == 0);
        n = lseek(fd, 0, SEEK_END);
        CHECK(n >= 16);
        file = malloc((size_t) n);
        CHECK(file && pread(fd, file, (size_t) n, 0) == n);

        CHECK(st_header_size(file, (size_t) n, (uint64_t) n, "fuzz.safetensors", &size, &f) == 0);
        CHECK(st_header_parse(file, size, (uint64_t) n, "fuzz.safetensors", &again, &f) == 0);
        CHECK(again->n_tensors == h->n_tensors && again->n_meta == h->n_meta && again->data_offset % 8 == 0);
        for (size_t i = 0; i < h->n_tensors; i++) {
                const StTensor *a = &h->tensors[i], *b = &again->tensors[i];

                CHECK(strcmp(a->name, b->name) == 0 && a->type == b->type && a->n_dims == b->n_dims &&
                        a->size == b->size);
                CHECK(memcmp(a->shape, b->shape, sizeof(a->shape)) == 0);
        }
        for (size_t i = 0; i < h->n_meta; i++)
                CHECK(strcmp(h->meta[i].key, again->meta[i].key) == 0 &&
                        strcmp(h->meta[i].value, again->meta[i].value) == 0);
}

static void run(const uint8_t *file, size_t n, uint64_t file_size) {
        CLEANUP(st_header_freep) StHeader *h = NULL;
        CLEANUP_FREE uint8_t *header = NULL;
        uint64_t size = 0;
        Fault f = {};
        int r;

        r = st_header_size(file, n, file_size, "fuzz.safetensors", &size, &f);
        check_fault(r, &f);
        if (r < 0)
                return;

        CHECK(size <= file_size && size >= 10 && size <= 8 + ST_HEADER_MAX);
        if (size > n)
                return;

        header = malloc(size);
        CHECK(header);
        memcpy(header, file, size);
        r = st_header_parse(header, size, file_size, "fuzz.safetensors", &h, &f);
        check_fault(r, &f);
        CHECK((r == 0) == (h != NULL));
        if (!h)
                return;

        check_header(h, file_size);
        check_json((const char *) header + 8, size - 8);
        check_written(h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        CLEANUP_FREE uint8_t *file = NULL;
        uint64_t data_size = 0, length;
        size_t at = 0;

        while (at < n && at < 15 && data[at] >= '0' && data[at] <= '9')
                data_size = data_size * 10 + (uint64_t) (data[at++] - '0');

        if (at == 0 || at == n || data[at] != '\n') {
                run(data, n, n);
                return 0;
        }

        at++;
        length = htole64(n - at);
        file = malloc(8 + n - at);
        CHECK(file);
        memcpy(file, &length, 8);
        memcpy(file + 8, data + at, n - at);
        run(file, 8 + n - at, 8 + n - at + data_size);
        return 0;
}
