/* SPDX-License-Identifier: Apache-2.0 */
/* The mean of a few arrays, number by number. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

#define TASK_NUMBERS 16384u

static void average_task(void *userdata, uint64_t task, uint32_t thread) {
        const LkAverage *a = userdata;
        uint64_t end = (task + 1) * TASK_NUMBERS < a->n ? (task + 1) * TASK_NUMBERS : a->n;

        for (uint64_t i = task * TASK_NUMBERS; i < end; i += VT_N) {
                VT sum = vt_get(a->x[0], LK_F32, i, end);

                for (uint32_t k = 1; k < a->count; k++)
                        sum = vt_add(sum, vt_get(a->x[k], LK_F32, i, end));

                vt_put(a->y, LK_F32, i, end, vt_div(sum, vt_set1((float) a->count)));
        }
}

int LK_ISA(average)(LkContext *c, const LkAverage *a) {
        if (!c || !a || !check_average(a))
                return -EINVAL;

        return threads_run(c->threads, a->n / TASK_NUMBERS + (a->n % TASK_NUMBERS != 0), average_task, (void *) a);
}
