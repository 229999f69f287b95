/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of the CUDA backend's convolutions in the shapes of the VAEs, everything included, beside the library's own product of the same
 * sizes in the same run: in f32 (what ours is) and in bf16 (what ours is not). Then what all convolutions of a piece of work take.
 *
 *     bench-conv [video|image|sound]... */

#include <string.h>

#include <cublasLt.h>

#include "tests/gpu/bench.h"

#define LEVELS 6u
#define PEER_ROWS UINT64_C(65536)
#define WORKSPACE (UINT64_C(64) << 20)
#define SECONDS 0.06
#define X_SIZE (UINT64_C(2) << 30)
#define Y_SIZE (UINT64_C(1) << 30)
#define W_SIZE (UINT64_C(256) << 20)

static LkContext *gpu;
static uint8_t *x, *y, *w;
static void *workspace;
static cublasLtHandle_t lt;

static int run_conv(LkContext *c, const void *a) {
        return lk_cuda_ops()->conv(c, (const LkConv *) a);
}

/* The library's own choice for y [m, n] = x [m, k] . w [n, k]^T. */
typedef struct Peer {
        cublasLtMatmulDesc_t op;
        cublasLtMatrixLayout_t w, x, y;
        cublasLtMatmulHeuristicResult_t choice;
} Peer;

static void good(cublasStatus_t s, const char *what) {
        must_be(s == CUBLAS_STATUS_SUCCESS, what);
}

static void peer_launch(void *arg) {
        static const float one = 1, zero = 0;
        const Peer *p = arg;

        good(cublasLtMatmul(lt, p->op, &one, w, p->w, x, p->x, &zero, y, p->y, y, p->y, &p->choice.algo, workspace, WORKSPACE, NULL),
                "peer");
}

/* TFLOP/s; 0: the library has nothing. */
static double peer_rate(uint64_t m, uint64_t n, uint64_t k, cudaDataType_t type) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        const uint64_t space = WORKSPACE;
        cublasLtMatmulPreference_t wish;
        Rate r = {0};
        Peer p;
        int found = 0;

        good(cublasLtMatmulDescCreate(&p.op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "op");
        good(cublasLtMatmulDescSetAttribute(p.op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)), "op");
        good(cublasLtMatrixLayoutCreate(&p.w, type, k, n, (int64_t) k), "w");
        good(cublasLtMatrixLayoutCreate(&p.x, type, k, m, (int64_t) k), "x");
        good(cublasLtMatrixLayoutCreate(&p.y, type, n, m, (int64_t) n), "y");
        good(cublasLtMatmulPreferenceCreate(&wish), "wish");
        good(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof(space)), "wish");
        if (cublasLtMatmulAlgoGetHeuristic(lt, p.op, p.w, p.x, p.y, p.y, wish, 1, &p.choice, &found) == CUBLAS_STATUS_SUCCESS && found == 1)
                r = rate_waited(peer_launch, &p, SECONDS);
        (void) cublasLtMatmulPreferenceDestroy(wish);
        (void) cublasLtMatrixLayoutDestroy(p.w);
        (void) cublasLtMatrixLayoutDestroy(p.x);
        (void) cublasLtMatrixLayoutDestroy(p.y);
        (void) cublasLtMatmulDescDestroy(p.op);
        return r.usec > 0 ? 2e-6 * (double) m * (double) n * (double) k / r.usec : 0;
}

typedef struct Sum {
        double msec, tera;
} Sum;

static LkConvAxis axis_of(uint64_t size, uint32_t kernel, uint32_t stride, uint32_t before, uint32_t after, LkPad pad) {
        return (LkConvAxis){.size = size, .kernel = kernel, .stride = stride, .dilation = 1, .before = before, .after = after, .pad = pad};
}

