/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of the CUDA backend's products, everything included (scales, rounding, cutting), beside the library's own choice for the bare
 * product in the same run.
 *
 *     bench-product [bf16|int8|int8-pieces|own|f32|formats]...
 *
 * int8: the backend's choice beside the library's bare sums, and beside its sums with a last pass; fails if a word differs from those.
 * int8-pieces: fewer rows at a time; of two ranks', products of the same rows one by one and beside each other.
 * formats: fp8 and nvfp4, expanded in each product, beside the same products of bf16; and what expanding takes, which fails if it is
 * more than EXPAND_MOST times as long as a copy that moves as many bytes. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

#include "kernels/cuda/cuda.h"
#include "tests/gpu/device.h"

#define ROWS_MAX UINT64_C(73686)
#define K_MAX UINT64_C(14336)
#define N_MAX UINT64_C(28672)
#define WORKSPACE (UINT64_C(64) << 20)
#define SECONDS 0.15
#define EXPAND_MOST 2.0
#define SUMS_ROWS 8192 /* of int32 at a time */

/* `parts` products of the layer's columns, as the denoiser makes them. */
typedef struct Layer {
        const char *name;
        uint64_t n, k, parts;
} Layer;

static const Layer layers[] = {{"qkv", 21504, 5376, 3}, {"out", 5376, 7168, 1}, {"fc1", 28672, 5376, 2}, {"fc2", 5376, 14336, 1}};

/* Of one of two ranks, that has half of the heads; their chunks of 38,010 and of 73,686 rows. */
static const Layer halves[] = {{"qkv of half", 10752, 5376, 3}, {"out", 5376, 7168, 1}, {"fc1", 28672, 5376, 2}, {"fc2", 5376, 14336, 1}};
static const uint64_t chunks[] = {4751, 7369};

static LkContext *gpu;
static uint8_t *w, *x, *y;
static float *scales; /* of rows and of columns */
static void *workspace;
static cublasLtHandle_t lt;

typedef struct Job {
        const Layer *layer;
        uint64_t rows;
        LkType type; /* of w */
        bool alone;  /* int8: parts one by one */
        int r;
} Job;

#define PARTS_MAX 3

static LkMatrix matrix(const Layer *l, LkType type) {
        LkMatrix m = {.data = w, .type = type, .rows = l->n, .cols = l->k, .row_stride = lk_row_size(type, l->k), .block_rows = l->n,
                .layer_rows = l->n};

        m.block_stride = m.rows * m.row_stride;
        if (type >= LK_I8)
                m.quant = (LkQuant){.scale = scales, .scale_stride = type == LK_I8 ? 4 : 0};
        if (type == LK_NVFP4) { /* behind the numbers: tiles of 128 rows, the same kind of numbers */
                m.quant.block_scale = w + N_MAX * K_MAX / 2;
                m.quant.block_scale_cols = l->k / 16;
        }
        return m;
}

static void launch(void *arg) {
        Job *j = arg;
        const LkMatrix whole = matrix(j->layer, j->type);
        uint64_t n = j->layer->n / j->layer->parts;
        LkGemmI8 beside[PARTS_MAX];

        for (uint64_t i = 0; j->r >= 0 && i < j->layer->parts; i++) {
                LkMatrix part = lk_matrix_rows(&whole, i * n, n);
                uint8_t *to = y + i * n * 2;

                if (j->type == LK_I8) {
                        beside[i] = (LkGemmI8){.m = j->rows, .x = (const int8_t *) x, .x_ld = part.cols, .x_scale = scales, .w = part,
                                .y = to, .y_type = LK_BF16, .y_ld = j->layer->n};
                        if (j->alone)
                                j->r = lk_cuda_ops()->gemm_i8(gpu, beside + i);
                        else if (i > 0)
                                beside[i - 1].beside = beside + i;
                } else {
                        const LkGemm a = {.m = j->rows, .x = x, .x_type = LK_BF16, .x_ld = part.cols, .w = part, .y = to, .y_type = LK_BF16,
                                .y_ld = j->layer->n};

                        j->r = lk_cuda_ops()->gemm(gpu, &a);
                }
        }
        if (j->type == LK_I8 && !j->alone && j->r >= 0)
                j->r = lk_cuda_ops()->gemm_i8(gpu, beside);
}

