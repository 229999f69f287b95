/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* GPUs of the machine as the kernel sees them (sd-device), before any worker speaks. The broker never opens
 * one. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct DeviceInfo {
        char pci_address[16];
        char driver[24]; /* "nvidia", "" if none is bound */
        int numa_node;   /* -1 unknown */
        bool ignore;     /* LATENTD_IGNORE: the administrator keeps it from the service */
        double share;    /* LATENTD_SHARE: of a step, against the other devices; default 1 */
} DeviceInfo;

#define DEVICE_SHARE_MAX 1000.0

/* NVIDIA display controllers (vendor 0x10de, class 0x03....) in PCI order. *ret is malloc'ed. No udev: 0
 * devices, not an error. */
int device_enumerate(DeviceInfo **ret, size_t *ret_n);

/* A value of LATENTD_SHARE: greater than 0, at most DEVICE_SHARE_MAX. -EINVAL, -ERANGE. */
int device_parse_share(const char *s, double *ret);
