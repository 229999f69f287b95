/* SPDX-License-Identifier: Apache-2.0 */
/* Convolutions in f32 with the CPU's bits: one chain of fma for each output, k ascending as ops.h has it.
 *
 * A launch makes a box of y, columns side by side. The part of x under the box is first laid out in scratch memory as planes, one for each
 * channel, padding included, and the weights as f32 with a row for each k. Then number k of a position lies at the position's place plus
 * an offset that depends on k alone, neighbours of a plane lie side by side, and both operands come to shared memory as they are, by
 * cp.async. How y is cut into boxes, and tiles of them, changes no bit. What has no room in the scratch memory goes one output a thread. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/conv.cuh"
#include "kernels/cuda/product.cuh"

#define THREADS 256u
#define TILE 32u /* channels, or columns of w, that are turned at a time */

/* The element of x at element q of the padded axis; -1: zero. */
__device__ static int64_t element_at(const LkConvAxis &a, uint64_t q) {
        int64_t i = (int64_t) q - (int64_t) a.before, last = (int64_t) a.size - 1;

        if (i >= 0 && i <= last)
                return i;
        if (i > last + (int64_t) a.after || a.pad == LK_PAD_ZERO) /* behind the padding: of no position */
                return -1;
        if (a.pad == LK_PAD_REFLECT)
                return i < 0 ? -i : 2 * last - i;
        return i < 0 ? 0 : last;
}

typedef struct PlaneArgs {
        LkConv a;
        Box box;
        uint32_t plane, tiles; /* elements, and tiles of them */
        float *planes;
} PlaneArgs;

/* The element of x, without channels, at element `at` of a plane; -1: zero. */
__device__ static int64_t pixel_at(const PlaneArgs &p, uint32_t at) {
        const uint32_t *width = p.box.width;
        const LkConvAxis *axis = p.a.axis;
        int64_t w = element_at(axis[2], p.box.first[2] * axis[2].stride + at % width[2]);
        int64_t h = element_at(axis[1], p.box.first[1] * axis[1].stride + at / width[2] % width[1]);
        int64_t t = element_at(axis[0], p.box.first[0] * axis[0].stride + at / width[2] / width[1]);

        if (t < 0 || h < 0 || w < 0)
                return -1;
        return (t * (int64_t) axis[1].size + h) * (int64_t) axis[2].size + w;
}

__global__ static void __launch_bounds__(THREADS) planes_kernel(const __grid_constant__ PlaneArgs p) {
        __shared__ float tile[TILE][TILE + 1];
        __shared__ int64_t pixels[TILE];
        uint32_t lane = threadIdx.x % TILE, warp = threadIdx.x / TILE, first = blockIdx.x % p.tiles * TILE;
        uint64_t channel = (uint64_t) (blockIdx.x / p.tiles) * TILE;

        if (warp == 0)
                pixels[lane] = first + lane < p.plane ? pixel_at(p, first + lane) : -1;
        __syncthreads();
        for (uint32_t i = warp; i < TILE; i += THREADS / TILE)
                tile[i][lane] = pixels[i] >= 0 && channel + lane < p.a.channels
                                        ? p.a.x[(uint64_t) pixels[i] * p.a.channels + channel + lane]
                                        : 0;
        __syncthreads();
        for (uint32_t i = warp; i < TILE; i += THREADS / TILE)
                if (channel + i < p.a.channels && first + lane < p.plane)
                        p.planes[(channel + i) * p.plane + first + lane] = tile[lane][i];
}

typedef struct WeightArgs {
        LkConv a;
        Box box;
        uint64_t plane;
        uint64_t begin, n; /* columns of y */
        uint64_t ld;
        uint32_t tiles; /* of k */
        float *w;       /* [k, ld], k a multiple of TILE; zeros beyond the matrix */
        int32_t *offsets;
} WeightArgs;

/* Of number k from its position's place in the planes. */
__device__ static int32_t offset_of(const WeightArgs &p, uint64_t k) {
        const LkConvAxis *axis = p.a.axis;
        uint64_t w = k % axis[2].kernel, h = k / axis[2].kernel % axis[1].kernel;
        uint64_t t = k / axis[2].kernel / axis[1].kernel % axis[0].kernel, c = k / axis[2].kernel / axis[1].kernel / axis[0].kernel;

        return (int32_t) (c * p.plane + (t * axis[0].dilation * p.box.width[1] + h * axis[1].dilation) * p.box.width[2] +
                          w * axis[2].dilation);
}

