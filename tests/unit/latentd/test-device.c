/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
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

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(device_enumerate_agrees_with_sysfs),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
