/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over int8: its two quantise passes and itself against the rule of ops.h (bits), and all together
 * against double precision. */

#define LK_CPU_LEVEL 1 /* exp_one(): the rule names the exponential, test-exp tests it */

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/vec.h"

#define DIM LK_I8_DIM
#define KEYS LK_I8_KEYS

/* Rows of q, k, v side by side, as the qkv linear writes them, and all that comes of them. */
typedef struct Data {
        uint64_t n_q, n_k, ld;
        uint32_t heads;
        LkType type;
        void *x;
        LkQuantiseQueries queries;
        LkQuantiseKeys keys;
        LkAttentionI8 a;
        uint64_t o_size;
} Data;

/* Lists of the query blocks first .. first + n - 1: about share / 16 of the blocks of the keys, at least one. free()d by the caller. */
static void lists_make(Data *d, uint32_t first, uint32_t n, unsigned share) {
        const uint64_t blocks = lk_i8_blocks(d->n_k);
        uint32_t *list = allocate(d->heads * n * blocks * sizeof(*list)), *count = allocate(d->heads * n * sizeof(*count));
        uint64_t seed = d->n_k + n + share;

        for (uint64_t i = 0; i < (uint64_t) d->heads * n; i++) {
                uint32_t *to = list + i * blocks, m = 0;

                for (uint32_t b = 0; b < blocks; b++)
                        if (random_u64(&seed) % 16 < share)
                                to[m++] = b;
                if (m == 0)
                        to[m++] = (uint32_t) (random_u64(&seed) % blocks);
                count[i] = m;
        }
        d->a.list = list;
        d->a.count = count;
        d->a.first_block = first;
        d->a.n_blocks = n;
}

static void lists_done(Data *d) {
        free((void *) d->a.list);
        free((void *) d->a.count);
        d->a.list = d->a.count = NULL;
}

static bool sees(const Data *d, uint64_t i, uint32_t h, uint64_t key) {
        const LkAttentionI8 *a = &d->a;
        const uint64_t task = h * a->n_blocks + (a->first_row + i) / LK_BLOCK_ROWS - a->first_block;

        for (uint32_t e = 0; a->list && e < a->count[task]; e++)
                if (a->list[task * lk_i8_blocks(d->n_k) + e] == key / LK_BLOCK_ROWS)
                        return true;
        return !a->list;
}

static uint64_t tiles_of(const Data *d) {
        return lk_i8_tiles(d->n_k);
}

static void data_make(uint64_t n_q, uint64_t n_k, uint32_t heads, LkType type, double size, Data *d) {
        const uint64_t width = (uint64_t) heads * DIM, rows = n_q > n_k ? n_q : n_k,
                       tiles = lk_i8_tiles(n_k) * heads;
        uint64_t seed = n_q * 3 + n_k * 5 + heads, step = lk_type_size(type);

        *d = (Data){.n_q = n_q,
                .n_k = n_k,
                .ld = 3 * width + 8,
                .heads = heads,
                .type = type,
                .o_size = n_q * (width + 4)};
        d->x = random_aligned(rows * d->ld, type, 1, &seed);
        for (uint64_t i = 0; i < n_q && size != 1; i++)
                for (uint64_t j = 0; j < width; j++)
                        put(d->x, type, i * d->ld + j, size * random_normal(&seed));

        d->queries = (LkQuantiseQueries){.type = type,
                .n = n_q,
                .heads = heads,
                .x = d->x,
                .x_ld = d->ld,
                .q = allocate(n_q * (width + DIM)),
                .q_ld = width + DIM,
                .scale = allocate(n_q * (heads + 1) * sizeof(float))};
        d->keys = (LkQuantiseKeys){.type = type,
                .k = (uint8_t *) d->x + width * step,
                .v = (uint8_t *) d->x + 2 * width * step,
                .k_ld = d->ld,
                .v_ld = d->ld,
                .to = {.n = n_k,
                        .heads = heads,
                        .offset = allocate(width * sizeof(float)),
                        .k = allocate(tiles * KEYS * DIM),
                        .k_scale = allocate(tiles * sizeof(float)),
                        .v = allocate(tiles * KEYS * DIM),
                        .v_scale = allocate(tiles * DIM * sizeof(float))}};
        d->a = (LkAttentionI8){.n_q = n_q,
                .scale = 1 / sqrtf(DIM),
                .q = d->queries.q,
                .q_scale = d->queries.scale,
                .q_ld = d->queries.q_ld,
                .keys = d->keys.to,
                .o_type = type,
                .o_ld = width + 4};
}

