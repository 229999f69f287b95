/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/job-ready.h"
#include "service/latentd/model.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"

#define ARENA_DEFAULT (UINT64_C(64) << 20)
#define ARENA_MIN UINT64_C(4096)

static const char *const compute_names[] = {
        [WIRE_COMPUTE_AUTO] = "auto",
        [WIRE_COMPUTE_F32] = "f32",
        [WIRE_COMPUTE_BF16] = "bf16",
};

const char *session_compute_to_string(WireCompute c) {
        return compute_names[c];
}

/* "a, b or c". */
static void list_names(const char *const *names, size_t n, char ret[static 128]) {
        size_t used = 0;

        for (size_t i = 0; i < n && used < 128; i++)
                used += (size_t) snprintf(ret + used, 128 - used, "%s%s",
                        i == 0 ? "" : i + 1 < n ? ", " : " or ", names[i]);
}

int request_choice(
        const char *key, const char *value, const char *const *names, size_t n, uint32_t *ret, Fault *f) {
        char known[128] = "";

        for (size_t i = 0; i < n; i++)
                if (strcmp(value, names[i]) == 0) {
                        *ret = (uint32_t) i;
                        return 0;
                }

        list_names(names, n, known);
        return fault_set(
                f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"%s\" is \"%.32s\", expected %s.", key, value, known);
}

int request_compute(const char *value, uint32_t *ret, Fault *f) {
        return request_choice("compute", value, compute_names, ELEMENTSOF(compute_names), ret, f);
}

int request_picture_rule(const char *value, uint32_t *ret, Fault *f) {
        static const char *const rules[] = {
                [WIRE_PICTURE_REFERENCE] = "reference",
                [WIRE_PICTURE_COMFY] = "comfy",
        };

        return request_choice("picture-rule", value, rules, ELEMENTSOF(rules), ret, f);
}

int request_own_file(int fd, int *ret) {
        int own = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : -EBADF;

        if (fd >= 0 && own < 0)
                return -errno;

        *ret = own;
        return 0;
}

int request_read_entries(sd_bus_message *m, const RequestEntries *e, Fault *f) {
        int r;

        r = sd_bus_message_enter_container(m, 'a', "a{sv}");
        if (r < 0)
                return r;

        while ((r = sd_bus_message_at_end(m, false)) == 0) {
                Fault inner = {};

                if (*e->n == e->max)
                        return fault_set(f, -E2BIG, FAULT_INVALID_ARGUMENT, "\"%s\" has more than %" PRIu32 " entries, the most %s.",
                                e->key, e->max, e->limit);

                r = e->read(m, (uint8_t *) e->entries + *e->n * e->size, &inner);
                if (r < 0 && inner.name[0] != '\0')
                        return fault_set(f, r, inner.name, "\"%s\"[%" PRIu32 "]: %s", e->key, *e->n, inner.text);
                if (r < 0)
                        return r;

                (*e->n)++;
        }
        if (r < 0)
                return r;

        return sd_bus_message_exit_container(m);
}

int request_missing(const char *key, const char *what, Fault *f) {
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

        case MODEL_DEFERRED:
                *ret = model;
                return 0;

        case MODEL_LOADING:
                if (model->defer && model->n_users > 0) { /* a Render has it loaded */
                        *ret = model;
                        return 0;
                }
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

/* Of a pipeline beside its denoiser. path: NULL: not given. */
static int find_part(Manager *m, const char *key, const char *path, WireModelKind kind, uid_t uid, const SessionOptions *o,
        Model **ret, Fault *f) {
        Fault inner = {};
        Model *model;
        int r;

        if (!path)
                return 0;

        if (o->model->info.kind != WIRE_MODEL_DENOISER)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" goes with a \"model\" that is a denoiser, this one is of kind \"%s\".", key,
                        model_kind_to_string(o->model->info.kind));

        r = find_model(m, path, uid, &model, &inner);
        if (r < 0)
                return fault_set(f, r, inner.name, "\"%s\": %s", key, inner.text);

        /* What a deferred one is turns out when it is loaded. */
        if (model_is_known(model) && model->info.kind != (uint32_t) kind)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"%s\" is a model of kind \"%s\", expected \"%s\".", key,
                        model_kind_to_string(model->info.kind), model_kind_to_string(kind));

        *ret = model;
        return 0;
}

