/* SPDX-License-Identifier: Apache-2.0 */

/* Attention over int8 of the CUDA backend, every kernel of it: all integers, scales and results have the CPU's bits; a row's do not
 * depend on where it lies, on the other rows, or on the other heads. What differs in few tiles is searched for and named. Needs a CUDA
 * device; without one every test skips. LATENT_TEST_PART=1 leaves out the longest sequences (for tools that slow everything down). */

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
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/gpu/numbers.h"

#define ELEMENTSOF(x) (sizeof(x) / sizeof((x)[0]))
#define DIM LK_I8_DIM
#define TILE (LK_I8_KEYS * LK_I8_DIM)

static bool portable; /* what lk_cuda_attention_set() was told */

/* Memory of one of the two backends. */
typedef struct Side {
        const LkOps *ops;
        LkContext *c;
} Side;

static Side side(bool device) {
        return device ? (Side){lk_cuda_ops(), gpu} : (Side){lk_cpu_ops(LK_CPU_AUTO), cpu};
}

static void *array(Side s, uint64_t size) {
        void *p;

        assert_int_equal(s.ops->memory_new(s.c, size, &p), 0);
        return p;
}

static uint8_t *fetch(Side s, const void *p, uint64_t size) {
        uint8_t *host = malloc(size);

        assert_non_null(host);
        assert_int_equal(s.ops->download(s.c, host, p, size), 0);
        return host;
}

/* Queries, keys and values on the host: rows of q, k, v beside each other. */
typedef struct Case {
        LkType type;
        uint64_t n_q, n_k, ld;
        uint32_t heads;
        uint8_t *x;
} Case;

/* Peaked scores; every 97th row's queries are far larger than its neighbours'. Channels and keys that stick out. */
static Case case_new(LkType t, uint64_t n_q, uint64_t n_k, uint32_t heads, uint32_t more) {
        const uint64_t rows = n_q > n_k ? n_q : n_k, width = (uint64_t) heads * DIM;
        Case c = {.type = t, .n_q = n_q, .n_k = n_k, .heads = heads, .ld = 3 * width + more};

        c.x = malloc(rows * c.ld * lk_type_size(t));
        assert_non_null(c.x);
        for (uint64_t r = 0; r < rows; r++)
                for (uint64_t i = 0; i < c.ld; i++) {
                        float f = normal();

                        if (i < width)
                                f *= r % 97 == 5 ? 40 : 2;
                        else if (i < 2 * width)
                                f = f * (i % 64 == 9 ? 8 : 1.5f) + (i % 32 == 3 ? 5 : 0);
                        else if (r % 311 == 17)
                                f *= 30;
                        put(c.x, t, r * c.ld + i, f);
                }
        return c;
}

static uint64_t case_size(const Case *c) {
        return (c->n_q > c->n_k ? c->n_q : c->n_k) * c->ld * lk_type_size(c->type);
}

/* All arrays of one side, and the arguments that name them. */
typedef struct Run {
        Side s;
        void *x, *o;
        uint64_t tiles, o_size;
        LkQuantiseQueries queries;
        LkQuantiseKeys keys;
        LkAttentionI8 a;
} Run;

