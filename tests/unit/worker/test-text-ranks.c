/* SPDX-License-Identifier: Apache-2.0 */
/* The conditioner split over ranks with the worker's own threads and exchange: the same bits as one rank,
 * each rank reading only its rows of the weights, messages and memory of the sizes that were said. Every
 * arena is full of NaN at first: what a rank did not make or receive shows. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "service/worker/exchange.h"
#include "service/worker/rank.h"
#include "tests/unit/h3/text-case.h"

#define RANKS                                                                                               \
        40 /* more than any size of the tiny model's heads, and than its hidden width: some have nothing */
#define READ_MAX 512

static LkOps ops;
static const LkOps *real;
static RankGroup *group;

/* What a rank did; its own thread writes. */
typedef struct Seen {
        struct {
                const void *data;
                uint64_t size;
        } read[READ_MAX]; /* rows of matrices, each part once */
        size_t n_read;
        uint64_t arena, message;
} Seen;

static _Thread_local Seen *seen;

static int counted_gemm(LkContext *c, const LkGemm *a) {
        size_t i = 0;

        while (i < seen->n_read && seen->read[i].data != a->w.data)
                i++;
        if (i == seen->n_read) {
                if (seen->n_read == READ_MAX)
                        return -ENOSPC;
                seen->n_read++;
                seen->read[i].data = a->w.data;
        }
        seen->read[i].size = a->w.rows * lk_row_size(a->w.type, a->w.cols);
        return real->gemm(c, a);
}

static int poisoned_memory_new(LkContext *c, uint64_t size, void **ret) {
        int r = real->memory_new(c, size, ret);

        seen->arena = size;
        if (r >= 0)
                memset(*ret, 0xff, size);
        return r;
}

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static int setup(void **state) {
        Fault f = {};

        real = lk_cpu_ops(LK_CPU_AUTO);
        ops = *real;
        ops.memory_new = poisoned_memory_new;
        ops.gemm = counted_gemm;
        return rank_group_new(&ops, RANKS, RANKS, NULL, no_step, NULL, &group, &f);
}

static int teardown(void **state) {
        group = rank_group_free(group);
        return 0;
}

static int measure(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        if (bytes && size > seen->message)
                seen->message = size;
        return 0;
}

typedef struct Run {
        const H3TextModel *model;
        const H3TextInput *in;
        const H3StepHooks *hooks;
        H3Plan plan;
        H3Range rows[RANKS];
        Exchange *exchange;
        void *hidden[RANKS];
        Seen seen[RANKS];
        Fault faults[RANKS];
} Run;

static int work(void *userdata, uint32_t rank, LkContext *context) {
        Run *x = userdata;
        const H3Rank r = {
                .index = rank,
                .ops = &ops,
                .context = context,
                .plan = &x->plan,
                .exchange = x->exchange ? exchange_interface(x->exchange) : NULL,
        };

        seen = x->seen + rank;
        return h3_text_run(
                &r, x->model, x->in, rank == 0 ? x->hooks : NULL, x->hidden[rank], x->faults + rank);
}

static void stuck(void *userdata, uint32_t rank) {
        abort();
}

static uint64_t hidden_bytes(const H3TextModel *m, const H3TextInput *in) {
        return in->n * m->config.hidden * (in->compute == H3_COMPUTE_F32 ? 4 : 2);
}

static Run *run_new(const H3TextModel *m, const H3TextInput *in, uint32_t ranks) {
        const ExchangeText sizes = {m, h3_text_size(in, ranks)};
        const ExchangeHook hook = {measure, NULL};
        Run *x = calloc(1, sizeof(*x));

        assert_non_null(x);
        x->model = m;
        x->in = in;
        x->plan = h3_text_plan(ranks, x->rows);
        if (ranks > 1)
                assert_int_equal(exchange_new(EXCHANGE_HOST, &x->plan, (ExchangeSize){exchange_text_message, &sizes},
                                         20000000, &hook, &x->exchange),
                        0);
        for (uint32_t i = 0; i < ranks; i++) {
                x->hidden[i] = malloc(hidden_bytes(m, in));
                assert_non_null(x->hidden[i]);
        }
        return x;
}

static void run_freep(Run **p) {
        Run *x = *p;

        (void) exchange_free(x->exchange);
        for (uint32_t i = 0; i < RANKS; i++)
                free(x->hidden[i]);
        free(x);
}

static int run(Run *x) {
        return rank_group_run(group, &(RankOrder){
                                             .ranks = (UINT64_C(1) << x->plan.ranks) - 1,
                                             .work = work,
                                             .userdata = x,
                                             .deadline_usec = 60000000,
                                             .stuck = stuck,
                                     });
}

/* Sizes are what was said, and the ranks together read every row once. */
static void check_sizes(const Run *x) {
        const H3TextSize size = h3_text_size(x->in, x->plan.ranks);
        uint64_t arena = 0, all = 0;

        for (uint32_t i = 0; i < x->plan.ranks; i++) {
                const Seen *s = x->seen + i;
                const H3Message m = {.phase = H3_PHASE_IN, .from = i, .to = H3_TO_ALL};
                uint64_t read = 0;

                for (size_t j = 0; j < s->n_read; j++)
                        read += s->read[j].size;
                assert_int_equal(read, h3_text_rank_bytes(x->model, x->plan.ranks, i, x->in->n_vision > 0));
                assert_int_equal(s->message, h3_text_message_max(x->model, &size, &m));
                all += read;
                arena = s->arena > arena ? s->arena : arena;
        }
        assert_int_equal(all, h3_text_rank_bytes(x->model, 1, 0, x->in->n_vision > 0));
        assert_int_equal(arena, h3_text_memory(x->model, &size));
}

