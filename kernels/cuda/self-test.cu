/* SPDX-License-Identifier: Apache-2.0 */
/* What may be believed of the libraries: a layer's algorithm is found once in a process, tried on numbers of its own over cuts of rows and
 * columns, and used only if every cut has the bits of the whole. The list of layers is shared by all contexts under a lock; what is in it
 * never changes and lives as long as the process. */

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_fp16.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/product.cuh"

#define REFERENCE_ROWS UINT64_C(73728) /* of a whole step: what the library is asked for */
#define REFERENCE_FEW UINT64_C(1408)   /* of a prompt */
#define TEST_ROWS UINT64_C(384)
#define TEST_COLUMNS UINT64_C(1536)
#define TEST_ERROR 0.01 /* relative distance to the own kernel: another rounding, not another number */

#ifdef LK_CUDA_SM90
#define HOPPER_KERNELS 1
#else
#define HOPPER_KERNELS 0
#endif

typedef struct Layer Layer;
struct Layer {
        Layer *next;
        int arch;
        uint64_t k, rows;
        LkType y_type;
        bool biased;
        LayerPin pin;
};

/* A device class's int8 products: 0 untried, 1 good, -1 bad. */
typedef struct Class Class;
struct Class {
        Class *next;
        int arch, i8;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Layer *layers;
static Class *classes;

__global__ static void fill_kernel(uint8_t *p, uint64_t n, uint32_t seed, LkType type) {
        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t) gridDim.x * blockDim.x) {
                uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15) + seed * UINT64_C(0xbf58476d1ce4e5b9);

                x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
                x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
                if (type != LK_I8)
                        number_put_as(p, type, i, (float) (int32_t) (x >> 32) * 0x1p-31f);
                else
                        p[i] = (uint8_t) (x >> 32);
        }
}

static int fill(LkContext *c, void *p, uint64_t n, uint32_t seed, LkType type) {
        fill_kernel<<<1024, 256, 0, c->stream>>>((uint8_t *) p, n, seed, type);
        return cuda_result(cudaGetLastError());
}

static int to_host(LkContext *c, void *host, const void *device, uint64_t size) {
        int r = cuda_result(cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost, c->stream));

        return r < 0 ? r : cuda_result(cudaStreamSynchronize(c->stream));
}

typedef struct Trial {
        LkContext *c;
        uint64_t k, cols;
        LkType type, y_type; /* of x and w; of y */
        Columns columns;     /* the bias, or nothing */
        uint8_t *x, *w, *y; /* y has room for a row more */
        uint8_t *whole, *part; /* on the host */
} Trial;

typedef struct Cut {
        uint64_t row, rows, col, cols;
} Cut;

/* A part by a pin to `host`, dense. */
static int trial_run(const Trial *t, const LtPin *pin, const Cut *cut, uint8_t *host) {
        uint64_t size = lk_type_size(t->y_type);
        /* Sixteen bytes off: what is promised of y, not more. */
        uint8_t *y = cut->row > 0 ? t->y + 16 : t->y;
        const uint16_t *bias = (const uint16_t *) t->columns.half_bias;
        const LtProduct product = { cut->rows, cut->cols, t->k, t->type, t->x + cut->row * t->k * 2, t->k, t->w + cut->col * t->k * 2, y,
                t->y_type, cut->cols, bias ? bias + cut->col : NULL };
        int r = lt_run(t->c->product->lt, t->c->stream, pin, &product);

        return r < 0 ? r : to_host(t->c, host, y, cut->rows * cut->cols * size);
}

/* 1: the bits of the whole, 0: others. */
static int trial_cut(const Trial *t, const LtPin *pin, const Cut *cut) {
        uint64_t size = lk_type_size(t->y_type);
        int r = trial_run(t, pin, cut, t->part);

        if (r < 0)
                return r == -EOPNOTSUPP ? 0 : r;
        for (uint64_t i = 0; i < cut->rows; i++)
                if (memcmp(t->part + i * cut->cols * size, t->whole + ((cut->row + i) * t->cols + cut->col) * size, cut->cols * size) != 0)
                        return 0;
        return 1;
}

