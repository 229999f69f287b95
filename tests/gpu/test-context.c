/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts of the CUDA backend: device memory, copies, queues and events, registered memory. Needs a CUDA device;
 * without one every test skips. */

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/lt-library.h"
#include "kernels/cuda/lt.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "tests/gpu/backends.h"

#define MIB (UINT64_C(1) << 20)

static const LkOps *ops;

static int setup(void **state) {
        ops = lk_cuda_ops();
        return backends_setup(state);
}

static void fill(uint8_t *p, uint64_t n, uint32_t seed) {
        for (uint64_t i = 0; i < n; i++)
                p[i] = (uint8_t) ((i * 2654435761u + seed * 40503u) >> 11);
}

/* No device is needed for that. */
static void library_loads_beside_and_is_complete(void **state) {
        lk_cuda_load_libraries();
        assert_int_equal(lt_library_load(), 0);
        lk_cuda_await_libraries();
        lk_cuda_await_libraries();
        assert_true(lt_functions.cublasLtGetVersion() >= 10000u * CUBLAS_VER_MAJOR);
        assert_int_equal(lt_version(), lt_functions.cublasLtGetVersion());
}

static void memory_is_kept_and_given_back(void **state) {
        void *a, *b, *c;

        need_device();
        assert_int_equal(ops->memory_new(gpu, 100 * MIB, &a), 0);
        assert_int_equal((uintptr_t) a % 256, 0);
        ops->memory_free(gpu, a);
        assert_int_equal(ops->memory_new(gpu, 99 * MIB, &b), 0);
        assert_ptr_equal(a, b);
        assert_int_equal(ops->memory_new(gpu, 99 * MIB, &c), 0);
        assert_ptr_not_equal(b, c);
        ops->memory_free(gpu, b);
        ops->memory_free(gpu, c);
        ops->memory_free(gpu, NULL);
        ops->memory_trim(gpu);
        assert_int_equal(ops->memory_new(gpu, 0, &a), 0);
        ops->memory_free(gpu, a);
}

/* More than there is; then all of what is kept goes for one that would not fit beside it. */
static void memory_that_is_not_there_is_enomem(void **state) {
        uint64_t most = 256 * MIB;
        void *p, *large;

        need_device();
        assert_int_equal(ops->memory_new(gpu, UINT64_C(1) << 50, &p), -ENOMEM);
        assert_int_equal(ops->memory_new(gpu, UINT64_MAX, &p), -ENOMEM);
        while (ops->memory_new(gpu, 2 * most, &p) >= 0) {
                ops->memory_free(gpu, p);
                ops->memory_trim(gpu);
                most *= 2;
        }
        assert_int_equal(ops->memory_new(gpu, most / 2, &p), 0);
        ops->memory_free(gpu, p);
        assert_int_equal(ops->memory_new(gpu, most, &large), 0);
        ops->memory_free(gpu, large);
        ops->memory_trim(gpu);
}

/* The host's memory may be overwritten at once. */
static void upload_is_done_with_the_hosts_memory(void **state) {
        static const uint64_t sizes[] = {0, 1, 4095, MIB, MIB + 1, 37 * MIB + 5};
        CLEANUP_FREE uint8_t *host = malloc(38 * MIB), *want = malloc(38 * MIB), *got = malloc(38 * MIB);
        void *device;

        need_device();
        assert_int_equal(ops->memory_new(gpu, 38 * MIB, &device), 0);
        for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                fill(host, sizes[i], (uint32_t) i);
                memcpy(want, host, sizes[i]);
                assert_int_equal(ops->upload(gpu, device, host, sizes[i]), 0);
                memset(host, 0x5a, sizes[i]);
                assert_int_equal(ops->download(gpu, got, device, sizes[i]), 0);
                assert_memory_equal(got, want, sizes[i]);
        }
        ops->memory_free(gpu, device);
}

