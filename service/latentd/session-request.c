/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/session-request.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/job-ready.h"
#include "service/latentd/model.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"

#define ARENA_DEFAULT (UINT64_C(64) << 20)
#define ARENA_MIN UINT64_C(4096)
#define SHIFT_VIDEO 12.0
#define SHIFT_AUDIO 3.0

static const char *const compute_names[] = {
        [WIRE_COMPUTE_AUTO] = "auto",
        [WIRE_COMPUTE_F32] = "f32",
        [WIRE_COMPUTE_BF16] = "bf16",
};

const char *session_compute_to_string(WireCompute c) {
        return compute_names[c];
}

static int parse_compute(const char *s, WireCompute *ret, Fault *f) {
        for (size_t i = 0; i < ELEMENTSOF(compute_names); i++)
                if (strcmp(s, compute_names[i]) == 0) {
                        *ret = (WireCompute) i;
                        return 0;
                }

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "\"compute\" is \"%.32s\", expected auto, f32 or bf16.", s);
}

static int missing(const char *key, const char *what, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The key \"%s\" (%s) is required.", key, what);
}

static int arena_size(const char *key, uint64_t *bytes, Fault *f) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);

        if (*bytes < ARENA_MIN || *bytes > UINT64_C(1) << 62)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is %" PRIu64 ", expected %" PRIu64 " bytes or more.", key, *bytes,
                        ARENA_MIN);

        *bytes = (*bytes + page - 1) / page * page;
        return 0;
}

static int find_model(Manager *m, const char *path, uid_t uid, Model **ret, Fault *f) {
        Model *model;
        int r;

        r = model_from_path(m, path, uid, &model);
        if (r < 0)
                return fault_set(
                        f, r, FAULT_NOT_FOUND, "There is no model \"%.128s\": load it first.", path);

        switch (model->state) {

        case MODEL_READY:
                *ret = model;
                return 0;

        case MODEL_LOADING:
                return fault_set(
                        f, -EBUSY, FAULT_BUSY, "The model is still loading: wait for its load job.");

        case MODEL_NEW:
                return fault_set(f, -EBUSY, FAULT_BUSY,
                        "The model has no files yet: call AddFiles and Commit, and wait for the job.");

        default:
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The model could not be loaded; its load job said why.");
        }
}

static int check_class(const char *s, Fault *f) {
        if (strcmp(s, "normal") == 0 || strcmp(s, "batch") == 0 || strcmp(s, "interactive") == 0)
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "\"class\" is \"%.32s\", expected normal, batch or interactive.", s);
}

/* As the caller wrote it. */
typedef struct Split {
        uint32_t ranks, chunks;
        BusNumbers shares;
        const char *plan, *exchange;
} Split;

static int check_ranks(const Manager *m, const char *key, uint64_t ranks, Fault *f) {
        uint32_t have = worker_link_ranks(m->worker);

        if (ranks > WIRE_RANKS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is for %" PRIu64 " ranks, expected 1 to %d.", key, ranks, WIRE_RANKS_MAX);
        if (have > 0 && ranks > have)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is for %" PRIu64 " ranks, the worker has %" PRIu32
                        ": ask for fewer, or set WorkerRanks=.",
                        key, ranks, have);
        return 0;
}

static int read_shares(const Manager *m, const Split *s, PlanWishes *w, Fault *f) {
        int r;

        r = check_ranks(m, "shares", s->shares.n, f);
        if (r < 0)
                return r;
        if (s->shares.n > 0 && s->ranks > 0 && s->shares.n != s->ranks)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"shares\" has %zu numbers for %" PRIu32 " ranks: one per rank was expected.",
                        s->shares.n, s->ranks);
        for (size_t i = 0; i < s->shares.n; i++) {
                if (s->shares.values[i] == 0 || s->shares.values[i] > PLAN_SHARE_MAX)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Share %zu is %" PRIu32 ", expected 1 to %" PRIu32
                                "; use fewer ranks to leave one out.",
                                i, s->shares.values[i], PLAN_SHARE_MAX);
                w->shares[i] = s->shares.values[i];
        }
        w->n_shares = (uint32_t) s->shares.n;
        return 0;
}

