/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/device.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#define SAMPLES_MIN 10
#define SAMPLES_MAX 100
#define GROUP_USEC 1000.0

static cudaDeviceProp properties;

extern "C" void must(cudaError_t e, const char *what) {
        if (e == cudaSuccess)
                return;
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
        exit(1);
}

extern "C" void must_be(bool ok, const char *what) {
        if (ok)
                return;
        fprintf(stderr, "%s\n", what);
        exit(1);
}

extern "C" bool wanted(int argc, char **argv, const char *name) {
        for (int i = 1; i < argc; i++)
                if (strcmp(argv[i], name) == 0)
                        return true;
        return argc < 2;
}

extern "C" double now(void) {
        struct timespec t;

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

extern "C" void device_open(void) {
        int count = 0, driver = 0, runtime = 0, khz = 0;

        setvbuf(stdout, NULL, _IOLBF, 0);
        if (cudaGetDeviceCount(&count) != cudaSuccess || count < 1) {
                fprintf(stderr, "no CUDA device\n");
                exit(77);
        }
        must(cudaSetDevice(0), "first device");
        must(cudaGetDeviceProperties(&properties, 0), "properties");
        must(cudaDriverGetVersion(&driver), "driver version");
        must(cudaRuntimeGetVersion(&runtime), "runtime version");
        must(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock");
        printf("# %s, sm_%d%d, %d processors, at most %d MHz, driver speaks CUDA %d.%d, runtime %d.%d\n",
                properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                khz / 1000, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}

extern "C" unsigned device_processors(void) {
        return (unsigned) properties.multiProcessorCount;
}

extern "C" void *device_new(uint64_t size) {
        void *p;

        must(cudaMalloc(&p, size), "device memory");
        return p;
}

extern "C" void device_free(void *p) {
        must(cudaFree(p), "free");
}

static __device__ uint32_t mix(uint64_t i, uint32_t seed) {
        uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t) seed * UINT64_C(0xbf58476d1ce4e5b9);

        x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
        return (uint32_t) (x >> 32);
}

static __device__ float normal(uint64_t i, uint32_t seed) {
        float u = ((float) (mix(2 * i, seed) >> 8) + 0.5f) * 0x1p-24f,
              v = (float) (mix(2 * i + 1, seed) >> 8) * 0x1p-24f;

        return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

static __device__ void put(__nv_bfloat16 *p, float x) {
        *p = __float2bfloat16(x);
}

static __device__ void put(__nv_fp8_e4m3 *p, float x) {
        *p = __nv_fp8_e4m3(x);
}

static __device__ void put(int8_t *p, float x) {
        *p = (int8_t) fminf(fmaxf(rintf(x), -127), 127);
}

template <typename T> static __global__ void fill_kernel(T *p, uint64_t n, float sigma, uint32_t seed) {
        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < n;
                i += (uint64_t) gridDim.x * blockDim.x)
                put(p + i, sigma * normal(i, seed));
}

static __global__ void walk_kernel(
        __nv_bfloat16 *p, uint64_t rows, uint64_t width, uint32_t knot, float sigma, float noise, uint32_t walk, uint32_t seed) {
        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < rows * width; i += (uint64_t) gridDim.x * blockDim.x) {
                const uint64_t row = i / width, from = row / knot * width + i % width;
                const float t = (float) (row % knot) / (float) knot;

                put(p + i, sigma * ((1 - t) * normal(from, walk) + t * normal(from + width, walk)) + noise * normal(i, seed));
        }
}

static __global__ void bytes_kernel(uint8_t *p, uint64_t n, uint32_t seed) {
        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < n;
                i += (uint64_t) gridDim.x * blockDim.x)
                p[i] = (uint8_t) mix(i, seed);
}

extern "C" void fill_bf16(void *p, uint64_t n, float sigma, uint32_t seed) {
        fill_kernel<<<2048, 256>>>((__nv_bfloat16 *) p, n, sigma, seed);
        must(cudaGetLastError(), "fill");
}