static float number_of(const uint8_t *p, LkType type, uint64_t i) {
        uint32_t u = 0;
        float f;
        uint16_t h;

        if (type == LK_F16) {
                memcpy(&h, p + i * 2, sizeof(h));
                return __half2float(__ushort_as_half(h));
        }
        memcpy(type == LK_F32 ? (uint8_t *) &u : (uint8_t *) &u + 2, p + i * lk_type_size(type), lk_type_size(type));
        memcpy(&f, &u, sizeof(f));
        return f;
}

/* 1: the whole is what the own kernel gives but for rounding. */
static int trial_right(const Trial *t) {
        const MmaProduct product = { TEST_ROWS, t->x, t->k, dense_matrix(t->w, t->type, t->cols, t->k), NULL, t->columns, t->y, t->y_type,
                t->cols };
        double distance = 0, length = 0;
        int r;

        r = product_mma(t->c->stream, &product);
        if (r >= 0)
                r = to_host(t->c, t->part, t->y, TEST_ROWS * t->cols * lk_type_size(t->y_type));
        if (r < 0)
                return r;
        for (uint64_t i = 0; i < TEST_ROWS * t->cols; i++) {
                double a = number_of(t->whole, t->y_type, i), b = number_of(t->part, t->y_type, i);

                distance += (a - b) * (a - b);
                length += b * b;
        }
        return sqrt(distance) <= TEST_ERROR * sqrt(length);
}

/* Every cut by the large pin; the small one beside it. */
static int trial_pins(const Trial *t, LayerPin *pin) {
        const uint64_t n = t->cols, half = n / 2 / 8 * 8;
        const Cut whole = { 0, TEST_ROWS, 0, n };
        const Cut cuts[] = {
                { 1, TEST_ROWS - 1, 0, n }, /* every row at another place of its tile */
                { 77, 1, 0, n },
                { 128, 200, 0, n },
                { 0, TEST_ROWS, 8, n - 8 },
                { 0, TEST_ROWS, half, n - half },
                { 129, 127, half, n - half },
        };
        int r;

        r = trial_run(t, &pin->large, &whole, t->whole);
        if (r >= 0)
                r = trial_right(t);
        for (size_t i = 0; r > 0 && i < sizeof(cuts) / sizeof(*cuts); i++)
                r = trial_cut(t, &pin->large, cuts + i);
        if (r <= 0)
                return r == -EOPNOTSUPP ? 0 : r;

        if (pin->few) {
                r = trial_cut(t, &pin->small, &whole);
                for (size_t i = 0; r > 0 && i < 3; i++)
                        r = trial_cut(t, &pin->small, cuts + i);
                pin->few = r > 0;
        }
        return r < 0 ? r : 1;
}

/* Numbers about as large as sums; y is not in use yet. */
static int trial_bias(Trial *t) {
        const LkMatrix w = dense_matrix(t->w, t->type, t->cols, t->k);
        const LkVector bias = { t->y, t->type, t->cols };
        int r = fill(t->c, t->y, t->cols, 3, t->type);

        return r < 0 ? r : expand_columns(t->c->product, t->c->stream, &w, &bias, false, true, &t->columns);
}

/* Asks and tries; pin->own says what came of it. */
static int pin_find(LkContext *c, uint64_t k, uint64_t rows, LkType y_type, bool biased, LayerPin *pin) {
        CudaProduct *p = c->product;
        Scratch s = scratch_begin(p);
        Trial t = {};
        uint64_t size, wide = rows > k ? rows : k;
        LkType type = y_type == LK_F16 ? LK_F16 : LK_BF16;
        LtProduct whole = { at_most(REFERENCE_ROWS, LAUNCH_MAX / wide / 128 * 128), rows, k, type, NULL, k, NULL, NULL, y_type, rows,
                biased ? p->scratch : NULL };
        int r;

        pin->own = true;
        r = lt_ask(p->lt, &whole, &pin->large);
        if (r < 0)
                return r == -EOPNOTSUPP ? 0 : r;
        whole.m = REFERENCE_FEW;
        pin->few = lt_ask(p->lt, &whole, &pin->small) >= 0 && memcmp(&pin->small, &pin->large, sizeof(pin->large)) != 0;

        t.c = c;
        t.k = k;
        t.type = type;
        t.y_type = y_type;
        t.cols = at_most(at_most(rows, TEST_COLUMNS), s.left / 2 / (k * 2)) / 8 * 8;
        size = TEST_ROWS * t.cols * lk_type_size(y_type);
        t.x = (uint8_t *) scratch_take(&s, TEST_ROWS * k * 2);
        t.w = (uint8_t *) scratch_take(&s, t.cols * k * 2);
        t.y = (uint8_t *) scratch_take(&s, size + 16);
        if (t.cols < 16 || !t.x || !t.w || !t.y)
                return 0;
        t.whole = (uint8_t *) malloc(size);
        t.part = (uint8_t *) malloc(size);
        r = t.whole && t.part ? fill(c, t.x, TEST_ROWS * k, 1, type) : -ENOMEM;
        if (r >= 0)
                r = fill(c, t.w, t.cols * k, 2, type);
        if (r >= 0 && biased)
                r = trial_bias(&t);
        if (r >= 0)
                r = trial_pins(&t, pin);
        free(t.whole);
        free(t.part);
        if (r < 0)
                return r;
        pin->own = r == 0;
        if (pin->own)
                p->refused = "cublasLt's algorithm for a layer gave other bits for a part of it";
        return 0;
}

