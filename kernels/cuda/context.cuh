/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A rank's device, its stream, and launching over rows. */

#include <errno.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda/number.cuh"

struct LkContext {
        int device;
        cudaStream_t stream;
};

/* errno of a CUDA status; clears the runtime's last error, so that a later innocent call is not blamed. */
static inline int cuda_result(cudaError_t e) {
        if (e == cudaSuccess)
                return 0;
        (void) cudaGetLastError();
        switch (e) {
        case cudaErrorMemoryAllocation:
                return -ENOMEM;
        case cudaErrorInvalidValue:
        case cudaErrorInvalidConfiguration:
                return -EINVAL;
        case cudaErrorNoDevice:
        case cudaErrorInsufficientDriver:
        case cudaErrorDevicesUnavailable:
                return -ENODEV;
        default:
                return -EIO;
        }
}

#define ROW_BLOCKS_MAX 0x7fffffffu

/* Blocks for m rows of ROW_LANES threads each; 0: more than one launch takes. */
static inline unsigned row_blocks(uint64_t m) {
        const uint64_t rows = ROW_THREADS / ROW_LANES;
        uint64_t blocks = m / rows + (m % rows != 0);

        return blocks > 0x7fffffffu ? 0 : (unsigned) blocks;
}

extern "C" {
int lk_cuda_norm(LkContext *c, const LkNorm *a);
int lk_cuda_qk_norm_rope(LkContext *c, const LkQkNormRope *a);
int lk_cuda_residual(LkContext *c, const LkResidual *a);
int lk_cuda_swiglu(LkContext *c, const LkSwiglu *a);
int lk_cuda_convert(LkContext *c, const LkConvert *a);
int lk_cuda_quantise(LkContext *c, const LkQuantise *a);
int lk_cuda_layer_norm(LkContext *c, const LkLayerNorm *a);
int lk_cuda_activate(LkContext *c, const LkActivate *a);
int lk_cuda_attention(LkContext *c, const LkAttention *a);
/* By cuDNN where it is there, allowed and has the bits of any part; else -EOPNOTSUPP. May be left out of a build. */
__attribute__((weak)) int lk_cuda_attention_cudnn(LkContext *c, const LkAttention *a);
}
