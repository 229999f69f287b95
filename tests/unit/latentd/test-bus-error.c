/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>
#include <systemd/sd-bus.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/manager.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"

/* A bus that is never authenticated: enough to make and read messages. */
static int set_up(void **state) {
        int fds[2];
        sd_bus *bus;

        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) < 0 || sd_bus_new(&bus) < 0 ||
            sd_bus_set_fd(bus, fds[0], fds[0]) < 0 || sd_bus_start(bus) < 0)
                return -1;

        (void) close(fds[1]);
        *state = bus;
        return 0;
}

static int tear_down(void **state) {
        sd_bus_close_unref(*state);
        return 0;
}

/* A message with one a{sv}, as sd_bus_message_append() takes it, ready to be read. */
static sd_bus_message *message_with(sd_bus *bus, const char *types, ...) {
        sd_bus_message *m;
        va_list ap;

        assert_true(sd_bus_message_new_method_call(bus, &m, "a.b", "/", "a.b", "C") >= 0);
        va_start(ap, types);
        assert_true(sd_bus_message_appendv(m, types, ap) >= 0);
        va_end(ap);
        assert_true(sd_bus_message_seal(m, 1, 0) >= 0);
        assert_true(sd_bus_message_rewind(m, true) >= 0);
        return m;
}

typedef struct Values {
        const char *s, *o;
        uint64_t t;
        uint32_t u;
        double d;
        int b;
        WireTensor tensor;
        bool s_seen, t_seen;
} Values;

#define KEYS(v)                                          \
        {                                                \
                { "string", "s", &(v).s, &(v).s_seen },  \
                { "path", "o", &(v).o },                 \
                { "big", "t", &(v).t, &(v).t_seen },     \
                { "small", "u", &(v).u },                \
                { "real", "d", &(v).d },                 \
                { "flag", "b", &(v).b },                 \
                { "place", "(tsat)", &(v).tensor },      \
                { "shares", "ad", NULL, .later = true }, \
        }

static int read_values(sd_bus_message *m, Values *v, Fault *f) {
        const BusKey keys[] = KEYS(*v);

        return bus_read_dictionary(m, keys, ELEMENTSOF(keys), f);
}

static void read_dictionary_of_every_type_fills_all(void **state) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = message_with(*state, "a{sv}", 7,
                "flag", "b", 1, "real", "d", 0.25, "small", "u", UINT32_C(7), "big", "t", UINT64_C(1) << 40,
                "path", "o", "/a/b", "string", "s", "text", "place", "(tsat)", UINT64_C(128), "BF16", 2, UINT64_C(3), UINT64_C(5));
        Values v = {};
        Fault f = {};

        assert_int_equal(read_values(m, &v, &f), 0);
        assert_string_equal(v.s, "text");
        assert_string_equal(v.o, "/a/b");
        assert_true(v.t == UINT64_C(1) << 40);
        assert_int_equal(v.u, 7);
        assert_true(v.d == 0.25);
        assert_int_equal(v.b, 1);
        assert_true(v.s_seen && v.t_seen);
        assert_int_equal(v.tensor.offset, 128);
        assert_int_equal(v.tensor.dtype, ST_BF16);
        assert_int_equal(v.tensor.n_dims, 2);
        assert_int_equal(v.tensor.shape[0], 3);
        assert_int_equal(v.tensor.shape[1], 5);
        assert_int_equal(v.tensor.size, 30);
        assert_string_equal(f.name, "");
}

static void read_dictionary_empty_leaves_defaults(void **state) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = message_with(*state, "a{sv}", 0);
        Values v = { .u = 42 };
        Fault f = {};

        assert_true(read_values(m, &v, &f) >= 0);
        assert_int_equal(v.u, 42);
        assert_false(v.s_seen);
}

static void read_dictionary_leaves_position_behind_it(void **state) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = message_with(*state, "a{sv}u", 1, "small", "u", UINT32_C(1), UINT32_C(99));
        Values v = {};
        uint32_t next;
        Fault f = {};

        assert_true(read_values(m, &v, &f) >= 0);
        assert_int_equal(sd_bus_message_read(m, "u", &next), 1);
        assert_int_equal(next, 99);
}

static void refused(sd_bus_message *m, const char *name, const char *const *texts) {
        Values v = {};
        Fault f = {};

        assert_true(read_values(m, &v, &f) < 0);
        assert_string_equal(f.name, name);
        for (; *texts; texts++)
                if (!strstr(f.text, *texts))
                        fail_msg("\"%s\" is not in: %s", *texts, f.text);
        sd_bus_message_unref(m);
}

#define REFUSED(m, name, ...) refused((m), (name), (const char *const[]) { __VA_ARGS__, NULL })

static void read_dictionary_unknown_key_lists_known_ones(void **state) {
        REFUSED(message_with(*state, "a{sv}", 1, "smal", "u", UINT32_C(1)), "InvalidArgument", "\"smal\"",
                "string, path, big, small, real, flag, place.");
}

static void read_dictionary_without_keys_refuses_any(void **state) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = message_with(*state, "a{sv}", 1, "x", "u", UINT32_C(1));
        Fault f = {};

        assert_true(bus_read_dictionary(m, NULL, 0, &f) < 0);
        assert_string_equal(f.name, "InvalidArgument");
}

static void read_dictionary_double_key_is_refused(void **state) {
        REFUSED(message_with(*state, "a{sv}", 2, "small", "u", UINT32_C(1), "small", "u", UINT32_C(1)), "InvalidArgument",
                "\"small\"", "twice");
}

