/* SPDX-License-Identifier: Apache-2.0 */
/* Large requests: arrays whose rows lie beyond elements 2^31 and 2^32, in memory of which only the rows
 * themselves exist, and calls of 200,000 rows. Both have the bits of the same rows close together. */

#include "tests/unit/kernels/kernels-test.h"

#include <sys/mman.h>

#define ROWS 5
#define WIDTH 48                            /* numbers of a row */
#define LD (UINT64_C(1) << 30)              /* elements: row 4 begins at 2^32 */
#define LD_BYTES ((UINT64_C(1) << 31) + 64) /* of arrays of bytes, and of matrices: row 2 behind 2^32 */
#define MANY 200000

/* An array as the op sees it in a dense call, and the same rows far apart. */
typedef struct Pair {
        uint8_t *near, *far;
        uint64_t n, row, ld; /* rows, bytes of one, bytes from one to the next of `far` */
} Pair;

static Pair pair_new(uint64_t n, uint64_t row, uint64_t ld) {
        Pair p = {.near = allocate(n * row), .n = n, .row = row, .ld = ld};

        p.far = mmap(
                NULL, n * ld, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p.far == MAP_FAILED)
                skip(); /* the address space is limited here */
        (void) madvise(p.far, n * ld, MADV_NOHUGEPAGE);
        return p;
}

static void pair_done(Pair *p) {
        free(p->near);
        if (p->far)
                (void) munmap(p->far, p->n * p->ld);
}

#define PAIR CLEANUP(pair_done) Pair

static void pair_copy(const Pair *p) {
        for (uint64_t i = 0; i < p->n; i++)
                memcpy(p->far + i * p->ld, p->near + i * p->row, p->row);
}

/* [ROWS, WIDTH] random numbers of type t */
static Pair pair_numbers(LkType t, uint64_t seed) {
        Pair p = pair_new(ROWS, WIDTH * lk_type_size(t), LD * lk_type_size(t));

        for (uint64_t i = 0; i < ROWS * WIDTH; i++)
                put(p.near, t, i, random_normal(&seed));
        pair_copy(&p);
        return p;
}

/* The same of bytes. */
static Pair pair_bytes(uint64_t seed) {
        Pair p = pair_new(ROWS, WIDTH, LD_BYTES);

        for (uint64_t i = 0; i < ROWS * WIDTH; i++)
                p.near[i] = (uint8_t) random_u64(&seed);
        pair_copy(&p);
        return p;
}

/* [ROWS, width] of results: a pattern that no result has */
static Pair pair_results(LkType t, uint64_t width) {
        Pair p = pair_new(ROWS, width * lk_type_size(t), LD * lk_type_size(t));

        memset(p.near, 0x5a, ROWS * p.row);
        return p;
}

static void pair_check(const Pair *p) {
        for (uint64_t i = 0; i < p->n; i++)
                if (memcmp(p->near + i * p->row, p->far + i * p->ld, p->row) != 0)
                        fail_msg("row %llu has other bits far away", (unsigned long long) i);
}

static LkMatrix matrix_near(const Pair *p, LkType t) {
        return (LkMatrix){.data = p->near,
                .type = t,
                .rows = ROWS,
                .cols = WIDTH,
                .row_stride = p->row,
                .block_rows = ROWS,
                .block_stride = ROWS * p->row};
}

static LkMatrix matrix_far(const Pair *p, LkType t) {
        LkMatrix w = matrix_near(p, t);

        w.data = p->far;
        w.row_stride = p->ld;
        w.block_stride = ROWS * p->ld;
        return w;
}

static void each_isa(void (*fn)(const LkOps *ops, LkContext *c)) {
        for (unsigned i = 0; i < ISAS; i++) {
                LkContext *c = NULL;
                const LkOps *ops = open_isa(all_isas[i], 2, &c);

                if (!ops)
                        continue;
                fn(ops, c);
                assert_null(ops->context_free(c));
        }
}

