/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/dnn.h"

#include <errno.h>
#include <stdlib.h>

#if LK_CUDNN

#include <dlfcn.h>
#include <string.h>

#include <cudnn.h>

#include "service/shared/cleanup.h"

#define DIM 128
#define QUERIES_MIN 64u  /* fewer may get another kernel, or none */
#define REFERENCE_HEADS 56 /* what the engine is asked for: never a job's own shape */
#define REFERENCE_ROWS 73728
#define KNOBS_MAX 32
#define PARTS_MAX (16 + KNOBS_MAX)
#define PLANS 32u
#define WORKSPACE (INT64_C(1) << 20)

#define FUNCTIONS(F)                                                                                                                 \
        F(cudnnBackendCreateDescriptor)                                                                                              \
        F(cudnnBackendDestroyDescriptor)                                                                                             \
        F(cudnnBackendExecute)                                                                                                       \
        F(cudnnBackendFinalize)                                                                                                      \
        F(cudnnBackendGetAttribute)                                                                                                  \
        F(cudnnBackendSetAttribute)                                                                                                  \
        F(cudnnCreate)                                                                                                               \
        F(cudnnDestroy)                                                                                                              \
        F(cudnnGetVersion)                                                                                                           \
        F(cudnnSetStream)

/* What decides an engine's kernel. */
typedef struct Pin {
        int64_t engine, values[KNOBS_MAX], knobs;
        cudnnBackendKnobType_t types[KNOBS_MAX];
} Pin;

typedef struct Shape {
        uint64_t heads, n_q, n_k, q_ld, k_ld, v_ld, o_ld;
} Shape;

/* Descriptors live as long as what was made of them. */
typedef struct Parts {
        cudnnBackendDescriptor_t all[PARTS_MAX];
        uint32_t n;
} Parts;

typedef struct Plan {
        Shape shape;
        Parts parts;
        cudnnBackendDescriptor_t plan;
        bool refused;
        uint64_t used; /* when last */
} Plan;

#define MEMBER(name) __typeof__(name) *name;
struct CudaDnn {
        void *library;
        FUNCTIONS(MEMBER)
        cudnnHandle_t handle;
        void *workspace;
        bool pinned;
        Pin pin;
        Plan plans[PLANS];
        uint64_t clock;
};

static int dnn_result(cudnnStatus_t s) {
        if (s == CUDNN_STATUS_SUCCESS)
                return 0;
        if (s / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000)
                return -EOPNOTSUPP;
        if (s / 1000 == CUDNN_STATUS_BAD_PARAM / 1000)
                return -EINVAL;
        return s == CUDNN_STATUS_ALLOC_FAILED ? -ENOMEM : -EIO;
}

static void parts_done(const CudaDnn *d, Parts *p) {
        while (p->n > 0)
                (void) d->cudnnBackendDestroyDescriptor(p->all[--p->n]);
}

/* NULL: no more, or out of memory. Belongs to `p`. */
static cudnnBackendDescriptor_t part_new(const CudaDnn *d, Parts *p, cudnnBackendDescriptorType_t type) {
        if (p->n >= PARTS_MAX || d->cudnnBackendCreateDescriptor(type, p->all + p->n) != CUDNN_STATUS_SUCCESS)
                return NULL;
        return p->all[p->n++];
}

/* Attributes of a descriptor one after the other; the first error stays. */
typedef struct Maker {
        const CudaDnn *d;
        cudnnBackendDescriptor_t it;
        int r;
} Maker;

static Maker maker(const CudaDnn *d, Parts *p, cudnnBackendDescriptorType_t type) {
        Maker m = {.d = d, .it = part_new(d, p, type)};

        m.r = m.it ? 0 : -ENOMEM;
        return m;
}

static void set(Maker *m, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n, const void *value) {
        if (m->r >= 0)
                m->r = dnn_result(m->d->cudnnBackendSetAttribute(m->it, name, type, n, value));
}

