/* SPDX-License-Identifier: Apache-2.0 */

/* Sparse attention of the CUDA backend: means and lists have the CPU's bits, and so has attention in shapes that take the plain kernel;
 * that of bf16 is near it, has the bits of the portable dense kernel if all blocks are seen, and a row's bits depend on no cut. Needs a
 * CUDA device; without one every test skips. */

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "tests/gpu/numbers.h"

#define ELEMENTSOF(x) (sizeof(x) / sizeof((x)[0]))

/* The same numbers on the host and on the device. */
typedef struct Array {
        uint64_t size;
        void *host, *device;
} Array;

static Array array_new(uint64_t size) {
        Array a = { .size = size, .host = malloc(size) };

        assert_non_null(a.host);
        memset(a.host, 0x5a, size);
        assert_int_equal(lk_cuda_ops()->memory_new(gpu, size, &a.device), 0);
        return a;
}

static void array_up(const Array *a) {
        assert_int_equal(lk_cuda_ops()->upload(gpu, a->device, a->host, a->size), 0);
}

/* What the device has; free()d by the caller. */
static void *array_down(const Array *a) {
        void *p = malloc(a->size);

        assert_non_null(p);
        assert_int_equal(lk_cuda_ops()->download(gpu, p, a->device, a->size), 0);
        return p;
}

static Array random_array(LkType t, uint64_t n, float size) {
        Array a = array_new(n * lk_type_size(t));

        for (uint64_t i = 0; i < n; i++)
                put(a.host, t, i, size * normal());
        array_up(&a);
        return a;
}

static void array_free(Array *a) {
        free(a->host);
        lk_cuda_ops()->memory_free(gpu, a->device);
}

/* Bits, but one NaN is as good as another. */
static void assert_same_floats(const float *a, const float *b, uint64_t n, const char *what) {
        for (uint64_t i = 0; i < n; i++)
                if (memcmp(a + i, b + i, 4) != 0 && !(isnan(a[i]) && isnan(b[i])))
                        fail_msg("%s: number %llu is %a, not %a", what, (unsigned long long) i, (double) a[i], (double) b[i]);
}

/* Starts of n blocks of `rows` rows, 0: of 1 to 64, the last one with 5 less. */
static Array starts_new(uint32_t n, uint32_t rows) {
        Array a = array_new((n + 1) * sizeof(uint32_t));
        uint32_t *start = a.host;

        start[0] = 0;
        for (uint32_t b = 0; b < n; b++)
                start[b + 1] = start[b] + (rows > 0 ? rows : 1 + next() % LK_BLOCK_ROWS);
        if (rows > 5)
                start[n] -= 5;
        array_up(&a);
        return a;
}

static uint64_t rows_of(const Array *starts) {
        return ((const uint32_t *) starts->host)[starts->size / 4 - 1];
}

static void block_means_same_bits(void **state) {
        static const struct {
                uint32_t n, rows, heads, dim, more;
        } cases[] = { { 1, 1, 1, 4, 0 }, { 3, 64, 2, 24, 8 }, { 67, 0, 3, 40, 0 }, { 130, 64, 2, 128, 3 },
                { 9, 7, 5, 12, 1 }, { 301, 0, 1, 72, 8 } };

        need_device();
        for (unsigned i = 0; i < 4 * ELEMENTSOF(cases); i++) {
                const LkType t = i % 2 ? LK_BF16 : LK_F32;
                const uint32_t n = cases[i / 4].n;
                const uint64_t width = cases[i / 4].heads * cases[i / 4].dim, ld = width + cases[i / 4].more;
                Array start = starts_new(n, cases[i / 4].rows), x = random_array(t, rows_of(&start) * ld, 3);
                Array mean = array_new(n * width * 4), centre = array_new(2 * width * 4);
                LkBlockMeans a = { .type = t, .heads = cases[i / 4].heads, .head_dim = cases[i / 4].dim, .x_ld = ld };
                float *got[2];

                put(x.host, t, width / 2, NAN);
                put(x.host, t, width - 1, -0.0f);
                array_up(&x);
                a.blocks = (LkBlocks){ n, start.device };
                a.x = x.device;
                a.mean = mean.device;
                a.centre = i / 2 % 2 ? centre.device : NULL;
                array_up(&centre); /* untouched, it stays as on the host */
                assert_int_equal(lk_cuda_ops()->block_means(gpu, &a), 0);
                got[0] = array_down(&mean);
                got[1] = array_down(&centre);
                a.blocks.start = start.host;
                a.x = x.host;
                a.mean = mean.host;
                a.centre = a.centre ? centre.host : NULL;
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->block_means(cpu, &a), 0);
                assert_same_floats(got[0], mean.host, n * width, "mean");
                assert_same_floats(got[1], centre.host, 2 * width, "centre");
                free(got[0]);
                free(got[1]);
                array_free(&start);
                array_free(&x);
                array_free(&mean);
                array_free(&centre);
        }
}