__global__ static void __launch_bounds__(THREADS) weights_kernel(const __grid_constant__ WeightArgs p) {
        __shared__ float tile[TILE][TILE + 1];
        const LkMatrix &w = p.a.w;
        uint32_t lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
        uint64_t k0 = (uint64_t) (blockIdx.x % p.tiles) * TILE, n0 = (uint64_t) (blockIdx.x / p.tiles) * TILE, k = k0 + lane;

        if (n0 == 0 && warp == 0)
                p.offsets[k] = k < w.cols ? offset_of(p, k) : 0;
        for (uint32_t i = warp; i < TILE; i += THREADS / TILE) {
                uint64_t n = n0 + i, r = p.begin + n;
                float v = 0;

                if (n < p.n && k < w.cols) {
                        const uint8_t *row = matrix_row(w, r);

                        v = w.type == LK_F32 && (uintptr_t) row % 4 == 0 ? ((const float *) row)[k] : weight_get(row, w.type, k);
                }
                tile[i][lane] = v;
        }
        __syncthreads();
        for (uint32_t i = warp; i < TILE; i += THREADS / TILE)
                p.w[(k0 + i) * p.ld + n0 + lane] = tile[lane][i];
}

/* One output. */
__device__ static float sum_at(const LkConv &a, const uint64_t at[3], const uint8_t *row) {
        float sum = 0;
        uint64_t k = 0;

        for (uint64_t c = 0; c < a.channels; c++)
                for (uint32_t i = 0; i < a.axis[0].kernel; i++)
                        for (uint32_t j = 0; j < a.axis[1].kernel; j++)
                                for (uint32_t l = 0; l < a.axis[2].kernel; l++, k++) {
                                        int64_t t = element_at(a.axis[0], at[0] * a.axis[0].stride + (uint64_t) i * a.axis[0].dilation);
                                        int64_t h = element_at(a.axis[1], at[1] * a.axis[1].stride + (uint64_t) j * a.axis[1].dilation);
                                        int64_t w = element_at(a.axis[2], at[2] * a.axis[2].stride + (uint64_t) l * a.axis[2].dilation);
                                        uint64_t line = (uint64_t) t * a.axis[1].size + (uint64_t) h;
                                        bool inside = t >= 0 && h >= 0 && w >= 0;
                                        float x = inside ? a.x[(line * a.axis[2].size + (uint64_t) w) * a.channels + c] : 0;

                                        sum = __fmaf_rn(x, weight_get(row, a.w.type, k), sum);
                                }
        return sum;
}

typedef struct DirectArgs {
        LkConv a;
        uint64_t size[3], outputs;
} DirectArgs;

__global__ static void __launch_bounds__(THREADS) direct_kernel(const __grid_constant__ DirectArgs p) {
        const LkMatrix &w = p.a.w;

        for (uint64_t i = (uint64_t) blockIdx.x * THREADS + threadIdx.x; i < p.outputs; i += (uint64_t) gridDim.x * THREADS) {
                uint64_t n = i % w.rows, m = i / w.rows, at[3] = { m / p.size[2] / p.size[1], m / p.size[2] % p.size[1], m % p.size[2] };
                float v = sum_at(p.a, at, matrix_row(w, n));

                p.a.y[i] = p.a.bias.data ? __fadd_rn(v, weight_get(p.a.bias.data, p.a.bias.type, n)) : v;
        }
}

static int conv_direct(LkContext *c, const LkConv *a, const uint64_t size[3]) {
        const DirectArgs p = { *a, { size[0], size[1], size[2] }, size[0] * size[1] * size[2] * a->w.rows };

        direct_kernel<<<(unsigned) at_most((p.outputs - 1) / THREADS + 1, 65536), THREADS, 0, c->stream>>>(p);
        return cuda_result(cudaGetLastError());
}

/* Elements of the planes of a box of `size` positions; 0: more than a launch takes. */
static uint64_t planes_size(const LkConv *a, const uint64_t size[3], uint64_t ret_width[3]) {
        uint64_t n = a->channels;

        for (uint32_t i = 0; i < 3; i++) {
                ret_width[i] = (size[i] - 1) * a->axis[i].stride + (uint64_t) a->axis[i].dilation * (a->axis[i].kernel - 1) + 1;
                if (__builtin_mul_overflow(n, ret_width[i], &n))
                        return 0;
        }
        return n <= LAUNCH_MAX ? n : 0;
}

/* How y is cut. */
typedef struct Cut {
        uint64_t size[3], width[3], plane; /* of the largest box */
        uint64_t columns;
        uint64_t k_rows; /* of w in the scratch memory */
} Cut;

/* Half of the room is for the weights, what they leave for the planes. */
static bool cut_conv(const LkConv *a, const uint64_t size[3], uint64_t room, Cut *ret) {
        uint64_t k_rows = round_up(a->w.cols, TILE), n = round_up(a->w.rows, CONV_COLUMNS), elements;

        if (k_rows > room / 2 / (CONV_COLUMNS * sizeof(float)) || a->w.rows > LAUNCH_MAX)
                return false;
        n = at_most(n, room / 2 / sizeof(float) / k_rows / CONV_COLUMNS * CONV_COLUMNS);
        room -= round_up(k_rows * n * sizeof(float), SCRATCH_ALIGN) + round_up(k_rows * sizeof(int32_t), SCRATCH_ALIGN);

        *ret = {};
        ret->columns = n;
        ret->k_rows = k_rows;
        for (uint32_t i = 0; i < 3; i++)
                ret->size[i] = size[i];
        while ((elements = planes_size(a, ret->size, ret->width)) == 0 || elements * sizeof(float) > room) {
                uint64_t *longest = ret->size + (ret->size[0] > 1 ? 0 : ret->size[1] > 1 ? 1 : 2);

                if (*longest == 1)
                        return false;
                *longest = (*longest + 1) / 2;
        }
        ret->plane = elements / a->channels;
        return true;
}