static Run run_new(const Case *c, Side s) {
        const uint64_t width = (uint64_t) c->heads * DIM, tiles = lk_i8_tiles(c->n_k), size = lk_type_size(c->type);
        Run r = {.s = s, .x = array(s, case_size(c)), .tiles = tiles, .o_size = c->n_q * width * size};

        assert_int_equal(s.ops->upload(s.c, r.x, c->x, case_size(c)), 0);
        r.o = array(s, r.o_size);
        r.queries = (LkQuantiseQueries){.type = c->type, .n = c->n_q, .heads = c->heads, .x = r.x, .x_ld = c->ld, .q_ld = width};
        r.queries.q = array(s, c->n_q * width);
        r.queries.scale = array(s, c->n_q * c->heads * sizeof(float));
        r.keys = (LkQuantiseKeys){.type = c->type, .k = (uint8_t *) r.x + width * size, .v = (uint8_t *) r.x + 2 * width * size,
                .k_ld = c->ld, .v_ld = c->ld, .to = {.n = c->n_k, .heads = c->heads}};
        r.keys.to.offset = array(s, width * sizeof(float));
        r.keys.to.k = array(s, c->heads * tiles * TILE);
        r.keys.to.k_scale = array(s, c->heads * tiles * sizeof(float));
        r.keys.to.v = array(s, c->heads * tiles * TILE);
        r.keys.to.v_scale = array(s, c->heads * tiles * DIM * sizeof(float));
        r.a = (LkAttentionI8){.n_q = c->n_q, .scale = 0.08838835f, .q = r.queries.q, .q_scale = r.queries.scale, .q_ld = width,
                .keys = r.keys.to, .o_type = c->type, .o = r.o, .o_ld = width};
        return r;
}

static void run_quantise(const Run *r) {
        assert_int_equal(r->s.ops->quantise_queries(r->s.c, &r->queries), 0);
        assert_int_equal(r->s.ops->quantise_keys(r->s.c, &r->keys), 0);
}

/* The whole of o after `a`; what was not written is 0x5a. */
static uint8_t *run_attention(const Run *r, LkAttentionI8 a) {
        uint8_t *o = malloc(r->o_size);

        assert_non_null(o);
        memset(o, 0x5a, r->o_size);
        assert_int_equal(r->s.ops->upload(r->s.c, r->o, o, r->o_size), 0);
        assert_int_equal(r->s.ops->attention_i8(r->s.c, &a), 0);
        assert_int_equal(r->s.ops->download(r->s.c, o, r->o, r->o_size), 0);
        return o;
}

static void run_free(Run *r) {
        void *all[] = {r->x, r->o, r->queries.q, r->queries.scale, r->keys.to.offset, r->keys.to.k, r->keys.to.k_scale, r->keys.to.v,
                r->keys.to.v_scale};

        for (unsigned i = 0; i < ELEMENTSOF(all); i++)
                r->s.ops->memory_free(r->s.c, all[i]);
}

static void kernel_choose(unsigned i) {
        portable = i > 0;
        lk_cuda_attention_set(gpu, portable ? LK_CUDA_ATTENTION_PORTABLE : LK_CUDA_ATTENTION_UNTRIED);
}

static void assert_same(const Case *c, Side a, const void *x, Side b, const void *y, uint64_t size, const char *what) {
        uint8_t *one = fetch(a, x, size), *two = fetch(b, y, size);

        for (uint64_t i = 0; i < size; i++)
                if (one[i] != two[i])
                        fail_msg("%s of type %d, %llu queries, %llu keys, %u heads: byte %llu of %llu is %02x, not %02x", what, c->type,
                                (unsigned long long) c->n_q, (unsigned long long) c->n_k, c->heads, (unsigned long long) i,
                                (unsigned long long) size, one[i], two[i]);
        free(one);
        free(two);
}

static void assert_quantised(const Case *c, const Run *a, const Run *b) {
        const uint64_t width = (uint64_t) c->heads * DIM, tiles = c->heads * a->tiles;

        assert_same(c, a->s, a->queries.q, b->s, b->queries.q, c->n_q * width, "queries");
        assert_same(c, a->s, a->queries.scale, b->s, b->queries.scale, c->n_q * c->heads * sizeof(float), "scales of queries");
        assert_same(c, a->s, a->keys.to.offset, b->s, b->keys.to.offset, width * sizeof(float), "offset of keys");
        assert_same(c, a->s, a->keys.to.k, b->s, b->keys.to.k, tiles * TILE, "keys");
        assert_same(c, a->s, a->keys.to.k_scale, b->s, b->keys.to.k_scale, tiles * sizeof(float), "scales of keys");
        assert_same(c, a->s, a->keys.to.v, b->s, b->keys.to.v, tiles * TILE, "values");
        assert_same(c, a->s, a->keys.to.v_scale, b->s, b->keys.to.v_scale, tiles * DIM * sizeof(float), "scales of values");
}