static const LkType activations[] = {LK_F32, LK_BF16};

static void gemm_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR x = pair_numbers(t, 1), w = pair_numbers(LK_BF16, 2), y = pair_results(t, ROWS);
        LkGemm a = {.m = ROWS,
                .x = x.near,
                .x_type = t,
                .x_ld = WIDTH,
                .w = matrix_near(&w, LK_BF16),
                .y = y.near,
                .y_type = t,
                .y_ld = ROWS};

        assert_int_equal(ops->gemm(c, &a), 0);
        a.x = x.far;
        a.w = matrix_far(&w, LK_BF16);
        a.y = y.far;
        a.x_ld = a.y_ld = LD;
        assert_int_equal(ops->gemm(c, &a), 0);
        pair_check(&y);

        /* the same rows as blocks of one */
        a.w.block_rows = 1;
        a.w.block_stride = w.ld;
        memset(y.far, 0, y.row);
        assert_int_equal(ops->gemm(c, &a), 0);
        pair_check(&y);
}

static void gemm_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                gemm_of(ops, c, activations[i]);
}

static void gemm_far_rows_same_bits(void **state) {
        each_isa(gemm_on);
}

static void gemm_i8_on(const LkOps *ops, LkContext *c) {
        static const float scale[ROWS] = {0.5f, 0.25f, 0.125f, 2, 3};
        PAIR x = pair_bytes(3), w = pair_bytes(4), y = pair_results(LK_BF16, ROWS);
        LkGemmI8 a = {.m = ROWS,
                .x = (const int8_t *) x.near,
                .x_ld = WIDTH,
                .x_scale = scale,
                .w = matrix_near(&w, LK_I8),
                .y = y.near,
                .y_type = LK_BF16,
                .y_ld = ROWS};

        a.w.quant = (LkQuant){.scale = scale, .scale_stride = sizeof(float)};
        assert_int_equal(ops->gemm_i8(c, &a), 0);
        a.w = matrix_far(&w, LK_I8);
        a.w.quant = (LkQuant){.scale = scale, .scale_stride = sizeof(float)};
        a.x = (const int8_t *) x.far;
        a.y = y.far;
        a.x_ld = LD_BYTES;
        a.y_ld = LD;
        assert_int_equal(ops->gemm_i8(c, &a), 0);
        pair_check(&y);
}

static void gemm_i8_far_rows_same_bits(void **state) {
        each_isa(gemm_i8_on);
}

static void dequantise_on(const LkOps *ops, LkContext *c) {
        static const float scale[ROWS] = {0.5f, 0.25f, 0.125f, 2, 3};
        PAIR w = pair_bytes(5), y = pair_results(LK_F32, WIDTH);
        LkDequantise a = {.w = matrix_near(&w, LK_I8), .y = (float *) y.near, .y_ld = WIDTH};

        a.w.quant = (LkQuant){.scale = scale, .scale_stride = sizeof(float), .rotation = 16};
        assert_int_equal(ops->dequantise(c, &a), 0);
        a.w.data = w.far;
        a.w.row_stride = w.ld;
        a.w.block_stride = ROWS * w.ld;
        a.y = (float *) y.far;
        a.y_ld = LD;
        assert_int_equal(ops->dequantise(c, &a), 0);
        pair_check(&y);
}

static void dequantise_far_rows_same_bits(void **state) {
        each_isa(dequantise_on);
}