/* What a fetch of these rows brings is what memcpy() would. */
static void check_fetch(const uint8_t *host, uint64_t rows, uint64_t width, uint64_t stride) {
        CLEANUP_FREE uint8_t *want = malloc(rows * width + 1), *got = malloc(rows * width + 1);
        void *device;

        assert_int_equal(ops->memory_new(gpu, rows * width, &device), 0);
        for (uint64_t i = 0; i < rows; i++)
                memcpy(want + i * width, host + i * stride, width);
        memset(got, 0, rows * width);
        assert_int_equal(ops->upload(gpu, device, got, rows * width), 0);
        assert_int_equal(ops->mark(gpu, LK_COMPUTE, 0), 0);
        assert_int_equal(ops->wait(gpu, LK_COPY, 0), 0);
        assert_int_equal(ops->fetch(gpu, &(LkFetch){device, host, rows, width, stride}), 0);
        assert_int_equal(ops->mark(gpu, LK_COPY, 1), 0);
        assert_int_equal(ops->wait(gpu, LK_COMPUTE, 1), 0);
        assert_int_equal(ops->download(gpu, got, device, rows * width), 0);
        assert_memory_equal(got, want, rows * width);
        ops->memory_free(gpu, device);
}

static void check_fetches(const uint8_t *host) {
        check_fetch(host, 1, 1, 0);
        check_fetch(host + 1, 1, 70 * MIB - 3, 0);              /* odd ends */
        check_fetch(host + 5, 3, 20 * MIB, 23 * MIB);           /* rows across edges */
        check_fetch(host + 16 * MIB - 100, 3, 100, 7 * MIB);    /* ends at an edge, if that is one */
        check_fetch(host + 7, 1000, 1000, 70001);               /* many, some across */
        check_fetch(host, 50, 4096, 4096);                      /* dense */
}

/* Nothing registered, all of it, every second page run: the same bytes. A range is registered once. */
static void fetch_crosses_edges_of_registrations(void **state) {
        const uint64_t size = 80 * MIB;
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);
        uint8_t *host;

        need_device();
        host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(host, MAP_FAILED);
        fill(host, size, 3);
        check_fetches(host);

        for (uint64_t at = 3 * page + 17; at + 11 * MIB < size; at += 11 * MIB) {
                assert_int_equal(ops->pin(gpu, host + at, 5 * MIB), 0);
                check_fetches(host);
        }
        assert_int_equal(ops->pin(gpu, host, size), 0);
        assert_int_equal(ops->pin(gpu, host + 1, size - 1), 0); /* again */
        assert_int_equal(mprotect(host, size, PROT_READ), 0);       /* as a worker does */
        check_fetches(host);

        ops->unpin(host, size);
        check_fetches(host);
        ops->unpin(host, size);
        assert_int_equal(munmap(host, size), 0);
}

/* The host's memory shares a page with what is registered. */
static void download_crosses_edges_of_registrations(void **state) {
        const uint64_t size = 4 * MIB;
        uint8_t *host, *want;
        void *device;

        need_device();
        host = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(host, MAP_FAILED);
        want = malloc(size);
        assert_non_null(want);
        fill(want, size, 5);
        assert_int_equal(ops->memory_new(gpu, size, &device), 0);
        assert_int_equal(ops->upload(gpu, device, want, size), 0);
        assert_int_equal(ops->pin(gpu, host, MIB), 0);
        assert_int_equal(ops->pin(gpu, host + 2 * MIB, MIB), 0);
        for (unsigned i = 0; i < 4; i++) {
                uint8_t *to = host + i * MIB / 2 + 100;

                memset(host, 0, 2 * size);
                assert_int_equal(ops->download(gpu, to, device, size), 0);
                assert_memory_equal(to, want, size);
                assert_int_equal(to[-1] | to[size], 0);
        }
        ops->unpin(host, 2 * size);
        ops->memory_free(gpu, device);
        free(want);
        assert_int_equal(munmap(host, 2 * size), 0);
}

/* What cannot be registered is fetched all the same; the device goes on. */
static void pin_that_fails_changes_nothing(void **state) {
        const uint64_t size = 40 * MIB;
        uint8_t *host;

        need_device();
        host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(host, MAP_FAILED);
        assert_int_equal(munmap(host + 20 * MIB, MIB), 0);
        fill(host, 20 * MIB, 4);
        assert_true(ops->pin(gpu, host, size) < 0);
        check_fetch(host, 1, 20 * MIB, 0);
        assert_int_equal(ops->pin(gpu, host, 20 * MIB), 0); /* nothing is in the way */
        check_fetch(host, 1, 20 * MIB, 0);
        ops->unpin(host, size);
        assert_int_equal(munmap(host, 20 * MIB), 0);
        assert_int_equal(munmap(host + 21 * MIB, size - 21 * MIB), 0);
}

