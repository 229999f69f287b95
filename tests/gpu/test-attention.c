/* SPDX-License-Identifier: Apache-2.0 */

/* Attention of the CUDA backend: error against f64; a row's bits do not depend on where it lies, on the other rows, or on the other
 * heads; no row adds what it does not see; shapes that take the plain kernel have the CPU's bits. Needs a CUDA device; without one every
 * test skips. LATENT_TEST_PART=1 leaves out the longest sequences (for tools that slow everything down). */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/gpu/numbers.h"

#define ELEMENTSOF(x) (sizeof(x) / sizeof((x)[0]))

static bool portable; /* what lk_cuda_attention_set() was told */

/* Queries, keys and values of one kind: [rows, heads, dim], `ld` numbers from one row to the next. */
typedef struct Case {
        LkType type;
        uint64_t rows, ld, kv_ld;
        uint32_t heads, kv_heads, dim;
        uint8_t *q, *k, *v; /* on the host */
        void *device[4];    /* q, k, v, o */
} Case;

static void *device_copy(const void *host, uint64_t size) {
        void *p;

        assert_int_equal(lk_cuda_ops()->memory_new(gpu, size, &p), 0);
        if (host)
                assert_int_equal(lk_cuda_ops()->upload(gpu, p, host, size), 0);
        return p;
}

static uint8_t *random_rows(LkType t, uint64_t n, float size) {
        uint8_t *p = calloc(n, lk_type_size(t));

        assert_non_null(p);
        for (uint64_t i = 0; i < n; i++)
                put(p, t, i, size * normal());
        return p;
}

static uint64_t q_size(const Case *c) {
        return c->rows * c->ld * lk_type_size(c->type);
}

static uint64_t kv_size(const Case *c) {
        return c->rows * c->kv_ld * lk_type_size(c->type);
}

static void case_upload(const Case *c) {
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[0], c->q, q_size(c)), 0);
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[1], c->k, kv_size(c)), 0);
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[2], c->v, kv_size(c)), 0);
}

/* Peaked scores; every 97th row's queries are far larger than its neighbours'. */
static Case case_new(LkType t, uint64_t rows, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t more) {
        Case c = { .type = t, .rows = rows, .heads = heads, .kv_heads = kv_heads, .dim = dim };

        c.ld = (uint64_t) heads * dim + more;
        c.kv_ld = (uint64_t) kv_heads * dim + more;
        c.q = random_rows(t, rows * c.ld, 2);
        c.k = random_rows(t, rows * c.kv_ld, 2);
        c.v = random_rows(t, rows * c.kv_ld, 1);
        for (uint64_t r = 5; r < rows; r += 97)
                for (uint64_t i = 0; i < c.ld; i++)
                        put(c.q, t, r * c.ld + i, 40 * normal());
        c.device[0] = device_copy(NULL, q_size(&c));
        c.device[1] = device_copy(NULL, kv_size(&c));
        c.device[2] = device_copy(NULL, kv_size(&c));
        c.device[3] = device_copy(NULL, q_size(&c));
        case_upload(&c);
        return c;
}

static void case_free(Case *c) {
        free(c->q);
        free(c->k);
        free(c->v);
        for (int i = 0; i < 4; i++)
                lk_cuda_ops()->memory_free(gpu, c->device[i]);
}

static LkAttention case_args(const Case *c) {
        return (LkAttention){.type = c->type,
                .n_q = c->rows,
                .n_k = c->rows,
                .heads = c->heads,
                .head_dim = c->dim,
                .kv_heads = c->kv_heads,
                .scale = 1 / sqrtf((float) c->dim),
                .q = c->device[0],
                .k = c->device[1],
                .v = c->device[2],
                .o = c->device[3],
                .q_ld = c->ld,
                .k_ld = c->kv_ld,
                .v_ld = c->kv_ld,
                .o_ld = c->ld};
}

/* The kernels that may serve the type and head size: that of the architecture, and the one that every card has. */
static bool kernel_choose(unsigned i, LkType t, uint32_t dim) {
        portable = i > 0;
        lk_cuda_attention_set(gpu, portable ? LK_CUDA_ATTENTION_PORTABLE : LK_CUDA_ATTENTION_BEST);
        return i == 0 || (t == LK_BF16 && dim == 128) || (t == LK_F16 && dim == 64);
}