static void assert_rows(const Case *c, const uint8_t *a, uint64_t a_row, const uint8_t *b, uint64_t b_row, uint64_t n, const char *what) {
        const uint64_t size = c->heads * DIM * lk_type_size(c->type);

        for (uint64_t i = 0; i < n; i++)
                if (memcmp(a + (a_row + i) * size, b + (b_row + i) * size, size) != 0)
                        fail_msg("type %d, %llu queries, %llu keys, %u heads%s: %s: row %llu has other bits", c->type,
                                (unsigned long long) c->n_q, (unsigned long long) c->n_k, c->heads, portable ? ", portable" : "", what,
                                (unsigned long long) (a_row + i));
}

/* What keys and values of few tiles are like: what is the same in all of them cannot be wrong, so that the kinds that fail say where. */
typedef enum Kind {
        KIND_RANDOM,
        KIND_SAME_VALUES, /* the results are 1: scores, steps, sums of weights */
        KIND_SAME_KEYS,   /* the weights are 255: products with values and their sums */
        KIND_RISING,      /* each tile's largest scores are above those before */
        KIND_FALLING,
        KIND_MAX
} Kind;

static const char *const kinds[] = {"random", "values 1", "keys all the same", "rising scores", "falling scores"};

static Case case_of_kind(uint64_t n_k, uint32_t heads, Kind kind) {
        const uint64_t n_q = 130, width = (uint64_t) heads * DIM;
        Case c = case_new(LK_F32, n_q, n_k, heads, 0);

        for (uint64_t r = 0; r < n_k; r++) {
                const uint64_t tile = r / LK_I8_KEYS, last = lk_i8_tiles(n_k) - 1;

                for (uint64_t i = width; i < 3 * width; i++) {
                        const uint64_t at = r * c.ld + i;

                        if (i >= 2 * width && kind == KIND_SAME_VALUES)
                                put(c.x, c.type, at, 1);
                        else if (i < 2 * width && kind == KIND_SAME_KEYS)
                                put(c.x, c.type, at, (float) (i % 7));
                        else if (i < 2 * width && kind >= KIND_RISING)
                                put(c.x, c.type, at, (float) (kind == KIND_RISING ? tile + 1 : last - tile + 1) * normal());
                }
        }
        return c;
}

/* One head and tiles [from, from + lk_i8_tiles(n)) of it. */
static LkAttentionI8 some_tiles(const Run *r, uint32_t head, uint64_t from, uint64_t n) {
        const uint64_t at = head * r->tiles + from;
        LkAttentionI8 a = r->a;

        a.q += head * DIM;
        a.q_scale += head;
        a.o = (uint8_t *) a.o + head * DIM * sizeof(float);
        a.keys.n = n;
        a.keys.heads = 1;
        a.keys.offset += head * DIM;
        a.keys.k += at * TILE;
        a.keys.k_scale += at;
        a.keys.v += at * TILE;
        a.keys.v_scale += at * DIM;
        return a;
}

/* Says what numbers of o (f32) differ; their count. */
static uint64_t difference_print(const Case *c, const uint8_t *expected, const uint8_t *o, const char *what) {
        const uint64_t width = (uint64_t) c->heads * DIM;
        uint64_t n = 0, first = 0, rows[2] = {UINT64_MAX, 0}, columns[2] = {UINT64_MAX, 0};

        for (uint64_t i = 0; i < c->n_q * width; i++) {
                const uint64_t row = i / width, column = i % DIM;

                if (memcmp(expected + i * 4, o + i * 4, 4) == 0)
                        continue;
                first = n++ ? first : i;
                rows[0] = row < rows[0] ? row : rows[0];
                rows[1] = row;
                columns[0] = column < columns[0] ? column : columns[0];
                columns[1] = column > columns[1] ? column : columns[1];
        }
        if (n > 0)
                print_error("%s: %llu of %llu numbers differ, rows %llu to %llu, columns %llu to %llu of heads; the first in "
                            "row %llu, head %llu, column %llu: %.9g is not %.9g\n",
                        what, (unsigned long long) n, (unsigned long long) (c->n_q * width), (unsigned long long) rows[0],
                        (unsigned long long) rows[1], (unsigned long long) columns[0], (unsigned long long) columns[1],
                        (unsigned long long) (first / width), (unsigned long long) (first % width / DIM),
                        (unsigned long long) (first % DIM),
                        get(o, LK_F32, first), get(expected, LK_F32, first));
        return n;
}

