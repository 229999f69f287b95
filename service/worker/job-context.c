/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-private.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "service/h3/layout.h"
#include "service/h3/preview.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "service/worker/coder.h"
#include "service/worker/job-input.h"


DEFINE_CLEANUP(Job *, job_unref)

Job *job_ref(Job *j) {
        j->n_ref++;
        return j;
}

static void latents_done(Latents *l) {
        if (l->slot)
                free(l->slot);
        else {
                free(l->video);
                free(l->audio);
        }
}

static void free_inputs(Job *j) {
        free(j->text);
        (void) h3_sparse_free(j->sparse);
        (void) h3_layout_free(j->layout);
        free(j->sigmas_video);
        free(j->sigmas_audio);
        free(j->announced_video);
        free(j->announced_audio);
        for (size_t i = 0; i < WIRE_CONDITIONS_MAX; i++) {
                free(j->condition_video[i]);
                free(j->condition_audio[i]);
        }
        for (size_t i = 0; i < ELEMENTSOF(j->masks); i++) {
                free(j->masks[i].mask);
                free(j->masks[i].pooled);
                free(j->masks[i].clean);
                free(j->masks[i].held);
        }
}

Job *job_unref(Job *j) {
        if (!j || --j->n_ref > 0)
                return NULL;

        free_inputs(j);
        (void) coder_free(j->coder);
        (void) job_start_free(j->start);
        latents_done(&j->state);
        latents_done(&j->next);
        latents_done(&j->velocity);
        latents_done(&j->shown);
        (void) plan_free(j->plan);
        (void) merged_model_unref(j->merged);
        (void) model_entry_unref(j->model);
        for (uint32_t i = 0; i < j->n_loras; i++)
                (void) model_entry_unref(j->loras[i]);
        (void) arena_pair_unref(j->arenas);
        (void) pthread_mutex_destroy(&j->lock);
        free(j);
        return NULL;
}

/* The broker has checked it against its own by then. */
_Static_assert((int) H3_LORA_STRENGTH_MAX == (int) WIRE_LORA_STRENGTH_MAX, "one range of strengths");

static int check_loras(const WireJobOpen *w, const JobParts *parts, Fault *f) {
        if (w->n_loras > WIRE_LORAS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has %" PRIu32 " LoRA adapters, expected at most %d.", w->n_loras,
                        WIRE_LORAS_MAX);
        for (uint32_t i = 0; i < w->n_loras; i++) {
                if (!parts->loras[i]->lora)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Adapter %" PRIu32 " of the job is a %s, no LoRA.", i,
                                model_entry_kind_name(parts->loras[i]));
                if (!(fabs(w->loras[i].strength) <= H3_LORA_STRENGTH_MAX))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "The strength of adapter %" PRIu32
                                " is %g, expected a number from -%g to %g.",
                                i, w->loras[i].strength, H3_LORA_STRENGTH_MAX, H3_LORA_STRENGTH_MAX);
        }
        return 0;
}

static int check_sample_numbers(const WireJobOpen *w, Fault *f) {
        if (w->sampler > WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown sampler %" PRIu32 ".", w->sampler);
        if (w->schedule > WIRE_SCHEDULE_REFERENCE)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown schedule %" PRIu32 ".", w->schedule);
        if (w->schedule == WIRE_SCHEDULE_GIVEN && w->steps != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job gives its sigmas and a number of steps (%" PRIu32 "): give one of them.",
                        w->steps);
        if (w->noise > WIRE_NOISE_DIFFUSERS)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The noise of a trajectory is number %" PRIu32
                        ", expected given, comfy or diffusers.",
                        w->noise);
        return 0;
}

