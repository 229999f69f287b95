/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/latentd/loader-read.h"
#include "service/shared/cleanup.h"

#define MIB (UINT64_C(1) << 20)

static LoaderRead new_read(uint64_t begin, uint64_t file_size, bool direct) {
        LoaderRead r = {.source = {.fd = -1, .direct = direct}, .next = begin, .file_size = file_size};

        r.end = (file_size + 4095) / 4096 * 4096;
        return r;
}

static void loader_read_next_covers_the_range_in_aligned_requests(void **state) {
        LoaderRead r = new_read(MIB, 4 * MIB + 777, true);
        uint64_t at = MIB;
        LoaderRequest *q;

        while ((q = loader_read_next(&r))) {
                assert_int_equal(q->offset, at);
                assert_true(q->end > at && q->end % 4096 == 0 && q->end - at <= MIB);
                at = q->end;
        }
        assert_int_equal(at, 4 * MIB + 4096); /* never past the block of the last byte */
        assert_int_equal(r.n_in_flight, 4);
        assert_false(loader_read_finished(&r));
}

static void loader_read_next_keeps_to_the_depth(void **state) {
        LoaderRead r = new_read(0, 100 * MIB, true);
        LoaderRequest *q, *last = NULL;
        unsigned n = 0;

        while ((q = loader_read_next(&r))) {
                last = q;
                n++;
        }
        assert_int_equal(n, LOADER_DEPTH);
        loader_read_answer(last, (int) MIB);
        q = loader_read_next(&r);
        assert_int_equal(q->offset, LOADER_DEPTH * MIB);
        assert_null(loader_read_next(&r));
}

static void loader_read_answer_short_at_the_end_is_right(void **state) {
        LoaderRead r = new_read(0, 777, true);
        LoaderRequest *q = loader_read_next(&r);

        assert_int_equal(q->end - q->offset, 4096);
        loader_read_answer(q, 777);
        assert_int_equal(r.error, 0);
        assert_int_equal(r.bytes, 777);
        assert_true(loader_read_finished(&r));
}

static void loader_read_answer_short_in_the_middle_goes_on_aligned(void **state) {
        LoaderRead r = new_read(0, MIB, true);
        LoaderRequest *q = loader_read_next(&r);

        loader_read_answer(q, 10000);
        assert_false(loader_read_finished(&r));
        q = loader_read_next(&r);
        assert_int_equal(q->offset, 8192);
        assert_int_equal(q->end, MIB);
        loader_read_answer(q, (int) (MIB - 8192));
        assert_true(loader_read_finished(&r));
        assert_int_equal(r.error, 0);
        assert_int_equal(r.bytes, MIB); /* nothing counted twice */
}

static void loader_read_answer_short_buffered_goes_on_at_the_byte(void **state) {
        LoaderRead r = new_read(0, MIB, false);

        loader_read_answer(loader_read_next(&r), 10000);
        assert_int_equal(loader_read_next(&r)->offset, 10000);
}

static void loader_read_answer_no_new_bytes_is_truncated(void **state) {
        LoaderRead r = new_read(0, MIB, true), s = new_read(0, MIB, true);

        loader_read_answer(loader_read_next(&r), 10000);
        for (unsigned i = 0; i < FILE_IO_SAME_END; i++) {
                assert_int_equal(r.error, 0);
                loader_read_answer(loader_read_next(&r), 10000 - 8192); /* the same end again */
        }
        assert_int_equal(r.error, -ESTALE);
        assert_true(loader_read_finished(&r));
        assert_int_equal(r.bytes, 10000);

        loader_read_answer(loader_read_next(&s), 0);
        assert_int_equal(s.error, -ESTALE);
}

static void loader_read_answer_transient_errors_are_tried_again(void **state) {
        LoaderRead r = new_read(0, MIB, true);

        loader_read_answer(loader_read_next(&r), -EAGAIN);
        loader_read_answer(loader_read_next(&r), -EINTR);
        assert_false(loader_read_finished(&r));
        loader_read_answer(loader_read_next(&r), (int) MIB);
        assert_true(loader_read_finished(&r));
        assert_int_equal(r.error, 0);
}

static void loader_read_answer_cut_short_before_what_is_there_goes_on(void **state) {
        LoaderRead r = new_read(0, MIB, true);

        loader_read_answer(loader_read_next(&r), 10000);
        loader_read_answer(loader_read_next(&r), 1);
        assert_int_equal(r.bytes, 10000);
        loader_read_answer(loader_read_next(&r), (int) (MIB - 8192));
        assert_true(loader_read_finished(&r));
        assert_int_equal(r.error, 0);
        assert_int_equal(r.bytes, MIB);
}

