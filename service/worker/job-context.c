/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-context.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "service/h3/layout.h"
#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"

#define SLOT_ALIGN UINT64_C(64)

DEFINE_CLEANUP(Job *, job_unref)

static void latents_done(Latents *l) {
        free(l->video);
        free(l->audio);
}

Job *job_ref(Job *j) {
        j->n_ref++;
        return j;
}

Job *job_unref(Job *j) {
        if (!j || --j->n_ref > 0)
                return NULL;

        free(j->text);
        (void) h3_layout_free(j->layout);
        free(j->sigmas_video);
        free(j->sigmas_audio);
        latents_done(&j->state);
        latents_done(&j->next);
        latents_done(&j->velocity);
        (void) plan_free(j->plan);
        (void) model_entry_unref(j->model);
        (void) arena_pair_unref(j->arenas);
        (void) pthread_mutex_destroy(&j->lock);
        free(j);
        return NULL;
}

static int check_numbers(const WireJobOpen *w, Fault *f) {
        uint32_t flags = WIRE_JOB_RESUME | (w->kind == WIRE_JOB_SAMPLE ? WIRE_JOB_KEEP_STEPS : 0);

        if (w->kind != WIRE_JOB_STEP && w->kind != WIRE_JOB_SAMPLE)
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
        if (w->kind == WIRE_JOB_STEP && w->start_step == 0)
                return 0;
        if (w->kind == WIRE_JOB_STEP)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job is one step and cannot begin after step %" PRIu32 ".", w->start_step);

        if (w->sampler != WIRE_SAMPLER_EULER)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown sampler %" PRIu32 ".", w->sampler);
        if (w->schedule > WIRE_SCHEDULE_REFERENCE)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown schedule %" PRIu32 ".", w->schedule);
        if (w->schedule == WIRE_SCHEDULE_GIVEN && w->steps != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job gives its sigmas and a number of steps (%" PRIu32 "): give one of them.",
                        w->steps);
        return 0;
}

static int copy_text(Job *j, const WireJobOpen *w, uint8_t **ret_tags, Fault *f) {
        TensorRule text = {
                .name = "text", .type = ST_BF16, .n_dims = 2, .shape = {0, j->model->h3->config.text_dim}};
        TensorRule tags = {.name = "text_tags", .type = ST_U8, .n_dims = 1};
        CLEANUP_FREE uint8_t *t = NULL;
        int r;

        r = tensor_copy(&w->text, &text, &j->arenas->input, (void **) &j->text, f);
        if (r < 0)
                return r;

        r = tensor_check_finite("text", ST_BF16, j->text, 2, w->text.shape, f);
        if (r < 0)
                return r;

        j->text_rows = w->text.shape[0];
        j->text_size = w->text.size;
        if (tensor_is_absent(&w->text_tags))
                return 0;

        tags.shape[0] = j->text_rows;
        r = tensor_copy(&w->text_tags, &tags, &j->arenas->input, (void **) &t, f);
        if (r < 0)
                return r;

        for (uint64_t i = 0; i < j->text_rows; i++)
                if (t[i] > 1)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "Tensor text_tags has %u at [%" PRIu64
                                "], expected 0 (vision row) or 1 (text row).",
                                t[i], i);

        *ret_tags = STEAL_PTR(t);
        return 0;
}

static int copy_latents(Job *j, const WireJobOpen *w, Fault *f) {
        const H3Config *c = &j->model->h3->config;
        TensorRule video = {.name = "video", .type = ST_F32, .n_dims = 4, .shape = {c->video_channels}};
        TensorRule audio = {.name = "audio", .type = ST_F32, .n_dims = 3, .shape = {c->audio_channels, 2}};
        int r;

        r = tensor_copy(&w->video, &video, &j->arenas->input, (void **) &j->state.video, f);
        if (r < 0)
                return r;

        r = tensor_copy(&w->audio, &audio, &j->arenas->input, (void **) &j->state.audio, f);
        if (r < 0)
                return r;

        /* A state that the model made is not the client's mistake: without the restart nobody would have looked at it. */
        if (w->start_step == 0) {
                r = tensor_check_finite("video", ST_F32, j->state.video, 4, w->video.shape, f);
                if (r < 0)
                        return r;

                r = tensor_check_finite("audio", ST_F32, j->state.audio, 3, w->audio.shape, f);
                if (r < 0)
                        return r;
        }

        j->video = w->video;
        j->audio = w->audio;
        j->n_video = w->video.size / sizeof(float);
        j->n_audio = w->audio.size / sizeof(float);
        return 0;
}

