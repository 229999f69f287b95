/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which GPUs a step is split over when nobody says it: those that make it quicker, by what was measured of them and of the ways between
 * them. */

#include <stddef.h>

#include "service/latentd/gpu-set.h"
#include "service/latentd/plan.h"

typedef struct GpuWork {
        uint64_t rows;
        double weight_bytes; /* that each row goes through */
        uint32_t layers, heads, head_dim, hidden;
        bool int8; /* its products are */
} GpuWork;

/* What a denoiser's step has to do. Weights in fp8 and nvfp4 count as in bf16, which they are expanded to. */
GpuWork gpu_work_of(const WireModelReady *m, uint64_t rows);

/* What the device that has most to do does of a step, in operations of a product in bf16 on the fastest one of h (one whose rate is not
 * known counts as that): two for each weight and row, fewer in int8, and four for each head, number of it and pair of rows. A device does
 * what its ranks have one after the other. */
double gpu_operations(const WireHello *h, const GpuWork *x, const WirePlan *p);

/* What reaches the rank that receives most, in seconds: in each layer what the plan sends of rows, and outputs of attention back to where
 * their rows are, one sender after the other. < 0: a way in use is not known. */
double gpu_receive_sec(const WireHello *h, const GpuWork *x, const WirePlan *p);

/* Operations a second of the fastest device; 0: the rate of one that is in use is not known. */
double gpu_rate(const WireHello *h, const WirePlan *p);

/* About how long a step takes, in seconds: the longer one of computing and receiving, which go on at the same time; 0: a rate or a way in
 * use is not known. */
double gpu_cost(const WireHello *h, const GpuWork *x, const WirePlan *p);

/* plan_make() for a session's wishes, with gpu_set_wishes() and gpu_set_exchange(). Where neither session nor configuration choose devices,
 * ranks or shares, devices without which a step is at least 2 % quicker are left out, one after the other: *ret_out has a bit for each, why
 * says which and why ("": none). -ENODEV, -EINVAL. */
int gpu_cost_plan(const GpuSet *s, const WireHello *h, uint32_t ranks, uint32_t row_tile, const GpuWork *x, const PlanWishes *wishes,
        WirePlan *ret, uint64_t *ret_out, char *why, size_t size);