static void quantise_on(const LkOps *ops, LkContext *c) {
        PAIR x = pair_numbers(LK_BF16, 6), up = pair_numbers(LK_BF16, 7), q = pair_bytes(8);
        float scale[ROWS], far_scale[ROWS];
        LkQuantise a = {.x_type = LK_BF16,
                .m = ROWS,
                .k = WIDTH,
                .x = x.near,
                .x_ld = WIDTH,
                .up = up.near,
                .up_ld = WIDTH,
                .rotation = 16,
                .q = (int8_t *) q.near,
                .q_ld = WIDTH,
                .scale = scale};

        assert_int_equal(ops->quantise(c, &a), 0);
        a.x = x.far;
        a.up = up.far;
        a.q = (int8_t *) q.far;
        a.x_ld = a.up_ld = LD;
        a.q_ld = LD_BYTES;
        a.scale = far_scale;
        assert_int_equal(ops->quantise(c, &a), 0);
        pair_check(&q);
        assert_memory_equal(scale, far_scale, sizeof(scale));
}

static void quantise_far_rows_same_bits(void **state) {
        each_isa(quantise_on);
}

static void attention_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR q = pair_numbers(t, 9), k = pair_numbers(t, 10), v = pair_numbers(t, 11),
             o = pair_results(t, WIDTH);
        LkAttention a = {.type = t,
                .n_q = ROWS,
                .n_k = ROWS,
                .heads = 2,
                .head_dim = WIDTH / 2,
                .scale = 0.2f,
                .q = q.near,
                .k = k.near,
                .v = v.near,
                .o = o.near,
                .q_ld = WIDTH,
                .k_ld = WIDTH,
                .v_ld = WIDTH,
                .o_ld = WIDTH};

        assert_int_equal(ops->attention(c, &a), 0);
        a.q = q.far;
        a.k = k.far;
        a.v = v.far;
        a.o = o.far;
        a.q_ld = a.k_ld = a.v_ld = a.o_ld = LD;
        assert_int_equal(ops->attention(c, &a), 0);
        pair_check(&o);
}

static void attention_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                attention_of(ops, c, activations[i]);
}

static void attention_far_rows_same_bits(void **state) {
        each_isa(attention_on);
}

static const int32_t mod_rows[ROWS] = {4, 0, 2, 1, 3};

static void norm_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR x = pair_numbers(t, 12), mod = pair_numbers(t, 13), y = pair_results(t, WIDTH / 2);
        static const float weight[WIDTH / 2] = {[0 ... WIDTH / 2 - 1] = 1.25f};
        LkNorm a = {.type = t,
                .m = ROWS,
                .n = WIDTH / 2,
                .x = x.near,
                .x_ld = WIDTH,
                .weight = {weight, LK_F32, WIDTH / 2},
                .eps = 1e-5f,
                .mod = mod.near,
                .mod_ld = WIDTH,
                .mod_index = mod_rows,
                .shift_at = 0,
                .scale_at = WIDTH / 2,
                .y = y.near,
                .y_ld = WIDTH / 2};

        assert_int_equal(ops->norm(c, &a), 0);
        a.x = x.far;
        a.mod = mod.far;
        a.y = y.far;
        a.x_ld = a.mod_ld = a.y_ld = LD;
        assert_int_equal(ops->norm(c, &a), 0);
        pair_check(&y);
}

static void norm_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                norm_of(ops, c, activations[i]);
}

static void norm_far_rows_same_bits(void **state) {
        each_isa(norm_on);
}

static void residual_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR x = pair_numbers(t, 14), y = pair_numbers(t, 15), mod = pair_numbers(t, 16);
        LkResidual a = {.type = t,
                .m = ROWS,
                .n = WIDTH,
                .x = x.near,
                .x_ld = WIDTH,
                .y = y.near,
                .y_ld = WIDTH,
                .mod = mod.near,
                .mod_ld = WIDTH,
                .mod_index = mod_rows};

        assert_int_equal(ops->residual(c, &a), 0);
        a.x = x.far;
        a.y = y.far;
        a.mod = mod.far;
        a.x_ld = a.y_ld = a.mod_ld = LD;
        assert_int_equal(ops->residual(c, &a), 0);
        pair_check(&x);
}

static void residual_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                residual_of(ops, c, activations[i]);
}

static void residual_far_rows_same_bits(void **state) {
        each_isa(residual_on);
}