typedef struct Rule {
        bool by_rank;
        uint32_t keep, sinks, dense_begin, dense_end, reach;
        float tau;
} Rule;

/* `spoiled`: a block is no number, another is twice there, one begins with -0. */
static void check_route(uint32_t n, uint32_t heads, uint32_t dim, uint32_t first, uint32_t n_q, const Rule *rule, bool spoiled) {
        const uint64_t width = (uint64_t) heads * dim, lists = (uint64_t) heads * n_q;
        Array q = random_array(LK_F32, n * width, 1), k = random_array(LK_F32, n * width, 1), variance = random_array(LK_F32, width, 1),
              list = array_new(lists * n * 4), count = array_new(lists * 4), score = array_new(lists * n * 4);
        LkRoute a = { .heads = heads,
                .head_dim = dim,
                .n = n,
                .first = first,
                .n_q = n_q,
                .scale = 1 / sqrtf((float) dim),
                .q = q.device,
                .k = k.device,
                .variance = variance.device,
                .by_rank = rule->by_rank,
                .keep = rule->keep,
                .tau = rule->tau,
                .sinks = rule->sinks,
                .dense_begin = rule->dense_begin,
                .dense_end = rule->dense_end,
                .reach = rule->reach,
                .list = list.device,
                .count = count.device,
                .score = score.device };
        void *got[3];

        for (uint64_t i = 0; i < width; i++)
                put(variance.host, LK_F32, i, fabsf((float) get(variance.host, LK_F32, i)));
        if (spoiled && n > 9) {
                for (uint64_t i = 0; i < width; i++)
                        put(k.host, LK_F32, 3 * width + i, NAN);
                put(k.host, LK_F32, 6 * width, -0.0f);
                memcpy((float *) k.host + 9 * width, (float *) k.host + 8 * width, width * 4);
        }
        array_up(&k);
        array_up(&variance);
        assert_int_equal(lk_cuda_ops()->route(gpu, &a), 0);
        got[0] = array_down(&list);
        got[1] = array_down(&count);
        got[2] = array_down(&score);
        a.q = q.host;
        a.k = k.host;
        a.variance = variance.host;
        a.list = list.host;
        a.count = count.host;
        a.score = score.host;
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->route(cpu, &a), 0);
        assert_same_floats(got[2], score.host, lists * n, "score");
        assert_memory_equal(got[1], count.host, count.size);
        assert_memory_equal(got[0], list.host, list.size);
        for (int i = 0; i < 3; i++)
                free(got[i]);
        array_free(&q);
        array_free(&k);
        array_free(&variance);
        array_free(&list);
        array_free(&count);
        array_free(&score);
}

static void route_same_lists(void **state) {
        static const Rule rules[] = { { .tau = 1.3f, .reach = 2 }, { .tau = 0.5f, .sinks = 3, .reach = 1 }, { .tau = -1, .sinks = 7 },
                { .tau = 2, .sinks = 3, .dense_begin = 1, .dense_end = 3, .reach = 2 }, { .by_rank = true, .keep = 4 },
                { .by_rank = true, .keep = 9, .sinks = 5, .reach = 2 }, { .by_rank = true, .keep = 1000000 },
                { .by_rank = true, .keep = 0, .reach = 2 }, { .by_rank = true, .keep = 1, .sinks = 1000000 } };
        static const struct {
                uint32_t n, heads, dim, first, n_q;
        } cases[] = { { 1, 1, 4, 0, 1 }, { 41, 3, 16, 0, 41 }, { 41, 3, 20, 5, 7 }, { 200, 2, 33, 100, 100 }, { 1152, 2, 128, 1088, 64 },
                { 1152, 1, 128, 0, 130 }, { 65, 2, 256, 64, 1 } };

        need_device();
        for (unsigned i = 0; i < ELEMENTSOF(rules) * ELEMENTSOF(cases); i++) {
                const unsigned c = i % ELEMENTSOF(cases);

                if (is_part() && cases[c].n > 200)
                        continue;
                check_route(cases[c].n, cases[c].heads, cases[c].dim, cases[c].first, cases[c].n_q, rules + i / ELEMENTSOF(cases), i % 2);
        }
}

