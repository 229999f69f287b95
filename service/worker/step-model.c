/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/step-model.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/h3/lora.h"
#include "service/shared/cleanup.h"

static bool needs_merge(const Job *j) {
        if (j->kind == WIRE_JOB_MERGE)
                return j->n_loras > 0;
        for (uint32_t i = 0; i < j->n_loras; i++)
                if (j->strengths[i] != 0)
                        return true;
        return false;
}

/* *ret_work: bytes that merging takes and gives back. There is no ENOMEM for memory that was promised and is touched
 * later. Models that no job uses go first, and tables. */
static int admit_merge(StepRunner *s, RankGroup *g, const Job *j, const H3LoraUse *uses, uint64_t *ret_work, Fault *f) {
        uint64_t need, kept, have, held = merged_model_bytes(), limit = j->private_max;
        int r;

        r = h3_lora_memory(j->model->h3, uses, j->n_loras, j->compute, &need, &kept, f);
        if (r < 0)
                return r;

        have = s->backend->memory_available();
        if ((have > 0 && need > have) || (limit > 0 && need > limit)) {
                merged_cache_clear(&s->merged);
                mod_cache_clear(&s->tables);
                (void) residency_rest(&s->residency, g); /* it may be the last to have one */
                have = s->backend->memory_available();
                limit += limit > 0 ? held - merged_model_bytes() : 0; /* nobody else merges */
        }
        if (limit > 0 && need > limit)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "The model with its LoRA adapters (%" PRIu32 ") needs %" PRIu64
                        " bytes of memory for merged copies, of which %" PRIu64 " stay; the service may take %" PRIu64
                        " now (CacheRamMax=, CacheRamReserve= or the limit of its cgroup). Unload models or close sessions.",
                        j->n_loras, need, kept, limit);
        if (have > 0 && need > have)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "The model with its LoRA adapters (%" PRIu32 ") needs %" PRIu64
                        " bytes of memory for merged copies, of which %" PRIu64 " stay; %" PRIu64
                        " are free.",
                        j->n_loras, need, kept, have);
        *ret_work = need - kept;
        return 0;
}

typedef struct Merge {
        StepRunner *runner;
        const Job *job;
        H3LoraUse uses[WIRE_LORAS_MAX];
        H3Model *h3;
        H3LoraReport *report;
        Fault *fault;
} Merge;

static int merge_on_rank(void *userdata, uint32_t rank, LkContext *context) {
        Merge *x = userdata;
        const Job *j = x->job;
        H3Rank to = {};
        int r;

        r = residency_begin(&x->runner->residency, rank, RESIDENCY_ANY_ORDER, &to);
        if (r < 0)
                return r;
        return h3_model_with_loras(j->model->h3, x->uses, j->n_loras, j->compute, x->runner->backend->ops, context, to.weights,
                &x->h3, &x->report, x->fault);
}

static int merge(StepRunner *s, RankGroup *g, Job *j, const MergedKey *key, Fault *f) {
        Merge x = {.runner = s, .job = j, .fault = f};
        ResidencyUse use = {.job = j, .base = true};
        int r;

        for (uint32_t i = 0; i < j->n_loras; i++)
                x.uses[i] = (H3LoraUse){.lora = j->loras[i]->lora, .strength = j->strengths[i]};

        r = admit_merge(s, g, j, x.uses, &use.bytes, f);
        if (r >= 0)
                r = residency_prepare(&s->residency, s->backend, g, &use, f);
        if (r < 0)
                return r;
        do
                r = rank_group_run(g, &(RankOrder){.ranks = UINT64_C(1) << job_first_rank(j), .work = merge_on_rank, .userdata = &x});
        while (residency_again(&s->residency, g, j, r, f));
        if (r < 0)
                return r;

        r = merged_cache_add(&s->merged, key, j->model, j->loras, &x.h3, &x.report, &j->merged);
        (void) h3_lora_report_free(x.report); /* NULL once they are the cache's */
        (void) h3_model_free(x.h3);
        return r;
}

int step_choose_model(StepRunner *s, RankGroup *g, Job *j, Fault *f) {
        MergedKey key = {.base = j->model->serial, .n_loras = j->n_loras, .compute = j->compute};
        int r;

        if (j->merged || !needs_merge(j))
                return 0;

        for (uint32_t i = 0; i < j->n_loras; i++) {
                key.loras[i] = j->loras[i]->serial;
                key.strengths[i] = j->strengths[i];
        }
        j->merged = merged_cache_find(&s->merged, &key);
        if (!j->merged) {
                r = merge(s, g, j, &key, f);
                if (r < 0)
                        return r;
        }
        return j->cancelled ? -ECANCELED : 0;
}

static void add_note(StepRunner *s, WireMessage *m, const H3LoraNote *note, bool refused) {
        WireLoraNote *n = &m->lora_notes.notes[m->lora_notes.n++];

        n->lora = note->lora;
        n->refused = refused;
        (void) snprintf(n->name, sizeof(n->name), "%s", note->name);
        (void) snprintf(n->reason, sizeof(n->reason), "%s", note->reason);
        if (m->lora_notes.n < WIRE_LORA_NOTES_MAX)
                return;

        link_send(s->link, m);
        wire_init(m, WIRE_LORA_NOTES, m->header.epoch, m->header.job, m->header.step);
}

void step_send_notes(StepRunner *s, const Job *j) {
        const H3LoraReport *report = j->merged ? j->merged->report : NULL;
        WireMessage m;

        if (!report)
                return;
        wire_init(&m, WIRE_LORA_NOTES, j->epoch, j->id, 0);
        for (size_t i = 0; i < report->n_applied; i++)
                add_note(s, &m, &report->applied[i], false);
        for (size_t i = 0; i < report->n_refused; i++)
                add_note(s, &m, &report->refused[i], true);
        if (m.lora_notes.n > 0)
                link_send(s->link, &m);
}
