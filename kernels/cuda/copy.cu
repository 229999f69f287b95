/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between the host's memory and the device's. */

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/context.cuh"

/* A copy from memory that is not registered makes the host wait for all that the queue was given. Uploads go
 * through pages of our own instead: they are in order, and the host goes on. */
#define STAGE_SLOTS 16u
#define STAGE_SLOT (UINT64_C(1) << 20)

/* The most that one copy of a fetch moves: others (an exchange) get their turn between two. */
#define FETCH_MAX (UINT64_C(16) << 20)
#define PITCH_MAX ((UINT64_C(1) << 31) - 1)

struct CudaStage {
        uint8_t *host;                  /* [STAGE_SLOTS * STAGE_SLOT], registered */
        cudaEvent_t done[STAGE_SLOTS];  /* the copy out of a slot; NULL: none made yet */
        unsigned next;
};

void cuda_stage_free(CudaStage *s) {
        if (!s)
                return;
        for (unsigned i = 0; i < STAGE_SLOTS; i++)
                if (s->done[i])
                        (void) cuda_result(cudaEventDestroy(s->done[i]));
        if (s->host)
                (void) cuda_result(cudaFreeHost(s->host));
        free(s);
}

static int stage_new(CudaStage **ret) {
        CudaStage *s = (CudaStage *) calloc(1, sizeof(*s));
        int r = 0;

        if (!s)
                return -ENOMEM;
        r = cuda_result(cudaHostAlloc((void **) &s->host, STAGE_SLOTS * STAGE_SLOT, cudaHostAllocDefault));
        for (unsigned i = 0; r >= 0 && i < STAGE_SLOTS; i++)
                r = cuda_event_new(&s->done[i]);
        if (r < 0) {
                cuda_stage_free(s);
                return r;
        }
        *ret = s;
        return 0;
}

int cuda_upload(LkContext *c, void *device, const void *host, uint64_t size) {
        CudaStage *s;
        int r = 0;

        if (!c->stage && size > 0)
                r = stage_new(&c->stage);
        s = c->stage;
        for (uint64_t at = 0, n; r >= 0 && at < size; at += n) {
                unsigned i = s->next++ % STAGE_SLOTS;
                uint8_t *slot = s->host + i * STAGE_SLOT;

                n = size - at < STAGE_SLOT ? size - at : STAGE_SLOT;
                r = cuda_result(cudaEventSynchronize(s->done[i]));
                if (r < 0)
                        return r;
                memcpy(slot, (const uint8_t *) host + at, n);
                r = cuda_result(cudaMemcpyAsync((uint8_t *) device + at, slot, n, cudaMemcpyHostToDevice, c->stream));
                if (r >= 0)
                        r = cuda_result(cudaEventRecord(s->done[i], c->stream));
        }
        return r;
}

/* Waits: the host's copy is complete on return, and an error of an earlier kernel comes out here. A copy must not cross
 * the edge of a registration, and memory of ours can share its first page with what somebody has registered. */
int cuda_download(LkContext *c, void *host, const void *device, uint64_t size) {
        int r = 0;

        for (uint64_t at = 0, n; r >= 0 && at < size; at += n) {
                n = cuda_pin_run((uint8_t *) host + at, size - at);
                r = cuda_result(cudaMemcpyAsync((uint8_t *) host + at, (const uint8_t *) device + at, n, cudaMemcpyDeviceToHost, c->stream));
        }
        return r < 0 ? r : cuda_result(cudaStreamSynchronize(c->stream));
}

/* Bytes in a row. */
static int fetch_run(LkContext *c, uint8_t *device, const uint8_t *host, uint64_t size) {
        for (uint64_t at = 0, n; at < size; at += n) {
                int r;

                n = cuda_pin_run(host + at, size - at < FETCH_MAX ? size - at : FETCH_MAX);
                r = cuda_result(cudaMemcpyAsync(device + at, host + at, n, cudaMemcpyHostToDevice, c->copy));
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Rows from a->host + row * stride on that one copy may take; 0: the first of them crosses an edge. */
static uint64_t whole_rows(const LkFetch *a, uint64_t row) {
        uint64_t left = a->rows - row, span, n;

        span = left - 1 > (FETCH_MAX - 1) / a->stride ? FETCH_MAX : (left - 1) * a->stride + a->width;
        n = cuda_pin_run((const uint8_t *) a->host + row * a->stride, span);
        return n < a->width ? 0 : (n - a->width) / a->stride + 1;
}

int cuda_fetch(LkContext *c, const LkFetch *a) {
        if (a->rows == 0 || a->width == 0)
                return 0;
        if (!a->device || !a->host || (a->rows > 1 && a->stride < a->width))
                return -EINVAL;
        if (a->rows == 1 || a->stride == a->width)
                return fetch_run(c, (uint8_t *) a->device, (const uint8_t *) a->host, a->rows * a->width);

        for (uint64_t row = 0, n; row < a->rows; row += n) {
                uint8_t *device = (uint8_t *) a->device + row * a->width;
                const uint8_t *host = (const uint8_t *) a->host + row * a->stride;
                int r;

                n = a->stride <= PITCH_MAX ? whole_rows(a, row) : 0;
                if (n == 0) {
                        n = 1;
                        r = fetch_run(c, device, host, a->width);
                } else
                        r = cuda_result(cudaMemcpy2DAsync(
                                device, a->width, host, a->stride, a->width, n, cudaMemcpyHostToDevice, c->copy));
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Bytes in a row. Where both ends are comes from their addresses; one on the host may lie over several registrations, which of device
 * memory there is none. */
static int copy_run(cudaStream_t stream, uint8_t *to, const uint8_t *from, uint64_t size) {
        for (uint64_t at = 0, n; at < size; at += n) {
                int r;

                n = cuda_pin_run(from + at, cuda_pin_run(to + at, size - at));
                r = cuda_result(cudaMemcpyAsync(to + at, from + at, n, cudaMemcpyDefault, stream));
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Between devices that were not made to reach each other the driver goes through the host. */
int cuda_copy(LkContext *c, LkQueue queue, const LkCopy *a) {
        const bool dense = a->rows <= 1 || (a->to_stride == a->width && a->from_stride == a->width);
        cudaStream_t stream = cuda_stream_of(c, queue);

        if (a->rows == 0 || a->width == 0)
                return 0;
        if (queue == LK_COPY || (unsigned) queue >= _LK_QUEUE_MAX || !a->to || !a->from)
                return -EINVAL;
        if (dense && queue == LK_COMPUTE)
                return cuda_result(cudaMemcpyAsync(a->to, a->from, a->rows * a->width, cudaMemcpyDefault, stream));
        if (dense)
                return copy_run(stream, (uint8_t *) a->to, (const uint8_t *) a->from, a->rows * a->width);
        if (a->to_stride < a->width || a->from_stride < a->width || a->to_stride > PITCH_MAX || a->from_stride > PITCH_MAX)
                return -EINVAL;
        return cuda_result(cudaMemcpy2DAsync(a->to, a->to_stride, a->from, a->from_stride, a->width, a->rows, cudaMemcpyDefault, stream));
}
