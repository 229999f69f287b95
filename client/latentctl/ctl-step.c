/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl step: one evaluation of the model. */

#include "client/latentctl/arguments.h"
#include "client/latentctl/compute-job.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

typedef struct StepOptions {
        ComputeOptions compute;
        double sigma_video, sigma_audio;
        bool has_sigma_video, has_sigma_audio;
} StepOptions;

static int step_start(ComputeJob *j, const void *options, latent_error *e) {
        latent_step_options step = {.struct_size = sizeof(step)};
        const StepOptions *o = options;

        step.text = inputs_get(&j->inputs, INPUT_TEXT);
        step.text_tags = inputs_get(&j->inputs, INPUT_TEXT_TAGS);
        step.video = inputs_get(&j->inputs, INPUT_VIDEO);
        step.audio = inputs_get(&j->inputs, INPUT_AUDIO);
        step.sigma_video = o->sigma_video;
        step.sigma_audio = o->sigma_audio;
        return latent_session_step(j->session, &step, &j->job, e);
}

static int step_run(ComputeJob *j, StepOptions *o, latent_error *e) {
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
        r = compute_start(j, 1, false, step_start, o, e);
        if (r < 0)
                return r;

        return compute_finish(j, "step", e);
}

int verb_step(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        StepOptions o = {};
        const Option options[] = {
                {"output", OPTION_STRING, &o.compute.output, NULL, 'o'},
                {"compute", OPTION_STRING, &o.compute.compute, NULL, '\0'},
                {"qkv-order", OPTION_STRING, &o.compute.qkv_order, NULL, '\0'},
                {"lora", OPTION_STRING, &o.compute.lora, NULL, '\0'},
                {"sparse", OPTION_STRING, &o.compute.sparse, NULL, '\0'},
                {"sigma-video", OPTION_DOUBLE, &o.sigma_video, &o.has_sigma_video, '\0'},
                {"restart-timeout", OPTION_UINT, &o.compute.restart_sec, &o.compute.has_restart, '\0'},
                {"sigma-audio", OPTION_DOUBLE, &o.sigma_audio, &o.has_sigma_audio, '\0'},
        };
        CLEANUP(compute_done) ComputeJob j = {.ctl = c, .options = &o.compute};
        const char *operands[2];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 2, 2, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        o.compute.model = operands[0];
        o.compute.input = operands[1];
        r = run_outcome(step_run(&j, &o, &e), &e);
        if (r < 0)
                return report_error(c, verb, &e);

        compute_report(&j);
        return STATUS_OK;
}