static int finish(Maker *m, cudnnBackendDescriptor_t *ret) {
        if (m->r >= 0)
                m->r = dnn_result(m->d->cudnnBackendFinalize(m->it));
        if (m->r >= 0)
                *ret = m->it;
        return m->r;
}

static int tensor(const CudaDnn *d, Parts *p, int64_t id, uint64_t heads, uint64_t rows, uint64_t ld, cudnnBackendDescriptor_t *ret) {
        const int64_t dims[] = {1, (int64_t) heads, (int64_t) rows, DIM}, align = 16;
        const int64_t strides[] = {(int64_t) (rows * ld), DIM, (int64_t) ld, 1};
        const cudnnDataType_t type = CUDNN_DATA_BFLOAT16;
        Maker m = maker(d, p, CUDNN_BACKEND_TENSOR_DESCRIPTOR);

        set(&m, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(&m, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
        set(&m, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
        set(&m, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
        set(&m, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
        return finish(&m, ret);
}

/* A number that the host gives with the launch. */
static int number(const CudaDnn *d, Parts *p, int64_t id, cudnnBackendDescriptor_t *ret) {
        const int64_t ones[] = {1, 1, 1, 1}, align = 4;
        const cudnnDataType_t type = CUDNN_DATA_FLOAT;
        const bool by_value = true;
        Maker m = maker(d, p, CUDNN_BACKEND_TENSOR_DESCRIPTOR);

        set(&m, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(&m, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, ones);
        set(&m, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, ones);
        set(&m, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
        set(&m, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
        set(&m, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
        return finish(&m, ret);
}

static int graph_new(const CudaDnn *d, Parts *p, const Shape *s, cudnnBackendDescriptor_t *ret) {
        cudnnBackendDescriptor_t q, k, v, o, scale, op;
        Maker m;
        int r;

        r = tensor(d, p, 1, s->heads, s->n_q, s->q_ld, &q);
        if (r >= 0)
                r = tensor(d, p, 2, s->heads, s->n_k, s->k_ld, &k);
        if (r >= 0)
                r = tensor(d, p, 3, s->heads, s->n_k, s->v_ld, &v);
        if (r >= 0)
                r = tensor(d, p, 4, s->heads, s->n_q, s->o_ld, &o);
        if (r >= 0)
                r = number(d, p, 5, &scale);
        if (r < 0)
                return r;

        m = maker(d, p, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
        set(&m, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &q);
        set(&m, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &k);
        set(&m, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &v);
        set(&m, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &o);
        set(&m, CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &scale);
        r = finish(&m, &op);
        if (r < 0)
                return r;

        m = maker(d, p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        set(&m, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &op);
        set(&m, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &d->handle);
        return finish(&m, ret);
}

static int get(const CudaDnn *d, cudnnBackendDescriptor_t from, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
        int64_t max, int64_t *ret_n, void *ret) {
        return dnn_result(d->cudnnBackendGetAttribute(from, name, type, max, ret_n, ret));
}

static int pin_read(const CudaDnn *d, Parts *p, cudnnBackendDescriptor_t config, Pin *ret) {
        cudnnBackendDescriptor_t engine = part_new(d, p, CUDNN_BACKEND_ENGINE_DESCRIPTOR), choices[KNOBS_MAX];
        Pin pin = {0};
        int64_t n;
        int r;

        if (!engine)
                return -ENOMEM;
        r = get(d, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine);
        if (r >= 0)
                r = get(d, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &n, &pin.engine);
        for (int i = 0; r >= 0 && i < KNOBS_MAX; i++) {
                choices[i] = part_new(d, p, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
                r = choices[i] ? 0 : -ENOMEM;
        }
        if (r >= 0)
                r = get(d, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, KNOBS_MAX, &pin.knobs, choices);
        for (int i = 0; r >= 0 && i < pin.knobs; i++) {
                r = get(d, choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &n, pin.types + i);
                if (r >= 0)
                        r = get(d, choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &n, pin.values + i);
        }
        if (r >= 0)
                *ret = pin;
        return r;
}

/* The library's first choice for the reference. */
static int ask(const CudaDnn *d, Pin *ret) {
        const uint64_t width = REFERENCE_HEADS * DIM;
        const Shape reference = {REFERENCE_HEADS, REFERENCE_ROWS, REFERENCE_ROWS, width, width, width, width};
        const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
        cudnnBackendDescriptor_t graph, heuristics, config;
        Parts graph_parts = {0}, parts = {0};
        int64_t n = 0;
        Maker m;
        int r;

        r = graph_new(d, &graph_parts, &reference, &graph);
        if (r >= 0) {
                m = maker(d, &graph_parts, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
                set(&m, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
                set(&m, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
                r = finish(&m, &heuristics);
        }
        if (r >= 0) {
                config = part_new(d, &graph_parts, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
                r = config ? get(d, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &config) : -ENOMEM;
        }
        if (r >= 0)
                r = n == 1 ? pin_read(d, &parts, config, ret) : -EOPNOTSUPP;
        parts_done(d, &parts);
        parts_done(d, &graph_parts);
        return r;
}

/* The pinned engine for a graph. */
static int config_new(const CudaDnn *d, Parts *p, cudnnBackendDescriptor_t graph, cudnnBackendDescriptor_t *ret) {
        cudnnBackendDescriptor_t engine, choices[KNOBS_MAX];
        Maker m = maker(d, p, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
        const Pin *pin = &d->pin;
        int r;

        set(&m, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
        set(&m, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &pin->engine);
        r = finish(&m, &engine);
        for (int i = 0; r >= 0 && i < pin->knobs; i++) {
                m = maker(d, p, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
                set(&m, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, pin->types + i);
                set(&m, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, pin->values + i);
                r = finish(&m, choices + i);
        }
        if (r < 0)
                return r;
        m = maker(d, p, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        set(&m, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
        set(&m, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, pin->knobs, choices);
        return finish(&m, ret);
}

static int plan_init(const CudaDnn *d, Plan *p) {
        cudnnBackendDescriptor_t graph, config, plan;
        int64_t n, space = 0;
        Maker m;
        int r;

        r = graph_new(d, &p->parts, &p->shape, &graph);
        if (r >= 0)
                r = config_new(d, &p->parts, graph, &config);
        if (r < 0)
                return r;
        m = maker(d, &p->parts, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(&m, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &d->handle);
        set(&m, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
        r = finish(&m, &plan);
        if (r >= 0)
                r = get(d, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n, &space);
        if (r >= 0 && space > WORKSPACE)
                r = -EOPNOTSUPP;
        if (r >= 0)
                p->plan = plan;
        return r;
}

/* The plan of a shape, made once. A refusal is remembered too. */
static int plan_find(CudaDnn *d, cudaStream_t stream, const Shape *s, const Plan **ret) {
        Plan *oldest = d->plans;
        int r;

        for (Plan *p = d->plans; p < d->plans + PLANS; p++) {
                if (p->used > 0 && memcmp(&p->shape, s, sizeof(*s)) == 0) {
                        p->used = ++d->clock;
                        *ret = p;
                        return p->refused ? -EOPNOTSUPP : 0;
                }
                if (p->used < oldest->used)
                        oldest = p;
        }

        if (oldest->used > 0 && cudaStreamSynchronize(stream) != cudaSuccess)
                return -EIO;
        parts_done(d, &oldest->parts);
        *oldest = (Plan){.shape = *s};
        r = plan_init(d, oldest);
        if (r < 0 && r != -EOPNOTSUPP && r != -EINVAL) {
                parts_done(d, &oldest->parts);
                *oldest = (Plan){0};
                return r;
        }
        oldest->used = ++d->clock;
        oldest->refused = r < 0;
        *ret = oldest;
        return oldest->refused ? -EOPNOTSUPP : 0;
}

static int execute(CudaDnn *d, const Plan *plan, const LkAttention *a) {
        static const int64_t ids[] = {1, 2, 3, 4, 5};
        float scale = a->scale;
        const void *pointers[] = {a->q, a->k, a->v, a->o, &scale};
        cudnnBackendDescriptor_t pack;
        Parts parts = {0};
        Maker m = maker(d, &parts, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
        int r;

        set(&m, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 5, pointers);
        set(&m, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 5, ids);
        set(&m, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &d->workspace);
        r = finish(&m, &pack);
        if (r >= 0)
                r = dnn_result(d->cudnnBackendExecute(d->handle, plan->plan, pack));
        parts_done(d, &parts);
        return r;
}

static bool aligned(const void *p, uint64_t ld) {
        return ((uintptr_t) p | ld * 2) % 16 == 0;
}

/* Started late: it takes half a second. */
static int start(CudaDnn *d, cudaStream_t stream) {
        int r = 0;

        if (!d->workspace && cudaMalloc(&d->workspace, (size_t) WORKSPACE) != cudaSuccess) {
                (void) cudaGetLastError();
                return -ENOMEM;
        }
        if (!d->handle)
                r = dnn_result(d->cudnnCreate(&d->handle));
        if (r >= 0)
                r = dnn_result(d->cudnnSetStream(d->handle, stream));
        if (r >= 0 && !d->pinned) {
                r = ask(d, &d->pin);
                d->pinned = r >= 0;
        }
        return r;
}

int dnn_attention(CudaDnn *d, cudaStream_t stream, const LkAttention *a) {
        const Shape shape = {a->heads, a->n_q, a->n_k, a->q_ld, a->k_ld, a->v_ld, a->o_ld};
        const Plan *plan;
        int r;

        if (a->type != LK_BF16 || a->head_dim != DIM || a->causal || (a->kv_heads != 0 && a->kv_heads != a->heads) ||
                a->n_q < QUERIES_MIN || a->n_k < QUERIES_MIN || !aligned(a->q, a->q_ld) || !aligned(a->k, a->k_ld) ||
                !aligned(a->v, a->v_ld) || !aligned(a->o, a->o_ld))
                return -EOPNOTSUPP;

        r = start(d, stream);
        if (r >= 0)
                r = plan_find(d, stream, &shape, &plan);
        return r < 0 ? r : execute(d, plan, a);
}

static bool resolve(CudaDnn *d) {
#define RESOLVE(name)                                                                                                                \
        d->name = (__typeof__(d->name)) (uintptr_t) dlsym(d->library, #name);                                                        \
        if (!d->name)                                                                                                                \
                return false;
        FUNCTIONS(RESOLVE)
        return true;
}

int dnn_new(CudaDnn **ret) {
        CudaDnn *d = calloc(1, sizeof(*d));

        if (!d)
                return -ENOMEM;
        d->library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
        if (!d->library || !resolve(d)) {
                dnn_free(d);
                return -EOPNOTSUPP;
        }
        *ret = d;
        return 0;
}

/* The library stays loaded: it has threads and device code of its own. */
CudaDnn *dnn_free(CudaDnn *d) {
        if (!d)
                return NULL;
        for (Plan *p = d->plans; p < d->plans + PLANS; p++)
                parts_done(d, &p->parts);
        if (d->handle)
                (void) d->cudnnDestroy(d->handle);
        if (cudaFree(d->workspace) != cudaSuccess)
                (void) cudaGetLastError();
        free(d);
        return NULL;
}

size_t dnn_version(const CudaDnn *d) {
        return d->cudnnGetVersion();
}

bool dnn_engine(const CudaDnn *d, int64_t *ret) {
        if (d->pinned)
                *ret = d->pin.engine;
        return d->pinned;
}

#else

int dnn_new(CudaDnn **ret) {
        return -EOPNOTSUPP;
}

CudaDnn *dnn_free(CudaDnn *d) {
        return NULL;
}

size_t dnn_version(const CudaDnn *d) {
        return 0;
}

int dnn_attention(CudaDnn *d, cudaStream_t stream, const LkAttention *a) {
        return -EOPNOTSUPP;
}

bool dnn_engine(const CudaDnn *d, int64_t *ret) {
        return false;
}

#endif