/* A sequence in n blocks, and lists that a counter drew. */
typedef struct Scene {
        LkType type;
        uint32_t n, heads, dim;
        uint64_t rows, ld;
        Array start, q, k, v, o, gate, value, centre, coarse, score, list, count;
} Scene;

/* rows: as starts_new(). share: of blocks that are seen, in 1 / 16; a row's numbers are `more` further apart than they are many. */
static Scene scene_new(LkType t, uint32_t n, uint32_t rows, uint32_t heads, uint32_t dim, uint32_t more, uint32_t share) {
        Scene s = { .type = t, .n = n, .heads = heads, .dim = dim, .ld = (uint64_t) heads * dim + more, .start = starts_new(n, rows) };
        const uint64_t width = (uint64_t) heads * dim, lists = (uint64_t) heads * n;

        s.rows = rows_of(&s.start);
        s.q = random_array(t, s.rows * s.ld, 2);
        s.k = random_array(t, s.rows * s.ld, 1);
        s.v = random_array(t, s.rows * s.ld, 1);
        s.gate = random_array(t, s.rows * s.ld, 0.5f);
        s.o = random_array(t, s.rows * s.ld, 1);
        s.value = random_array(LK_F32, n * width, 1);
        s.centre = random_array(LK_F32, width, 0.3f);
        s.coarse = random_array(LK_F32, n * width, 1);
        s.score = random_array(LK_F32, lists * n, 1);
        s.list = array_new(lists * n * 4);
        s.count = array_new(lists * 4);
        for (uint64_t i = 0; i < lists; i++) {
                uint32_t *list = (uint32_t *) s.list.host + i * n, *rest = calloc(n, 4), seen = 0, others = 0;

                assert_non_null(rest);
                for (uint32_t b = 0; b < n; b++)
                        if (next() % 16 < share)
                                list[seen++] = b;
                        else
                                rest[others++] = b;
                ((uint32_t *) s.count.host)[i] = seen;
                memcpy(list + seen, rest, others * 4);
                free(rest);
        }
        array_up(&s.list);
        array_up(&s.count);
        return s;
}

static void scene_free(Scene *s) {
        Array *all[] = { &s->start, &s->q, &s->k, &s->v, &s->o, &s->gate, &s->value, &s->centre, &s->coarse, &s->score, &s->list,
                &s->count };

        for (unsigned i = 0; i < ELEMENTSOF(all); i++)
                array_free(all[i]);
}

/* The kinds of h3.md 7: pooled tail, none, none with the gate; all at once. */
static LkSparseAttention scene_call(const Scene *s, unsigned kind, bool device) {
        const Array *in[] = { &s->q, &s->k, &s->v, &s->o, &s->start, &s->list, &s->count, &s->score, &s->value, &s->centre, &s->gate,
                &s->coarse };
        const bool tail = kind == 0 || kind == 3, gated = kind >= 2;
        void *p[ELEMENTSOF(in)];

        for (unsigned i = 0; i < ELEMENTSOF(in); i++)
                p[i] = device ? in[i]->device : in[i]->host;
        return (LkSparseAttention){
                .a = { .type = s->type,
                        .n_q = s->rows,
                        .n_k = s->rows,
                        .heads = s->heads,
                        .head_dim = s->dim,
                        .scale = 1 / sqrtf((float) s->dim),
                        .q = p[0],
                        .k = p[1],
                        .v = p[2],
                        .o = p[3],
                        .q_ld = s->ld,
                        .k_ld = s->ld,
                        .v_ld = s->ld,
                        .o_ld = s->ld },
                .blocks = { s->n, p[4] },
                .n_blocks = s->n,
                .list = p[5],
                .count = p[6],
                .score = p[7],
                .value = tail ? p[8] : NULL,
                .centre = tail ? p[9] : NULL,
                .gate = gated ? p[10] : NULL,
                .gate_ld = s->ld,
                .coarse = gated ? p[11] : NULL,
        };
}

