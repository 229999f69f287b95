/* SPDX-License-Identifier: Apache-2.0 */
/* What the row passes of a denoiser's block cost at a whole step's rows, beside a plain copy on the device.
 *
 *     bench-rows [ROWS]
 *
 * Each line: milliseconds (median of 11), GB/s of what has to be read and written, and that against the copy. */

#include <math.h>

#include "tests/gpu/bench.h"

#define HIDDEN UINT64_C(5376)
#define INNER UINT64_C(7168) /* 56 heads of 128 */
#define FFN UINT64_C(14336)
#define PAIRS 48u

typedef struct Data {
        LkContext *c;
        uint64_t m;
        uint8_t *x, *y, *h, *heads, *fc1, *act, *mod, *weight;
        int8_t *q;
        float *scale, *cosines, *sines;
        int32_t *index;
        double copy; /* GB/s */
} Data;

static int run_norm(LkContext *c, const void *a) {
        return lk_cuda_ops()->norm(c, (const LkNorm *) a);
}

static int run_residual(LkContext *c, const void *a) {
        return lk_cuda_ops()->residual(c, (const LkResidual *) a);
}

static int run_qk(LkContext *c, const void *a) {
        return lk_cuda_ops()->qk_norm_rope(c, (const LkQkNormRope *) a);
}

static int run_swiglu(LkContext *c, const void *a) {
        return lk_cuda_ops()->swiglu(c, (const LkSwiglu *) a);
}

static int run_quantise(LkContext *c, const void *a) {
        return lk_cuda_ops()->quantise(c, (const LkQuantise *) a);
}

static int run_convert(LkContext *c, const void *a) {
        return lk_cuda_ops()->convert(c, (const LkConvert *) a);
}

/* bf16 to bf16 is a copy. */
static double measure(const Data *d, const char *what, BenchRun run, const void *args, double bytes) {
        double msec = bench_msec(d->c, run, args, BENCH_SAMPLES, d->x), rate = bytes * (double) d->m / msec / 1e6;

        printf("%-58s %7.3f ms %6.0f GB/s  %.2f\n", what, msec, rate, d->copy > 0 ? rate / d->copy : 1.0);
        return msec;
}

static void data_new(Data *d, uint64_t m) {
        *d = (Data){ .m = m };
        must_be(lk_cuda_ops()->context_new(0, &d->c) == 0, "context");
        d->x = device_new(m * HIDDEN * 2);
        d->y = device_new(m * HIDDEN * 2);
        d->h = device_new(m * HIDDEN * 2);
        d->heads = device_new(m * INNER * 2);
        d->fc1 = device_new(m * 2 * FFN * 2);
        d->act = device_new(m * FFN * 2);
        d->q = device_new(m * FFN);
        d->mod = device_new(3 * 6 * HIDDEN * 2);
        d->weight = device_new(INNER * 2);
        d->scale = device_new(m * 4);
        d->cosines = device_new(m * PAIRS * 4);
        d->sines = device_new(m * PAIRS * 4);
        d->index = device_new(m * 4);
        fill_bf16(d->x, m * HIDDEN, 1, 1);
        fill_bf16(d->y, m * HIDDEN, 1, 2);
        fill_bf16(d->heads, m * INNER, 1, 3);
        fill_bf16(d->fc1, m * 2 * FFN, 1, 4);
        fill_bf16(d->mod, 3 * 6 * HIDDEN, 0.2f, 5);
        fill_bf16(d->weight, INNER, 1, 6);
        must(cudaMemset(d->cosines, 0, m * PAIRS * 4), "cosines");
        must(cudaMemset(d->sines, 0, m * PAIRS * 4), "sines");

        int32_t *index = malloc(m * 4);

        must_be(index != NULL, "memory");
        for (uint64_t i = 0; i < m; i++)
                index[i] = i < 1000 ? 0 : i < 2500 ? 1 : 2;
        must(cudaMemcpy(d->index, index, m * 4, cudaMemcpyHostToDevice), "index");
        must(cudaDeviceSynchronize(), "data");
        free(index);
}