static int read_split(const Manager *m, const Split *s, PlanWishes *ret, Fault *f) {
        PlanWishes w = { .ranks = s->ranks, .chunks = s->chunks };
        int r;

        r = check_ranks(m, "ranks", s->ranks, f);
        if (r >= 0)
                r = read_shares(m, s, &w, f);
        if (r < 0)
                return r;

        if (plan_kind_from_string(s->plan, &w.kind) < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"plan\" is \"%.32s\", expected auto, hidden-gather, kv-gather or qkv-all-to-all.",
                        s->plan);
        if (plan_exchange_from_string(s->exchange, &w.exchange) < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"exchange\" is \"%.32s\", expected auto or host.", s->exchange);
        if (s->chunks > WIRE_CHUNKS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"chunks\" is %" PRIu32 ", expected 1 to %d, or 0 for as many as fit.", s->chunks,
                        WIRE_CHUNKS_MAX);
        *ret = w;
        return 0;
}

int session_request_open(sd_bus_message *message, Manager *m, uid_t uid, SessionOptions *ret, Fault *f) {
        SessionOptions o = { .input_bytes = ARENA_DEFAULT, .output_bytes = ARENA_DEFAULT };
        const char *model = NULL, *compute = "auto", *job_class = "normal";
        Split split = { .plan = "auto", .exchange = "auto" };
        const BusKey keys[] = {
                { "model", "o", &model },
                { "input-bytes", "t", &o.input_bytes },
                { "output-bytes", "t", &o.output_bytes },
                { "compute", "s", &compute },
                { "ranks", "u", &split.ranks },
                { "shares", "au", &split.shares },
                { "plan", "s", &split.plan },
                { "exchange", "s", &split.exchange },
                { "chunks", "u", &split.chunks },
                { "class", "s", &job_class },
                { "gpus", "as", NULL, NULL, true },
                { "sigmas", "ad", NULL, NULL, true },
                { "sparse", "s", NULL, NULL, true },
                { "preview", "u", NULL, NULL, true },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        if (!model)
                return missing("model", "the path of a loaded model", f);

        r = arena_size("input-bytes", &o.input_bytes, f);
        if (r < 0)
                return r;

        r = arena_size("output-bytes", &o.output_bytes, f);
        if (r < 0)
                return r;

        r = parse_compute(compute, &o.compute, f);
        if (r < 0)
                return r;

        r = read_split(m, &split, &o.split, f);
        if (r < 0)
                return r;

        r = check_class(job_class, f);
        if (r < 0)
                return r;

        r = find_model(m, model, uid, &o.model, f);
        if (r < 0)
                return r;

        o.job_class = job_class; /* as long as the message */
        *ret = o;
        return 0;
}

static int check_tensor(const char *key, const WireTensor *t, bool seen, bool required, StType type,
        uint32_t n_dims, const char *what, Fault *f) {
        if (!seen)
                return required ? missing(key, what, f) : 0;

        if (t->dtype != (uint32_t) type || t->n_dims != n_dims) {
                const char *name = st_type_name((StType) t->dtype);

                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"%s\" is %s with %" PRIu32 " dimensions, expected %s.", key, name ? name : "?",
                        t->n_dims, what);
        }

        return 0;
}

/* What Step and Sample have in common. */
typedef struct Common {
        WireJobOpen q;
        const char *compute;
        bool text, text_tags, video, audio, output_bytes;
} Common;

#define COMMON_KEYS(c)                                                                                      \
        { "text", "(tsat)", &(c)->q.text, &(c)->text },                                                     \
                { "text-tags", "(tsat)", &(c)->q.text_tags, &(c)->text_tags },                              \
                { "video", "(tsat)", &(c)->q.video, &(c)->video },                                          \
                { "audio", "(tsat)", &(c)->q.audio, &(c)->audio }, { "compute", "s", &(c)->compute },       \
                { "output-offset", "t", &(c)->q.output_offset }, {                                          \
                "output-bytes", "t", &(c)->q.output_size, &(c)->output_bytes                                \
        }

static int finish_common(Common *c, const Session *s, Fault *f) {
        WireJobOpen *q = &c->q;
        WireCompute compute = s->compute;
        int r;

        r = check_tensor("text", &q->text, c->text, true, ST_BF16, 2, "BF16 [L, text_dim]", f);
        if (r < 0)
                return r;

        r = check_tensor("text-tags", &q->text_tags, c->text_tags, false, ST_U8, 1, "U8 [L]", f);
        if (r < 0)
                return r;

        if (c->text_tags && q->text_tags.shape[0] != q->text.shape[0])
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"text-tags\" has %" PRIu64 " elements, expected one for each of the %" PRIu64
                        " rows of \"text\".",
                        q->text_tags.shape[0], q->text.shape[0]);

        r = check_tensor("video", &q->video, c->video, true, ST_F32, 4, "F32 [24, T, H, W]", f);
        if (r < 0)
                return r;

        r = check_tensor("audio", &q->audio, c->audio, true, ST_F32, 3, "F32 [32, 2, A]", f);
        if (r < 0)
                return r;

        if (c->compute) {
                r = parse_compute(c->compute, &compute, f);
                if (r < 0)
                        return r;
        }
        q->compute = compute;

        /* An offset behind the arena is refused by session_check_request(). */
        if (!c->output_bytes && q->output_offset < s->output_bytes)
                q->output_size = s->output_bytes - q->output_offset;

        return 0;
}