static int copy_sigmas(Job *j, const WireJobOpen *w, Fault *f) {
        TensorRule video = {
                .name = "sigmas_video", .type = ST_F32, .n_dims = 1, .elements_max = H3_STEPS_MAX + 1};
        TensorRule audio = {
                .name = "sigmas_audio", .type = ST_F32, .n_dims = 1, .elements_max = H3_STEPS_MAX + 1};
        int r;

        r = tensor_copy(&w->sigmas_video, &video, &j->arenas->input, (void **) &j->sigmas_video, f);
        if (r < 0)
                return r;

        r = tensor_copy(&w->sigmas_audio, &audio, &j->arenas->input, (void **) &j->sigmas_audio, f);
        if (r < 0)
                return r;

        if (w->sigmas_video.shape[0] != w->sigmas_audio.shape[0])
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "sigmas_video has %" PRIu64 " values, sigmas_audio %" PRIu64
                        ": both streams take the same number of steps.",
                        w->sigmas_video.shape[0], w->sigmas_audio.shape[0]);

        r = h3_schedule_check("sigmas_video", j->sigmas_video, w->sigmas_video.shape[0], f);
        if (r < 0)
                return r;

        r = h3_schedule_check("sigmas_audio", j->sigmas_audio, w->sigmas_audio.shape[0], f);
        if (r < 0)
                return r;

        j->steps = (uint32_t) w->sigmas_video.shape[0] - 1;
        return 0;
}

static int make_sigmas(Job *j, const WireJobOpen *w, Fault *f) {
        H3ScheduleKind kind =
                w->schedule == WIRE_SCHEDULE_SIMPLE ? H3_SCHEDULE_SIMPLE : H3_SCHEDULE_REFERENCE;
        uint32_t n_video, n_audio;
        int r;

        if (w->steps == 0 || w->steps > H3_STEPS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has %" PRIu32 " steps, expected 1 to %d.", w->steps, H3_STEPS_MAX);

        j->sigmas_video = calloc(w->steps + 1u, sizeof(float));
        j->sigmas_audio = calloc(w->steps + 1u, sizeof(float));
        if (!j->sigmas_video || !j->sigmas_audio)
                return -ENOMEM;

        r = h3_schedule(kind, w->steps, w->shift_video, j->sigmas_video, &n_video, f);
        if (r < 0)
                return r;

        r = h3_schedule(kind, w->steps, w->shift_audio, j->sigmas_audio, &n_audio, f);
        if (r < 0)
                return r;

        /* Merged neighbours depend on the shift. */
        if (n_video != n_audio)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "With %" PRIu32 " steps and shifts %g and %g the schedule has %" PRIu32
                        " video and %" PRIu32 " audio evaluations: choose fewer steps or closer shifts.",
                        w->steps, (double) w->shift_video, (double) w->shift_audio, n_video, n_audio);

        j->steps = n_video;
        return 0;
}

/* A trajectory that was begun elsewhere: its states before the one it goes on from are only passed on. */
static int check_start(Job *j, const WireJobOpen *w, Fault *f) {
        TensorRule video = {.name = "kept_video", .type = ST_F32, .n_dims = 5};
        TensorRule audio = {.name = "kept_audio", .type = ST_F32, .n_dims = 4};
        int r;

        if (w->start_step == 0)
                return 0;
        if (w->start_step >= j->steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The trajectory of %" PRIu32 " steps cannot go on after step %" PRIu32 ".", j->steps,
                        w->start_step);

        j->committed = w->start_step;
        if (!(w->flags & WIRE_JOB_KEEP_STEPS))
                return 0;

        video.shape[0] = audio.shape[0] = w->start_step;
        memcpy(video.shape + 1, j->video.shape, 4 * sizeof(uint64_t));
        memcpy(audio.shape + 1, j->audio.shape, 3 * sizeof(uint64_t));
        r = tensor_check(&w->kept_video, &video, &j->arenas->input, f);
        if (r < 0)
                return r;

        return tensor_check(&w->kept_audio, &audio, &j->arenas->input, f);
}

static int set_step_sigmas(Job *j, const WireJobOpen *w, Fault *f) {
        if (!(w->sigma_video >= 0.0f && w->sigma_video <= 1.0f) ||
                !(w->sigma_audio >= 0.0f && w->sigma_audio <= 1.0f))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The sigmas are %g (video) and %g (audio), expected 0 to 1.",
                        (double) w->sigma_video, (double) w->sigma_audio);

        j->sigmas_video = malloc(sizeof(float));
        j->sigmas_audio = malloc(sizeof(float));
        if (!j->sigmas_video || !j->sigmas_audio)
                return -ENOMEM;

        j->sigmas_video[0] = w->sigma_video;
        j->sigmas_audio[0] = w->sigma_audio;
        j->steps = 1;
        return 0;
}

