/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl step: one evaluation of the model. */

#include "client/latentctl/compute-job.h"
#include "client/latentctl/report.h"

typedef struct StepOptions {
        ComputeOptions compute;
        double sigma_video, sigma_audio;
        bool has_sigma_video, has_sigma_audio;
} StepOptions;

static int step_start(ComputeJob *j, const void *userdata, latent_error *e) {
        latent_step_options step = {.struct_size = sizeof(step)};
        const StepOptions *o = userdata;

        step.text = inputs_get(&j->inputs, INPUT_TEXT);
        step.text_tags = inputs_get(&j->inputs, INPUT_TEXT_TAGS);
        step.video = inputs_get(&j->inputs, INPUT_VIDEO);
        step.audio = inputs_get(&j->inputs, INPUT_AUDIO);
        step.mask_video = inputs_get(&j->inputs, INPUT_MASK_VIDEO);
        step.mask_audio = inputs_get(&j->inputs, INPUT_MASK_AUDIO);
        step.conditions = inputs_conditions(&j->inputs);
        step.n_conditions = j->inputs.n_conditions;
        step.condition_noise = o->compute.condition_noise;
        step.has_seed = o->compute.has_seed;
        step.seed = o->compute.seed;
        step.sigma_video = o->sigma_video;
        step.sigma_audio = o->sigma_audio;
        return latent_session_step(j->session, &step, &j->job, e);
}

static int step_run(ComputeJob *j, void *userdata, latent_error *e) {
        const ComputeSize size = {.steps = 1};
        StepOptions *o = userdata;
        int r;

        r = compute_open_files(j, false, e);
        if (r < 0)
                return r;
        if (!o->has_sigma_video) {
                r = inputs_sigma(&j->file, "sigma_video", &o->sigma_video, e);
                if (r < 0)
                        return r;
        }
        if (!o->has_sigma_audio) {
                r = inputs_sigma(&j->file, "sigma_audio", &o->sigma_audio, e);
                if (r < 0)
                        return r;
        }
        r = compute_start(j, &size, step_start, o, e);
        if (r < 0)
                return r;

        return compute_finish(j, "step", e);
}

int verb_step(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        StepOptions o = {};
        const Option options[] = {
                COMPUTE_OPTIONS(o.compute),
                {"sigma-video", OPTION_DOUBLE, &o.sigma_video, &o.has_sigma_video, '\0', .range = &range_sigma},
                {"sigma-audio", OPTION_DOUBLE, &o.sigma_audio, &o.has_sigma_audio, '\0', .range = &range_sigma},
        };

        return compute_verb(c, verb, argc, argv, options, ELEMENTSOF(options), &o.compute, step_run, &o);
}