/* Each head alone, by its first tiles and each tile alone: where it begins. */
static void difference_search(const Case *c, const Run *one, const Run *two) {
        for (uint32_t head = 0; head < c->heads; head++)
                for (uint64_t i = 0; i < 2 * one->tiles; i++) {
                        const uint64_t tile = i / 2, from = i % 2 ? tile : 0;
                        const uint64_t end = (tile + 1) * LK_I8_KEYS, n = (end < c->n_k ? end : c->n_k) - from * LK_I8_KEYS;
                        uint8_t *expected = run_attention(one, some_tiles(one, head, from, n));
                        uint8_t *o = run_attention(two, some_tiles(two, head, from, n));
                        char what[96];

                        snprintf(what, sizeof(what), "  head %u, tiles %llu to %llu", head, (unsigned long long) from,
                                (unsigned long long) tile);
                        difference_print(c, expected, o, what);
                        free(expected);
                        free(o);
                }
}

/* The first cases that fail of each kernel are looked into. */
static void attention_i8_few_tiles_same_bits(void **state) {
        static const uint64_t lengths[] = {100, 128, 129, 256, 300, 384, 640, 1170};
        unsigned failed[2] = {};

        need_device();
        for (unsigned i = 0; i < 2 * KIND_MAX * ELEMENTSOF(lengths); i++) {
                const uint32_t heads = i % 2 ? 3 : 1;
                const Kind kind = (Kind) (i / 2 % KIND_MAX);
                Case c = case_of_kind(lengths[i / 2 / KIND_MAX], heads, kind);
                Run one = run_new(&c, side(false)), two = run_new(&c, side(true));
                uint8_t *expected;

                run_quantise(&one);
                run_quantise(&two);
                assert_quantised(&c, &one, &two);
                expected = run_attention(&one, one.a);
                for (unsigned kernel = 0; kernel < 2; kernel++) {
                        uint8_t *o;
                        char what[128];

                        kernel_choose(kernel);
                        o = run_attention(&two, two.a);
                        snprintf(what, sizeof(what), "%s kernel, %s, %llu keys, %u heads", portable ? "portable" : "best", kinds[kind],
                                (unsigned long long) c.n_k, heads);
                        if (difference_print(&c, expected, o, what) > 0 && failed[kernel]++ < 3)
                                difference_search(&c, &one, &two);
                        free(o);
                }
                free(expected);
                run_free(&one);
                run_free(&two);
                free(c.x);
        }
        if (failed[0] + failed[1] > 0)
                fail_msg("%u cases of the best kernel and %u of the portable one differ, of %zu", failed[0], failed[1],
                        2 * KIND_MAX * ELEMENTSOF(lengths));
}

static void attention_i8_same_bits_as_cpu(void **state) {
        static const struct {
                uint64_t n_q, n_k;
                uint32_t heads, more;
        } cases[] = {{1, 1, 1, 0}, {127, 15, 3, 8}, {128, 129, 2, 0}, {129, 127, 1, 3}, {1025, 640, 2, 0}, {300, 3000, 5, 1},
                {64, 128, 56, 0}};

        need_device();
        for (unsigned i = 0; i < 2 * ELEMENTSOF(cases); i++) {
                Case c = case_new(i % 2 ? LK_BF16 : LK_F32, cases[i / 2].n_q, cases[i / 2].n_k, cases[i / 2].heads, cases[i / 2].more);
                Run one = run_new(&c, side(false)), two = run_new(&c, side(true));
                uint8_t *expected, *o;

                run_quantise(&one);
                run_quantise(&two);
                assert_quantised(&c, &one, &two);
                expected = run_attention(&one, one.a);
                for (unsigned kernel = 0; kernel < 2; kernel++) {
                        kernel_choose(kernel);
                        o = run_attention(&two, two.a);
                        assert_rows(&c, expected, 0, o, 0, c.n_q, "against the CPU");
                        free(o);
                }
                free(expected);
                run_free(&one);
                run_free(&two);
                free(c.x);
        }
}

