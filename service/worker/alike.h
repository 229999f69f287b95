/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which GPUs may be in one worker: a step is cut over those that give the same bits, which is one class of architecture with one set of
 * algorithms. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/wire.h"

typedef struct AlikeDevice {
        const char *name, *pci_address;
        const char *architecture; /* "sm_90" */
        const char *numerics_id;  /* of one that was opened; "": it was not, since no rank is to have it (gpu-names.h) */
} AlikeDevice;

/* The number by which people may name `next` behind those [n], before it is opened (numerics_id does not count): whichever are
 * opened, the same one. UINT32_MAX: none, since it is of another class than the first one. */
uint32_t alike_number(const AlikeDevice *listed, uint32_t n, const AlikeDevice *next);

/* Whether `next` is listed behind those [n] before it: like the first one that was opened, if it was itself; one that was not,
 * like the first of all, so that a GPU's number does not depend on which are opened. notes: a line if it is not. */
bool alike_join(const AlikeDevice *listed, uint32_t n, const AlikeDevice *next, WireHello *notes);
