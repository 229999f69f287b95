/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/text-split.h"

#include <errno.h>
#include <inttypes.h>

#include "service/shared/cleanup.h"
#include "service/worker/split.h"

DEFINE_CLEANUP(Exchange *, exchange_free)

typedef struct Run Run;

typedef struct Part {
        Run *run;
        uint32_t rank;
} Part;

struct Run {
        const TextSplit *split;
        uint32_t ranks; /* of the plan, those of the group in order */
        H3Plan plan;
        H3Range rows[H3_TEXT_RANKS_MAX];
        Exchange *exchange; /* NULL: one rank */
        uint64_t deadline_usec;
        void *hidden;
        Part parts[H3_TEXT_RANKS_MAX];
        Fault faults[H3_TEXT_RANKS_MAX];
};

/* The place of the group's rank among those that take part. */
static uint32_t part_of(const Run *x, uint32_t rank) {
        return (uint32_t) __builtin_popcountll(x->split->ranks & ((UINT64_C(1) << rank) - 1));
}

static int on_block(void *userdata, uint32_t done, uint32_t total) {
        const Part *part = userdata;
        const TextSplit *s = part->run->split;

        return s->on_block ? s->on_block(s->userdata, part->rank, done, total) : 0;
}

/* Every rank ends with all of the result; one of them hands it over. */
static int work(void *userdata, uint32_t group_rank, LkContext *context) {
        Run *x = userdata;
        const TextSplit *s = x->split;
        const uint32_t index = part_of(x, group_rank);
        const H3StepHooks hooks = {.on_block = on_block, .userdata = x->parts + index};
        H3Rank rank = {
                .index = index,
                .ops = s->ops,
                .context = context,
                .plan = &x->plan,
                .exchange = x->exchange ? exchange_interface(x->exchange) : NULL,
        };
        int r, closed;

        x->parts[index] = (Part){x, group_rank};
        r = s->on_begin ? s->on_begin(s->userdata, group_rank, &rank) : 0;
        if (r >= 0 && rank.exchange)
                r = exchange_open(x->exchange, &rank);
        if (r < 0) {
                if (rank.exchange)
                        rank.exchange->fail(rank.exchange, index, r, NULL);
                return r;
        }
        r = h3_text_run(&rank, s->model, s->in, &hooks, index == 0 ? x->hidden : NULL, x->faults + index);
        closed = rank.exchange ? exchange_close(x->exchange, &rank) : 0;
        return r < 0 ? r : closed;
}

static void stuck(void *userdata, uint32_t rank) {
        Run *x = userdata;
        H3Exchange *e = exchange_interface(x->exchange); /* a rank alone has nobody to be late for */
        Fault f = {};

        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL, "Rank %" PRIu32 " did not answer in %" PRIu64 " s.",
                rank, (x->deadline_usec + 999999) / 1000000);
        e->fail(e, part_of(x, rank), -ETIMEDOUT, &f);
        (void) exchange_error(x->exchange, &f); /* what others have found before */
        x->split->on_stuck(x->split->userdata, &f);
}

/* Of a block, which is about a layer; the tower's rows are its patches. */
static uint64_t expected_deadline(const TextSplit *s, const H3TextSize *size) {
        double rows = (double) (size->tokens > size->patches ? size->tokens : size->patches);

        return split_deadline(
                s->ops, rows * (double) s->model->weight_bytes / (double) s->model->config.layers);
}

/* The error that the others followed from; r: that of one of them. */
static int first_error(const Run *x, int r, Fault *f) {
        int first = x->exchange ? exchange_error(x->exchange, f) : 0;

        for (uint32_t i = 0; first == 0 && r < 0 && i < x->ranks; i++)
                if (x->faults[i].name[0] != '\0') {
                        *f = x->faults[i];
                        break;
                }
        return first < 0 ? first : r;
}

int text_split_memory(const H3TextModel *m, const H3TextSize *size, ExchangeKind exchange, uint64_t *ret, uint64_t *ret_device) {
        H3Range rows[H3_TEXT_RANKS_MAX];
        H3Plan plan = h3_text_plan(size->ranks, rows);
        const ExchangeText text = {m, *size};
        const ExchangeSize sizes = {exchange_text_message, &text};
        uint64_t device, sum;

        if (__builtin_mul_overflow(h3_text_memory(m, size), (uint64_t) size->ranks, &device))
                return -EOVERFLOW;
        for (uint32_t i = 0; i < size->ranks; i++)
                if (__builtin_add_overflow(device, exchange_device_memory(exchange, &plan, sizes, i), &device))
                        return -EOVERFLOW;
        if (__builtin_add_overflow(device, exchange_memory(exchange, &plan, sizes), &sum))
                return -EOVERFLOW;
        *ret = sum;
        *ret_device = device;
        return 0;
}

int text_split_run(RankGroup *g, const TextSplit *s, void *ret_hidden, uint64_t *ret_bytes, Fault *f) {
        const uint32_t ranks = (uint32_t) __builtin_popcountll(s->ranks);
        const ExchangeText sizes = {s->model, h3_text_size(s->in, ranks)};
        CLEANUP(exchange_freep) Exchange *exchange = NULL;
        CLEANUP_FREE Run *x = NULL;
        RankOrder order = {.ranks = s->ranks, .work = work, .stuck = stuck};
        uint64_t sent, received;
        int r;

        x = calloc(1, sizeof(*x));
        if (!x)
                return -ENOMEM;
        x->split = s;
        x->ranks = ranks;
        x->hidden = ret_hidden;
        x->plan = h3_text_plan(ranks, x->rows);
        x->deadline_usec = s->deadline_usec > 0 ? s->deadline_usec : expected_deadline(s, &sizes.size);
        if (ranks > 1) {
                r = exchange_new(s->exchange, &x->plan, (ExchangeSize){exchange_text_message, &sizes}, x->deadline_usec,
                        &s->hook, &exchange);
                if (r < 0)
                        return r;
                x->exchange = exchange;
        }

        order.userdata = x;
        order.deadline_usec = x->deadline_usec;
        r = first_error(x, rank_group_run(g, &order), f);
        if (r < 0)
                return r;

        *ret_bytes = 0;
        for (uint32_t i = 0; x->exchange && i < ranks; i++) {
                exchange_bytes(x->exchange, i, &sent, &received);
                *ret_bytes += received;
        }
        return 0;
}