extern "C" void fill_walk(
        void *p, uint64_t rows, uint64_t width, uint32_t knot, float sigma, float noise, uint32_t walk, uint32_t seed) {
        walk_kernel<<<2048, 256>>>((__nv_bfloat16 *) p, rows, width, knot, sigma, noise, walk, seed);
        must(cudaGetLastError(), "fill");
}

extern "C" void fill_e4m3(void *p, uint64_t n, float sigma, uint32_t seed) {
        fill_kernel<<<2048, 256>>>((__nv_fp8_e4m3 *) p, n, sigma, seed);
        must(cudaGetLastError(), "fill");
}

extern "C" void fill_s8(void *p, uint64_t n, float sigma, uint32_t seed) {
        fill_kernel<<<2048, 256>>>((int8_t *) p, n, sigma, seed);
        must(cudaGetLastError(), "fill");
}

extern "C" void fill_bytes(void *p, uint64_t n, uint32_t seed) {
        bytes_kernel<<<2048, 256>>>((uint8_t *) p, n, seed);
        must(cudaGetLastError(), "fill");
}

static __device__ unsigned long long counter;

static __global__ void differing_kernel(const uint8_t *a, uint64_t a_pitch, const uint8_t *b,
        uint64_t b_pitch, uint64_t words, uint64_t height) {
        unsigned long long n = 0;

        for (uint64_t y = blockIdx.x; y < height; y += gridDim.x) {
                const uint16_t *u = (const uint16_t *) (a + y * a_pitch),
                               *v = (const uint16_t *) (b + y * b_pitch);

                for (uint64_t x = threadIdx.x; x < words; x += blockDim.x)
                        n += u[x] != v[x];
        }
        if (n)
                atomicAdd(&counter, n);
}

static __global__ void nans_kernel(const uint16_t *p, uint64_t n) {
        unsigned long long found = 0;

        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < n;
                i += (uint64_t) gridDim.x * blockDim.x)
                found += (p[i] & 0x7fff) > 0x7f80;
        if (found)
                atomicAdd(&counter, found);
}

static void counter_clear(void) {
        const unsigned long long zero = 0;

        must(cudaMemcpyToSymbol(counter, &zero, sizeof(zero)), "counter");
}

static uint64_t counter_read(void) {
        unsigned long long n;

        must(cudaMemcpyFromSymbol(&n, counter, sizeof(n)), "what ran before comparing");
        return n;
}

extern "C" uint64_t differing(
        const void *a, uint64_t a_pitch, const void *b, uint64_t b_pitch, uint64_t width, uint64_t height) {
        counter_clear();
        differing_kernel<<<4096, 256>>>(
                (const uint8_t *) a, a_pitch, (const uint8_t *) b, b_pitch, width / 2, height);
        must(cudaGetLastError(), "compare");
        return counter_read();
}

extern "C" uint64_t nans(const void *p, uint64_t n) {
        counter_clear();
        nans_kernel<<<4096, 256>>>((const uint16_t *) p, n);
        must(cudaGetLastError(), "NaN");
        return counter_read();
}

/* The management library comes with the driver, not with the toolkit: without it clocks and watts read 0. */
static void meter(unsigned *ret_mhz, unsigned *ret_watts) {
        typedef int Get(void *device, unsigned *ret);
        static Get *power;
        static int (*clocks)(void *device, int kind, unsigned *ret);
        static void *device;
        static bool tried;

        if (!tried) {
                void *l = dlopen("libnvidia-ml.so.1", RTLD_NOW);
                int (*init)(void) = l ? (int (*)(void)) dlsym(l, "nvmlInit_v2") : NULL;
                int (*handle)(unsigned, void **) =
                        l ? (int (*)(unsigned, void **)) dlsym(l, "nvmlDeviceGetHandleByIndex_v2") : NULL;

                tried = true;
                if (init && handle && init() == 0 && handle(0, &device) == 0) {
                        power = (Get *) dlsym(l, "nvmlDeviceGetPowerUsage");
                        clocks = (int (*)(void *, int, unsigned *)) dlsym(l, "nvmlDeviceGetClockInfo");
                }
        }
        if (power && power(device, ret_watts) == 0)
                *ret_watts /= 1000;
        if (clocks)
                (void) clocks(device, 1 /* of the processors */, ret_mhz);
}

