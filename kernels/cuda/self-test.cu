/* SPDX-License-Identifier: Apache-2.0 */
/* What may be believed of the libraries, and of a kernel whose bits have been wrong: a layer's algorithm is found once in a process, tried on numbers of its own over cuts of rows and
 * columns, and used only if every cut has the bits of the whole. A process may be told what another one with the same library and device found. The
 * list of layers is shared by all contexts under a lock; what was taken from it never changes and lives as long as the process. */

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/warm.h"

#define REFERENCE_ROWS UINT64_C(73728) /* of a whole step: what the library is asked for */
#define REFERENCE_FEW UINT64_C(1408)   /* of a prompt */
#define TEST_ROWS UINT64_C(384)
#define TEST_COLUMNS UINT64_C(1536)
#define I8_ROWS UINT64_C(8192)
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
        bool is_told; /* by another process, and nobody has asked the library yet */
        LayerPin pin;
};

/* A device class's int8 products by the library and by Hopper's kernel, and attention over int8 by another of those: 0 untried, 1 good, -1 bad. */
typedef struct Class Class;
struct Class {
        Class *next;
        int arch, i8, hopper_i8, attention_i8;
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

/* What was seen, on the device: the first step of a new worker waits for a dozen layers' trials, and outputs that came to the host to be compared
 * were most of their time. */
typedef struct Verdict {
        unsigned long long differ; /* numbers of parts that are not the whole's */
        double distance, length;   /* squares */
} Verdict;

typedef struct Trial {
        LkContext *c;
        uint64_t k, cols;
        LkType type, y_type; /* of x and w; of y */
        Columns columns;     /* the bias, or nothing */
        uint8_t *x, *w, *whole, *y; /* y has room for 16 bytes more */
        Verdict *verdict;
} Trial;

typedef struct Cut {
        uint64_t row, rows, col, cols;
} Cut;

template <typename T>
__global__ static void compare_kernel(const T *part, const T *whole, uint64_t rows, uint64_t cols, uint64_t whole_ld, Verdict *v) {
        unsigned long long n = 0;

        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (uint64_t) gridDim.x * blockDim.x)
                n += part[i] != whole[i / cols * whole_ld + i % cols];
        if (n > 0)
                atomicAdd(&v->differ, n);
}

/* In no order: it is held against a bound that nothing comes near to. */
__global__ static void distance_kernel(const void *y, const void *right, LkType type, uint64_t n, Verdict *v) {
        double distance = 0, length = 0;

        for (uint64_t i = (uint64_t) blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t) gridDim.x * blockDim.x) {
                double a = number_get(y, type, i), b = number_get(right, type, i);

                distance += (a - b) * (a - b);
                length += b * b;
        }
        for (int step = 16; step > 0; step /= 2) {
                distance += __shfl_down_sync(0xffffffffu, distance, step);
                length += __shfl_down_sync(0xffffffffu, length, step);
        }
        if (threadIdx.x % 32 == 0) {
                atomicAdd(&v->distance, distance);
                atomicAdd(&v->length, length);
        }
}

/* A part by a pin to `y`, dense. */
static int trial_run(const Trial *t, const LtPin *pin, const Cut *cut, uint8_t *y) {
        const uint16_t *bias = (const uint16_t *) t->columns.half_bias;
        const LtProduct product = { cut->rows, cut->cols, t->k, t->type, t->x + cut->row * t->k * 2, t->k, t->w + cut->col * t->k * 2, y,
                t->y_type, cut->cols, bias ? bias + cut->col : NULL };

        return lt_run(t->c->product->lt, t->c->stream, pin, &product);
}