static void good(cublasStatus_t s, const char *what) {
        must_be(s == CUBLAS_STATUS_SUCCESS, what);
}

/* The bare product by the library's own choice. */
typedef struct Peer {
        cublasLtMatmulDesc_t op;
        cublasLtMatrixLayout_t w, x, y;
        cublasLtMatmulHeuristicResult_t choice;
        bool integer;
} Peer;

static void peer_init(Peer *p, const Job *j) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        const uint64_t space = WORKSPACE, n = j->layer->n, k = j->layer->k;
        cublasLtMatmulPreference_t wish;
        cudaDataType_t in = j->type == LK_I8 ? CUDA_R_8I : CUDA_R_16BF;
        int found = 0;

        p->integer = j->type == LK_I8;
        good(cublasLtMatmulDescCreate(&p->op, p->integer ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                     p->integer ? CUDA_R_32I : CUDA_R_32F),
                "op");
        good(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)), "op");
        good(cublasLtMatrixLayoutCreate(&p->w, in, k, n, (int64_t) k), "w");
        good(cublasLtMatrixLayoutCreate(&p->x, in, k, j->rows, (int64_t) k), "x");
        good(cublasLtMatrixLayoutCreate(&p->y, p->integer ? CUDA_R_32I : CUDA_R_16BF, n, j->rows, (int64_t) n), "y");
        good(cublasLtMatmulPreferenceCreate(&wish), "wish");
        good(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof(space)), "wish");
        good(cublasLtMatmulAlgoGetHeuristic(lt, p->op, p->w, p->x, p->y, p->y, wish, 1, &p->choice, &found), "choice");
        must_be(found == 1, "no choice");
        (void) cublasLtMatmulPreferenceDestroy(wish);
}

static void peer_launch(void *arg) {
        static const float f[2] = {1, 0};
        static const int32_t i[2] = {1, 0};
        const Peer *p = arg;
        const void *one = p->integer ? (const void *) i : f, *zero = p->integer ? (const void *) (i + 1) : f + 1;

        good(cublasLtMatmul(lt, p->op, one, w, p->w, x, p->x, zero, y, p->y, y, p->y, &p->choice.algo, workspace, WORKSPACE, NULL), "peer");
}

static void peer_done(Peer *p) {
        (void) cublasLtMatrixLayoutDestroy(p->w);
        (void) cublasLtMatrixLayoutDestroy(p->x);
        (void) cublasLtMatrixLayoutDestroy(p->y);
        (void) cublasLtMatmulDescDestroy(p->op);
}

static void fill(LkType type) {
        if (type == LK_I8) {
                fill_s8(w, N_MAX * K_MAX / 2, 32, 1);
                fill_s8(x, ROWS_MAX * K_MAX, 32, 2);
        } else {
                if (type == LK_BF16)
                        fill_bf16(w, N_MAX * K_MAX / 2, 0.02f, 1);
                else
                        fill_e4m3(w, N_MAX * K_MAX / 2, 1, 1);
                fill_bf16(x, ROWS_MAX * K_MAX, 1, 2);
        }
        must(cudaDeviceSynchronize(), "fill");
}

