/* SPDX-License-Identifier: Apache-2.0 */
/* x += gate * y: kernels/cpu/residual.c, the same bits. */

#include "kernels/cuda/norm-half.cuh"

/* A block for a row. */
__global__ static void __launch_bounds__(256) residual_pieces(LkResidual a) {
        const uint64_t row = blockIdx.x;
        void *x = row_at_mutable(a.x, LK_BF16, row, a.x_ld);
        const void *y = row_at(a.y, LK_BF16, row, a.y_ld), *gate = NULL;

        if (a.mod)
                gate = row_at(row_at(a.mod, LK_BF16, (uint64_t) a.mod_index[row], a.mod_ld), LK_BF16, 1, a.gate_at);
        for (uint32_t i = threadIdx.x; i < a.n / PIECE; i += blockDim.x) {
                uint4 u = piece_load(x, i), v = piece_load(y, i);

                if (gate)
                        v = piece_mul(piece_load(gate, i), v);
                piece_store(x, i, piece_settled(piece_add(u, v)));
        }
}

/* Few rows are long ones (sound has one of 10^8 numbers): they are cut over blocks. */
#define FEW_ROWS 1024u
#define CUT_NUMBERS (ROW_LANES * 16u)
#define CUTS_MAX 16384u

static unsigned row_cuts(const LkResidual *a) {
        uint64_t cuts = a->m < FEW_ROWS ? a->n / CUT_NUMBERS : 1;

        return cuts < 1 ? 1 : cuts < CUTS_MAX ? (unsigned) cuts : CUTS_MAX;
}

__global__ static void residual_plain(LkResidual a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row < a.m)
                row_add(a, row, blockIdx.y * ROW_LANES + threadIdx.x % ROW_LANES, gridDim.y * ROW_LANES);
}

extern "C" int lk_cuda_residual(LkContext *c, const LkResidual *a) {
        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_activation_type(a->type) || !check_beside(a->type, a->y_type) || !a->x || !a->y || a->x_ld < a->n || a->y_ld < a->n || (a->mod && !a->mod_index))
                return -EINVAL;

        if (a->y_type == LK_F16) {
                int r = residual_half(c, a);

                if (r != -EOPNOTSUPP)
                        return r;
        }
        if (a->type == LK_BF16 && a->m <= GRID_X_MAX && row_pieces(a->x, a->x_ld, a->n) && row_pieces(a->y, a->y_ld, a->n) &&
                (!a->mod || (row_pieces(a->mod, a->mod_ld, a->n) && a->gate_at % PIECE == 0)))
                residual_pieces<<<(unsigned) a->m, row_threads(a->n / PIECE, 256), 0, c->stream>>>(*a);
        else if (row_blocks(a->m) > 0)
                residual_plain<<<dim3(row_blocks(a->m), row_cuts(a)), ROW_THREADS, 0, c->stream>>>(*a);
        else
                return -EINVAL;
        return cuda_result(cudaGetLastError());
}