static int check_class(const char *s, Fault *f) {
        static const char *const names[] = { "normal", "batch", "interactive" };
        uint32_t unused;

        return request_choice("class", s, names, ELEMENTSOF(names), &unused, f);
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

/* What w says of devices stays. */
static int read_split(const Manager *m, const Split *s, PlanWishes *w, Fault *f) {
        int r;

        r = check_ranks(m, "ranks", s->ranks, f);
        if (r >= 0)
                r = read_shares(m, s, w, f);
        if (r < 0)
                return r;

        if (plan_kind_from_string(s->plan, &w->kind) < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"plan\" is \"%.32s\", expected auto, hidden-gather, kv-gather or qkv-all-to-all.",
                        s->plan);
        if (plan_exchange_from_string(s->exchange, &w->exchange) < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"exchange\" is \"%.32s\", expected auto, host, p2p or nccl.", s->exchange);
        if (s->chunks > WIRE_CHUNKS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"chunks\" is %" PRIu32 ", expected 1 to %d, or 0 for as many as fit.", s->chunks,
                        WIRE_CHUNKS_MAX);
        w->ranks = s->ranks;
        w->chunks = s->chunks;
        return 0;
}

/* What of it cannot be known yet (no worker told, a model that is loaded later) the worker refuses in the job. */
static int read_sparse(const Manager *m, const char *text, const Model *model, SparseOptions *ret, Fault *f) {
        const WireHello *hello = worker_link_hello(m->worker);
        const WireModelReady *info = &model->info;
        int r;

        r = sparse_parse(text, ret, f);
        if (r < 0 || ret->method == SPARSE_NONE)
                return r;
        if (hello && !hello->sparse)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"sparse\": the %.16s worker has no sparse attention yet: leave it out, or set Worker=cpu.", hello->backend);
        if (!model_is_known(model))
                return 0;
        if (info->kind != WIRE_MODEL_DENOISER)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sparse\" goes with a \"model\" that is a denoiser, this one is of kind \"%s\".",
                        model_kind_to_string(info->kind));
        if ((ret->method == SPARSE_VSA) != (info->gated > 0))
                return sparse_refuse_model(ret->method == SPARSE_VSA, f);
        for (uint32_t i = info->layers; i < SPARSE_LAYERS_MAX; i++)
                if (sparse_is_dense(ret, i))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "sparse: \"dense_blocks\" has block %" PRIu32 ", and the model has blocks 0 to %" PRIu32 ".", i,
                                info->layers - 1);
        return 0;
}