/* ours, and the library's bare product beside it (of bf16 for fp8). Returns ours in usec. */
static double bench(const char *what, const Layer *l, uint64_t rows, LkType type, bool alone, double *ret_peer) {
        Job j = {.layer = l, .rows = rows, .type = type, .alone = alone};
        double work = 2e-6 * (double) rows * (double) l->n * (double) l->k, begin = now(), first;
        Peer p = {0};
        Rate ours, peer;

        launch(&j);
        must(cudaDeviceSynchronize(), "first launch");
        first = now() - begin;
        ours = rate_waited(launch, &j, SECONDS);
        printf("%s %s %lu rows: ", what, l->name, rows);
        if (j.r < 0) {
                printf("error %d\n", j.r);
                return 0;
        }
        printf("%.1f us (%.1f to %.1f, %u) %.0f TF %u MHz %u W, first %.1f ms", ours.usec, ours.shortest, ours.longest, ours.samples,
                work / ours.usec, ours.mhz, ours.watts, 1000 * first);
        if (ret_peer) {
                peer_init(&p, &j);
                peer = rate_waited(peer_launch, &p, SECONDS);
                peer_done(&p);
                *ret_peer += peer.usec;
                printf("; library, bare: %.1f us %.0f TF %u MHz %u W; its time/ours %.3f", peer.usec, work / peer.usec,
                        peer.mhz, peer.watts, peer.usec / ours.usec);
        }
        printf("\n");
        return ours.usec;
}

/* Returns ours in usec. */
static double bench_layers(const char *what, uint64_t rows, LkType type, bool with_peer) {
        double ours = 0, peer = 0;

        for (size_t i = 0; i < sizeof(layers) / sizeof(*layers); i++)
                ours += bench(what, layers + i, rows, type, false, with_peer ? &peer : NULL);
        printf("%s %lu rows, the four: %.2f ms", what, rows, ours / 1000);
        if (with_peer)
                printf(", library bare %.2f ms, ratio %.3f", peer / 1000, peer / ours);
        printf("\n");
        return ours;
}

static void bench_bf16(void) {
        static const uint64_t heights[] = {73686, 38010, 1408};

        fill(LK_BF16);
        for (size_t i = 0; i < 3; i++)
                bench_layers("bf16", heights[i], LK_BF16, true);
        bench_layers("bf16", 8192, LK_BF16, true);
}

static bool failed;

/* The backend's choice and the library's sums with a last pass, to both halves of y. */
static void same_words(const Layer *l, uint64_t rows) {
        uint8_t *first = y;
        Job j = {.layer = l, .rows = rows, .type = LK_I8};
        uint64_t n;

        launch(&j);
        y += ROWS_MAX * N_MAX * 2;
        lk_cuda_product_set(gpu, false, SUMS_ROWS);
        launch(&j);
        lk_cuda_product_set(gpu, false, 0);
        must(cudaDeviceSynchronize(), "both ways");
        n = differing(first, l->n * 2, y, l->n * 2, l->n * 2, rows);
        y = first;
        printf("int8 %s %lu rows: status %d, %lu words differ from the library's sums with a last pass\n", l->name, rows, j.r, n);
        failed = failed || j.r < 0 || n > 0;
}

static void bench_int8(void) {
        static const uint64_t heights[] = {73686, 38010, 1408};

        fill(LK_I8);
        for (size_t i = 0; i < sizeof(layers) / sizeof(*layers); i++)
                same_words(layers + i, ROWS_MAX);
        for (size_t i = 0; i < 3; i++) {
                double ours = bench_layers("int8", heights[i], LK_I8, true), sums;

                lk_cuda_product_set(gpu, false, SUMS_ROWS);
                sums = bench_layers("int8 by sums", heights[i], LK_I8, false);
                lk_cuda_product_set(gpu, false, 0);
                printf("int8 %lu rows, the four: time by the library's sums with a last pass/ours %.3f\n", heights[i], sums / ours);
        }
}

/* The backend's choice of a rank's products; `alone` as it makes them one by one. */
static double bench_halves(const char *what, uint64_t rows, bool alone) {
        double ours = 0;

        for (size_t i = 0; i < sizeof(halves) / sizeof(*halves); i++)
                ours += bench(what, halves + i, rows, LK_I8, alone, NULL);
        printf("%s %lu rows of half the heads, the four: %.2f ms\n", what, rows, ours / 1000);
        return ours;
}