static void swiglu_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR gate = pair_numbers(t, 17), up = pair_numbers(t, 18), y = pair_results(t, WIDTH);
        LkSwiglu a = {.type = t,
                .m = ROWS,
                .n = WIDTH,
                .gate = gate.near,
                .up = up.near,
                .gate_ld = WIDTH,
                .up_ld = WIDTH,
                .y = y.near,
                .y_ld = WIDTH};

        assert_int_equal(ops->swiglu(c, &a), 0);
        a.gate = gate.far;
        a.up = up.far;
        a.y = y.far;
        a.gate_ld = a.up_ld = a.y_ld = LD;
        assert_int_equal(ops->swiglu(c, &a), 0);
        pair_check(&y);
}

static void swiglu_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                swiglu_of(ops, c, activations[i]);
}

static void swiglu_far_rows_same_bits(void **state) {
        each_isa(swiglu_on);
}

static void convert_of(const LkOps *ops, LkContext *c, LkType from, LkType to) {
        PAIR x = pair_numbers(from, 19), y = pair_results(to, WIDTH);
        LkConvert a = {.m = ROWS,
                .n = WIDTH,
                .x = x.near,
                .x_type = from,
                .x_ld = WIDTH,
                .y = y.near,
                .y_type = to,
                .y_ld = WIDTH};

        assert_int_equal(ops->convert(c, &a), 0);
        a.x = x.far;
        a.y = y.far;
        a.x_ld = a.y_ld = LD;
        assert_int_equal(ops->convert(c, &a), 0);
        pair_check(&y);
}

static void convert_on(const LkOps *ops, LkContext *c) {
        convert_of(ops, c, LK_F32, LK_BF16);
        convert_of(ops, c, LK_BF16, LK_F32);
}

static void convert_far_rows_same_bits(void **state) {
        each_isa(convert_on);
}

static void qk_norm_rope_of(const LkOps *ops, LkContext *c, LkType t) {
        PAIR x = pair_numbers(t, 20);
        static const float weight[WIDTH / 2] = {[0 ... WIDTH / 2 - 1] = 1.25f};
        float cosine[ROWS * 8], sine[ROWS * 8];
        LkQkNormRope a = {.type = t,
                .m = ROWS,
                .heads = 2,
                .head_dim = WIDTH / 2,
                .x = x.near,
                .x_ld = WIDTH,
                .weight = {weight, LK_F32, WIDTH / 2},
                .eps = 1e-5f,
                .cos = cosine,
                .sin = sine,
                .rope_dims = 8};

        for (int i = 0; i < ROWS * 8; i++) {
                cosine[i] = 0.75f;
                sine[i] = -0.25f + 0.125f * (float) (i % 3);
        }
        assert_int_equal(ops->qk_norm_rope(c, &a), 0);
        a.x = x.far;
        a.x_ld = LD;
        assert_int_equal(ops->qk_norm_rope(c, &a), 0);
        pair_check(&x);
}

static void qk_norm_rope_on(const LkOps *ops, LkContext *c) {
        for (size_t i = 0; i < ELEMENTSOF(activations); i++)
                qk_norm_rope_of(ops, c, activations[i]);
}

static void qk_norm_rope_far_rows_same_bits(void **state) {
        each_isa(qk_norm_rope_on);
}

