/* SPDX-License-Identifier: Apache-2.0 */
/* What passes before a new worker's first kernel of block 0, piece by piece: how long each takes, and what of the device's memory it
 * keeps. Each part is a process of its own.
 *
 *     measure-start [PART...]
 *
 * Parts: library, cuda, beside, layers, memory, register. Without a device 77. */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/lt-library.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/gpu/device.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define PIECE (16 * MIB) /* as kernels/cuda/pin.cu registers */
#define THREADS_MAX 16u

static double last;
static size_t last_free;

static void begin(void) {
        last = now();
}

/* Since begin() or the last one. */
static void done(const char *what) {
        double msec = 1e3 * (now() - last);
        size_t n_free = 0, n_total = 0;

        printf("  %-52s %8.2f ms", what, msec);
        if (last_free > 0 && cudaMemGetInfo(&n_free, &n_total) == cudaSuccess) {
                printf("  %+6.0f MiB", ((double) last_free - (double) n_free) / (double) MIB);
                last_free = n_free;
        }
        printf("\n");
        begin();
}

static void remember_memory(void) {
        size_t n_total;

        must(cudaMemGetInfo(&last_free, &n_total), "memory");
        printf("  %.0f MiB of %.0f are taken\n", (double) (n_total - last_free) / (double) MIB, (double) n_total / (double) MIB);
        begin();
}

static void part_library(void) {
        begin();
        must_be(lt_library_load() == 0, "cublasLt cannot be loaded");
        done("cublasLt loaded, alone in the process");
}

static void start_driver(bool beside) {
        int version = 0, n = 0;

        begin();
        must(cudaDriverGetVersion(&version), "driver");
        done("libcuda loaded");
        if (beside)
                lk_cuda_load_libraries();
        if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
                exit(77);
        done("cuInit, devices counted");
        must(cudaSetDevice(0), "context");
        done("context");
        remember_memory();
}

static LkContext *start_context(void) {
        const LkOps *ops = lk_cuda_ops();
        LkContext *c;

        must_be(ops->context_new(0, &c) == 0, "no context");
        return c;
}

static void *memory(LkContext *c, uint64_t size) {
        void *p;

        must_be(lk_cuda_ops()->memory_new(c, size, &p) == 0, "no memory");
        must(cudaMemset(p, 0, size), "memset");
        return p;
}

static void first_kernel(LkContext *c) {
        float *p = memory(c, MIB);
        const LkConvert a = {.m = 1, .n = 1, .x = p, .x_type = LK_F32, .x_ld = 1, .y = p + 64, .y_type = LK_BF16, .y_ld = 1};

        begin();
        for (unsigned i = 0; i < 2; i++) {
                must_be(lk_cuda_ops()->convert(c, &a) == 0, "convert");
                must(cudaDeviceSynchronize(), "convert");
                done(i == 0 ? "an own kernel for the first time" : "for the second time");
        }
}

/* One after the other: what a worker linked with everything does. */
static void part_cuda(void) {
        cudaStream_t stream;
        void *p;

        start_driver(false);
        must(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), "stream");
        done("a stream");
        must(cudaHostAlloc(&p, PIECE, cudaHostAllocDefault), "pages");
        done("16 MiB of registered pages (uploads)");
        must_be(lt_library_load() == 0, "cublasLt cannot be loaded");
        done("cublasLt loaded");
        first_kernel(start_context());
}

/* As worker-cuda.c does it. */
static void part_beside(void) {
        double all = now();
        LkContext *c;

        start_driver(true);
        c = start_context();
        done("queues, scratch memory, cublasLt's handle");
        first_kernel(c);
        printf("  %-52s %8.2f ms\n", "all of it, cublasLt loaded beside", 1e3 * (now() - all));
}

