/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/step.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/coder.h"
#include "service/worker/job-private.h"
#include "service/worker/step-model.h"
#include "service/worker/step-table.h"
#include "service/worker/timeline.h"

#define PROGRESS_INTERVAL_USEC UINT64_C(20000)
/* Of a split that was not made yet, about as the broker does it. */
#define TILE 128u
#define CHUNK_ROWS 8192u
#define CHUNKS_SPLIT 4u

static void text_cache_clear(TextCache *c) {
        free(c->text);
        free(c->refined);
        *c = (TextCache){};
}

void step_runner_done(StepRunner *s) {
        text_cache_clear(&s->text);
        rope_cache_clear(&s->rope);
        merged_cache_clear(&s->merged);
        mod_cache_clear(&s->tables);
        encode_cache_clear(&s->encodes);
        residency_done(&s->residency);
}

void step_runner_shrink(StepRunner *s) {
        rope_cache_clear(&s->rope);
        mod_cache_clear(&s->tables);
        encode_cache_clear(&s->encodes);
}

static bool text_cache_holds(const TextCache *c, const Job *j) {
        return c->serial == job_model_serial(j) && c->compute == j->compute && c->size == j->text_size &&
               memcmp(c->text, j->text, (size_t) j->text_size) == 0;
}

typedef struct Refine {
        StepRunner *runner;
        const Job *job;
        const uint16_t *text;
        void *refined;
        Fault *fault;
} Refine;

/* On one rank's thread: the text is the same for all, and small. */
static int refine(void *userdata, uint32_t index, LkContext *context) {
        Refine *x = userdata;
        H3Rank rank = {.ops = x->runner->backend->ops, .context = context};
        int r;

        r = residency_begin(&x->runner->residency, index, H3_PASS_TEXT, &rank);
        if (r < 0)
                return r;
        residency_trim(&x->runner->residency, context);
        r = h3_refine_text(&rank, job_model(x->job), x->job->compute, x->text, x->job->text_rows, &x->refined, x->fault);
        residency_trim(&x->runner->residency, context);
        return r;
}

static int refine_text(StepRunner *s, RankGroup *g, const Job *j, const void **ret, Fault *f) {
        TextCache *c = &s->text;
        int r;

        if (!text_cache_holds(c, j)) {
                CLEANUP_FREE uint16_t *text = NULL;
                Refine x = {.runner = s, .job = j, .fault = f};

                /* The old entry goes first: two of them at once help nobody. */
                text_cache_clear(c);
                text = malloc((size_t) j->text_size);
                if (!text)
                        return -ENOMEM;
                memcpy(text, j->text, (size_t) j->text_size);

                x.text = text;
                r = rank_group_run(g, &(RankOrder){.ranks = UINT64_C(1) << job_first_rank(j), .work = refine, .userdata = &x});
                if (r < 0)
                        return r;

                *c = (TextCache){
                        .serial = job_model_serial(j),
                        .compute = j->compute,
                        .text = STEAL_PTR(text),
                        .size = j->text_size,
                        .refined = x.refined,
                };
        }

        *ret = c->refined;
        return 0;
}

typedef struct Run {
        StepRunner *runner;
        Job *job;
        uint32_t step;
        H3Pass pass;
} Run;

void step_tell(StepRunner *s, Job *j, uint32_t step, uint32_t done, uint32_t total) {
        uint64_t now = clock_usec(), last = j->progress_usec;
        WireMessage m;

        if (now - last < PROGRESS_INTERVAL_USEC || !atomic_compare_exchange_strong(&j->progress_usec, &last, now))
                return;
        if (total > STEP_BLOCKS_MAX) {
                done = (uint32_t) ((uint64_t) done * STEP_BLOCKS_MAX / total);
                total = STEP_BLOCKS_MAX;
        }
        wire_init(&m, WIRE_PROGRESS, j->epoch, j->id, step);
        m.progress.block = done;
        m.progress.blocks = total;
        link_offer(s->link, &m);
}

/* Every rank stops where it is; the first one tells how far it is. */
static int on_block(void *userdata, uint32_t rank, uint32_t done, uint32_t total) {
        Run *run = userdata;

        if (run->job->cancelled)
                return -ECANCELED;
        if (rank == job_first_rank(run->job))
                step_tell(run->runner, run->job, run->step, done, total);
        return 0;
}

static int check_state(const Job *j, uint32_t step, Fault *f) {
        if (j->cancelled)
                return fault_set(f, -ECANCELED, FAULT_CANCELLED, "The job was cancelled.");

        if (j->plan_only)
                return fault_set(
                        f, -EINVAL, FAULT_INTERNAL, "STEP is for a job that was opened to be planned only.");

        if (j->plan_fault.name[0] != '\0') {
                *f = j->plan_fault;
                return -EINVAL;
        }
        if (!j->plan && job_has_plan(j))
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "STEP came before PLAN.");

        if (j->committed >= j->steps)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "STEP %" PRIu32 " was asked for, but all %" PRIu32 " steps are done.", step,
                        j->steps);
        if (step != j->committed)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "STEP %" PRIu32 " was asked for, but step %" PRIu32 " is next.", step, j->committed);
        return 0;
}

