/* SPDX-License-Identifier: Apache-2.0 */
/* sparse_attention against a joint softmax in f64 over rows and means; its bits against those of attention, of other
 * instruction sets and of other cuts. */

#include "tests/unit/kernels/kernels-test.h"

enum { HEADS = 2, DIM = 20, WIDTH = HEADS * DIM, N = 67, ROWS_MAX = N * LK_BLOCK_ROWS };

/* A sequence in N blocks and lists that a counter drew. */
typedef struct Scene {
        LkType type;
        uint32_t start[N + 1];
        uint64_t rows;
        void *q, *k, *v, *gate;
        float *value, *centre, *coarse, *score;
        uint32_t list[HEADS * N * N], count[HEADS * N];
        void *o;
} Scene;

/* step: rows of a block, 0: uneven. share: of blocks that are seen, in 1 / 16. */
static Scene *scene_new(LkType type, uint32_t step, uint32_t share) {
        Scene *s = calloc(1, sizeof(*s));
        uint64_t seed = 3;

        assert_non_null(s);
        s->type = type;
        for (uint32_t b = 0; b < N; b++)
                s->start[b + 1] = s->start[b] + (step > 0 ? step : 1 + (uint32_t) (random_u64(&seed) % 5));
        s->rows = s->start[N];
        s->q = random_aligned(s->rows * WIDTH, type, 1.5, &seed);
        s->k = random_aligned(s->rows * WIDTH, type, 1, &seed);
        s->v = random_aligned(s->rows * WIDTH, type, 1, &seed);
        s->gate = random_aligned(s->rows * WIDTH, type, 0.5, &seed);
        s->value = random_aligned(N * WIDTH, LK_F32, 1, &seed);
        s->coarse = random_aligned(N * WIDTH, LK_F32, 1, &seed);
        s->centre = random_aligned(WIDTH, LK_F32, 0.3, &seed);
        s->score = random_aligned(HEADS * N * N, LK_F32, 1, &seed);
        s->o = guarded(s->rows * WIDTH, type);
        for (uint32_t i = 0; i < HEADS * N; i++) {
                uint32_t n = 0, rest[N], n_rest = 0;

                for (uint32_t b = 0; b < N; b++)
                        if (random_u64(&seed) % 16 < share)
                                s->list[i * N + n++] = b;
                        else
                                rest[n_rest++] = b;
                s->count[i] = n;
                memcpy(s->list + i * N + n, rest, n_rest * sizeof(*rest));
        }
        return s;
}

static void scene_freep(Scene **s) {
        free((*s)->q);
        free((*s)->k);
        free((*s)->v);
        free((*s)->gate);
        free((*s)->value);
        free((*s)->coarse);
        free((*s)->centre);
        free((*s)->score);
        free((*s)->o);
        free(*s);
}

#define SCENE __attribute__((cleanup(scene_freep))) Scene

static LkSparseAttention scene_call(Scene *s) {
        return (LkSparseAttention){
                .a = {.type = s->type, .n_q = s->rows, .n_k = s->rows, .heads = HEADS, .head_dim = DIM, .scale = 0.16f,
                        .q = s->q, .k = s->k, .v = s->v, .o = s->o, .q_ld = WIDTH, .k_ld = WIDTH, .v_ld = WIDTH, .o_ld = WIDTH},
                .blocks = {N, s->start},
                .n_blocks = N,
                .list = s->list,
                .count = s->count,
                .score = s->score,
        };
}

/* The kinds of h3.md 7: pooled tail, none, none with the gate; all at once. */
static LkSparseAttention scene_kind(Scene *s, unsigned kind) {
        LkSparseAttention a = scene_call(s);

        if (kind == 0 || kind == 3) {
                a.value = s->value;
                a.centre = s->centre;
        }
        if (kind >= 2) {
                a.gate = s->gate;
                a.gate_ld = WIDTH;
                a.coarse = s->coarse;
        }
        return a;
}

