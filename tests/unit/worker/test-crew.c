/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/crew.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

typedef struct Scene {
        atomic_uint done[CREW_MAX], all;
} Scene;

static void note(void *userdata, uint32_t i, uint32_t n) {
        Scene *x = userdata;

        x->done[i]++;
        x->all = n;
}

static void every_part_once(Scene *x, uint32_t most) {
        assert_true(x->all >= 1 && x->all <= most);
        for (uint32_t i = 0; i < CREW_MAX; i++)
                assert_int_equal(x->done[i], i < x->all);
}

static void crew_every_part_is_done_once(void **state) {
        for (unsigned i = 0; i < 20; i++) {
                Scene x = {};
                Crew c;

                crew_begin(&c, CREW_MAX, note, &x);
                crew_end(&c);
                every_part_once(&x, CREW_MAX);
        }
}

static void crew_has_no_more_parts_than_asked(void **state) {
        for (uint32_t most = 1; most <= CREW_MAX + 1; most++) {
                Scene x = {};
                Crew c;

                crew_begin(&c, most, note, &x);
                crew_end(&c);
                every_part_once(&x, most < CREW_MAX ? most : CREW_MAX);
        }
}

/* The caller does what no thread could be had for. */
static void crew_without_threads_is_done_too(void **state) {
        Scene x = {};
        Crew c = {.func = note, .userdata = &x, .n = 3};

        crew_end(&c);
        every_part_once(&x, CREW_MAX);
        assert_int_equal(x.all, 3);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(crew_every_part_is_done_once),
                cmocka_unit_test(crew_has_no_more_parts_than_asked),
                cmocka_unit_test(crew_without_threads_is_done_too),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