/* o of the device, which held something else before. */
static uint8_t *run(const Scene *s, const LkSparseAttention *a) {
        array_up(&s->o);
        assert_int_equal(lk_cuda_ops()->sparse_attention(gpu, a), 0);
        return array_down(&s->o);
}

static uint8_t *run_cpu(const Scene *s, const LkSparseAttention *a) {
        uint8_t *o = malloc(s->o.size);
        LkSparseAttention b = *a;

        assert_non_null(o);
        memcpy(o, s->o.host, s->o.size);
        b.a.o = o;
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->sparse_attention(cpu, &b), 0);
        return o;
}

static double distance(const Scene *s, const uint8_t *a, const uint8_t *b) {
        double off = 0, all = 0;

        for (uint64_t r = 0; r < s->rows; r++)
                for (uint64_t i = 0; i < (uint64_t) s->heads * s->dim; i++) {
                        off += pow(get(a, s->type, r * s->ld + i) - get(b, s->type, r * s->ld + i), 2);
                        all += pow(get(b, s->type, r * s->ld + i), 2);
                }
        return all > 0 ? sqrt(off / all) : off > 0;
}

/* f32, and what the fast kernel cannot take. */
static void sparse_attention_plain_same_bits_as_cpu(void **state) {
        need_device();
        for (unsigned i = 0; i < 24; i++) {
                const LkType t = i % 2 ? LK_BF16 : LK_F32;
                /* bf16: rows that start at odd places, a head size that is no multiple of 8, a large one */
                const uint32_t dim = i / 8 == 0 ? 20 : i / 8 == 1 ? 128 : 200;
                Scene s = scene_new(t, 37, i / 8 == 1 ? 64 : 0, 2, dim, 3, i % 3 == 0 ? 2 : 6);
                LkSparseAttention a = scene_call(&s, i / 2 % 4, true), b = scene_call(&s, i / 2 % 4, false);
                uint8_t *one, *two;

                one = run(&s, &a);
                two = run_cpu(&s, &b);
                assert_memory_equal(one, two, s.o.size);
                free(one);
                free(two);
                scene_free(&s);
        }
}

static void sparse_attention_bf16_near_cpu(void **state) {
        static const struct {
                uint32_t n, rows, heads, dim, more, share;
                float scale; /* times the usual */
        } cases[] = { { 67, 0, 2, 128, 0, 4, 1 }, { 67, 64, 3, 128, 8, 2, 1 }, { 130, 0, 1, 64, 0, 8, 1 }, { 150, 0, 2, 72, 8, 1, 1 },
                { 70, 0, 2, 128, 0, 15, -1 }, { 20, 64, 2, 128, 0, 0, 1 }, { 1, 9, 1, 8, 0, 16, 1 } };

        need_device();
        for (unsigned i = 0; i < 4 * ELEMENTSOF(cases); i++) {
                Scene s = scene_new(LK_BF16, cases[i / 4].n, cases[i / 4].rows, cases[i / 4].heads, cases[i / 4].dim, cases[i / 4].more,
                        cases[i / 4].share);
                LkSparseAttention a = scene_call(&s, i % 4, true), b = scene_call(&s, i % 4, false);
                uint8_t *one, *two;
                double off;

                a.a.scale = b.a.scale = a.a.scale * cases[i / 4].scale;
                one = run(&s, &a);
                two = run_cpu(&s, &b);
                off = distance(&s, one, two);
                /* each is within 2.2e-3 of the right answer, in weights and results of its own rounding (test-attention.c) */
                if (!(off < 3.2e-3))
                        fail_msg("%u blocks, kind %u, case %u: off by %.2e", s.n, i % 4, i / 4, off);
                /* what lies between the rows of o stays as it is */
                for (uint64_t r = 0; r < s.rows; r++)
                        assert_memory_equal(one + (r * s.ld + s.heads * s.dim) * 2, (uint8_t *) s.o.host + (r * s.ld + s.heads * s.dim) * 2,
                                (s.ld - s.heads * s.dim) * 2);
                free(one);
                free(two);
                scene_free(&s);
        }
}