int session_request_open(sd_bus_message *message, Manager *m, uid_t uid, SessionOptions *ret, Fault *f) {
        SessionOptions o = { .input_bytes = ARENA_DEFAULT, .output_bytes = ARENA_DEFAULT };
        const char *model = NULL, *compute = "auto", *job_class = "normal";
        const char *conditioner = NULL, *video_vae = NULL, *audio_vae = NULL, *sparse = "off";
        uint32_t compute_index;
        Split split = { .plan = "auto", .exchange = "auto" };
        RequestGpus gpus = {};
        const BusKey keys[] = {
                { "model", "o", &model },
                { "conditioner", "o", &conditioner },
                { "video-vae", "o", &video_vae },
                { "audio-vae", "o", &audio_vae },
                { "input-bytes", "t", &o.input_bytes },
                { "output-bytes", "t", &o.output_bytes },
                { "compute", "s", &compute },
                { "ranks", "u", &split.ranks },
                { "shares", "au", &split.shares },
                { "plan", "s", &split.plan },
                { "exchange", "s", &split.exchange },
                { "chunks", "u", &split.chunks },
                { "class", "s", &job_class },
                { "gpus", "as", &gpus, .read = request_read_gpus },
                { "sparse", "s", &sparse },
                { "preview", "u", NULL, NULL, true },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        r = request_check_gpus(m, &gpus, &o.split, f);
        if (r < 0)
                return r;

        if (!model)
                return request_missing("model", "the path of a loaded model", f);

        r = arena_size("input-bytes", &o.input_bytes, f);
        if (r < 0)
                return r;

        r = arena_size("output-bytes", &o.output_bytes, f);
        if (r < 0)
                return r;

        r = request_compute(compute, &compute_index, f);
        if (r < 0)
                return r;
        o.compute = (WireCompute) compute_index;

        r = read_split(m, &split, &o.split, f);
        if (r >= 0)
                r = request_check_exchange(m, &o.split, f);
        if (r < 0)
                return r;

        r = check_class(job_class, f);
        if (r < 0)
                return r;

        r = find_model(m, model, uid, &o.model, f);
        if (r < 0)
                return r;

        if (o.model->info.kind == WIRE_MODEL_LORA)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"model\" is a LoRA adapter: open the session on the model that it was made for and give the "
                        "adapter to SetLoras.");
        r = read_sparse(m, sparse, o.model, &o.sparse, f);
        if (r < 0)
                return r;
        r = find_part(m, "conditioner", conditioner, WIRE_MODEL_CONDITIONER, uid, &o, &o.conditioner, f);
        if (r >= 0)
                r = find_part(m, "video-vae", video_vae, WIRE_MODEL_VIDEO_VAE, uid, &o, &o.video_vae, f);
        if (r >= 0)
                r = find_part(m, "audio-vae", audio_vae, WIRE_MODEL_AUDIO_VAE, uid, &o, &o.audio_vae, f);
        if (r < 0)
                return r;

        o.job_class = job_class; /* as long as the message */
        *ret = o;
        return 0;
}

/* "F32 [24, 2, 4, 4]". */
static void describe(const WireTensor *t, char ret[static 160]) {
        const char *name = st_type_name((StType) t->dtype);
        int used = snprintf(ret, 160, "%s [", name ? name : "?");

        for (uint32_t i = 0; i < t->n_dims && used < 160; i++)
                used += snprintf(
                        ret + used, 160 - (size_t) used, "%s%" PRIu64, i > 0 ? ", " : "", t->shape[i]);
        if (used < 160)
                (void) snprintf(ret + used, 160 - (size_t) used, "]");
}

int request_check_tensor(
        const char *key, const WireTensor *t, bool seen, bool required, const TensorRule *rule, Fault *f) {
        char given[160];
        bool fits;

        if (!seen)
                return required ? request_missing(key, rule->text, f) : 0;

        fits = t->dtype == (uint32_t) rule->type && t->n_dims == rule->n_dims;
        for (uint32_t i = 0; fits && i < rule->n_dims; i++)
                fits = rule->shape[i] == 0 || t->shape[i] == rule->shape[i];
        if (fits)
                return 0;

        describe(t, given);
        return fault_set(
                f, -EINVAL, FAULT_INVALID_TENSOR, "\"%s\" is %s, expected %s.", key, given, rule->text);
}

static int check_text(const Request *c, Fault *f) {
        const TensorRule text = { ST_BF16, 2, "BF16 [L, text_dim]", {} };
        const TensorRule tags = { ST_U8, 1, "U8 [L], one for each row of \"text\"", { c->q.text.shape[0] } };
        int r;

        r = request_check_tensor("text", &c->q.text, c->text, true, &text, f);
        if (r < 0)
                return r;

        return request_check_tensor("text-tags", &c->q.text_tags, c->text_tags, false, &tags, f);
}

/* Masks cover the film. */
static int check_masks(const Request *c, Fault *f) {
        const WireTensor *v = &c->q.video, *a = &c->q.audio, *mask = &c->q.mask_audio;
        const TensorRule video = { ST_F32, 3, "F32 [T, H, W] with those of \"video\"",
                { v->shape[1], v->shape[2], v->shape[3] } };
        TensorRule audio = { ST_F32, 2, "F32 [2, A] or [32, 2, A] with the A of \"audio\"", { 2, a->shape[2] } };
        int r;

        r = request_check_tensor("mask-video", &c->q.mask_video, c->mask_video, false, &video, f);
        if (r < 0)
                return r;

        if (c->mask_audio && mask->n_dims == 3) {
                audio.n_dims = 3;
                memcpy(audio.shape, a->shape, 3 * sizeof(a->shape[0]));
        }
        return request_check_tensor("mask-audio", mask, c->mask_audio, false, &audio, f);
}