/* Rows cut in parts, each computed alone. */
static void check_cuts(const Case *c, const Run *r, const uint8_t *whole) {
        const uint64_t cuts[] = {1, 64, 127, 128, 1000, 1 + next() % c->n_q};

        for (unsigned i = 0; i < 3 * ELEMENTSOF(cuts); i++) {
                const uint64_t n = cuts[i / 3], at = i % 3 == 0 ? 0 : i % 3 == 1 ? c->n_q / 2 / n * n : c->n_q - n;
                LkAttentionI8 a = r->a;
                uint8_t *o;

                if (n >= c->n_q || at + n > c->n_q)
                        continue;
                a.n_q = n;
                a.q += at * a.q_ld;
                a.q_scale += at * c->heads;
                a.o = (uint8_t *) a.o + at * a.o_ld * lk_type_size(c->type);
                o = run_attention(r, a);
                assert_rows(c, whole, at, o, at, n, "cut rows");
                free(o);
        }
}

/* The first head at several places among others, with passes of their own. */
static void check_heads(const Case *c, const uint8_t *whole) {
        static const struct {
                uint32_t heads, at;
        } places[] = {{2, 1}, {7, 3}, {8, 7}, {14, 0}, {56, 55}};
        const uint64_t size = lk_type_size(c->type), part = DIM * size;

        for (unsigned i = 0; i < ELEMENTSOF(places); i++) {
                const uint64_t width = (uint64_t) places[i].heads * DIM;
                Case d = {.type = c->type, .n_q = c->n_q, .n_k = c->n_k, .heads = places[i].heads, .ld = 3 * width};
                const uint64_t rows = c->n_q > c->n_k ? c->n_q : c->n_k;
                uint8_t *o;
                Run r;

                if (rows > 1500 && i != 2)
                        continue;
                d.x = malloc(rows * d.ld * size);
                assert_non_null(d.x);
                memset(d.x, 0x40, rows * d.ld * size); /* about 3 */
                for (uint64_t row = 0; row < rows; row++)
                        for (uint64_t j = 0; j < 3; j++)
                                memcpy(d.x + (row * d.ld + j * width + places[i].at * DIM) * size,
                                        c->x + (row * c->ld + j * c->heads * DIM) * size, part);
                r = run_new(&d, side(true));
                run_quantise(&r);
                o = run_attention(&r, r.a);
                for (uint64_t row = 0; row < c->n_q; row++)
                        if (memcmp(o + (row * width + places[i].at * DIM) * size, whole + row * c->heads * part, part) != 0)
                                fail_msg("head %u of %u%s: row %llu of %llu has other bits", places[i].at, places[i].heads,
                                        portable ? ", portable" : "", (unsigned long long) row, (unsigned long long) c->n_q);
                free(o);
                run_free(&r);
                free(d.x);
        }
}

