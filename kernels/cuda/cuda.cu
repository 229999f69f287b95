/* SPDX-License-Identifier: Apache-2.0 */
/* The table, contexts and memory of the CUDA backend. One thread per context, as ops.h says. */

#include "kernels/cuda/cuda.h"

#include <stdlib.h>

#include "kernels/cuda/context.cuh"

static int context_new(uint32_t threads, LkContext **ret) {
        LkContext *c = (LkContext *) calloc(1, sizeof(*c));
        int r;

        (void) threads;
        if (!c)
                return -ENOMEM;

        r = cuda_result(cudaGetDevice(&c->device));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
        if (r < 0) {
                free(c);
                return r;
        }

        *ret = c;
        return 0;
}

static LkContext *context_free(LkContext *c) {
        if (c)
                (void) cuda_result(cudaStreamDestroy(c->stream));
        free(c);
        return NULL;
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        (void) c;
        return cuda_result(cudaMalloc(ret, size));
}

static void memory_free(LkContext *c, void *p) {
        (void) c;
        (void) cuda_result(cudaFree(p));
}

static int upload(LkContext *c, void *device, const void *host, uint64_t size) {
        return cuda_result(cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice, c->stream));
}

/* Waits: the host's copy is complete on return, and an error of an earlier kernel comes out here. */
static int download(LkContext *c, void *host, const void *device, uint64_t size) {
        int r = cuda_result(cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost, c->stream));

        return r < 0 ? r : cuda_result(cudaStreamSynchronize(c->stream));
}

extern "C" const LkOps *lk_cuda_ops(void) {
        static LkOps ops;

        ops.backend = "cuda";
        ops.numerics_id = "cuda-rows-1";
        ops.context_new = context_new;
        ops.context_free = context_free;
        ops.memory_new = memory_new;
        ops.memory_free = memory_free;
        ops.upload = upload;
        ops.download = download;
        ops.attention = lk_cuda_attention;
        ops.norm = lk_cuda_norm;
        ops.layer_norm = lk_cuda_layer_norm;
        ops.qk_norm_rope = lk_cuda_qk_norm_rope;
        ops.residual = lk_cuda_residual;
        ops.swiglu = lk_cuda_swiglu;
        ops.activate = lk_cuda_activate;
        ops.convert = lk_cuda_convert;
        ops.quantise = lk_cuda_quantise;
        return &ops;
}
