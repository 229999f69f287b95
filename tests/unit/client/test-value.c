/* SPDX-License-Identifier: Apache-2.0 */

/* Trees of values from D-Bus messages. */

#include "client/liblatent/value.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

/* Messages can be built without anybody at the other end. */
static int setup(void **state) {
        int fds[2];
        sd_bus *bus;

        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        assert_int_equal(sd_bus_new(&bus), 0);
        assert_int_equal(sd_bus_set_fd(bus, fds[0], fds[0]), 0);
        assert_true(sd_bus_start(bus) >= 0);
        (void) close(fds[1]);
        *state = bus;
        return 0;
}

static int teardown(void **state) {
        sd_bus_close_unref(*state);
        return 0;
}

static sd_bus_message *message(void **state) {
        sd_bus_message *m = NULL;

        assert_int_equal(sd_bus_message_new_signal(*state, &m, "/x", "x.y", "Z"), 0);
        return m;
}

static latent_value *read_back(sd_bus_message *m, int expected) {
        latent_value *v = NULL;

        assert_int_equal(sd_bus_message_seal(m, 1, 0), 0);
        assert_int_equal(value_read(m, &v), expected);
        sd_bus_message_unref(m);
        return v;
}

static void read_dictionary_of_all_types(void **state) {
        sd_bus_message *m = message(state);
        latent_value *v;
        uint64_t u;
        int64_t i;
        double d;

        assert_true(sd_bus_message_append(m, "a{sv}", 6, "b", "b", 1, "u", "t", UINT64_MAX, "i", "i", -5,
                            "d", "d", 0.5, "o", "o", "/a/b", "list", "at", 3, UINT64_C(4), UINT64_C(5),
                            UINT64_C(6)) >= 0);
        v = read_back(m, 0);

        assert_int_equal(latent_value_type(v), LATENT_VALUE_DICT);
        assert_int_equal(latent_value_count(v), 6);
        assert_string_equal(latent_value_key_at(v, 0), "b");
        assert_int_equal(latent_value_as_bool(latent_value_get(v, "b")), 1);
        assert_int_equal(latent_value_as_uint(latent_value_get(v, "u"), &u), 0);
        assert_true(u == UINT64_MAX);
        assert_int_equal(latent_value_as_int(latent_value_get(v, "u"), &i), -ERANGE);
        assert_int_equal(latent_value_as_int(latent_value_get(v, "i"), &i), 0);
        assert_int_equal(i, -5);
        assert_int_equal(latent_value_as_uint(latent_value_get(v, "i"), &u), -ERANGE);
        assert_int_equal(latent_value_as_double(latent_value_get(v, "i"), &d), 0);
        assert_true(d == -5);
        assert_int_equal(latent_value_as_double(latent_value_get(v, "d"), &d), 0);
        assert_true(d == 0.5);
        assert_string_equal(latent_value_as_string(latent_value_get(v, "o")), "/a/b");
        assert_int_equal(latent_value_count(latent_value_get(v, "list")), 3);
        assert_int_equal(latent_value_as_uint(latent_value_at(latent_value_get(v, "list"), 2), &u), 0);
        assert_int_equal(u, 6);
        latent_value_free(v);
}

static void read_structs_in_lists(void **state) {
        sd_bus_message *m = message(state);
        latent_value *v;

        assert_true(sd_bus_message_append(
                            m, "a(oss)", 2, "/j/1", "load", "done", "/j/2", "step", "running") >= 0);
        v = read_back(m, 0);
        assert_int_equal(latent_value_type(v), LATENT_VALUE_LIST);
        assert_string_equal(latent_value_as_string(latent_value_at(latent_value_at(v, 1), 1)), "step");
        latent_value_free(v);
}

static void read_empty_containers(void **state) {
        sd_bus_message *m = message(state);
        latent_value *v;

        assert_true(sd_bus_message_append(m, "a{sv}", 0) >= 0);
        v = read_back(m, 0);
        assert_int_equal(latent_value_type(v), LATENT_VALUE_DICT);
        assert_int_equal(latent_value_count(v), 0);
        latent_value_free(v);
}

static void read_dictionary_with_number_keys_is_list(void **state) {
        sd_bus_message *m = message(state);
        latent_value *v;
        uint64_t u;

        assert_true(sd_bus_message_append(m, "a{us}", 1, 7, "seven") >= 0);
        v = read_back(m, 0);
        assert_int_equal(latent_value_type(v), LATENT_VALUE_LIST);
        assert_int_equal(latent_value_as_uint(latent_value_at(latent_value_at(v, 0), 0), &u), 0);
        assert_int_equal(u, 7);
        latent_value_free(v);
}

static void read_nothing_refused(void **state) {
        assert_null(read_back(message(state), -EBADMSG));
}

static void access_of_null_is_harmless(void **state) {
        uint64_t u = 3;

        assert_int_equal(latent_value_type(NULL), 0);
        assert_int_equal(latent_value_count(NULL), 0);
        assert_null(latent_value_at(NULL, 0));
        assert_null(latent_value_get(latent_value_get(NULL, "a"), "b"));
        assert_null(latent_value_key_at(NULL, 0));
        assert_null(latent_value_as_string(NULL));
        assert_int_equal(latent_value_as_uint(NULL, &u), -EINVAL);
        assert_int_equal(latent_value_as_bool(NULL), -EINVAL);
        assert_int_equal(u, 3);
        latent_value_free(NULL);
}

static void sort_by_path_numbers_in_order(void **state) {
        static const char *const paths[] = {"/m/10", "/m/9", "/m/2", "/m/100"};
        latent_value *list = value_new(LATENT_VALUE_LIST);

        for (size_t i = 0; i < 4; i++) {
                latent_value *v = value_new(LATENT_VALUE_DICT);

                assert_int_equal(value_add_string(v, "path", paths[i]), 0);
                assert_int_equal(value_add(list, NULL, v), 0);
        }
        assert_int_equal(value_add(list, NULL, NULL), -ENOMEM);
        value_sort_by_path(list);
        assert_string_equal(
                latent_value_as_string(latent_value_get(latent_value_at(list, 0), "path")), "/m/2");
        assert_string_equal(
                latent_value_as_string(latent_value_get(latent_value_at(list, 3), "path")), "/m/100");
        latent_value_free(list);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(read_dictionary_of_all_types),
                TEST(read_structs_in_lists),
                TEST(read_empty_containers),
                TEST(read_dictionary_with_number_keys_is_list),
                TEST(read_nothing_refused),
                cmocka_unit_test(access_of_null_is_harmless),
                cmocka_unit_test(sort_by_path_numbers_in_order),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
