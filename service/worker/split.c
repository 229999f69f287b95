/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/split.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/timeline.h"

/* A block is expected to take rows x bytes of its weights at this pace at least; a rank that is waited for
 * may take PATIENCE times that. Less than the broker allows (latentd/worker-feed.c), so that it hears which
 * rank it was. */
#define PACE_CPU 1e9
#define PACE_DEVICE 1e12
#define PATIENCE 5.0
#define DEADLINE_SEC 20.0

DEFINE_CLEANUP(Exchange *, exchange_free)

typedef struct Split Split;

typedef struct Part {
        Split *split;
        uint32_t rank;
        LkContext *context;
} Part;

struct Split {
        const SplitStep *step;
        Exchange *exchange; /* NULL: one rank */
        uint64_t deadline_usec;
        Part parts[RANKS_MAX];
        Fault faults[RANKS_MAX];
};

static int on_block(void *userdata, uint32_t done, uint32_t total) {
        const Part *part = userdata;
        const SplitStep *s = part->split->step;

        return s->on_block ? s->on_block(s->userdata, part->rank, done, total) : 0;
}

/* Figures that are not there fail no step. */
static void on_first(void *userdata) {
        const Part *part = userdata;
        const SplitStep *s = part->split->step;

        timeline_note("rows");
        *s->first_usec = s->ops->stamp && s->ops->stamp(part->context) < 0 ? 0 : clock_usec();
}

static void on_seen(void *userdata, uint64_t seen, uint64_t all) {
        const Part *part = userdata;
        const SplitStep *s = part->split->step;

        s->blocks_seen[part->rank] = seen;
        s->blocks_all[part->rank] = all;
}

static void read_stamp(const SplitStep *s, LkContext *context) {
        if (*s->first_usec > 0 && s->ops->stamp && s->ops->stamped(context, s->first_usec) < 0)
                *s->first_usec = 0;
}

static bool is_first(const SplitStep *s, uint32_t index) {
        for (uint32_t i = 0; i < index; i++)
                if (!h3_plan_is_idle(s->plan, i))
                        return false;
        return true;
}

static int work(void *userdata, uint32_t index, LkContext *context) {
        Split *x = userdata;
        const SplitStep *s = x->step;
        const bool stamps = s->first_usec && is_first(s, index);
        const H3StepHooks hooks = {.on_block = on_block, .on_first = stamps ? on_first : NULL,
                .on_seen = s->blocks_seen ? on_seen : NULL, .userdata = x->parts + index};
        H3Rank rank = {
                .index = index,
                .ops = s->ops,
                .context = context,
                .plan = s->plan,
                .exchange = x->exchange ? exchange_interface(x->exchange) : NULL,
        };

        int r, closed;

        x->parts[index] = (Part){x, index, context};
        r = s->on_begin ? s->on_begin(s->userdata, index, &rank) : 0;
        if (r >= 0 && rank.exchange)
                r = exchange_open(x->exchange, &rank);
        if (r < 0) {
                if (rank.exchange) /* others wait for it */
                        rank.exchange->fail(rank.exchange, index, r, NULL);
                return r;
        }
        r = h3_step(&rank, s->model, s->in, &hooks, s->video, s->audio, x->faults + index);
        if (r >= 0 && stamps)
                read_stamp(s, context);
        closed = rank.exchange ? exchange_close(x->exchange, &rank) : 0;
        return r < 0 ? r : closed;
}

static void stuck(void *userdata, uint32_t rank) {
        Split *x = userdata;
        H3Exchange *e = exchange_interface(x->exchange); /* a rank alone has nobody to be late for */
        Fault f = {};

        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL, "Rank %" PRIu32 " did not answer in %" PRIu64 " s.",
                rank, (x->deadline_usec + 999999) / 1000000);
        e->fail(e, rank, -ETIMEDOUT, &f);
        (void) exchange_error(x->exchange, &f); /* what others have found before */
        x->step->on_stuck(x->step->userdata, &f);
}