/* `count` such layers, to the sum. */
static void bench(const char *name, LkConv a, uint64_t out, unsigned count, bool with_peers, Sum *sum) {
        uint64_t taps = (uint64_t) a.axis[0].kernel * a.axis[1].kernel * a.axis[2].kernel, k = a.channels * taps;
        uint64_t m = lk_conv_size(a.axis) * lk_conv_size(a.axis + 1) * lk_conv_size(a.axis + 2), rows = m < PEER_ROWS ? m : PEER_ROWS;
        double tera = 2e-12 * (double) m * (double) out * (double) k, msec, rate;

        must_be(a.axis[0].size * a.axis[1].size * a.axis[2].size * a.channels * 4 <= X_SIZE && m * out * 4 <= Y_SIZE &&
                        out * k * 4 <= W_SIZE && (!with_peers || rows * k * 4 <= X_SIZE),
                "size");
        a.x = (const float *) (void *) x;
        a.y = (float *) (void *) y;
        a.w = (LkMatrix){.data = w, .type = LK_F32, .rows = out, .cols = k, .row_stride = k * 4, .block_rows = out};
        a.bias = (LkVector){.data = w, .type = LK_F32, .n = out};
        msec = bench_msec(gpu, run_conv, &a, BENCH_SAMPLES, y);
        rate = tera / msec * 1000;
        sum->msec += count * msec;
        sum->tera += count * tera;
        printf("%2u x %-34s %8lu x %5lu x %5lu  %8.3f ms %6.1f TF", count, name, m, out, k, msec, rate);
        if (with_peers && k % 8 == 0 && out % 8 == 0) {
                double f32 = peer_rate(rows, out, k, CUDA_R_32F), bf16 = peer_rate(rows, out, k, CUDA_R_16BF);

                printf("  library f32 %5.1f, ratio %.2f; bf16 %5.0f, ratio %.3f", f32, f32 > 0 ? rate / f32 : 0, bf16,
                        bf16 > 0 ? rate / bf16 : 0);
        }
        printf("\n");
}

typedef enum Kind {
        WHOLE, /* 3 x 3 x 3 */
        DOWN,  /* the same with strides */
        POINT,
} Kind;

/* The encoder: 128 to 1024 channels, two blocks a level; equal layers with their number. */
static const struct {
        const char *name;
        unsigned level, count;
        Kind kind;
        uint64_t in, out;
} encoder[] = {
        {"conv_in", 0, 1, WHOLE, 3, 128},
        {"level 0", 0, 4, WHOLE, 128, 128},
        {"level 0 down", 0, 1, DOWN, 128, 128},
        {"level 1, first", 1, 1, WHOLE, 128, 256},
        {"level 1", 1, 3, WHOLE, 256, 256},
        {"level 1 shortcut", 1, 1, POINT, 128, 256},
        {"level 1 down", 1, 1, DOWN, 256, 256},
        {"level 2", 2, 4, WHOLE, 256, 256},
        {"level 2 down", 2, 1, DOWN, 256, 256},
        {"level 3, first", 3, 1, WHOLE, 256, 512},
        {"level 3", 3, 3, WHOLE, 512, 512},
        {"level 3 shortcut", 3, 1, POINT, 256, 512},
        {"level 3 down", 3, 1, DOWN, 512, 512},
        {"level 4", 4, 4, WHOLE, 512, 512},
        {"level 5, first", 5, 1, WHOLE, 512, 1024},
        {"level 5", 5, 3, WHOLE, 1024, 1024},
        {"level 5 shortcut", 5, 1, POINT, 512, 1024},
        {"conv_out", 5, 1, WHOLE, 1024, 48},
};

/* A tile of 256 x 256 pixels. */
static Sum bench_encoder(uint64_t frames, bool with_peers) {
        static const uint32_t stride_t[LEVELS] = {1, 2, 2, 1, 1, 1}, stride[LEVELS] = {2, 2, 2, 2, 1, 1};
        uint64_t t[LEVELS] = {frames}, side[LEVELS] = {256};
        Sum sum = {0};

        for (unsigned i = 1; i < LEVELS; i++) {
                t[i] = (t[i - 1] + stride_t[i - 1] - 1) / stride_t[i - 1];
                side[i] = side[i - 1] / stride[i - 1];
        }
        for (size_t i = 0; i < sizeof(encoder) / sizeof(*encoder); i++) {
                unsigned l = encoder[i].level;
                LkConv a = {.channels = encoder[i].in};

                if (encoder[i].kind == DOWN) {
                        a.axis[0] = axis_of(t[l], 3, stride_t[l], 2, 0, LK_PAD_ZERO);
                        a.axis[1] = a.axis[2] = axis_of(side[l], 3, stride[l], 0, 1, LK_PAD_REFLECT);
                } else {
                        uint32_t kernel = encoder[i].kind == WHOLE ? 3 : 1;

                        a.axis[0] = axis_of(t[l], kernel, 1, kernel - 1, 0, LK_PAD_ZERO);
                        a.axis[1] = a.axis[2] = axis_of(side[l], kernel, 1, kernel / 2, kernel / 2, LK_PAD_REFLECT);
                }
                bench(encoder[i].name, a, encoder[i].out, encoder[i].count, with_peers, &sum);
        }
        return sum;
}