typedef struct Pinner {
        pthread_t thread;
        uint8_t *host;
        uint64_t size;
        int result;
} Pinner;

static void *pin_many(void *userdata) {
        Pinner *p = userdata;
        LkContext *c;

        p->result = ops->context_new(0, &c);
        if (p->result < 0)
                return NULL;
        for (uint64_t at = 0; p->result >= 0 && at < p->size; at += 3 * MIB)
                p->result = ops->pin(c, p->host + at, p->size - at < 3 * MIB ? p->size - at : 3 * MIB);
        (void) ops->context_free(c);
        return NULL;
}

static void pin_from_threads_at_once(void **state) {
        const uint64_t size = 100 * MIB;
        Pinner p[4] = {};
        uint8_t *host;

        need_device();
        host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(host, MAP_FAILED);
        fill(host, size, 5);
        for (size_t i = 0; i < ELEMENTSOF(p); i++) {
                p[i] = (Pinner){.host = host, .size = size};
                assert_int_equal(pthread_create(&p[i].thread, NULL, pin_many, p + i), 0);
        }
        for (size_t i = 0; i < ELEMENTSOF(p); i++) {
                assert_int_equal(pthread_join(p[i].thread, NULL), 0);
                assert_int_equal(p[i].result, 0);
        }
        check_fetch(host + 9, 1, 80 * MIB, 0);
        ops->unpin(host, size);
        assert_int_equal(munmap(host, size), 0);
}

static void event_numbers_are_checked(void **state) {
        need_device();
        assert_int_equal(ops->wait(gpu, LK_COMPUTE, 77), 0); /* never marked: done */
        assert_int_equal(ops->join(gpu, 77), 0);
        assert_int_equal(ops->mark(gpu, LK_COMPUTE, LK_EVENTS_MAX), -EINVAL);
        assert_int_equal(ops->wait(gpu, LK_COPY, LK_EVENTS_MAX), -EINVAL);
        assert_int_equal(ops->join(gpu, LK_EVENTS_MAX), -EINVAL);
        assert_int_equal(ops->mark(gpu, _LK_QUEUE_MAX, 0), -EINVAL);
}

/* The queues run beside each other: a long copy does not hold up an upload, and join() waits for what was marked. */
static void queues_run_beside_each_other(void **state) {
        const uint64_t size = 512 * MIB;
        uint64_t begin, given, uploaded, copied;
        uint8_t *host, got[8];
        void *device, *small;

        need_device();
        host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(host, MAP_FAILED);
        memset(host, 1, size);
        assert_int_equal(ops->pin(gpu, host, size), 0);
        assert_int_equal(ops->memory_new(gpu, size, &device), 0);
        assert_int_equal(ops->memory_new(gpu, 8, &small), 0);
        assert_int_equal(ops->upload(gpu, small, host, 8), 0);
        assert_int_equal(ops->download(gpu, got, small, 8), 0);

        begin = clock_usec();
        for (unsigned i = 0; i < 4; i++)
                assert_int_equal(ops->fetch(gpu, &(LkFetch){device, host, 1, size, 0}), 0);
        assert_int_equal(ops->mark(gpu, LK_COPY, 3), 0);
        given = clock_usec() - begin;
        assert_int_equal(ops->download(gpu, got, small, 8), 0);
        uploaded = clock_usec() - begin;
        assert_int_equal(ops->join(gpu, 3), 0);
        copied = clock_usec() - begin;
        print_message("given out after %llu us, small download after %llu, copies after %llu\n",
                (unsigned long long) given, (unsigned long long) uploaded, (unsigned long long) copied);
        assert_true(uploaded < copied / 2);

        ops->memory_free(gpu, device);
        ops->memory_free(gpu, small);
        ops->memory_trim(gpu);
        ops->unpin(host, size);
        assert_int_equal(munmap(host, size), 0);
}

/* Through registered memory, over the edges of its pieces, to another context; each place is used again when the copy out of it has
 * ended. */