static void linear(LkContext *c, const char *what, uint64_t m, uint64_t rows, uint64_t k) {
        void *x = memory(c, m * k * 2), *w = memory(c, rows * k * 2), *y = memory(c, m * rows * 2);
        const LkGemm g = {
                .m = m, .x = x, .x_type = LK_BF16, .x_ld = k, .y = y, .y_type = LK_BF16, .y_ld = rows,
                .w = {.data = w, .type = LK_BF16, .rows = rows, .cols = k, .row_stride = 2 * k, .block_rows = rows,
                        .block_stride = 2 * k * rows},
        };
        char text[80];

        must(cudaDeviceSynchronize(), "memset");
        begin();
        for (unsigned i = 0; i < 2; i++) {
                must_be(lk_cuda_ops()->gemm(c, &g) == 0, what);
                must(cudaDeviceSynchronize(), what);
                (void) snprintf(text, sizeof(text), "%s%s", what, i == 0 ? ", with its trial" : ", again");
                done(text);
        }
        lk_cuda_ops()->memory_free(c, x);
        lk_cuda_ops()->memory_free(c, w);
        lk_cuda_ops()->memory_free(c, y);
        lk_cuda_ops()->memory_trim(c);
}

static void linear_i8(LkContext *c) {
        const uint64_t m = 8192, rows = 7168, k = 5376;
        void *x = memory(c, m * k), *w = memory(c, rows * k), *y = memory(c, m * rows * 2), *scale = memory(c, (m + rows) * 4);
        const LkGemmI8 g = {
                .m = m, .x = x, .x_ld = k, .x_scale = scale, .y = y, .y_type = LK_BF16, .y_ld = rows,
                .w = {.data = w, .type = LK_I8, .rows = rows, .cols = k, .row_stride = k, .block_rows = rows, .block_stride = k * rows,
                        .quant = {.scale = (float *) scale + m, .scale_stride = 4}},
        };

        must(cudaDeviceSynchronize(), "memset");
        begin();
        for (unsigned i = 0; i < 2; i++) {
                must_be(lk_cuda_ops()->gemm_i8(c, &g) == 0, "int8");
                must(cudaDeviceSynchronize(), "int8");
                done(i == 0 ? "an int8 product, with the trial of all" : "again");
        }
}

/* Those of the refiner: what a new worker tries before block 0 of an int8 model. */
static void part_layers(void) {
        LkContext *c;

        start_driver(true);
        c = start_context();
        done("context");
        remember_memory();
        linear(c, "q 7168 x 5376", 512, 7168, 5376);
        linear(c, "out 5376 x 7168", 512, 5376, 7168);
        linear(c, "up 14336 x 5376", 512, 14336, 5376);
        linear(c, "down 5376 x 14336", 512, 5376, 14336);
        linear_i8(c);
}

static void take(uint64_t bytes, unsigned pieces) {
        void *p[128];
        unsigned n = 0;
        char text[80];

        begin();
        while (n < pieces && cudaMalloc(p + n, bytes / pieces) == cudaSuccess)
                n++;
        (void) snprintf(text, sizeof(text), "%.0f GiB taken in %u pieces%s", (double) bytes / (double) GIB, n,
                n < pieces ? " (no more are there)" : "");
        done(text);
        for (unsigned i = 0; i < n; i++)
                must(cudaFree(p[i]), "free");
        done("given back");
        (void) cudaGetLastError();
}

static void part_memory(void) {
        start_driver(false);
        for (unsigned i = 0; i < 2; i++) {
                take(GIB, 1);
                take(8 * GIB, 1);
                take(40 * GIB, 1);
                take(8 * GIB, 64);
                take(40 * GIB, 64);
                take(20 * GIB, 100); /* two parts of each of 50 int8 blocks */
        }
}

typedef struct Share {
        uint8_t *p;
        uint64_t size;
        bool registers; /* else touches */
} Share;

static void *work(void *arg) {
        const Share *s = arg;

        if (!s->registers)
                must_be(madvise(s->p, s->size, MADV_POPULATE_WRITE) == 0, "MADV_POPULATE_WRITE");
        for (uint64_t at = 0; s->registers && at < s->size; at += PIECE)
                must(cudaHostRegister(s->p + at, PIECE, cudaHostRegisterPortable), "register");
        return NULL;
}

