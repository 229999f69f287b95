/* SPDX-License-Identifier: Apache-2.0 */

/* From D-Bus errors to latent_error. */

#include "client/liblatent/error.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

typedef struct Case {
        const char *bus_name;
        int r;
        bool to_object;
        const char *name;
        int code;
} Case;

static void bus_names_mapped(void **state) {
        static const Case cases[] = {
                {BUS_ERROR_PREFIX "DoesNotFit", -EIO, false, "DoesNotFit", -ENOMEM},
                {BUS_ERROR_PREFIX "Busy", -EIO, true, "Busy", -EBUSY},
                {BUS_ERROR_PREFIX "Restarted", -EIO, true, "Restarted", -ECONNRESET},
                {BUS_ERROR_PREFIX "OfALaterVersion", -EIO, true, "OfALaterVersion", -EPROTO},
                {"org.freedesktop.DBus.Error.ServiceUnknown", -EHOSTUNREACH, false, "NoService", -ENOTCONN},
                {"org.freedesktop.DBus.Error.ServiceUnknown", -EHOSTUNREACH, true, "Restarted", -ECONNRESET},
                {"org.freedesktop.DBus.Error.NameHasNoOwner", -ENXIO, true, "Restarted", -ECONNRESET},
                {"org.freedesktop.DBus.Error.Spawn.ChildExited", -EIO, false, "NoService", -ENOTCONN},
                {"org.freedesktop.systemd1.NoSuchUnit", -EIO, false, "NoService", -ENOTCONN},
                {"org.freedesktop.DBus.Error.NoReply", -ETIMEDOUT, false, "Restarted", -ECONNRESET},
                {"org.freedesktop.DBus.Error.Timeout", -ETIMEDOUT, true, "IOError", -ETIMEDOUT},
                {"org.freedesktop.DBus.Error.UnknownObject", -EBADR, true, "NotFound", -ENOENT},
                {"org.freedesktop.DBus.Error.UnknownMethod", -EBADR, true, "NotSupported", -EOPNOTSUPP},
                {"org.freedesktop.DBus.Error.AccessDenied", -EACCES, false, "AccessDenied", -EACCES},
                {"System.Error.ENOTCONN", -ENOTCONN, false, "NoService", -ENOTCONN},
                {"System.Error.ECONNRESET", -ECONNRESET, true, "Restarted", -ECONNRESET},
                {NULL, -EBADMSG, false, "Internal", -EBADMSG},
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                sd_bus_error b = {.name = cases[i].bus_name, .message = "said the bus"};
                latent_error e;

                memset(&e, 0xff, sizeof(e));
                assert_int_equal(error_bus(&e, cases[i].r, &b, cases[i].to_object, "Trying"), cases[i].code);
                assert_string_equal(e.name, cases[i].name);
                assert_int_equal(e.code, cases[i].code);
                assert_true(strlen(e.text) > 0);
                assert_int_equal(
                        error_bus(NULL, cases[i].r, &b, cases[i].to_object, "Trying"), cases[i].code);
        }
}

static void set_hostile_text_cleaned(void **state) {
        latent_error e;

        assert_int_equal(error_set(&e, -EINVAL, "InvalidFile", "a\033[2Jb\xff%s", "\n"), -EINVAL);
        assert_string_equal(e.text, "a?[2Jb??");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(bus_names_mapped),
                cmocka_unit_test(set_hostile_text_cleaned),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
