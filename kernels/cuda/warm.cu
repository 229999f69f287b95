/* SPDX-License-Identifier: Apache-2.0 */
/* A library's first product takes a tenth of a second, in which it loads kernels and builds its tables; the second one a hundredth of that. */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/warm.h"

/* What is asked for: rows of a step and of a prompt, a layer as large as a denoiser's. What is run with the answer: as little as will do. */
#define ASK_ROWS UINT64_C(65536)
#define ASK_FEW UINT64_C(1408)
#define ASK_SIZE UINT64_C(8192)
#define RUN_SIZE UINT64_C(512)

#define KNOWN_MAX 64u

typedef struct Warm {
        pthread_t thread;
        int device;
        bool told_only;
        void (*ended)(void);
        struct Warm *next;
} Warm;

static Warm *warming; /* of the thread that begins and awaits them */

static int arch_of(int device) {
        int major = 0, minor = 0;

        if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
                cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
                return 0;
        return 10 * major + minor;
}

static bool is_among(const LkCudaPin *p, const LkCudaPin *others, unsigned n) {
        for (unsigned i = 0; i < n; i++)
                if (others[i].type == p->type && others[i].biased == p->biased && memcmp(others[i].small, p->small, sizeof(p->small)) == 0)
                        return true;
        return false;
}

/* Each algorithm for few rows that another process found, so that its kernel is loaded; asking the library for others is not needed then.
 * False: none is known yet. */
static bool run_known(CudaLt *lt, cudaStream_t stream, int arch, LtProduct *p) {
        LkCudaPin pins[KNOWN_MAX];
        unsigned n;

        layers_check(lt, arch, p->x);
        n = lk_cuda_pins(arch, pins, KNOWN_MAX);

        for (unsigned i = 0; i < n; i++) {
                LtPin pin;

                if (!pins[i].few)
                        memcpy(pins[i].small, pins[i].large, sizeof(pins[i].small));
                if (pins[i].own || is_among(pins + i, pins, i))
                        continue;
                memcpy(&pin, pins[i].small, sizeof(pin));
                p->y_type = (LkType) pins[i].type;
                p->type = p->y_type == LK_F16 ? LK_F16 : LK_BF16;
                p->bias = pins[i].biased ? p->x : NULL;
                (void) lt_run(lt, stream, &pin, p);
        }
        return n > 0;
}

static void run(CudaLt *lt, cudaStream_t stream, int arch, bool told_only, uint8_t *memory) {
        const uint64_t bytes = RUN_SIZE * RUN_SIZE * 2;
        LtProduct p = { RUN_SIZE, RUN_SIZE, RUN_SIZE, LK_I8, memory, RUN_SIZE, memory + bytes, memory + 2 * bytes, LK_F32, RUN_SIZE, NULL };
        bool known;

        if (!told_only)
                (void) lt_run_i8(lt, stream, &p);
        known = run_known(lt, stream, arch, &p) || told_only;
        p.type = p.y_type = LK_BF16;
        for (unsigned few = 0; !known && few < 2; few++) {
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
                run(lt, stream, arch_of(w->device), w->told_only, (uint8_t *) memory);
        (void) lt_free(lt);
        (void) cudaFree(memory);
        if (stream)
                (void) cudaStreamDestroy(stream);
        (void) cudaGetLastError();
        if (w->ended)
                w->ended();
        return NULL;
}

static void begin(bool told_only, void (*ended)(void)) {
        Warm *w = (Warm *) calloc(1, sizeof(*w));

        if (!w)
                return;
        w->told_only = told_only;
        w->ended = ended;
        if (cudaGetDevice(&w->device) != cudaSuccess || pthread_create(&w->thread, NULL, work, w) != 0) {
                free(w);
                return;
        }
        w->next = warming;
        warming = w;
}

extern "C" void lk_cuda_warm(void (*ended)(void)) {
        begin(false, ended);
}

extern "C" void lk_cuda_warm_told(void (*ended)(void)) {
        begin(true, ended);
}

extern "C" void lk_cuda_warm_await(void) {
        while (warming) {
                Warm *w = warming;

                warming = w->next;
                (void) pthread_join(w->thread, NULL);
                free(w);
        }
}
