/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sparse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/dit-private.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/golden.h"

/* Sparse attention: the masks and outputs of the public packages where their files are there (run-golden); blocks of a
 * layout; a whole step against a second implementation in f64. That ranks give the same bits:
 * tests/unit/worker/test-exchange.c. */

#define LIMIT 2e-6 /* README of the golden data */

static SparseOptions options(const char *text) {
        SparseOptions o;
        Fault f = {};

        if (sparse_parse(text, &o, &f) < 0)
                fail_msg("%s: %s", text, f.text);
        o.shift = 12;
        return o;
}

static const H3Config rows_config = {.video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2, .heads = 2,
        .head_dim = 128, .inner = 256};

static H3Layout *layout_of(uint64_t text, uint64_t audio, uint64_t frames, uint64_t height, uint64_t width) {
        const H3Shape shape = {.text_rows = text, .audio = audio, .frames = frames, .height = height, .width = width};
        H3Layout *l = NULL;
        Fault f = {};

        if (h3_layout_new(&rows_config, &shape, NULL, &l, &f) < 0)
                fail_msg("%s", f.text);
        return l;
}

DEFINE_CLEANUP(H3Layout *, h3_layout_free)
DEFINE_CLEANUP(H3Sparse *, h3_sparse_free)

#define LAYOUT CLEANUP(h3_layout_freep) H3Layout
#define SPARSE CLEANUP(h3_sparse_freep) H3Sparse

static H3Sparse *sparse_of(const H3Layout *l, const char *text) {
        const SparseOptions o = options(text);
        H3Sparse *s = NULL;

        assert_int_equal(h3_sparse_new(&rows_config, l, &o, &s), 0);
        return s;
}

/* ---- blocks ---- */

static void sparse_keep_rounds_half_to_even_within_limits(void **state) {
        static const struct {
                double percent;
                uint32_t scored, keep;
        } list[] = {{10, 8, 1}, {30, 8, 2}, {30, 11, 3}, {20, 16, 3}, {50, 5, 2}, {50, 7, 4}, {95, 2, 1}, {0.5, 10, 1}, {95, 10, 9},
                {50, 1, 0}, {50, 0, 0}, {10, 1000, 100}};

        for (size_t i = 0; i < ELEMENTSOF(list); i++)
                assert_int_equal(h3_sparse_keep(list[i].percent, list[i].scored), list[i].keep);
}

static void sparse_rows_in_blocks_have_their_sinks(void **state) {
        LAYOUT *l = layout_of(70, 30, 5, 12, 38); /* 70 + 60 + 570 rows */
        SPARSE *s = sparse_of(l, "sol-attn"), *kv = sparse_of(l, "sla:sinks=exact_kv,keep=30"), *off = sparse_of(l, "sla:sinks=off");

        assert_int_equal(l->rows, 700);
        assert_null(s->order);
        assert_int_equal(s->n, 11);
        for (uint32_t i = 0; i < 11; i++)
                assert_int_equal(s->start[i], 64 * i);
        assert_int_equal(s->start[11], 700);
        assert_true(s->sinks == 3 && s->dense_begin == 1 && s->dense_end == 3);
        assert_true(kv->sinks == 3 && kv->dense_end == 0 && kv->keep == 2);
        assert_true(off->sinks == 0 && off->dense_end == 0 && off->keep == 1);
        assert_int_equal(h3_sparse_block(s, 0), 0);
        assert_int_equal(h3_sparse_block(s, 63), 0);
        assert_int_equal(h3_sparse_block(s, 64), 1);
        assert_int_equal(h3_sparse_block(s, 699), 10);
        assert_int_equal(h3_sparse_row(s, 5), 5);
        assert_int_equal(h3_sparse_row(NULL, 5), 5);
}

