/* SPDX-License-Identifier: Apache-2.0 */
/* Snake over dense rows, taken as one line of numbers: a vector may reach over the end of a row. */

#include "kernels/cpu/snake.h"

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"

#define TASK_NUMBERS 16384u

typedef struct SnakeJob {
        const LkSnake *args;
        const float *a, *gain; /* [channels + VT_N] */
        uint64_t n;            /* numbers */
} SnakeJob;

static void snake_task(void *userdata, uint64_t task, uint32_t thread) {
        const SnakeJob *j = userdata;
        const LkSnake *s = j->args;
        uint64_t end = (task + 1) * TASK_NUMBERS < j->n ? (task + 1) * TASK_NUMBERS : j->n;

        for (uint64_t i = task * TASK_NUMBERS; i < end; i += VT_N) {
                uint64_t channel = i % s->channels;

                vt_put(s->y, LK_F32, i, end,
                        snake_at(vt_get(s->x, LK_F32, i, end), vt_load(j->a + channel),
                                vt_load(j->gain + channel)));
        }
}

int LK_ISA(snake)(LkContext *c, const LkSnake *a) {
        SnakeJob j = {.args = a};
        float *numbers;
        void *p;
        int r;

        if (!c || !a || !check_snake(a))
                return -EINVAL;

        r = context_scratch(c, 2 * (a->channels + VT_N) * sizeof(float), &p);
        if (r < 0)
                return r;

        numbers = p;
        snake_channels(
                &a->alpha, &a->beta, a->exponents, 0, a->channels, numbers, numbers + a->channels + VT_N);
        j.a = numbers;
        j.gain = numbers + a->channels + VT_N;
        j.n = a->m * a->channels;
        return threads_run(c->threads, j.n / TASK_NUMBERS + (j.n % TASK_NUMBERS != 0), snake_task, &j);
}