static int check_numbers(const WireJobOpen *w, Fault *f) {
        uint32_t flags = w->kind == WIRE_JOB_SAMPLE
                                 ? WIRE_JOB_RESUME | WIRE_JOB_PLAN_ONLY | WIRE_JOB_KEEP_STEPS | WIRE_JOB_UNREAD
                         : w->kind == WIRE_JOB_STEP ? WIRE_JOB_RESUME | WIRE_JOB_PLAN_ONLY
                                                    : 0;

        if (w->kind > WIRE_JOB_MERGE)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is of the unknown kind %" PRIu32 ".", w->kind);
        if (w->compute > WIRE_COMPUTE_BF16)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown compute type %" PRIu32 ".", w->compute);
        if (w->flags & ~flags)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the flags 0x%" PRIx32 ", of which only 0x%" PRIx32
                        " are known for its kind.",
                        w->flags, flags);
        if ((w->flags & WIRE_JOB_RESUME) && (w->flags & WIRE_JOB_PLAN_ONLY))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is to be planned only: there is nothing to resume.");
        if ((w->flags & WIRE_JOB_UNREAD) && (!(w->flags & WIRE_JOB_PLAN_ONLY) || w->noise == WIRE_NOISE_GIVEN ||
                                                    !tensor_is_absent(&w->mask_video) || !tensor_is_absent(&w->mask_audio)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job's latents are not to be read, which is for plans with made noise and without masks.");
        if (w->kind == WIRE_JOB_MERGE)
                return 0;
        if (w->condition_noise > WIRE_NOISE_OFFICIAL)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The noise of the conditions is the unknown number %" PRIu32 ".",
                        w->condition_noise);
        if (w->kind == WIRE_JOB_SAMPLE)
                return check_sample_numbers(w, f);

        if (w->start_step != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is one step and cannot begin after step %" PRIu32 ".", w->start_step);
        if (w->noise != WIRE_NOISE_GIVEN)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is one step: its latents are what the model sees, no noise is made for "
                        "them.");
        return 0;
}

/* Into memory of their own: ret's arrays are the caller's to free, also on failure. */
static int take_latents(Job *j, const WireJobOpen *w, Latents *ret, Fault *f) {
        const H3Config *c = &j->model->h3->config;
        TensorRule video = {.name = "video", .type = ST_F32, .n_dims = 4, .shape = {c->video_channels}};
        TensorRule audio = {.name = "audio", .type = ST_F32, .n_dims = 3, .shape = {c->audio_channels, 2}};
        int r;

        if (w->flags & WIRE_JOB_UNREAD) {
                r = tensor_check(&w->video, &video, &j->arenas->input, f);
                if (r >= 0)
                        r = tensor_check(&w->audio, &audio, &j->arenas->input, f);
        } else {
                r = tensor_copy(&w->video, &video, &j->arenas->input, (void **) &ret->video, f);
                if (r >= 0)
                        r = tensor_copy(&w->audio, &audio, &j->arenas->input, (void **) &ret->audio, f);
                if (r >= 0)
                        r = tensor_check_finite("video", ST_F32, ret->video, 4, w->video.shape, f);
                if (r >= 0)
                        r = tensor_check_finite("audio", ST_F32, ret->audio, 3, w->audio.shape, f);
        }
        if (r < 0)
                return r;

        j->video = w->video;
        j->audio = w->audio;
        j->n_video = w->video.size / sizeof(float);
        j->n_audio = w->audio.size / sizeof(float);
        return 0;
}

static int place_parts(Job *j, const WireJobOpen *w) {
        WireSlot slot;
        int r;

        r = wire_slot_place(w->kind == WIRE_JOB_SAMPLE ? (WireSampler) w->sampler : WIRE_SAMPLER_EULER, j->video.size,
                j->audio.size, &slot);
        if (r < 0)
                return r;

        j->video.offset = 0;
        j->audio.offset = slot.audio;
        if (slot.carried > 0) {
                j->carried = j->audio;
                j->carried.offset = slot.carried;
        }
        j->denoised_video = slot.denoised_video;
        j->denoised_audio = slot.denoised_audio;
        j->slot_stride = slot.stride;
        return 0;
}