static void sparse_cubes_hold_every_row_once(void **state) {
        static const uint64_t shapes[][5] = {{40, 15, 7, 12, 30}, {1, 1, 1, 2, 2}, {64, 32, 4, 8, 8}, {65, 40, 9, 18, 7}};

        for (size_t i = 0; i < ELEMENTSOF(shapes); i++) {
                LAYOUT *l = layout_of(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], shapes[i][4]);
                uint64_t first = h3_layout_video(l)->begin, high = (shapes[i][3] + 1) / 2, wide = (shapes[i][4] + 1) / 2;
                CLEANUP_FREE uint8_t *seen = calloc(l->rows, 1);
                SPARSE *s = sparse_of(l, "vsa");

                assert_int_equal(s->start[s->n], l->rows);
                assert_true(s->sinks == s->dense_end && s->dense_begin == 0 && s->sinks < s->n);
                assert_int_equal(s->start[s->sinks], first);
                for (uint32_t b = 0; b < s->n; b++) {
                        uint64_t size = s->start[b + 1] - s->start[b], corner = s->order[s->start[b]] - first;

                        assert_true(size > 0 && size <= 64);
                        for (uint64_t row = s->start[b]; row < s->start[b + 1]; row++) {
                                uint64_t at = s->order[row];

                                assert_int_equal(seen[at]++, 0);
                                if (row > s->start[b])
                                        assert_true(at > s->order[row - 1]);
                                if (b < s->sinks)
                                        assert_int_equal(at, row);
                                else { /* in the cube of the first one, which starts at a multiple of 4 */
                                        at -= first;
                                        assert_true(at / (high * wide) / 4 == corner / (high * wide) / 4);
                                        assert_true(at / wide % high / 4 == corner / wide % high / 4);
                                        assert_true(at % wide / 4 == corner % wide / 4);
                                }
                        }
                }
        }
}

static void sparse_applies_by_rows_and_sigma(void **state) {
        SparseOptions o = options("sol-attn:min_tokens=100,start=0.2,end=0.9"); /* sigma 0.9796 to 0.5714 */

        assert_true(h3_sparse_applies(&o, 100, 0.9f));
        assert_false(h3_sparse_applies(&o, 99, 0.9f));
        assert_false(h3_sparse_applies(&o, 100, 0.988f));
        assert_true(h3_sparse_applies(&o, 100, 0.9795f));
        assert_true(h3_sparse_applies(&o, 100, 0.5715f));
        assert_false(h3_sparse_applies(&o, 100, 0.5713f));
        assert_false(h3_sparse_applies(&(SparseOptions){}, 100, 0.9f));
}

/* ---- the public packages' masks and outputs ---- */

#define ROWS 700
#define HEADS 2
#define DIM 128
#define WIDTH (HEADS * DIM)
#define BLOCKS_MAX 64

/* The layers below the model's code, as a rank runs them. */
typedef struct Bench {
        DitRun run;
        float q[ROWS * WIDTH], k[ROWS * WIDTH], v[ROWS * WIDTH], gate[ROWS * WIDTH], o[ROWS * WIDTH];
        float means[5][BLOCKS_MAX * WIDTH], score[HEADS * BLOCKS_MAX * BLOCKS_MAX];
        uint32_t list[HEADS * BLOCKS_MAX * BLOCKS_MAX], count[HEADS * BLOCKS_MAX];
        uint8_t mask[HEADS * BLOCKS_MAX * BLOCKS_MAX];
} Bench;

static void widen(const Golden *g, const char *name, float *ret) {
        uint64_t n;
        const uint16_t *half = golden_data(g, name, ST_BF16, &n);

        for (uint64_t i = 0; i < n; i++) {
                uint32_t bits = (uint32_t) half[i] << 16;

                memcpy(ret + i, &bits, sizeof(bits));
        }
}

static Bench *bench_new(const Golden *qkv) {
        Bench *b = calloc(1, sizeof(*b));

        assert_non_null(b);
        widen(qkv, "q", b->q);
        widen(qkv, "k", b->k);
        widen(qkv, "v", b->v);
        b->run = (DitRun){.ops = lk_cpu_ops(LK_CPU_AUTO), .c = &rows_config, .type = LK_F32, .element = 4, .n_rows = ROWS,
                .heads = {0, HEADS}, .q = (uint8_t *) b->q, .k = (uint8_t *) b->k, .v = (uint8_t *) b->v, .q_mean = b->means[0],
                .k_mean = b->means[1], .v_mean = b->means[2], .k_centre = b->means[3], .list = b->list, .count = b->count,
                .score = b->score};
        assert_int_equal(b->run.ops->context_new(2, &b->run.context), 0);
        return b;
}

static void bench_freep(Bench **b) {
        (void) (*b)->run.ops->context_free((*b)->run.context);
        free(*b);
}

#define BENCH CLEANUP(bench_freep) Bench

static LkAttention whole_attention(Bench *b) {
        return (LkAttention){.type = LK_F32, .n_q = ROWS, .n_k = ROWS, .heads = HEADS, .head_dim = DIM,
                .scale = 1.0f / sqrtf((float) DIM), .q = b->q, .k = b->k, .v = b->v, .o = b->o, .q_ld = WIDTH, .k_ld = WIDTH,
                .v_ld = WIDTH, .o_ld = WIDTH};
}