/* Runs `a` and returns the whole of o; what was not written is 0x5a. */
static uint8_t *run(const Case *c, LkAttention a) {
        uint8_t *o = malloc(q_size(c));

        assert_non_null(o);
        memset(o, 0x5a, q_size(c));
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[3], o, q_size(c)), 0);
        assert_int_equal(lk_cuda_ops()->attention(gpu, &a), 0);
        assert_int_equal(lk_cuda_ops()->download(gpu, o, c->device[3], q_size(c)), 0);
        return o;
}

static const uint8_t *row_of(const Case *c, const uint8_t *o, uint64_t row, uint32_t head) {
        return o + (row * c->ld + (uint64_t) head * c->dim) * lk_type_size(c->type);
}

/* Relative L2 distance from f64 over some rows and heads. */
static double distance(const Case *c, const LkAttention *a, const uint8_t *o) {
        double off = 0, all = 0, *w = malloc(c->rows * sizeof(*w));

        assert_non_null(w);
        for (uint64_t sample = 0; sample < 24; sample++) {
                uint64_t row = sample < 4 ? sample * (a->n_q - 1) / 3 : next() % a->n_q, end = a->causal ? a->first_row + row + 1 : a->n_k;
                uint32_t head = next() % c->heads, kv = head / (c->heads / c->kv_heads);
                double top = -INFINITY, sum = 0, y[256] = { 0 };

                for (uint64_t j = 0; j < end; j++) {
                        w[j] = 0;
                        for (uint32_t d = 0; d < c->dim; d++)
                                w[j] += get(c->q, c->type, row * c->ld + head * c->dim + d) *
                                        get(c->k, c->type, j * c->kv_ld + kv * c->dim + d);
                        w[j] *= a->scale;
                        top = fmax(top, w[j]);
                }
                for (uint64_t j = 0; j < end; j++) {
                        w[j] = exp(w[j] - top);
                        sum += w[j];
                        for (uint32_t d = 0; d < c->dim; d++)
                                y[d] += w[j] * get(c->v, c->type, j * c->kv_ld + kv * c->dim + d);
                }
                for (uint32_t d = 0; d < c->dim; d++) {
                        off += pow(y[d] / sum - get(row_of(c, o, row, head), c->type, d), 2);
                        all += pow(y[d] / sum, 2);
                }
        }
        free(w);
        return sqrt(off / all);
}

static void check_near(const Case *c, LkAttention a) {
        uint8_t *o = run(c, a);
        double off = distance(c, &a, o);

        /* weights and result are rounded to 8 or 11 digits, 2^-9 and 2^-12 at most each, a third of it on average */
        if (!(off < (c->type == LK_F32 ? 2e-6 : c->type == LK_BF16 ? 2.2e-3 : 2.8e-4)))
                fail_msg("type %d, %llu rows, %u of %u heads of %u%s%s: off by %.2e", c->type, (unsigned long long) c->rows, c->kv_heads,
                        c->heads, c->dim, a.causal ? ", causal" : "", portable ? ", portable" : "", off);
        free(o);
}

static void attention_near_f64(void **state) {
        static const struct {
                uint64_t rows;
                uint32_t heads, kv_heads, dim, more;
                bool causal;
                float scale; /* times the usual */
        } cases[] = {
                { 1, 1, 1, 64, 0, false, 1 },
                { 1, 2, 1, 128, 8, true, 1 },
                { 77, 3, 3, 72, 8, false, 1 },
                { 200, 4, 2, 80, 0, true, 1 },
                { 1025, 2, 2, 128, 16, false, 1 },
                { 352, 6, 2, 128, 8, false, 1 },
                { 353, 3, 1, 128, 0, false, 0.25f },
                { 1409, 8, 1, 128, 0, true, 1 },
                { 1797, 2, 2, 64, 0, false, 1 },
                { 128, 2, 1, 64, 8, false, 1 },
                { 129, 4, 2, 64, 0, false, 0.25f },
                { 1025, 2, 2, 64, 16, false, 1 },
                { 500, 2, 2, 200, 8, true, 1 },
                { 500, 2, 2, 256, 0, false, 1 },
                { 333, 2, 2, 8, 0, false, 1 },
                { 333, 2, 1, 128, 0, false, -1 },
                { 333, 2, 1, 128, 0, true, 0 },
                { 130, 2, 2, 36, 4, true, 1 },
        };

        need_device();
        for (unsigned i = 0; i < 3 * ELEMENTSOF(cases); i++) {
                LkType t = (LkType) (1 + i % 3);
                Case c = case_new(t, cases[i / 3].rows, cases[i / 3].heads, cases[i / 3].kv_heads, cases[i / 3].dim, cases[i / 3].more);
                LkAttention a = case_args(&c);

                a.causal = cases[i / 3].causal;
                a.scale *= cases[i / 3].scale;
                for (unsigned kernel = 0; kernel < 2 && kernel_choose(kernel, t, c.dim); kernel++)
                        check_near(&c, a);
                case_free(&c);
        }
}