static int make_schedule(Job *j, const WireJobOpen *w, Fault *f) {
        if (w->kind == WIRE_JOB_STEP)
                return set_step_sigmas(j, w, f);
        if (w->schedule == WIRE_SCHEDULE_GIVEN)
                return copy_sigmas(j, w, f);
        return make_sigmas(j, w, f);
}

static int make_layout(Job *j, const uint8_t *tags, Fault *f) {
        H3Shape shape = {
                .text_rows = j->text_rows,
                .frames = j->video.shape[1],
                .height = j->video.shape[2],
                .width = j->video.shape[3],
                .audio = j->audio.shape[2],
        };

        return h3_layout_new(&j->model->h3->config, &shape, tags, &j->layout, f);
}

static bool align_up(uint64_t x, uint64_t *ret) {
        if (__builtin_add_overflow(x, SLOT_ALIGN - 1, &x))
                return false;
        *ret = x & ~(SLOT_ALIGN - 1);
        return true;
}

/* [commit word, padded to 64] [slot 0] [slot 1] ...; a slot is [video] [audio], each at a multiple of 64. */
static int place_output(Job *j, const WireJobOpen *w, Fault *f) {
        uint64_t video, audio, slots, used, end;

        if (w->output_offset % SLOT_ALIGN != 0 ||
                __builtin_add_overflow(w->output_offset, w->output_size, &end) ||
                end > j->arenas->output.size)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The place for results, %" PRIu64 " bytes at offset %" PRIu64
                        ", is not at a multiple of %" PRIu64 " inside the output arena of %" PRIu64
                        " bytes.",
                        w->output_size, w->output_offset, SLOT_ALIGN, j->arenas->output.size);

        if (w->kind == WIRE_JOB_STEP)
                j->n_slots = 1;
        else
                j->n_slots = (w->flags & WIRE_JOB_KEEP_STEPS) ? j->steps + 1 : 2;

        if (!align_up(j->video.size, &video) || !align_up(j->audio.size, &audio) ||
                __builtin_add_overflow(video, audio, &j->slot_stride) ||
                __builtin_mul_overflow(j->slot_stride, (uint64_t) j->n_slots, &slots) ||
                __builtin_add_overflow(slots, SLOT_ALIGN, &used))
                return fault_set(f, -EOVERFLOW, FAULT_DOES_NOT_FIT,
                        "The results of %" PRIu32 " slots have more bytes than can be counted.", j->n_slots);

        if (used > w->output_size)
                return fault_set(f, -ENOSPC, FAULT_DOES_NOT_FIT,
                        "The results need %" PRIu64 " bytes of the output arena, %" PRIu64
                        " are given: make the arena larger.",
                        used, w->output_size);

        j->commit_offset = w->output_offset;
        j->slot_offset = w->output_offset + SLOT_ALIGN;
        j->output_used = used;
        j->video.offset = 0;
        j->audio.offset = video;
        return 0;
}

static _Atomic uint64_t *commit_word(const Job *j) {
        return (_Atomic uint64_t *) (void *) ((char *) j->arenas->output.map + j->commit_offset);
}

static char *slot_of(const Job *j, uint32_t state) {
        return (char *) j->arenas->output.map + j->slot_offset +
               (uint64_t) (state % j->n_slots) * j->slot_stride;
}

static void write_slot(const Job *j, uint32_t state, const Latents *l) {
        char *slot = slot_of(j, state);

        memcpy(slot + j->video.offset, l->video, (size_t) j->video.size);
        memcpy(slot + j->audio.offset, l->audio, (size_t) j->audio.size);
}

static void write_commit(const Job *j, uint32_t steps_done) {
        atomic_store_explicit(commit_word(j), wire_commit_pack(j->epoch, steps_done), memory_order_release);
}

static int allocate(const Job *j, Latents *ret) {
        ret->video = malloc((size_t) j->video.size);
        ret->audio = malloc((size_t) j->audio.size);
        return ret->video && ret->audio ? 0 : -ENOMEM;
}

/* Reads the committed state over the noise. Only workers write there; NaN and Inf are the model's, and end as in a run that nothing
 * disturbed. */
