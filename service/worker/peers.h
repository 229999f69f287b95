/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Whether devices of this process can copy to each other, and how fast, and how fast they compute: tried by the first worker that has these
 * devices. A driver may say that they can where what arrives is wrong, or nothing does (IOMMU, patched drivers). */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/wire.h"

typedef struct PeersTrial {
        const LkOps *ops;
        uint32_t n;               /* devices, at most WIRE_DEVICES_MAX */
        const WireDevice *devices;
        LkContext *const *contexts; /* [n], of each device; used on the calling thread alone */
        uint64_t without;         /* devices that are not tried: a bit each */
        int (*bind)(uint32_t device);
        int (*connect)(uint32_t from, uint32_t to); /* before copies between two; < 0: the driver has no way. NULL: nothing to do */
        uint64_t size;            /* bytes of the pattern, a multiple of 4 */
        uint64_t product;         /* rows and columns of the product that tells a device's rate; 0: none */
        uint64_t deadline_usec;   /* of a copy, of some products */
} PeersTrial;

/* Fills in what was measured: the rate of each device, and both ways of each pair; a device's way to itself is WIRE_LINK_SAME.
 * What is wrong goes into the
 * notes, a line each. After a copy that hangs, its devices are not tried any more, and memory of it stays taken. */
void peers_try(const PeersTrial *t, WireHello *hello);

/* Appends a line to the notes of a HELLO; what has no room is left out. */
void peers_note(WireHello *hello, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));