static void assert_rows(const Case *c, const uint8_t *a, uint64_t a_row, const uint8_t *b, uint64_t b_row, uint64_t n, const char *what) {
        for (uint64_t i = 0; i < n; i++)
                for (uint32_t h = 0; h < c->heads; h++)
                        if (memcmp(row_of(c, a, a_row + i, h), row_of(c, b, b_row + i, h), c->dim * lk_type_size(c->type)) != 0)
                                fail_msg("type %d, head size %u, %llu rows%s: %s: row %llu of head %u has other bits", c->type, c->dim,
                                        (unsigned long long) c->rows, portable ? ", portable" : "", what, (unsigned long long) (a_row + i),
                                        h);
}

/* Rows cut in parts, each computed alone. */
static void check_cuts(const Case *c, const uint8_t *whole, bool causal) {
        const uint64_t cuts[] = { 1, 64, 127, 128, 1000, 1 + next() % c->rows };

        for (unsigned i = 0; i < ELEMENTSOF(cuts); i++) {
                uint64_t at = 0, n = cuts[i];
                uint8_t *o;

                if (n >= c->rows)
                        continue;
                /* the first part, and one in the middle, and the last */
                for (int part = 0; part < 3; part++) {
                        LkAttention a = case_args(c);

                        at = part == 0 ? 0 : part == 1 ? (c->rows / 2 / n * n < c->rows - n ? c->rows / 2 / n * n : 0) : c->rows - n;
                        a.n_q = n;
                        a.causal = causal;
                        a.first_row = causal ? at : 0;
                        a.q = (uint8_t *) c->device[0] + at * c->ld * lk_type_size(c->type);
                        a.o = (uint8_t *) c->device[3] + at * c->ld * lk_type_size(c->type);
                        o = run(c, a);
                        assert_rows(c, whole, at, o, at, n, "cut rows");
                        free(o);
                }
        }
}

/* The head at several places among others. */
static void check_heads(const Case *c, const uint8_t *whole) {
        static const uint32_t counts[] = { 1, 7, 8, 14, 19, 56 };
        const uint64_t size = c->dim * lk_type_size(c->type);

        for (unsigned i = 0; i < ELEMENTSOF(counts) * 3; i++) {
                const uint32_t heads = counts[i / 3], at = i % 3 == 0 ? 0 : i % 3 == 1 ? 3 : heads - 1;
                const uint64_t ld = (uint64_t) heads * c->dim, bytes = c->rows * heads * size;
                LkAttention a = case_args(c);
                uint8_t *o = malloc(c->rows * size);
                void *p[4];

                if (at >= heads || (c->rows > 2000 && i % 4)) {
                        free(o);
                        continue;
                }
                assert_non_null(o);
                for (int j = 0; j < 4; j++) {
                        p[j] = device_copy(NULL, bytes);
                        assert_int_equal(cudaMemset(p[j], 0x40 + (int) (next() % 2), bytes), cudaSuccess); /* about 2 or 3 */
                        if (j < 3)
                                assert_int_equal(cudaMemcpy2D((uint8_t *) p[j] + at * size, ld * lk_type_size(c->type), c->device[j],
                                                         c->ld * lk_type_size(c->type), size, c->rows, cudaMemcpyDeviceToDevice),
                                        cudaSuccess);
                }
                assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
                a.heads = a.kv_heads = heads;
                a.q = p[0];
                a.k = p[1];
                a.v = p[2];
                a.o = p[3];
                a.q_ld = a.k_ld = a.v_ld = a.o_ld = ld;
                assert_int_equal(lk_cuda_ops()->attention(gpu, &a), 0);
                assert_int_equal(lk_cuda_ops()->download(gpu, o, p[3], 1), 0);
                assert_int_equal(cudaMemcpy2D(o, size, (uint8_t *) p[3] + at * size, ld * lk_type_size(c->type), size, c->rows,
                                         cudaMemcpyDeviceToHost),
                        cudaSuccess);
                for (uint64_t r = 0; r < c->rows; r++)
                        if (memcmp(o + r * size, row_of(c, whole, r, 0), size) != 0)
                                fail_msg("head %u of %u%s: row %llu of %llu has other bits", at, heads, portable ? ", portable" : "",
                                        (unsigned long long) r, (unsigned long long) c->rows);
                for (int j = 0; j < 4; j++)
                        lk_cuda_ops()->memory_free(gpu, p[j]);
                free(o);
        }
}