/* [head, query block, key block] of the lists of all n blocks. */
static void mask_of(Bench *b, uint32_t n) {
        memset(b->mask, 0, sizeof(b->mask));
        for (uint32_t i = 0; i < HEADS * n; i++)
                for (uint32_t e = 0; e < b->count[i]; e++)
                        b->mask[i * n + b->list[i * n + e]] = 1;
}

static void attend(Bench *b, H3Sparse *s) {
        const LkAttention a = whole_attention(b);

        assert_true(s->n <= BLOCKS_MAX);
        b->run.sparse = s;
        b->run.block_start = s->start;
        assert_int_equal(dit_sparse_begin(&b->run), 0);
        assert_int_equal(dit_sparse_attend(&b->run, 0, &a, 0), 0);
        mask_of(b, s->n);
}

static void expect_mask(const Golden *g, const char *name, const Bench *b, uint32_t n) {
        char full[64];
        uint64_t size;
        const void *mask;

        (void) snprintf(full, sizeof(full), "%s.mask", name);
        mask = golden_data(g, full, ST_U8, &size);
        assert_int_equal(size, HEADS * n * n);
        if (memcmp(mask, b->mask, size) != 0)
                fail_msg("%s: other blocks are seen", name);
}

/* At the rows of the file. order: which row a packed one is, NULL: itself. */
static void expect_out(const Golden *g, const char *name, const Bench *b, const uint64_t *order) {
        uint64_t n, size;
        const int32_t *rows = golden_data(g, "rows", ST_I32, &n);
        CLEANUP_FREE float *ours = malloc(n * WIDTH * sizeof(float));
        char full[64];
        double d;

        (void) snprintf(full, sizeof(full), "%s.out", name);
        for (uint64_t i = 0; i < n; i++) {
                uint64_t at = (uint64_t) rows[i];

                for (uint64_t packed = 0; order && packed < ROWS; packed++)
                        if (order[packed] == (uint64_t) rows[i])
                                at = packed;
                memcpy(ours + i * WIDTH, b->o + at * WIDTH, WIDTH * sizeof(float));
        }
        d = golden_distance(ours, golden_data(g, full, ST_F32, &size), n * WIDTH, NULL);
        assert_int_equal(size, n * WIDTH);
        if (!(d <= LIMIT))
                fail_msg("%s is %g away", name, d);
}

/* "sol_tau1.3_kvsink": in our words. The file's layout is text 70, sound 60. */
static void words_of(const char *name, json_t *run, char ret[static 200]) {
        const json_t *tau = json_object_get(run, "tau"), *keep = json_object_get(run, "topk_ratio");
        const json_t *sinks = json_object_get(run, "sink_blocks"), *rows = json_object_get(run, "sink_q");
        bool kv = sinks && json_integer_value(json_array_get(sinks, 1)) > 0;
        bool dense = rows && json_integer_value(json_array_get(rows, 1)) > 0;
        char number[64];

        if (!tau && !keep)
                fail_msg("%s: of an unknown kind", name);
        (void) snprintf(number, sizeof(number), tau ? "sol-attn:tau=%g" : "sla:keep=%g",
                tau ? json_real_value(tau) : 100 * json_real_value(keep));
        (void) snprintf(ret, 200, "%s,sinks=%s,tail=%s", number, dense ? "exact_kv_and_rows" : kv ? "exact_kv" : "off",
                json_is_false(json_object_get(run, "tail")) ? "off" : "on");
}

static json_t *runs_of(const Golden *g) {
        json_t *runs = json_loads(st_header_meta(g->header, "runs"), 0, NULL);

        assert_true(json_is_object(runs) && json_object_size(runs) > 0);
        return runs;
}

static void sparse_of_golden_file_sol_and_sla(void **state) {
        if (!golden_is_there("sparse_sol_sla"))
                skip();

        CLEANUP(golden_freep) Golden *g = golden_open("sparse_sol_sla");
        LAYOUT *l = layout_of(70, 30, 5, 12, 38);
        BENCH *b = bench_new(g);
        json_t *runs = runs_of(g), *run;
        const char *name;

        json_object_foreach(runs, name, run) {
                char text[200];

                words_of(name, run, text);

                SPARSE *s = sparse_of(l, text);

                attend(b, s);
                expect_mask(g, name, b, s->n);
                expect_out(g, name, b, NULL);
        }
        json_decref(runs);
}

static void pack(const float *from, const uint64_t *order, float *to) {
        for (uint64_t i = 0; i < ROWS; i++)
                memcpy(to + i * WIDTH, from + order[i] * WIDTH, WIDTH * sizeof(float));
}

