/* SPDX-License-Identifier: Apache-2.0 */
/* A library's first product takes a tenth of a second, in which it loads kernels and builds its tables; the second one a hundredth of that. */

#include <pthread.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/product.cuh"

/* What is asked for: rows of a step and of a prompt, a layer as large as a denoiser's. What is run with the answer: as little as will do. */
#define ASK_ROWS UINT64_C(65536)
#define ASK_FEW UINT64_C(1408)
#define ASK_SIZE UINT64_C(8192)
#define RUN_SIZE UINT64_C(512)

typedef struct Warm {
        pthread_t thread;
        int device;
        struct Warm *next;
} Warm;

static Warm *warming; /* of the thread that begins and awaits them */

static void run(CudaLt *lt, cudaStream_t stream, uint8_t *memory) {
        const uint64_t bytes = RUN_SIZE * RUN_SIZE * 2;
        LtProduct p = { RUN_SIZE, RUN_SIZE, RUN_SIZE, LK_I8, memory, RUN_SIZE, memory + bytes, memory + 2 * bytes, LK_F32, RUN_SIZE, NULL };

        (void) lt_run_i8(lt, stream, &p);
        p.type = p.y_type = LK_BF16;
        for (unsigned few = 0; few < 2; few++) {
                LtProduct ask = p;
                LtPin pin;

                ask.m = few ? ASK_FEW : ASK_ROWS;
                ask.n = ask.k = ask.x_ld = ask.y_ld = ASK_SIZE;
                if (lt_ask(lt, &ask, &pin) >= 0)
                        (void) lt_run(lt, stream, &pin, &p);
        }
        (void) cudaStreamSynchronize(stream);
}

/* What fails here fails again, and is told, where it is needed. */
static void *work(void *userdata) {
        const Warm *w = (const Warm *) userdata;
        cudaStream_t stream = NULL;
        void *memory = NULL;
        CudaLt *lt = NULL;

        if (cudaSetDevice(w->device) == cudaSuccess && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                cudaMalloc(&memory, 4 * RUN_SIZE * RUN_SIZE * 2) == cudaSuccess && lt_new(&lt) >= 0)
                run(lt, stream, (uint8_t *) memory);
        (void) lt_free(lt);
        (void) cudaFree(memory);
        if (stream)
                (void) cudaStreamDestroy(stream);
        (void) cudaGetLastError();
        return NULL;
}

extern "C" void lk_cuda_warm(void) {
        Warm *w = (Warm *) calloc(1, sizeof(*w));

        if (!w)
                return;
        if (cudaGetDevice(&w->device) != cudaSuccess || pthread_create(&w->thread, NULL, work, w) != 0) {
                free(w);
                return;
        }
        w->next = warming;
        warming = w;
}

extern "C" void lk_cuda_warm_await(void) {
        while (warming) {
                Warm *w = warming;

                warming = w->next;
                (void) pthread_join(w->thread, NULL);
                free(w);
        }
}
