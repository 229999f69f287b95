/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl decode: latents as frames and sound. Frames go to the file as they become ready, through a ring: a film of any length needs
 * no more memory than RING_BYTES for them. */

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "client/latentctl/coding-job.h"
#include "client/latentctl/progress.h"
#include "client/latentctl/report.h"
#include "client/latentctl/results.h"
#include "client/latentctl/run.h"

#define SLICE_USEC 100000u /* how late Ctrl-C may be noticed */
#define RING_BYTES (UINT64_C(256) << 20)
#define RING_MIN 39u /* a step of 17 frames while 22 are being written */

typedef struct Decode {
        CodingOptions coding;
        const char *type;
        TensorFile file;
        Output output;
        bool audio; /* the stream that is at hand */
        const StTensor *source;
        latent_tensor tensor;
        uint64_t ring; /* frames; 0: all */
} Decode;

static void decode_done(Decode *x) {
        tensor_file_done(&x->file);
        output_done(&x->output);
}

static int decode_place(void *userdata, latent_session *s, latent_error *e) {
        Decode *x = userdata;

        return coding_place(&x->file, x->source, &x->tensor, s, e);
}

static latent_decode_options decode_options(const Decode *x) {
        latent_decode_options o = {.struct_size = sizeof(o)};

        if (x->audio)
                o.audio = &x->tensor;
        else {
                o.video = &x->tensor;
                o.type = x->type;
                o.frames = x->ring;
        }
        return o;
}

static int decode_plan(void *userdata, latent_session *s, latent_value **ret, latent_error *e) {
        latent_decode_options o = decode_options(userdata);

        return latent_session_plan_decode(s, &o, ret, e);
}

static int decode_start(void *userdata, latent_session *s, latent_job **ret, latent_error *e) {
        latent_decode_options o = decode_options(userdata);

        return latent_session_decode(s, &o, ret, e);
}

/* A film that fits is decoded as a whole: then it can be taken up after a restart of the service. */
static uint64_t choose_ring(const Decode *x) {
        uint64_t frame = x->type && strcmp(x->type, "f32") == 0 ? 4 : 1, frames, ring;

        if (x->tensor.n_dims != 4 || __builtin_mul_overflow(frame, 768 * x->tensor.shape[2] * x->tensor.shape[3], &frame) || frame == 0)
                return 0; /* the service says what is wrong with it */

        ring = RING_BYTES / frame > RING_MIN ? RING_BYTES / frame : RING_MIN;
        frames = (x->tensor.shape[1] / 5 + 1) * 17 + 5;
        return frames > ring ? ring : 0;
}

static int start_stream(CodingJob *j, Decode *x, const StTensor *source, bool audio, latent_error *e) {
        CodingWork w = {
                .part = audio ? "audio_vae" : "vae",
                .place = decode_place,
                .plan = decode_plan,
                .start = decode_start,
                .userdata = x,
        };
        int r;

        x->audio = audio;
        x->source = source;
        r = coding_tensor(&x->file, source, &x->tensor, e);
        if (r < 0)
                return r;

        x->ring = audio ? 0 : choose_ring(x);
        w.input_bytes = source->size + LATENT_ALIGNMENT;
        return coding_start(j, &w, e);
}

/* The sound is small and is kept until the frames are written: the file has them first. */
static int decode_sound(CodingJob *j, Decode *x, const StTensor *source, latent_job **ret, latent_error *e) {
        int r;

        r = start_stream(j, x, source, true, e);
        if (r >= 0)
                r = run_wait(j->ctl, j->job, "decoding sound", e);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(j->job);
        coding_next(j);
        return 0;
}

/* What the file will have is known from the first frame on. */
static int write_header(Decode *x, const latent_job *video, const latent_job *sound, latent_error *e) {
        StTensor tensors[2];
        ResultsMeta meta;
        latent_tensor t;
        const void *data;
        size_t n = 0;
        int r;

        results_meta(video ? video : sound, "f32", &meta);
        if (video) {
                r = latent_job_tensor(video, "frames", &t, &data, e);
                if (r < 0)
                        return r;
                if (t.n_dims != 4 || t.shape[0] == 0)
                        return ctl_error(e, -EPROTO, LATENT_ERROR_INTERNAL, "The service gave frames of no known shape.");
                t.size = t.size / t.shape[0] * get_uint(latent_job_result(video), "frames");
                t.shape[0] = get_uint(latent_job_result(video), "frames");
                tensors[n++] = results_tensor("frames", &t);
                meta.entries[meta.n++] = (StMeta){"fps", "24"};
        }
        if (sound) {
                r = latent_job_tensor(sound, "sound", &t, &data, e);
                if (r < 0)
                        return r;
                tensors[n++] = results_tensor("sound", &t);
                meta.entries[meta.n++] = (StMeta){"sample_rate", "32000"};
        }

        return output_write_header(&x->output, tensors, n, meta.entries, meta.n, e);
}