static void bench_int8_pieces(void) {
        static const uint64_t heights[] = {24576, 16896, 8192, 4096}, pieces[] = {1024, 2048, 4096, 8192};

        fill(LK_I8);
        for (size_t i = 0; i < sizeof(chunks) / sizeof(*chunks); i++) {
                double beside, alone;

                for (size_t l = 0; l < sizeof(halves) / sizeof(*halves); l++)
                        same_words(halves + l, chunks[i]);
                beside = bench_halves("int8", chunks[i], false);
                alone = bench_halves("int8 one by one", chunks[i], true);
                printf("int8 %lu rows of half the heads: one by one/beside each other %.3f\n", chunks[i], alone / beside);
        }
        for (size_t i = 0; i < 4; i++)
                bench_layers("int8", heights[i], LK_I8, false);
        for (size_t i = 0; i < 4; i++) {
                lk_cuda_product_set(gpu, false, pieces[i]);
                printf("sums of %lu rows at a time:\n", pieces[i]);
                bench_layers("int8 by sums", 73686, LK_I8, false);
        }
        lk_cuda_product_set(gpu, false, 0);
}

static void bench_own(void) {
        lk_cuda_product_set(gpu, true, 0);
        fill(LK_BF16);
        bench_layers("own bf16", 38010, LK_BF16, false);
        bench_layers("own bf16", 1408, LK_BF16, false);
        fill(LK_I8);
        bench_layers("own int8", 38010, LK_I8, false);
        lk_cuda_product_set(gpu, false, 0);
}

typedef struct F32 {
        LkGemm a;
        int r;
} F32;

static void launch_f32(void *arg) {
        F32 *f = arg;

        if (f->r >= 0)
                f->r = lk_cuda_ops()->gemm(gpu, &f->a);
}

static void bench_f32(void) {
        static const struct {
                uint64_t m, n, k;
                LkType x, w, y;
        } cases[] = {
                {73686, 96, 5376, LK_BF16, LK_BF16, LK_F32},
                {73686, 5376, 96, LK_F32, LK_BF16, LK_BF16},
                {4, 32256, 5376, LK_F32, LK_BF16, LK_F32},
                {8192, 8192, 2048, LK_F32, LK_F16, LK_F32},
                {8192, 8192, 2048, LK_F32, LK_F32, LK_F32},
                {1408, 5376, 5376, LK_BF16, LK_F16, LK_BF16},
        };

        fill_bf16(w, N_MAX * K_MAX / 2, 0.02f, 1);
        fill_bf16(x, ROWS_MAX * K_MAX, 1, 2);
        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
                uint64_t n = cases[i].n, k = cases[i].k, size = lk_type_size(cases[i].w);
                F32 f = {.a = {.m = cases[i].m, .x = x, .x_type = cases[i].x, .x_ld = k, .y = y, .y_type = cases[i].y, .y_ld = n,
                                 .w = {.data = w, .type = cases[i].w, .rows = n, .cols = k, .row_stride = k * size, .block_rows = n,
                                         .block_stride = n * k * size}}};
                Rate r = rate_waited(launch_f32, &f, SECONDS);

                printf("f32 way, types %d %d %d, %lu x %lu x %lu: status %d, %.1f us, %.1f TF %u MHz %u W\n",
                        cases[i].x, cases[i].w, cases[i].y, f.a.m, n, k, f.r, r.usec,
                        2e-6 * (double) (f.a.m * n * k) / r.usec, r.mhz, r.watts);
        }
}

typedef struct Expansion {
        LkExpand a;
        int r;
} Expansion;

static void launch_expand(void *arg) {
        Expansion *e = arg;

        if (e->r >= 0)
                e->r = lk_cuda_ops()->expand(gpu, &e->a);
}

