/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A rank's weights in device memory, where the device cannot read the host's (LkOps.host_weights). It knows
 * parts, lists of slots (matrices and vectors) that are used together, and nothing of what they mean.
 *
 * The leading parts stay once they were fetched; the others pass through a ring, first in, first out. What is used
 * next is fetched meanwhile on LK_COPY, as far as there is memory; the queues wait for each other, the host for
 * neither. A part's memory is dense: every slot begins at a multiple of 256, strided rows are packed, scales follow
 * their matrix. So it does not depend on where a part is, or when it came, what is computed with it.
 *
 * Matrices of a format that the backend expands in its products (LK_EXPANDED) stay as the file has them, too, or wide: expanded
 * to bf16 once, when they are first taken, where all of what stays has room so. Both have the same bits in a product of
 * bf16 (LkExpand). What passes is never wide: it would be expanded as often, and the ring twice as large. Host memory and what
 * is copied are the file's size either way.
 *
 * One per context, called on its thread. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"

/* Events of the context that the holder marks: from first_event on. */
#define DEVICE_WEIGHTS_EVENTS 33u

typedef struct DeviceWeightsConfig {
        const LkOps *ops;
        LkContext *context;
        uint32_t first_event;
        /* Registers host memory before it is fetched for the first time; NULL: ops->pin. What it returns changes
         * the speed alone. */
        int (*pin)(void *userdata, LkContext *c, const void *host, uint64_t size);
        void *userdata;
        bool one_at_a_time;  /* a part is given before the next one is taken; else two that follow each other may be in use */
        bool expand;         /* activations are bf16: what stays may be wide */
        uint64_t ring_bytes; /* for tests; 0: as the parts need it */
} DeviceWeightsConfig;

typedef struct DeviceWeights DeviceWeights;

/* Without parts. -ENOMEM; -EINVAL: not enough events. */
int device_weights_new(const DeviceWeightsConfig *config, DeviceWeights **ret);

/* Gives its device memory back to the context; work that was given to it may still run. Accepts NULL, returns
 * NULL. */
DeviceWeights *device_weights_free(DeviceWeights *w);

/* Begins the next part; its number counts from 0. Those that stay if there is memory come first, in the order that
 * they are used in; passing: it never stays. bf16: its matrices are used in products of bf16 alone, if activations are
 * that. -ENOMEM, -EBUSY (memory was planned). */
int device_weights_add_part(DeviceWeights *w, bool passing, bool bf16);

/* A slot of the part that was begun last; one of both is NULL. It says where the data lies in host memory, which
 * must stay as long as the holder; from take() on, where it lies in device memory. -EOPNOTSUPP: a matrix whose
 * scales cannot be packed (LK_NVFP4 in blocks that are no multiples of 128 rows). */
int device_weights_add_slot(DeviceWeights *w, LkMatrix *matrix, LkVector *vector);

/* Takes device memory for so many bytes at most: the ring and what stays. What was fetched already and may stay is
 * not fetched again; grow: also more than now, if there is room. 0; -ENOSPC: it is not enough for the ring, with
 * *ret_least what would be; -ENOMEM: the device does not even have that. Takes fewer parts where the device has
 * less than it was told. */
int device_weights_plan(DeviceWeights *w, uint64_t budget, bool grow, uint64_t *ret_least);

/* Lets go of the last ones that stay, `bytes` at least. -ENOMEM: there are none. */
int device_weights_shrink(DeviceWeights *w, uint64_t bytes);

/* Lets go of all device memory. */
void device_weights_release(DeviceWeights *w);

typedef struct DeviceWeightsState {
        uint32_t parts, resident; /* that may stay; that do */
        bool wide;                /* and are wide */
        uint64_t bytes;           /* of device memory, ring included */
        uint64_t ring_bytes;
        uint64_t all_bytes;       /* with all parts that may stay, and the ring that the others need then */
        uint64_t wide_bytes;      /* the same, wide; 0: nothing would be wider */
        uint64_t fetched_bytes;   /* since it was made */
} DeviceWeightsState;

void device_weights_state(const DeviceWeights *w, DeviceWeightsState *ret);

/* The order that parts are taken in from now on (copied); none: nothing is fetched ahead. All parts are taken as
 * given. -ENOMEM or a device error. */
int device_weights_begin(DeviceWeights *w, const uint32_t *order, uint32_t n);

/* Sets the part's slots to device memory that work started later may use, until it is given. -ENOMEM: the ring has no
 * room beside what is not given; -EINVAL: no such part, or no memory was planned; or a device error. */
int device_weights_take(DeviceWeights *w, uint32_t part);
void device_weights_give(DeviceWeights *w, uint32_t part);