static void copies_through_the_host_arrive(void **state) {
        const uint64_t size = 40 * MIB + 4096, shift = 3 * 256;
        CLEANUP_FREE uint8_t *sent = NULL, *got = NULL;
        LkContext *other = NULL;
        LkCopy out, in;
        uint8_t *host;
        void *a, *b;

        need_device();
        sent = malloc(size);
        got = calloc(1, size);
        host = mmap(NULL, size + MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(sent && got);
        assert_ptr_not_equal(host, MAP_FAILED);
        fill(sent, size, 6);
        assert_int_equal(ops->pin(gpu, host, size + MIB), 0);
        assert_int_equal(ops->context_new(0, &other), 0);
        assert_int_equal(ops->memory_new(gpu, size, &a), 0);
        assert_int_equal(ops->memory_new(other, size, &b), 0);
        assert_int_equal(ops->mark(other, LK_COMPUTE, 9), 0);
        assert_int_equal(ops->mark(other, LK_TAKE, 8), 0);
        out = (LkCopy){.to = host + shift, .from = a, .rows = 1, .width = size};
        in = (LkCopy){.to = b, .from = host + shift, .rows = 1, .width = size};
        for (unsigned round = 0; round < 5; round++) {
                sent[round * 9 * MIB] ^= 0x55;
                assert_int_equal(ops->upload(gpu, a, sent, size), 0);
                assert_int_equal(ops->mark(gpu, LK_COMPUTE, 10), 0);
                assert_int_equal(ops->wait(gpu, LK_PEER, 10), 0);
                assert_int_equal(ops->wait_for(gpu, LK_PEER, other, 8), 0);
                assert_int_equal(ops->copy(gpu, LK_PEER, &out), 0);
                assert_int_equal(ops->mark(gpu, LK_PEER, 11), 0);
                assert_int_equal(ops->wait_for(other, LK_TAKE, gpu, 11), 0);
                assert_int_equal(ops->wait(other, LK_TAKE, 9), 0);
                assert_int_equal(ops->copy(other, LK_TAKE, &in), 0);
                assert_int_equal(ops->mark(other, LK_TAKE, 8), 0);
                assert_int_equal(ops->wait(other, LK_COMPUTE, 8), 0);
                assert_int_equal(ops->download(other, got, b, size), 0);
                assert_int_equal(ops->mark(other, LK_COMPUTE, 9), 0);
                assert_int_equal(ops->is_done(other, 8), 1);
                assert_memory_equal(got, sent, size);
        }
        ops->memory_free(gpu, a);
        ops->memory_free(other, b);
        other = ops->context_free(other);
        ops->unpin(host, size + MIB);
        assert_int_equal(munmap(host, size + MIB), 0);
}

/* Rows inside a context, then to another context of the device, which waits for them; back over what the other has read. */
static void copies_between_contexts_arrive(void **state) {
        const uint64_t rows = 1000, width = 4000, stride = 4352, size = rows * stride;
        CLEANUP_FREE uint8_t *sent = NULL, *got = NULL;
        LkContext *other = NULL;
        LkCopy inside, across;
        void *a, *dense, *b;

        need_device();
        sent = malloc(size);
        got = calloc(1, size);
        assert_true(sent && got);
        fill(sent, size, 5);
        assert_int_equal(ops->context_new(0, &other), 0);
        assert_int_equal(ops->memory_new(gpu, size, &a), 0);
        assert_int_equal(ops->memory_new(gpu, rows * width, &dense), 0);
        assert_int_equal(ops->memory_new(other, rows * width, &b), 0);
        assert_int_equal(ops->mark(other, LK_COMPUTE, 9), 0);
        inside = (LkCopy){.to = dense, .from = a, .rows = rows, .width = width, .to_stride = width, .from_stride = stride};
        across = (LkCopy){.to = b, .from = dense, .rows = 1, .width = rows * width};
        for (unsigned round = 0; round < 20; round++) {
                sent[round] ^= 0x55;
                assert_int_equal(ops->upload(gpu, a, sent, size), 0);
                assert_int_equal(ops->copy(gpu, LK_COMPUTE, &inside), 0);
                assert_int_equal(ops->mark(gpu, LK_COMPUTE, 10), 0);
                assert_int_equal(ops->wait(gpu, LK_PEER, 10), 0);
                assert_int_equal(ops->wait_for(gpu, LK_PEER, other, 9), 0);
                assert_int_equal(ops->copy(gpu, LK_PEER, &across), 0);
                assert_int_equal(ops->mark(gpu, LK_PEER, 11), 0);
                assert_int_equal(ops->wait_for(other, LK_COMPUTE, gpu, 11), 0);
                assert_int_equal(ops->download(other, got, b, rows * width), 0);
                assert_int_equal(ops->mark(other, LK_COMPUTE, 9), 0);
                assert_int_equal(ops->is_done(gpu, 11), 1);
                for (uint64_t i = 0; i < rows; i++)
                        assert_memory_equal(got + i * width, sent + i * stride, width);
        }
        assert_int_equal(ops->copy(gpu, LK_COPY, &(LkCopy){.to = b, .from = a, .rows = 1, .width = 1}), -EINVAL);
        inside.to_stride = width - 1;
        assert_int_equal(ops->copy(gpu, LK_COMPUTE, &inside), -EINVAL);
        assert_int_equal(ops->wait_for(gpu, LK_COMPUTE, other, 200), -EINVAL); /* never marked */
        ops->memory_free(gpu, a);
        ops->memory_free(gpu, dense);
        other = ops->context_free(other);
}

static void work_for_a_while(void *memory) {
        for (unsigned i = 0; i < 200; i++)
                assert_int_equal(ops->convert(gpu, &(LkConvert){.m = 1024, .n = 16384, .x = memory, .x_type = LK_F32, .x_ld = 16384,
                                                               .y = (uint8_t *) memory + 64 * MIB, .y_type = LK_BF16, .y_ld = 16384}),
                        0);
}

/* By the host's clock, though the device is behind. */
static void stamp_says_when_it_was_reached(void **state) {
        uint64_t begin, end, usec;
        void *memory, *numbers;

        need_device();
        numbers = calloc(64, MIB);
        assert_non_null(numbers);
        assert_int_equal(ops->memory_new(gpu, 96 * MIB, &memory), 0);
        assert_int_equal(ops->upload(gpu, memory, numbers, 64 * MIB), 0);
        free(numbers);
        work_for_a_while(memory);
        assert_int_equal(ops->stamp(gpu), 0);
        assert_int_equal(ops->stamped(gpu, &usec), 0);
        begin = clock_usec();
        assert_int_equal(ops->stamp(gpu), 0);
        assert_int_equal(ops->stamped(gpu, &usec), 0);
        end = clock_usec();
        print_message("an empty queue: %lld us after the call, which took %llu\n", (long long) (usec - begin),
                (unsigned long long) (end - begin));
        assert_true(usec + 300 >= begin && usec <= end + 300);

        begin = clock_usec();
        work_for_a_while(memory);
        assert_int_equal(ops->stamp(gpu), 0);
        work_for_a_while(memory);
        assert_int_equal(ops->stamped(gpu, &usec), 0);
        end = clock_usec();
        print_message("between equal parts: after %llu of %llu us\n", (unsigned long long) (usec - begin),
                (unsigned long long) (end - begin));
        assert_true(usec > begin + (end - begin) / 3 && usec < end - (end - begin) / 3);
        ops->memory_free(gpu, memory);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(library_loads_beside_and_is_complete),
                cmocka_unit_test(memory_is_kept_and_given_back),
                cmocka_unit_test(memory_that_is_not_there_is_enomem),
                cmocka_unit_test(upload_is_done_with_the_hosts_memory),
                cmocka_unit_test(fetch_crosses_edges_of_registrations),
                cmocka_unit_test(download_crosses_edges_of_registrations),
                cmocka_unit_test(pin_that_fails_changes_nothing),
                cmocka_unit_test(pin_from_threads_at_once),
                cmocka_unit_test(event_numbers_are_checked),
                cmocka_unit_test(queues_run_beside_each_other),
                cmocka_unit_test(copies_between_contexts_arrive),
                cmocka_unit_test(copies_through_the_host_arrive),
                cmocka_unit_test(stamp_says_when_it_was_reached),
        };

        return cmocka_run_group_tests(tests, setup, backends_teardown);
}