static void data_done(Data *d) {
        free(d->x);
        free(d->queries.q);
        free(d->queries.scale);
        free(d->keys.to.offset);
        free(d->keys.to.k);
        free(d->keys.to.k_scale);
        free(d->keys.to.v);
        free(d->keys.to.v_scale);
}

/* Runs all three; returns o. */
static uint8_t *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkAttentionI8 a = d->a;

        if (!ops)
                return NULL;
        memset(d->queries.q, 0x5a, d->n_q * d->queries.q_ld);
        a.o = guarded(d->o_size, a.o_type);
        assert_int_equal(ops->quantise_queries(c, &d->queries), 0);
        assert_int_equal(ops->quantise_keys(c, &d->keys), 0);
        assert_int_equal(ops->attention_i8(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.o;
}

static float element(const Data *d, const void *p, uint64_t row, uint32_t head, uint32_t dim) {
        return (float) get(p, d->type, row * d->ld + head * DIM + dim);
}

/* Four stages of the rotation by its definition as a matrix would need f64; here number by number, every sum
 * spelled out. */
static void rule_rotate(float *v) {
        float y[DIM];

        for (uint32_t stride = 1; stride < 64; stride *= 4) {
                for (uint32_t i = 0; i < DIM; i++) {
                        const uint32_t at = i - i / stride % 4 * stride;
                        const float a = v[at], b = v[at + stride], c = v[at + 2 * stride],
                                    d = v[at + 3 * stride];

                        switch (i / stride % 4) {
                        case 0:
                                y[i] = ((a + b) + c) - d;
                                break;
                        case 1:
                                y[i] = ((a + b) - c) + d;
                                break;
                        case 2:
                                y[i] = ((a - b) + c) + d;
                                break;
                        default:
                                y[i] = ((b - a) + c) + d;
                        }
                }
                for (uint32_t i = 0; i < DIM; i++)
                        v[i] = y[i] * 0.5f;
        }
        for (uint32_t i = 0; i < DIM; i++)
                y[i] = i < 64 ? v[i] + v[i + 64] : v[i - 64] - v[i];
        memcpy(v, y, sizeof(y));
}

/* n numbers that share a scale, `step` apart: to integers. */
static float rule_integers(const float *v, uint64_t n, uint64_t step, int8_t *q) {
        float m = 1e-30f;
        bool finite = true;

        for (uint64_t i = 0; i < n; i++) {
                finite &= isfinite(v[i * step]);
                m = fmaxf(m, fabsf(v[i * step]));
        }
        for (uint64_t i = 0; i < n; i++)
                q[i * step] = finite ? (int8_t) nearbyintf(v[i * step] * (127.0f / m)) : 0;
        return finite ? m * (1.0f / 127.0f) : NAN;
}

static bool same(float a, float b) {
        return isnan(a) ? isnan(b) : a == b;
}

static void check_queries(const Data *d) {
        for (uint64_t i = 0; i < d->n_q; i++)
                for (uint32_t h = 0; h <= d->heads; h++) {
                        const int8_t *got = d->queries.q + i * d->queries.q_ld + h * DIM;
                        float v[DIM], scale;
                        int8_t q[DIM];

                        for (uint32_t e = 0; h < d->heads && e < DIM; e++)
                                v[e] = element(d, d->x, i, h, e);
                        if (h == d->heads) {
                                for (uint32_t e = 0; e < DIM; e++) /* between the rows */
                                        assert_int_equal(got[e], 0x5a);
                                continue;
                        }
                        rule_rotate(v);
                        scale = rule_integers(v, DIM, 1, q);
                        assert_memory_equal(got, q, DIM);
                        assert_true(same(scale, d->queries.scale[i * (d->heads + 1) + h]));
                }
}

static void check_offset(const Data *d, uint32_t h) {
        for (uint32_t e = 0; e < DIM; e++) {
                float sum = 0;

                for (uint64_t i = 0; i < 128; i++)
                        sum += element(d, d->keys.k, i * d->n_k / 128, h, e);
                assert_true(same(sum * 0.0078125f, d->keys.to.offset[h * DIM + e]));
        }
}

static void check_tile(const Data *d, uint32_t h, uint64_t tile) {
        static const uint32_t order[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
        static float k[KEYS * DIM], v[KEYS * DIM];
        static int8_t q[KEYS * DIM];
        const LkKeysI8 *to = &d->keys.to;
        const uint64_t left = d->n_k - tile * KEYS, n = left < KEYS ? left : KEYS,
                       at = h * tiles_of(d) + tile;

        for (uint64_t i = 0; i < n; i++) {
                for (uint32_t e = 0; e < DIM; e++) {
                        k[i * DIM + e] =
                                element(d, d->keys.k, tile * KEYS + i, h, e) - to->offset[h * DIM + e];
                        v[i * DIM + e] = element(d, d->keys.v, tile * KEYS + i, h, e);
                }
                rule_rotate(k + i * DIM);
        }
        memset(q, 0, sizeof(q));
        assert_true(same(rule_integers(k, n * DIM, 1, q), to->k_scale[at]));
        assert_memory_equal(q, to->k + at * KEYS * DIM, sizeof(q));

        memset(q, 0, sizeof(q));
        for (uint32_t e = 0; e < DIM; e++) {
                assert_true(same(rule_integers(v + e, n, DIM, q + e), to->v_scale[at * DIM + e]));
                for (uint32_t p = 0; p < KEYS; p++)
                        assert_int_equal(to->v[(at * DIM + e) * KEYS + p],
                                q[(p / 16 * 16 + order[p % 16]) * DIM + e]);
        }
}

/* Weight of a score by the rule; the product with a power of two is exact in double. */
static int rule_weight(int score, int top, float a) {
        float w = fmaf((float) score, a, fmaf((float) -top, a, 1)), n, r;

        w = w > 0 ? w < 1 ? w : 1 : 0;
        n = (float) (nearbyint((double) w * 16 + 111) - 111) / 16;
        r = w - n;
        return (int) nearbyint(ldexp(
                (double) fmaf(fmaf(LK_I8_EXP_2, r, LK_I8_EXP_1), r, LK_I8_EXP_0), (int) (16 * n) - 16));
}

/* One row and head from the integers, straight from the text. */
static void rule(const Data *d, uint64_t i, uint32_t h, float *o) {
        static const uint32_t place[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
        const LkKeysI8 *to = &d->keys.to;
        const int8_t *q = d->queries.q + i * d->queries.q_ld + h * DIM;
        float m = -INFINITY, l = 0;

        memset(o, 0, DIM * sizeof(float));
        for (uint64_t tile = 0; tile < tiles_of(d); tile++) {
                const uint64_t at = h * tiles_of(d) + tile, left = d->n_k - tile * KEYS,
                               n = left < KEYS ? left : KEYS;
                int s[KEYS] = {}, top = INT32_MIN, sum = 0, sums[DIM] = {};
                float u = (d->queries.scale[i * (d->heads + 1) + h] * to->k_scale[at]) * (d->a.scale * 0.5f),
                      t, e, f = 1, g = 1;

                for (uint64_t j = 0; j < n; j++) {
                        if (!sees(d, i, h, tile * KEYS + j))
                                continue;
                        for (uint32_t x = 0; x < DIM; x++)
                                s[j] += q[x] * to->k[(at * KEYS + j) * DIM + x];
                        top = s[j] > top ? s[j] : top;
                }
                if (top == INT32_MIN)
                        continue;
                t = (float) top * u;
                e = exp_one(-fabsf(t - m));
                if (t > m) {
                        f = e;
                        m = t;
                } else
                        g = e;
                for (uint64_t j = 0; j < n; j++) {
                        const int p = sees(d, i, h, tile * KEYS + j) ? rule_weight(s[j], top, u * (1.44269504f / 16)) : 0;

                        sum += p;
                        for (uint32_t x = 0; x < DIM; x++)
                                sums[x] += p * to->v[(at * DIM + x) * KEYS + j / 16 * 16 + place[j % 16]];
                }
                l = fmaf((float) sum, g, l * f);
                for (uint32_t x = 0; x < DIM; x++)
                        o[x] = fmaf((float) sums[x] * to->v_scale[at * DIM + x], g, o[x] * f);
        }
        for (uint32_t x = 0; x < DIM; x++)
                o[x] = o[x] / l;
}

static void check_quantised(const Data *d) {
        check_queries(d);
        for (uint32_t h = 0; h < d->heads; h++) {
                check_offset(d, h);
                for (uint64_t tile = 0; tile < tiles_of(d); tile++)
                        check_tile(d, h, tile);
        }
}

static void check_rule(const Data *d, const uint8_t *got) {
        const uint64_t size = lk_type_size(d->type);

        check_quantised(d);
        for (uint64_t i = 0; i < d->n_q; i++) {
                for (uint32_t h = 0; h < d->heads; h++) {
                        uint8_t expected[DIM * 4];
                        float o[DIM];

                        rule(d, i, h, o);
                        for (uint32_t x = 0; x < DIM; x++)
                                put(expected, d->type, x, o[x]);
                        assert_memory_equal(got + (i * d->a.o_ld + h * DIM) * size, expected, DIM * size);
                }
                for (uint64_t b = d->heads * DIM * size; b < d->a.o_ld * size; b++)
                        assert_int_equal(got[i * d->a.o_ld * size + b], 0x5a);
        }
}

/* The rule takes long: the first instruction set that is there is held against it, the others against that one's bits. */
static void check_all_isas(const Data *d) {
        CLEANUP_FREE uint8_t *first = NULL;

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE uint8_t *o = run(all_isas[isa], 1 + isa, d);

                if (o && first) {
                        check_quantised(d);
                        assert_memory_equal(o, first, d->o_size * lk_type_size(d->type));
                } else if (o) {
                        check_rule(d, o);
                        first = STEAL_PTR(o);
                }
        }
        assert_non_null(first);
}

static void attention_i8_sizes_follow_rule(void **state) {
        static const struct {
                uint64_t n_q, n_k;
                uint32_t heads;
                LkType type;
                double size;
        } shapes[] = {
                {1, 1, 1, LK_F32, 1},
                {5, 15, 2, LK_BF16, 1},
                {6, 127, 1, LK_F32, 4},
                {7, 128, 3, LK_BF16, 0.1},
                {29, 129, 1, LK_F32, 20},
                {15, 400, 2, LK_BF16, 3},
                {230, 140, 1, LK_BF16, 1}, /* more rows than one task takes at any instruction set */
                {3, 2000, 1, LK_F32, 1},
        };

        for (unsigned i = 0; i < ELEMENTSOF(shapes); i++) {
                Data d;

                data_make(shapes[i].n_q, shapes[i].n_k, shapes[i].heads, shapes[i].type, shapes[i].size, &d);
                check_all_isas(&d);
                data_done(&d);
        }
}

/* Blocks of queries with lists, of all kinds of halves of tiles; the last block is ragged. */
static void attention_i8_lists_follow_rule(void **state) {
        static const struct {
                uint64_t n, first_row, n_q;
                uint32_t heads, first, n_blocks;
                LkType type;
        } shapes[] = {{300, 0, 300, 2, 0, 5, LK_F32}, {300, 77, 101, 1, 1, 2, LK_BF16}, {513, 448, 65, 3, 7, 2, LK_F32},
                {40, 3, 30, 1, 0, 1, LK_BF16}, {640, 300, 20, 2, 0, 10, LK_F32}};

        for (unsigned i = 0; i < 3 * ELEMENTSOF(shapes); i++) {
                Data d;

                data_make(shapes[i / 3].n_q, shapes[i / 3].n, shapes[i / 3].heads, shapes[i / 3].type, 2, &d);
                lists_make(&d, shapes[i / 3].first, shapes[i / 3].n_blocks, i % 3 == 0 ? 2 : i % 3 == 1 ? 8 : 14);
                d.a.first_row = shapes[i / 3].first_row;
                check_all_isas(&d);
                lists_done(&d);
                data_done(&d);
        }
}

static void attention_i8_all_blocks_listed_same_bits(void **state) {
        CLEANUP_FREE uint8_t *listed = NULL, *whole = NULL;
        Data d;

        data_make(300, 300, 2, LK_BF16, 2, &d);
        lists_make(&d, 0, 5, 16);
        listed = run(LK_CPU_AUTO, 2, &d);
        lists_done(&d);
        whole = run(LK_CPU_AUTO, 2, &d);
        assert_memory_equal(listed, whole, d.o_size * 2);
        data_done(&d);
}

/* Numbers near the ends of the range, zeros, channels that stick out, an offset of all keys. */
static void attention_i8_unusual_numbers_follow_rule(void **state) {
        for (unsigned i = 0; i < 5; i++) {
                const float sizes[] = {0, 1e-35f, 1e36f, 1, 1e-3f};
                Data d;

                data_make(9, 200, 1, LK_F32, 1, &d);
                for (uint64_t e = 0; e < 200 * d.ld; e++)
                        put(d.x, LK_F32, e,
                                get(d.x, LK_F32, e) * (float) (i == 3 && e % 16 == 3 ? 50 : sizes[i]) +
                                        (i == 4 ? 2 : 0));
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE uint8_t *o = run(all_isas[isa], 1, &d);

                        if (o && i != 2)
                                check_rule(&d, o);
                        else if (o) /* scores are beyond f32 */
                                check_queries(&d);
                }
                data_done(&d);
        }
}

/* What is not finite: a query row spoils its own result, a key that of its head, a value its channel. */
static void attention_i8_no_number_spoils_what_it_should(void **state) {
        static const double bad[] = {NAN, INFINITY, -INFINITY};

        for (unsigned i = 0; i < 9 * ISAS; i++) {
                CLEANUP_FREE uint8_t *before = NULL, *o = NULL;
                const uint64_t row = i % 3 == 0 ? 7 : 130;
                Data d;

                data_make(20, 260, 2, LK_BF16, 1, &d);
                before = run(all_isas[i / 9], 1, &d);
                put(d.x, LK_BF16, row * d.ld + i % 3 * 2 * DIM + DIM + 7, bad[i / 3 % 3]); /* of head 1 */
                o = run(all_isas[i / 9], 1, &d);
                for (uint64_t r = 0; o && r < d.n_q; r++)
                        for (uint32_t x = 0; x < 2 * DIM; x++) {
                                const uint64_t at = r * d.a.o_ld + x;

                                if (x >= DIM && (i % 3 == 0 ? r == row : i % 3 == 1 || x == DIM + 7))
                                        assert_true(isnan(get(o, LK_BF16, at)));
                                else
                                        assert_memory_equal(o + at * 2, before + at * 2, 2);
                        }
                data_done(&d);
        }
}

static void attention_i8_any_range_same_bits(void **state) {
        static const uint64_t cuts[] = {1, 13, 64, 128, 200};
        CLEANUP_FREE uint8_t *whole = NULL;
        Data d;

        data_make(300, 270, 3, LK_BF16, 2, &d);
        for (uint64_t r = 5; r < 300; r += 37) /* rows far larger than their neighbours */
                for (uint64_t e = 0; e < 3 * DIM; e++)
                        put(d.x, LK_BF16, r * d.ld + e, 40 * get(d.x, LK_BF16, r * d.ld + e));
        whole = run(LK_CPU_AUTO, 1, &d);
        for (unsigned i = 0; i < ELEMENTSOF(cuts) * 3; i++) {
                const uint64_t n = cuts[i / 3], at = i % 3 == 0 ? 0 : i % 3 == 1 ? 77 : 300 - n;
                const uint32_t head = i % 3;
                CLEANUP_FREE uint8_t *o = NULL;
                Data part = d;

                /* rows of one head */
                part.n_q = part.queries.n = part.a.n_q = n;
                part.heads = part.queries.heads = part.keys.to.heads = 1;
                part.queries.x = (const uint8_t *) d.queries.x + (at * d.ld + head * DIM) * 2;
                part.keys.k = (const uint8_t *) d.keys.k + head * DIM * 2;
                part.keys.v = (const uint8_t *) d.keys.v + head * DIM * 2;
                part.a.keys = part.keys.to;
                o = run(LK_CPU_AUTO, 2, &part);
                for (uint64_t r = 0; r < n; r++)
                        assert_memory_equal(o + r * d.a.o_ld * 2,
                                whole + ((at + r) * d.a.o_ld + head * DIM) * 2, DIM * 2);
        }
        data_done(&d);
}

/* Says no from call `at` on. */
typedef struct Stop {
        unsigned at, calls;
} Stop;

static bool stop_at(void *userdata) {
        Stop *s = userdata;

        return s->calls++ >= s->at;
}

/* One task of all keys asks at every tile; the passes before it at theirs. */
static void attention_i8_stopped_ends_on_the_way(void **state) {
        const uint64_t tiles = 20;
        CLEANUP_FREE uint8_t *whole = NULL, *o = NULL;
        Stop s = {.at = UINT32_MAX};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        Data d;

        data_make(1, tiles * KEYS, 1, LK_F32, 1, &d);
        whole = run(LK_CPU_AUTO, 1, &d);
        d.a.o = o = guarded(d.o_size, LK_F32);

        ops->stop_when(c, stop_at, &s);
        assert_int_equal(ops->attention_i8(c, &d.a), 0);
        assert_in_range(s.calls, tiles, tiles + 5);
        assert_memory_equal(o, whole, DIM * sizeof(float));
        s = (Stop){.at = 5};
        assert_int_equal(ops->attention_i8(c, &d.a), -ECANCELED);
        assert_in_range(s.calls, 6, 10);
        assert_int_equal(ops->quantise_queries(c, &d.queries), -ECANCELED);
        assert_int_equal(ops->quantise_keys(c, &d.keys), -ECANCELED);
        s = (Stop){.at = 5}; /* behind the offsets of the keys */
        assert_int_equal(ops->quantise_keys(c, &d.keys), -ECANCELED);

        ops->stop_when(c, NULL, NULL);
        assert_int_equal(ops->quantise_keys(c, &d.keys), 0);
        assert_int_equal(ops->attention_i8(c, &d.a), 0);
        assert_memory_equal(o, whole, DIM * sizeof(float));
        assert_null(ops->context_free(c));
        data_done(&d);
}

static void oracle(const Data *d, double *o) {
        CLEANUP_FREE double *p = allocate(d->n_k * sizeof(double));

        for (uint64_t i = 0; i < d->n_q; i++) {
                double top = -INFINITY, sum = 0;

                for (uint64_t j = 0; j < d->n_k; j++) {
                        p[j] = sees(d, i, 0, j) ? 0 : -INFINITY;
                        for (uint32_t x = 0; x < DIM; x++)
                                p[j] += (double) element(d, d->x, i, 0, x) * element(d, d->keys.k, j, 0, x);
                        p[j] *= d->a.scale;
                        top = fmax(top, p[j]);
                }
                for (uint64_t j = 0; j < d->n_k; j++)
                        sum += p[j] = exp(p[j] - top);
                for (uint32_t x = 0; x < DIM; x++) {
                        o[i * DIM + x] = 0;
                        for (uint64_t j = 0; j < d->n_k; j++)
                                o[i * DIM + x] += p[j] / sum * element(d, d->keys.v, j, 0, x);
                }
        }
}

/* Keys of one channel in 16 are larger, and all keys have something in common. */
static void make_outliers(Data *d, double channel, double common) {
        uint64_t seed = 3;
        double offset[DIM];

        for (uint32_t x = 0; x < DIM; x++)
                offset[x] = common * random_normal(&seed);
        for (uint64_t j = 0; j < d->n_k; j++)
                for (uint32_t x = 0; x < DIM; x++)
                        put((void *) d->keys.k, d->type, j * d->ld + x,
                                element(d, d->keys.k, j, 0, x) * (x % 16 == 5 ? channel : 1) + offset[x]);
}

static void attention_i8_against_double_is_accurate(void **state) {
        static const struct {
                double size, channel, common, limit;
                unsigned share; /* of the blocks that are in lists, 16ths; 0: without */
        } cases[] = {
                {1, 1, 0, 1.6e-2, 3},
                {1, 1, 0, 1.6e-2},
                {0.3, 1, 0, 1.6e-2},
                {1, 1, 10, 1.6e-2},
                {0.25, 20, 0, 2e-2},
                {3, 1, 0, 4e-2},
        };

        for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE double *expected = allocate(16 * DIM * sizeof(double));
                CLEANUP_FREE uint8_t *o = NULL;
                double error;
                Data d;

                data_make(16, 1500, 1, LK_BF16, cases[i].size, &d);
                if (cases[i].share > 0)
                        lists_make(&d, 10, 2, cases[i].share);
                d.a.first_row = 696;
                make_outliers(&d, cases[i].channel, cases[i].common);
                oracle(&d, expected);
                o = run(LK_CPU_AUTO, 2, &d);
                error = relative_l2(o, LK_BF16, d.a.o_ld, expected, d.n_q, DIM);
                print_message("# queries of size %g, channels x %g, common part %g: %.2e\n", cases[i].size,
                        cases[i].channel, cases[i].common, error);
                if (!(error <= cases[i].limit))
                        fail_msg("queries of size %g, channels x %g, common part %g: error %g",
                                cases[i].size, cases[i].channel, cases[i].common, error);
                lists_done(&d);
                data_done(&d);
        }
}

