/* SPDX-License-Identifier: Apache-2.0 */
/* The library counts columns first, so w is its A and x its B. */

#include "kernels/cuda/lt.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/lt-library.h"
#include "service/shared/cleanup.h"

/* Always given: the fast int8 kernels want a few bytes, and a query without any gets an older family at 0.66 to 0.82 of their rate. */
#define WORKSPACE (UINT64_C(1) << 20)
#define PROPOSALS 64
#define SHAPES 64u /* of int8 launches whose algorithm is remembered */

typedef struct Shape {
        uint64_t m, n, k, x_ld, y_ld;
} Shape;

static const LtLibrary *const lib = &lt_functions; /* while there is a CudaLt they are loaded */

struct CudaLt {
        cublasLtHandle_t handle;
        void *workspace;
        Shape shapes[SHAPES];
        cublasLtMatmulAlgo_t algos[SHAPES];
        uint32_t known;
};

typedef struct Problem {
        bool integer;
        cublasLtMatmulDesc_t op;
        cublasLtMatrixLayout_t w, x, y;
} Problem;

static int lt_result(cublasStatus_t s) {
        switch (s) {
        case CUBLAS_STATUS_SUCCESS:
                return 0;
        case CUBLAS_STATUS_ALLOC_FAILED:
                return -ENOMEM;
        case CUBLAS_STATUS_INVALID_VALUE:
                return -EINVAL;
        case CUBLAS_STATUS_NOT_SUPPORTED:
        case CUBLAS_STATUS_ARCH_MISMATCH:
                return -EOPNOTSUPP;
        case CUBLAS_STATUS_NOT_INITIALIZED:
                return -ENODEV;
        default:
                return -EIO;
        }
}

static void problem_done(Problem *p) {
        if (p->w)
                (void) lib->cublasLtMatrixLayoutDestroy(p->w);
        if (p->x)
                (void) lib->cublasLtMatrixLayoutDestroy(p->x);
        if (p->y)
                (void) lib->cublasLtMatrixLayoutDestroy(p->y);
        if (p->op)
                (void) lib->cublasLtMatmulDescDestroy(p->op);
}

static cudaDataType_t y_type_of(const Problem *p, LkType t) {
        return p->integer ? CUDA_R_32I : t == LK_F32 ? CUDA_R_32F : t == LK_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static cudaDataType_t x_type_of(bool integer, LkType t) {
        return integer ? CUDA_R_8I : t == LK_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static cublasStatus_t set_bias(cublasLtMatmulDesc_t op, const void *bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cublasStatus_t s = lib->cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));

        if (s != CUBLAS_STATUS_SUCCESS)
                return s;
        return lib->cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
}

static int problem_init(Problem *p, bool integer, const LtProduct *a) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        cublasStatus_t s;

        *p = (Problem){.integer = integer};
        s = lib->cublasLtMatmulDescCreate(&p->op, integer ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F, integer ? CUDA_R_32I : CUDA_R_32F);
        if (s == CUBLAS_STATUS_SUCCESS)
                s = lib->cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed));
        if (s == CUBLAS_STATUS_SUCCESS && a->bias)
                s = set_bias(p->op, a->bias);
        if (s == CUBLAS_STATUS_SUCCESS)
                s = lib->cublasLtMatrixLayoutCreate(&p->w, x_type_of(integer, a->type), a->k, a->n, (int64_t) a->k);
        if (s == CUBLAS_STATUS_SUCCESS)
                s = lib->cublasLtMatrixLayoutCreate(&p->x, x_type_of(integer, a->type), a->k, a->m, (int64_t) a->x_ld);
        if (s == CUBLAS_STATUS_SUCCESS)
                s = lib->cublasLtMatrixLayoutCreate(&p->y, y_type_of(p, a->y_type), a->n, a->m, (int64_t) a->y_ld);
        return lt_result(s);
}

