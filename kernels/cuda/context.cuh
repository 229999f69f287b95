/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A rank's device, its queues, and launching over rows. */

#include <errno.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/number.cuh"

typedef struct CudaBlock CudaBlock; /* memory.cu */
typedef struct CudaStage CudaStage; /* copy.cu */
typedef struct CudaLaps CudaLaps;   /* laps.cu */

struct LkContext {
        int device;
        int arch;      /* 10 times the major plus the minor compute capability */
        LkCudaAttention attention;
        cudaStream_t stream; /* LK_COMPUTE */
        cudaStream_t copy;   /* LK_COPY, of lower priority */
        cudaStream_t peer;   /* LK_PEER */
        cudaStream_t side;   /* LK_SIDE; of lower priority its attention would run between the products of a chunk, whose blocks then wait for its longer ones */
        cudaStream_t take;   /* LK_TAKE */
        bool aside;          /* it was given work since memory was taken */
        cudaEvent_t events[LK_EVENTS_MAX]; /* NULL: never marked */
        cudaEvent_t stamp, now; /* they measure time; NULL: none taken yet */
        cudaEvent_t order; /* between the two queues, for our own use */
        CudaBlock *blocks; /* all device memory of this context, in use or kept */
        CudaStage *stage;  /* NULL: nothing was uploaded yet */
        CudaLaps *laps;    /* NULL: no lap yet */
        uint64_t held_nsec[_LK_QUEUE_MAX]; /* when the queue came to its hold(0); by what the driver calls in the queue's order */
        struct CudaProduct *product; /* product.cuh */
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
        case cudaErrorNoKernelImageForDevice:
                return -ENODEV;
        default:
                return -EIO;
        }
}

/* Blocks of a launch. */
#define GRID_X_MAX 0x7fffffffu
#define GRID_Y_MAX 65535u

/* Blocks for m rows of ROW_LANES threads each; 0: more than one launch takes. */
static inline unsigned row_blocks(uint64_t m) {
        const uint64_t rows = ROW_THREADS / ROW_LANES;
        uint64_t blocks = m / rows + (m % rows != 0);

        return blocks > GRID_X_MAX ? 0 : (unsigned) blocks;
}

static inline cudaStream_t cuda_stream_of(const LkContext *c, LkQueue queue) {
        switch (queue) {
        case LK_COPY:
                return c->copy;
        case LK_PEER:
                return c->peer;
        case LK_SIDE:
                return c->side;
        case LK_TAKE:
                return c->take;
        default:
                return c->stream;
        }
}

/* cuda.cu: an event that does not measure time and whose waiters sleep. */
int cuda_event_new(cudaEvent_t *ret);

/* memory.cu */
int cuda_memory_new(LkContext *c, uint64_t size, void **ret);
void cuda_memory_free(LkContext *c, void *p);
void cuda_memory_trim(LkContext *c);
void cuda_memory_done(LkContext *c); /* of a context that goes: also what is in use */

/* copy.cu */
int cuda_upload(LkContext *c, void *device, const void *host, uint64_t size);
int cuda_download(LkContext *c, void *host, const void *device, uint64_t size);
int cuda_fetch(LkContext *c, const LkFetch *a);
int cuda_copy(LkContext *c, LkQueue queue, const LkCopy *a);
void cuda_stage_free(CudaStage *s);

/* laps.cu */
int cuda_lap(LkContext *c, bool begins);
int cuda_laps(LkContext *c, uint64_t *ret_usec);
void cuda_laps_free(CudaLaps *l);
int cuda_hold(LkContext *c, LkQueue queue, uint64_t nsec);

/* pin.cu */
int cuda_pin(LkContext *c, const void *host, uint64_t size);
void cuda_unpin(const void *host, uint64_t size);
/* How many of size bytes from host on are in one registration, or before the next one. */
uint64_t cuda_pin_run(const void *host, uint64_t size);

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
int lk_cuda_quantise_queries(LkContext *c, const LkQuantiseQueries *a);
int lk_cuda_quantise_keys(LkContext *c, const LkQuantiseKeys *a);
int lk_cuda_attention_i8(LkContext *c, const LkAttentionI8 *a);
int lk_cuda_gemm(LkContext *c, const LkGemm *a);
int lk_cuda_gemm_i8(LkContext *c, const LkGemmI8 *a);
int lk_cuda_dequantise(LkContext *c, const LkDequantise *a);
int lk_cuda_expand(LkContext *c, const LkExpand *a);
int lk_cuda_conv(LkContext *c, const LkConv *a);
int lk_cuda_group_norm(LkContext *c, const LkGroupNorm *a);
int lk_cuda_snake(LkContext *c, const LkSnake *a);
int lk_cuda_alias_free(LkContext *c, const LkAliasFree *a);
int lk_cuda_average(LkContext *c, const LkAverage *a);
int lk_cuda_block_means(LkContext *c, const LkBlockMeans *a);
int lk_cuda_route(LkContext *c, const LkRoute *a);
int lk_cuda_sparse_attention(LkContext *c, const LkSparseAttention *a);
int lk_cuda_unpatch(LkContext *c, const LkUnpatch *a);
}
