/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl sample: a whole trajectory. */

#include <errno.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/compute-job.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

#define STEPS_MAX 1000u

typedef struct SampleOptions {
        ComputeOptions compute;
        const char *sampler, *schedule, *noise;
        uint64_t steps, seed;
        double shift_video, shift_audio;
        bool has_steps, has_seed, has_shift_video, has_shift_audio, keep_steps;
} SampleOptions;

static int check_options(const SampleOptions *o, latent_error *e) {
        if (o->has_steps && (o->steps < 1 || o->steps > STEPS_MAX))
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--steps must be 1 to %u", STEPS_MAX);
        if ((o->has_shift_video && o->shift_video <= 0) || (o->has_shift_audio && o->shift_audio <= 0))
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "a shift must be greater than 0");
        if (o->noise && strcmp(o->noise, "given") != 0)
                return ctl_error(e, -EOPNOTSUPP, LATENT_ERROR_NOT_SUPPORTED,
                        "--noise %s is of a later version of latentd; this one takes the noise from the "
                        "input file (--noise given).",
                        o->noise);
        if (o->has_seed)
                return ctl_error(e, -EOPNOTSUPP, LATENT_ERROR_NOT_SUPPORTED,
                        "--seed is for noise that the service makes, which is of a later version of "
                        "latentd.");
        return 0;
}

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

static int sample_start(ComputeJob *j, const void *options, latent_error *e) {
        latent_sample_options s = {.struct_size = sizeof(s)};
        const SampleOptions *o = options;

        s.flags = o->keep_steps ? LATENT_SAMPLE_KEEP_STEPS : 0;
        s.text = inputs_get(&j->inputs, INPUT_TEXT);
        s.text_tags = inputs_get(&j->inputs, INPUT_TEXT_TAGS);
        s.video = inputs_get(&j->inputs, INPUT_VIDEO);
        s.audio = inputs_get(&j->inputs, INPUT_AUDIO);
        s.sigmas_video = inputs_get(&j->inputs, INPUT_SIGMAS_VIDEO);
        s.sigmas_audio = inputs_get(&j->inputs, INPUT_SIGMAS_AUDIO);
        s.sampler = o->sampler;
        if (!s.sigmas_video) {
                s.steps = (uint32_t) o->steps;
                s.schedule = o->schedule;
                s.shift_video = o->shift_video;
                s.shift_audio = o->shift_audio;
        }
        return latent_session_sample(j->session, &s, &j->job, e);
}

static int sample_run(ComputeJob *j, const SampleOptions *o, latent_error *e) {
        uint32_t steps = 0;
        int r;

        r = check_options(o, e);
        if (r < 0)
                return r;
        r = compute_open_files(j, true, e);
        if (r < 0)
                return r;
        r = count_steps(j, o, &steps, e);
        if (r < 0)
                return r;
        r = compute_start(j, steps, o->keep_steps, sample_start, o, e);
        if (r < 0)
                return r;

        return compute_finish(j, "sampling", e);
}

int verb_sample(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        SampleOptions o = {};
        const Option options[] = {
                {"output", OPTION_STRING, &o.compute.output, NULL, 'o'},
                {"compute", OPTION_STRING, &o.compute.compute, NULL, '\0'},
                {"qkv-order", OPTION_STRING, &o.compute.qkv_order, NULL, '\0'},
                {"lora", OPTION_STRING, &o.compute.lora, NULL, '\0'},
                {"sparse", OPTION_STRING, &o.compute.sparse, NULL, '\0'},
                {"steps", OPTION_UINT, &o.steps, &o.has_steps, '\0'},
                {"sampler", OPTION_STRING, &o.sampler, NULL, '\0'},
                {"schedule", OPTION_STRING, &o.schedule, NULL, '\0'},
                {"shift-video", OPTION_DOUBLE, &o.shift_video, &o.has_shift_video, '\0'},
                {"shift-audio", OPTION_DOUBLE, &o.shift_audio, &o.has_shift_audio, '\0'},
                {"noise", OPTION_STRING, &o.noise, NULL, '\0'},
                {"seed", OPTION_UINT, &o.seed, &o.has_seed, '\0'},
                {"restart-timeout", OPTION_UINT, &o.compute.restart_sec, &o.compute.has_restart, '\0'},
                {"keep-steps", OPTION_FLAG, &o.keep_steps, NULL, '\0'},
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
        r = run_outcome(sample_run(&j, &o, &e), &e);
        if (r < 0)
                return report_error(c, verb, &e);

        compute_report(&j);
        return STATUS_OK;
}
