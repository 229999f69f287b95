/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of the backend's attention in the shapes that the model has.
 *
 *     bench-attention
 */

#include <math.h>

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

int main(void) {
        LkContext *c;

        device_open();
        must_be(lk_cuda_ops()->context_new(0, &c) == 0, "context");
        for (unsigned portable = 0; portable < 2; portable++) {
                const char *what = portable ? "denoiser, portable" : "denoiser";

                lk_cuda_attention_set(c, portable);
                measure(c, what, LK_BF16, 7013, 56, 56, 128, false);
                measure(c, what, LK_BF16, 38010, 56, 56, 128, false);
                measure(c, what, LK_BF16, 73686, 56, 56, 128, false);
        }
        lk_cuda_attention_set(c, false);
        measure(c, "denoiser, f16", LK_F16, 7013, 56, 56, 128, false);
        measure(c, "text, causal", LK_BF16, 1409, 64, 8, 128, true);
        measure(c, "text, causal", LK_BF16, 8192, 64, 8, 128, true);
        measure(c, "video decoder", LK_F16, 1797, 28 * 16, 28 * 16, 64, false);
        measure(c, "vision tower", LK_BF16, 4096, 16, 16, 72, false);
        lk_cuda_ops()->context_free(c);
        return 0;
}
