/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of the backend's attention in the shapes that the model has.
 *
 *     bench-attention [int8]
 */

#include <math.h>
#include <string.h>

#include "tests/gpu/bench.h"

static int run_attention(LkContext *c, const void *a) {
        return lk_cuda_ops()->attention(c, (const LkAttention *) a);
}

static void measure(LkContext *c, const char *what, LkType t, uint64_t rows, uint32_t heads, uint32_t kv_heads, uint32_t dim, bool causal) {
        const uint64_t n = rows * heads * dim, nk = rows * kv_heads * dim;
        uint8_t *q = device_new(2 * n), *k = device_new(2 * nk), *v = device_new(2 * nk), *o = device_new(2 * n);
        LkAttention a = {.type = t,
                .n_q = rows,
                .n_k = rows,
                .heads = heads,
                .kv_heads = kv_heads,
                .head_dim = dim,
                .causal = causal,
                .scale = 1 / sqrtf((float) dim),
                .q = q,
                .k = k,
                .v = v,
                .o = o,
                .q_ld = (uint64_t) heads * dim,
                .k_ld = (uint64_t) kv_heads * dim,
                .v_ld = (uint64_t) kv_heads * dim,
                .o_ld = (uint64_t) heads * dim};
        double msec, work = 4.0 * (double) rows * (double) rows * heads * dim * (causal ? 0.5 : 1);

        /* as f16 these bits are numbers of 1 to 4, which costs what others cost */
        fill_bf16(q, n, 2, 1);
        fill_bf16(k, nk, 2, 2);
        fill_bf16(v, nk, 1, 3);
        must(cudaDeviceSynchronize(), "data");
        msec = bench_msec(c, run_attention, &a, rows > 50000 ? 5 : BENCH_SAMPLES, o);
        printf("%-34s %6llu rows, %2u heads (%u) of %3u: %9.3f ms %5.0f TF\n", what, (unsigned long long) rows, heads, kv_heads, dim, msec,
                work / msec / 1e9);
        fflush(stdout);
        device_free(q);
        device_free(k);
        device_free(v);
        device_free(o);
}

/* Attention over int8 with all that it needs, and its parts. */
typedef struct Int8 {
        LkQuantiseQueries queries;
        LkQuantiseKeys keys;
        LkAttentionI8 a;
} Int8;

static int run_quantise(LkContext *c, const void *p) {
        const Int8 *a = p;
        int r = lk_cuda_ops()->quantise_queries(c, &a->queries);

        return r < 0 ? r : lk_cuda_ops()->quantise_keys(c, &a->keys);
}

static int run_i8(LkContext *c, const void *p) {
        return lk_cuda_ops()->attention_i8(c, &((const Int8 *) p)->a);
}

static int run_all(LkContext *c, const void *p) {
        int r = run_quantise(c, p);

        return r < 0 ? r : run_i8(c, p);
}

static Int8 int8_new(uint64_t rows, uint32_t heads) {
        const uint64_t width = (uint64_t) heads * LK_I8_DIM, n = rows * width, tiles = lk_i8_tiles(rows) * heads;
        uint8_t *q = device_new(2 * n), *k = device_new(2 * n), *v = device_new(2 * n);
        const LkKeysI8 to = {.n = rows,
                .heads = heads,
                .offset = device_new(width * 4),
                .k = device_new(tiles * LK_I8_KEYS * LK_I8_DIM),
                .k_scale = device_new(tiles * 4),
                .v = device_new(tiles * LK_I8_KEYS * LK_I8_DIM),
                .v_scale = device_new(tiles * LK_I8_DIM * 4)};
        Int8 a = {.queries = {.type = LK_BF16, .n = rows, .heads = heads, .x = q, .x_ld = width, .q = device_new(n), .q_ld = width},
                .keys = {.type = LK_BF16, .k = k, .v = v, .k_ld = width, .v_ld = width, .to = to}};

        a.queries.scale = device_new(rows * heads * 4);
        a.a = (LkAttentionI8){.n_q = rows,
                .scale = 1 / sqrtf((float) LK_I8_DIM),
                .q = a.queries.q,
                .q_scale = a.queries.scale,
                .q_ld = width,
                .keys = to,
                .o_type = LK_BF16,
                .o = device_new(2 * n),
                .o_ld = width};
        fill_bf16(q, n, 1, 1);
        fill_bf16(k, n, 1, 2);
        fill_bf16(v, n, 1, 3);
        must(cudaDeviceSynchronize(), "data");
        return a;
}