static int compare_floats(const void *a, const void *b) {
        float x = *(const float *) a, y = *(const float *) b;

        return (x > y) - (x < y);
}

static double elapsed(void (*launch)(void *), void *arg, unsigned group) {
        cudaEvent_t e[2];
        float msec;

        for (int i = 0; i < 2; i++)
                must(cudaEventCreate(e + i), "event");
        must(cudaEventRecord(e[0]), "event");
        for (unsigned i = 0; i < group; i++)
                launch(arg);
        must(cudaEventRecord(e[1]), "event");
        must(cudaEventSynchronize(e[1]), "what was timed");
        must(cudaEventElapsedTime(&msec, e[0], e[1]), "event");
        for (int i = 0; i < 2; i++)
                must(cudaEventDestroy(e[i]), "event");
        return 1000.0 * msec;
}

extern "C" Rate rate(void (*launch)(void *), void *arg, double seconds) {
        cudaEvent_t events[SAMPLES_MAX + 1];
        float took[SAMPLES_MAX];
        Rate r = {};
        double once;
        unsigned group;

        (void) elapsed(launch, arg, 1);
        once = elapsed(launch, arg, 1);
        group = once < GROUP_USEC ? (unsigned) ceil(GROUP_USEC / (once + 1)) : 1;
        r.samples = (unsigned) fmin(fmax(seconds * 1e6 / (once * group), SAMPLES_MIN), SAMPLES_MAX);

        for (unsigned i = 0; i < r.samples / 2 * group; i++)
                launch(arg);
        for (unsigned i = 0; i <= r.samples; i++) {
                must(cudaEventCreate(events + i), "event");
                for (unsigned j = 0; i && j < group; j++)
                        launch(arg);
                must(cudaEventRecord(events[i]), "event");
        }
        while (cudaEventQuery(events[r.samples]) == cudaErrorNotReady) {
                const struct timespec pause = {.tv_sec = 0, .tv_nsec = 5000000};

                meter(&r.mhz, &r.watts);
                (void) nanosleep(&pause, NULL);
        }
        must(cudaEventSynchronize(events[r.samples]), "what was timed");
        for (unsigned i = 0; i < r.samples; i++)
                must(cudaEventElapsedTime(took + i, events[i], events[i + 1]), "event");
        for (unsigned i = 0; i <= r.samples; i++)
                must(cudaEventDestroy(events[i]), "event");

        qsort(took, r.samples, sizeof(*took), compare_floats);
        r.usec = 1000.0 * took[r.samples / 2] / group;
        r.shortest = 1000.0 * took[0] / group;
        r.longest = 1000.0 * took[r.samples - 1] / group;
        return r;
}

#define WAITED_SECONDS 0.02

static double waited(void (*launch)(void *), void *arg, unsigned group, Rate *r) {
        double begin = now();

        for (unsigned i = 0; i < group; i++)
                launch(arg);
        if (r)
                meter(&r->mhz, &r->watts);
        must(cudaDeviceSynchronize(), "what was timed");
        return now() - begin;
}

extern "C" Rate rate_waited(void (*launch)(void *arg), void *arg, double seconds) {
        float took[SAMPLES_MAX];
        Rate r = {};
        double once;
        unsigned group;

        (void) waited(launch, arg, 1, NULL);
        once = waited(launch, arg, 1, NULL);
        group = once < WAITED_SECONDS ? (unsigned) ceil(WAITED_SECONDS / once) : 1;
        r.samples = (unsigned) fmin(fmax(seconds / (once * group), SAMPLES_MIN), SAMPLES_MAX);
        for (unsigned i = 0; i < r.samples; i++)
                took[i] = (float) (1e6 * waited(launch, arg, group, &r));
        qsort(took, r.samples, sizeof(*took), compare_floats);
        r.usec = took[r.samples / 2] / group;
        r.shortest = took[0] / group;
        r.longest = took[r.samples - 1] / group;
        return r;
}