#define REFUSED(op, statement)                                                                              \
        do {                                                                                                \
                LkAttentionI8 a = d.a;                                                                      \
                LkQuantiseQueries queries = d.queries;                                                      \
                LkQuantiseKeys keys = d.keys;                                                               \
                statement;                                                                                  \
                (void) a, (void) queries, (void) keys;                                                      \
                assert_int_equal(op, -EINVAL);                                                              \
        } while (0)

static void attention_i8_bad_argument_is_refused(void **state) {
        CLEANUP_FREE uint8_t *o = NULL;
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_SCALAR, 1, &c);
        Data d;

        data_make(4, 9, 2, LK_BF16, 1, &d);
        d.a.o = o = guarded(d.o_size, LK_BF16);
        REFUSED(ops->quantise_queries(c, &queries), queries.type = LK_F16);
        REFUSED(ops->quantise_queries(c, &queries), queries.x = NULL);
        REFUSED(ops->quantise_queries(c, &queries), queries.x_ld = 255);
        REFUSED(ops->quantise_queries(c, &queries), queries.q++);
        REFUSED(ops->quantise_queries(c, &queries), queries.q_ld = 300);
        REFUSED(ops->quantise_queries(c, &queries), queries.q_ld = 128);
        REFUSED(ops->quantise_queries(c, &queries), queries.scale = NULL);
        REFUSED(ops->quantise_keys(c, &keys), keys.to.n = 0);
        REFUSED(ops->quantise_keys(c, &keys), keys.to.n = UINT64_MAX);
        REFUSED(ops->quantise_keys(c, &keys), keys.v = NULL);
        REFUSED(ops->quantise_keys(c, &keys), keys.v_ld = 100);
        REFUSED(ops->quantise_keys(c, &keys), keys.to.v_scale++);
        REFUSED(ops->quantise_keys(c, &keys), keys.to.offset = NULL);
        REFUSED(ops->attention_i8(c, &a), a.scale = 0);
        REFUSED(ops->attention_i8(c, &a), a.scale = -1);
        REFUSED(ops->attention_i8(c, &a), a.scale = NAN);
        REFUSED(ops->attention_i8(c, &a), a.scale = INFINITY);
        REFUSED(ops->attention_i8(c, &a), a.q = NULL);
        REFUSED(ops->attention_i8(c, &a), a.keys.k = NULL);
        REFUSED(ops->attention_i8(c, &a), a.keys.k_scale = NULL);
        REFUSED(ops->attention_i8(c, &a), a.o = NULL);
        REFUSED(ops->attention_i8(c, &a), a.o_ld = 128);
        REFUSED(ops->attention_i8(c, &a), a.o_type = LK_I8);
        lists_make(&d, 0, 1, 16);
        d.a.first_row = 60;
        assert_int_equal(ops->attention_i8(c, &d.a), 0);
        REFUSED(ops->attention_i8(c, &a), a.count = NULL);
        REFUSED(ops->attention_i8(c, &a), a.first_row = 61); /* behind the block */
        REFUSED(ops->attention_i8(c, &a), a.first_row = UINT64_MAX);
        REFUSED(ops->attention_i8(c, &a), a.first_block = 1); /* one block too many */
        REFUSED(ops->attention_i8(c, &a), a.n_blocks = 0);
        REFUSED(ops->attention_i8(c, &a), a.n_blocks = UINT32_MAX);
        lists_done(&d);
        assert_null(ops->context_free(c));
        data_done(&d);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(attention_i8_sizes_follow_rule),
                cmocka_unit_test(attention_i8_lists_follow_rule),
                cmocka_unit_test(attention_i8_all_blocks_listed_same_bits),
                cmocka_unit_test(attention_i8_unusual_numbers_follow_rule),
                cmocka_unit_test(attention_i8_no_number_spoils_what_it_should),
                cmocka_unit_test(attention_i8_any_range_same_bits),
                cmocka_unit_test(attention_i8_stopped_ends_on_the_way),
                cmocka_unit_test(attention_i8_against_double_is_accurate),
                cmocka_unit_test(attention_i8_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