/* Of the kernel that every card has. */
static void sparse_attention_all_blocks_give_the_bits_of_attention(void **state) {
        static const uint32_t dims[] = { 128, 64, 72, 80, 8, 36 };

        need_device();
        lk_cuda_attention_set(gpu, LK_CUDA_ATTENTION_PORTABLE);
        for (unsigned i = 0; i < 4 * ELEMENTSOF(dims); i++) {
                Scene s = scene_new(i % 2 ? LK_BF16 : LK_F32, 70, LK_BLOCK_ROWS, 2, dims[i / 4], 0, 16);
                LkSparseAttention a = scene_call(&s, 0, true);
                uint8_t *one, *two;

                if (i / 2 % 2)
                        a.a.scale = -a.a.scale;
                one = run(&s, &a);
                array_up(&s.o);
                assert_int_equal(lk_cuda_ops()->attention(gpu, &a.a), 0);
                two = array_down(&s.o);
                assert_memory_equal(one, two, s.o.size);
                free(one);
                free(two);
                scene_free(&s);
        }
        lk_cuda_attention_set(gpu, LK_CUDA_ATTENTION_BEST);
}

/* n lists of every head from `first` on, as [heads, n, width] of their own. */
static Array lists_of(const Scene *s, const Array *from, uint64_t width, uint32_t first, uint32_t n) {
        Array a = array_new(s->heads * n * width * 4);

        for (uint32_t h = 0; h < s->heads; h++)
                memcpy((uint32_t *) a.host + h * n * width, (const uint32_t *) from->host + (h * s->n + first) * width, n * width * 4);
        array_up(&a);
        return a;
}

/* Blocks first .. first + n - 1, in two calls that cut the last block. */
static void run_part(const Scene *s, const LkSparseAttention *whole, uint32_t first, uint32_t n) {
        const uint32_t *start = s->start.host;
        const uint64_t rows[3] = { start[first], start[first + n] - 1, start[first + n] }, size = s->ld * lk_type_size(s->type);
        Array list = lists_of(s, &s->list, s->n, first, n), score = lists_of(s, &s->score, s->n, first, n);
        Array count = lists_of(s, &s->count, 1, first, n);
        LkSparseAttention a = *whole;

        a.first_block = first;
        a.n_blocks = n;
        a.list = list.device;
        a.score = score.device;
        a.count = count.device;
        for (int i = 0; i < 2; i++) {
                a.a.first_row = rows[i];
                a.a.n_q = rows[i + 1] - rows[i];
                a.a.q = (const uint8_t *) whole->a.q + rows[i] * size;
                a.a.o = (uint8_t *) whole->a.o + rows[i] * size;
                a.gate = whole->gate ? (const uint8_t *) whole->gate + rows[i] * size : NULL;
                assert_int_equal(lk_cuda_ops()->sparse_attention(gpu, &a), 0);
        }
        array_free(&list);
        array_free(&score);
        array_free(&count);
}

static void sparse_attention_cuts_give_same_bits(void **state) {
        need_device();
        for (unsigned i = 0; i < 8; i++) {
                Scene s = scene_new(i % 2 ? LK_BF16 : LK_F32, 67, 0, 2, 64, 0, 5);
                LkSparseAttention a = scene_call(&s, i / 2, true);
                uint8_t *whole = run(&s, &a), *parts;

                array_up(&s.o);
                for (uint32_t first = 0, n = 3; first < s.n; first += n, n = n % 5 + 1)
                        run_part(&s, &a, first, first + n < s.n ? n : s.n - first);
                parts = array_down(&s.o);
                assert_memory_equal(whole, parts, s.o.size);
                free(whole);
                free(parts);
                scene_free(&s);
        }
}