/* Those from `from` on as they lie in the ring. */
static int write_frames(Decode *x, const latent_job *job, uint64_t from, uint64_t to, latent_error *e) {
        const uint8_t *bytes;
        uint64_t frame, ring;
        latent_tensor t;
        const void *data;
        int r;

        r = latent_job_tensor(job, "frames", &t, &data, e);
        if (r < 0)
                return r;

        bytes = data;
        ring = t.shape[0];
        frame = t.size / ring;
        while (from < to) {
                uint64_t at = from % ring, n = ring - at < to - from ? ring - at : to - from;

                r = output_append(&x->output, bytes + at * frame, n * frame, e);
                if (r < 0)
                        return r;
                from += n;
        }

        return 0;
}

static int stream_frames(CodingJob *j, Decode *x, const latent_job *sound, Progress *p, latent_error *e) {
        uint64_t written = 0, all = 0, ready;
        int r;

        do {
                r = latent_job_frames_ready(j->job, written, SLICE_USEC, progress_show, p, &ready, e);
                if (run_interrupted()) {
                        (void) latent_job_cancel(j->job, e);
                        return -EINTR; /* run_outcome() has the words */
                }
                if (r < 0)
                        return r;
                if (r > 0)
                        continue;
                if (ready <= written)
                        return ctl_error(e, -EPROTO, LATENT_ERROR_INTERNAL,
                                "The service made %" PRIu64 " frames of %" PRIu64 ".", ready, all);

                if (written == 0) {
                        all = get_uint(latent_job_result(j->job), "frames");
                        r = write_header(x, j->job, sound, e);
                        if (r < 0)
                                return r;
                }
                r = write_frames(x, j->job, written, ready, e);
                if (r < 0)
                        return r;
                written = ready;
                r = latent_job_release_frames(j->job, written, e);
                if (r < 0)
                        return r;
        } while (written == 0 || written < all);

        return 0;
}

static int decode_frames(CodingJob *j, Decode *x, const StTensor *source, const latent_job *sound, latent_error *e) {
        Progress p;
        int r;

        r = start_stream(j, x, source, false, e);
        if (r < 0)
                return r;

        progress_init(&p, j->ctl, "decoding frames");
        r = stream_frames(j, x, sound, &p, e);
        progress_done(&p);
        return r < 0 ? r : run_wait(j->ctl, j->job, "decoding frames", e);
}

static int write_sound(Decode *x, const latent_job *sound, latent_error *e) {
        latent_tensor t;
        const void *data;
        int r;

        r = latent_job_tensor(sound, "sound", &t, &data, e);
        return r < 0 ? r : output_append(&x->output, data, t.size, e);
}

static int run(CodingJob *j, Decode *x, const char *input, latent_error *e) {
        CLEANUP(latent_job_freep) latent_job *sound = NULL;
        const StTensor *video, *audio;
        CodingKind kind;
        int r;

        r = coding_check_options(&x->coding, e);
        if (r >= 0)
                r = tensor_file_open(input, &x->file, e);
        if (r < 0)
                return r;

        video = st_header_find(x->file.header, "video");
        audio = st_header_find(x->file.header, "audio");
        if (!video && !audio)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s has no tensor \"video\" (F32 [24, T, H, W]) and no \"audio\" (F32 [32, 2, A]).", input);
        r = coding_open_output(&x->coding, &(const NamedFile){"IN", input}, 1, &x->output, e);
        if (r >= 0)
                r = coding_single_kind(j, &kind, e);
        if (r < 0)
                return r;
        if (kind == CODING_VIDEO)
                audio = NULL;
        if (kind == CODING_AUDIO)
                video = NULL;
        if (!video && !audio)
                return coding_nothing_for(j, kind, input, e);

        if (audio)
                r = decode_sound(j, x, audio, &sound, e);
        if (r >= 0)
                r = video ? decode_frames(j, x, video, sound, e) : write_header(x, NULL, sound, e);
        if (r >= 0 && sound)
                r = write_sound(x, sound, e);
        if (r >= 0)
                r = output_commit(&x->output, e);
        if (r >= 0)
                coding_report(j, video ? j->job : sound);
        return r;
}

int verb_decode(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(decode_done) Decode x = {.output = {.fd = -EBADF}};
        const Option options[] = {
                CODING_OPTIONS(x.coding),
                {"type", OPTION_STRING, &x.type, NULL, '\0'},
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
