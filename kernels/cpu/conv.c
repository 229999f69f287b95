/* SPDX-License-Identifier: Apache-2.0 */
/* A convolution as gemm over rows that are gathered while they are packed. The weights are read as they lie
 * in the file; a k block is some channels with all taps, so that a vector load of x takes neighbouring
 * channels of one tap. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/gemm-float.h"
#include "kernels/cpu/isa.h"

_Static_assert(LK_CONV_TAPS_MAX <= BLOCK_K, "one channel fits a block");

typedef struct ConvJob {
        LkGemm gemm; /* first: what gemm-float.h sees */
        const LkConv *conv;
        uint64_t size[3]; /* of y */
        uint32_t taps;
} ConvJob;

/* The element of x at a tap; -1 in zero padding. */
static int64_t element_at(const LkConvAxis *a, uint64_t position, uint32_t tap) {
        int64_t i = (int64_t) (position * a->stride + (uint64_t) tap * a->dilation) - (int64_t) a->before;
        int64_t last = (int64_t) a->size - 1;

        if (i >= 0 && i <= last)
                return i;

        switch (a->pad) {
        case LK_PAD_REFLECT:
                return i < 0 ? -i : 2 * last - i;
        case LK_PAD_REPLICATE:
                return i < 0 ? 0 : last;
        default:
                return -1;
        }
}

/* Where the numbers under the kernel begin for position `row` of y, tap by tap; NULL: zeros. */
static void find_taps(const ConvJob *c, uint64_t row, const float **ret) {
        const LkConvAxis *axis = c->conv->axis;
        uint64_t w = row % c->size[2], h = row / c->size[2] % c->size[1], t = row / c->size[2] / c->size[1];
        int64_t at_w[LK_CONV_TAPS_MAX];
        uint32_t n = 0;

        for (uint32_t k = 0; k < axis[2].kernel; k++)
                at_w[k] = element_at(axis + 2, w, k);

        for (uint32_t i = 0; i < axis[0].kernel; i++) {
                int64_t at_t = element_at(axis, t, i);

                for (uint32_t j = 0; j < axis[1].kernel; j++) {
                        int64_t at_h = element_at(axis + 1, h, j);
                        uint64_t line = (uint64_t) at_t * axis[1].size + (uint64_t) at_h;

                        for (uint32_t k = 0; k < axis[2].kernel; k++, n++)
                                ret[n] = at_t < 0 || at_h < 0 || at_w[k] < 0
                                                 ? NULL
                                                 : c->conv->x + (line * axis[2].size + (uint64_t) at_w[k]) *
                                                                        c->conv->channels;
                }
        }
}

/* Channels begin .. begin + n - 1 of eight rows at one tap, to every taps-th line of the panel. */
VEC_INLINE void pack_tap(const float *const rows[8], uint64_t begin, uint64_t n, uint64_t channels,
        uint64_t step, float *panel) {
        for (uint64_t k = 0; k < n; k += 8) {
                V8 v[8];

                for (uint32_t i = 0; i < 8; i++)
                        v[i] = rows[i] ? v8_get(rows[i], LK_F32, begin + k, channels) : v8_zero();

                pack_transpose8(v);

                for (uint32_t i = 0; i < 8 && k + i < n; i++)
                        v8_store(panel + (k + i) * step, v[i]);
        }
}

static void pack_x(const GemmJob *j, uint64_t panel) {
        const ConvJob *c = j->args;
        uint64_t first = j->m0 + panel * TILE_ROWS, channel = j->k0 / c->taps, n = j->k / c->taps;
        uint32_t rows = (uint32_t) min_u64(TILE_ROWS, j->m0 + j->m - first);
        float *a = j->a + panel * BLOCK_K * TILE_LD;
        const float *at[8][LK_CONV_TAPS_MAX];

        for (uint32_t r = 0; r < TILE_LD; r += 8) {
                uint32_t here = rows > r ? (uint32_t) min_u64(8, rows - r) : 0;

                for (uint32_t i = 0; i < here; i++)
                        find_taps(c, first + r + i, at[i]);

                for (uint32_t tap = 0; tap < c->taps; tap++) {
                        const float *p[8];

                        for (uint32_t i = 0; i < 8; i++)
                                p[i] = i < here ? at[i][tap] : NULL;

                        pack_tap(p, channel, n, c->conv->channels, (uint64_t) c->taps * TILE_LD,
                                a + tap * TILE_LD + r);
                }
        }
}

/* Channels of a k block: whole vectors of them if that leaves not much of the block unused. */
static uint64_t block_channels(uint32_t taps) {
        uint64_t n = BLOCK_K / taps;

        return n >= 16 ? n / 8 * 8 : n;
}

int LK_ISA(conv)(LkContext *c, const LkConv *a) {
        ConvJob conv = {.conv = a};
        GemmJob j = {.args = &conv, .pack_x = pack_x, .pack_w = gemm_pack_w, .tile = gemm_float_tile};

        if (!c || !a || !check_conv(a, conv.size))
                return -EINVAL;
        if (a->w.rows == 0)
                return 0;

        conv.taps = a->axis[0].kernel * a->axis[1].kernel * a->axis[2].kernel;
        conv.gemm.m = conv.size[0] * conv.size[1] * conv.size[2];
        conv.gemm.w = a->w;
        conv.gemm.bias = a->bias;
        conv.gemm.y = a->y;
        conv.gemm.y_type = LK_F32;
        conv.gemm.y_ld = a->w.rows;
        j.rows = conv.gemm.m;
        j.cols = a->w.rows;
        j.steps = a->w.cols;
        j.block_k = block_channels(conv.taps) * conv.taps;
        return gemm_run(c, &j);
}