static int resume(Job *j, Fault *f) {
        uint64_t word = atomic_load_explicit(commit_word(j), memory_order_acquire);
        uint32_t epoch, done;
        const char *slot;
        int r;

        r = wire_commit_unpack(word, &epoch, &done);
        if (r < 0)
                return fault_set(f, r, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output holds no committed state.");
        if (done > j->steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output says %" PRIu32 " steps of %" PRIu32
                        " are done.",
                        done, j->steps);

        if (done < j->committed)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output says that %" PRIu32
                        " steps are done, it began with %" PRIu32 ".",
                        done, j->committed);

        j->committed = done;
        if (j->kind == WIRE_JOB_STEP)
                return 0;

        slot = slot_of(j, done);
        memcpy(j->state.video, slot + j->video.offset, (size_t) j->video.size);
        memcpy(j->state.audio, slot + j->audio.offset, (size_t) j->audio.size);
        return 0;
}

static void pass_kept(const Job *j, const WireJobOpen *w) {
        const char *input = j->arenas->input.map;

        for (uint32_t k = 0; k < w->start_step; k++) {
                char *slot = slot_of(j, k);

                memcpy(slot + j->video.offset, input + w->kept_video.offset + k * j->video.size,
                        (size_t) j->video.size);
                memcpy(slot + j->audio.offset, input + w->kept_audio.offset + k * j->audio.size,
                        (size_t) j->audio.size);
        }
}

static void start(Job *j, const WireJobOpen *w) {
        /* What an earlier job left here must not look like a commit of this one while its slot 0 is half
         * written. */
        atomic_store_explicit(commit_word(j), 0, memory_order_release);
        if (j->kind == WIRE_JOB_SAMPLE)
                write_slot(j, j->committed, &j->state);
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
        CLEANUP_FREE uint8_t *tags = NULL;
        int r;

        r = copy_text(j, w, &tags, f);
        if (r < 0)
                return r;

        r = copy_latents(j, w, f);
        if (r < 0)
                return r;

        r = make_schedule(j, w, f);
        if (r < 0)
                return r;

        r = check_start(j, w, f);
        if (r < 0)
                return r;

        r = make_layout(j, tags, f);
        if (r < 0)
                return r;

        r = place_output(j, w, f);
        if (r < 0)
                return r;

        r = allocate(j, &j->velocity);
        if (r >= 0 && j->kind == WIRE_JOB_SAMPLE)
                r = allocate(j, &j->next);
        if (r < 0)
                return r;

        return (w->flags & WIRE_JOB_RESUME) ? resume(j, f) : 0;
}

int job_new(
        const WireJobOpen *w, ModelEntry *model, ArenaPair *arenas, uint64_t epoch, Job **ret, Fault *f) {
        CLEANUP(job_unrefp) Job *j = NULL;
        int r;

        r = check_arenas(arenas, f);
        if (r < 0)
                return r;

        r = check_numbers(w, f);
        if (r < 0)
                return r;

        j = calloc(1, sizeof(*j));
        if (!j)
                return -ENOMEM;

        j->n_ref = 1;
        (void) pthread_mutex_init(&j->lock, NULL);
        j->id = w->header.job;
        j->epoch = (uint32_t) epoch;
        j->kind = (WireJobKind) w->kind;
        j->compute = w->compute == WIRE_COMPUTE_F32 ? H3_COMPUTE_F32 : H3_COMPUTE_BF16;
        j->model = model_entry_ref(model);
        j->arenas = arena_pair_ref(arenas);

        r = fill(j, w, f);
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for the job's own copies: about %" PRIu64 " bytes for %" PRIu64
                        " bytes of inputs.",
                        3 * (w->video.size + w->audio.size) + w->text.size,
                        w->video.size + w->audio.size + w->text.size);
        if (r < 0)
                return r;

        if (!(w->flags & WIRE_JOB_RESUME))
                start(j, w);
        write_commit(
                j, j->committed); /* also a resumed one: from here on the word carries this worker's epoch */
        *ret = STEAL_PTR(j);
        return 0;
}

void job_describe(const Job *j, WireJobReady *ret) {
        ret->rows = j->layout->rows;
        ret->steps = j->steps;
        ret->blocks = j->model->h3->config.layers;
        ret->committed = j->committed;
        ret->n_slots = j->n_slots;
        ret->commit_offset = j->commit_offset;
        ret->slot_offset = j->slot_offset;
        ret->slot_stride = j->slot_stride;
        ret->output_used = j->output_used;
        ret->video = j->video;
        ret->audio = j->audio;
}

int job_commit(Job *j, const Latents *result) {
        int r = 0;

        (void) pthread_mutex_lock(&j->lock);
        if (j->closed)
                r = -ECANCELED;
        else {
                write_slot(j, j->committed + 1, result);
                write_commit(j, j->committed + 1);
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