/* One box of the columns that `b` names. */
static int conv_box(LkContext *c, const LkConv *a, const ConvBox *b, float *planes) {
        uint64_t tiles = (b->plane + TILE - 1) / TILE, blocks = tiles * ((a->channels + TILE - 1) / TILE);
        const PlaneArgs p = { *a, b->box, b->plane, (uint32_t) tiles, planes };
        int r;

        if (blocks > GRID_X_MAX)
                return -EINVAL;
        planes_kernel<<<(unsigned) blocks, THREADS, 0, c->stream>>>(p);
        r = cuda_result(cudaGetLastError());
        return r < 0 ? r : conv_f32(c, b);
}

/* All boxes of some columns, whose weights are laid out first. */
static int conv_columns(LkContext *c, const LkConv *a, const uint64_t size[3], const Cut *cut, uint64_t begin) {
        uint64_t n = at_most(cut->columns, a->w.rows - begin), ld = round_up(n, CONV_COLUMNS), blocks = cut->k_rows / TILE * (ld / TILE);
        Scratch s = scratch_begin(c->product);
        float *w = (float *) scratch_take(&s, cut->k_rows * ld * sizeof(float)), *planes;
        int32_t *offsets = (int32_t *) scratch_take(&s, cut->k_rows * sizeof(int32_t));
        ConvBox b = {};
        int r;

        planes = (float *) scratch_take(&s, cut->plane * a->channels * sizeof(float));
        if (!w || !offsets || !planes)
                return -ENOMEM;
        for (uint32_t i = 0; i < 3; i++) {
                b.box.width[i] = (uint32_t) cut->width[i];
                b.stride[i] = a->axis[i].stride;
                b.y_size[i] = size[i];
        }
        b.planes = planes;
        b.plane = (uint32_t) cut->plane;
        b.w = w;
        b.w_ld = ld;
        b.offsets = offsets;
        b.k = a->w.cols;
        b.begin = begin;
        b.n = (uint32_t) n;
        b.bias = a->bias;
        b.y = a->y;
        b.y_ld = a->w.rows;

        const WeightArgs p = { *a, b.box, cut->plane, begin, n, ld, (uint32_t) (cut->k_rows / TILE), w, offsets };

        weights_kernel<<<(unsigned) blocks, THREADS, 0, c->stream>>>(p);
        r = cuda_result(cudaGetLastError());
        for (uint64_t t = 0; r >= 0 && t < size[0]; t += cut->size[0])
                for (uint64_t h = 0; r >= 0 && h < size[1]; h += cut->size[1])
                        for (uint64_t x = 0; r >= 0 && x < size[2]; x += cut->size[2]) {
                                const uint64_t first[3] = { t, h, x };

                                for (uint32_t i = 0; i < 3; i++) {
                                        b.box.first[i] = first[i];
                                        b.box.size[i] = (uint32_t) at_most(cut->size[i], size[i] - first[i]);
                                }
                                r = conv_box(c, a, &b, planes);
                        }
        return r;
}

/* A product of x as it lies. */
static bool is_product(const LkConv *a) {
        for (uint32_t i = 0; i < 3; i++)
                if (a->axis[i].kernel != 1 || a->axis[i].stride != 1 || a->axis[i].before != 0 || a->axis[i].after != 0)
                        return false;
        return true;
}

extern "C" int lk_cuda_conv(LkContext *c, const LkConv *a) {
        uint64_t size[3];
        Cut cut;
        int r = 0;

        if (!c || !a || !check_conv(a, size))
                return -EINVAL;
        if (a->w.rows == 0)
                return 0;

        if (is_product(a)) {
                LkGemm g = {};

                g.m = size[0] * size[1] * size[2];
                g.x = a->x;
                g.x_type = LK_F32;
                g.x_ld = a->channels;
                g.w = a->w;
                g.bias = a->bias;
                g.y = a->y;
                g.y_type = LK_F32;
                g.y_ld = a->w.rows;
                return product_f32(c->stream, &g);
        }
        if (!cut_conv(a, size, scratch_begin(c->product).left, &cut))
                return conv_direct(c, a, size);
        for (uint64_t begin = 0; r >= 0 && begin < a->w.rows; begin += cut.columns)
                r = conv_columns(c, a, size, &cut, begin);
        return r;
}