static void launch_copy(void *arg) {
        must(cudaMemcpyAsync(y, x, *(const uint64_t *) arg, cudaMemcpyDeviceToDevice, NULL), "copy");
}

static bool expand_is_fast(const char *what, LkType type) {
        double ours = 0, copies = 0;

        for (size_t i = 0; i < sizeof(layers) / sizeof(*layers); i++) {
                Expansion e = {.a = {matrix(layers + i, type), (uint16_t *) y}};
                uint64_t n = layers[i].n * layers[i].k, moved = lk_row_size(type, n) + 2 * n, half = moved / 2;
                Rate r = rate_waited(launch_expand, &e, SECONDS), copy = rate_waited(launch_copy, &half, SECONDS);

                printf("expand %s %s: status %d, %.1f us (%.1f to %.1f, %u) %.2f TB/s, a copy %.1f us; ratio %.2f\n",
                        what, layers[i].name, e.r, r.usec, r.shortest, r.longest, r.samples, 1e-6 * (double) moved / r.usec, copy.usec,
                        r.usec / copy.usec);
                if (e.r < 0)
                        return false;
                ours += r.usec;
                copies += copy.usec;
        }
        printf("expand %s, the four: %.0f us, ratio to copies %.2f, at most %.1f\n", what, ours, ours / copies, EXPAND_MOST);
        return ours <= EXPAND_MOST * copies;
}

static void bench_formats(void) {
        static const uint64_t heights[] = {38010, 4096};

        fill(LK_BF16);
        for (size_t i = 0; i < 2; i++)
                bench_layers("bf16", heights[i], LK_BF16, false);
        fill(LK_F8_E4M3);
        fill_e4m3(w + N_MAX * K_MAX / 2, N_MAX * K_MAX / 2, 1, 3);
        for (size_t i = 0; i < 2; i++) {
                bench_layers("fp8 weights", heights[i], LK_F8_E4M3, false);
                bench_layers("nvfp4 weights", heights[i], LK_NVFP4, false);
        }
        failed = !expand_is_fast("fp8", LK_F8_E4M3) || failed;
        failed = !expand_is_fast("nvfp4", LK_NVFP4) || failed;
}

static void describe(void) {
        char text[1024];

        (void) lk_cuda_describe(gpu, text, sizeof(text));
        printf("%s", text);
        (void) lk_cuda_numerics_id(gpu, text, sizeof(text));
        printf("%s\n", text);
}

int main(int argc, char **argv) {
        static const struct {
                const char *name;
                void (*run)(void);
        } all[] = {{"bf16", bench_bf16}, {"int8", bench_int8}, {"int8-pieces", bench_int8_pieces}, {"own", bench_own}, {"f32", bench_f32},
                {"formats", bench_formats}};
        float *ones = malloc(ROWS_MAX * sizeof(*ones));
        double begin;
        int r;

        device_open();
        must(cudaFree(NULL), "context");
        begin = now();
        r = lk_cuda_ops()->context_new(0, &gpu);
        must_be(r >= 0 && ones, "context");
        printf("context_new: %.1f ms\n", 1000 * (now() - begin));
        good(cublasLtCreate(&lt), "library");
        workspace = device_new(WORKSPACE);
        w = device_new(N_MAX * K_MAX);
        x = device_new(ROWS_MAX * K_MAX * 2);
        y = device_new(ROWS_MAX * N_MAX * 4);
        scales = device_new(ROWS_MAX * sizeof(*scales));
        for (uint64_t i = 0; i < ROWS_MAX; i++)
                ones[i] = 0.01f;
        must(cudaMemcpy(scales, ones, ROWS_MAX * sizeof(*ones), cudaMemcpyHostToDevice), "scales");
        free(ones);

        for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
                if (wanted(argc, argv, all[i].name))
                        all[i].run();
        }
        describe();
        lk_cuda_ops()->context_free(gpu);
        return failed;
}