/* Queries at other places of the tile: row r moves to r + by. */
static void check_rolled(Case *c, const uint8_t *whole) {
        const uint64_t size = c->ld * lk_type_size(c->type), by = 37 % c->rows;
        uint8_t *q = malloc(q_size(c)), *o;

        assert_non_null(q);
        memcpy(q, c->q + (c->rows - by) * size, by * size);
        memcpy(q + by * size, c->q, (c->rows - by) * size);
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[0], q, q_size(c)), 0);
        o = run(c, case_args(c));
        assert_rows(c, whole, 0, o, by, c->rows - by, "rolled rows");
        assert_rows(c, whole, c->rows - by, o, 0, by, "rolled rows");
        case_upload(c);
        free(q);
        free(o);
}

/* A query row without numbers stays alone with them. */
static void check_no_number(Case *c, const uint8_t *whole) {
        const uint64_t row = c->rows / 2, size = q_size(c);
        uint8_t *q = malloc(size), *o;

        assert_non_null(q);
        memcpy(q, c->q, size);
        put(q, c->type, row * c->ld + 1, NAN);
        assert_int_equal(lk_cuda_ops()->upload(gpu, c->device[0], q, size), 0);
        o = run(c, case_args(c));
        assert_rows(c, whole, 0, o, 0, row, "rows before one with NaN");
        assert_rows(c, whole, row + 1, o, row + 1, c->rows - row - 1, "rows behind one with NaN");
        for (uint32_t d = 0; d < c->dim; d++)
                assert_true(isnan(get(row_of(c, o, row, 0), c->type, d)));
        case_upload(c);
        free(q);
        free(o);
}

static void check_position(Case *c) {
        uint8_t *whole = run(c, case_args(c));

        check_cuts(c, whole, false);
        check_heads(c, whole);
        check_rolled(c, whole);
        check_no_number(c, whole);
        free(whole);
}

static void attention_row_position_same_bits(void **state) {
        static const uint64_t lengths[] = { 1, 127, 128, 129, 1025, 1409, 7013, 73686 };
        static const uint32_t dims[] = { 128, 64, 72, 256, 36 };
        const bool part = is_part();

        need_device();
        for (unsigned i = 0; i < 2 * ELEMENTSOF(dims) * ELEMENTSOF(lengths); i++) {
                uint32_t dim = dims[i / 2 / ELEMENTSOF(lengths)];
                uint64_t rows = lengths[i / 2 % ELEMENTSOF(lengths)];
                LkType t = i % 2 ? LK_F16 : LK_BF16;
                Case c;

                if (((dim > 128 || dim == 36 || t == LK_F16) && rows > 1409) || (part && rows > 129))
                        continue;
                if (dim != 128 && rows > 7013)
                        continue;
                c = case_new(t, rows, 1, 1, dim, 0);
                for (unsigned kernel = 0; kernel < 2 && kernel_choose(kernel, t, dim); kernel++)
                        check_position(&c);
                case_free(&c);
        }
}