int main(int argc, char **argv) {
        Data d;
        double bf16 = 0, int8 = 0, one;

        device_open();
        data_new(&d, argc > 1 ? strtoull(argv[1], NULL, 10) : 75794);
        printf("# %llu rows, hidden %llu, inner %llu, ffn %llu\n", (unsigned long long) d.m, (unsigned long long) HIDDEN,
                (unsigned long long) INNER, (unsigned long long) FFN);

        const LkConvert copy = {.m = d.m,
                .n = FFN,
                .x = d.fc1,
                .x_type = LK_BF16,
                .x_ld = FFN,
                .y = d.act,
                .y_type = LK_BF16,
                .y_ld = FFN};
        const LkConvert widen = {.m = d.m,
                .n = HIDDEN,
                .x = d.x,
                .x_type = LK_BF16,
                .x_ld = HIDDEN,
                .y = d.fc1,
                .y_type = LK_F32,
                .y_ld = HIDDEN};
        const LkResidual add = { .type = LK_BF16, .m = d.m, .n = HIDDEN, .x = d.x, .x_ld = HIDDEN, .y = d.y, .y_ld = HIDDEN, .mod = d.mod,
                .mod_ld = 6 * HIDDEN, .mod_index = d.index, .gate_at = 2 * HIDDEN };
        const LkQuantise rows = { .rotation = 256, .q = d.q, .q_ld = HIDDEN, .scale = d.scale };
        const LkQuantise heads = {.x_type = LK_BF16,
                .m = d.m,
                .k = INNER,
                .x = d.heads,
                .x_ld = INNER,
                .rotation = 256,
                .q = d.q,
                .q_ld = INNER,
                .scale = d.scale};
        const LkQuantise gated = {.x_type = LK_BF16,
                .m = d.m,
                .k = FFN,
                .x = d.fc1,
                .x_ld = 2 * FFN,
                .up = d.fc1 + FFN * 2,
                .up_ld = 2 * FFN,
                .rotation = 256,
                .q = d.q,
                .q_ld = FFN,
                .scale = d.scale};
        const LkNorm norm = { .type = LK_BF16, .m = d.m, .n = HIDDEN, .x = d.x, .x_ld = HIDDEN, .weight = { d.weight, LK_BF16, HIDDEN },
                .eps = 1e-6f, .mod = d.mod, .mod_ld = 6 * HIDDEN, .mod_index = d.index, .scale_at = HIDDEN, .y = d.h, .y_ld = HIDDEN };
        const LkQkNormRope qk = { .type = LK_BF16, .m = d.m, .heads = 56, .head_dim = 128, .x = d.heads, .x_ld = INNER,
                .weight = { d.weight, LK_BF16, 128 }, .eps = 1e-6f, .cos = d.cosines, .sin = d.sines, .rope_dims = PAIRS };
        const LkSwiglu swiglu = {.type = LK_BF16,
                .m = d.m,
                .n = FFN,
                .gate = d.fc1,
                .gate_ld = 2 * FFN,
                .up = d.fc1 + FFN * 2,
                .up_ld = 2 * FFN,
                .y = d.act,
                .y_ld = FFN};
        LkNorm norm_add = norm, norm_q = norm, norm_add_q = norm;

        norm_add.add = norm_add_q.add = &add;
        norm_q.quantise = norm_add_q.quantise = &rows;
        norm_q.y = norm_add_q.y = NULL;

        one = bench_msec(d.c, run_convert, &copy, BENCH_SAMPLES, d.x);
        d.copy = 4.0 * FFN * (double) d.m / one / 1e6;
        printf("%-58s %7.3f ms %6.0f GB/s  1.00\n", "a plain copy", one, d.copy);
        measure(&d, "norm, modulated", run_norm, &norm, 4.0 * HIDDEN);
        measure(&d, "residual", run_residual, &add, 6.0 * HIDDEN);
        measure(&d, "bf16 to f32", run_convert, &widen, 6.0 * HIDDEN);
        measure(&d, "norm, int8 rows", run_norm, &norm_q, 3.0 * HIDDEN);

        one = measure(&d, "q or k: norm and rotation in place", run_qk, &qk, 4.0 * INNER + 8.0 * PAIRS);
        bf16 += 2 * one;
        int8 += 2 * one;
        bf16 += 2 * measure(&d, "residual, norm", run_norm, &norm_add, 8.0 * HIDDEN);
        bf16 += measure(&d, "silu(gate) * up", run_swiglu, &swiglu, 6.0 * FFN);
        int8 += 2 * measure(&d, "residual, norm, int8 rows", run_norm, &norm_add_q, 7.0 * HIDDEN);
        int8 += measure(&d, "attention's result to int8 rows", run_quantise, &heads, 3.0 * INNER);
        int8 += measure(&d, "silu(gate) * up to int8 rows", run_quantise, &gated, 5.0 * FFN);
        printf("a block in bf16: 2 x (q or k), 2 x (residual, norm), silu * up: %.3f ms\n", bf16);
        printf("a block in int8: 2 x (q or k), 2 x (residual, norm, int8), 2 x to int8: %.3f ms\n", int8);
        lk_cuda_ops()->context_free(d.c);
        return 0;
}