/* The same, and the verdict counts what is not the whole's. */
static int trial_cut(const Trial *t, const LtPin *pin, const Cut *cut) {
        uint64_t at = cut->row * t->cols + cut->col;
        /* Sixteen bytes off: what is promised of y, not more. */
        uint8_t *y = cut->row > 0 ? t->y + 16 : t->y;
        int r = trial_run(t, pin, cut, y);

        if (r < 0)
                return r;
        if (t->y_type == LK_F32)
                compare_kernel<<<256, 256, 0, t->c->stream>>>((const uint32_t *) y, (const uint32_t *) t->whole + at, cut->rows, cut->cols, t->cols,
                        t->verdict);
        else
                compare_kernel<<<256, 256, 0, t->c->stream>>>((const uint16_t *) y, (const uint16_t *) t->whole + at, cut->rows, cut->cols, t->cols,
                        t->verdict);
        return cuda_result(cudaGetLastError());
}

/* The verdict has how far the whole is from what the own kernel gives. */
static int trial_distance(const Trial *t) {
        const MmaProduct product = { TEST_ROWS, t->x, t->k, dense_matrix(t->w, t->type, t->cols, t->k), NULL, t->columns, t->y, t->y_type,
                t->cols };
        int r = product_mma(t->c->stream, &product);

        if (r < 0)
                return r;
        distance_kernel<<<128, 256, 0, t->c->stream>>>(t->whole, t->y, t->y_type, TEST_ROWS * t->cols, t->verdict);
        return cuda_result(cudaGetLastError());
}

static int verdict_clear(const Trial *t) {
        return cuda_result(cudaMemsetAsync(t->verdict, 0, sizeof(*t->verdict), t->c->stream));
}

/* 1: every part has the bits of the whole. */
static int verdict_read(const Trial *t, Verdict *ret) {
        int r = to_host(t->c, ret, t->verdict, sizeof(*ret));

        return r < 0 ? r : ret->differ == 0;
}

/* Every cut by the large pin; the small one beside it. 0: not to be used. */
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
        Verdict v;
        int r;

        r = verdict_clear(t);
        if (r >= 0)
                r = trial_run(t, &pin->large, &whole, t->whole);
        if (r >= 0)
                r = trial_distance(t);
        for (size_t i = 0; r >= 0 && i < sizeof(cuts) / sizeof(*cuts); i++)
                r = trial_cut(t, &pin->large, cuts + i);
        if (r >= 0)
                r = verdict_read(t, &v);
        if (r > 0)
                r = sqrt(v.distance) <= TEST_ERROR * sqrt(v.length);
        if (r <= 0)
                return r == -EOPNOTSUPP ? 0 : r;

        if (pin->few) {
                r = verdict_clear(t);
                if (r >= 0)
                        r = trial_cut(t, &pin->small, &whole);
                for (size_t i = 0; r >= 0 && i < 3; i++)
                        r = trial_cut(t, &pin->small, cuts + i);
                if (r >= 0)
                        r = verdict_read(t, &v);
                pin->few = r > 0;
        }
        return r < 0 && r != -EOPNOTSUPP ? r : 1;
}

/* Numbers about as large as sums; y is not in use yet. */
static int trial_bias(Trial *t) {
        const LkMatrix w = dense_matrix(t->w, t->type, t->cols, t->k);
        const LkVector bias = { t->y, t->type, t->cols };
        int r = fill(t->c, t->y, t->cols, 3, t->type);

        return r < 0 ? r : expand_columns(t->c->product, t->c->stream, &w, &bias, false, true, &t->columns);
}

/* What the library is asked for; bias: any device memory. */
static LtProduct reference(const Layer *l, bool few, const void *bias) {
        const uint64_t wide = l->rows > l->k ? l->rows : l->k;
        const LtProduct p = { few ? REFERENCE_FEW : at_most(REFERENCE_ROWS, LAUNCH_MAX / wide / 128 * 128), l->rows, l->k,
                l->y_type == LK_F16 ? LK_F16 : LK_BF16, NULL, l->k, NULL, NULL, l->y_type, l->rows, l->biased ? bias : NULL };

        return p;
}

