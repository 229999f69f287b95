/* SPDX-License-Identifier: Apache-2.0 */
/* Is cublasLt allowed for the linears, and how fast is it? An algorithm is found once for each layer (a
 * query with the layer's whole shape and a small workspace), kept as its nine configuration fields, rebuilt
 * from them for every launch and compared to the bit over cuts of the rows and of the columns. Rates stand
 * beside what the library itself would choose for those rows.
 *
 *     measure-gemm [bf16|fp8|int8|int8-bytes]...
 *
 * int8-bytes is int8 with data of even distribution: only power differs. Output is int32 for int8, else
 * bf16. */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

#include "tests/gpu/device.h"

#define REFERENCE_ROWS UINT64_C(8192)
#define ROWS_MAX UINT64_C(73686)
#define WORKSPACE (UINT64_C(64) << 20) /* where the library may choose */
#define PIN_SPACE (UINT64_C(1) << 20)  /* for pinned algorithms: the fast ones want a few bytes */
#define CANDIDATES 64

typedef struct Layer {
        const char *name;
        uint64_t n, k;
} Layer;

/* h3.md 1.1: hidden 5376, 56 heads of 128, ffn 14336 twice. */
static const Layer layers[] = {
        {"qkv", 21504, 5376}, {"out", 5376, 7168}, {"fc1", 28672, 5376}, {"fc2", 5376, 14336}};

typedef struct Kind {
        const char *name;
        cudaDataType_t in, out, scale;
        cublasComputeType_t compute;
        uint64_t in_size, out_size;
} Kind;

static const Kind kinds[] = {
        {"bf16", CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 2, 2},
        {"fp8", CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 1, 2},
        {"int8", CUDA_R_8I, CUDA_R_32I, CUDA_R_32I, CUBLAS_COMPUTE_32I, 1, 4},
        {"int8-bytes", CUDA_R_8I, CUDA_R_32I, CUDA_R_32I, CUBLAS_COMPUTE_32I, 1, 4},
};

/* Everything that a cublasLt algorithm can be told. */
typedef struct Pin {
        uint32_t id, tile, stages, scheme, swizzle, custom;
        int32_t splits;
        uint16_t inner, cluster;
} Pin;

/* y [rows, cols] = x [rows, k] . w [cols, k]^T; the library counts columns first, so w is its A and x its B.
 */
typedef struct Problem {
        cublasLtMatmulDesc_t op;
        cublasLtMatrixLayout_t w, x, y;
} Problem;

typedef struct Launch {
        const Kind *kind;
        Problem p;
        cublasLtMatmulAlgo_t algo;
        const uint8_t *w, *x;
        uint8_t *y;
        uint64_t workspace;
} Launch;

typedef struct Bench {
        const Kind *kind;
        const Layer *layer;
        uint8_t *w, *x, *reference, *y;
        Pin pin, large; /* by a query with REFERENCE_ROWS and with ROWS_MAX */
        Problem whole;  /* of REFERENCE_ROWS */
} Bench;

static cublasLtHandle_t lt;
static void *workspace;
static float *one; /* on the device: the scales of fp8 */

static void good(cublasStatus_t s, const char *what) {
        if (s == CUBLAS_STATUS_SUCCESS)
                return;
        fprintf(stderr, "%s: %s\n", what, cublasLtGetStatusString(s));
        exit(1);
}

static void problem_init(
        Problem *p, const Kind *kind, uint64_t rows, uint64_t cols, uint64_t k, uint64_t ld) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        const int8_t slow = 0; /* sums of e4m3 in full f32 */

        good(cublasLtMatmulDescCreate(&p->op, kind->compute, kind->scale), "operation");
        good(cublasLtMatmulDescSetAttribute(
                     p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
                "transposed");
        if (kind->in == CUDA_R_8F_E4M3) {
                good(cublasLtMatmulDescSetAttribute(
                             p->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &one, sizeof(one)),
                        "scale");
                good(cublasLtMatmulDescSetAttribute(
                             p->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &one, sizeof(one)),
                        "scale");
                good(cublasLtMatmulDescSetAttribute(
                             p->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &slow, sizeof(slow)),
                        "sums");
        }
        good(cublasLtMatrixLayoutCreate(&p->w, kind->in, k, cols, (int64_t) k), "layout");
        good(cublasLtMatrixLayoutCreate(&p->x, kind->in, k, rows, (int64_t) k), "layout");
        good(cublasLtMatrixLayoutCreate(&p->y, kind->out, cols, rows, (int64_t) ld), "layout");
}