/* On each rank's thread. */
static int on_begin(void *userdata, uint32_t rank, H3Rank *to) {
        const Run *run = userdata;

        return residency_begin(&run->runner->residency, rank, run->pass, to);
}

static int step_memory(const StepRunner *s, const Job *j, uint64_t *ret) {
        return split_memory(s->backend->ops, job_model(j), j->layout, &j->plan->h3, j->plan->exchange, j->compute, ret);
}

uint64_t step_planned_memory(const StepRunner *s, const Job *j, uint32_t ranks) {
        uint64_t tiles = (j->layout->rows + TILE - 1) / TILE, n = tiles < ranks ? tiles : ranks;
        uint64_t most = (tiles + n - 1) / n, chunks, bytes;
        H3Range rows[WIRE_RANKS_MAX], heads[WIRE_RANKS_MAX];
        uint32_t all = j->model->h3->config.heads;
        H3Plan plan;

        if (n > WIRE_RANKS_MAX)
                n = WIRE_RANKS_MAX;
        for (uint64_t i = 0; i < n; i++) {
                rows[i] = (H3Range){tiles * i / n * TILE, i + 1 < n ? tiles * (i + 1) / n * TILE : j->layout->rows};
                heads[i] = (H3Range){all * i / n, all * (i + 1) / n};
        }

        chunks = (most * TILE + CHUNK_ROWS - 1) / CHUNK_ROWS;
        if (n > 1 && chunks < CHUNKS_SPLIT)
                chunks = CHUNKS_SPLIT;
        chunks = chunks < most ? chunks : most;
        plan = (H3Plan){
                .kind = H3_PLAN_HIDDEN_GATHER,
                .ranks = (uint32_t) n,
                .row_tile = TILE,
                .chunks = (uint32_t) (chunks < WIRE_CHUNKS_MAX ? chunks : WIRE_CHUNKS_MAX),
                .rows = rows,
                .heads = heads,
                .sparse = j->sparse,
        };
        return split_memory(s->backend->ops, j->model->h3, j->layout, &plan,
                       exchange_kind_of(EXCHANGE_HOST, s->backend->ops), j->compute, &bytes) < 0 ? 0 : bytes;
}

static void on_stuck(void *userdata, const Fault *f) {
        Run *run = userdata;

        run->runner->on_stuck(run->runner->userdata, run->job, run->step, f);
}

/* Once per plan. There is no ENOMEM for memory that was promised and is touched later: the kernel would end
 * the process, and with it the work of others. Modulation rows of a schedule do not count: they are optional
 * memory, taken only beside a step's (step-table.c), and what is kept of them goes before a step is refused. */
static int admit(StepRunner *s, Job *j, Fault *f) {
        const uint64_t kept = staging_bytes(&s->residency.staging); /* this one's, or it goes for it */
        uint64_t need, have;
        int r;

        if (j->plan_admitted)
                return 0;

        j->plan->h3.sparse = j->sparse; /* such a step takes more */
        r = step_memory(s, j, &need);
        if (r < 0)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "The memory of a step of %" PRIu64 " rows cannot be counted: %s.", j->layout->rows,
                        strerror(-r));

        have = s->backend->memory_available();
        if (have > 0)
                have += kept;
        if (have > 0 && need > have) {
                step_runner_shrink(s);
                have = s->backend->memory_available() + kept;
        }
        if (have > 0 && need > have)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "A step of %" PRIu64 " rows needs %" PRIu64 " bytes of memory, %" PRIu64
                        " are free.",
                        j->layout->rows, need, have);

        j->plan_admitted = true;
        return 0;
}

static int try_compute(StepRunner *s, RankGroup *g, Job *j, uint32_t step, H3StepInput *ret_in, StepResult *ret, Fault *f) {
        CLEANUP(mod_table_unrefp) ModTable *table = NULL;
        Run run = {.runner = s, .job = j, .step = step};
        H3StepInput in;
        const SplitStep split = {
                .ops = s->backend->ops,
                .model = job_model(j),
                .plan = &j->plan->h3,
                .exchange = j->plan->exchange,
                .staging = &s->residency.staging,
                .in = &in,
                .video = j->velocity.video,
                .audio = j->velocity.audio,
                .on_block = on_block,
                .on_begin = on_begin,
                .on_stuck = on_stuck,
                .userdata = &run,
                .first_usec = &ret->first_usec,
                .exposed_usec = &ret->exposed_usec,
                .blocks_seen = ret->blocks_seen,
                .blocks_all = ret->blocks_all,
                .hook = s->hook,
                .deadline_usec = s->deadline_usec,
        };
        int r;

        memset(ret->blocks_seen, 0, sizeof(ret->blocks_seen)); /* those of an attempt before */
        memset(ret->blocks_all, 0, sizeof(ret->blocks_all));
        job_step_input(j, step, &in);
        in.rope = rope_cache_get(&s->rope, &job_model(j)->config, j->layout, j->compute);
        timeline_note("rope");
        r = refine_text(s, g, j, &in.refined_text, f);
        if (r < 0)
                return r;

        timeline_note("text");
        r = step_choose_table(s, g, j, step, &in, &table, f);
        if (r < 0)
                return r;
        timeline_note("table");
        in.mod_table = table ? table->h3 : NULL;
        run.pass = table ? H3_PASS_STEP_TABLE : H3_PASS_STEP;

        r = split_run(g, &split, &ret->exchanged_bytes, f);
        in.mod_table = NULL;
        if (r >= 0)
                timeline_end(ret->first_usec);
        *ret_in = in;
        return r;
}