/* Asks and tries; pin->own says what came of it. */
static int pin_find(LkContext *c, const Layer *l, LayerPin *pin) {
        CudaProduct *p = c->product;
        Scratch s = scratch_begin(p);
        Trial t = {};
        const uint64_t k = l->k, rows = l->rows;
        const LtProduct whole = reference(l, false, p->scratch), small = reference(l, true, p->scratch);
        const LkType y_type = l->y_type, type = whole.type;
        uint64_t size;
        int r;

        pin->own = true;
        r = lt_ask(p->lt, &whole, &pin->large);
        if (r < 0)
                return r == -EOPNOTSUPP ? 0 : r;
        pin->few = lt_ask(p->lt, &small, &pin->small) >= 0 && memcmp(&pin->small, &pin->large, sizeof(pin->large)) != 0;

        t.c = c;
        t.k = k;
        t.type = type;
        t.y_type = y_type;
        t.cols = at_most(at_most(rows, TEST_COLUMNS), s.left / 2 / (k * 2)) / 8 * 8;
        size = TEST_ROWS * t.cols * lk_type_size(y_type);
        t.x = (uint8_t *) scratch_take(&s, TEST_ROWS * k * 2);
        t.w = (uint8_t *) scratch_take(&s, t.cols * k * 2);
        t.whole = (uint8_t *) scratch_take(&s, size);
        t.y = (uint8_t *) scratch_take(&s, size + 16);
        t.verdict = (Verdict *) scratch_take(&s, sizeof(*t.verdict));
        if (t.cols < 16 || !t.x || !t.w || !t.whole || !t.y || !t.verdict)
                return 0;
        r = cuda_result(cudaMemsetAsync(t.whole, 0xff, size, c->stream)); /* numbers that are none, where nobody writes */
        if (r >= 0)
                r = cuda_result(cudaMemsetAsync(t.y, 0xff, size + 16, c->stream));
        if (r >= 0)
                r = fill(c, t.x, TEST_ROWS * k, 1, type);
        if (r >= 0)
                r = fill(c, t.w, t.cols * k, 2, type);
        if (r >= 0 && l->biased)
                r = trial_bias(&t);
        if (r >= 0)
                r = trial_pins(&t, pin);
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
        r = pin_find(c, l, &l->pin);
        if (r < 0) {
                free(l);
                return r;
        }
        l->next = layers;
        layers = l;
        *ret = l;
        return 0;
}

/* Whether the library takes what another process found for what it was found for. */
static bool is_taken(CudaLt *lt, const Layer *l, const void *bias) {
        const LtProduct whole = reference(l, false, bias), small = reference(l, true, bias);

        return l->pin.own || (lt_takes(lt, &l->pin.large, &whole) && (!l->pin.few || lt_takes(lt, &l->pin.small, &small)));
}

/* Under the lock: what another process found, else a trial. */
static int layer_told(LkContext *c, Layer *l, bool *ret_known) {
        LayerPin found = {};
        int r = 0;

        *ret_known = is_taken(c->product->lt, l, c->product->scratch);
        if (!*ret_known) {
                r = pin_find(c, l, &found);
                if (r >= 0)
                        l->pin = found;
        }
        l->is_told = r < 0;
        return r;
}

void (*lk_cuda_on_layer)(bool known, uint64_t usec);

static uint64_t usec_now(void) {
        struct timespec t;

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t) t.tv_sec * 1000000 + (uint64_t) t.tv_nsec / 1000;
}

/* Under the lock. l: NULL, or it was told and the library was not asked yet. */
static int layer_first(LkContext *c, uint64_t k, uint64_t rows, LkType y_type, bool biased, Layer *l, const Layer **ret) {
        uint64_t begin = usec_now();
        bool known = false;
        int r;

        r = l ? layer_told(c, l, &known) : layer_new(c, k, rows, y_type, biased, ret);
        if (l)
                *ret = l;
        if (r >= 0 && lk_cuda_on_layer)
                lk_cuda_on_layer(known, usec_now() - begin);
        return r;
}

