/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-private.h"

#include <inttypes.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/worker/crew.h"
#include "service/worker/job-input.h"

/* What job_draw_noise() has still to do. */
struct JobStart {
        WireNoise noise, condition_noise;
        uint64_t seed;
        bool state;    /* the job's state begins with it: neither a slot nor what is committed */
        bool failed;   /* or it is at work */
        Latents given; /* streams alone, owned: what the noise is mixed with */
};

JobStart *job_start_free(JobStart *x) {
        if (!x)
                return NULL;
        free(x->given.video);
        free(x->given.audio);
        free(x);
        return NULL;
}

bool job_start_is_open(const Job *j) {
        return j->start && j->start->state;
}

/* Numbers that may be drawn for conditions as the official program does, most of them only passed over: as
 * many as a film of the most rows that there may be. */
#define NOISE_MAX (UINT64_C(96) << 24)

/* Frames of the film and of all pictures: what the official program draws at once. */
static uint64_t full_frames(const Job *j) {
        const H3Shape *s = &j->layout->shape;
        uint64_t n = s->frames;

        for (uint32_t i = 0; i < s->n_conditions; i++)
                n += s->conditions[i].grid.frames;
        return n;
}

/* Each condition has a film's noise drawn for it: the sum must stay sane. */
static int check_official(const Job *j, Fault *f) {
        uint64_t full = full_frames(j), left = NOISE_MAX / j->model->h3->config.video_channels / full;
        const H3Shape *s = &j->layout->shape;

        for (uint32_t i = 0; i < s->n_conditions; i++) {
                const H3Grid *g = &s->conditions[i].grid;

                if (g->frames == 0)
                        continue;
                if (g->height * g->width > left)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "With noise as the official program draws it the conditions up to %" PRIu32
                                " need %" PRIu64 " frames of noise each, and altogether more than %" PRIu64
                                " numbers: make the film or the conditions smaller.",
                                i, full, NOISE_MAX);
                left -= g->height * g->width;
        }
        return 0;
}

typedef struct Shared {
        uint64_t n;
        H3NoiseWork work;
        void *arg;
} Shared;

static void do_part(void *userdata, uint32_t i, uint32_t n) {
        const Shared *x = userdata;

        x->work(x->arg, x->n * i / n, x->n * (i + 1) / n);
}

void job_share_noise(uint64_t n, H3NoiseWork work, void *arg) {
        Shared x = {n, work, arg};
        Crew crew;

        crew_begin(&crew, CREW_MAX, do_part, &x);
        crew_end(&crew);
}

static void new_generator(Job *j, H3Noise *ret) {
        h3_noise_init(ret, j->start->seed);
        ret->stop = job_is_cancelled;
        ret->stop_userdata = j;
        ret->share = job_share_noise;
}

static int draw_condition(Job *j, const H3Grid *g, H3Noise *generator, float *ret) {
        const H3Config *c = &j->model->h3->config;
        H3Noise own;

        new_generator(j, &own);
        switch (j->start->condition_noise) {
        case WIRE_NOISE_COMFY:
                return h3_noise_condition_comfy(&own, c, g, ret);
        case WIRE_NOISE_OFFICIAL:
                h3_noise_condition_official(&own, c, g, full_frames(j), ret);
                return 0;
        default:
                h3_noise_draw(generator, c->video_channels * g->frames * g->height * g->width, ret);
                return 0;
        }
}

/* In the order of the conditions: diffusers draws all of them from one generator, before the film. */
static int noise_conditions(Job *j, H3Noise *generator) {
        const H3Shape *s = &j->layout->shape;
        int r;

        if (j->start->condition_noise == WIRE_NOISE_GIVEN)
                return 0;
        for (uint32_t i = 0; i < s->n_conditions; i++) {
                const H3Grid *g = &s->conditions[i].grid;
                uint64_t n = j->model->h3->config.video_channels * g->frames * g->height * g->width;
                CLEANUP_FREE float *noise = NULL;

                if (g->frames == 0)
                        continue;
                noise = malloc(n * sizeof(float));
                if (!noise)
                        return -ENOMEM;
                r = draw_condition(j, g, generator, noise);
                if (r < 0)
                        return r;
                if (j->cancelled)
                        return -ECANCELED;
                h3_noise_mix(j->condition_video[i], noise, n, j->condition_video[i]);
        }
        return 0;
}

