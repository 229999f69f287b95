/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-private.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "service/h3/schedule.h"
#include "service/worker/job-input.h"

/* Into arrays of the job, which has them to free also on failure. */
static int copy_sigmas(const Job *j, const WireJobOpen *w, float **ret_video, float **ret_audio, uint32_t *ret_steps,
        Fault *f) {
        TensorRule video = {
                .name = "sigmas_video", .type = ST_F32, .n_dims = 1, .elements_max = H3_STEPS_MAX + 1};
        TensorRule audio = {
                .name = "sigmas_audio", .type = ST_F32, .n_dims = 1, .elements_max = H3_STEPS_MAX + 1};
        int r;

        r = tensor_copy(&w->sigmas_video, &video, &j->arenas->input, (void **) ret_video, f);
        if (r < 0)
                return r;

        r = tensor_copy(&w->sigmas_audio, &audio, &j->arenas->input, (void **) ret_audio, f);
        if (r < 0)
                return r;

        if (w->sigmas_video.shape[0] != w->sigmas_audio.shape[0])
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "sigmas_video has %" PRIu64 " values, sigmas_audio %" PRIu64
                        ": both streams take the same number of steps.",
                        w->sigmas_video.shape[0], w->sigmas_audio.shape[0]);

        r = h3_schedule_check("sigmas_video", *ret_video, w->sigmas_video.shape[0], f);
        if (r < 0)
                return r;

        r = h3_schedule_check("sigmas_audio", *ret_audio, w->sigmas_audio.shape[0], f);
        if (r < 0)
                return r;

        *ret_steps = (uint32_t) w->sigmas_video.shape[0] - 1;
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
        if (tensor_is_absent(&w->sigmas_video) && tensor_is_absent(&w->sigmas_audio))
                return 0;
        return copy_sigmas(j, w, &j->announced_video, &j->announced_audio, &j->announced, f);
}

static int set_sampler(Job *j, const WireJobOpen *w, Fault *f) {
        static const H3SamplerKind kinds[] = {
                [WIRE_SAMPLER_EULER] = H3_SAMPLER_EULER,
                [WIRE_SAMPLER_RES_MULTISTEP] = H3_SAMPLER_RES_MULTISTEP,
                [WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM] = H3_SAMPLER_RES_MULTISTEP_PERSTREAM,
        };

        j->sampler = (H3Sampler){
                .kind = kinds[w->sampler],
                .steps = j->steps,
                .sigmas_video = j->sigmas_video,
                .sigmas_audio = j->sigmas_audio,
                .shift_video = w->shift_video,
                .shift_audio = w->shift_audio,
                .n_video = j->n_video,
                .n_audio = j->n_audio,
        };
        return h3_sampler_check(&j->sampler, f);
}

int job_make_schedule(Job *j, const WireJobOpen *w, Fault *f) {
        int r;

        if (j->kind == WIRE_JOB_STEP)
                return set_step_sigmas(j, w, f);

        r = w->schedule == WIRE_SCHEDULE_GIVEN
                    ? copy_sigmas(j, w, &j->sigmas_video, &j->sigmas_audio, &j->steps, f)
                    : make_sigmas(j, w, f);
        if (r < 0)
                return r;
        return set_sampler(j, w, f);
}