/* Queries at other places of the tile: row r moves to r + by. One of them is no number, and stays alone with that. */
static void check_rolled(const Case *c, const Run *r, const uint8_t *whole) {
        const uint64_t size = c->ld * lk_type_size(c->type), by = 37 % c->n_q, bad = c->n_q / 2;
        LkQuantiseQueries queries = r->queries;
        uint8_t *q = malloc(c->n_q * size), *o;

        assert_non_null(q);
        memcpy(q, c->x + (c->n_q - by) * size, by * size);
        memcpy(q + by * size, c->x, (c->n_q - by) * size);
        put(q, c->type, bad * c->ld + 1, NAN);
        queries.x = array(r->s, c->n_q * size);
        assert_int_equal(r->s.ops->upload(r->s.c, (void *) queries.x, q, c->n_q * size), 0);
        assert_int_equal(r->s.ops->quantise_queries(r->s.c, &queries), 0);
        o = run_attention(r, r->a);
        for (uint64_t row = 0; row < c->n_q; row++)
                if (row != bad)
                        assert_rows(c, whole, (row + c->n_q - by) % c->n_q, o, row, 1, "rolled rows, one with NaN");
        for (uint32_t d = 0; d < DIM; d++)
                assert_true(isnan(get(o, c->type, bad * c->heads * DIM + d)));
        free(o);
        free(q);
        r->s.ops->memory_free(r->s.c, (void *) queries.x);
        run_quantise(r);
}

static void attention_i8_row_position_same_bits(void **state) {
        static const uint64_t lengths[] = {1, 127, 128, 129, 1025, 1409, 7013};

        need_device();
        for (unsigned i = 0; i < ELEMENTSOF(lengths); i++) {
                Case c;
                Run r;

                if (lengths[i] > 1409 && is_part())
                        continue;
                c = case_new(i == 3 ? LK_F32 : LK_BF16, lengths[i], lengths[i], 1, 0);
                r = run_new(&c, side(true));
                run_quantise(&r);
                for (unsigned kernel = 0; kernel < 2; kernel++) {
                        uint8_t *whole;

                        kernel_choose(kernel);
                        whole = run_attention(&r, r.a);
                        check_cuts(&c, &r, whole);
                        check_heads(&c, whole);
                        check_rolled(&c, &r, whole);
                        free(whole);
                }
                run_free(&r);
                free(c.x);
        }
}

/* The longest sequence of the model: all kernels on every row, the CPU on some. */
static void attention_i8_long_sequence_same_bits(void **state) {
        const uint64_t rows = is_part() ? 3000 : 73686, part = 130, at = rows - part;
        uint8_t *o[2], *expected;
        Run one, two;
        Case c;

        need_device();
        c = case_new(LK_BF16, rows, rows, 1, 0);
        one = run_new(&c, side(false));
        two = run_new(&c, side(true));
        run_quantise(&one);
        run_quantise(&two);
        assert_quantised(&c, &one, &two);
        for (unsigned kernel = 0; kernel < 2; kernel++) {
                kernel_choose(kernel);
                o[kernel] = run_attention(&two, two.a);
        }
        assert_rows(&c, o[0], 0, o[1], 0, rows, "against the portable kernel");
        one.a.n_q = part;
        one.a.q += at * one.a.q_ld;
        one.a.q_scale += at;
        one.a.o = (uint8_t *) one.a.o + at * one.a.o_ld * 2;
        expected = run_attention(&one, one.a);
        assert_rows(&c, expected, at, o[0], at, part, "against the CPU");
        free(o[0]);
        free(o[1]);
        free(expected);
        run_free(&one);
        run_free(&two);
        free(c.x);
}

/* Lists of n query blocks from `first` on, the same for both sides: about share / 16 of the blocks, at least one. */
static void lists_new(const Case *c, Run *one, Run *two, uint32_t first, uint32_t n, unsigned share) {
        const uint64_t blocks = lk_i8_blocks(c->n_k), lists = (uint64_t) c->heads * n;
        uint32_t *list = calloc(lists * blocks, sizeof(*list)), *count = calloc(lists, sizeof(*count));
        Run *both[2] = {one, two};

        assert_true(list && count);
        for (uint64_t i = 0; i < lists; i++) {
                for (uint32_t b = 0; b < blocks; b++)
                        if (next() % 16 < share)
                                list[i * blocks + count[i]++] = b;
                if (count[i] == 0)
                        list[i * blocks + count[i]++] = (uint32_t) (next() % blocks);
        }
        for (int i = 0; i < 2; i++) {
                Run *r = both[i];

                r->a.first_block = first;
                r->a.n_blocks = n;
                r->a.list = array(r->s, lists * blocks * sizeof(*list));
                r->a.count = array(r->s, lists * sizeof(*count));
                assert_int_equal(r->s.ops->upload(r->s.c, (void *) r->a.list, list, lists * blocks * 4), 0);
                assert_int_equal(r->s.ops->upload(r->s.c, (void *) r->a.count, count, lists * sizeof(*count)), 0);
        }
        free(list);
        free(count);
}

