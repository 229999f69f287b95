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

/* About how long the rank that has most to do or to receive takes, in seconds; 0: a rate or a way in use is not known. Work: two operations
 * for each weight and row, four for each head, number of it and pair of rows. Between ranks, in each layer: rows of `hidden` to everybody,
 * int8 with a scale or bf16, and outputs of attention back to where their rows are, bf16. The two go on at the same time. */
double gpu_cost(const WireHello *h, const GpuWork *x, const WirePlan *p);

/* plan_make() for a session's wishes, with gpu_set_wishes() and gpu_set_exchange(). Where neither session nor configuration choose devices,
 * ranks or shares, devices without which a step is at least 2 % quicker are left out, one after the other: *ret_out has a bit for each, why
 * says which and why ("": none). -ENODEV, -EINVAL. */
int gpu_cost_plan(const GpuSet *s, const WireHello *h, uint32_t ranks, uint32_t row_tile, const GpuWork *x, const PlanWishes *wishes,
        WirePlan *ret, uint64_t *ret_out, char *why, size_t size);