static void sparse_of_golden_file_vsa(void **state) {
        if (!golden_is_there("sparse_vsa"))
                skip();

        CLEANUP(golden_freep) Golden *g = golden_open("sparse_vsa"), *qkv = golden_open("sparse_sol_sla");
        LAYOUT *l = layout_of(40, 15, 7, 12, 30);
        BENCH *from = bench_new(qkv), *b = bench_new(qkv);
        SPARSE *s = sparse_of(l, "vsa:keep=20");
        CLEANUP_FREE float *part = NULL;
        const int32_t *tiles = golden_data(g, "tiles", ST_I32, NULL), *live = golden_data(g, "block_len", ST_I32, NULL);
        const int32_t *rows;
        uint64_t n;

        assert_int_equal(s->n, golden_tensor(g, "block_len")->shape[0]);
        for (uint32_t i = 0; i < s->n; i++) {
                assert_int_equal(s->start[i + 1] - s->start[i], live[i]);
                for (uint32_t k = 0; k < (uint32_t) live[i]; k++)
                        assert_int_equal(s->order[s->start[i] + k], tiles[i * 64 + k]);
        }

        rows = golden_data(g, "rows", ST_I32, &n);
        part = malloc(n * WIDTH * sizeof(float));
        widen(g, "gate", part);
        for (uint64_t i = 0; i < n; i++)
                memcpy(from->gate + rows[i] * WIDTH, part + i * WIDTH, WIDTH * sizeof(float));
        pack(from->q, s->order, b->q);
        pack(from->k, s->order, b->k);
        pack(from->v, s->order, b->v);
        pack(from->gate, s->order, b->gate);

        attend(b, s);
        expect_mask(g, "vsa_nogate", b, s->n);
        expect_out(g, "vsa_nogate", b, s->order);
        b->run.coarse = b->means[4];
        b->run.coarse_gate = (uint8_t *) b->gate;
        attend(b, s);
        expect_mask(g, "vsa_gate", b, s->n);
        expect_out(g, "vsa_gate", b, s->order);
}

/* Another algorithm: the best blocks of 64 or 128 and nothing else. What it has in common with ours is held to its file:
 * which blocks are the best ones, and attention over them. Its tail is another one (h3.md 7.5), which is not ours. */
static void sparse_of_golden_file_package(void **state) {
        if (!golden_is_there("sparse_h3pkg"))
                skip();

        CLEANUP(golden_freep) Golden *g = golden_open("sparse_h3pkg"), *qkv = golden_open("sparse_sol_sla");
        BENCH *b = bench_new(qkv);
        json_t *runs = runs_of(g), *run;
        const char *name;

        json_object_foreach(runs, name, run) {
                uint32_t size = (uint32_t) json_integer_value(json_object_get(run, "block")), n = (ROWS + size - 1) / size;
                uint32_t start[BLOCKS_MAX], small = (ROWS + 63) / 64, of = size / 64;
                LkBlocks blocks = {small, start};
                LkRoute route = {.heads = HEADS, .head_dim = DIM, .n = n, .n_q = n, .scale = 1, .q = b->means[0], .k = b->means[1],
                        .by_rank = true, .keep = (uint32_t) json_integer_value(json_object_get(run, "topk")), .list = b->list,
                        .count = b->count, .score = b->score};
                LkSparseAttention a = {.a = whole_attention(b), .blocks = blocks, .n_blocks = small, .list = b->list, .count = b->count,
                        .score = b->score};

                for (uint32_t i = 0; i <= small; i++)
                        start[i] = i < small ? i * 64 : ROWS;
                for (int x = 0; x < 2; x++)
                        for (uint32_t i = 0; i < n; i++)
                                for (uint32_t d = 0; d < WIDTH; d++) {
                                        uint32_t end = (i + 1) * size < ROWS ? (i + 1) * size : ROWS;
                                        double sum = 0;

                                        for (uint32_t row = i * size; row < end; row++)
                                                sum += (double) (x ? b->k : b->q)[row * WIDTH + d];
                                        b->means[x][i * WIDTH + d] = (float) (sum / (end - i * size));
                                }
                assert_int_equal(b->run.ops->route(b->run.context, &route), 0);
                mask_of(b, n);
                expect_mask(g, name, b, n);
                if (json_is_true(json_object_get(run, "taylor")))
                        continue;

                for (uint32_t i = 0; i < HEADS * small; i++) {
                        const uint8_t *mask = b->mask + (i / small * n + i % small / of) * n;

                        b->count[i] = 0;
                        for (uint32_t k = 0; k < small; k++)
                                if (mask[k / of])
                                        b->list[i * small + b->count[i]++] = k;
                }
                assert_int_equal(b->run.ops->sparse_attention(b->run.context, &a), 0);
                expect_out(g, name, b, NULL);
        }
        json_decref(runs);
}