/* Every rank has the bits of one alone. */
static void check_split(const H3TextModel *m, const H3TextInput *in, const uint32_t *rank_counts, size_t n) {
        CLEANUP(run_freep) Run *alone = run_new(m, in, 1);

        assert_int_equal(run(alone), 0);
        for (size_t i = 0; i < n; i++) {
                CLEANUP(run_freep) Run *x = run_new(m, in, rank_counts[i]);

                assert_int_equal(run(x), 0);
                for (uint32_t r = 0; r < rank_counts[i]; r++)
                        if (memcmp(x->hidden[r], alone->hidden[0], hidden_bytes(m, in)) != 0)
                                fail_msg("rank %u of %u has other bits", r, rank_counts[i]);
                check_sizes(x);
        }
}

static void split_of_golden_cases_same_bits(void **state) {
        static const char *const names[] = {"text_only", "one_image", "image_video"};
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* ten times slower */
        static const uint32_t rank_counts[] = {1, 3};
#else
        static const uint32_t rank_counts[] = {1, 2, 3, 8, RANKS};
#endif
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");

        for (size_t i = 0; i < 2 * ELEMENTSOF(names); i++) {
                CLEANUP(text_case_freep) TextCase *k = text_case_open(names[i / 2]);

                k->input.compute = i % 2 ? H3_COMPUTE_BF16 : H3_COMPUTE_F32;
                check_split(t->model, &k->input, rank_counts, ELEMENTSOF(rank_counts));
        }
}

/* More tokens and patches than the MLPs take at a time. */
static void split_of_many_rows_same_bits(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        uint64_t n = 1100, patches = 2 * 520;
        CLEANUP_FREE int32_t *ids = malloc(n * sizeof(*ids)),
                             *positions = malloc(3 * n * sizeof(*positions));
        CLEANUP_FREE float *pixels = malloc(patches * 1536 * sizeof(*pixels));
        const H3VisionInput vision = {
                .grid_height = 2, .grid_width = 520, .first_token = 7, .patches = pixels};
        const H3TextInput in = {.compute = H3_COMPUTE_F32,
                .n = n,
                .ids = ids,
                .positions = positions,
                .vision = &vision,
                .n_vision = 1};

        for (uint64_t i = 0; i < n; i++) {
                ids[i] = (int32_t) (i * 7919 % 150);
                positions[i] = positions[n + i] = positions[2 * n + i] = (int32_t) i;
        }
        for (uint64_t i = 0; i < patches * 1536; i++)
                pixels[i] = (float) (i * 2654435761u % 256) / 128 - 1;
        check_split(t->model, &in, (const uint32_t[]){2, 7}, 2);
}

/* The rows of the first tokens do not change with what follows: causal, whatever the length. */
static void prefix_of_a_text_same_bits(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("text_only");
        CLEANUP(run_freep) Run *whole = run_new(t->model, &k->input, 1);
        static const uint64_t lengths[] = {1, 2, 63, 64, 65, 70};

        assert_int_equal(run(whole), 0);
        for (size_t i = 0; i < ELEMENTSOF(lengths); i++) {
                int32_t positions[3 * 70];
                H3TextInput in = k->input;

                in.n = lengths[i];
                in.positions = positions;
                for (uint64_t j = 0; j < 3 * in.n; j++)
                        positions[j] = k->input.positions[j / in.n * k->input.n + j % in.n];
                CLEANUP(run_freep) Run *x = run_new(t->model, &in, 1);

                assert_int_equal(run(x), 0);
                assert_memory_equal(x->hidden[0], whole->hidden[0], hidden_bytes(t->model, &in));
        }
}

static int stop_at(void *userdata, uint32_t done, uint32_t total) {
        return done == *(uint32_t *) userdata ? -ECANCELED : 0;
}

/* One rank stops, in the tower or in a layer: all end, and the first error is its. */
static void split_stopped_on_one_rank_ends_on_all(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("image_video");
        static uint32_t stops[] = {1, 6, 14};

        for (size_t i = 0; i < ELEMENTSOF(stops); i++) {
                CLEANUP(run_freep) Run *x = run_new(t->model, &k->input, 5);
                const H3StepHooks hooks = {.on_block = stop_at, .userdata = stops + i};
                Fault f = {};

                x->hooks = &hooks;
                assert_true(run(x) < 0);
                assert_int_equal(exchange_error(x->exchange, &f), -ECANCELED);
                assert_string_equal(f.name, FAULT_CANCELLED);
        }
}

/* A rank whose input is refused before its first message must not leave the others waiting. */
static void split_refused_ends_on_all(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("text_only");
        CLEANUP(run_freep) Run *x = run_new(t->model, &k->input, 3);
        Fault f = {};

        k->input.n = 0;
        assert_int_equal(run(x), -EINVAL);
        assert_int_equal(exchange_error(x->exchange, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(split_of_golden_cases_same_bits),
                cmocka_unit_test(split_of_many_rows_same_bits),
                cmocka_unit_test(prefix_of_a_text_same_bits),
                cmocka_unit_test(split_stopped_on_one_rank_ends_on_all),
                cmocka_unit_test(split_refused_ends_on_all),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
