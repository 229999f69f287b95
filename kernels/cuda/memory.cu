/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory of a context. Allocating and freeing stop the device, and steps of one shape follow each
 * other: what is freed is kept for the next one that wants about as much. */

#include <stdlib.h>

#include "kernels/cuda/context.cuh"

struct CudaBlock {
        CudaBlock *next;
        void *p;
        uint64_t size;
        bool used;
};

#define ALIGN UINT64_C(512)
/* A kept block may be so much larger than what is asked for. */
#define SLACK(size) ((size) / 8 + (UINT64_C(2) << 20))

static CudaBlock *find_kept(LkContext *c, uint64_t size) {
        CudaBlock *best = NULL;

        for (CudaBlock *b = c->blocks; b; b = b->next)
                if (!b->used && b->size >= size && b->size - size <= SLACK(size) && (!best || b->size < best->size))
                        best = b;
        return best;
}

/* What LK_SIDE was given is done before what LK_COMPUTE is given next. */
static int wait_for_side(LkContext *c) {
        int r;

        if (!c->aside)
                return 0;
        r = cuda_result(cudaEventRecord(c->order, c->side));
        if (r >= 0)
                r = cuda_result(cudaStreamWaitEvent(c->stream, c->order, 0));
        if (r >= 0)
                c->aside = false;
        return r;
}

/* What was started before it was freed may still use it: on LK_COMPUTE the order of work sees to that, LK_COPY
 * must wait. */
static int take_kept(LkContext *c, CudaBlock *b, void **ret) {
        int r;

        r = wait_for_side(c);
        if (r >= 0)
                r = cuda_result(cudaEventRecord(c->order, c->stream));
        if (r >= 0)
                r = cuda_result(cudaStreamWaitEvent(c->copy, c->order, 0));
        if (r < 0)
                return r;
        b->used = true;
        *ret = b->p;
        return 0;
}

int cuda_memory_new(LkContext *c, uint64_t size, void **ret) {
        CudaBlock *b;
        int r;

        if (size > UINT64_MAX - ALIGN)
                return -ENOMEM;
        size = size > 0 ? (size + ALIGN - 1) / ALIGN * ALIGN : ALIGN;
        b = find_kept(c, size);
        if (b)
                return take_kept(c, b, ret);

        b = (CudaBlock *) calloc(1, sizeof(*b));
        if (!b)
                return -ENOMEM;
        r = cuda_result(cudaMalloc(&b->p, size));
        if (r == -ENOMEM) {
                cuda_memory_trim(c);
                r = cuda_result(cudaMalloc(&b->p, size));
        }
        if (r < 0) {
                free(b);
                return r;
        }

        b->size = size;
        b->used = true;
        b->next = c->blocks;
        c->blocks = b;
        *ret = b->p;
        return 0;
}

void cuda_memory_free(LkContext *c, void *p) {
        for (CudaBlock *b = c->blocks; p && b; b = b->next)
                if (b->p == p)
                        b->used = false;
}

static void give_back(LkContext *c, bool used) {
        CudaBlock **at = &c->blocks;

        (void) cuda_result(cudaStreamSynchronize(c->peer));
        (void) cuda_result(cudaStreamSynchronize(c->take));
        (void) cuda_result(cudaStreamSynchronize(c->copy));
        (void) cuda_result(cudaStreamSynchronize(c->side));
        (void) cuda_result(cudaStreamSynchronize(c->stream));
        while (*at) {
                CudaBlock *b = *at;

                if (b->used && !used) {
                        at = &b->next;
                        continue;
                }
                *at = b->next;
                (void) cuda_result(cudaFree(b->p));
                free(b);
        }
}

void cuda_memory_trim(LkContext *c) {
        give_back(c, false);
}

void cuda_memory_done(LkContext *c) {
        give_back(c, true);
}