/* ---- a step against a second implementation ---- */

/* What a step said of its first block. */
typedef struct Taps {
        float *q, *k, *v, *gate, *attn;
        uint64_t rows, columns;
        uint64_t seen, all; /* pairs of blocks, of all of them */
} Taps;

static void keep_tap(void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns) {
        static const char *const names[] = {"block.0.q", "block.0.k", "block.0.v", "block.0.gate", "block.0.attn"};
        Taps *t = userdata;
        float **to[] = {&t->q, &t->k, &t->v, &t->gate, &t->attn};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                if (strcmp(name, names[i]) == 0) {
                        size_t size = rows * columns * sizeof(float);

                        *to[i] = malloc(size);
                        assert_non_null(*to[i]);
                        memcpy(*to[i], values, size);
                        t->rows = rows;
                        t->columns = columns;
                }
}

static void keep_seen(void *userdata, uint64_t seen, uint64_t all) {
        Taps *t = userdata;

        t->seen = seen;
        t->all = all;
}

static void taps_done(Taps *t) {
        free(t->q);
        free(t->k);
        free(t->v);
        free(t->gate);
        free(t->attn);
}

/* One head by the description (h3.md 7.2 - 7.4), in f64: every block against every block. */
typedef struct Naive {
        const Taps *t;
        const H3Sparse *s;
        uint64_t head;
        double *qc, *kc, *vm; /* [n, DIM] means; kc centred */
        double *score;        /* [n, n] */
        bool *seen;
} Naive;

static double at(const float *x, const Naive *n, uint64_t row, uint64_t d) {
        return (double) x[row * n->t->columns + n->head * DIM + d];
}

static void naive_means(Naive *n) {
        const H3Sparse *s = n->s;

        for (uint32_t b = 0; b < s->n; b++)
                for (uint64_t d = 0; d < DIM; d++) {
                        double sum[3] = {};

                        for (uint64_t row = s->start[b]; row < s->start[b + 1]; row++) {
                                sum[0] += at(n->t->q, n, row, d);
                                sum[1] += at(n->t->k, n, row, d);
                                sum[2] += at(n->t->v, n, row, d);
                        }
                        n->qc[b * DIM + d] = sum[0] / (s->start[b + 1] - s->start[b]);
                        n->kc[b * DIM + d] = sum[1] / (s->start[b + 1] - s->start[b]);
                        n->vm[b * DIM + d] = sum[2] / (s->start[b + 1] - s->start[b]);
                }
        for (uint64_t d = 0; d < DIM; d++) {
                double middle = 0;

                for (uint32_t b = 0; b < s->n; b++)
                        middle += n->kc[b * DIM + d] / s->n;
                for (uint32_t b = 0; b < s->n; b++)
                        n->kc[b * DIM + d] -= middle;
        }
}

static bool naive_chosen(const Naive *n, uint32_t i, uint32_t b) {
        const H3Sparse *s = n->s;
        double limit = 0, c = M_LOG2E / sqrt(DIM);
        uint32_t better = 0;

        if (s->options.method == SPARSE_SOL) {
                for (uint64_t d = 0; d < DIM; d++) {
                        double variance = 0;

                        for (uint32_t e = 0; e < s->n; e++)
                                variance += n->kc[e * DIM + d] * n->kc[e * DIM + d] / s->n;
                        limit += n->qc[i * DIM + d] * n->qc[i * DIM + d] * variance;
                }
                return n->score[i * s->n + b] * M_LOG2E > (double) s->options.tau * sqrt(c * c * limit + 1e-6);
        }
        for (uint32_t e = s->sinks; e < s->n; e++)
                better += n->score[i * s->n + e] > n->score[i * s->n + b];
        return b >= s->sinks && better < s->keep;
}

static void naive_route(Naive *n) {
        const H3Sparse *s = n->s;

        for (uint32_t i = 0; i < s->n * s->n; i++) {
                n->score[i] = 0;
                for (uint64_t d = 0; d < DIM; d++)
                        n->score[i] += n->qc[i / s->n * DIM + d] * n->kc[i % s->n * DIM + d] / sqrt(DIM);
        }
        for (uint32_t i = 0; i < s->n; i++)
                for (uint32_t b = 0; b < s->n; b++)
                        n->seen[i * s->n + b] = b < s->sinks || (i >= s->dense_begin && i < s->dense_end) || (i > b ? i - b : b - i) <= 1 ||
                                                naive_chosen(n, i, b);
}