/* Under the lock. */
static int layer_new(LkContext *c, uint64_t k, uint64_t rows, LkType y_type, bool biased, const Layer **ret) {
        Layer *l = (Layer *) calloc(1, sizeof(*l));
        int r;

        if (!l)
                return -ENOMEM;
        l->arch = c->arch;
        l->k = k;
        l->rows = rows;
        l->y_type = y_type;
        l->biased = biased;
        r = pin_find(c, k, rows, y_type, biased, &l->pin);
        if (r < 0) {
                free(l);
                return r;
        }
        l->next = layers;
        layers = l;
        *ret = l;
        return 0;
}

int layer_pin(LkContext *c, uint64_t k, uint64_t layer_rows, LkType y_type, bool biased, const LayerPin **ret) {
        static const LayerPin own = { true, false, {}, {} };
        const CudaProduct *p = c->product;
        const Layer *l;
        int r = 0;

        if (!p->lt || p->own_only || k % 8 != 0 || layer_rows % 8 != 0) {
                *ret = &own;
                return 0;
        }
        (void) pthread_mutex_lock(&lock);
        for (l = layers; l; l = l->next)
                if (l->arch == c->arch && l->k == k && l->rows == layer_rows && l->y_type == y_type && l->biased == biased)
                        break;
        if (!l)
                r = layer_new(c, k, layer_rows, y_type, biased, &l);
        (void) pthread_mutex_unlock(&lock);
        if (r >= 0)
                *ret = &l->pin;
        return r;
}

/* Under the lock. NULL: out of memory. */
static Class *class_of(int arch) {
        Class *k;

        for (k = classes; k; k = k->next)
                if (k->arch == arch)
                        return k;
        k = (Class *) calloc(1, sizeof(*k));
        if (!k)
                return NULL;
        k->arch = arch;
        k->next = classes;
        classes = k;
        return k;
}

/* An int8 product by the library and by the own kernel: the same bytes. */
static int try_i8(LkContext *c) {
        const uint64_t m = 200, n = 272, k = 1024, most = m > n ? m : n;
        Scratch s = scratch_begin(c->product);
        uint8_t *x = (uint8_t *) scratch_take(&s, m * k), *w = (uint8_t *) scratch_take(&s, n * k);
        float *y = (float *) scratch_take(&s, m * n * 4), *ones = (float *) scratch_take(&s, most * 4),
              *host = (float *) malloc(2 * m * n * 4);
        int32_t *sums = (int32_t *) scratch_take(&s, m * n * 4);
        const LtProduct product = { m, n, k, LK_I8, x, k, w, sums, LK_F32, n, NULL };
        const Emit emit = { m, n, sums, EMIT_I32, n, ones, { ones, NULL }, y, LK_F32, n };
        const MmaProduct own = { m, x, k, dense_matrix(w, LK_I8, n, k), ones, { ones, NULL }, y, LK_F32, n };
        int r;

        if (!sums || !host) {
                free(host);
                return -ENOMEM;
        }
        r = fill(c, x, m * k, 3, LK_I8);
        if (r >= 0)
                r = fill(c, w, n * k, 4, LK_I8);
        for (uint64_t i = 0; i < most; i++)
                host[i] = 1;
        if (r >= 0)
                r = cuda_result(cudaMemcpyAsync(ones, host, most * sizeof(*ones), cudaMemcpyHostToDevice, c->stream));
        if (r >= 0)
                r = lt_run_i8(c->product->lt, c->stream, &product);
        if (r >= 0)
                r = product_emit(c->stream, &emit);
        if (r >= 0)
                r = to_host(c, host, y, m * n * 4);
        if (r >= 0)
                r = product_mma(c->stream, &own);
        if (r >= 0)
                r = to_host(c, host + m * n, y, m * n * 4);
        if (r >= 0)
                r = memcmp(host, host + m * n, m * n * 4) == 0;
        free(host);
        return r;
}