/* Who draws noise, and from what. */
static int finish_noise(Request *c, Fault *f) {
        static const char *const names[] = {
                [WIRE_NOISE_GIVEN] = "given",
                [WIRE_NOISE_COMFY] = "comfy",
                [WIRE_NOISE_DIFFUSERS] = "diffusers",
                [WIRE_NOISE_OFFICIAL] = "official",
        };
        WireJobOpen *q = &c->q;
        bool made;
        int r;

        if (c->condition_noise) {
                r = request_choice("condition-noise", c->condition_noise, names, ELEMENTSOF(names),
                        &q->condition_noise, f);
                if (r < 0)
                        return r;
        }

        if (q->condition_noise != WIRE_NOISE_GIVEN && q->n_conditions == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"condition-noise\" is \"%s\", but there are no \"conditions\" to make noise for.",
                        names[q->condition_noise]);

        made = q->noise != WIRE_NOISE_GIVEN || q->condition_noise != WIRE_NOISE_GIVEN;
        if (made && !c->seed)
                return request_missing("seed", "of the noise that is to be made", f);
        if (!made && c->seed)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"seed\" is for noise that the service makes: give %s\"condition-noise\" too, or leave it out.",
                        q->kind == WIRE_JOB_SAMPLE ? "\"noise\" or " : "");

        return 0;
}

int request_finish(Request *c, const Session *s, Fault *f) {
        const TensorRule video = RULE_VIDEO, audio = RULE_AUDIO;
        WireJobOpen *q = &c->q;
        int r;

        r = check_text(c, f);
        if (r < 0)
                return r;

        r = request_check_tensor("video", &q->video, c->video, true, &video, f);
        if (r < 0)
                return r;

        r = request_check_tensor("audio", &q->audio, c->audio, true, &audio, f);
        if (r < 0)
                return r;

        r = check_masks(c, f);
        if (r < 0)
                return r;

        r = request_check_conditions(q, f);
        if (r < 0)
                return r;

        r = finish_noise(c, f);
        if (r < 0)
                return r;

        q->compute = s->compute;
        if (c->compute) {
                r = request_compute(c->compute, &q->compute, f);
                if (r < 0)
                        return r;
        }

        /* An offset behind the arena is refused by session_check_request(). */
        if (!c->output_bytes && q->output_offset < s->output_bytes)
                q->output_size = s->output_bytes - q->output_offset;

        return 0;
}

/* Their values are the worker's to check. */
int request_check_sigmas(const WireJobOpen *q, bool video, bool audio, Fault *f) {
        const TensorRule rule = { ST_F32, 1, "F32 [steps + 1]", {} };
        uint64_t n_video = q->sigmas_video.shape[0], n_audio = q->sigmas_audio.shape[0];
        int r;

        if (!video || !audio)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sigmas-video\" and \"sigmas-audio\" go together: \"%s\" is missing.",
                        video ? "sigmas-audio" : "sigmas-video");

        r = request_check_tensor("sigmas-video", &q->sigmas_video, true, true, &rule, f);
        if (r < 0)
                return r;

        r = request_check_tensor("sigmas-audio", &q->sigmas_audio, true, true, &rule, f);
        if (r < 0)
                return r;

        if (n_video != n_audio || n_video < 2 || n_video > JOB_STEPS_MAX + 1)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"sigmas-video\" and \"sigmas-audio\" have %" PRIu64 " and %" PRIu64
                        " values, expected the same number, 2 to %d.",
                        n_video, n_audio, JOB_STEPS_MAX + 1);

        return 0;
}

/* Sigmas are taken as f32 and must be in range as such too. */
static int sigma(const char *key, bool seen, double value, float *ret, Fault *f) {
        if (!seen)
                return request_missing(key, "0 to 1", f);

        if (!(value >= 0.0 && value <= 1.0))
                return fault_set(
                        f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"%s\" is %g, expected 0 to 1.", key, value);

        *ret = (float) value;
        return 0;
}