/* The row's output of the head. Keys are taken as they are: those that are pooled have their centre put back. */
static void naive_row(const Naive *n, uint32_t block, uint64_t row, double *o) {
        const H3Sparse *s = n->s;
        double sum = 0, shift = 0;

        for (uint64_t d = 0; d < DIM; d++) {
                double middle = 0;

                for (uint64_t key = s->start[0]; key < s->start[1]; key++)
                        middle += at(n->t->k, n, key, d) / (s->start[1] - s->start[0]);
                shift += at(n->t->q, n, row, d) * (middle - n->kc[d]) / sqrt(DIM);
                o[d] = 0;
        }
        for (uint32_t b = 0; b < s->n; b++) {
                bool seen = n->seen[block * s->n + b];

                for (uint64_t key = s->start[b]; (seen || s->options.tail) && key < s->start[b + 1]; key++) {
                        double score = seen ? 0 : n->score[block * s->n + b] + shift, p;

                        for (uint64_t d = 0; seen && d < DIM; d++)
                                score += at(n->t->q, n, row, d) * at(n->t->k, n, key, d) / sqrt(DIM);
                        p = exp(score);
                        sum += p;
                        for (uint64_t d = 0; d < DIM; d++)
                                o[d] += p * (seen ? at(n->t->v, n, key, d) : n->vm[b * DIM + d]);
                }
        }
        for (uint64_t d = 0; d < DIM; d++)
                o[d] /= sum;

        if (!n->t->gate)
                return;
        sum = 0;
        for (uint32_t b = 0; b < s->n; b++)
                sum += exp(n->score[block * s->n + b]);
        for (uint32_t b = 0; b < s->n; b++)
                for (uint64_t d = 0; d < DIM; d++)
                        o[d] += at(n->t->gate, n, row, d) * exp(n->score[block * s->n + b]) / sum * n->vm[b * DIM + d];
}

#define HEAD 5u /* one is enough: f64 takes its time */

/* A head into ret, [rows, DIM]; NULL: not wanted. Returns how many pairs of blocks are seen. */
static uint64_t naive(const Taps *t, const H3Sparse *s, uint64_t head, float *ret) {
        CLEANUP_FREE double *qc = calloc(s->n * DIM, 8), *kc = calloc(s->n * DIM, 8), *vm = calloc(s->n * DIM, 8),
                            *score = calloc(s->n * s->n, 8);
        CLEANUP_FREE bool *seen = calloc(s->n * s->n, 1);
        Naive n = {t, s, head, qc, kc, vm, score, seen};
        uint64_t n_seen = 0;

        naive_means(&n);
        naive_route(&n);
        for (uint32_t b = 0; ret && b < s->n; b++)
                for (uint64_t row = s->start[b]; row < s->start[b + 1]; row++) {
                        double o[DIM];

                        naive_row(&n, b, row, o);
                        for (uint64_t d = 0; d < DIM; d++)
                                ret[row * DIM + d] = (float) o[d];
                }
        for (uint32_t i = 0; i < s->n * s->n; i++)
                n_seen += seen[i];
        return n_seen;
}

/* The tiny model with gates that a counter drew. */
static GoldenModel *gated_model(StType type) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
        GoldenModel *g = calloc(1, sizeof(*g));
        H3File file = {.name = "gated.safetensors"};
        uint64_t n = 1024 * 64, element = type == ST_F32 ? 4 : 2;
        CLEANUP_FREE uint8_t *bytes[3] = {};
        uint32_t seed = 5;
        Fault f = {};

        assert_non_null(g);
        for (int i = 0; i < 3; i++) {
                char name[64];

                bytes[i] = malloc(n * 4);
                assert_non_null(bytes[i]);
                for (uint64_t k = 0; k < n; k++) {
                        float x;
                        uint32_t bits;

                        seed = seed * 1664525u + 1013904223u;
                        x = (float) (int32_t) seed / 2147483648.0f * 0.2f;
                        memcpy(&bits, &x, 4);
                        bits &= 0xffff0000u;
                        memcpy(bytes[i] + element * k, (uint8_t *) &bits + 4 - element, element);
                }
                (void) snprintf(name, sizeof(name), "blocks.%d.attn.to_gate_compress.weight", i);
                checkpoint_add(c, name, type, 2, 1024, 64, bytes[i]);
        }
        g->bytes[g->n_bytes++] = checkpoint_write(c, &file.size);
        file.bytes = g->bytes[0];
        if (h3_model_open(&file, 1, &(H3ModelOptions){}, &g->model, &f) < 0)
                fail_msg("%s", f.text);
        free(bytes[1]);
        free(bytes[2]);
        return g;
}