/* Any range of the queries alone, and the same query without the keys that it does not see, even if those are no numbers. */
static void attention_causal_row_position_same_bits(void **state) {
        static const uint64_t lengths[] = { 1, 63, 64, 129, 1025, 1409 };
        static const uint32_t dims[] = { 128, 64, 72, 256, 36 };

        need_device();
        for (unsigned i = 0; i < 2 * ELEMENTSOF(dims) * ELEMENTSOF(lengths); i++) {
                uint64_t rows = lengths[i / 2 % ELEMENTSOF(lengths)], at = rows / 3;
                uint8_t *whole, *o;
                LkAttention a;
                Case c;

                if (is_part() && rows > 129)
                        continue;
                c = case_new(i % 2 ? LK_F16 : LK_BF16, rows, 2, 1, dims[i / 2 / ELEMENTSOF(lengths)], 8);
                a = case_args(&c);
                a.causal = true;
                whole = run(&c, a);
                check_cuts(&c, whole, true);

                /* rows up to `at` as a whole sequence of its own */
                a.n_q = a.n_k = at + 1;
                o = run(&c, a);
                assert_rows(&c, whole, 0, o, 0, at + 1, "a shorter sequence");
                free(o);

                /* keys and values behind row `at` that are no numbers */
                for (uint64_t r = at + 1; r < rows; r += 1 + next() % 5) {
                        put(c.k, c.type, r * c.kv_ld + next() % c.dim, NAN);
                        put(c.v, c.type, r * c.kv_ld + next() % c.dim, next() % 2 ? NAN : -INFINITY);
                }
                case_upload(&c);
                a = case_args(&c);
                a.causal = true;
                o = run(&c, a);
                assert_rows(&c, whole, 0, o, 0, at + 1, "rows before others without numbers");
                if (rows > at + 1) {
                        bool seen = false;

                        for (uint32_t d = 0; d < c.dim; d++)
                                seen |= !isfinite(get(row_of(&c, o, rows - 1, 1), c.type, d));
                        assert_true(seen);
                }
                free(o);

                /* what rows see of them does not depend on where their block starts */
                check_cuts(&c, (whole = (free(whole), run(&c, a))), true);
                free(whole);
                case_free(&c);
        }
}

/* Query heads that share a key head are those of a sequence where each has its own copy. */
static void attention_shared_keys_same_bits(void **state) {
        need_device();
        for (unsigned i = 0; i < 8; i++) {
                Case c = case_new(i % 2 ? LK_F16 : LK_BF16, 300, 8, 2, i / 2 % 2 ? 64 : 128, 0);
                Case d = case_new(c.type, 300, 8, 8, c.dim, 0);
                const uint64_t size = c.dim * 2;
                uint8_t *one, *two;

                kernel_choose(i / 4, c.type, c.dim);
                one = run(&c, case_args(&c));
                memcpy(d.q, c.q, q_size(&c));
                for (uint64_t r = 0; r < 300; r++)
                        for (uint64_t h = 0; h < 8; h++) {
                                memcpy(d.k + (r * 8 + h) * size, c.k + (r * 2 + h / 4) * size, size);
                                memcpy(d.v + (r * 8 + h) * size, c.v + (r * 2 + h / 4) * size, size);
                        }
                case_upload(&d);
                two = run(&d, case_args(&d));
                assert_memory_equal(one, two, q_size(&c));
                free(one);
                free(two);
                case_free(&c);
                case_free(&d);
        }
}

/* Rows of every array at distances of their own, fewer queries than keys; what lies between the rows of o stays as it is. */
static void attention_strides_same_bits(void **state) {
        static const uint64_t queries[] = { 1, 100, 128, 300, 511 };

        need_device();
        for (unsigned i = 0; i < 4 * ELEMENTSOF(queries); i++) {
                const LkType t = i / 2 % 2 ? LK_F16 : LK_BF16;
                const uint32_t heads = 4, dim = t == LK_F16 ? 64 : 128, width = heads * dim, kv_width = width / 2;
                const uint64_t m = queries[i / 4], keys = 1000, lds[] = { width + 24, kv_width + 8, kv_width + 160, width + 56 };
                Case c = case_new(t, keys, heads, 2, dim, 0);
                LkAttention a = case_args(&c);
                uint8_t *whole, *o = malloc(m * lds[3] * 2);
                void *p[4];

                assert_non_null(o);
                kernel_choose(i % 2, t, dim);
                a.n_q = m;
                whole = run(&c, a);
                for (unsigned j = 0; j < 4; j++) {
                        const uint64_t n = j == 1 || j == 2 ? kv_width : width, rows = j == 1 || j == 2 ? keys : m;

                        p[j] = device_copy(NULL, rows * lds[j] * 2);
                        assert_int_equal(cudaMemset(p[j], 0xff, rows * lds[j] * 2), cudaSuccess); /* no numbers between the rows */
                        if (j < 3)
                                assert_int_equal(cudaMemcpy2D(p[j], lds[j] * 2, c.device[j], n * 2, n * 2, rows, cudaMemcpyDeviceToDevice),
                                        cudaSuccess);
                }
                assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
                a.q = p[0];
                a.k = p[1];
                a.v = p[2];
                a.o = p[3];
                a.q_ld = lds[0];
                a.k_ld = lds[1];
                a.v_ld = lds[2];
                a.o_ld = lds[3];
                assert_int_equal(lk_cuda_ops()->attention(gpu, &a), 0);
                assert_int_equal(lk_cuda_ops()->download(gpu, o, p[3], m * lds[3] * 2), 0);
                for (uint64_t r = 0; r < m; r++) {
                        assert_memory_equal(o + r * lds[3] * 2, row_of(&c, whole, r, 0), width * 2);
                        for (uint64_t b = width * 2; b < lds[3] * 2; b++)
                                assert_int_equal(o[r * lds[3] * 2 + b], 0xff);
                }
                for (unsigned j = 0; j < 4; j++)
                        lk_cuda_ops()->memory_free(gpu, p[j]);
                free(whole);
                free(o);
                case_free(&c);
        }
}