/* With the model on the devices. */
static int compute(StepRunner *s, RankGroup *g, Job *j, uint32_t step, H3StepInput *ret_in, StepResult *ret, Fault *f) {
        const ResidencyUse use = {.job = j, .plan = &j->plan->h3, .exchange = j->plan->exchange};
        int r;

        r = residency_prepare(&s->residency, s->backend, g, &use, f);
        if (r < 0)
                return r;
        timeline_note("memory");
        do
                r = try_compute(s, g, j, step, ret_in, ret, f);
        while (residency_again(&s->residency, g, j, r, f));
        residency_note(&s->residency);
        return r;
}

/* From the velocities to what the job commits, which must be finite: a state with NaN would end a run that
 * is taken up from it and not one that goes on undisturbed. */
static int update(Job *j, uint32_t step, const Latents **ret, Fault *f) {
        H3SamplerState now = latents_state(&j->state), next = latents_state(&j->next);
        char whose[96];

        if (j->kind == WIRE_JOB_STEP) {
                *ret = &j->velocity;
                return job_check_finite(j, "the model's velocities", *ret, f);
        }

        h3_sampler_step(&j->sampler, step, &now, j->velocity.video, j->velocity.audio, &next);
        *ret = &j->next;
        (void) snprintf(
                whose, sizeof(whose), "the state after step %" PRIu32 " of %" PRIu32, step + 1, j->steps);
        return job_check_finite(j, whose, *ret, f);
}

/* A failure in the words of the protocol. */
static int explain(const StepRunner *s, const Job *j, int error, Fault *f) {
        uint64_t need = 0;

        if (error == -ECANCELED) {
                *f = (Fault){};
                return fault_set(f, error, FAULT_CANCELLED, "The job was cancelled.");
        }
        if (error == -ENOMEM && strcmp(f->name, FAULT_DOES_NOT_FIT) != 0 && j->layout) {
                *f = (Fault){};
                (void) step_memory(s, j, &need);
                return fault_set(f, error, FAULT_DOES_NOT_FIT,
                        "There is no memory for a step of %" PRIu64 " rows: it needs %" PRIu64 " bytes.",
                        j->layout->rows, need);
        }
        return fault_set(
                f, error, FAULT_INTERNAL, "The step failed: %s (errno %d).", strerror(-error), -error);
}

int step_run(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        uint64_t begin = clock_usec();
        const Latents *result;
        H3StepInput in;
        bool preview;
        int r;

        j->progress_usec = begin;
        r = check_state(j, step, f);
        if (r < 0)
                return r;

        *ret = (StepResult){};
        timeline_note("job");
        if (j->coder) {
                r = coder_step(s, g, j, step, ret, f);
                ret->usec = clock_usec() - begin;
                return r < 0 ? explain(s, j, r, f) : 0;
        }

        r = step_choose_model(s, g, j, f);
        if (r < 0)
                return explain(s, j, r, f);

        if (j->kind == WIRE_JOB_MERGE) {
                step_send_notes(s, j);
                j->committed++;
                *ret = (StepResult){.usec = clock_usec() - begin};
                return 0;
        }

        r = job_draw_noise(j, f);
        if (r < 0)
                return explain(s, j, r, f);

        r = admit(s, j, f);
        if (r < 0)
                return r;

        job_show(j);
        j->plan->h3.sparse = job_sparse(j, step);
        ret->sparse = j->plan->h3.sparse != NULL;
        r = compute(s, g, j, step, &in, ret, f);
        if (r < 0)
                return explain(s, j, r, f);

        r = update(j, step, &result, f);
        if (r < 0)
                return r;

        preview = job_preview(j, step, &in);
        r = job_commit(j, result);
        if (r < 0)
                return explain(s, j, r, f);

        if (result == &j->next) {
                Latents old = j->state;

                j->state = j->next;
                j->next = old;
        }
        ret->preview = preview;
        ret->usec = clock_usec() - begin;
        return 0;
}