int job_check_output(const Job *j, const WireJobOpen *w, Fault *f) {
        uint64_t end;

        if (w->output_offset % WIRE_SLOT_ALIGN != 0 ||
                __builtin_add_overflow(w->output_offset, w->output_size, &end) ||
                end > j->arenas->output.size)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The place for results, %" PRIu64 " bytes at offset %" PRIu64
                        ", is not at a multiple of %" PRIu64 " inside the output arena of %" PRIu64
                        " bytes.",
                        w->output_size, w->output_offset, WIRE_SLOT_ALIGN, j->arenas->output.size);
        return 0;
}

/* Behind the slots, where there is room: none is no failure. */
static void place_preview(Job *j, const WireJobOpen *w) {
        uint64_t begin = wire_slot_pad(j->output_used);
        WireTensor t = {.dtype = ST_U8, .n_dims = 4, .offset = w->output_offset + begin};

        if (w->kind != WIRE_JOB_SAMPLE || w->preview_steps == 0 || j->video.shape[0] != H3_PREVIEW_CHANNELS)
                return;

        for (uint32_t i = 0; i < 3; i++)
                t.shape[i] = j->video.shape[i + 1];
        t.shape[3] = 3;
        t.size = j->video.size / sizeof(float) / H3_PREVIEW_CHANNELS * 3;
        if (begin > w->output_size || t.size > w->output_size - begin)
                return;

        j->preview = t;
        j->preview_steps = w->preview_steps;
        memcpy(j->preview_map, w->preview_map, sizeof(j->preview_map));
        j->output_used = begin + t.size;
}

/* [commit word, padded to 64] [slot 0] [slot 1] ... [preview] */
static int place_output(Job *j, const WireJobOpen *w, Fault *f) {
        uint64_t slots, used;
        int r;

        r = job_check_output(j, w, f);
        if (r < 0)
                return r;

        if (w->kind == WIRE_JOB_STEP)
                j->n_slots = 1;
        else
                j->n_slots = (w->flags & WIRE_JOB_KEEP_STEPS) ? j->steps + 1 : 2;

        if (place_parts(j, w) < 0 || __builtin_mul_overflow(j->slot_stride, (uint64_t) j->n_slots, &slots) ||
                __builtin_add_overflow(slots, WIRE_SLOT_ALIGN, &used))
                return fault_set(f, -EOVERFLOW, FAULT_DOES_NOT_FIT,
                        "The results of %" PRIu32 " slots have more bytes than can be counted.", j->n_slots);

        if (used > w->output_size)
                return fault_set(f, -ENOSPC, FAULT_DOES_NOT_FIT,
                        "The results need %" PRIu64 " bytes of the output arena, %" PRIu64
                        " are given: make the arena larger.",
                        used, w->output_size);

        j->commit_offset = w->output_offset;
        j->slot_offset = w->output_offset + WIRE_SLOT_ALIGN;
        j->output_used = used;
        place_preview(j, w);
        return 0;
}

static _Atomic uint64_t *commit_word(const Job *j) {
        return (_Atomic uint64_t *) (void *) ((char *) j->arenas->output.map + j->commit_offset);
}

uint64_t job_read_commit(const Job *j) {
        return atomic_load_explicit(commit_word(j), memory_order_acquire);
}

void job_write_commit(const Job *j, uint32_t steps_done) {
        atomic_store_explicit(commit_word(j), wire_commit_pack(j->epoch, steps_done), memory_order_release);
}

char *job_slot(const Job *j, uint32_t state) {
        return (char *) j->arenas->output.map + j->slot_offset +
               (uint64_t) (state % j->n_slots) * j->slot_stride;
}

