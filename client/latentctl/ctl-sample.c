/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl sample: a whole trajectory. */

#include <errno.h>
#include <string.h>

#include "client/latentctl/compute-job.h"
#include "client/latentctl/report.h"

typedef struct SampleOptions {
        ComputeOptions compute;
        const char *sampler, *schedule;
        uint64_t steps;
        double shift_video, shift_audio; /* 0: default */
        bool has_steps, has_shift_video, has_shift_audio, keep_steps;
} SampleOptions;

/* Evaluations: as many as the file's sigmas have steps, else --steps. */
static int count_steps(const ComputeJob *j, const SampleOptions *o, uint32_t *ret, latent_error *e) {
        const latent_tensor *sigmas = inputs_get(&j->inputs, INPUT_SIGMAS_VIDEO);

        if (!sigmas && !o->has_steps)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE,
                        "--steps N is missing: %s has no sigmas_video and sigmas_audio", j->options->input);
        if (sigmas && (sigmas->n_dims != 1 || sigmas->shape[0] < 2 || sigmas->shape[0] > STEPS_MAX + 1))
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s: sigmas_video must have one dimension of 2 to %u elements.", j->options->input,
                        STEPS_MAX + 1);

        *ret = sigmas ? (uint32_t) sigmas->shape[0] - 1 : (uint32_t) o->steps;
        return 0;
}

/* The schedule needs them, and with given noise levels this sampler: for how the two streams relate. */
static bool needs_shifts(const ComputeJob *j, const SampleOptions *o) {
        return !inputs_get(&j->inputs, INPUT_SIGMAS_VIDEO) || (o->sampler && strcmp(o->sampler, "res_multistep") == 0);
}

/* Those that the command line does not say. */
static int find_shifts(const ComputeJob *j, SampleOptions *o, latent_error *e) {
        int r = 0;

        if (!needs_shifts(j, o))
                return 0;
        if (!o->has_shift_video)
                r = inputs_shift(&j->file, "shift_video", &o->shift_video, e);
        if (r >= 0 && !o->has_shift_audio)
                r = inputs_shift(&j->file, "shift_audio", &o->shift_audio, e);
        return r;
}

static void set_tensors(ComputeJob *j, latent_sample_options *s) {
        s->text = inputs_get(&j->inputs, INPUT_TEXT);
        s->text_tags = inputs_get(&j->inputs, INPUT_TEXT_TAGS);
        s->video = inputs_get(&j->inputs, INPUT_VIDEO);
        s->audio = inputs_get(&j->inputs, INPUT_AUDIO);
        s->sigmas_video = inputs_get(&j->inputs, INPUT_SIGMAS_VIDEO);
        s->sigmas_audio = inputs_get(&j->inputs, INPUT_SIGMAS_AUDIO);
        s->mask_video = inputs_get(&j->inputs, INPUT_MASK_VIDEO);
        s->mask_audio = inputs_get(&j->inputs, INPUT_MASK_AUDIO);
        s->clean_video = inputs_get(&j->inputs, INPUT_CLEAN_VIDEO);
        s->clean_audio = inputs_get(&j->inputs, INPUT_CLEAN_AUDIO);
        s->conditions = inputs_conditions(&j->inputs);
        s->n_conditions = j->inputs.n_conditions;
}

static int sample_start(ComputeJob *j, const void *userdata, latent_error *e) {
        latent_sample_options s = {.struct_size = sizeof(s)};
        const SampleOptions *o = userdata;

        set_tensors(j, &s);
        s.flags = o->keep_steps ? LATENT_SAMPLE_KEEP_STEPS : 0;
        s.sampler = o->sampler;
        s.noise = o->compute.noise;
        s.condition_noise = o->compute.condition_noise;
        s.has_seed = o->compute.has_seed;
        s.seed = o->compute.seed;
        if (!s.sigmas_video) {
                s.steps = (uint32_t) o->steps;
                s.schedule = o->schedule;
        }
        if (needs_shifts(j, o)) {
                s.shift_video = o->shift_video;
                s.shift_audio = o->shift_audio;
        }
        return latent_session_sample(j->session, &s, &j->job, e);
}

static int sample_run(ComputeJob *j, void *userdata, latent_error *e) {
        SampleOptions *o = userdata;
        ComputeSize size = {.sampler = o->sampler, .keep_steps = o->keep_steps};
        int r;

        r = compute_open_files(j, true, e);
        if (r < 0)
                return r;
        r = count_steps(j, o, &size.steps, e);
        if (r < 0)
                return r;
        r = find_shifts(j, o, e);
        if (r < 0)
                return r;
        r = compute_start(j, &size, sample_start, o, e);
        if (r < 0)
                return r;

        return compute_finish(j, "sampling", e);
}

int verb_sample(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        SampleOptions o = {};
        const Option options[] = {
                COMPUTE_OPTIONS(o.compute),
                {"steps", OPTION_UINT, &o.steps, &o.has_steps, '\0', .min = 1, .max = STEPS_MAX},
                {"sampler", OPTION_STRING, &o.sampler, NULL, '\0'},
                {"schedule", OPTION_STRING, &o.schedule, NULL, '\0'},
                {"shift-video", OPTION_DOUBLE, &o.shift_video, &o.has_shift_video, '\0', .range = &range_shift},
                {"shift-audio", OPTION_DOUBLE, &o.shift_audio, &o.has_shift_audio, '\0', .range = &range_shift},
                {"noise", OPTION_STRING, &o.compute.noise, NULL, '\0'},
                {"keep-steps", OPTION_FLAG, &o.keep_steps, NULL, '\0'},
        };

        return compute_verb(c, verb, argc, argv, options, ELEMENTSOF(options), &o.compute, sample_run, &o);
}