static void run_step(const H3Model *m, const GoldenCase *k, H3Compute compute, const H3Sparse *s, Taps *taps, GoldenStep *ret) {
        const H3StepHooks hooks = {.on_tap = keep_tap, .on_seen = keep_seen, .userdata = taps};
        CLEANUP_FREE void *refined = golden_refine(m, k, compute);
        H3StepInput in = golden_input(k, compute, refined);

        *ret = (GoldenStep){.n_video = k->n_video, .n_audio = k->n_audio};
        golden_run(m, &in, s, taps ? &hooks : NULL, k->n_video, k->n_audio, &ret->video, &ret->audio);
}

static H3Sparse *sparse_of_case(const H3Model *m, const GoldenCase *k, const char *text) {
        const SparseOptions o = options(text);
        H3Sparse *s = NULL;

        assert_int_equal(h3_sparse_new(&m->config, k->layout, &o, &s), 0);
        return s;
}

static void step_sparse_is_the_description_in_f64(void **state) {
        static const struct {
                const char *text;
                H3Compute compute;
        } texts[] = {
                {"sol-attn:tau=0.5,sinks=exact_kv,dense_blocks=1-2", H3_COMPUTE_F32},
                {"sol-attn:tau=1,sinks=off,tail=off,dense_blocks=1-2", H3_COMPUTE_F32},
                {"sol-attn:tau=0.5,sinks=off,dense_blocks=1-2", H3_COMPUTE_BF16},
                {"sla:keep=20,sinks=exact_kv_and_rows,dense_blocks=1+2", H3_COMPUTE_F32},
                {"vsa:keep=10,dense_blocks=1-2", H3_COMPUTE_F32},
                {"vsa:keep=20,dense_blocks=1-2", H3_COMPUTE_BF16},
        };

        for (size_t i = 0; i < ELEMENTSOF(texts); i++) {
                const char *text = texts[i].text;
                const bool rounded = texts[i].compute == H3_COMPUTE_BF16, vsa = strncmp(text, "vsa", 3) == 0;
                CLEANUP(golden_model_freep) GoldenModel *m = vsa ? gated_model(rounded ? ST_BF16 : ST_F32) : golden_comfy();
                CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_long", &m->model->config);
                SPARSE *s = sparse_of_case(m->model, k, text);
                CLEANUP_FREE float *wanted = NULL, *ours = NULL;
                CLEANUP(golden_step_done) GoldenStep step = {};
                Taps t = {};
                uint64_t pairs = (uint64_t) s->n * s->n, seen = 0, own;
                double d;

                run_step(m->model, k, texts[i].compute, s, &t, &step);
                assert_true(t.q && t.k && t.v && t.attn && !!t.gate == vsa);
                wanted = malloc(t.rows * DIM * sizeof(float));
                ours = malloc(t.rows * DIM * sizeof(float));
                for (uint64_t row = 0; row < t.rows; row++)
                        memcpy(ours + row * DIM, t.attn + row * t.columns + HEAD * DIM, DIM * sizeof(float));
                own = naive(&t, s, HEAD, wanted);
                assert_true(100 * own > 20 * pairs && 100 * own < 95 * pairs); /* there was something to choose */
                for (uint64_t head = 0; head < m->model->config.heads; head++)
                        seen += head == HEAD ? own : naive(&t, s, head, NULL);
                assert_int_equal(t.all, pairs * m->model->config.heads); /* of the one block that is sparse */
                assert_int_equal(t.seen, seen);
                d = golden_distance(ours, wanted, t.rows * DIM, NULL);
                if (!(d <= (rounded ? 4e-3 : LIMIT))) /* probabilities, means and the output are rounded to 8 bits */
                        fail_msg("%s: %g away", text, d);
                taps_done(&t);
        }
}

/* Every patch of the film in another way: kept, generated, half of it. */
static void mask_film(const H3Model *m, GoldenCase *k) {
        const H3Shape *s = &k->layout->shape;
        uint64_t n = s->frames * s->height * s->width;
        CLEANUP_FREE float *mask = malloc(n * sizeof(float));
        Fault f = {};

        assert_non_null(mask);
        for (uint64_t i = 0; i < n; i++)
                mask[i] = (float) (i * 7 / 3 % 3) / 2;
        if (h3_layout_set_masks(k->layout, &m->config, mask, NULL, &f) < 0)
                fail_msg("%s", f.text);
}

