/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

static const uint8_t zeros[65536];

Checkpoint *checkpoint_empty(void) {
        Checkpoint *c = calloc(1, sizeof(*c));

        assert_non_null(c);
        return c;
}

static void append(Checkpoint *c, const StTensor *t, const void *data) {
        assert_true(c->n < CHECKPOINT_TENSORS_MAX);
        c->names[c->n] = strdup(t->name);
        assert_non_null(c->names[c->n]);
        c->tensors[c->n] = *t;
        c->tensors[c->n].name = c->names[c->n];
        c->data[c->n] = data;
        c->n++;
}

Checkpoint *checkpoint_new(void) {
        return checkpoint_of(NULL, "dit/comfy.safetensors");
}

Checkpoint *checkpoint_of(const char *folder, const char *file) {
        Checkpoint *c = checkpoint_empty();
        StHeader *h = NULL;
        uint64_t size, header_size;
        Fault f = {};

        c->source = golden_read(folder, file, &size);
        assert_int_equal(st_header_size(c->source, size, size, file, &header_size, &f), 0);
        assert_int_equal(st_header_parse(c->source, header_size, size, file, &h, &f), 0);
        for (size_t i = 0; i < h->n_tensors; i++)
                append(c, h->tensors + i, c->source + h->tensors[i].offset);
        (void) st_header_free(h);
        return c;
}

Checkpoint *checkpoint_free(Checkpoint *c) {
        if (!c)
                return NULL;
        for (size_t i = 0; i < c->n; i++)
                free(c->names[i]);
        free(c->source);
        free(c);
        return NULL;
}

void checkpoint_freep(Checkpoint **c) {
        (void) checkpoint_free(*c);
}

static size_t index_of(const Checkpoint *c, const char *name) {
        for (size_t i = 0; i < c->n; i++)
                if (strcmp(c->names[i], name) == 0)
                        return i;
        fail_msg("no tensor %s to change", name);
        return 0;
}

StTensor *checkpoint_find(Checkpoint *c, const char *name) {
        return c->tensors + index_of(c, name);
}

const void *checkpoint_data(Checkpoint *c, const char *name) {
        return c->data[index_of(c, name)];
}

void checkpoint_rename(Checkpoint *c, const char *name, const char *to) {
        size_t i = index_of(c, name);

        free(c->names[i]);
        c->names[i] = strdup(to);
        assert_non_null(c->names[i]);
        c->tensors[i].name = c->names[i];
}

void checkpoint_replace(Checkpoint *c, const char *name, StType type, uint32_t n_dims, uint64_t a,
        uint64_t b, const void *data) {
        checkpoint_drop(c, name);
        checkpoint_add(c, name, type, n_dims, a, b, data);
}

void checkpoint_drop(Checkpoint *c, const char *name) {
        size_t i = index_of(c, name);

        free(c->names[i]);
        c->n--;
        memmove(c->names + i, c->names + i + 1, (c->n - i) * sizeof(*c->names));
        memmove(c->data + i, c->data + i + 1, (c->n - i) * sizeof(*c->data));
        memmove(c->tensors + i, c->tensors + i + 1, (c->n - i) * sizeof(*c->tensors));
}

void checkpoint_add(Checkpoint *c, const char *name, StType type, uint32_t n_dims, uint64_t a, uint64_t b,
        const void *data) {
        StTensor t = {.name = name, .type = type, .n_dims = n_dims, .shape = {a, b}};

        t.size = st_type_size(type) * (n_dims > 0 ? a : 1) * (n_dims > 1 ? b : 1);
        assert_true(data || t.size <= sizeof(zeros));
        append(c, &t, data ? data : zeros);
}

void checkpoint_move(Checkpoint *from, const char *name, Checkpoint *to) {
        size_t i = index_of(from, name);

        append(to, from->tensors + i, from->data[i]);
        checkpoint_drop(from, name);
}

uint8_t *checkpoint_write(const Checkpoint *c, uint64_t *ret_size) {
        CLEANUP_CLOSE int fd = memfd_create("checkpoint", MFD_CLOEXEC);
        uint8_t *bytes;
        off_t size;

        assert_true(fd >= 0);
        assert_int_equal(st_write(fd, c->tensors, c->data, c->n, NULL, 0), 0);
        size = lseek(fd, 0, SEEK_END);
        assert_true(size > 0);
        bytes = malloc((size_t) size);
        assert_non_null(bytes);
        assert_int_equal(pread(fd, bytes, (size_t) size, 0), size);
        *ret_size = (uint64_t) size;
        return bytes;
}