uint64_t split_deadline(const LkOps *ops, double row_bytes) {
        double pace = strcmp(ops->backend, "cpu") == 0 ? PACE_CPU : PACE_DEVICE;
        double block = row_bytes / pace;
        double sec = PATIENCE * block > DEADLINE_SEC ? PATIENCE * block : DEADLINE_SEC;

        return sec < 1e9 ? (uint64_t) (sec * 1e6) : UINT64_C(1000000000000000);
}

static uint64_t expected_deadline(const SplitStep *s) {
        return split_deadline(s->ops, (double) s->in->layout->rows * (double) s->model->weight_bytes /
                                              (double) s->model->config.layers);
}

/* All that was to be exchanged was, and nothing else. */
static int count_bytes(const Split *x, uint64_t *ret, Fault *f) {
        const SplitStep *s = x->step;

        *ret = 0;
        for (uint32_t i = 0; x->exchange && i < s->plan->ranks; i++) {
                uint64_t sent, received, plan_sent, plan_received;

                exchange_bytes(x->exchange, i, &sent, &received);
                h3_exchange_size(s->model, s->plan, s->in->compute, i, &plan_sent, &plan_received);
                if (sent != plan_sent || received != plan_received)
                        return fault_set(f, -EPROTO, FAULT_INTERNAL,
                                "Rank %" PRIu32 " sent %" PRIu64 " and received %" PRIu64
                                " bytes; by its plan they are %" PRIu64 " and %" PRIu64 ".",
                                i, sent, received, plan_sent, plan_received);
                *ret += received;
        }
        return 0;
}

/* The error that the others followed from; r: that of one of them. */
static int first_error(const Split *x, int r, Fault *f) {
        int first = x->exchange ? exchange_error(x->exchange, f) : 0;

        if (first == 0 && r < 0)
                for (uint32_t i = 0; i < x->step->plan->ranks; i++)
                        if (x->faults[i].name[0] != '\0') {
                                *f = x->faults[i];
                                break;
                        }
        return first < 0 ? first : r;
}

int split_memory(const LkOps *ops, const H3Model *m, const H3Layout *l, const H3Plan *p, ExchangeKind exchange, H3Compute compute,
        uint64_t *ret) {
        const ExchangeStep sizes = {m, p, compute};
        uint64_t sum = exchange_memory(exchange, p, (ExchangeSize){exchange_step_message, &sizes});

        for (uint32_t i = 0; ops->host_weights && i < p->ranks; i++) {
                uint64_t bytes;
                int r;

                r = h3_step_memory(m, l, p, i, compute, 0, &bytes);
                if (r < 0)
                        return r;
                if (__builtin_add_overflow(sum, bytes, &sum))
                        return -EOVERFLOW;
        }

        *ret = sum;
        return 0;
}

int split_run(RankGroup *g, const SplitStep *s, uint64_t *ret_bytes, Fault *f) {
        CLEANUP(exchange_freep) Exchange *exchange = NULL;
        CLEANUP_FREE Split *x = NULL;
        RankOrder order = {.work = work, .stuck = stuck};
        int r;

        x = calloc(1, sizeof(*x));
        if (!x)
                return -ENOMEM;
        x->step = s;
        x->deadline_usec = s->deadline_usec > 0 ? s->deadline_usec : expected_deadline(s);

        if (s->plan->ranks > rank_group_size(g))
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "The plan is for more ranks than there are.");
        if (s->plan->ranks > 1) {
                const ExchangeStep sizes = {s->model, s->plan, s->in->compute};

                r = exchange_new(s->exchange, s->plan, (ExchangeSize){exchange_step_message, &sizes}, x->deadline_usec,
                        &s->hook, &exchange);
                if (r < 0)
                        return r;
                exchange_set_staging(exchange, s->staging);
                x->exchange = exchange;
        }

        order.userdata = x;
        order.deadline_usec = x->deadline_usec;
        for (uint32_t i = 0; i < s->plan->ranks; i++)
                if (!h3_plan_is_idle(s->plan, i))
                        order.ranks |= UINT64_C(1) << i;
        r = first_error(x, rank_group_run(g, &order), f);
        if (r >= 0 && exchange && s->exposed_usec)
                *s->exposed_usec = exchange_exposed(exchange);
        return r < 0 ? r : count_bytes(x, ret_bytes, f);
}