int latents_new(const Job *j, bool whole_slot, Latents *ret) {
        bool sample = whole_slot && j->kind == WIRE_JOB_SAMPLE;
        bool carries = sample && h3_sampler_carries(j->sampler.kind);
        bool remembers = sample && h3_sampler_remembers(j->sampler.kind);
        uint64_t size = whole_slot ? j->slot_stride : j->audio.offset + j->audio.size;
        char *slot;

        slot = calloc(1, (size_t) size);
        if (!slot)
                return -ENOMEM;
        memory_prefer_huge(slot, size);
        *ret = (Latents){
                .slot = slot,
                .video = (float *) (void *) (slot + j->video.offset),
                .audio = (float *) (void *) (slot + j->audio.offset),
                .carried = carries ? (float *) (void *) (slot + j->carried.offset) : NULL,
                .denoised_video = remembers ? (float *) (void *) (slot + j->denoised_video) : NULL,
                .denoised_audio = remembers ? (float *) (void *) (slot + j->denoised_audio) : NULL,
        };
        return 0;
}

H3SamplerState latents_state(const Latents *l) {
        return (H3SamplerState){
                .video = l->video,
                .audio = l->audio,
                .carried = l->carried,
                .denoised_video = l->denoised_video,
                .denoised_audio = l->denoised_audio,
        };
}