static void int8_free(const Int8 *a) {
        const LkKeysI8 *to = &a->a.keys;
        void *all[] = {(void *) a->queries.x, a->queries.q, a->queries.scale, (void *) a->keys.k, (void *) a->keys.v, to->offset, to->k,
                to->k_scale, to->v, to->v_scale, a->a.o};

        for (unsigned i = 0; i < sizeof(all) / sizeof(*all); i++)
                device_free(all[i]);
}

/* The public kernel's rate on an H200 at 75,794 rows, quantise passes included (tests/bench/RESULTS.md). */
#define PEER_I8 472.0

static void measure_i8(LkContext *c, const char *what, uint64_t rows, uint32_t heads) {
        const double work = 4.0 * (double) rows * (double) rows * heads * LK_I8_DIM;
        const unsigned samples = rows > 50000 ? 5 : BENCH_SAMPLES;
        Int8 a = int8_new(rows, heads);
        double quantise = bench_msec(c, run_quantise, &a, BENCH_SAMPLES, a.a.o), kernel = bench_msec(c, run_i8, &a, samples, a.a.o);
        double all = bench_msec(c, run_all, &a, samples, a.a.o);

        printf("%-34s %6llu rows, %2u heads: quantise %.3f ms, kernel %.3f ms %.0f TOP/s, both %.3f ms %.0f TOP/s, %.2f of %.0f\n", what,
                (unsigned long long) rows, heads, quantise, kernel, work / kernel / 1e9, all, work / all / 1e9, work / all / 1e9 / PEER_I8,
                PEER_I8);
        fflush(stdout);
        int8_free(&a);
}

static void measure_all_i8(LkContext *c) {
        for (unsigned portable = 0; portable < 2; portable++) {
                const char *what = portable ? "denoiser, int8, portable" : "denoiser, int8";

                lk_cuda_attention_set(c, portable ? LK_CUDA_ATTENTION_PORTABLE : LK_CUDA_ATTENTION_BEST);
                measure_i8(c, what, 7013, 56);
                measure_i8(c, what, 38010, 56);
                measure_i8(c, what, 73686, 56);
                measure_i8(c, what, 73686, 7);
        }
        lk_cuda_attention_set(c, LK_CUDA_ATTENTION_BEST);
}

int main(int argc, char **argv) {
        LkContext *c;

        device_open();
        must_be(lk_cuda_ops()->context_new(0, &c) == 0, "context");
        measure_all_i8(c);
        if (argc > 1 && strcmp(argv[1], "int8") == 0) {
                lk_cuda_ops()->context_free(c);
                return 0;
        }
        for (unsigned portable = 0; portable < 2; portable++) {
                const char *what = portable ? "denoiser, portable" : "denoiser";

                lk_cuda_attention_set(c, portable ? LK_CUDA_ATTENTION_PORTABLE : LK_CUDA_ATTENTION_BEST);
                measure(c, what, LK_BF16, 7013, 56, 56, 128, false);
                measure(c, what, LK_BF16, 38010, 56, 56, 128, false);
                measure(c, what, LK_BF16, 73686, 56, 56, 128, false);
        }
        lk_cuda_attention_set(c, LK_CUDA_ATTENTION_BEST);
        measure(c, "denoiser, f16", LK_F16, 7013, 56, 56, 128, false);
        measure(c, "text, causal", LK_BF16, 1409, 64, 8, 128, true);
        measure(c, "text, causal", LK_BF16, 8192, 64, 8, 128, true);
        measure(c, "video decoder", LK_F16, 1797, 28 * 16, 28 * 16, 64, false);
        measure(c, "vision tower", LK_BF16, 4096, 16, 16, 72, false);
        lk_cuda_ops()->context_free(c);
        return 0;
}