bool library_i8(LkContext *c) {
        CudaProduct *p = c->product;
        Class *k;
        bool good;

        if (!p->lt || p->own_only)
                return false;
        (void) pthread_mutex_lock(&lock);
        k = class_of(c->arch);
        if (k && k->i8 == 0) {
                k->i8 = try_i8(c) > 0 ? 1 : -1;
                if (k->i8 < 0)
                        p->refused = "cublasLt's int8 sums are not those of the own kernel";
        }
        good = k && k->i8 > 0;
        (void) pthread_mutex_unlock(&lock);
        return good;
}

int product_new(LkContext *c) {
        CudaProduct *p = (CudaProduct *) calloc(1, sizeof(*p));
        int r;
        size_t free_memory, memory;

        if (!p)
                return -ENOMEM;
        c->product = p;
        r = cuda_result(cudaMemGetInfo(&free_memory, &memory));
        if (r >= 0) {
                p->i8_rows = 8192;
                p->scratch_size = memory >= SCRATCH_LARGE_FROM ? SCRATCH_LARGE : SCRATCH_SMALL;
                r = cuda_result(cudaMalloc((void **) &p->scratch, p->scratch_size));
        }
        if (r >= 0) {
                r = lt_new(&p->lt);
                if (r < 0 && r != -ENOMEM) { /* the library does not know the device */
                        p->lt = NULL;
                        r = 0;
                }
        }
        if (r < 0)
                product_free(c);
        return r;
}

void product_free(LkContext *c) {
        CudaProduct *p = c->product;

        if (!p)
                return;
        (void) lt_free(p->lt);
        (void) cuda_result(cudaFree(p->scratch));
        free(p);
        c->product = NULL;
}

extern "C" void lk_cuda_product_set(LkContext *c, bool own_only, uint64_t i8_rows) {
        c->product->own_only = own_only;
        if (i8_rows > 0)
                c->product->i8_rows = i8_rows;
}

/* How many layers of a class are known, and how many of them are made by the own kernel. */
static void layers_count(int arch, unsigned *ret_all, unsigned *ret_own) {
        unsigned all = 0, own = 0;

        (void) pthread_mutex_lock(&lock);
        for (const Layer *l = layers; l; l = l->next) {
                all += l->arch == arch;
                own += l->arch == arch && l->pin.own;
        }
        (void) pthread_mutex_unlock(&lock);
        *ret_all = all;
        *ret_own = own;
}

extern "C" int lk_cuda_describe(LkContext *c, char *ret, size_t size) {
        const CudaProduct *p = c->product;
        size_t lt = lt_version();
        char library[64] = "own (no cublasLt for this card)";
        unsigned all, own;

        layers_count(c->arch, &all, &own);
        if (p->lt)
                (void) snprintf(library, sizeof(library), "cublasLt %zu.%zu.%zu", lt / 10000, lt / 100 % 100, lt % 100);
        return snprintf(ret, size,
                "sm_%d\n"
                "linears, bf16 and f16: %s, one algorithm for each layer (%u known, %u of them own mma.sync)\n"
                "linears, fp8 and fp4: their numbers as bf16, then as bf16\n"
                "linears, int8: %s, int32 sums, own last pass\n"
                "linears, others: own fma, the CPU's bits\n"
                "attention, bf16, head 128: %s\n"
                "attention, others: own mma.sync; f32 the CPU's bits\n"
                "refused by the self-test: %s\n",
                c->arch, library, all, own, library, HOPPER_KERNELS && c->arch == 90 ? "own wgmma" : "own mma.sync", p->refused ? p->refused : "nothing");
}

extern "C" int lk_cuda_numerics_id(LkContext *c, char *ret, size_t size) {
        const CudaProduct *p = c->product;

        return snprintf(ret, size, "cuda-%d-sm%d-lt%zu", LK_CUDA_KERNELS, c->arch, p->lt ? lt_version() : 0);
}