int job_check_finite(const Job *j, const char *whose, const Latents *l, Fault *f) {
        const struct {
                const char *name;
                const float *values;
                const WireTensor *shape;
        } parts[] = {
                {"video", l->video, &j->video},
                {"audio", l->audio, &j->audio},
                {"carried audio", l->carried, &j->audio},
                {"denoised video", l->denoised_video, &j->video},
                {"denoised audio", l->denoised_audio, &j->audio},
        };

        for (size_t i = 0; i < ELEMENTSOF(parts); i++) {
                char name[96];
                int r;

                if (!parts[i].values)
                        continue;
                (void) snprintf(name, sizeof(name), "%s of %s", parts[i].name, whose);
                r = tensor_check_finite(
                        name, ST_F32, parts[i].values, parts[i].shape->n_dims, parts[i].shape->shape, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* A STEP has one slot, and it holds velocities; its state is what was given. */
static int allocate(Job *j) {
        bool sample = j->kind == WIRE_JOB_SAMPLE;
        int r;

        r = latents_new(j, !sample, &j->velocity);
        if (r >= 0 && sample)
                r = latents_new(j, true, &j->state);
        if (r >= 0 && sample)
                r = latents_new(j, true, &j->next);
        if (r >= 0 && (j->sampler.video_mask || j->sampler.audio_mask))
                r = latents_new(j, false, &j->shown);
        return r;
}

static void pass_kept(const Job *j, const WireJobOpen *w) {
        const char *kept = (const char *) j->arenas->input.map + w->kept.offset;

        for (uint32_t k = 0; k < w->start_step; k++)
                memcpy(job_slot(j, k), kept + k * j->slot_stride, (size_t) j->slot_stride);
}

static void start(Job *j, const WireJobOpen *w) {
        /* What an earlier job left here must not look like a commit of this one while its slot 0 is half
         * written. */
        atomic_store_explicit(commit_word(j), 0, memory_order_release);
        if (j->kind == WIRE_JOB_SAMPLE && !job_start_is_open(j))
                memcpy(job_slot(j, j->committed), j->state.slot, (size_t) j->slot_stride);
        if (w->flags & WIRE_JOB_KEEP_STEPS)
                pass_kept(j, w);
}

static int check_arenas(const ArenaPair *a, Fault *f) {
        if (a->fault.name[0] != '\0') {
                *f = a->fault;
                return -EINVAL;
        }
        if (!a->input.map || !a->output.map)
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "Session %" PRIu64 " has no %s arena.",
                        a->session, a->input.map ? "output" : "input");
        return 0;
}

static int fill(Job *j, const WireJobOpen *w, Fault *f) {
        CLEANUP(latents_done) Latents given = {};
        CLEANUP_FREE uint8_t *tags = NULL;
        int r;

        r = job_take_text(j, w, &tags, f);
        if (r >= 0)
                r = take_latents(j, w, &given, f);
        if (r >= 0)
                r = job_make_layout(j, w, tags, f);
        if (r >= 0)
                r = job_make_sparse(j, w);
        if (r >= 0)
                r = job_take_conditions(j, w, f);
        if (r >= 0)
                r = job_make_schedule(j, w, f);
        if (r >= 0)
                r = job_take_masks(j, w, &given, f);
        if (r >= 0)
                r = place_output(j, w, f);
        if (r >= 0)
                r = allocate(j);
        if (r >= 0)
                r = job_make_start(j, w, &given, f);
        return r;
}

static uint64_t all_ranks(const JobParts *parts) {
        return UINT64_MAX >> (64 - (parts->ranks > 0 ? parts->ranks : 1));
}

static int check_ranks(const WireJobOpen *w, const JobParts *parts, Fault *f) {
        if (w->ranks & ~all_ranks(parts))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is to run on the ranks 0x%" PRIx64 ", the worker has %" PRIu32 ".", w->ranks, parts->ranks);
        return 0;
}

static Job *job_init(const WireJobOpen *w, const JobParts *parts, uint64_t epoch) {
        Job *j;

        j = calloc(1, sizeof(*j));
        if (!j)
                return NULL;

        j->n_ref = 1;
        (void) pthread_mutex_init(&j->lock, NULL);
        j->id = w->header.job;
        j->epoch = (uint32_t) epoch;
        j->kind = (WireJobKind) w->kind;
        j->plan_only = w->flags & WIRE_JOB_PLAN_ONLY;
        j->compute = w->compute == WIRE_COMPUTE_F32 ? H3_COMPUTE_F32 : H3_COMPUTE_BF16;
        j->model = model_entry_ref(parts->model);
        if (parts->arenas)
                j->arenas = arena_pair_ref(parts->arenas);
        j->private_max = w->private_max;
        j->ranks = w->ranks > 0 ? w->ranks : all_ranks(parts);
        j->n_loras = wire_job_is_coding(w->kind) ? 0 : w->n_loras;
        for (uint32_t i = 0; i < j->n_loras; i++) {
                j->loras[i] = model_entry_ref(parts->loras[i]);
                j->strengths[i] = w->loras[i].strength;
        }
        return j;
}

/* For a message only: sizes that were not looked at yet may make nonsense of it. */
static uint64_t size_of_inputs(const WireJobOpen *w) {
        uint64_t n = w->video.size + w->audio.size;

        for (uint32_t i = 0; i < w->n_conditions && i < WIRE_CONDITIONS_MAX; i++)
                n += 96 * w->conditions[i].frames * w->conditions[i].height * w->conditions[i].width;
        return n;
}

static int new_coding_job(const WireJobOpen *w, const JobParts *parts, uint64_t epoch, Job **ret, Fault *f) {
        CLEANUP(job_unrefp) Job *j = NULL;
        int r;

        r = check_arenas(parts->arenas, f);
        if (r < 0)
                return r;

        j = job_init(w, parts, epoch);
        if (!j)
                return -ENOMEM;
        r = coder_new(j, w, f);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(j);
        return 0;
}

int job_new(const WireJobOpen *w, const JobParts *parts, uint64_t epoch, Job **ret, Fault *f) {
        CLEANUP(job_unrefp) Job *j = NULL;
        int r;

        r = check_ranks(w, parts, f);
        if (r < 0)
                return r;
        if (wire_job_is_coding(w->kind))
                return new_coding_job(w, parts, epoch, ret, f);

        r = check_numbers(w, f);
        if (r < 0)
                return r;
        if (!parts->model->h3)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is for a %s: Step and Sample run on a denoiser, adapters are merged into one.",
                        model_entry_kind_name(parts->model));
        r = job_check_sparse(w, parts->model->h3, f);
        if (r < 0)
                return r;
        r = check_loras(w, parts, f);
        if (r < 0)
                return r;
        if (w->kind != WIRE_JOB_MERGE) {
                r = check_arenas(parts->arenas, f);
                if (r < 0)
                        return r;
        }

        j = job_init(w, parts, epoch);
        if (!j)
                return -ENOMEM;
        if (j->kind == WIRE_JOB_MERGE) {
                j->steps = 1;
                *ret = STEAL_PTR(j);
                return 0;
        }

        r = fill(j, w, f);
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for the job's own copies: several times the %" PRIu64
                        " bytes of its latents.",
                        size_of_inputs(w));
        if (r < 0)
                return r;

        if (!j->plan_only && !(w->flags & WIRE_JOB_RESUME))
                start(j, w);
        if (!j->plan_only && !job_start_is_open(j))
                job_write_commit(j, j->committed); /* also a resumed one: from here on the word carries this
                                                      worker's epoch */
        *ret = STEAL_PTR(j);
        return 0;
}