void layers_check(CudaLt *lt, int arch, const void *bias) {
        (void) pthread_mutex_lock(&lock);
        for (Layer *l = layers; l; l = l->next) { /* new ones come before the first */
                uint64_t begin = usec_now();

                if (l->arch != arch || !l->is_told || !is_taken(lt, l, bias))
                        continue;
                l->is_told = false;
                if (lk_cuda_on_layer)
                        lk_cuda_on_layer(true, usec_now() - begin);
                (void) pthread_mutex_unlock(&lock); /* a first use waits for the one that is being asked about, not for all */
                (void) sched_yield();
                (void) pthread_mutex_lock(&lock);
        }
        (void) pthread_mutex_unlock(&lock);
}

/* Under the lock. */
static Layer *layer_find(int arch, uint64_t k, uint64_t rows, LkType y_type, bool biased) {
        Layer *l;

        for (l = layers; l; l = l->next)
                if (l->arch == arch && l->k == k && l->rows == rows && l->y_type == y_type && l->biased == biased)
                        break;
        return l;
}

static_assert(sizeof(LtPin) == LK_CUDA_PIN_WORDS * sizeof(uint32_t), "a pin's numbers");

unsigned lk_cuda_pins(int arch, LkCudaPin *ret, unsigned max) {
        unsigned n = 0;

        (void) pthread_mutex_lock(&lock);
        for (const Layer *l = layers; l && n < max; l = l->next)
                if (l->arch == arch) {
                        LkCudaPin *p = ret + n++;

                        *p = (LkCudaPin) {};
                        p->k = l->k;
                        p->rows = l->rows;
                        p->type = l->y_type;
                        p->biased = l->biased;
                        p->own = l->pin.own;
                        p->few = l->pin.few;
                        memcpy(p->large, &l->pin.large, sizeof(p->large));
                        memcpy(p->small, &l->pin.small, sizeof(p->small));
                }
        (void) pthread_mutex_unlock(&lock);
        return n;
}

/* NULL: nothing. */
static const char *wrong_with(const LkCudaPin *p) {
        LtPin large, small;

        memcpy(&large, p->large, sizeof(large));
        memcpy(&small, p->small, sizeof(small));
        if (p->type != LK_F32 && p->type != LK_BF16 && p->type != LK_F16)
                return "its type is none of f32, bf16 and f16";
        if (p->k == 0 || p->rows == 0 || p->k % 8 != 0 || p->rows % 8 != 0 || p->k > LAUNCH_MAX || p->rows > LAUNCH_MAX)
                return "a layer of this size is none of the library's";
        if (p->biased > 1 || p->own > 1 || p->few > 1 || (p->biased && p->type != LK_F16))
                return "a yes or no of it is neither";
        if (!p->own && (!lt_is_one_chain(&large) || (p->few && !lt_is_one_chain(&small))))
                return "it splits sums, so that parts would have other bits than the whole";
        return NULL;
}

/* Under the lock. False: out of memory. */
static bool layer_tell(int arch, const LkCudaPin *p) {
        Layer *l = layer_find(arch, p->k, p->rows, (LkType) p->type, p->biased);

        if (l) /* found here, or told twice */
                return true;
        l = (Layer *) calloc(1, sizeof(*l));
        if (!l)
                return false;
        l->arch = arch;
        l->k = p->k;
        l->rows = p->rows;
        l->y_type = (LkType) p->type;
        l->biased = p->biased;
        l->is_told = true;
        l->pin.own = p->own;
        l->pin.few = p->few;
        memcpy(&l->pin.large, p->large, sizeof(p->large));
        memcpy(&l->pin.small, p->small, sizeof(p->small));
        l->next = layers;
        layers = l;
        return true;
}

/* From the last on: the list has them in their order then. */
unsigned lk_cuda_pins_take(int arch, const LkCudaPin *pins, unsigned n, char *why, size_t why_size) {
        unsigned taken = 0;

        if (why_size > 0)
                why[0] = '\0';
        (void) pthread_mutex_lock(&lock);
        for (unsigned i = n; i-- > 0;) {
                const char *wrong = wrong_with(pins + i);

                if (!wrong && !layer_tell(arch, pins + i))
                        wrong = "there is no memory for it";
                taken += !wrong;
                if (wrong)
                        (void) snprintf(why, why_size, "the layer of %" PRIu64 " x %" PRIu64 ": %s", pins[i].rows, pins[i].k, wrong);
        }
        (void) pthread_mutex_unlock(&lock);
        return taken;
}

