/* SPDX-License-Identifier: Apache-2.0 */
/* The table, contexts and queues of the CUDA backend. One thread per context, as ops.h says. */

#include "kernels/cuda/cuda.h"

#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/product.cuh"

int cuda_event_new(cudaEvent_t *ret) {
        return cuda_result(cudaEventCreateWithFlags(ret, cudaEventDisableTiming | cudaEventBlockingSync));
}

static LkContext *context_free(LkContext *c) {
        if (!c)
                return NULL;
        if (c->stream)
                (void) cuda_result(cudaStreamSynchronize(c->stream));
        product_free(c);
        if (c->stream && c->copy && c->peer && c->side && c->take)
                cuda_memory_done(c);
        cuda_stage_free(c->stage);
        cuda_laps_free(c->laps);
        for (unsigned i = 0; i < LK_EVENTS_MAX; i++)
                if (c->events[i])
                        (void) cuda_result(cudaEventDestroy(c->events[i]));
        if (c->order)
                (void) cuda_result(cudaEventDestroy(c->order));
        if (c->stamp)
                (void) cuda_result(cudaEventDestroy(c->stamp));
        if (c->now)
                (void) cuda_result(cudaEventDestroy(c->now));
        if (c->take)
                (void) cuda_result(cudaStreamDestroy(c->take));
        if (c->side)
                (void) cuda_result(cudaStreamDestroy(c->side));
        if (c->peer)
                (void) cuda_result(cudaStreamDestroy(c->peer));
        if (c->copy)
                (void) cuda_result(cudaStreamDestroy(c->copy));
        if (c->stream)
                (void) cuda_result(cudaStreamDestroy(c->stream));
        free(c);
        return NULL;
}

/* The host's threads sleep while they wait for the device: this machine's cores are others', too. */
static int make_queues(LkContext *c) {
        int lowest, highest, major, minor, r;

        r = cuda_result(cudaGetDevice(&c->device));
        if (r >= 0)
                r = cuda_result(cudaInitDevice(c->device, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid));
        if (r >= 0)
                r = cuda_result(cudaSetDevice(c->device));
        if (r >= 0)
                r = cuda_result(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device));
        if (r >= 0)
                r = cuda_result(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device));
        if (r >= 0)
                c->arch = 10 * major + minor;
        if (r >= 0)
                r = cuda_result(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, highest));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithPriority(&c->copy, cudaStreamNonBlocking, lowest));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithPriority(&c->peer, cudaStreamNonBlocking, highest));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithPriority(&c->side, cudaStreamNonBlocking, highest));
        if (r >= 0)
                r = cuda_result(cudaStreamCreateWithPriority(&c->take, cudaStreamNonBlocking, highest));
        return r < 0 ? r : cuda_event_new(&c->order);
}

static int context_new(uint32_t threads, LkContext **ret) {
        LkContext *c = (LkContext *) calloc(1, sizeof(*c));
        int r;

        (void) threads;
        if (!c)
                return -ENOMEM;
        r = make_queues(c);
        if (r >= 0)
                r = product_new(c);
        if (r < 0) {
                (void) context_free(c);
                return r;
        }
        *ret = c;
        return 0;
}

static int mark(LkContext *c, LkQueue queue, uint32_t event) {
        int r = 0;

        if ((unsigned) queue >= _LK_QUEUE_MAX || event >= LK_EVENTS_MAX)
                return -EINVAL;
        if (!c->events[event])
                r = cuda_event_new(&c->events[event]);
        return r < 0 ? r : cuda_result(cudaEventRecord(c->events[event], cuda_stream_of(c, queue)));
}

static int wait(LkContext *c, LkQueue queue, uint32_t event) {
        if ((unsigned) queue >= _LK_QUEUE_MAX || event >= LK_EVENTS_MAX)
                return -EINVAL;
        return c->events[event] ? cuda_result(cudaStreamWaitEvent(cuda_stream_of(c, queue), c->events[event], 0)) : 0;
}

static int join(LkContext *c, uint32_t event) {
        if (event >= LK_EVENTS_MAX)
                return -EINVAL;
        return c->events[event] ? cuda_result(cudaEventSynchronize(c->events[event])) : 0;
}

/* Another thread's: it made the event before it told anybody of it, and does so once. */
static int wait_for(LkContext *c, LkQueue queue, LkContext *other, uint32_t event) {
        if ((unsigned) queue >= _LK_QUEUE_MAX || !other || event >= LK_EVENTS_MAX || !other->events[event])
                return -EINVAL;
        return cuda_result(cudaStreamWaitEvent(cuda_stream_of(c, queue), other->events[event], 0));
}

