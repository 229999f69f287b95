/* SPDX-License-Identifier: Apache-2.0 */
/* Group norm of channels-last frames: vectors run over neighbouring channels, each of which is a chain of
 * its own. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

typedef struct GroupJob {
        const LkGroupNorm *args;
        uint64_t blocks;      /* per frame */
        float *sums;          /* [frames][blocks][channels] */
        float *mean, *rstd;   /* [frames][channels] */
        float *weight, *bias; /* [channels] */
        bool squares;
} GroupJob;

static uint64_t block_pixels(const GroupJob *j, uint64_t block) {
        uint64_t left = j->args->pixels - block * LK_GROUP_PIXELS;

        return left < LK_GROUP_PIXELS ? left : LK_GROUP_PIXELS;
}

static const float *block_of(const GroupJob *j, uint64_t frame, uint64_t block) {
        return j->args->x + (frame * j->args->pixels + block * LK_GROUP_PIXELS) * j->args->channels;
}

/* Pixel by pixel, so that memory is read in its order; the sums of a block stay in the nearest cache. */
VEC_INLINE void sum_pixels(const float *x, uint64_t pixels, uint64_t n, const float *mean, float *sums) {
        for (uint64_t c = 0; c < n; c++)
                sums[c] = 0;

        for (uint64_t p = 0; p < pixels; p++, x += n)
                for (uint64_t c = 0; c < n; c += VT_N) {
                        VT v = vt_get(x, LK_F32, c, n), sum = vt_get(sums, LK_F32, c, n);

                        if (mean) {
                                v = vt_sub(v, vt_get(mean, LK_F32, c, n));
                                sum = vt_fma(v, v, sum);
                        } else
                                sum = vt_add(sum, v);

                        vt_put(sums, LK_F32, c, n, sum);
                }
}

static void sum_task(void *userdata, uint64_t task, uint32_t thread) {
        const GroupJob *j = userdata;
        uint64_t frame = task / j->blocks, block = task % j->blocks, n = j->args->channels;
        const float *x = block_of(j, frame, block);
        float *sums = j->sums + task * n;

        if (j->squares)
                sum_pixels(x, block_pixels(j, block), n, j->mean + frame * n, sums);
        else
                sum_pixels(x, block_pixels(j, block), n, NULL, sums);
}

/* Statistics of a frame's groups from the sums, per channel. */
static void combine_task(void *userdata, uint64_t frame, uint32_t thread) {
        const GroupJob *j = userdata;
        uint64_t n = j->args->channels, width = n / j->args->groups;
        double count = (double) (j->args->pixels * width);

        for (uint64_t first = 0; first < n; first += width) {
                double sum = 0;
                float value;

                for (uint64_t b = 0; b < j->blocks; b++)
                        for (uint64_t c = first; c < first + width; c++)
                                sum += (double) j->sums[(frame * j->blocks + b) * n + c];

                value = (float) (sum / count);
                for (uint64_t c = first; c < first + width; c++)
                        if (j->squares)
                                j->rstd[frame * n + c] = 1 / f32_sqrt(value + j->args->eps);
                        else
                                j->mean[frame * n + c] = value;
        }
}

VEC_INLINE void apply(const GroupJob *j, uint64_t frame, uint64_t block, bool silu) {
        uint64_t n = j->args->channels;
        const float *x = block_of(j, frame, block), *mean = j->mean + frame * n, *rstd = j->rstd + frame * n;
        float *y = j->args->y + (x - j->args->x);
        VT one = vt_set1(1);

        for (uint64_t p = 0; p < block_pixels(j, block); p++, x += n, y += n)
                for (uint64_t c = 0; c < n; c += VT_N) {
                        VT v = vt_sub(vt_get(x, LK_F32, c, n), vt_get(mean, LK_F32, c, n));

                        v = vt_fma(vt_mul(v, vt_get(rstd, LK_F32, c, n)), vt_get(j->weight, LK_F32, c, n),
                                vt_get(j->bias, LK_F32, c, n));
                        if (silu)
                                v = vt_div(v, vt_add(one, vt_exp(vt_negate(v))));

                        vt_put(y, LK_F32, c, n, v);
                }
}

static void apply_task(void *userdata, uint64_t task, uint32_t thread) {
        const GroupJob *j = userdata;

        if (j->args->silu)
                apply(j, task / j->blocks, task % j->blocks, true);
        else
                apply(j, task / j->blocks, task % j->blocks, false);
}

/* No more than x has numbers plus a few rows, so that nothing overflows. */
static int group_scratch(LkContext *c, GroupJob *j) {
        const LkGroupNorm *a = j->args;
        uint64_t n = a->channels, sums = a->frames * j->blocks * n, stats = a->frames * n;
        void *p;
        int r;

        r = context_scratch(c, (sums + 2 * stats + 2 * n) * sizeof(float), &p);
        if (r < 0)
                return r;

        j->sums = p;
        j->mean = j->sums + sums;
        j->rstd = j->mean + stats;
        j->weight = j->rstd + stats;
        j->bias = j->weight + n;
        for (uint64_t i = 0; i < n; i++) {
                j->weight[i] = number_get(a->weight.data, a->weight.type, i);
                j->bias[i] = number_get(a->bias.data, a->bias.type, i);
        }
        return 0;
}

static int sum_up(LkContext *c, GroupJob *j) {
        int r;

        r = threads_run(c->threads, j->args->frames * j->blocks, sum_task, j);
        return r < 0 ? r : threads_run(c->threads, j->args->frames, combine_task, j);
}

int LK_ISA(group_norm)(LkContext *c, const LkGroupNorm *a) {
        GroupJob j = {.args = a};
        uint64_t rows;
        int r;

        if (!c || !a || !check_group_norm(a, &rows))
                return -EINVAL;
        if (rows == 0)
                return 0;

        j.blocks = (a->pixels + LK_GROUP_PIXELS - 1) / LK_GROUP_PIXELS;
        r = group_scratch(c, &j);
        if (r < 0)
                return r;

        r = sum_up(c, &j);
        j.squares = true;
        if (r >= 0)
                r = sum_up(c, &j);
        return r < 0 ? r : threads_run(c->threads, a->frames * j.blocks, apply_task, &j);
}