int layer_pin(LkContext *c, uint64_t k, uint64_t layer_rows, LkType y_type, bool biased, const LayerPin **ret) {
        static const LayerPin own = { true, false, {}, {} };
        const CudaProduct *p = c->product;
        const Layer *l;
        Layer *known;
        int r = 0;

        if (!p->lt || p->own_only || k % 8 != 0 || layer_rows % 8 != 0) {
                *ret = &own;
                return 0;
        }
        (void) pthread_mutex_lock(&lock);
        l = known = layer_find(c->arch, k, layer_rows, y_type, biased);
        if (!known || known->is_told)
                r = layer_first(c, k, layer_rows, y_type, biased, known, &l);
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
        if (k && k->i8 == 0)
                k->i8 = try_i8(c) > 0 ? 1 : -1;
        good = k && k->i8 > 0;
        if (!good)
                p->refused = "cublasLt's int8 sums are not those of the own kernel";
        (void) pthread_mutex_unlock(&lock);
        return good;
}

#ifdef LK_CUDA_SM90
/* Rows of a product by Hopper's kernel, in one launch as two of some columns each. */
static int hopper_rows(LkContext *c, const MmaProduct *whole, uint64_t begin, uint64_t m) {
        const uint64_t first = 1000, n = whole->w.rows;
        MmaProduct parts[2] = { *whole, *whole };

        for (uint32_t i = 0; i < 2; i++) {
                const uint64_t at = i * first;

                parts[i].m = m;
                parts[i].x = (const uint8_t *) whole->x + begin * whole->x_ld;
                parts[i].x_scale += begin;
                parts[i].w = lk_matrix_rows(&whole->w, at, i == 0 ? first : n - first);
                parts[i].columns.scale += at;
                parts[i].columns.bias += at;
                parts[i].y = (uint16_t *) whole->y + begin * whole->y_ld + at;
        }
        return product_i8_sm90(c, parts, 2);
}

/* An int8 product by Hopper's kernel and by that of every card, with more tiles than processors, none of them whole at the ends, and with tiles
 * that are cut in four and in two (of 132 processors): the same bytes. */
static int try_hopper_i8(LkContext *c) {
        const uint64_t m = 2309, n = 2072, k = 1040, most = 2052;
        Scratch s = scratch_begin(c->product);
        uint8_t *x = (uint8_t *) scratch_take(&s, m * k), *w = (uint8_t *) scratch_take(&s, n * k);
        uint16_t *y = (uint16_t *) scratch_take(&s, m * n * 2), *right = (uint16_t *) scratch_take(&s, m * n * 2);
        float *x_scale = (float *) scratch_take(&s, m * 4), *scale = (float *) scratch_take(&s, n * 4), *bias = (float *) scratch_take(&s, n * 4);
        Verdict *verdict = (Verdict *) scratch_take(&s, sizeof(*verdict)), seen;
        MmaProduct product = { m, x, k, dense_matrix(w, LK_I8, n, k), x_scale, { scale, bias }, y, LK_BF16, n };
        int r;

        if (!verdict)
                return -ENOMEM;
        r = fill(c, x, m * k, 3, LK_I8);
        if (r >= 0)
                r = fill(c, w, n * k, 4, LK_I8);
        if (r >= 0)
                r = fill(c, x_scale, m, 5, LK_F32);
        if (r >= 0)
                r = fill(c, scale, n, 6, LK_F32);
        if (r >= 0)
                r = fill(c, bias, n, 7, LK_F32);
        if (r >= 0)
                r = cuda_result(cudaMemsetAsync(y, 0xff, m * n * 2, c->stream)); /* numbers that are none, where nobody writes */
        if (r >= 0)
                r = cuda_result(cudaMemsetAsync(verdict, 0, sizeof(*verdict), c->stream));
        if (r >= 0)
                r = hopper_rows(c, &product, 0, most);
        if (r >= 0)
                r = hopper_rows(c, &product, most, m - most);
        product.y = right;
        if (r >= 0)
                r = product_mma(c->stream, &product);
        if (r < 0)
                return r;
        compare_kernel<<<256, 256, 0, c->stream>>>(y, right, m, n, n, verdict);
        r = cuda_result(cudaGetLastError());
        if (r >= 0)
                r = to_host(c, &seen, verdict, sizeof(seen));
        return r < 0 ? r : seen.differ == 0;
}

