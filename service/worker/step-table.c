/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/step-table.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"
#include "service/worker/split.h"

/* Steps of the job's schedule from this one on. */
typedef struct Rest {
        uint32_t steps;
        float *video, *audio; /* [steps], owned */
} Rest;

static void rest_done(Rest *x) {
        free(x->video);
        free(x->audio);
}

static int rest_new(uint32_t steps, Rest *ret) {
        *ret = (Rest){
                .steps = steps,
                .video = calloc(steps, sizeof(float)),
                .audio = calloc(steps, sizeof(float)),
        };
        return ret->video && ret->audio ? 0 : -ENOMEM;
}

static int rest_of_sample(const Job *j, uint32_t step, Rest *ret) {
        int r;

        r = rest_new(j->steps - step, ret);
        for (uint32_t i = 0; r >= 0 && i < ret->steps; i++)
                h3_sampler_sigmas(&j->sampler, step + i, ret->video + i, ret->audio + i);
        return r;
}

/* From the step's own place in the list on; none if it is not there: a sampler's evaluation in between. */
static int rest_of_announced(const Job *j, Rest *ret) {
        uint32_t first = 0;
        int r;

        while (first < j->announced && (j->announced_video[first] != j->sigmas_video[0] ||
                                               j->announced_audio[first] != j->sigmas_audio[0]))
                first++;
        if (first == j->announced)
                return 0;

        r = rest_new(j->announced - first, ret);
        for (uint32_t i = 0; r >= 0 && i < ret->steps; i++) {
                ret->video[i] = j->announced_video[first + i];
                ret->audio[i] = j->announced_audio[first + i];
        }
        return r;
}

/* Beside the memory of the step itself. The work of making the table is less than that of a step, which has
 * not begun. */
static bool has_memory(const StepRunner *s, const Job *j, uint64_t bytes) {
        uint64_t have = s->backend->memory_available(), need;

        if (have == 0)
                return true; /* not known */
        return split_memory(s->backend->ops, job_model(j), j->layout, &j->plan->h3, j->plan->exchange, j->compute, &need) >= 0 &&
               need <= have && bytes <= have - need;
}

typedef struct Making {
        StepRunner *runner;
        Job *job;
        H3ModSchedule schedule;
        H3ModTable *table;
        Fault fault;
} Making;

/* Progress counts the blocks of the step, which are still to come. */
static int on_block(void *userdata, uint32_t done, uint32_t total) {
        const Making *x = userdata;

        return x->job->cancelled ? -ECANCELED : 0;
}

static int make_on_rank(void *userdata, uint32_t rank, LkContext *context) {
        Making *x = userdata;
        H3Rank first = {.ops = x->runner->backend->ops, .context = context};
        const H3StepHooks hooks = {.on_block = on_block, .userdata = x};

        int r;

        r = residency_begin(&x->runner->residency, rank, H3_PASS_TABLE, &first);
        if (r < 0)
                return r;
        residency_trim(&x->runner->residency, context);
        r = h3_mod_table_new(&first, job_model(x->job), &x->schedule, x->job->compute, &hooks, &x->table, &x->fault);
        residency_trim(&x->runner->residency, context);
        return r;
}

static int make(StepRunner *s, RankGroup *g, Job *j, const H3ModSchedule *schedule, ModTable **ret, Fault *f) {
        Making x = {.runner = s, .job = j, .schedule = *schedule};
        uint64_t bytes;
        int r;

        if (h3_mod_table_bytes(job_model(j), schedule, j->compute, &bytes, NULL) < 0 ||
                !mod_cache_make_room(&s->tables, bytes) || !has_memory(s, j, bytes))
                return 0;

        r = rank_group_run(g, &(RankOrder){.ranks = UINT64_C(1) << job_first_rank(j), .work = make_on_rank, .userdata = &x});
        if (r >= 0)
                r = mod_cache_add(&s->tables, j, bytes, &x.table, ret);
        (void) h3_mod_table_free(x.table); /* NULL once it is the cache's */
        if (r == -ENOMEM)
                return 0;
        if (r < 0)
                *f = x.fault;
        return r;
}

int step_choose_table(
        StepRunner *s, RankGroup *g, Job *j, uint32_t step, const H3StepInput *in, ModTable **ret, Fault *f) {
        CLEANUP(rest_done) Rest rest = {};
        ModTable *t;
        int r;

        t = mod_cache_find(&s->tables, j, in);
        if (!t && !j->table_tried) {
                j->table_tried = true;
                r = j->kind == WIRE_JOB_SAMPLE ? rest_of_sample(j, step, &rest) : rest_of_announced(j, &rest);
                if (r >= 0 && rest.steps > 1) {
                        r = make(s, g, j, &(H3ModSchedule){j->layout, rest.video, rest.audio, rest.steps}, &t, f);
                        if (r < 0)
                                return r;
                }
        }
        *ret = t;
        return 0;
}