static void expect(const Scene *s, const LkSparseAttention *a, double *ret) {
        for (uint32_t head = 0; head < HEADS; head++)
                for (uint32_t block = 0; block < N; block++)
                        for (uint64_t row = s->start[block]; row < s->start[block + 1]; row++) {
                                const uint32_t *list = s->list + (head * N + block) * N;
                                uint64_t at = row * WIDTH + head * DIM;
                                double sum = 0, o[DIM] = {}, shift = 0;

                                for (uint32_t d = 0; d < DIM; d++)
                                        shift += 0.16 * get(s->q, s->type, at + d) * s->centre[head * DIM + d];
                                for (uint32_t e = 0; e < (a->value ? N : s->count[head * N + block]); e++) {
                                        uint32_t b = list[e];
                                        bool seen = e < s->count[head * N + block];

                                        for (uint64_t key = s->start[b]; key < s->start[b + 1]; key++) {
                                                double score = seen ? 0 : (double) s->score[(head * N + block) * N + b] + shift, p;

                                                for (uint32_t d = 0; seen && d < DIM; d++)
                                                        score += 0.16 * get(s->q, s->type, at + d) *
                                                                 get(s->k, s->type, key * WIDTH + head * DIM + d);
                                                p = exp(score);
                                                sum += p;
                                                for (uint32_t d = 0; d < DIM; d++)
                                                        o[d] += p * (seen ? get(s->v, s->type, key * WIDTH + head * DIM + d)
                                                                          : (double) s->value[b * WIDTH + head * DIM + d]);
                                        }
                                }
                                for (uint32_t d = 0; d < DIM; d++) {
                                        ret[at + d] = sum > 0 ? o[d] / sum : 0;
                                        if (a->gate)
                                                ret[at + d] += get(s->gate, s->type, at + d) *
                                                               (double) s->coarse[block * WIDTH + head * DIM + d];
                                }
                        }
}

static void sparse_attention_every_kind_is_joint_softmax(void **state) {
        for (unsigned i = 0; i < 8; i++) {
                LkType type = i % 2 ? LK_BF16 : LK_F32;
                SCENE *s = scene_new(type, 0, 4);
                CLEANUP_FREE double *wanted = malloc(s->rows * WIDTH * sizeof(double));
                LkSparseAttention a = scene_kind(s, i / 2);
                LkContext *c;
                const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);

                assert_int_equal(ops->sparse_attention(c, &a), 0);
                expect(s, &a, wanted);
                assert_true(relative_l2(s->o, type, WIDTH, wanted, s->rows, WIDTH) < (type == LK_F32 ? 1e-6 : 4e-3));
                assert_null(ops->context_free(c));
        }
}

