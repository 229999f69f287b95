/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/coder.h"

#include <inttypes.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"
#include "service/worker/job-private.h"

static const char *kind_name(uint32_t kind) {
        static const char *const names[] = {
                [WIRE_JOB_TOKENIZE] = "Tokenize",
                [WIRE_JOB_ENCODE] = "Encode",
                [WIRE_JOB_DECODE] = "Decode",
                [WIRE_JOB_ENCODE_MEDIA] = "EncodeMedia",
        };

        return names[kind];
}

static const CoderClass *choose_class(uint32_t kind, const ModelEntry *m) {
        if (kind == WIRE_JOB_TOKENIZE)
                return m->conditioner ? &coder_tokenize : NULL;
        if (kind == WIRE_JOB_ENCODE)
                return m->conditioner ? &coder_encode : NULL;
        if (m->video_vae)
                return kind == WIRE_JOB_DECODE ? &coder_decode_video : &coder_encode_video;
        if (m->audio_vae)
                return kind == WIRE_JOB_DECODE ? &coder_decode_audio : &coder_encode_audio;
        return NULL;
}

static int check_numbers(const WireJobOpen *w, const LkOps *ops, Fault *f) {
        const uint32_t known = WIRE_JOB_RESUME | WIRE_JOB_PLAN_ONLY;
        bool unread = w->kind == WIRE_JOB_DECODE && w->flags == (WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD);

        if (w->compute > WIRE_COMPUTE_BF16)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown compute type %" PRIu32 ".", w->compute);
        if (!unread && ((w->flags & ~known) || w->flags == known))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the flags 0x%" PRIx32 ", expected 0 or one of 0x%" PRIx32 ".", w->flags,
                        known);
        if (w->exchange > WIRE_EXCHANGE_P2P || (w->exchange == WIRE_EXCHANGE_P2P && !ops->copy))
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The job has the exchange %" PRIu32 ", which the %s worker has not for it.", w->exchange, ops->backend);
        if (w->n_loras > 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has %" PRIu32 " LoRA adapters: they change denoisers only.", w->n_loras);
        if (w->n_conditions > 0 && w->kind != WIRE_JOB_ENCODE)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has %" PRIu32 " pictures: only Encode takes them.", w->n_conditions);
        return 0;
}

/* What a job of its kind does not read must not be there: a client that gives it expects something of it. */
static int check_absent(const WireJobOpen *w, const ModelEntry *m, Fault *f) {
        bool text = w->kind == WIRE_JOB_TOKENIZE || w->kind == WIRE_JOB_ENCODE;
        const struct {
                const char *name;
                const WireTensor *tensor;
                bool read;
        } tensors[] = {
                {"text", &w->text, text},
                {"text_tags", &w->text_tags, false},
                {"video", &w->video, !text && m->video_vae},
                {"audio", &w->audio, !text && m->audio_vae},
                {"sigmas_video", &w->sigmas_video, false},
                {"sigmas_audio", &w->sigmas_audio, false},
                {"mask_video", &w->mask_video, false},
                {"mask_audio", &w->mask_audio, false},
                {"clean_video", &w->clean_video, false},
                {"clean_audio", &w->clean_audio, false},
                {"slot", &w->slot, false},
                {"kept", &w->kept, false},
        };

        for (size_t i = 0; i < ELEMENTSOF(tensors); i++)
                if (!tensors[i].read && !tensor_is_absent(tensors[i].tensor))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "The job has the tensor %s, which %s on this model does not take.",
                                tensors[i].name, kind_name(w->kind));
        return 0;
}

int coder_add_output(Coder *c, WireOutputName name, StType type, uint32_t n_dims, const uint64_t *shape) {
        WireOutput *o = c->outputs + c->n_outputs;
        uint64_t size = st_type_size(type);

        for (uint32_t i = 0; i < n_dims; i++)
                if (__builtin_mul_overflow(size, shape[i], &size))
                        return -EOVERFLOW;

        *o = (WireOutput){
                .name = name,
                .tensor = {.size = size, .dtype = (uint32_t) type, .n_dims = n_dims},
        };
        memcpy(o->tensor.shape, shape, n_dims * sizeof(*shape));
        c->n_outputs++;
        return 0;
}

