/* SPDX-License-Identifier: Apache-2.0 */
/* What the row passes of a denoiser's block cost at a whole step's rows, beside what the memory alone would take.
 *
 *     bench-rows [ROWS [GB/S]]
 *
 * GB/S: what a stream of two reads and a write reaches on the device, 4350 on an H200 (tests/bench/RESULTS.md). Each line: milliseconds
 * (median of 11), GB/s of what has to be read and written, the floor that is bytes / GB/S, and what is above it. Then the sums of a block,
 * in bf16 and in int8: at most 4 ms for 75,794 rows, more or fewer in proportion. Status 1: a sum is above that. */

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
        double stream; /* GB/s */
} Data;

enum { ALONE, BF16, INT8, BOTH, KINDS }; /* the blocks that have a pass */

/* Sums of the passes of a block. */
typedef struct Block {
        double msec, floor;
} Block;

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

/* One pass; `times` of it to the blocks that have it. bytes: of a row. */
static void measure(const Data *d, const char *what, BenchRun run, const void *args, double bytes, int kind, unsigned times,
        Block *blocks) {
        const double msec = bench_msec(d->c, run, args, BENCH_SAMPLES, d->x), moved = bytes * (double) d->m;
        const double floor = moved / d->stream / 1e6;

        printf("%-42s %7.3f ms %6.0f GB/s, floor %6.3f ms, %5.3f of it\n", what, msec, moved / msec / 1e6, floor, msec / floor);
        for (int i = BF16; i <= INT8; i++)
                if (kind & i) {
                        blocks[i].msec += times * msec;
                        blocks[i].floor += times * floor;
                }
}

/* Prints a block's sum; whether it is low enough. */
static bool block_holds(const Data *d, const char *what, const Block *b) {
        const double limit = 4.0 * (double) d->m / 75794;

        printf("a block in %s: %.3f ms, floor %.3f ms (%.3f of it), limit %.3f ms: %s\n", what, b->msec, b->floor,
                b->msec / b->floor, limit, b->msec <= limit ? "holds" : "DOES NOT HOLD");
        return b->msec <= limit;
}

static void data_new(Data *d, uint64_t m, double stream) {
        *d = (Data){ .m = m, .stream = stream };
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
        Block blocks[KINDS] = { 0 };
        bool holds;

        device_open();
        data_new(&d, argc > 1 ? strtoull(argv[1], NULL, 10) : 75794, argc > 2 ? strtod(argv[2], NULL) : 4350);
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
                .y = d.act, /* not what another pass reads: the gates have to stay bell-shaped */
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

        measure(&d, "a plain copy", run_convert, &copy, 4.0 * FFN, ALONE, 0, blocks);
        measure(&d, "norm, modulated", run_norm, &norm, 4.0 * HIDDEN, ALONE, 0, blocks);
        measure(&d, "residual", run_residual, &add, 6.0 * HIDDEN, ALONE, 0, blocks);
        measure(&d, "bf16 to f32", run_convert, &widen, 6.0 * HIDDEN, ALONE, 0, blocks);
        measure(&d, "norm, int8 rows", run_norm, &norm_q, 3.0 * HIDDEN, ALONE, 0, blocks);
        printf("the passes of a block: (q or k) and (residual, norm) twice, the others once\n");
        measure(&d, "q or k: norm and rotation in place", run_qk, &qk, 4.0 * INNER + 8.0 * PAIRS, BOTH, 2, blocks);
        measure(&d, "bf16: residual, norm", run_norm, &norm_add, 8.0 * HIDDEN, BF16, 2, blocks);
        measure(&d, "bf16: silu(gate) * up", run_swiglu, &swiglu, 6.0 * FFN, BF16, 1, blocks);
        measure(&d, "int8: residual, norm, int8 rows", run_norm, &norm_add_q, 7.0 * HIDDEN, INT8, 2, blocks);
        measure(&d, "int8: attention's result to int8 rows", run_quantise, &heads, 3.0 * INNER, INT8, 1, blocks);
        measure(&d, "int8: silu(gate) * up to int8 rows", run_quantise, &gated, 5.0 * FFN, INT8, 1, blocks);
        holds = block_holds(&d, "bf16", &blocks[BF16]);
        holds = block_holds(&d, "int8", &blocks[INT8]) && holds;
        lk_cuda_ops()->context_free(d.c);
        return holds ? 0 : 1;
}
