/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/device.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <systemd/sd-device.h>

#include "service/latentd/config.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define VENDOR_NVIDIA "0x10de"
#define CLASS_DISPLAY "0x03" /* VGA, 3D and other display controllers */

int device_parse_share(const char *s, double *ret) {
        char *end;
        double v;

        /* strtod() takes spaces, signs, hexadecimal numbers and words; nobody means those here. */
        if (s[0] == '\0' || strspn(s, "0123456789.") != strlen(s))
                return -EINVAL;

        v = strtod(s, &end);
        if (*end != '\0' || end == s)
                return -EINVAL;
        if (!(v > 0 && v <= DEVICE_SHARE_MAX))
                return -ERANGE;

        *ret = v;
        return 0;
}

/* What the administrator set in udev rules. A wrong value is said once per look and then counts as not set. */
static void device_read_properties(sd_device *d, DeviceInfo *ret) {
        const char *value;
        int r;

        if (sd_device_get_property_value(d, "LATENTD_IGNORE", &value) >= 0) {
                r = config_parse_boolean(value);
                if (r < 0)
                        log_warning("LATENTD_IGNORE=%.32s of device %s is wrong, expected 0 or 1", value, ret->pci_address);
                else
                        ret->ignore = r > 0;
        }

        if (sd_device_get_property_value(d, "LATENTD_SHARE", &value) >= 0 && device_parse_share(value, &ret->share) < 0)
                log_warning("LATENTD_SHARE=%.32s of device %s is wrong, expected a number greater than 0, at most %g", value,
                        ret->pci_address, DEVICE_SHARE_MAX);
}

static void device_read(sd_device *d, const char *address, DeviceInfo *ret) {
        const char *driver, *node;

        *ret = (DeviceInfo){.numa_node = -1, .share = 1};
        (void) snprintf(ret->pci_address, sizeof(ret->pci_address), "%s", address);

        if (sd_device_get_driver(d, &driver) >= 0)
                (void) snprintf(ret->driver, sizeof(ret->driver), "%s", driver);
        if (sd_device_get_sysattr_value(d, "numa_node", &node) < 0 ||
                sscanf(node, "%d", &ret->numa_node) != 1)
                ret->numa_node = -1;
        device_read_properties(d, ret);
}

/* "0000:41:00.0": fixed width, so that the order of the text is that of the bus. */
static int by_address(const void *a, const void *b) {
        return strcmp(((const DeviceInfo *) a)->pci_address, ((const DeviceInfo *) b)->pci_address);
}

static int new_enumerator(sd_device_enumerator **ret) {
        CLEANUP(sd_device_enumerator_unrefp) sd_device_enumerator *e = NULL;
        int r;

        r = sd_device_enumerator_new(&e);
        if (r < 0)
                return r;
        r = sd_device_enumerator_allow_uninitialized(e); /* a container has sysfs and no udev */
        if (r < 0)
                return r;
        r = sd_device_enumerator_add_match_subsystem(e, "pci", true);
        if (r < 0)
                return r;
        r = sd_device_enumerator_add_match_sysattr(e, "vendor", VENDOR_NVIDIA, true);
        if (r < 0)
                return r;
        r = sd_device_enumerator_add_match_sysattr(e, "class", CLASS_DISPLAY "*", true);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(e);
        return 0;
}

int device_enumerate(DeviceInfo **ret, size_t *ret_n) {
        CLEANUP(sd_device_enumerator_unrefp) sd_device_enumerator *e = NULL;
        CLEANUP_FREE DeviceInfo *list = NULL;
        size_t n = 0;
        int r;

        r = new_enumerator(&e);
        if (r == -ENOMEM)
                return r;

        for (sd_device *d = r < 0 ? NULL : sd_device_enumerator_get_device_first(e); d;
                d = sd_device_enumerator_get_device_next(e)) {
                const char *address;
                DeviceInfo *grown;

                if (sd_device_get_sysname(d, &address) < 0)
                        continue;

                grown = reallocarray(list, n + 1, sizeof(DeviceInfo));
                if (!grown)
                        return -ENOMEM;
                list = grown;
                device_read(d, address, &list[n++]);
        }

        if (n > 1)
                qsort(list, n, sizeof(DeviceInfo), by_address);

        *ret = STEAL_PTR(list);
        *ret_n = n;
        return 0;
}
