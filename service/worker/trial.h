/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What trials of ways between devices share (peers.c, nccl.c), before there are ranks. */

#include <stdint.h>

#include "kernels/ops.h"

#define TRIAL_PIECES 8u /* that a message through the host goes in */

enum { /* of the contexts: nothing else uses them yet */
        TRIAL_READY,
        TRIAL_DONE,
        TRIAL_SENT, /* [TRIAL_PIECES] */
        TRIAL_ARRIVED = TRIAL_SENT + TRIAL_PIECES, /* likewise */
};

/* What is sent from one device to another; size: bytes, a multiple of 4. A counter: another pair's bytes, or those of another place,
 * differ. */
void trial_fill(uint8_t *bytes, uint64_t size, uint32_t from, uint32_t to);

/* Until TRIAL_DONE has happened. -ETIMEDOUT: not before the deadline; or a device error. */
int trial_wait(const LkOps *ops, LkContext *c, uint64_t deadline_usec);
