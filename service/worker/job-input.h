/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tensors out of an arena that its client may change at any time: the place is checked, the bytes are
 * copied, and the copy is what is looked at afterwards. */

#include <stdint.h>

#include "service/shared/safetensors.h"
#include "service/shared/wire.h"
#include "service/worker/arena-map.h"

typedef struct TensorRule {
        const char *name; /* for messages */
        StType type;
        uint32_t n_dims;
        uint64_t shape[WIRE_DIMS_MAX]; /* 0: any size from 1 on */
        uint64_t elements_max;         /* 0: what fits the arena */
} TensorRule;

/* Checks type, shape and place of w. -EINVAL with InvalidTensor. */
int tensor_check(const WireTensor *w, const TensorRule *rule, const Arena *arena, Fault *f);

/* The same, and copies it: *ret is the caller's to free. Shapes are in w. -EINVAL
 * with InvalidTensor, -ENOMEM with DoesNotFit. */
int tensor_copy(const WireTensor *w, const TensorRule *rule, const Arena *arena, void **ret, Fault *f);

/* Looks for NaN and Inf in F32 or BF16 values: -EINVAL with InvalidTensor naming the first one's place. */
int tensor_check_finite(
        const char *name, StType type, const void *values, uint32_t n_dims, const uint64_t *shape, Fault *f);

/* w says "none": no dimensions, no bytes. */
bool tensor_is_absent(const WireTensor *w);