static void bench_video(void) {
        Sum s;

        printf("video encoder, a tile of 256 x 256, 17 frames\n");
        s = bench_encoder(17, true);
        printf("one: %.1f ms, %.2f TFLOP, %.1f TF; 243 frames of 1344 x 768 (15 clips x 28 tiles): %.1f s\n", s.msec, s.tera,
                s.tera / s.msec * 1000, s.msec * 15 * 28 / 1000);
}

static void bench_image(void) {
        Sum s;

        printf("video encoder, a tile of 256 x 256, one frame\n");
        s = bench_encoder(1, false);
        printf("one: %.1f ms, %.2f TFLOP, %.1f TF; a picture of 1344 x 768 (28 tiles): %.2f s\n", s.msec, s.tera, s.tera / s.msec * 1000,
                s.msec * 28 / 1000);
}

/* Dilation changes nothing in a launch but distances: all have 1 here. */
static void sound(const char *name, uint64_t n, uint64_t in, uint64_t out, uint32_t kernel, uint32_t pad, unsigned count, Sum *sum) {
        LkConv a = {.channels = in};

        a.axis[0] = a.axis[1] = axis_of(1, 1, 1, 0, 0, LK_PAD_ZERO);
        a.axis[2] = axis_of(n, kernel, 1, pad, pad, LK_PAD_ZERO);
        bench(name, a, out, count, false, sum);
}

/* The audio decoder: both channels of 405 latents, which go with 243 frames. */
static void bench_sound(void) {
        static const uint64_t rates[] = {5, 5, 2, 2, 2, 2, 2};
        uint64_t n = 405, channels = 1024;
        Sum s = {0};

        printf("audio decoder, 405 latents\n");
        sound("dec_in_proj", n, 32, 2048, 1, 0, 2, &s);
        sound("conv_pre", n, 2048, 1024, 7, 3, 2, &s);
        for (unsigned i = 0; i < sizeof(rates) / sizeof(*rates); i++) {
                char name[40];

                (void) snprintf(name, sizeof(name), "stage %u up", i);
                sound(name, n, channels, channels / 2 * rates[i], 2, 1, 2, &s);
                n *= rates[i];
                channels /= 2;
                for (uint32_t kernel = 3; kernel <= 11; kernel += 4) {
                        (void) snprintf(name, sizeof(name), "stage %u, kernel %u", i, kernel);
                        sound(name, n, channels, channels, kernel, kernel / 2, 12, &s);
                }
        }
        sound("conv_post", n, channels, 1, 7, 3, 2, &s);
        printf("all: %.1f ms, %.2f TFLOP, %.1f TF\n", s.msec, s.tera, s.tera / s.msec * 1000);
}

int main(int argc, char **argv) {
        static const struct {
                const char *name;
                void (*run)(void);
        } all[] = {{"video", bench_video}, {"image", bench_image}, {"sound", bench_sound}};

        device_open();
        must(cudaFree(NULL), "context");
        must_be(lk_cuda_ops()->context_new(0, &gpu) >= 0, "context");
        good(cublasLtCreate(&lt), "library");
        workspace = device_new(WORKSPACE);
        x = device_new(X_SIZE);
        y = device_new(Y_SIZE);
        w = device_new(W_SIZE);
        /* As f32: numbers of which the upper half is such a bf16. */
        fill_bf16(x, X_SIZE / 2, 1, 1);
        fill_bf16(w, W_SIZE / 2, 0.02f, 2);
        must(cudaDeviceSynchronize(), "fill");

        for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
                if (wanted(argc, argv, all[i].name))
                        all[i].run();
        }
        lk_cuda_ops()->context_free(gpu);
        return 0;
}