/* The tests above look at two kernels where there are two: their tiles of keys differ, so their bits do. */
static void attention_of_architecture_is_another_kernel(void **state) {
        int major = 0;

        need_device();
        assert_int_equal(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
        if (major != 9)
                skip();
        for (unsigned i = 0; i < 2; i++) {
                Case c = i ? case_new(LK_F16, 2000, 2, 2, 64, 0) : case_new(LK_BF16, 2000, 2, 2, 128, 0);
                uint8_t *one, *two;

                kernel_choose(0, c.type, c.dim);
                one = run(&c, case_args(&c));
                kernel_choose(1, c.type, c.dim);
                two = run(&c, case_args(&c));
                assert_memory_not_equal(one, two, q_size(&c));
                free(one);
                free(two);
                case_free(&c);
        }
}

/* f32, and what the fast kernel cannot take: the CPU's bits. */
static void attention_plain_same_bits_as_cpu(void **state) {
        static const struct {
                uint64_t rows;
                uint32_t heads, kv_heads, dim, more;
        } cases[] = {{1, 1, 1, 4, 0}, {65, 2, 1, 72, 0}, {200, 4, 2, 36, 3}, {130, 2, 2, 128, 1}, {130, 1, 1, 256, 5},
                {700, 2, 2, 12, 0}};

        need_device();
        for (unsigned i = 0; i < 4 * ELEMENTSOF(cases); i++) {
                LkType t = i % 2 ? LK_BF16 : LK_F32;
                /* rows that start at odd pieces in bf16 */
                uint32_t more = t == LK_BF16 && cases[i / 4].dim % 8 == 0 ? cases[i / 4].more | 1 : cases[i / 4].more;
                Case c = case_new(t, cases[i / 4].rows, cases[i / 4].heads, cases[i / 4].kv_heads, cases[i / 4].dim, more);
                LkAttention a = case_args(&c);
                uint8_t *host = malloc(q_size(&c)), *o;

                assert_non_null(host);
                memset(host, 0x5a, q_size(&c));
                a.causal = i / 2 % 2;
                o = run(&c, a);
                a.q = c.q;
                a.k = c.k;
                a.v = c.v;
                a.o = host;
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->attention(cpu, &a), 0);
                assert_memory_equal(o, host, q_size(&c));
                free(host);
                free(o);
                case_free(&c);
        }
}

#define REFUSED(statement)                                                                                                              \
        do {                                                                                                                            \
                LkAttention a = case_args(&c);                                                                                          \
                statement;                                                                                                              \
                assert_int_equal(lk_cuda_ops()->attention(gpu, &a), -EINVAL);                                                           \
        } while (0)

static void attention_bad_argument_is_refused(void **state) {
        Case c;

        need_device();
        c = case_new(LK_BF16, 20, 4, 2, 64, 0);
        REFUSED(a.type = LK_I8);
        REFUSED(a.head_dim = 62);
        REFUSED(a.head_dim = 260);
        REFUSED(a.n_k = 0);
        REFUSED(a.kv_heads = 3);
        REFUSED(a.q = NULL);
        REFUSED(a.o = NULL);
        REFUSED(a.q_ld = 255);
        REFUSED(a.k_ld = 127);
        REFUSED((a.causal = true, a.first_row = 1));
        REFUSED((a.causal = true, a.first_row = UINT64_MAX));
        case_free(&c);
}

static int default_kernel(void **state) {
        if (gpu)
                kernel_choose(0, LK_BF16, 128);
        return 0;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup(attention_near_f64, default_kernel),
                cmocka_unit_test_setup(attention_row_position_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_causal_row_position_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_shared_keys_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_strides_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_of_architecture_is_another_kernel, default_kernel),
                cmocka_unit_test_setup(attention_plain_same_bits_as_cpu, default_kernel),
                cmocka_unit_test_setup(attention_bad_argument_is_refused, default_kernel),
        };

        seed = 7;
        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