static void loader_read_answer_transient_errors_without_end_are_an_error(void **state) {
        LoaderRead r = new_read(0, 2 * MIB, true);

        for (unsigned i = 0; i < FILE_IO_RETRIES; i++)
                loader_read_answer(loader_read_next(&r), -EAGAIN);
        assert_int_equal(r.error, 0);
        loader_read_answer(loader_read_next(&r), (int) MIB); /* one that works: counted anew */
        for (unsigned i = 0; i <= FILE_IO_RETRIES; i++) {
                assert_int_equal(r.error, 0);
                loader_read_answer(loader_read_next(&r), -EAGAIN);
        }
        assert_int_equal(r.error, -EAGAIN);
        assert_true(loader_read_finished(&r));
}

static void loader_read_answer_direct_refused_becomes_buffered(void **state) {
        LoaderRead r = new_read(0, 3 * MIB, true);
        LoaderRequest *a = loader_read_next(&r), *b = loader_read_next(&r);

        loader_read_answer(a, -EINVAL);
        assert_false(r.source.direct);
        loader_read_answer(b, -EINVAL); /* it was on its way with O_DIRECT */
        assert_int_equal(r.error, 0);
        a = loader_read_next(&r);
        assert_false(a->direct);
        loader_read_answer(a, -EINVAL); /* now it means something else */
        assert_int_equal(r.error, -EINVAL);
}

static void loader_read_answer_error_stops_and_waits_for_the_rest(void **state) {
        LoaderRead r = new_read(0, 9 * MIB, true);
        LoaderRequest *a = loader_read_next(&r), *b = loader_read_next(&r);

        loader_read_answer(a, -EIO);
        assert_null(loader_read_next(&r));
        assert_false(loader_read_finished(&r));
        loader_read_answer(b, -ENOMEM);
        assert_true(loader_read_finished(&r));
        assert_int_equal(r.error, -EIO);
}

typedef struct Answer {
        int n, n_late, result;
        uint64_t bytes;
} Answer;

static void on_done(void *userdata, int result, uint64_t bytes, uint64_t usec) {
        Answer *a = userdata;

        a->n++;
        a->result = result;
        a->bytes = bytes;
}

static void on_late(void *userdata) {
        Answer *a = userdata;

        assert_int_equal(a->result, -ETIMEDOUT);
        a->n_late++;
}

static void loader_read_wrong_alignment_is_refused(void **state) {
        CLEANUP_FREE void *map = NULL;
        FileSource source = {.fd = 0};
        LoaderRead *r = NULL;
        sd_event *e = NULL;
        Loader *l = NULL;

        assert_int_equal(posix_memalign(&map, 4096, 65536), 0);
        assert_int_equal(sd_event_new(&e), 0);
        assert_int_equal(loader_new(e, &file_io_system, LOADER_STALL_USEC, &l), 0);
        assert_int_equal(
                loader_read(l, &source, (char *) map + 512, 0, 4096, 4096, on_done, on_late, NULL, &r), -EINVAL);
        assert_int_equal(loader_read(l, &source, map, 512, 4096, 4096, on_done, on_late, NULL, &r), -EINVAL);
        assert_int_equal(loader_read(l, &source, map, 0, 4000, 4096, on_done, on_late, NULL, &r), -EINVAL);
        assert_int_equal(loader_read(l, &source, map, 0, 8192, 4096, on_done, on_late, NULL, &r),
                -EINVAL); /* past the last block */
        assert_int_equal(loader_read(l, &source, map, 4096, 4096, 4096, on_done, on_late, NULL, &r), -EINVAL);
        assert_null(r);
        loader_free(l);
        sd_event_unref(e);
}

/* A model of many files: more reads at a time than the ring has entries. */
static void loader_read_more_reads_than_the_ring_all_end(void **state) {
        enum { N = 3 * 2 * LOADER_DEPTH };
        char name[] = "/tmp/test-loader-XXXXXX", block[4096] = "x";
        CLEANUP_FREE void *map = NULL;
        FileSource source = {};
        Answer answers[N] = {};
        sd_event *e = NULL;
        Loader *l = NULL;
        LoaderRead *r;

        source.fd = mkostemp(name, O_CLOEXEC);
        assert_true(source.fd >= 0);
        (void) unlink(name);
        assert_int_equal(write(source.fd, block, sizeof(block)), (int) sizeof(block));
        assert_int_equal(posix_memalign(&map, 4096, N * 4096), 0);
        assert_int_equal(sd_event_new(&e), 0);
        assert_int_equal(loader_new(e, &file_io_system, 5000000, &l), 0);

        for (unsigned i = 0; i < N; i++)
                assert_int_equal(loader_read(l, &source, (char *) map + i * 4096, 0, 4096, 4096, on_done,
                                         on_late, &answers[i], &r),
                        0);
        for (unsigned i = 0; i < N; i++) {
                while (answers[i].n == 0)
                        assert_true(sd_event_run(e, 10000000) > 0);
                assert_int_equal(answers[i].result, 0);
                assert_int_equal(answers[i].bytes, 4096);
        }

        loader_free(l);
        (void) close(source.fd);
        sd_event_unref(e);
}