/* A query row without numbers stays alone with them; keys and values of blocks that nobody sees reach nobody. */
static void sparse_attention_no_number_stays_where_it_is(void **state) {
        need_device();
        for (unsigned i = 0; i < 8; i++) {
                Scene s = scene_new(i % 2 ? LK_BF16 : LK_F32, 40, 0, 2, 128, 0, 6);
                LkSparseAttention a = scene_call(&s, i / 2, true);
                const uint64_t size = s.ld * lk_type_size(s.type), row = s.rows / 3;
                const uint32_t unseen = 17, *start = s.start.host;
                uint8_t *before, *o;

                for (uint32_t l = 0; l < s.heads * s.n; l++) { /* all lists without that block, or with it behind */
                        uint32_t *list = (uint32_t *) s.list.host + l * s.n, *count = (uint32_t *) s.count.host + l, at = 0;

                        while (list[at] != unseen)
                                at++;
                        if (at >= *count)
                                continue;
                        memmove(list + at, list + at + 1, (s.n - at - 1) * sizeof(*list));
                        list[s.n - 1] = unseen;
                        *count -= 1;
                }
                array_up(&s.list);
                array_up(&s.count);
                before = run(&s, &a);
                for (uint64_t r = start[unseen]; r < start[unseen + 1]; r++) {
                        put(s.k.host, s.type, r * s.ld + next() % s.ld, NAN);
                        put(s.v.host, s.type, r * s.ld + next() % s.ld, INFINITY);
                }
                put(s.q.host, s.type, row * s.ld + 1, NAN);
                array_up(&s.q);
                array_up(&s.k);
                array_up(&s.v);
                o = run(&s, &a);
                assert_memory_equal(o, before, row * size);
                assert_memory_equal(o + (row + 1) * size, before + (row + 1) * size, (s.rows - row - 1) * size);
                for (uint32_t d = 0; d < s.dim; d++)
                        assert_true(isnan(get(o, s.type, row * s.ld + d)));
                free(before);
                free(o);
                scene_free(&s);
        }
}

static void sparse_attention_nothing_seen_gives_zeros(void **state) {
        need_device();
        for (unsigned i = 0; i < 2; i++) {
                Scene s = scene_new(i % 2 ? LK_BF16 : LK_F32, 20, 0, 2, 128, 0, 0);
                LkSparseAttention a = scene_call(&s, 1, true);
                uint8_t *o = run(&s, &a);

                for (uint64_t k = 0; k < s.o.size; k++)
                        assert_int_equal(o[k], 0);
                free(o);
                scene_free(&s);
        }
}

static void sparse_attention_bad_argument_is_refused(void **state) {
        LkSparseAttention bad[11], good;
        LkBlockMeans means = { .type = LK_F16 };
        LkRoute route = { .n = 0 };
        Scene s;

        need_device();
        s = scene_new(LK_F32, 9, 0, 2, 20, 0, 4);
        good = scene_call(&s, 3, true);
        for (unsigned i = 0; i < ELEMENTSOF(bad); i++)
                bad[i] = good;
        bad[0].a.causal = true;
        bad[1].a.kv_heads = 1;
        bad[2].blocks.start = NULL;
        bad[3].first_block = 1; /* one block too many */
        bad[4].list = NULL;
        bad[5].centre = NULL;
        bad[6].coarse = NULL;
        bad[7].gate_ld = s.ld - 1;
        bad[8].a.head_dim = 3;
        bad[9].a.type = LK_F16;
        bad[10].a.sequences = 2;
        assert_int_equal(lk_cuda_ops()->sparse_attention(gpu, &good), 0);
        assert_int_equal(lk_cuda_ops()->sparse_attention(gpu, NULL), -EINVAL);
        for (unsigned i = 0; i < ELEMENTSOF(bad); i++)
                assert_int_equal(lk_cuda_ops()->sparse_attention(gpu, bad + i), -EINVAL);
        assert_int_equal(lk_cuda_ops()->block_means(gpu, &means), -EINVAL);
        assert_int_equal(lk_cuda_ops()->route(gpu, &route), -EINVAL);
        scene_free(&s);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(block_means_same_bits),
                cmocka_unit_test(route_same_lists),
                cmocka_unit_test(sparse_attention_plain_same_bits_as_cpu),
                cmocka_unit_test(sparse_attention_bf16_near_cpu),
                cmocka_unit_test(sparse_attention_all_blocks_give_the_bits_of_attention),
                cmocka_unit_test(sparse_attention_cuts_give_same_bits),
                cmocka_unit_test(sparse_attention_no_number_stays_where_it_is),
                cmocka_unit_test(sparse_attention_nothing_seen_gives_zeros),
                cmocka_unit_test(sparse_attention_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
