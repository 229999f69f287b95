/* SPDX-License-Identifier: Apache-2.0 */
/* Time that a queue was from one place to another, and queues that wait, for tests and figures. */

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/context.cuh"

struct CudaLaps {
        cudaEvent_t *events; /* [allocated], in turn: begin, end; made once */
        size_t n, made, allocated;
};

void cuda_laps_free(CudaLaps *l) {
        if (!l)
                return;
        for (size_t i = 0; i < l->made; i++)
                (void) cuda_result(cudaEventDestroy(l->events[i]));
        free(l->events);
        free(l);
}

static int make_event(CudaLaps *l) {
        if (l->made == l->allocated) {
                size_t n = l->allocated > 0 ? 2 * l->allocated : 1024;
                cudaEvent_t *events = (cudaEvent_t *) realloc(l->events, n * sizeof(*events));

                if (!events)
                        return -ENOMEM;
                l->events = events;
                l->allocated = n;
        }
        int r = cuda_result(cudaEventCreateWithFlags(l->events + l->made, cudaEventBlockingSync));

        if (r >= 0)
                l->made++;
        return r;
}

int cuda_lap(LkContext *c, bool begins) {
        int r = 0;

        if (!c->laps)
                c->laps = (CudaLaps *) calloc(1, sizeof(*c->laps));
        if (!c->laps)
                return -ENOMEM;
        if (begins == (c->laps->n % 2 == 1))
                return -EINVAL;
        if (c->laps->n == c->laps->made)
                r = make_event(c->laps);
        if (r >= 0)
                r = cuda_result(cudaEventRecord(c->laps->events[c->laps->n], c->stream));
        if (r >= 0)
                c->laps->n++;
        return r;
}

int cuda_laps(LkContext *c, uint64_t *ret_usec) {
        double msec = 0;
        int r = cuda_result(cudaStreamSynchronize(c->stream));

        for (size_t i = 0; r >= 0 && c->laps && i + 1 < c->laps->n; i += 2) {
                float lap = 0;

                r = cuda_result(cudaEventElapsedTime(&lap, c->laps->events[i], c->laps->events[i + 1]));
                msec += lap;
        }
        if (c->laps)
                c->laps->n = 0;
        if (r >= 0)
                *ret_usec = (uint64_t) (msec * 1000);
        return r;
}

/* Freed by what the driver calls. */
typedef struct Hold {
        uint64_t *held_nsec;
        uint64_t nsec;
} Hold;

static uint64_t now_nsec(void) {
        struct timespec now;

        (void) clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t) now.tv_sec * 1000000000u + (uint64_t) now.tv_nsec;
}

static void CUDART_CB on_hold(void *userdata) {
        Hold *h = (Hold *) userdata;
        uint64_t until = *h->held_nsec + h->nsec;
        const struct timespec at = {(time_t) (until / 1000000000u), (long) (until % 1000000000u)};

        if (h->nsec == 0)
                *h->held_nsec = now_nsec();
        else
                while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
                        ;
        free(h);
}

int cuda_hold(LkContext *c, LkQueue queue, uint64_t nsec) {
        Hold *h = (Hold *) malloc(sizeof(*h));
        int r;

        if (!h)
                return -ENOMEM;
        *h = (Hold){c->held_nsec + queue, nsec};
        r = cuda_result(cudaLaunchHostFunc(cuda_stream_of(c, queue), on_hold, h));
        if (r < 0)
                free(h);
        return r;
}
