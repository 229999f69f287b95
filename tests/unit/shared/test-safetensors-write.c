/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "tests/unit/shared/cmocka-all.h"

DEFINE_CLEANUP(StHeader *, st_header_free)

static const float floats[3] = {1, 2, 3};
static const uint8_t bytes[2] = {7, 9};

static void st_write_read_back_is_equal(void **state) {
        static const StTensor tensors[] = {
                {"w\"\\\n\xc3\xbc", ST_F32, 2, {1, 3}, 12345, 12},
                {"none", ST_BF16, 2, {0, 4}, 0, 0},
                {"b", ST_U8, 1, {2}, 0, 2},
                {"s", ST_F32, 0, {0}, 0, 4},
        };
        static const void *const data[] = {floats, NULL, bytes, floats + 1};
        static const StMeta meta[] = {{"z", "last"}, {"format", "pt \x01"}};
        CLEANUP_CLOSE int fd = memfd_create("out", MFD_CLOEXEC);
        CLEANUP(st_header_freep) StHeader *h = NULL;
        unsigned char file[4096];
        uint64_t size;
        Fault f = {};
        ssize_t n;

        assert_int_equal(st_write(fd, tensors, data, 4, meta, 2), 0);
        n = pread(fd, file, sizeof(file), 0);
        assert_true(n > 0 && n < (ssize_t) sizeof(file));

        assert_int_equal(st_header_size(file, (size_t) n, (uint64_t) n, "out", &size, &f), 0);
        if (st_header_parse(file, size, (uint64_t) n, "out", &h, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(h->data_offset % 8, 0);
        assert_int_equal(h->n_tensors, 4);
        assert_string_equal(st_header_meta(h, "format"), "pt \x01");
        assert_string_equal(st_header_meta(h, "z"), "last");

        /* data lie in the order of the names */
        assert_string_equal(h->tensors[0].name, "b");
        assert_int_equal(h->tensors[0].offset, h->data_offset);
        assert_string_equal(h->tensors[3].name, tensors[0].name);

        for (size_t i = 0; i < 4; i++) {
                const StTensor *t = st_header_find(h, tensors[i].name);

                assert_non_null(t);
                assert_int_equal(t->type, tensors[i].type);
                assert_int_equal(t->n_dims, tensors[i].n_dims);
                assert_memory_equal(t->shape, tensors[i].shape, sizeof(t->shape[0]) * t->n_dims);
                assert_int_equal(t->size, tensors[i].size);
                if (t->size > 0)
                        assert_memory_equal(file + t->offset, data[i], t->size);
        }
}

/* What a writer gets that has the data later. */
static void st_write_header_is_the_begin_of_the_file(void **state) {
        static const StTensor tensors[] = {
                {"w", ST_F32, 2, {1, 3}, 0, 12},
                {"b", ST_U8, 1, {2}, 0, 2},
        };
        static const void *const data[] = {floats, bytes};
        static const StMeta meta[] = {{"format", "pt"}};
        CLEANUP_CLOSE int whole = memfd_create("out", MFD_CLOEXEC), header = memfd_create("out", MFD_CLOEXEC);
        unsigned char a[4096], b[4096];
        ssize_t n, k;

        assert_int_equal(st_write(whole, tensors, data, 2, meta, 1), 0);
        assert_int_equal(st_write_header(header, tensors, 2, meta, 1), 0);
        n = pread(whole, a, sizeof(a), 0);
        k = pread(header, b, sizeof(b), 0);
        assert_int_equal(n, k + 14);
        assert_memory_equal(a, b, (size_t) k);
        assert_memory_equal(a + k, bytes, 2); /* in the order of the names */
}

static void st_write_nothing_is_a_file(void **state) {
        CLEANUP_CLOSE int fd = memfd_create("out", MFD_CLOEXEC);
        char file[64];

        assert_int_equal(st_write(fd, NULL, NULL, 0, NULL, 0), 0);
        assert_int_equal(pread(fd, file, sizeof(file), 0), 16);
        assert_memory_equal(file, "\x08\0\0\0\0\0\0\0{}      ", 16);
}

static void st_write_wrong_tensors_refused(void **state) {
        static const StTensor cases[] = {
                {"w", ST_F32, 1, {3}, 0, 11},
                {"w", ST_F32, 1, {3}, 0, 16},
                {"w", ST_TYPE_INVALID, 1, {3}, 0, 12},
                {"w", ST_F32, ST_DIMS_MAX + 1, {3}, 0, 12},
                {"w", ST_U8, 2, {UINT64_C(1) << 32, UINT64_C(1) << 32}, 0, 0},
                {"w", ST_U8, 2, {UINT64_C(1) << 63, 0}, 0, 0},
                {"__metadata__", ST_F32, 1, {3}, 0, 12},
                {"w\xff", ST_F32, 1, {3}, 0, 12},
                {NULL, ST_F32, 1, {3}, 0, 12},
        };
        const void *data = floats, *none = NULL;
        CLEANUP_CLOSE int fd = memfd_create("out", MFD_CLOEXEC);
        const StTensor good = {"w", ST_F32, 1, {3}, 0, 12};
        struct stat st;

        for (size_t i = 0; i < ELEMENTSOF(cases); i++)
                assert_int_equal(st_write(fd, &cases[i], &data, 1, NULL, 0), -EINVAL);
        assert_int_equal(st_write(fd, &good, &none, 1, NULL, 0), -EINVAL);

        assert_int_equal(fstat(fd, &st), 0);
        assert_int_equal(st.st_size, 0);
}

static void st_write_duplicate_names_refused(void **state) {
        static const StTensor two[] = {{"w", ST_U8, 1, {2}, 0, 2}, {"w", ST_U8, 1, {2}, 0, 2}};
        static const StMeta meta[] = {{"a", "1"}, {"a", "2"}}, bad_text = {"a", "\xff"};
        static const void *const data[] = {bytes, bytes};
        CLEANUP_CLOSE int fd = memfd_create("out", MFD_CLOEXEC);

        assert_int_equal(st_write(fd, two, data, 2, NULL, 0), -EINVAL);
        assert_int_equal(st_write(fd, two, data, 1, meta, 2), -EINVAL);
        assert_int_equal(st_write(fd, two, data, 1, &bad_text, 1), -EINVAL);
}

static void st_write_full_disk_reported(void **state) {
        static const StTensor t = {"w", ST_U8, 1, {2}, 0, 2};
        CLEANUP_CLOSE int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
        const void *data = bytes;

        if (fd < 0)
                skip();
        assert_int_equal(st_write(fd, &t, &data, 1, NULL, 0), -ENOSPC);
}

typedef struct Writer {
        int fd, r;
        unsigned char *data;
        size_t n;
} Writer;

static void *writer_run(void *p) {
        Writer *w = p;
        const StTensor t = {"w", ST_U8, 1, {w->n}, 0, w->n};
        const void *data = w->data;

        w->r = st_write(w->fd, &t, &data, 1, NULL, 0);
        (void) close(w->fd);
        return NULL;
}

static void on_signal(int signal) {
}

/* A pipe that is read slowly, and signals without SA_RESTART: write() returns early again and again. */
static void st_write_interrupted_is_continued(void **state) {
        struct sigaction action = {.sa_handler = on_signal};
        Writer w = {.n = 3 << 20};
        size_t size = 0, room = w.n + 4096;
        CLEANUP_FREE unsigned char *file = malloc(room);
        CLEANUP_FREE unsigned char *data = malloc(w.n);
        pthread_t thread;
        int fds[2];

        assert_true(file && data);
        for (size_t i = 0; i < w.n; i++)
                data[i] = (unsigned char) (i * 2654435761u >> 24);
        w.data = data;

        assert_int_equal(sigaction(SIGUSR1, &action, NULL), 0);
        assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
        w.fd = fds[1];
        assert_int_equal(pthread_create(&thread, NULL, writer_run, &w), 0);

        for (;;) {
                ssize_t n;

                n = read(fds[0], file + size, 30000 < room - size ? 30000 : room - size);
                assert_true(n >= 0);
                if (n == 0)
                        break;
                size += (size_t) n;
                if (size > w.n / 2) /* the thread may have ended */
                        continue;
                /* Once with a part written, once with the pipe full. */
                for (int i = 0; i < 2; i++) {
                        (void) usleep(200);
                        (void) pthread_kill(thread, SIGUSR1);
                }
        }

        assert_int_equal(pthread_join(thread, NULL), 0);
        (void) close(fds[0]);
        assert_int_equal(w.r, 0);
        assert_true(size > w.n);
        assert_memory_equal(file + size - w.n, data, w.n);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(st_write_read_back_is_equal),
                cmocka_unit_test(st_write_header_is_the_begin_of_the_file),
                cmocka_unit_test(st_write_nothing_is_a_file),
                cmocka_unit_test(st_write_wrong_tensors_refused),
                cmocka_unit_test(st_write_duplicate_names_refused),
                cmocka_unit_test(st_write_full_disk_reported),
                cmocka_unit_test(st_write_interrupted_is_continued),
        };

        return cmocka_run_group_tests_name("safetensors-write", tests, NULL, NULL);
}