static void sparse_attention_other_isas_and_cuts_give_same_bits(void **state) {
        for (unsigned i = 0; i < 2; i++) {
                LkType type = i % 2 ? LK_BF16 : LK_F32;
                uint64_t row_bytes = WIDTH * lk_type_size(type);
                SCENE *s = scene_new(type, 0, 5);
                CLEANUP_FREE uint8_t *whole = malloc(s->rows * row_bytes);
                LkSparseAttention a = scene_kind(s, 3 * i);

                for (unsigned isa = 0; isa < ISAS; isa++) {
                        LkContext *c;
                        const LkOps *ops = open_isa(all_isas[isa], 1 + isa, &c);

                        if (!ops)
                                continue;
                        memset(s->o, 0x5a, s->rows * row_bytes);
                        if (isa == 0) {
                                assert_int_equal(ops->sparse_attention(c, &a), 0);
                                memcpy(whole, s->o, s->rows * row_bytes);
                        }
                        /* in pieces; each in two that cut a block */
                        for (uint32_t first = 0, n = 3; first < N; first += n, n = n % 5 + 1) {
                                LkSparseAttention part = a;
                                uint32_t end = first + n < N ? first + n : N;
                                uint64_t rows[3] = {s->start[first], s->start[end] - 1, s->start[end]};
                                uint32_t list[HEADS * 5 * N], count[HEADS * 5];
                                float score[HEADS * 5 * N];

                                part.first_block = first;
                                part.n_blocks = end - first;
                                for (uint32_t e = 0; e < HEADS * part.n_blocks; e++) {
                                        uint32_t from = e / part.n_blocks * N + first + e % part.n_blocks;

                                        memcpy(list + e * N, s->list + from * N, N * sizeof(*list));
                                        memcpy(score + e * N, s->score + from * N, N * sizeof(*score));
                                        count[e] = s->count[from];
                                }
                                part.list = list;
                                part.count = count;
                                part.score = score;
                                for (int k = 0; k < 2; k++) {
                                        part.a.first_row = rows[k];
                                        part.a.n_q = rows[k + 1] - rows[k];
                                        part.a.q = (const uint8_t *) s->q + rows[k] * row_bytes;
                                        part.a.o = (uint8_t *) s->o + rows[k] * row_bytes;
                                        part.gate = a.gate ? (const uint8_t *) s->gate + rows[k] * row_bytes : NULL;
                                        assert_int_equal(ops->sparse_attention(c, &part), 0);
                                }
                        }
                        assert_memory_equal(s->o, whole, s->rows * row_bytes);
                        assert_null(ops->context_free(c));
                }
        }
}

static void sparse_attention_all_blocks_give_the_bits_of_attention(void **state) {
        for (unsigned i = 0; i < 2; i++) {
                SCENE *s = scene_new(i ? LK_BF16 : LK_F32, LK_BLOCK_ROWS, 16);
                uint64_t size;
                CLEANUP_FREE void *dense = guarded(ROWS_MAX * WIDTH, LK_F32);
                LkSparseAttention a;
                LkAttention whole;
                LkContext *c;
                const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);

                s->start[N] -= 5; /* the last one is ragged */
                s->rows -= 5;
                size = s->rows * WIDTH * lk_type_size(s->type);
                a = scene_kind(s, 0);
                whole = a.a;
                whole.o = dense;
                assert_int_equal(ops->sparse_attention(c, &a), 0);
                assert_int_equal(ops->attention(c, &whole), 0);
                assert_memory_equal(s->o, dense, size);
                assert_null(ops->context_free(c));
        }
}

static void sparse_attention_bad_argument_is_refused(void **state) {
        SCENE *s = scene_new(LK_F32, 1, 4);
        const LkSparseAttention good = scene_kind(s, 3);
        LkSparseAttention bad[11];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        for (unsigned i = 0; i < ELEMENTSOF(bad); i++)
                bad[i] = good;
        bad[0].a.causal = true;
        bad[1].a.kv_heads = 1;
        bad[2].blocks.start = NULL;
        bad[3].first_block = 1; /* one block too many */
        bad[4].list = NULL;
        bad[5].centre = NULL;
        bad[6].coarse = NULL;
        bad[7].gate_ld = WIDTH - 1;
        bad[8].a.head_dim = 3;
        bad[9].a.type = LK_F16;
        bad[10].a.sequences = 2;
        assert_int_equal(ops->sparse_attention(c, &good), 0);
        assert_int_equal(ops->sparse_attention(NULL, &good), -EINVAL);
        assert_int_equal(ops->sparse_attention(c, NULL), -EINVAL);
        for (unsigned i = 0; i < ELEMENTSOF(bad); i++)
                assert_int_equal(ops->sparse_attention(c, bad + i), -EINVAL);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(sparse_attention_every_kind_is_joint_softmax),
                cmocka_unit_test(sparse_attention_other_isas_and_cuts_give_same_bits),
                cmocka_unit_test(sparse_attention_all_blocks_give_the_bits_of_attention),
                cmocka_unit_test(sparse_attention_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