static int is_done(LkContext *c, uint32_t event) {
        cudaError_t e;

        if (event >= LK_EVENTS_MAX)
                return -EINVAL;
        e = c->events[event] ? cudaEventQuery(c->events[event]) : cudaSuccess;
        if (e != cudaErrorNotReady)
                return e == cudaSuccess ? 1 : cuda_result(e);
        (void) cudaGetLastError();
        return 0;
}

static void *native(LkContext *c, LkQueue queue, int *ret_device) {
        *ret_device = c->device;
        return cuda_stream_of(c, queue);
}

static int stamp(LkContext *c) {
        int r = 0;

        if (!c->now)
                r = cuda_result(cudaEventCreateWithFlags(&c->now, cudaEventBlockingSync));
        if (r >= 0 && !c->stamp)
                r = cuda_result(cudaEventCreateWithFlags(&c->stamp, cudaEventBlockingSync));
        return r < 0 ? r : cuda_result(cudaEventRecord(c->stamp, c->stream));
}

/* The device's clock and the host's are read together here, when the queue is empty: they drift. */
static int stamped(LkContext *c, uint64_t *ret_usec) {
        struct timespec now;
        float msec = 0;
        int r;

        if (!c->stamp || !c->now)
                return -EINVAL;
        r = cuda_result(cudaStreamSynchronize(c->stream));
        if (r >= 0)
                r = cuda_result(cudaEventRecord(c->now, c->stream));
        if (r >= 0)
                r = cuda_result(cudaEventSynchronize(c->now));
        (void) clock_gettime(CLOCK_MONOTONIC, &now);
        if (r >= 0)
                r = cuda_result(cudaEventElapsedTime(&msec, c->stamp, c->now));
        if (r < 0)
                return r;
        *ret_usec = (uint64_t) now.tv_sec * 1000000 + (uint64_t) now.tv_nsec / 1000 - (uint64_t) (msec * 1000.0f);
        return 0;
}

extern "C" const LkOps *lk_cuda_ops(void) {
        static LkOps ops;

        ops.backend = "cuda";
        ops.numerics_id = "cuda-rows-1";
        ops.context_new = context_new;
        ops.context_free = context_free;
        ops.memory_new = cuda_memory_new;
        ops.memory_free = cuda_memory_free;
        ops.memory_trim = cuda_memory_trim;
        ops.upload = cuda_upload;
        ops.download = cuda_download;
        ops.fetch = cuda_fetch;
        ops.mark = mark;
        ops.wait = wait;
        ops.join = join;
        ops.copy = cuda_copy;
        ops.wait_for = wait_for;
        ops.is_done = is_done;
        ops.native = native;
        ops.stamp = stamp;
        ops.stamped = stamped;
        ops.lap = cuda_lap;
        ops.laps = cuda_laps;
        ops.hold = cuda_hold;
        ops.pin = cuda_pin;
        ops.unpin = cuda_unpin;
        ops.attention = lk_cuda_attention;
        ops.quantise_queries = lk_cuda_quantise_queries;
        ops.quantise_keys = lk_cuda_quantise_keys;
        ops.attention_i8 = lk_cuda_attention_i8;
        ops.norm = lk_cuda_norm;
        ops.layer_norm = lk_cuda_layer_norm;
        ops.qk_norm_rope = lk_cuda_qk_norm_rope;
        ops.residual = lk_cuda_residual;
        ops.swiglu = lk_cuda_swiglu;
        ops.activate = lk_cuda_activate;
        ops.convert = lk_cuda_convert;
        ops.quantise = lk_cuda_quantise;
        ops.gemm = lk_cuda_gemm;
        ops.gemm_i8 = lk_cuda_gemm_i8;
        ops.dequantise = lk_cuda_dequantise;
        ops.expand = lk_cuda_expand;
        ops.conv = lk_cuda_conv;
        ops.group_norm = lk_cuda_group_norm;
        ops.snake = lk_cuda_snake;
        ops.alias_free = lk_cuda_alias_free;
        ops.average = lk_cuda_average;
        ops.block_means = lk_cuda_block_means;
        ops.route = lk_cuda_route;
        ops.sparse_attention = lk_cuda_sparse_attention;
        ops.unpatch = lk_cuda_unpatch;
        ops.half = true;
        ops.batch = 14; /* half a chunk of 1344 x 768: the last wave of each product's blocks is nearly full */
        for (int t = LK_F32; t < LK_TYPE_MAX; t++)
                ops.weights[t] = t <= LK_I8 ? LK_NATIVE : LK_EXPANDED;
        return &ops;
}
