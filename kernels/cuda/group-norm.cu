/* SPDX-License-Identifier: Apache-2.0 */
/* Group norm of channels-last frames: kernels/cpu/group-norm.c, the same bits. Sums of blocks of pixels first, a thread for a channel; then
 * a group's sum over them by one thread in the order of ops.h; then the same for squares; then every number on its own. As many frames at a
 * time as the context's scratch memory has room for the sums of. */

#include "kernels/cuda/flat.cuh"
#include "kernels/cuda/product.cuh"

#define SUM_THREADS 128u
#define COMBINE_THREADS 128u

typedef struct Frames {
        LkGroupNorm a; /* of these frames */
        uint64_t blocks; /* of pixels, in a frame */
        float *sums;         /* [frames][blocks][channels] */
        float *mean, *rstd;  /* [frames][groups] */
} Frames;

/* A block for a block of pixels and SUM_THREADS channels. */
template <bool SQUARES> __global__ static void __launch_bounds__(SUM_THREADS) sum_pixels(const __grid_constant__ Frames f) {
        const LkGroupNorm &a = f.a;
        const uint64_t n = a.channels, frame = blockIdx.x / f.blocks, block = blockIdx.x % f.blocks;
        const uint64_t c = (uint64_t) blockIdx.y * SUM_THREADS + threadIdx.x, begin = block * LK_GROUP_PIXELS;
        const uint64_t pixels = a.pixels - begin < LK_GROUP_PIXELS ? a.pixels - begin : LK_GROUP_PIXELS;
        float sum = 0, mean;

        if (c >= n)
                return;

        const float *x = a.x + (frame * a.pixels + begin) * n + c;

        mean = SQUARES ? f.mean[frame * a.groups + c / (n / a.groups)] : 0;
        for (uint64_t p = 0; p < pixels; p++, x += n)
                if (SQUARES) {
                        float d = __fsub_rn(*x, mean);

                        sum = __fmaf_rn(d, d, sum);
                } else
                        sum = __fadd_rn(sum, *x);
        f.sums[((uint64_t) blockIdx.x) * n + c] = sum;
}

/* A block for a group: its threads bring the sums, the first one adds them. */
template <bool SQUARES> __global__ static void __launch_bounds__(COMBINE_THREADS) combine(const __grid_constant__ Frames f) {
        __shared__ float part[COMBINE_THREADS];
        const LkGroupNorm &a = f.a;
        const uint64_t frame = blockIdx.x / a.groups, group = blockIdx.x % a.groups, width = a.channels / a.groups, n = f.blocks * width;
        const float *sums = f.sums + frame * f.blocks * a.channels + group * width;
        double sum = 0;

        for (uint64_t at = 0; at < n; at += COMBINE_THREADS) {
                const uint64_t i = at + threadIdx.x;

                __syncthreads();
                part[threadIdx.x] = i < n ? sums[i / width * a.channels + i % width] : 0;
                __syncthreads();
                for (uint32_t k = 0; threadIdx.x == 0 && k < COMBINE_THREADS && at + k < n; k++)
                        sum = __dadd_rn(sum, (double) part[k]);
        }
        if (threadIdx.x == 0) {
                float value = __double2float_rn(__ddiv_rn(sum, (double) (a.pixels * width)));

                if (SQUARES)
                        f.rstd[blockIdx.x] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(value, a.eps)));
                else
                        f.mean[blockIdx.x] = value;
        }
}

template <bool SILU> __global__ static void __launch_bounds__(FLAT_THREADS) apply(const __grid_constant__ Frames f) {
        const LkGroupNorm &a = f.a;
        const uint64_t size = a.pixels * a.channels, width = a.channels / a.groups;

        for (uint64_t i = flat_first(); i < a.frames * size; i += flat_step()) {
                const uint64_t c = i % a.channels, group = i / size * a.groups + c / width;
                float y = __fmul_rn(__fsub_rn(a.x[i], f.mean[group]), f.rstd[group]);

                y = __fmaf_rn(y, weight_get(a.weight.data, a.weight.type, c), weight_get(a.bias.data, a.bias.type, c));
                a.y[i] = SILU ? number_silu(y) : y;
        }
}

static int run(LkContext *c, const Frames *f) {
        const LkGroupNorm *a = &f->a;
        const dim3 grid((unsigned) (a->frames * f->blocks), (unsigned) ((a->channels + SUM_THREADS - 1) / SUM_THREADS));
        const unsigned groups = (unsigned) (a->frames * a->groups), all = flat_blocks(a->frames * a->pixels * a->channels);

        sum_pixels<false><<<grid, SUM_THREADS, 0, c->stream>>>(*f);
        combine<false><<<groups, COMBINE_THREADS, 0, c->stream>>>(*f);
        sum_pixels<true><<<grid, SUM_THREADS, 0, c->stream>>>(*f);
        combine<true><<<groups, COMBINE_THREADS, 0, c->stream>>>(*f);
        if (a->silu)
                apply<true><<<all, FLAT_THREADS, 0, c->stream>>>(*f);
        else
                apply<false><<<all, FLAT_THREADS, 0, c->stream>>>(*f);
        return cuda_result(cudaGetLastError());
}

/* Frames at a time that scratch memory and launches have room for. */
static uint64_t frames_at_once(const LkContext *c, const LkGroupNorm *a, uint64_t blocks) {
        uint64_t bytes = (blocks * a->channels + 2 * a->groups) * sizeof(float), left = scratch_begin(c->product).left;
        uint64_t n = (left - 3 * SCRATCH_ALIGN) / bytes;

        n = at_most(n, GRID_X_MAX / blocks);
        n = at_most(n, GRID_X_MAX / a->groups);
        return at_most(n, a->frames);
}

extern "C" int lk_cuda_group_norm(LkContext *c, const LkGroupNorm *a) {
        Frames f = {};
        uint64_t rows, n;
        int r = 0;

        if (!c || !a || !check_group_norm(a, &rows) || a->channels > (uint64_t) GRID_Y_MAX * SUM_THREADS)
                return -EINVAL;
        if (rows == 0)
                return 0;

        f.blocks = (a->pixels + LK_GROUP_PIXELS - 1) / LK_GROUP_PIXELS;
        n = frames_at_once(c, a, f.blocks);
        if (n == 0)
                return -ENOMEM;
        for (uint64_t at = 0; r >= 0 && at < a->frames; at += n) {
                Scratch s = scratch_begin(c->product);
                uint64_t offset = at * a->pixels * a->channels;

                f.a = *a;
                f.a.frames = at_most(n, a->frames - at);
                f.a.x = a->x + offset;
                f.a.y = a->y + offset;
                f.sums = (float *) scratch_take(&s, f.a.frames * f.blocks * a->channels * sizeof(float));
                f.mean = (float *) scratch_take(&s, f.a.frames * a->groups * sizeof(float));
                f.rstd = (float *) scratch_take(&s, f.a.frames * a->groups * sizeof(float));
                r = run(c, &f);
        }
        return r;
}
