/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/touch.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

#define MIB (UINT64_C(1) << 20)

/* A model of one matrix for the text, one for the step's first part, and one that is small. */
typedef struct Toy {
        LkMatrix text, step, small;
} Toy;

static uint32_t pass(const void *model, H3Pass p, H3Part *ret) {
        if (ret)
                *ret = (H3Part){p == H3_PASS_TEXT ? H3_PART_TEXT : H3_PART_FEED, 0};
        return 1;
}

static int visit(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        Toy *toy = model;
        LkVector none = {};
        int r;

        r = f(userdata, NULL, &none);
        if (r >= 0 && part.kind == H3_PART_FEED)
                r = f(userdata, &toy->small, NULL);
        return r < 0 ? r : f(userdata, part.kind == H3_PART_TEXT ? &toy->text : &toy->step, NULL);
}

static void *copy(const void *model) {
        Toy *toy = malloc(sizeof(*toy));

        if (toy)
                *toy = *(const Toy *) model;
        return toy;
}

static const H3WeightsKind kind = {.pass = pass, .visit = visit, .copy = copy, .free = free};

typedef struct Scene {
        uint8_t *map; /* 8 MiB of a file whose pages are there, but not in this mapping */
        Toy toy;
} Scene;

static LkMatrix matrix(const uint8_t *data, uint64_t size) {
        return (LkMatrix){.data = data, .type = LK_F32, .rows = size / 4096, .cols = 1024, .row_stride = 4096, .block_rows = size / 4096,
                .block_stride = size};
}

static void scene_begin(Scene *x) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint8_t *writer;

        assert_int_equal(memfd_new("test-touch", 8 * MIB, &fd), 0);
        writer = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        assert_ptr_not_equal(writer, MAP_FAILED);
        memset(writer, 1, 8 * MIB);
        assert_int_equal(munmap(writer, 8 * MIB), 0);
        x->map = mmap(NULL, 8 * MIB, PROT_READ, MAP_SHARED, fd, 0);
        assert_ptr_not_equal(x->map, MAP_FAILED);
        x->toy = (Toy){matrix(x->map, 3 * MIB), matrix(x->map + 4 * MIB, 2 * MIB), matrix(x->map + 7 * MIB, MIB / 2)};
}

static void scene_end(Scene *x) {
        assert_int_equal(munmap(x->map, 8 * MIB), 0);
}

/* Is it in this process's page tables? */
static bool is_touched(const uint8_t *at) {
        CLEANUP_CLOSE int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE), entry = 0;

        assert_true(fd >= 0);
        assert_int_equal(pread(fd, &entry, sizeof(entry), (off_t) ((uintptr_t) at / page * sizeof(entry))), sizeof(entry));
        return entry >> 63;
}

static bool is_all_touched(const uint8_t *at, uint64_t size) {
        for (uint64_t i = 0; i < size; i += (uint64_t) sysconf(_SC_PAGESIZE))
                if (!is_touched(at + i))
                        return false;
        return true;
}

static bool kernel_can(Scene *x) {
        return madvise(x->map + 6 * MIB, 4096, MADV_POPULATE_READ) == 0;
}

static void what_is_waited_for_is_touched(void **state) {
        Scene x;
        Touch *t;

        scene_begin(&x);
        assert_false(is_touched(x.map) || is_touched(x.map + 4 * MIB));
        t = touch_begin(&kind, &x.toy, UINT64_C(1) << 30);
        assert_non_null(t);
        assert_true(touch_await(t, x.map + 4 * MIB, 2 * MIB));
        assert_true(touch_await(t, x.map + MIB, MIB));
        assert_true(touch_await(t, x.map, 3 * MIB));
        assert_false(touch_await(t, x.map + 2 * MIB, 3 * MIB)); /* of two */
        assert_false(touch_await(t, x.map + 7 * MIB, MIB / 2)); /* small */
        if (kernel_can(&x)) {
                assert_true(is_all_touched(x.map, 3 * MIB) && is_all_touched(x.map + 4 * MIB, 2 * MIB));
                assert_false(is_touched(x.map + 7 * MIB));
        }
        t = touch_free(t);
        scene_end(&x);
}

static void no_more_is_touched_than_was_said(void **state) {
        Scene x;
        Touch *t;

        scene_begin(&x);
        t = touch_begin(&kind, &x.toy, 4 * MIB);
        assert_true(touch_await(t, x.map, 3 * MIB)); /* the first pass's */
        assert_false(touch_await(t, x.map + 4 * MIB, 2 * MIB));
        t = touch_free(t);
        assert_false(is_touched(x.map + 5 * MIB));
        scene_end(&x);
}

static void end_comes_at_any_time(void **state) {
        Scene x;

        scene_begin(&x);
        for (unsigned i = 0; i < 20; i++)
                assert_null(touch_free(touch_begin(&kind, &x.toy, UINT64_C(1) << 30)));
        assert_false(touch_await(NULL, x.map, MIB));
        assert_null(touch_free(NULL));
        scene_end(&x);
}

static void now_is_all_of_it(void **state) {
        Scene x;

        scene_begin(&x);
        touch_now(x.map, 4096);
        touch_now(x.map + 4 * MIB + 100, 2 * MIB);
        if (kernel_can(&x)) {
                assert_false(is_touched(x.map));
                assert_true(is_all_touched(x.map + 4 * MIB + 4096, 2 * MIB - 4096));
        }
        scene_end(&x);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(what_is_waited_for_is_touched),
                cmocka_unit_test(no_more_is_touched_than_was_said),
                cmocka_unit_test(end_comes_at_any_time),
                cmocka_unit_test(now_is_all_of_it),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