/* sigma * noise + (1 - sigma) * latent, in place of the noise; at sigma 1 there is no latent in it, to the
 * bit. */
static void mix_start(float sigma, const float *latent, uint64_t n, float *noise) {
        float rest = 1.0f - sigma;

        if (sigma == 1.0f)
                return;
        for (uint64_t i = 0; i < n; i++)
                noise[i] = sigma * noise[i] + rest * latent[i];
}

/* Where the state is not wanted, the film's noise goes where the next state will be made. */
static int noise_film(Job *j, H3Noise *after_conditions) {
        const JobStart *x = j->start;
        bool comfy = x->noise == WIRE_NOISE_COMFY;
        const Latents *to = x->state ? &j->state : &j->next;
        H3Noise *generator = after_conditions, own;
        int r;

        /* conditions that others drew left nothing in this generator */
        if (comfy) {
                new_generator(j, &own);
                generator = &own;
        }
        r = h3_noise_target(generator, comfy ? H3_NOISE_COMFY : H3_NOISE_DIFFUSERS, &j->model->h3->config,
                &j->layout->shape, to->video, to->audio);
        if (r < 0)
                return r;
        if (j->cancelled)
                return -ECANCELED;
        if (j->sampler.video_mask)
                job_hold_video(j, to->video);
        return 0;
}

static int start_from_noise(Job *j, Fault *f) {
        const Latents *given = &j->start->given;
        H3SamplerState state = latents_state(&j->state);
        float sigma_video, sigma_audio;

        h3_sampler_sigmas(&j->sampler, 0, &sigma_video, &sigma_audio);
        mix_start(sigma_video, given->video, j->n_video, j->state.video);
        mix_start(sigma_audio, given->audio, j->n_audio, j->state.audio);
        h3_sampler_start(&j->sampler, j->state.video, j->state.audio, &state);
        return job_check_finite(j, "the start", &j->state, f);
}

/* As job_commit(), of the state that no step has made. */
static int publish_start(Job *j) {
        int r = 0;

        (void) pthread_mutex_lock(&j->lock);
        if (j->closed)
                r = -ECANCELED;
        else {
                memcpy(job_slot(j, j->committed), j->state.slot, (size_t) j->slot_stride);
                job_write_commit(j, j->committed);
        }
        (void) pthread_mutex_unlock(&j->lock);
        return r;
}

int job_draw_noise(Job *j, Fault *f) {
        JobStart *x = j->start;
        H3Noise generator;
        int r;

        if (!x)
                return 0;
        if (x->failed) /* some conditions may have theirs already */
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "The job's noise could not be drawn.");
        x->failed = true;

        new_generator(j, &generator);
        r = noise_conditions(j, &generator);
        if (r >= 0 && x->noise != WIRE_NOISE_GIVEN)
                r = noise_film(j, &generator);
        if (r >= 0 && x->state) {
                r = start_from_noise(j, f);
                if (r >= 0)
                        r = publish_start(j);
        }
        if (r < 0)
                return r;

        j->start = job_start_free(x);
        return 0;
}

static int start_from_given(Job *j, const Latents *given, Fault *f) {
        H3SamplerState state = latents_state(&j->state);

        if (j->sampler.video_mask)
                job_hold_video(j, given->video);
        h3_sampler_start(&j->sampler, given->video, given->audio, &state);
        return job_check_finite(j, "the start", &j->state, f);
}

/* A trajectory that another run of the service began: the states before the one that it goes on from are
 * only passed on. Their places are checked also where a dead worker took them up already. */