/* Sigmas are taken as f32 and must be in range as such too. */
static int sigma(const char *key, bool seen, double value, float *ret, Fault *f) {
        if (!seen)
                return missing(key, "0 to 1", f);

        if (!(value >= 0.0 && value <= 1.0))
                return fault_set(
                        f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"%s\" is %g, expected 0 to 1.", key, value);

        *ret = (float) value;
        return 0;
}

int session_request_step(sd_bus_message *message, const Session *s, WireJobOpen *ret, Fault *f) {
        Common c = {};
        double video = 0, audio = 0;
        bool video_seen = false, audio_seen = false;
        const BusKey keys[] = {
                COMMON_KEYS(&c),
                { "sigma-video", "d", &video, &video_seen },
                { "sigma-audio", "d", &audio, &audio_seen },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        c.q.kind = WIRE_JOB_STEP;
        r = finish_common(&c, s, f);
        if (r < 0)
                return r;

        r = sigma("sigma-video", video_seen, video, &c.q.sigma_video, f);
        if (r < 0)
                return r;

        r = sigma("sigma-audio", audio_seen, audio, &c.q.sigma_audio, f);
        if (r < 0)
                return r;

        r = session_check_request(s, &c.q, f);
        if (r < 0)
                return r;

        *ret = c.q;
        return 0;
}

typedef struct Sample {
        Common c;
        const char *noise, *sampler, *schedule;
        double shift_video, shift_audio;
        uint32_t steps;
        int keep_steps;
        const char *numerics;
        bool sigmas_video, sigmas_audio, steps_seen, kept_video, kept_audio;
} Sample;

static int check_names(const Sample *x, Fault *f) {
        if (strcmp(x->noise, "comfy") == 0 || strcmp(x->noise, "diffusers") == 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"noise\" \"%s\" is of a later version: give the noise in \"video\" and \"audio\".",
                        x->noise);
        if (strcmp(x->noise, "given") != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"noise\" is \"%.32s\", expected given.", x->noise);

        if (strcmp(x->sampler, "res_multistep") == 0 || strcmp(x->sampler, "res_multistep_perstream") == 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"sampler\" \"%s\" is of a later version: use euler.", x->sampler);
        if (strcmp(x->sampler, "euler") != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sampler\" is \"%.32s\", expected euler.", x->sampler);

        if (strcmp(x->schedule, "simple") != 0 && strcmp(x->schedule, "reference") != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"schedule\" is \"%.32s\", expected simple or reference.", x->schedule);

        return 0;
}

static int given_sigmas(Sample *x, Fault *f) {
        WireJobOpen *q = &x->c.q;
        int r;

        if (!x->sigmas_video || !x->sigmas_audio)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sigmas-video\" and \"sigmas-audio\" go together: \"%s\" is missing.",
                        x->sigmas_video ? "sigmas-audio" : "sigmas-video");

        r = check_tensor("sigmas-video", &q->sigmas_video, true, true, ST_F32, 1, "F32 [steps + 1]", f);
        if (r < 0)
                return r;

        r = check_tensor("sigmas-audio", &q->sigmas_audio, true, true, ST_F32, 1, "F32 [steps + 1]", f);
        if (r < 0)
                return r;

        if (q->sigmas_video.shape[0] != q->sigmas_audio.shape[0] || q->sigmas_video.shape[0] < 2 ||
                q->sigmas_video.shape[0] > JOB_STEPS_MAX + 1)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"sigmas-video\" and \"sigmas-audio\" have %" PRIu64 " and %" PRIu64
                        " values, expected the same number, 2 to %d.",
                        q->sigmas_video.shape[0], q->sigmas_audio.shape[0], JOB_STEPS_MAX + 1);

        q->schedule = WIRE_SCHEDULE_GIVEN;
        return 0;
}

static int shift(const char *key, double value, float *ret, Fault *f) {
        float narrow = (float) value;

        if (!isfinite(value) || !isfinite(narrow) || !(narrow > 0.0f))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is %g, expected a number above 0.", key, value);

        *ret = narrow;
        return 0;
}

