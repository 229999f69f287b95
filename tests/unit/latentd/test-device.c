/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdbool.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/latentd/device.h"
#include "service/shared/cleanup.h"

static bool read_line(const char *device, const char *file, char *ret, size_t size) {
        char path[320];
        bool ok;
        FILE *f;

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/%s", device, file);
        f = fopen(path, "re");
        ok = f && fgets(ret, (int) size, f);
        if (f)
                (void) fclose(f);
        return ok;
}

/* sysfs, read by hand, says the same. */
static void device_enumerate_agrees_with_sysfs(void **state) {
        CLEANUP_FREE DeviceInfo *list = NULL;
        DIR *d = opendir("/sys/bus/pci/devices");
        size_t n = 42, expected = 0;
        struct dirent *e;

        assert_int_equal(device_enumerate(&list, &n), 0);

        while (d && (e = readdir(d))) {
                char vendor[32], class[32];
                bool found = false;

                if (e->d_name[0] == '.' || !read_line(e->d_name, "vendor", vendor, sizeof(vendor)) ||
                        !read_line(e->d_name, "class", class, sizeof(class)))
                        continue;
                if (strncmp(vendor, "0x10de", 6) != 0 || strncmp(class, "0x03", 4) != 0)
                        continue;

                expected++;
                for (size_t i = 0; i < n; i++)
                        found = found || strcmp(list[i].pci_address, e->d_name) == 0;
                assert_true(found);
        }
        if (d)
                (void) closedir(d);
        assert_int_equal(n, expected);

        for (size_t i = 0; i < n; i++) {
                assert_true(list[i].numa_node >= -1);
                if (i > 0)
                        assert_true(strcmp(list[i - 1].pci_address, list[i].pci_address) < 0);
        }
}

static void device_parse_share_takes_positive_numbers_only(void **state) {
        const char *const wrong[] = { "", " 1", "1 ", "+1", "-1", "x", "0x2", "inf", "nan", "1e3", "1.2.3", "." };
        const char *const out[] = { "0", "0.0", "1000.1", "99999999999999999999" };
        double v = 42;

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++)
                assert_int_equal(device_parse_share(wrong[i], &v), -EINVAL);
        for (size_t i = 0; i < ELEMENTSOF(out); i++)
                assert_int_equal(device_parse_share(out[i], &v), -ERANGE);
        assert_true(v == 42);

        assert_int_equal(device_parse_share("0.5", &v), 0);
        assert_true(v == 0.5);
        assert_int_equal(device_parse_share("1000", &v), 0);
        assert_true(v == 1000);
}

/* Under umockdev-run with devices.umockdev. */
static void device_enumerate_reads_the_administrators_word(void **state) {
        CLEANUP_FREE DeviceInfo *list = NULL;
        size_t n;

        assert_int_equal(device_enumerate(&list, &n), 0);
        assert_int_equal(n, 3);
        assert_string_equal(list[0].pci_address, "0000:41:00.0");
        assert_true(list[0].ignore && list[0].share == 1 && list[0].numa_node == 0);
        assert_string_equal(list[1].pci_address, "0000:42:00.0");
        assert_true(!list[1].ignore && list[1].share == 0.5 && list[1].numa_node == 1);
        assert_string_equal(list[2].pci_address, "0000:43:00.0");
        assert_true(!list[2].ignore && list[2].share == 1 && list[2].numa_node == -1);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(device_parse_share_takes_positive_numbers_only),
                cmocka_unit_test(device_enumerate_agrees_with_sysfs),
        };

        const struct CMUnitTest mocked[] = {
                cmocka_unit_test(device_enumerate_agrees_with_sysfs),
                cmocka_unit_test(device_enumerate_reads_the_administrators_word),
        };

        if (getenv("LATENT_TEST_MOCKED_DEVICES"))
                return cmocka_run_group_tests(mocked, NULL, NULL);

        return cmocka_run_group_tests(tests, NULL, NULL);
}