/* Rows that are packed in another order and nothing else: the step is dense attention. */
static void step_of_dense_blocks_is_dense(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy(), *gated = gated_model(ST_BF16);
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_long", &m->model->config);
        SPARSE *s = sparse_of_case(m->model, k, "sol-attn:dense_blocks=0-2"), *cubes = sparse_of_case(m->model, k, "vsa:dense_blocks=0-2"),
               *some = sparse_of_case(m->model, k, "sol-attn:dense_blocks=0-1");
        CLEANUP(golden_step_done) GoldenStep dense = {}, sparse = {}, ordered = {}, other = {}, masked = {}, masked_ordered = {};

        run_step(m->model, k, H3_COMPUTE_F32, NULL, NULL, &dense);
        run_step(m->model, k, H3_COMPUTE_F32, s, NULL, &sparse);
        assert_memory_equal(sparse.video, dense.video, dense.n_video * sizeof(float));
        assert_memory_equal(sparse.audio, dense.audio, dense.n_audio * sizeof(float));
        run_step(gated->model, k, H3_COMPUTE_F32, cubes, NULL, &ordered);
        assert_true(golden_distance(ordered.video, dense.video, dense.n_video, NULL) < 5e-6);
        assert_true(golden_distance(ordered.audio, dense.audio, dense.n_audio, NULL) < 5e-6);
        run_step(m->model, k, H3_COMPUTE_F32, some, NULL, &other);
        assert_true(golden_distance(other.video, dense.video, dense.n_video, NULL) > 1e-5);

        mask_film(m->model, k);
        run_step(m->model, k, H3_COMPUTE_F32, NULL, NULL, &masked);
        run_step(gated->model, k, H3_COMPUTE_F32, cubes, NULL, &masked_ordered);
        assert_true(golden_distance(masked.video, dense.video, dense.n_video, NULL) > 1e-2);
        assert_true(golden_distance(masked_ordered.video, masked.video, dense.n_video, NULL) < 5e-6);
        assert_true(golden_distance(masked_ordered.audio, masked.audio, dense.n_audio, NULL) < 5e-6);
}

/* A method of another kind of model, another sequence, a backend without: no step. */
static void step_that_cannot_be_sparse_is_refused(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy(), *gated = gated_model(ST_BF16);
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config),
                                    *odd = golden_case_open("case_t2va_odd", &m->model->config);
        SPARSE *sol = sparse_of_case(m->model, k, "sol-attn"), *vsa = sparse_of_case(m->model, k, "vsa");
        const H3Range rows = {0, k->layout->rows}, odd_rows = {0, odd->layout->rows}, heads = {0, 8};
        const H3Plan good = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads, .sparse = sol};
        H3Plan other = good, far = good;
        LkOps without = *lk_cpu_ops(LK_CPU_AUTO);
        H3Rank rank = {.ops = &without, .plan = &good};
        H3StepInput in = golden_input(k, H3_COMPUTE_BF16, NULL);
        uint64_t bytes, dense;
        Fault f = {};

        other.sparse = vsa;
        far.rows = &odd_rows;
        assert_int_equal(h3_step_memory(m->model, k->layout, &other, 0, H3_COMPUTE_BF16, 0, &bytes), -EINVAL);
        assert_int_equal(h3_step_memory(gated->model, k->layout, &good, 0, H3_COMPUTE_BF16, 0, &bytes), -EINVAL);
        assert_int_equal(h3_step_memory(m->model, odd->layout, &far, 0, H3_COMPUTE_BF16, 0, &bytes), -EINVAL);
        assert_int_equal(h3_step_memory(m->model, k->layout, &good, 0, H3_COMPUTE_BF16, 0, &bytes), 0);
        other.sparse = NULL;
        assert_int_equal(h3_step_memory(m->model, k->layout, &other, 0, H3_COMPUTE_BF16, 0, &dense), 0);
        assert_true(bytes > dense);

        without.sparse_attention = NULL;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, NULL, NULL, &f), -EOPNOTSUPP);
        assert_string_equal(f.name, FAULT_NOT_SUPPORTED);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(sparse_keep_rounds_half_to_even_within_limits),
                cmocka_unit_test(sparse_rows_in_blocks_have_their_sinks),
                cmocka_unit_test(sparse_cubes_hold_every_row_once),
                cmocka_unit_test(sparse_applies_by_rows_and_sigma),
                cmocka_unit_test(sparse_of_golden_file_sol_and_sla),
                cmocka_unit_test(sparse_of_golden_file_vsa),
                cmocka_unit_test(sparse_of_golden_file_package),
                cmocka_unit_test(step_sparse_is_the_description_in_f64),
                cmocka_unit_test(step_of_dense_blocks_is_dense),
                cmocka_unit_test(step_that_cannot_be_sparse_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