static int made_sigmas(Sample *x, Fault *f) {
        WireJobOpen *q = &x->c.q;
        int r;

        if (!x->steps_seen)
                return missing("steps", "1 to 1000, or else sigmas-video and sigmas-audio", f);

        if (x->steps < 1 || x->steps > JOB_STEPS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"steps\" is %" PRIu32 ", expected 1 to %d.", x->steps, JOB_STEPS_MAX);

        r = shift("shift-video", x->shift_video, &q->shift_video, f);
        if (r < 0)
                return r;

        r = shift("shift-audio", x->shift_audio, &q->shift_audio, f);
        if (r < 0)
                return r;

        q->steps = x->steps;
        q->schedule = strcmp(x->schedule, "reference") == 0 ? WIRE_SCHEDULE_REFERENCE : WIRE_SCHEDULE_SIMPLE;
        return 0;
}

/* A trajectory that another run of the service began. */
static int resumed(Sample *x, Fault *f) {
        WireJobOpen *q = &x->c.q;
        uint64_t steps = q->schedule == WIRE_SCHEDULE_GIVEN ? q->sigmas_video.shape[0] - 1 : q->steps;
        bool kept = q->start_step > 0 && (q->flags & WIRE_JOB_KEEP_STEPS);
        int r;

        if (q->start_step >= steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"resume-step\" is %" PRIu32 ", expected less than the %" PRIu64 " steps.", q->start_step,
                        steps);

        if (x->numerics && (q->start_step == 0 || strlen(x->numerics) >= sizeof(q->numerics)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"numerics\" is for a trajectory with \"resume-step\" and has less than %zu bytes.",
                        sizeof(q->numerics));
        if (x->numerics)
                memcpy(q->numerics, x->numerics, strlen(x->numerics) + 1);

        if (!kept && (x->kept_video || x->kept_audio))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"kept-video\" and \"kept-audio\" are for \"keep-steps\" with \"resume-step\".");

        r = check_tensor("kept-video", &q->kept_video, x->kept_video, kept, ST_F32, 5,
                "F32 [resume-step, 24, T, H, W]", f);
        if (r < 0)
                return r;

        return check_tensor(
                "kept-audio", &q->kept_audio, x->kept_audio, kept, ST_F32, 4, "F32 [resume-step, 32, 2, A]", f);
}

int session_request_sample(sd_bus_message *message, const Session *s, WireJobOpen *ret, Fault *f) {
        Sample x = {
                .noise = "given",
                .sampler = "euler",
                .schedule = "simple",
                .shift_video = SHIFT_VIDEO,
                .shift_audio = SHIFT_AUDIO,
        };
        const BusKey keys[] = {
                COMMON_KEYS(&x.c),
                { "noise", "s", &x.noise },
                { "sampler", "s", &x.sampler },
                { "sigmas-video", "(tsat)", &x.c.q.sigmas_video, &x.sigmas_video },
                { "sigmas-audio", "(tsat)", &x.c.q.sigmas_audio, &x.sigmas_audio },
                { "steps", "u", &x.steps, &x.steps_seen },
                { "schedule", "s", &x.schedule },
                { "shift-video", "d", &x.shift_video },
                { "shift-audio", "d", &x.shift_audio },
                { "keep-steps", "b", &x.keep_steps },
                { "seed", "t", NULL, NULL, true },
                { "resume-step", "u", &x.c.q.start_step },
                { "numerics", "s", &x.numerics },
                { "kept-video", "(tsat)", &x.c.q.kept_video, &x.kept_video },
                { "kept-audio", "(tsat)", &x.c.q.kept_audio, &x.kept_audio },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        x.c.q.kind = WIRE_JOB_SAMPLE;
        x.c.q.sampler = WIRE_SAMPLER_EULER;
        x.c.q.flags = x.keep_steps ? WIRE_JOB_KEEP_STEPS : 0;
        r = finish_common(&x.c, s, f);
        if (r < 0)
                return r;

        r = check_names(&x, f);
        if (r < 0)
                return r;

        r = x.sigmas_video || x.sigmas_audio ? given_sigmas(&x, f) : made_sigmas(&x, f);
        if (r < 0)
                return r;

        r = resumed(&x, f);
        if (r < 0)
                return r;

        r = session_check_request(s, &x.c.q, f);
        if (r < 0)
                return r;

        *ret = x.c.q;
        return 0;
}