static void lists_free(Run *r) {
        r->s.ops->memory_free(r->s.c, (void *) r->a.list);
        r->s.ops->memory_free(r->s.c, (void *) r->a.count);
        r->a.list = r->a.count = NULL;
}

/* Single blocks of a tile, both, ragged ones at the end; queries that begin and end within a block. If every block is in the lists:
 * the bits of every kernel without lists. */
static void attention_i8_lists_same_bits_as_cpu(void **state) {
        static const struct {
                uint64_t n, first_row, n_q;
                uint32_t heads, first, n_blocks;
        } cases[] = {{64, 0, 64, 1, 0, 1}, {300, 0, 300, 3, 0, 5}, {300, 77, 101, 1, 1, 2}, {513, 448, 65, 2, 7, 2},
                {640, 300, 20, 2, 0, 10},
                {7013, 0, 7013, 2, 0, 110},
                {7013, 6995, 18, 56, 109, 1}};
        static const unsigned shares[] = {1, 5, 12, 16};

        need_device();
        for (unsigned i = 0; i < 2 * ELEMENTSOF(cases) * ELEMENTSOF(shares); i++) {
                const unsigned k = i / 2 % ELEMENTSOF(cases), share = shares[i / 2 / ELEMENTSOF(cases)];
                uint8_t *expected, *o;
                Run one, two;
                Case c;

                if (is_part() && cases[k].n_q > 1000)
                        continue;
                c = case_new(i % 2 ? LK_BF16 : LK_F32, cases[k].n_q, cases[k].n, cases[k].heads, 0);
                one = run_new(&c, side(false));
                two = run_new(&c, side(true));
                run_quantise(&one);
                run_quantise(&two);
                lists_new(&c, &one, &two, cases[k].first, cases[k].n_blocks, share);
                one.a.first_row = two.a.first_row = cases[k].first_row;
                expected = run_attention(&one, one.a);
                for (unsigned kernel = 0; kernel < 2; kernel++) {
                        kernel_choose(kernel);
                        o = run_attention(&two, two.a);
                        assert_rows(&c, expected, 0, o, 0, c.n_q, "lists, against the CPU");
                        free(o);
                }
                lists_free(&one);
                lists_free(&two);
                if (share == 16) {
                        o = run_attention(&two, two.a);
                        assert_rows(&c, expected, 0, o, 0, c.n_q, "all blocks, against no lists");
                        free(o);
                }
                free(expected);
                run_free(&one);
                run_free(&two);
                free(c.x);
        }
}

/* Rows of o at any distance, two bytes from a multiple of four: what lies between stays as it is. */
static void attention_i8_strides_same_bits(void **state) {
        need_device();
        for (unsigned i = 0; i < 4; i++) {
                Case c = case_new(LK_BF16, 200, 300, 2, 0);
                Run r = run_new(&c, side(true));
                const uint64_t ld = 2 * DIM + (i < 2 ? 3 : 8), size = (200 * ld + 1) * 2;
                LkAttentionI8 a = r.a;
                uint8_t *whole, *o = malloc(size);
                void *to = array(r.s, size);

                assert_non_null(o);
                kernel_choose(i % 2);
                run_quantise(&r);
                whole = run_attention(&r, r.a);
                memset(o, 0x5a, size);
                assert_int_equal(r.s.ops->upload(r.s.c, to, o, size), 0);
                a.o = (uint8_t *) to + 2;
                a.o_ld = ld;
                assert_int_equal(r.s.ops->attention_i8(r.s.c, &a), 0);
                assert_int_equal(r.s.ops->download(r.s.c, o, to, size), 0);
                for (uint64_t row = 0; row < 200; row++) {
                        assert_memory_equal(o + 2 + row * ld * 2, whole + row * 2 * DIM * 2, 2 * DIM * 2);
                        for (uint64_t b = 2 * DIM * 2; b < ld * 2; b++)
                                assert_int_equal(o[2 + row * ld * 2 + b], 0x5a);
                }
                r.s.ops->memory_free(r.s.c, to);
                free(o);
                free(whole);
                run_free(&r);
                free(c.x);
        }
}