static void read_dictionary_every_wrong_type_names_both(void **state) {
        static const char *const keys[] = { "string", "path", "big", "small", "real", "flag", "place" };
        static const char *const types[] = { "\"s\"", "\"o\"", "\"t\"", "\"u\"", "\"d\"", "\"b\"", "\"(tsat)\"" };

        for (size_t i = 0; i < ELEMENTSOF(keys); i++) {
                REFUSED(message_with(*state, "a{sv}", 1, keys[i], "y", 1), "InvalidArgument", keys[i], "\"y\"", types[i]);
                REFUSED(message_with(*state, "a{sv}", 1, keys[i], "as", 0), "InvalidArgument", keys[i], "\"as\"", types[i]);
                REFUSED(message_with(*state, "a{sv}", 1, keys[i], "v", "s", "x"), "InvalidArgument", keys[i], "\"v\"", types[i]);
        }

        REFUSED(message_with(*state, "a{sv}", 1, "small", "t", UINT64_C(1)), "InvalidArgument", "small", "\"t\"", "\"u\"");
        REFUSED(message_with(*state, "a{sv}", 1, "place", "(tsau)", UINT64_C(0), "F32", 0), "InvalidArgument", "place", "(tsau)");
}

static void read_dictionary_later_key_is_not_supported(void **state) {
        REFUSED(message_with(*state, "a{sv}", 1, "shares", "ad", 1, 1.0), "NotSupported", "\"shares\"");
        REFUSED(message_with(*state, "a{sv}", 1, "shares", "s", "x"), "InvalidArgument", "\"shares\"", "\"ad\"");
}

#define TENSOR(bus, ...) message_with((bus), "a{sv}", 1, "place", "(tsat)", __VA_ARGS__)

static void read_dictionary_bad_tensor_is_refused(void **state) {
        const uint64_t one = 1, zero = 0, huge = UINT64_C(1) << 33;

        REFUSED(TENSOR(*state, zero, "F33", 1, one), "InvalidTensor", "place", "F33");
        REFUSED(TENSOR(*state, zero, "f32", 1, one), "InvalidTensor", "place", "f32");
        REFUSED(TENSOR(*state, zero, "U8", 6, one, one, one, one, one, one), "InvalidTensor", "place", "6 dimensions");
        REFUSED(TENSOR(*state, zero, "U8", 2, one, zero), "InvalidTensor", "place", "Dimension 1");
        REFUSED(TENSOR(*state, zero, "U8", 2, huge, huge), "InvalidTensor", "place", "64 bits");
        REFUSED(TENSOR(*state, zero, "F64", 2, UINT64_C(1) << 31, UINT64_C(1) << 30), "InvalidTensor", "place", "64 bits");
}

static void read_dictionary_largest_tensor_is_counted(void **state) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m =
                TENSOR(*state, UINT64_C(0), "F32", 2, UINT64_C(1) << 31, (UINT64_C(1) << 31) - 1);
        Values v = {};
        Fault f = {};

        assert_true(read_values(m, &v, &f) >= 0);
        assert_true(v.tensor.size == (UINT64_C(1) << 33) * ((UINT64_C(1) << 31) - 1));
}

static void error_fault_sets_name_and_text(void **state) {
        sd_bus_error e = SD_BUS_ERROR_NULL;
        Fault f = {};

        (void) fault_set(&f, -EBUSY, FAULT_BUSY, "still in use");
        assert_int_equal(bus_error_fault(&e, -EBUSY, &f), -EBUSY);
        assert_string_equal(e.name, "org.latentd.Latent1.Error.Busy");
        assert_string_equal(e.message, "still in use");
        sd_bus_error_free(&e);
}

static void error_fault_without_fault_is_internal(void **state) {
        sd_bus_error e = SD_BUS_ERROR_NULL;
        Fault f = {};

        assert_int_equal(bus_error_fault(&e, -EXDEV, &f), -EXDEV);
        assert_string_equal(e.name, "org.latentd.Latent1.Error.Internal");
        assert_non_null(strstr(e.message, strerror(EXDEV)));
        sd_bus_error_free(&e);
}

static void path_id_reads_only_what_is_written_so(void **state) {
        static const char *const bad[] = {
                "/a/", "/a/0", "/a/01", "/a/1x", "/a/-1", "/a/ 1", "/a/1/2", "/b/1", "/a", "/a/18446744073709551616",
        };
        uint64_t id = 5;

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                assert_int_equal(bus_path_id(bad[i], "/a/", &id), -ENOENT);
                assert_int_equal(id, 5);
        }

        assert_int_equal(bus_path_id("/a/18446744073709551615", "/a/", &id), 0);
        assert_true(id == UINT64_MAX);
        assert_int_equal(bus_path_id("/a/10", "/a/", &id), 0);
        assert_int_equal(id, 10);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(read_dictionary_of_every_type_fills_all),
                cmocka_unit_test(read_dictionary_empty_leaves_defaults),
                cmocka_unit_test(read_dictionary_leaves_position_behind_it),
                cmocka_unit_test(read_dictionary_unknown_key_lists_known_ones),
                cmocka_unit_test(read_dictionary_without_keys_refuses_any),
                cmocka_unit_test(read_dictionary_double_key_is_refused),
                cmocka_unit_test(read_dictionary_every_wrong_type_names_both),
                cmocka_unit_test(read_dictionary_later_key_is_not_supported),
                cmocka_unit_test(read_dictionary_bad_tensor_is_refused),
                cmocka_unit_test(read_dictionary_largest_tensor_is_counted),
                cmocka_unit_test(error_fault_sets_name_and_text),
                cmocka_unit_test(error_fault_without_fault_is_internal),
                cmocka_unit_test(path_id_reads_only_what_is_written_so),
        };

        return cmocka_run_group_tests(tests, set_up, tear_down);
}