static int check_slots(Job *j, const WireJobOpen *w, Fault *f) {
        TensorRule slot = {.name = "slot", .type = ST_U8, .n_dims = 1, .shape = {j->slot_stride}};
        TensorRule kept = {
                .name = "kept", .type = ST_U8, .n_dims = 2, .shape = {w->start_step, j->slot_stride}};
        bool keep = w->flags & WIRE_JOB_KEEP_STEPS;
        int r;

        if (w->start_step == 0 && (!tensor_is_absent(&w->slot) || !tensor_is_absent(&w->kept)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job begins with step 0 and has slots of earlier states: it cannot use them.");
        if (w->start_step == 0)
                return 0;
        if (w->start_step >= j->steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The trajectory of %" PRIu32 " steps cannot go on after step %" PRIu32 ".", j->steps,
                        w->start_step);
        if (!keep && !tensor_is_absent(&w->kept))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has slots of earlier states, but keeps none.");

        j->committed = w->start_step;
        r = tensor_check(&w->slot, &slot, &j->arenas->input, f);
        if (r < 0)
                return r;
        return keep ? tensor_check(&w->kept, &kept, &j->arenas->input, f) : 0;
}

int job_resume_commit(const Job *j, uint32_t *ret, Fault *f) {
        uint32_t epoch, done;
        int r;

        r = wire_commit_unpack(job_read_commit(j), &epoch, &done);
        if (r < 0)
                return fault_set(f, r, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output holds no committed state.");
        if (done > j->steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output says %" PRIu32 " steps of %" PRIu32
                        " are done.",
                        done, j->steps);
        *ret = done;
        return 0;
}

/* Reads the committed state over the start. A worker that died wrote it: its numbers are checked like an
 * input's. */
static int resume(Job *j, Fault *f) {
        uint32_t done;
        int r;

        r = job_resume_commit(j, &done, f);
        if (r < 0)
                return r;
        if (done < j->committed)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job cannot be resumed: its output says that %" PRIu32
                        " steps are done, it began with %" PRIu32 ".",
                        done, j->committed);

        j->committed = done;
        if (j->kind == WIRE_JOB_STEP)
                return 0;

        memcpy(j->state.slot, job_slot(j, done), (size_t) j->slot_stride);
        return job_check_finite(j, "the committed state", &j->state, f);
}

static int start_from_slot(Job *j, const WireJobOpen *w, Fault *f) {
        memcpy(j->state.slot, (const char *) j->arenas->input.map + w->slot.offset, (size_t) j->slot_stride);
        return job_check_finite(j, "slot", &j->state, f);
}

/* For later: what of the noise the job needs. */
static int plan_noise(Job *j, const WireJobOpen *w, Latents *given, Fault *f) {
        bool conditions = w->condition_noise != WIRE_NOISE_GIVEN && j->layout->shape.n_conditions > 0;
        bool state = !(w->flags & WIRE_JOB_RESUME) && w->start_step == 0 && w->noise != WIRE_NOISE_GIVEN;
        /* Also of a job that goes on from elsewhere: what is kept of a video has the noise of the start. */
        bool film = state || (w->noise != WIRE_NOISE_GIVEN && j->sampler.video_mask);
        int r;

        if (w->condition_noise == WIRE_NOISE_OFFICIAL) {
                r = check_official(j, f);
                if (r < 0)
                        return r;
        }
        if (j->plan_only || !(conditions || film))
                return 0;

        j->start = calloc(1, sizeof(*j->start));
        if (!j->start)
                return -ENOMEM;
        *j->start = (JobStart){
                .noise = film ? (WireNoise) w->noise : WIRE_NOISE_GIVEN,
                .condition_noise = (WireNoise) w->condition_noise,
                .seed = w->seed,
                .state = state,
        };
        if (state)
                j->start->given = STEAL(*given, (Latents){});
        return 0;
}

int job_make_start(Job *j, const WireJobOpen *w, Latents *given, Fault *f) {
        bool resumed = w->flags & WIRE_JOB_RESUME;
        int r;

        r = check_slots(j, w, f);
        if (r >= 0)
                r = plan_noise(j, w, given, f);
        if (r < 0)
                return r;
        if (j->kind == WIRE_JOB_STEP) {
                j->state = STEAL(*given, (Latents){});
                return resumed ? resume(j, f) : 0;
        }

        r = w->noise == WIRE_NOISE_GIVEN ? start_from_given(j, given, f) : 0;
        if (r < 0)
                return r;
        if (resumed)
                return resume(j, f);
        return w->start_step > 0 ? start_from_slot(j, w, f) : 0;
}