/* The self-test of the best kernel runs at its first use, and finds nothing. */
static void attention_i8_self_test_finds_nothing(void **state) {
        char text[1024];
        Case c;
        Run r;

        need_device();
        c = case_new(LK_F32, 3, 5, 1, 0);
        r = run_new(&c, side(true));
        run_quantise(&r);
        lk_cuda_attention_set(gpu, LK_CUDA_ATTENTION_BEST);
        free(run_attention(&r, r.a));
        assert_in_range(lk_cuda_describe(gpu, text, sizeof(text)), 1, sizeof(text) - 1);
        print_message("# %s", text);
        assert_non_null(strstr(text, "self-test: nothing"));
        run_free(&r);
        free(c.x);
}

#define REFUSED(op, statement)                                                                                                          \
        do {                                                                                                                            \
                LkQuantiseQueries queries = r.queries;                                                                                  \
                LkQuantiseKeys keys = r.keys;                                                                                           \
                LkAttentionI8 a = r.a;                                                                                                  \
                statement;                                                                                                              \
                (void) queries, (void) keys, (void) a;                                                                                  \
                assert_int_equal(op, -EINVAL);                                                                                          \
        } while (0)

static void attention_i8_bad_argument_is_refused(void **state) {
        const LkOps *ops = lk_cuda_ops();
        Case c;
        Run r;

        need_device();
        c = case_new(LK_BF16, 4, 9, 2, 0);
        r = run_new(&c, side(true));
        REFUSED(ops->quantise_queries(gpu, &queries), queries.type = LK_F16);
        REFUSED(ops->quantise_queries(gpu, &queries), queries.x = NULL);
        REFUSED(ops->quantise_queries(gpu, &queries), queries.x_ld = 255);
        REFUSED(ops->quantise_queries(gpu, &queries), queries.q++);
        REFUSED(ops->quantise_queries(gpu, &queries), queries.q_ld = 300);
        REFUSED(ops->quantise_keys(gpu, &keys), keys.to.n = 0);
        REFUSED(ops->quantise_keys(gpu, &keys), keys.v = NULL);
        REFUSED(ops->quantise_keys(gpu, &keys), keys.to.v_scale++);
        REFUSED(ops->attention_i8(gpu, &a), a.scale = 0);
        REFUSED(ops->attention_i8(gpu, &a), a.scale = NAN);
        REFUSED(ops->attention_i8(gpu, &a), a.q = NULL);
        REFUSED(ops->attention_i8(gpu, &a), a.keys.k_scale = NULL);
        REFUSED(ops->attention_i8(gpu, &a), a.o_ld = 128);
        REFUSED(ops->attention_i8(gpu, &a), a.o_type = LK_I8);
        run_free(&r);
        free(c.x);
}

static int default_kernel(void **state) {
        if (gpu)
                kernel_choose(0);
        return 0;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup(attention_i8_few_tiles_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_i8_same_bits_as_cpu, default_kernel),
                cmocka_unit_test_setup(attention_i8_row_position_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_i8_long_sequence_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_i8_lists_same_bits_as_cpu, default_kernel),
                cmocka_unit_test_setup(attention_i8_strides_same_bits, default_kernel),
                cmocka_unit_test_setup(attention_i8_self_test_finds_nothing, default_kernel),
                cmocka_unit_test_setup(attention_i8_bad_argument_is_refused, default_kernel),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