int session_request_step(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        Request c = { .q = { .kind = WIRE_JOB_STEP, .flags = flags } };
        double video = 0, audio = 0;
        bool video_seen = false, audio_seen = false, sigmas_video = false, sigmas_audio = false;
        const BusKey keys[] = {
                REQUEST_KEYS(&c),
                { "sigma-video", "d", &video, &video_seen },
                { "sigma-audio", "d", &audio, &audio_seen },
                { "sigmas-video", "(tsat)", &c.q.sigmas_video, &sigmas_video },
                { "sigmas-audio", "(tsat)", &c.q.sigmas_audio, &sigmas_audio },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        r = session_check_kind(s, WIRE_JOB_STEP, f);
        if (r < 0)
                return r;

        r = request_finish(&c, s, f);
        if (r < 0)
                return r;

        r = sigma("sigma-video", video_seen, video, &c.q.sigma_video, f);
        if (r < 0)
                return r;

        r = sigma("sigma-audio", audio_seen, audio, &c.q.sigma_audio, f);
        if (r < 0)
                return r;

        session_request_sparse(&s->sparse, s->model, &c.q);
        if (sigmas_video || sigmas_audio) {
                r = request_check_sigmas(&c.q, sigmas_video, sigmas_audio, f);
                if (r < 0)
                        return r;
        }

        r = session_check_request(s, &c.q, f);
        if (r < 0)
                return r;

        *ret = c.q;
        return 0;
}

/* The adapter, and nothing but one. */
static int find_lora(Manager *m, const char *path, double strength, uid_t uid, Model **ret, Fault *f) {
        Model *model;
        int r;

        r = find_model(m, path, uid, &model, f);
        if (r < 0)
                return r;

        if (model->state != MODEL_READY)
                return fault_set(f, -EBUSY, FAULT_BUSY,
                        "\"%.128s\" is deferred, which adapters cannot be: load it without \"defer\".", path);
        if (model->info.kind != WIRE_MODEL_LORA)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%.128s\" is a model and no LoRA adapter (its Kind is %s).", path,
                        model_kind_to_string(model->info.kind));

        if (!(fabs(strength) <= WIRE_LORA_STRENGTH_MAX)) /* NaN too */
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The strength is %g, expected a number from -%g to %g.",
                        strength, WIRE_LORA_STRENGTH_MAX, WIRE_LORA_STRENGTH_MAX);

        *ret = model;
        return 0;
}

static int read_loras(sd_bus_message *message, const Session *s, LoraList *ret, Fault *f) {
        LoraList list = {};
        const char *path;
        double strength;
        int r;

        r = sd_bus_message_enter_container(message, 'a', "(od)");
        if (r < 0)
                return r;

        while ((r = sd_bus_message_read(message, "(od)", &path, &strength)) > 0) {
                Fault inner = {};

                if (list.n == WIRE_LORAS_MAX)
                        return fault_set(f, -E2BIG, FAULT_INVALID_ARGUMENT,
                                "\"loras\" has more than %d entries, the most that a session may have.",
                                WIRE_LORAS_MAX);

                r = find_lora(s->manager, path, strength, s->uid, &list.models[list.n], &inner);
                if (r < 0)
                        return fault_set(f, r, inner.name, "\"loras\"[%" PRIu32 "]: %s", list.n, inner.text);

                list.strengths[list.n++] = strength;
        }
        if (r < 0)
                return r;

        r = sd_bus_message_exit_container(message);
        if (r < 0)
                return r;

        *ret = list;
        return 0;
}

int session_request_loras(
        sd_bus_message *message, const Session *s, LoraList *ret, WireCompute *ret_compute, Fault *f) {
        uint32_t compute = s->compute;
        const char *name = NULL;
        const BusKey keys[] = { { "compute", "s", &name } };
        LoraList list;
        int r;

        r = session_check_kind(s, WIRE_JOB_MERGE, f);
        if (r < 0)
                return r;

        r = read_loras(message, s, &list, f);
        if (r < 0)
                return r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        if (name) {
                r = request_compute(name, &compute, f);
                if (r < 0)
                        return r;
        }

        *ret = list;
        *ret_compute = (WireCompute) compute;
        return 0;
}