void job_describe(const Job *j, WireJobReady *ret) {
        ret->steps = j->steps;
        if (j->coder)
                coder_describe(j, ret);
        if (j->kind == WIRE_JOB_MERGE || j->coder)
                return;
        ret->rows = j->layout->rows;
        ret->blocks = j->model->h3->config.layers;
        ret->committed = j->committed;
        ret->n_slots = j->n_slots;
        ret->commit_offset = j->commit_offset;
        ret->slot_offset = j->slot_offset;
        ret->slot_stride = j->slot_stride;
        ret->output_used = j->output_used;
        ret->video = j->video;
        ret->audio = j->audio;
        ret->carried = j->carried;
        if (j->preview.size > 0)
                ret->outputs[ret->n_outputs++] = (WireOutput){.name = WIRE_OUTPUT_PREVIEW, .tensor = j->preview};
}

void job_show(Job *j) {
        const H3SamplerMask *video = j->sampler.video_mask, *audio = j->sampler.audio_mask;

        if (video)
                h3_sampler_input(video, j->state.video, j->n_video, j->shown.video);
        if (audio)
                h3_sampler_input(audio, j->state.audio, j->n_audio, j->shown.audio);
}

void job_step_input(const Job *j, uint32_t step, H3StepInput *ret) {
        *ret = (H3StepInput){
                .compute = j->compute,
                .layout = j->layout,
                .video = j->sampler.video_mask ? j->shown.video : j->state.video,
                .audio = j->sampler.audio_mask ? j->shown.audio : j->state.audio,
                .conditions = j->conditions,
                .sigma_video = j->sigmas_video[step],
                .sigma_audio = j->sigmas_audio[step],
        };
        if (j->kind == WIRE_JOB_SAMPLE)
                h3_sampler_sigmas(&j->sampler, step, &ret->sigma_video, &ret->sigma_audio);
}

bool job_is_cancelled(void *job) {
        const Job *j = job;

        return atomic_load_explicit(&j->cancelled, memory_order_relaxed);
}

bool job_preview(Job *j, uint32_t step, const H3StepInput *x) {
        bool done = false;

        if (j->preview.size == 0 || ((step + 1) % j->preview_steps != 0 && step + 1 < j->steps))
                return false;

        (void) pthread_mutex_lock(&j->lock);
        if (!j->closed) {
                h3_preview(x->video, j->velocity.video, x->sigma_video, j->preview.size / 3, j->preview_map,
                        (uint8_t *) j->arenas->output.map + j->preview.offset);
                done = true;
        }
        (void) pthread_mutex_unlock(&j->lock);
        return done;
}

int job_commit(Job *j, const Latents *result) {
        int r = 0;

        (void) pthread_mutex_lock(&j->lock);
        if (j->closed)
                r = -ECANCELED;
        else {
                memcpy(job_slot(j, j->committed + 1), result->slot, (size_t) j->slot_stride);
                job_write_commit(j, j->committed + 1);
                j->committed++;
        }
        (void) pthread_mutex_unlock(&j->lock);
        return r;
}

void job_close(Job *j) {
        j->cancelled = true;
        (void) pthread_mutex_lock(&j->lock);
        j->closed = true;
        (void) pthread_mutex_unlock(&j->lock);
}