static int refuse_ring(unsigned entries, struct io_uring *ring) {
        return -EPERM;
}

static ssize_t read_pipe(int fd, void *buffer, size_t size, off_t offset) {
        return read(fd, buffer, size);
}

/* A pipe that nobody writes to is a disk that does not answer. */
static void loader_free_with_a_read_that_never_ends_gives_it_up(void **state) {
        CLEANUP_FREE void *map = NULL;
        sd_event *e = NULL;
        FileSource source;
        Loader *l = NULL;
        Answer a = {}, b = {};
        LoaderRead *r;
        int p[2];

        assert_int_equal(pipe2(p, O_CLOEXEC), 0);
        source = (FileSource){.fd = p[0]};
        assert_int_equal(posix_memalign(&map, 4096, 65536), 0);
        assert_int_equal(sd_event_new(&e), 0);
        assert_int_equal(loader_new(e, &file_io_system, 100000, &l), 0);
        assert_int_equal(loader_ring_error(l), 0);

        assert_int_equal(loader_read(l, &source, map, 0, 65536, 65536, on_done, on_late, &a, &r), 0);
        while (a.n == 0)
                assert_true(sd_event_run(e, 5000000) > 0);
        assert_int_equal(a.result, -ETIMEDOUT);

        /* And one that is cancelled and does not end either. */
        assert_int_equal(loader_read(l, &source, map, 0, 65536, 65536, on_done, on_late, &b, &r), 0);
        loader_cancel(r);
        while (b.n == 0)
                assert_true(sd_event_run(e, 5000000) > 0);
        assert_true(b.result == -ETIMEDOUT || b.result == -ECANCELED);
        loader_free(l);
        assert_int_equal(a.n, 1);
        assert_int_equal(b.n, 1);
        assert_int_equal(a.n_late + b.n_late, 0);
        (void) close(p[0]);
        (void) close(p[1]);
        sd_event_unref(e);
}

/* With the ring and without. */
static void loader_read_given_up_comes_back_is_told(void **state) {
        static const int errors[] = {0, EPERM};

        for (size_t i = 0; i < ELEMENTSOF(errors); i++) {
                CLEANUP_FREE void *map = NULL;
                FileIo io = file_io_system;
                sd_event *e = NULL;
                FileSource source;
                Loader *l = NULL;
                Answer a = {};
                LoaderRead *r;
                int p[2];

                if (errors[i] > 0)
                        io.ring_init = refuse_ring, io.pread = read_pipe;
                assert_int_equal(pipe2(p, O_CLOEXEC), 0);
                source = (FileSource){.io = &io, .fd = p[0]};
                assert_int_equal(posix_memalign(&map, 4096, 65536), 0);
                assert_int_equal(sd_event_new(&e), 0);
                assert_int_equal(loader_new(e, &io, 100000, &l), 0);
                assert_int_equal(loader_ring_error(l), -errors[i]);

                assert_int_equal(loader_read(l, &source, map, 0, 65536, 65536, on_done, on_late, &a, &r), 0);
                while (a.n == 0)
                        assert_true(sd_event_run(e, 5000000) > 0);
                assert_int_equal(a.n_late, 0);
                assert_int_equal(write(p[1], "late", 4), 4);
                while (a.n_late == 0)
                        assert_true(sd_event_run(e, 5000000) > 0);
                assert_memory_equal(map, "late", 4);
                loader_free(l);
                assert_int_equal(a.n, 1);
                assert_int_equal(a.n_late, 1);
                (void) close(p[0]);
                (void) close(p[1]);
                sd_event_unref(e);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(loader_read_next_covers_the_range_in_aligned_requests),
                cmocka_unit_test(loader_read_next_keeps_to_the_depth),
                cmocka_unit_test(loader_read_answer_short_at_the_end_is_right),
                cmocka_unit_test(loader_read_answer_short_in_the_middle_goes_on_aligned),
                cmocka_unit_test(loader_read_answer_short_buffered_goes_on_at_the_byte),
                cmocka_unit_test(loader_read_answer_no_new_bytes_is_truncated),
                cmocka_unit_test(loader_read_answer_transient_errors_are_tried_again),
                cmocka_unit_test(loader_read_answer_cut_short_before_what_is_there_goes_on),
                cmocka_unit_test(loader_read_answer_transient_errors_without_end_are_an_error),
                cmocka_unit_test(loader_read_answer_direct_refused_becomes_buffered),
                cmocka_unit_test(loader_read_answer_error_stops_and_waits_for_the_rest),
                cmocka_unit_test(loader_read_wrong_alignment_is_refused),
                cmocka_unit_test(loader_read_more_reads_than_the_ring_all_end),
                cmocka_unit_test(loader_free_with_a_read_that_never_ends_gives_it_up),
                cmocka_unit_test(loader_read_given_up_comes_back_is_told),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