static void shared_out(uint8_t *p, unsigned n, bool registers) {
        Share shares[THREADS_MAX];
        pthread_t threads[THREADS_MAX];

        for (unsigned i = 0; i < n; i++) {
                shares[i] = (Share){p + GIB / n * i, GIB / n, registers};
                must_be(pthread_create(threads + i, NULL, work, shares + i) == 0, "thread");
        }
        for (unsigned i = 0; i < n; i++)
                must_be(pthread_join(threads[i], NULL) == 0, "thread");
}

/* A GiB of the region in a mapping of its own that nobody has touched; touch: threads that do so first, 0: none. */
static void map_and_register(int fd, int flags, unsigned touch, unsigned n, const char *what) {
        uint8_t *p;
        char text[80];

        begin();
        p = mmap(NULL, GIB, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
        must_be(p != MAP_FAILED, "map");
        if (flags)
                done("mapped with MAP_POPULATE");
        if (touch > 0) {
                shared_out(p, touch, false);
                (void) snprintf(text, sizeof(text), "touched by %u threads", touch);
                done(text);
        }
        shared_out(p, n, true);
        (void) snprintf(text, sizeof(text), "registered by %u threads%s", n, what);
        done(text);
        for (uint64_t at = 0; at < GIB; at += PIECE)
                must(cudaHostUnregister(p + at), "unregister");
        must_be(munmap(p, GIB) == 0, "unmap");
        done("unregistered");
}

/* A region's pages are there, as the service has read them; the worker maps them. */
static void part_register(void) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint8_t *p, *device, *staging;
        cudaStream_t stream;

        start_driver(false);
        must_be(memfd_new("measure-start", GIB, &fd) == 0, "memfd");
        p = mmap(NULL, GIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        must_be(p != MAP_FAILED, "map");
        begin();
        shared_out(p, 8, false);
        done("1 GiB of memfd made");
        for (unsigned i = 0; i < 2; i++) {
                map_and_register(fd, 0, 0, 1, ", untouched");
                map_and_register(fd, MAP_POPULATE, 0, 1, "");
                map_and_register(fd, 0, 1, 1, "");
                map_and_register(fd, 0, 4, 1, "");
                map_and_register(fd, 0, 8, 1, "");
                map_and_register(fd, 0, 0, 2, ", untouched");
                map_and_register(fd, 0, 0, 4, ", untouched");
                map_and_register(fd, 0, 4, 4, "");
        }

        device = device_new(GIB);
        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        begin();
        must(cudaMemcpyAsync(device, p, GIB, cudaMemcpyHostToDevice, stream), "copy");
        must(cudaStreamSynchronize(stream), "copy");
        done("copied, not registered");
        must(cudaHostAlloc((void **) &staging, PIECE, cudaHostAllocDefault), "pages");
        begin();
        for (uint64_t at = 0; at < GIB; at += PIECE) { /* no overlap: the copying alone is looked at */
                memcpy(staging, p + at, PIECE);
                must(cudaMemcpyAsync(device + at, staging, PIECE, cudaMemcpyHostToDevice, stream), "copy");
                must(cudaStreamSynchronize(stream), "copy");
        }
        done("copied through registered pages by one thread");
}

static const struct {
        const char *name;
        void (*run)(void);
} parts[] = {
        {"library", part_library},
        {"cuda", part_cuda},
        {"beside", part_beside},
        {"layers", part_layers},
        {"memory", part_memory},
        {"register", part_register},
};

int main(int argc, char **argv) {
        for (size_t i = 0; i < ELEMENTSOF(parts); i++) {
                int status;
                pid_t pid;

                if (!wanted(argc, argv, parts[i].name))
                        continue;
                printf("%s\n", parts[i].name);
                (void) fflush(stdout);
                pid = fork(); /* nothing of CUDA is there yet */
                must_be(pid >= 0, "fork");
                if (pid == 0) {
                        parts[i].run();
                        return 0;
                }
                must_be(waitpid(pid, &status, 0) == pid, "wait");
                if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                        return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
        }
        return 0;
}