/* At `*at`, which becomes the end of it, padded. False: more bytes than can be counted. */
static bool place(uint64_t size, uint64_t *at, uint64_t *ret_offset) {
        uint64_t padded;

        *ret_offset = *at;
        return !__builtin_add_overflow(size, WIRE_SLOT_ALIGN - 1, &padded) &&
               !__builtin_add_overflow(*at, padded & ~(WIRE_SLOT_ALIGN - 1), at);
}

static int place_output(Job *j, const WireJobOpen *w, Fault *f) {
        Coder *c = j->coder;
        uint64_t at = w->output_offset, unused;
        bool ok;

        j->n_slots = c->slot_size > 0 ? 2 : 0;
        j->commit_offset = at;
        ok = place(sizeof(uint64_t), &at, &unused);
        for (uint32_t i = 0; ok && i < c->n_outputs; i++)
                ok = place(c->outputs[i].tensor.size, &at, &c->outputs[i].tensor.offset);
        j->slot_offset = j->n_slots > 0 ? at : 0;
        for (uint32_t i = 0; ok && i < j->n_slots; i++) {
                uint64_t begin;

                ok = place(c->slot_size, &at, &begin);
                j->slot_stride = at - begin;
        }
        if (!ok)
                return fault_set(f, -EOVERFLOW, FAULT_DOES_NOT_FIT,
                        "The results have more bytes than can be counted.");

        j->output_used = at - w->output_offset;
        if (j->output_used > w->output_size && !j->plan_only) /* a plan says how much there has to be */
                return fault_set(f, -ENOSPC, FAULT_DOES_NOT_FIT,
                        "The results need %" PRIu64 " bytes of the output arena, %" PRIu64
                        " are given: make the arena larger.",
                        j->output_used, w->output_size);
        return 0;
}

void *coder_output(const Job *j, uint32_t i) {
        return (char *) j->arenas->output.map + j->coder->outputs[i].tensor.offset;
}

void *coder_slot(const Job *j, uint32_t steps) {
        return job_slot(j, steps);
}

static int resume(Job *j, Fault *f) {
        const CoderClass *class = j->coder->class;
        int r;

        r = job_resume_commit(j, &j->committed, f);
        if (r < 0)
                return r;
        if (class->resume && j->committed > 0)
                return class->resume(j, f);
        return 0;
}

static int fill(Job *j, const WireJobOpen *w, Fault *f) {
        Coder *c = j->coder;
        int r;

        r = c->class->open(j, w, f);
        if (r >= 0)
                r = place_output(j, w, f);
        if (r >= 0 && (w->flags & WIRE_JOB_RESUME))
                r = resume(j, f);
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for the job's own copies of its inputs.");
        return r;
}

int coder_new(Job *j, const WireJobOpen *w, Fault *f) {
        const CoderClass *class = choose_class(w->kind, j->model);
        int r;

        if (!class)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%s cannot run on a model of kind \"%s\": it needs a %s.", kind_name(w->kind),
                        model_entry_kind_name(j->model),
                        w->kind == WIRE_JOB_TOKENIZE || w->kind == WIRE_JOB_ENCODE ? "conditioner" : "VAE");
        if (class->runs && !class->runs(j->model->ops))
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The %s worker of this version does not run %s on a %s: set Worker=cpu.", j->model->ops->backend,
                        kind_name(w->kind), model_entry_kind_name(j->model));
        r = check_numbers(w, j->model->ops, f);
        if (r >= 0)
                r = check_absent(w, j->model, f);
        if (r >= 0)
                r = job_check_output(j, w, f);
        if (r < 0)
                return r;

        j->coder = calloc(1, sizeof(*j->coder));
        if (!j->coder)
                return -ENOMEM;
        j->coder->class = class;
        j->coder->ranks = (uint32_t) __builtin_popcountll(j->ranks);
        j->coder->exchange = exchange_kind_of(plan_exchange_kind(w->exchange), j->model->ops);
        j->coder->output_type = (StType) w->output_type;
        r = fill(j, w, f);
        if (r < 0 || j->plan_only)
                return r;

        /* What an earlier job left here must not look like a commit of this one. */
        job_write_commit(j, j->committed);
        return 0;
}