/* Up to `max` proposals, the library's best first; their number. */
static int propose(const CudaLt *lt, const Problem *p, int max, cublasLtMatmulHeuristicResult_t *ret) {
        const uint64_t space = WORKSPACE;
        cublasLtMatmulPreference_t wish;
        int n = 0;

        if (lib->cublasLtMatmulPreferenceCreate(&wish) != CUBLAS_STATUS_SUCCESS)
                return 0;
        if (lib->cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof(space)) !=
                        CUBLAS_STATUS_SUCCESS ||
                lib->cublasLtMatmulAlgoGetHeuristic(lt->handle, p->op, p->w, p->x, p->y, p->y, wish, max, ret, &n) != CUBLAS_STATUS_SUCCESS)
                n = 0;
        (void) lib->cublasLtMatmulPreferenceDestroy(wish);
        return n;
}

#define FIELD(attribute, member)                                                                                                     \
        { CUBLASLT_ALGO_CONFIG_##attribute, offsetof(LtPin, member), sizeof(((LtPin *) 0)->member) }
static const struct {
        cublasLtMatmulAlgoConfigAttributes_t attribute;
        size_t offset, size;
} fields[] = {
        FIELD(ID, id), /* first: given when an algorithm is begun */
        FIELD(TILE_ID, tile),
        FIELD(STAGES_ID, stages),
        FIELD(SPLITK_NUM, splits),
        FIELD(REDUCTION_SCHEME, scheme),
        FIELD(CTA_SWIZZLING, swizzle),
        FIELD(CUSTOM_OPTION, custom),
        FIELD(INNER_SHAPE_ID, inner),
        FIELD(CLUSTER_SHAPE_ID, cluster),
};
#define FIELDS (sizeof(fields) / sizeof(*fields))

static bool pin_read(const cublasLtMatmulAlgo_t *a, LtPin *ret) {
        LtPin p = {0};
        size_t written;

        for (size_t i = 0; i < FIELDS; i++)
                if (lib->cublasLtMatmulAlgoConfigGetAttribute(
                            a, fields[i].attribute, (uint8_t *) &p + fields[i].offset, fields[i].size, &written) != CUBLAS_STATUS_SUCCESS)
                        return false;
        *ret = p;
        return true;
}

static int pin_algo(const CudaLt *lt, const LtPin *p, cudaDataType_t x_type, cudaDataType_t y_type, cublasLtMatmulAlgo_t *ret) {
        cublasStatus_t s = lib->cublasLtMatmulAlgoInit(
                lt->handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, x_type, x_type, y_type, y_type, (int) p->id, ret);

        for (size_t i = 1; i < FIELDS && s == CUBLAS_STATUS_SUCCESS; i++)
                s = lib->cublasLtMatmulAlgoConfigSetAttribute(
                        ret, fields[i].attribute, (const uint8_t *) p + fields[i].offset, fields[i].size);
        return lt_result(s);
}

static int launch(const CudaLt *lt, cudaStream_t stream, const Problem *p, const cublasLtMatmulAlgo_t *algo, const LtProduct *a) {
        static const float f[2] = {1, 0};
        static const int32_t i[2] = {1, 0};
        const void *one = p->integer ? (const void *) i : f, *zero = p->integer ? (const void *) (i + 1) : f + 1;

        return lt_result(lib->cublasLtMatmul(
                lt->handle, p->op, one, a->w, p->w, a->x, p->x, zero, a->y, p->y, a->y, p->y, algo, lt->workspace, WORKSPACE, stream));
}

int lt_new(CudaLt **ret) {
        CudaLt *lt;
        int r;

        r = lt_library_load();
        if (r < 0)
                return r;
        lt = calloc(1, sizeof(*lt));
        if (!lt)
                return -ENOMEM;
        r = lt_result(lib->cublasLtCreate(&lt->handle));
        if (r >= 0 && cudaMalloc(&lt->workspace, WORKSPACE) != cudaSuccess) {
                (void) cudaGetLastError();
                r = -ENOMEM;
        }
        if (r < 0) {
                lt_free(lt);
                return r;
        }
        *ret = lt;
        return 0;
}

CudaLt *lt_free(CudaLt *lt) {
        if (!lt)
                return NULL;
        if (lt->handle)
                (void) lib->cublasLtDestroy(lt->handle);
        if (cudaFree(lt->workspace) != cudaSuccess)
                (void) cudaGetLastError();
        free(lt);
        return NULL;
}

size_t lt_version(void) {
        return lib->cublasLtGetVersion ? lib->cublasLtGetVersion() : 0;
}

bool lt_is_one_chain(const LtPin *pin) {
        return pin->splits == 1 && pin->scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

int lt_ask(CudaLt *lt, const LtProduct *a, LtPin *ret) {
        CLEANUP_FREE cublasLtMatmulHeuristicResult_t *h = calloc(PROPOSALS, sizeof(*h));
        Problem p;
        LtPin pin;
        int r, count;

        if (!h)
                return -ENOMEM;
        r = problem_init(&p, false, a);
        count = r < 0 ? 0 : propose(lt, &p, PROPOSALS, h);
        problem_done(&p);
        if (r < 0)
                return r;

        for (int i = 0; i < count; i++)
                if (h[i].state == CUBLAS_STATUS_SUCCESS && pin_read(&h[i].algo, &pin) && lt_is_one_chain(&pin)) {
                        *ret = pin;
                        return 0;
                }
        return -EOPNOTSUPP;
}

/* The pin as the library wants it for this problem. -EOPNOTSUPP: it does not serve it. */
static int checked_algo(const CudaLt *lt, const Problem *p, const LtPin *pin, const LtProduct *a, cublasLtMatmulAlgo_t *ret) {
        cublasLtMatmulHeuristicResult_t answer = {0};
        int r;

        r = pin_algo(lt, pin, x_type_of(false, a->type), y_type_of(p, a->y_type), ret);
        if (r >= 0 && (lib->cublasLtMatmulAlgoCheck(lt->handle, p->op, p->w, p->x, p->y, p->y, ret, &answer) != CUBLAS_STATUS_SUCCESS ||
                              answer.state != CUBLAS_STATUS_SUCCESS || answer.workspaceSize > WORKSPACE))
                r = -EOPNOTSUPP;
        return r;
}

/* *ret is for problem_done(), whatever is returned. */
static int pinned_problem(const CudaLt *lt, const LtPin *pin, const LtProduct *a, Problem *ret, cublasLtMatmulAlgo_t *ret_algo) {
        int r = problem_init(ret, false, a);

        return r < 0 ? r : checked_algo(lt, ret, pin, a, ret_algo);
}

bool lt_takes(CudaLt *lt, const LtPin *pin, const LtProduct *a) {
        cublasLtMatmulAlgo_t algo;
        Problem p;
        int r = pinned_problem(lt, pin, a, &p, &algo);

        problem_done(&p);
        return r >= 0;
}

int lt_run(CudaLt *lt, cudaStream_t stream, const LtPin *pin, const LtProduct *a) {
        cublasLtMatmulAlgo_t algo;
        Problem p;
        int r = pinned_problem(lt, pin, a, &p, &algo);

        if (r >= 0)
                r = launch(lt, stream, &p, &algo, a);
        problem_done(&p);
        return r;
}

/* The sums are exact, so every launch may have another algorithm; asking takes longer than a small launch, so answers are kept. */
static const cublasLtMatmulAlgo_t *i8_algo(CudaLt *lt, const Problem *p, const LtProduct *a) {
        const Shape shape = {a->m, a->n, a->k, a->x_ld, a->y_ld};
        cublasLtMatmulHeuristicResult_t h;
        uint32_t at = lt->known % SHAPES;

        for (uint32_t i = 0; i < SHAPES && i < lt->known; i++)
                if (memcmp(lt->shapes + i, &shape, sizeof(shape)) == 0)
                        return lt->algos + i;

        if (propose(lt, p, 1, &h) != 1 || h.state != CUBLAS_STATUS_SUCCESS)
                return NULL;
        lt->shapes[at] = shape;
        lt->algos[at] = h.algo;
        lt->known++;
        return lt->algos + at;
}

int lt_run_i8(CudaLt *lt, cudaStream_t stream, const LtProduct *a) {
        const cublasLtMatmulAlgo_t *algo;
        Problem p;
        int r;

        r = problem_init(&p, true, a);
        if (r >= 0) {
                algo = i8_algo(lt, &p, a);
                r = algo ? launch(lt, stream, &p, algo, a) : -EOPNOTSUPP;
        }
        problem_done(&p);
        return r;
}