bool hopper_i8(LkContext *c) {
        CudaProduct *p = c->product;
        Class *k;
        bool good;

        if (c->arch != 90 || p->own_only || p->i8_sums)
                return false;
        (void) pthread_mutex_lock(&lock);
        k = class_of(c->arch);
        if (k && k->hopper_i8 == 0)
                k->hopper_i8 = try_hopper_i8(c) > 0 ? 1 : -1;
        good = k && k->hopper_i8 > 0;
        if (!good)
                p->refused = "Hopper's int8 products have not the bits of the portable kernel";
        (void) pthread_mutex_unlock(&lock);
        return good;
}
#endif

bool hopper_attention_i8(LkContext *c) {
        Class *k;
        bool good;

        (void) pthread_mutex_lock(&lock);
        k = class_of(c->arch);
        if (k && k->attention_i8 == 0)
                k->attention_i8 = attention_i8_try(c) > 0 ? 1 : -1;
        good = k && k->attention_i8 > 0;
        if (!good)
                c->product->refused = "Hopper's attention over int8 has not the bits of the portable kernel";
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
                p->i8_rows = I8_ROWS;
                p->scratch_size = memory >= SCRATCH_LARGE_FROM ? SCRATCH_LARGE : SCRATCH_SMALL;
                r = cuda_result(cudaMalloc((void **) &p->scratch, p->scratch_size));
        }
        if (r >= 0) /* a library writes it by copies that compute-sanitizer does not see */
                r = cuda_result(cudaMemsetAsync(p->scratch, 0, p->scratch_size, c->stream));
        if (r >= 0) {
                r = lt_new(&p->lt);
                if (r < 0 && r != -ENOMEM && r != -ELIBACC) { /* the library does not know the device */
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
        c->product->i8_sums = i8_rows > 0;
        c->product->i8_rows = i8_rows > 0 ? i8_rows : I8_ROWS;
}

/* Has Hopper's kernel, and nothing against it. */
static bool is_hopper_i8(int arch) {
        const Class *k;
        bool bad;

        (void) pthread_mutex_lock(&lock);
        for (k = classes; k; k = k->next)
                if (k->arch == arch)
                        break;
        bad = k && k->hopper_i8 < 0;
        (void) pthread_mutex_unlock(&lock);
        return HOPPER_KERNELS && arch == 90 && !bad;
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
                "linears, int8: %s%s, int32 sums, own last pass\n"
                "linears, others: own fma, the CPU's bits\n"
                "attention, bf16, head 128, and f16, head 64: %s\n"
                "attention, others: own mma.sync; f32 the CPU's bits\n"
                "attention, sparse: own mma.sync, heads up to 128; others the CPU's bits\n"
                "refused by the self-test: %s\n",
                c->arch, library, all, own, is_hopper_i8(c->arch) ? "own wgmma; others " : "", library, HOPPER_KERNELS && c->arch == 90 ? "own wgmma" : "own mma.sync", p->refused ? p->refused : "nothing");
}

extern "C" int lk_cuda_numerics_id(LkContext *c, char *ret, size_t size) {
        const CudaProduct *p = c->product;

        return snprintf(ret, size, "cuda-%d-sm%d-lt%zu", LK_CUDA_KERNELS, c->arch, p->lt ? lt_version() : 0);
}