Coder *coder_free(Coder *c) {
        if (c) {
                c->class->free(c->work);
                free(c);
        }
        return NULL;
}

void coder_describe(const Job *j, WireJobReady *ret) {
        const Coder *c = j->coder;

        ret->rows = c->rows;
        ret->blocks = c->blocks < STEP_BLOCKS_MAX ? c->blocks : STEP_BLOCKS_MAX;
        ret->committed = j->committed;
        ret->n_slots = j->n_slots;
        ret->commit_offset = j->commit_offset;
        ret->slot_offset = j->slot_offset;
        ret->slot_stride = j->slot_stride;
        ret->output_used = j->output_used;
        ret->n_outputs = c->n_outputs;
        memcpy(ret->outputs, c->outputs, sizeof(ret->outputs));
        ret->frames = c->frames;
        ret->ring_frames = c->ring_frames;
        ret->step_frames = c->step_frames;
        ret->frames_done = c->frames_done;
        ret->memory_bytes = c->memory_bytes;
}

uint64_t coder_takers(const Job *j, uint64_t pieces) {
        uint64_t ranks = j->coder->ranks;

        return j->model->ops->host_weights && pieces < ranks ? pieces : ranks;
}

int coder_hold(Job *j) {
        (void) pthread_mutex_lock(&j->lock);
        if (!j->closed)
                return 0;
        (void) pthread_mutex_unlock(&j->lock);
        return -ECANCELED;
}

void coder_release(Job *j, bool committed) {
        if (committed) {
                job_write_commit(j, j->committed + 1);
                j->committed++;
        }
        (void) pthread_mutex_unlock(&j->lock);
}

/* Once per job: what a step takes is kept to the last one. As in step.c. */
static int admit(StepRunner *s, Job *j, Fault *f) {
        Coder *c = j->coder;
        uint64_t have, need = c->memory_bytes - (s->backend->ops->host_weights ? 0 : c->device_bytes);

        if (c->admitted)
                return 0;
        have = s->backend->memory_available();
        if (have > 0 && need > have) {
                step_runner_shrink(s);
                have = s->backend->memory_available();
        }
        if (have > 0 && need > have)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "A step of %s needs %" PRIu64 " bytes of memory, %" PRIu64 " are free.",
                        kind_name(j->kind), need, have);
        c->admitted = true;
        return 0;
}

/* With its weights on the devices. */
static int run_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        const ResidencyUse use = {.job = j, .ranks = j->ranks, .bytes = j->coder->device_bytes};
        int r;

        if (!j->coder->weights)
                return j->coder->class->step(s, g, j, step, ret, f);
        r = residency_prepare(&s->residency, s->backend, g, &use, f);
        if (r < 0)
                return r;
        do
                r = j->coder->class->step(s, g, j, step, ret, f);
        while (residency_again(&s->residency, g, j, r, f));
        residency_note(&s->residency);
        return r;
}

int coder_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        const CoderClass *class = j->coder->class;
        int r;

        r = class->recall ? class->recall(s, j, ret) : 0;
        if (r != 0)
                return r < 0 ? r : 0;
        r = admit(s, j, f);
        if (r < 0)
                return r;

        r = run_step(s, g, j, step, ret, f);
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for a step of %s: it needs %" PRIu64 " bytes.",
                        kind_name(j->kind), j->coder->memory_bytes);
        return r;
}