static void problem_done(Problem *p) {
        (void) cublasLtMatrixLayoutDestroy(p->w);
        (void) cublasLtMatrixLayoutDestroy(p->x);
        (void) cublasLtMatrixLayoutDestroy(p->y);
        (void) cublasLtMatmulDescDestroy(p->op);
}

/* The library's proposals, best first by its own estimate. */
static int propose(const Problem *p, uint64_t space, int max, cublasLtMatmulHeuristicResult_t *ret) {
        cublasLtMatmulPreference_t wish;
        int n = 0;

        good(cublasLtMatmulPreferenceCreate(&wish), "preference");
        good(cublasLtMatmulPreferenceSetAttribute(
                     wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof(space)),
                "workspace");
        if (cublasLtMatmulAlgoGetHeuristic(lt, p->op, p->w, p->x, p->y, p->y, wish, max, ret, &n) !=
                CUBLAS_STATUS_SUCCESS)
                n = 0;
        (void) cublasLtMatmulPreferenceDestroy(wish);
        return n;
}

#define FIELD(attribute, member)                                                                            \
        { CUBLASLT_ALGO_CONFIG_##attribute, offsetof(Pin, member), sizeof(((Pin *) 0)->member) }
static const struct {
        cublasLtMatmulAlgoConfigAttributes_t attribute;
        size_t offset, size;
} fields[] = {
        FIELD(ID, id),
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

static Pin pin_read(const cublasLtMatmulAlgo_t *a) {
        Pin p = {0};
        size_t written;

        for (size_t i = 0; i < FIELDS; i++)
                good(cublasLtMatmulAlgoConfigGetAttribute(a, fields[i].attribute,
                             (uint8_t *) &p + fields[i].offset, fields[i].size, &written),
                        "field");
        return p;
}

static void pin_print(const char *what, const Pin *p) {
        printf("  %s: id %u tile %u stages %u splits %d scheme %u swizzle %u custom %u inner %u cluster "
               "%u\n",
                what, p->id, p->tile, p->stages, p->splits, p->scheme, p->swizzle, p->custom, p->inner,
                p->cluster);
}

static bool pin_equal(const Pin *a, const Pin *b) {
        return memcmp(a, b, sizeof(*a)) == 0;
}

/* False: a field is refused for this type. */
static bool pin_algo(const Kind *kind, const Pin *p, cublasLtMatmulAlgo_t *ret) {
        cublasStatus_t s = cublasLtMatmulAlgoInit(
                lt, kind->compute, kind->scale, kind->in, kind->in, kind->out, kind->out, (int) p->id, ret);

        for (size_t i = 1; i < FIELDS && s == CUBLAS_STATUS_SUCCESS; i++)
                s = cublasLtMatmulAlgoConfigSetAttribute(
                        ret, fields[i].attribute, (const uint8_t *) p + fields[i].offset, fields[i].size);
        return s == CUBLAS_STATUS_SUCCESS;
}

/* What cublasLtMatmulAlgoCheck says, and how often. */
static struct {
        unsigned asked, refused;
        cublasStatus_t status;
        size_t workspace;
} checks;

static void check(const Problem *p, const cublasLtMatmulAlgo_t *a, uint64_t space) {
        cublasLtMatmulHeuristicResult_t r = {0};
        cublasStatus_t s = cublasLtMatmulAlgoCheck(lt, p->op, p->w, p->x, p->y, p->y, a, &r);

        checks.asked++;
        if (s == CUBLAS_STATUS_SUCCESS && r.state == CUBLAS_STATUS_SUCCESS && r.workspaceSize <= space)
                return;
        checks.refused++;
        checks.status = s != CUBLAS_STATUS_SUCCESS ? s : r.state;
        checks.workspace = r.workspaceSize;
}

static cublasStatus_t multiply(const Launch *l) {
        static const float f[2] = {1, 0};
        static const int32_t i[2] = {1, 0};
        bool integer = l->kind->scale == CUDA_R_32I;

        return cublasLtMatmul(lt, l->p.op, integer ? (const void *) i : f, l->w, l->p.w, l->x, l->p.x,
                integer ? (const void *) (i + 1) : f + 1, l->y, l->p.y, l->y, l->p.y, &l->algo, workspace,
                l->workspace, NULL);
}

static void launch(void *arg) {
        good(multiply(arg), "product");
}

/* Part of the product by an algorithm: rows and columns from x0 and y0 on, written with rows ld apart to y.
 * False: not for this shape. */
static bool part(const Bench *b, const Pin *pin, uint64_t row, uint64_t rows, uint64_t col, uint64_t cols,
        uint64_t ld, uint64_t space) {
        const Kind *kind = b->kind;
        Launch l = {.kind = kind,
                .w = b->w + col * b->layer->k * kind->in_size,
                .x = b->x + row * b->layer->k * kind->in_size,
                .y = b->y,
                .workspace = space};
        bool ok;

        problem_init(&l.p, kind, rows, cols, b->layer->k, ld);
        ok = pin_algo(kind, pin, &l.algo);
        if (ok) {
                check(&l.p, &l.algo, space);
                must(cudaMemset(b->y, 0xff, rows * ld * kind->out_size), "poison");
                ok = multiply(&l) == CUBLAS_STATUS_SUCCESS;
        }
        problem_done(&l.p);
        return ok;
}

static uint64_t part_differs(
        const Bench *b, uint64_t row, uint64_t rows, uint64_t col, uint64_t cols, uint64_t ld) {
        uint64_t size = b->kind->out_size;

        return differing(b->reference + (row * b->layer->n + col) * size, b->layer->n * size, b->y,
                ld * size, cols * size, rows);
}

typedef struct Tally {
        unsigned same, differ, refused;
} Tally;

static void cut(
        const Bench *b, Tally *t, uint64_t row, uint64_t rows, uint64_t col, uint64_t cols, bool apart) {
        uint64_t ld = apart ? b->layer->n : cols;

        if (row + rows > REFERENCE_ROWS || col + cols > b->layer->n)
                return;
        if (!part(b, &b->pin, row, rows, col, cols, ld, PIN_SPACE)) {
                t->refused++;
                printf("  refused: rows %lu+%lu, columns %lu+%lu of %lu\n", row, rows, col, cols, ld);
        } else if (part_differs(b, row, rows, col, cols, ld) > 0) {
                t->differ++;
                printf("  differs: rows %lu+%lu, columns %lu+%lu of %lu\n", row, rows, col, cols, ld);
        } else
                t->same++;
}

static void cuts(const Bench *b) {
        static const uint64_t heights[] = {1, 37, 64, 127, 128, 129, 1000, 1024, 2048, 4095, 4097, 8192},
                              tops[] = {0, 128, 1001, 4096};
        static const uint64_t heads[] = {1, 7, 8, 14, 19, 28}, widths[] = {8, 16, 104, 1000, 1336};
        Tally rows = {0}, tiles = {0}, others = {0}, both = {0};
        uint64_t n = b->layer->n;

        for (size_t i = 0; i < sizeof(heights) / sizeof(*heights); i++)
                for (size_t j = 0; j < sizeof(tops) / sizeof(*tops); j++)
                        cut(b, &rows, tops[j], heights[i], 0, n, false);
        for (size_t i = 0; i < sizeof(heads) / sizeof(*heads); i++) {
                uint64_t w = 128 * heads[i];

                for (int apart = 0; apart < 2; apart++) {
                        cut(b, &tiles, 0, REFERENCE_ROWS, 0, w, apart);
                        cut(b, &tiles, 0, REFERENCE_ROWS, 128 * 3, w, apart);
                        cut(b, &tiles, 0, REFERENCE_ROWS, n - w, w, apart);
                }
                cut(b, &both, 1001, 1000, 128 * 3, w, true);
                cut(b, &both, 128, 4096, n - w, w, false);
                cut(b, &both, 4096, 1, 128, w, false);
        }
        for (size_t i = 0; i < sizeof(widths) / sizeof(*widths); i++) {
                cut(b, &others, 0, REFERENCE_ROWS, 0, widths[i], false);
                cut(b, &others, 0, REFERENCE_ROWS, 8 * 37, widths[i], true);
        }
        printf("  pinned, cuts with the same bits / others / refused: rows %u/%u/%u, columns at 128 "
               "%u/%u/%u, other columns %u/%u/%u, both %u/%u/%u\n",
                rows.same, rows.differ, rows.refused, tiles.same, tiles.differ, tiles.refused, others.same,
                others.differ, others.refused, both.same, both.differ, both.refused);
}

/* What the library would choose by itself for each of these rows: the same algorithm? the same bits? */
static void own_choices(const Bench *b) {
        static const uint64_t heights[] = {1, 37, 64, 127, 128, 129, 1000, 1024, 2048, 4095, 4097, 8192};
        unsigned asked = 0, same_pin = 0, same_bits = 0, split = 0;

        for (size_t i = 0; i < sizeof(heights) / sizeof(*heights); i++) {
                cublasLtMatmulHeuristicResult_t h;
                Problem p;
                Pin pin;
                int n;

                problem_init(&p, b->kind, heights[i], b->layer->n, b->layer->k, b->layer->n);
                n = propose(&p, WORKSPACE, 1, &h);
                problem_done(&p);
                if (n < 1)
                        continue;
                pin = pin_read(&h.algo);
                asked++;
                same_pin += pin_equal(&pin, &b->pin);
                split += pin.splits != 1 || pin.scheme != 0;
                if (part(b, &pin, 0, heights[i], 0, b->layer->n, b->layer->n, WORKSPACE))
                        same_bits += part_differs(b, 0, heights[i], 0, b->layer->n, b->layer->n) == 0;
        }
        printf("  the library's own choices over %u heights, 64 MiB of workspace: %u the pinned algorithm, "
               "%u with the pinned bits, %u split\n",
                asked, same_pin, same_bits, split);
}

/* Which proposals share the pinned one's bits, by what tells them apart, and how fast they are at the
 * reference shape. Few rows bring proposals that split K. */
static void proposals(const Bench *b, uint64_t rows, uint64_t space) {
        cublasLtMatmulHeuristicResult_t h[CANDIDATES];
        unsigned same = 0, differ = 0, split = 0, split_same = 0;
        Problem p;
        int n;

        problem_init(&p, b->kind, rows, b->layer->n, b->layer->k, b->layer->n);
        n = propose(&p, space, CANDIDATES, h);
        problem_done(&p);
        for (int i = 0; i < n; i++) {
                Pin pin = pin_read(&h[i].algo);
                bool is_split = pin.splits != 1 || pin.scheme != 0, equal;

                if (!part(b, &pin, 0, rows, 0, b->layer->n, b->layer->n, space))
                        continue;
                equal = part_differs(b, 0, rows, 0, b->layer->n, b->layer->n) == 0;
                split += is_split;
                split_same += is_split && equal;
                same += !is_split && equal;
                differ += !is_split && !equal;
                if (!is_split && !equal)
                        pin_print("unsplit, yet other bits", &pin);
        }
        printf("  proposals for %lu rows, workspace %lu MiB: unsplit with the pinned bits %u, with others "
               "%u; split %u, of these with the pinned bits %u\n",
                rows, space >> 20, same, differ, split, split_same);
}

/* The fastest of the proposals that may be pinned, at the reference shape: what one query leaves on the
 * table. */
static void fastest(const Bench *b) {
        cublasLtMatmulHeuristicResult_t h[CANDIDATES];
        Launch l = {.kind = b->kind, .p = b->whole, .w = b->w, .x = b->x, .y = b->y, .workspace = PIN_SPACE};
        double best = 0, pinned = 0;
        Pin best_pin = {0};
        int n = propose(&b->whole, PIN_SPACE, 16, h);

        for (int i = 0; i < n; i++) {
                Pin pin = pin_read(&h[i].algo);
                double usec;

                if (pin.splits != 1 || pin.scheme != 0 || !pin_algo(b->kind, &pin, &l.algo) ||
                        multiply(&l) != CUBLAS_STATUS_SUCCESS)
                        continue;
                usec = rate(launch, &l, 0.08).usec;
                if (pin_equal(&pin, &b->pin))
                        pinned = usec;
                if (best == 0 || usec < best) {
                        best = usec;
                        best_pin = pin;
                }
        }
        printf("  fastest of %d proposals at %lu rows: pinned/fastest %.3f\n", n, REFERENCE_ROWS,
                best > 0 ? pinned / best : 0);
        pin_print("fastest", &best_pin);
}

/* What a query that allows no workspace gives up. */
static void without_space(const Bench *b) {
        cublasLtMatmulHeuristicResult_t h;
        Launch l = {.kind = b->kind, .p = b->whole, .w = b->w, .x = b->x, .y = b->y, .workspace = PIN_SPACE};
        double pinned;
        Pin pin;

        if (propose(&b->whole, 0, 1, &h) != 1 || !pin_algo(b->kind, &b->pin, &l.algo))
                return;
        pinned = rate(launch, &l, 0.1).usec;
        l.algo = h.algo;
        l.workspace = 0;
        if (multiply(&l) != CUBLAS_STATUS_SUCCESS)
                return;
        printf("  a query without workspace: pinned/its time %.3f\n", pinned / rate(launch, &l, 0.1).usec);
        pin = pin_read(&h.algo);
        pin_print("without workspace", &pin);
}

typedef struct Chunks {
        Launch whole, rest;
        uint64_t full; /* chunks of the height of `whole` */
        uint64_t x_step, y_step;
} Chunks;

static void launch_chunks(void *arg) {
        Chunks *c = arg;

        for (uint64_t i = 0; i < c->full; i++) {
                Launch l = c->whole;

                l.x += i * c->x_step;
                l.y += i * c->y_step;
                launch(&l);
        }
        if (c->rest.w)
                launch(&c->rest);
}

/* Rows in chunks of `height` by one algorithm, each into its rows of y. */
static bool chunks_init(Chunks *c, const Bench *b, const Pin *pin, uint64_t rows, uint64_t height) {
        const Kind *kind = b->kind;
        uint64_t n = b->layer->n, k = b->layer->k, rest = rows % height;

        *c = (Chunks){.full = rows / height,
                .x_step = height * k * kind->in_size,
                .y_step = height * n * kind->out_size};
        c->whole = (Launch){.kind = kind, .w = b->w, .x = b->x, .y = b->y, .workspace = PIN_SPACE};
        problem_init(&c->whole.p, kind, height, n, k, n);
        if (!pin_algo(kind, pin, &c->whole.algo) || multiply(&c->whole) != CUBLAS_STATUS_SUCCESS)
                return false;
        if (rest > 0) {
                c->rest = (Launch){.kind = kind,
                        .w = b->w,
                        .x = b->x + c->full * c->x_step,
                        .y = b->y + c->full * c->y_step,
                        .algo = c->whole.algo,
                        .workspace = PIN_SPACE};
                problem_init(&c->rest.p, kind, rest, n, k, n);
                return multiply(&c->rest) == CUBLAS_STATUS_SUCCESS;
        }
        return true;
}

/* One algorithm over all rows at once and in chunks, against `limit` usec. */
static void rate_pin(
        const char *what, const Bench *b, const Pin *pin, uint64_t rows, uint64_t height, double limit) {
        double work = 2e-6 * (double) rows * (double) b->layer->n * (double) b->layer->k; /* over usec: TF */
        Chunks c;
        Rate r;

        if (!chunks_init(&c, b, pin, rows, height)) {
                printf("; %s refused", what);
                return;
        }
        r = rate(launch_chunks, &c, 0.1);
        printf("; %s", what);
        if (height < rows)
                printf(" in %lus", height);
        printf(" %.1f us %.0f TF %u MHz, own/this %.3f", r.usec, work / r.usec, r.mhz, limit / r.usec);
}

static void rates(const Bench *b, uint64_t rows) {
        static const uint64_t heights[] = {8192, 16384, 24576};
        uint64_t n = b->layer->n, k = b->layer->k;
        double work = 2e-6 * (double) rows * (double) n * (double) k;
        cublasLtMatmulHeuristicResult_t h;
        Launch own = {.kind = b->kind, .w = b->w, .x = b->x, .y = b->y, .workspace = WORKSPACE};
        Pin pin;

        problem_init(&own.p, b->kind, rows, n, k, n);
        must_be(propose(&own.p, WORKSPACE, 1, &h) == 1, "no proposal");
        own.algo = h.algo;
        pin = pin_read(&own.algo);
        for (int round = 0; round < 2; round++) {
                Rate o = rate(launch, &own, 0.1);

                printf("  %lu rows: own %.1f us %.0f TF %u MHz %u W (id %u, splits %d, workspace %zu)", rows,
                        o.usec, work / o.usec, o.mhz, o.watts, pin.id, pin.splits, h.workspaceSize);
                rate_pin("pinned", b, &b->pin, rows, rows, o.usec);
                if (rows > 16384) {
                        rate_pin("large", b, &b->large, rows, rows, o.usec);
                        for (size_t i = 0; i < sizeof(heights) / sizeof(*heights); i++)
                                rate_pin("large", b, &b->large, rows, heights[i], o.usec);
                }
                printf("\n");
        }
        problem_done(&own.p);
}

/* All rows at once against the same in chunks. */
static void whole_against_chunks(const Bench *b) {
        uint64_t pitch = b->layer->n * b->kind->out_size, size = ROWS_MAX * pitch;
        uint8_t *whole = device_new(size);
        Bench in_whole = *b;
        Chunks c;

        in_whole.y = whole;
        if (!part(&in_whole, &b->large, 0, ROWS_MAX, 0, b->layer->n, b->layer->n, PIN_SPACE) ||
                !chunks_init(&c, b, &b->pin, ROWS_MAX, 8192))
                printf("  %lu rows at once: refused\n", ROWS_MAX);
        else {
                must(cudaMemset(b->y, 0xff, size), "poison");
                launch_chunks(&c);
                printf("  %lu rows at once by the large one, in chunks of 8192 by the pinned one: %lu words "
                       "differ\n",
                        ROWS_MAX, differing(whole, pitch, b->y, pitch, pitch, ROWS_MAX));
        }
        device_free(whole);
}

/* A few sums of int8 against the host's. */
static void int8_check(const Bench *b) {
        uint64_t k = b->layer->k, n = b->layer->n;
        int8_t *x = malloc(k), *w = malloc(k);

        must_be(x && w, "memory");
        for (uint64_t i = 0; i < 64; i++) {
                uint64_t row = i * 127 % REFERENCE_ROWS, col = i * 331 % n;
                int32_t sum = 0, got;

                must(cudaMemcpy(x, b->x + row * k, k, cudaMemcpyDeviceToHost), "copy");
                must(cudaMemcpy(w, b->w + col * k, k, cudaMemcpyDeviceToHost), "copy");
                must(cudaMemcpy(&got, b->reference + (row * n + col) * 4, 4, cudaMemcpyDeviceToHost),
                        "copy");
                for (uint64_t j = 0; j < k; j++)
                        sum += x[j] * w[j];
                must_be(sum == got, "an int32 sum is not the host's");
        }
        free(x);
        free(w);
        printf("  64 sums equal the host's\n");
}

static void fill(const Kind *kind, void *p, uint64_t n, float sigma, uint32_t seed) {
        if (kind->in == CUDA_R_16BF)
                fill_bf16(p, n, sigma, seed);
        else if (kind->in == CUDA_R_8F_E4M3)
                fill_e4m3(p, n, 10 * sigma, seed);
        else if (strcmp(kind->name, "int8") == 0)
                fill_s8(p, n, 32, seed);
        else
                fill_bytes(p, n, seed);
}

/* The first proposal that keeps one chain of sums. */
static Pin pin_new(const Kind *kind, const char *what, const Problem *p) {
        cublasLtMatmulHeuristicResult_t h[CANDIDATES];
        int n = propose(p, PIN_SPACE, CANDIDATES, h), chosen = -1, split = 0;
        cublasLtMatmulAlgo_t rebuilt;
        Pin pin;

        for (int i = 0; i < n; i++) {
                Pin q = pin_read(&h[i].algo);
                bool allowed = q.splits == 1 && q.scheme == CUBLASLT_REDUCTION_SCHEME_NONE;

                split += !allowed;
                if (allowed && chosen < 0)
                        chosen = i;
        }
        must_be(chosen >= 0, "no algorithm without splits");
        pin = pin_read(&h[chosen].algo);
        must_be(pin_algo(kind, &pin, &rebuilt), "the fields of the chosen algorithm are refused");
        printf("  proposals: %d, %d of them split; first allowed: number %d, workspace %zu; rebuilt from "
               "its fields: %s\n",
                n, split, chosen, h[chosen].workspaceSize,
                memcmp(&rebuilt, &h[chosen].algo, sizeof(rebuilt)) == 0 ? "the same bytes" : "other bytes");
        pin_print(what, &pin);
        return pin;
}

static void pin_layer(Bench *b) {
        Problem p;

        b->pin = pin_new(b->kind, "pinned", &b->whole);
        problem_init(&p, b->kind, ROWS_MAX, b->layer->n, b->layer->k, b->layer->n);
        b->large = pin_new(b->kind, "large", &p);
        problem_done(&p);
}

static void bench_layer(const Kind *kind, const Layer *layer) {
        static const uint64_t heights[] = {128, 1408, 4096, 8192, 38010, ROWS_MAX};
        Bench b = {.kind = kind, .layer = layer};
        uint64_t reference_size = REFERENCE_ROWS * layer->n * kind->out_size;

        printf("%s %s: %lu x %lu\n", kind->name, layer->name, layer->n, layer->k);
        b.w = device_new(layer->n * layer->k * kind->in_size);
        b.x = device_new(ROWS_MAX * layer->k * kind->in_size);
        b.y = device_new(ROWS_MAX * layer->n * kind->out_size);
        b.reference = device_new(reference_size);
        fill(kind, b.w, layer->n * layer->k, 0.02f, 1);
        fill(kind, b.x, ROWS_MAX * layer->k, 1, 2);
        problem_init(&b.whole, kind, REFERENCE_ROWS, layer->n, layer->k, layer->n);

        pin_layer(&b);
        checks.asked = checks.refused = 0;
        must_be(part(&b, &b.pin, 0, REFERENCE_ROWS, 0, layer->n, layer->n, PIN_SPACE),
                "the pinned algorithm is refused at its own shape");
        must(cudaMemcpy(b.reference, b.y, reference_size, cudaMemcpyDeviceToDevice), "copy");
        if (kind->in == CUDA_R_8I)
                int8_check(&b);
        if (strcmp(kind->name, "int8-bytes") != 0) {
                cuts(&b);
                printf("  AlgoCheck refused %u of %u launches with the pinned algorithm, the last with "
                       "\"%s\", %zu bytes of workspace\n",
                        checks.refused, checks.asked, cublasLtGetStatusString(checks.status),
                        checks.workspace);
                own_choices(&b);
                proposals(&b, REFERENCE_ROWS, PIN_SPACE);
                proposals(&b, 128, WORKSPACE);
                whole_against_chunks(&b);
                fastest(&b);
                without_space(&b);
        }
        for (size_t i = 0; i < sizeof(heights) / sizeof(*heights); i++)
                if (strcmp(kind->name, "int8-bytes") != 0 || heights[i] == ROWS_MAX)
                        rates(&b, heights[i]);

        problem_done(&b.whole);
        device_free(b.w);
        device_free(b.x);
        device_free(b.y);
        device_free(b.reference);
}

int main(int argc, char **argv) {
        const float f = 1;

        device_open();
        printf("# cublasLt %zu\n", cublasLtGetVersion());
        good(cublasLtCreate(&lt), "cublasLt");
        workspace = device_new(WORKSPACE);
        one = device_new(sizeof(*one));
        must(cudaMemcpy(one, &f, sizeof(f), cudaMemcpyHostToDevice), "copy");
        for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
                for (size_t j = 0; wanted(argc, argv, kinds[i].name) && j < sizeof(layers) / sizeof(*layers); j++)
                        bench_layer(kinds + i, layers + j);
        (void) cublasLtDestroy(lt);
        return 0;
}