/* 200,000 rows in a call: the last ones as in a call of their own. */
static void rows_of_a_large_request_same_bits(void **state) {
        LkContext *c = NULL;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);
        uint64_t seed = 21, last = MANY - 3;
        CLEANUP_FREE uint16_t *x = random_aligned(MANY * 16, LK_BF16, 1, &seed),
                              *y = guarded(MANY * 8, LK_BF16), *o = guarded(MANY * 16, LK_BF16);
        CLEANUP_FREE uint16_t *w = random_aligned(8 * 16, LK_BF16, 1, &seed);
        uint16_t y_last[3 * 8], o_last[3 * 16];
        LkGemm g = {.m = MANY,
                .x = x,
                .x_type = LK_BF16,
                .x_ld = 16,
                .w = {.data = w,
                        .type = LK_BF16,
                        .rows = 8,
                        .cols = 16,
                        .row_stride = 32,
                        .block_rows = 8,
                        .block_stride = 256},
                .y = y,
                .y_type = LK_BF16,
                .y_ld = 8};
        LkAttention a = {.type = LK_BF16,
                .n_q = MANY,
                .n_k = 70,
                .heads = 2,
                .head_dim = 8,
                .scale = 1,
                .q = x,
                .k = x,
                .v = x,
                .o = o,
                .q_ld = 16,
                .k_ld = 16,
                .v_ld = 16,
                .o_ld = 16};

        assert_int_equal(ops->gemm(c, &g), 0);
        assert_int_equal(ops->attention(c, &a), 0);
        g.m = a.n_q = 3;
        g.x = a.q = x + last * 16;
        g.y = y_last;
        a.o = o_last;
        assert_int_equal(ops->gemm(c, &g), 0);
        assert_int_equal(ops->attention(c, &a), 0);
        assert_memory_equal(y + last * 8, y_last, sizeof(y_last));
        assert_memory_equal(o + last * 16, o_last, sizeof(o_last));
        assert_null(ops->context_free(c));
}

/* 200,000 keys: one row against double precision. */
static void keys_of_a_large_request_are_all_seen(void **state) {
        LkContext *c = NULL;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);
        uint64_t seed = 22;
        CLEANUP_FREE float *k = random_aligned(MANY * 8, LK_F32, 1, &seed),
                           *v = random_aligned(MANY * 8, LK_F32, 1, &seed);
        float q[8] = {1, -1, 0.5f, 0.25f, 0, 0.75f, -0.5f, 1}, o[8];
        double sum = 0, expected[8] = {};
        LkAttention a = {.type = LK_F32,
                .n_q = 1,
                .n_k = MANY,
                .heads = 1,
                .head_dim = 8,
                .scale = 0.5f,
                .q = q,
                .k = k,
                .v = v,
                .o = o,
                .q_ld = 8,
                .k_ld = 8,
                .v_ld = 8,
                .o_ld = 8};

        for (uint64_t i = MANY - 50; i < MANY; i++) /* the last keys count for something */
                for (int d = 0; d < 8; d++)
                        k[i * 8 + (uint64_t) d] = 5 * q[d];
        for (uint64_t i = 0; i < MANY; i++) {
                double dot = 0, p;

                for (int d = 0; d < 8; d++)
                        dot += (double) q[d] * (double) k[i * 8 + (uint64_t) d];
                p = exp(0.5 * dot - 9);
                sum += p;
                for (int d = 0; d < 8; d++)
                        expected[d] += p * (double) v[i * 8 + (uint64_t) d];
        }
        for (int d = 0; d < 8; d++)
                expected[d] /= sum;
        assert_int_equal(ops->attention(c, &a), 0);
        assert_true(relative_l2(o, LK_F32, 8, expected, 1, 8) < 1e-5);
        assert_null(ops->context_free(c));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(gemm_far_rows_same_bits),
                cmocka_unit_test(gemm_i8_far_rows_same_bits),
                cmocka_unit_test(dequantise_far_rows_same_bits),
                cmocka_unit_test(quantise_far_rows_same_bits),
                cmocka_unit_test(attention_far_rows_same_bits),
                cmocka_unit_test(norm_far_rows_same_bits),
                cmocka_unit_test(residual_far_rows_same_bits),
                cmocka_unit_test(swiglu_far_rows_same_bits),
                cmocka_unit_test(convert_far_rows_same_bits),
                cmocka_unit_test(qk_norm_rope_far_rows_same_bits),
                cmocka_unit_test(rows_of_a_large_request_same_bits),
                cmocka_unit_test(keys_of_a_large_request_are_all_seen),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
