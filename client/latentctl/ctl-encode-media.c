/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl encode-media: frames and sound as latents. */

#include <errno.h>
#include <string.h>

#include "client/latentctl/coding-job.h"
#include "client/latentctl/report.h"
#include "client/latentctl/results.h"
#include "client/latentctl/run.h"

typedef struct EncodeMedia {
        CodingOptions coding;
        const char *posterior;
        uint64_t seed;
        bool has_seed;
        TensorFile file;
        Output output;
        bool audio; /* the stream that is at hand */
        const StTensor *source;
        latent_tensor tensor;
} EncodeMedia;

static void encode_media_done(EncodeMedia *x) {
        tensor_file_done(&x->file);
        output_done(&x->output);
}

static int media_place(void *userdata, latent_session *s, latent_error *e) {
        EncodeMedia *x = userdata;

        return coding_place(&x->file, x->source, &x->tensor, s, e);
}

static latent_encode_media_options media_options(const EncodeMedia *x) {
        latent_encode_media_options o = {.struct_size = sizeof(o)};

        if (x->audio)
                o.audio = &x->tensor;
        else {
                o.video = &x->tensor;
                o.posterior = x->posterior;
                o.has_seed = x->has_seed;
                o.seed = x->seed;
        }
        return o;
}

static int media_plan(void *userdata, latent_session *s, latent_value **ret, latent_error *e) {
        latent_encode_media_options o = media_options(userdata);

        return latent_session_plan_encode_media(s, &o, ret, e);
}

static int media_start(void *userdata, latent_session *s, latent_job **ret, latent_error *e) {
        latent_encode_media_options o = media_options(userdata);

        return latent_session_encode_media(s, &o, ret, e);
}

/* One stream; *ret: its job, which keeps the result. */
static int encode_stream(CodingJob *j, EncodeMedia *x, const StTensor *source, bool audio, latent_job **ret, latent_error *e) {
        CodingWork w = {
                .part = audio ? "audio_vae" : "vae",
                .place = media_place,
                .plan = media_plan,
                .start = media_start,
                .userdata = x,
        };
        int r;

        x->audio = audio;
        x->source = source;
        r = coding_tensor(&x->file, source, &x->tensor, e);
        if (r < 0)
                return r;

        w.input_bytes = source->size + LATENT_ALIGNMENT;
        r = coding_start(j, &w, e);
        if (r >= 0)
                r = run_wait(j->ctl, j->job, audio ? "encoding sound" : "encoding frames", e);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(j->job);
        coding_next(j);
        return 0;
}

static int write_both(EncodeMedia *x, latent_job *const *jobs, latent_error *e) {
        static const char *const names[] = {"video", "audio"};
        const void *data[2];
        StTensor tensors[2];
        ResultsMeta meta;
        size_t n = 0;
        int r;

        for (unsigned i = 0; i < 2; i++) {
                latent_tensor t;

                if (!jobs[i])
                        continue;
                r = latent_job_tensor(jobs[i], names[i], &t, &data[n], e);
                if (r < 0)
                        return r;
                tensors[n++] = results_tensor(names[i], &t);
        }

        results_meta(jobs[0] ? jobs[0] : jobs[1], "f32", &meta);
        r = output_write(&x->output, tensors, data, n, meta.entries, meta.n, e);
        return r < 0 ? r : output_commit(&x->output, e);
}

static int run(CodingJob *j, EncodeMedia *x, const char *input, latent_error *e) {
        CLEANUP(latent_job_freep) latent_job *video = NULL, *audio = NULL;
        const StTensor *frames, *sound;
        CodingKind kind;
        int r;

        r = coding_check_options(&x->coding, e);
        if (r >= 0)
                r = tensor_file_open(input, &x->file, e);
        if (r < 0)
                return r;

        frames = st_header_find(x->file.header, "frames");
        sound = st_header_find(x->file.header, "sound");
        if (!frames && !sound)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s has no tensor \"frames\" (U8 or F32 [F, H, W, 3]) and no \"sound\" (F32 [2, samples], 32 kHz).", input);
        if (!frames && (x->posterior || x->has_seed))
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE,
                        "--posterior and --seed are for frames; %s has only \"sound\"", input);
        r = coding_open_output(&x->coding, &(const NamedFile){"IN", input}, 1, &x->output, e);
        if (r >= 0)
                r = coding_single_kind(j, &kind, e);
        if (r >= 0 && kind == CODING_AUDIO && (x->posterior || x->has_seed))
                r = ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--posterior and --seed are for frames; the model is an audio VAE");
        if (r >= 0 && sound && kind != CODING_VIDEO)
                r = encode_stream(j, x, sound, true, &audio, e);
        if (r >= 0 && frames && kind != CODING_AUDIO)
                r = encode_stream(j, x, frames, false, &video, e);
        if (r >= 0 && !video && !audio)
                r = coding_nothing_for(j, kind, input, e);
        if (r < 0)
                return r;

        r = write_both(x, (latent_job *const[]){video, audio}, e);
        if (r >= 0)
                coding_report(j, video ? video : audio);
        return r;
}

int verb_encode_media(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(encode_media_done) EncodeMedia x = {.output = {.fd = -EBADF}};
        const Option options[] = {
                CODING_OPTIONS(x.coding),
                {"posterior", OPTION_STRING, &x.posterior, NULL, '\0'},
                {"seed", OPTION_UINT, &x.seed, &x.has_seed, '\0'},
        };
        CLEANUP(coding_done) CodingJob j = {.ctl = c, .options = &x.coding};
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

        x.coding.model = operands[0];
        r = run_outcome(run(&j, &x, operands[1], &e), &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}
