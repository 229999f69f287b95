/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/session.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "client/liblatent/job.h"
#include "client/liblatent/model.h"
#include "client/liblatent/options.h"
#include "client/liblatent/recover.h"
#include "client/liblatent/request.h"
#include "client/liblatent/value.h"
#include "service/shared/memfd.h"

_Static_assert(sizeof(latent_session_options) == 120, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_step_options) == 144, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_sample_options) == 192, "public layout changed: add fields, never alter");
#define SESSION_OPTIONS_SIZE_V1 40u
#define SHARES_MAX 64u
#define GPUS_MAX 64u
#define STEP_OPTIONS_SIZE_V1 80u
#define SAMPLE_OPTIONS_SIZE_V1 120u

latent_session *session_ref(latent_session *s) {
        s->n_ref++;
        return s;
}

latent_session *session_unref(latent_session *s) {
        if (!s || --s->n_ref > 0)
                return NULL;

        if (s->input)
                (void) munmap(s->input, s->input_bytes);
        (void) output_unref(s->output);
        latent_job_free(s->load);
        (void) source_unref(s->source);
        for (size_t i = 0; i < SESSION_PARTS; i++) {
                (void) source_unref(s->parts[i].source);
                latent_model_free(s->parts[i].model);
        }
        (void) adapters_unref(s->adapters);
        (void) adapters_unref(s->in_force);
        free(s->compute);
        free(s->job_class);
        free(s->plan);
        free(s->sparse);
        free(s->exchange);
        free(s->shares);
        for (uint32_t i = 0; s->gpus && i < s->options.n_gpus; i++)
                free(s->gpus[i]);
        free(s->gpus);
        object_done(&s->object);
        (void) client_unref(s->client);
        free(s);
        return NULL;
}

DEFINE_CLEANUP(latent_session *, latent_session_free)
DEFINE_CLEANUP(Output *, output_unref)

Output *output_ref(Output *o) {
        o->n_ref++;
        return o;
}

Output *output_unref(Output *o) {
        if (!o || --o->n_ref > 0)
                return NULL;

        if (o->map)
                (void) munmap((void *) o->map, o->size);
        free(o);
        return NULL;
}

const void *output_at(const Output *o, uint64_t offset, uint64_t size) {
        if (offset > o->size || size > o->size - offset)
                return NULL;

        return (const uint8_t *) o->map + offset;
}

/* Maps what the service handed out. Its size must be fixed: a shrinking file kills whoever reads it. */
static int map_arena(int fd, uint64_t size_min, int prot, void **ret_map, uint64_t *ret_size) {
        struct stat st;
        uint64_t size;
        void *map;
        int r;

        if (fstat(fd, &st) < 0)
                return -errno;
        size = (uint64_t) st.st_size;
        if (size < size_min || size == 0)
                return -EINVAL;
        r = memfd_check(fd, size);
        if (r < 0)
                return r;
        r = memfd_map(fd, size, prot, &map);
        if (r < 0)
                return r;

        *ret_map = map;
        *ret_size = size;
        return 0;
}

/* What OpenSession() gave. */
typedef struct Opened {
        Object object;
        void *input;
        uint64_t input_bytes;
        int input_fd; /* the message's */
        Output *output;
} Opened;

static void opened_done(Opened *x) {
        object_done(&x->object);
        if (x->input)
                (void) munmap(x->input, x->input_bytes);
        (void) output_unref(x->output);
}

static int take_reply(latent_client *c, sd_bus_message *reply, uint64_t input_bytes, uint64_t output_bytes, Opened *x,
        latent_error *e) {
        CLEANUP(output_unrefp) Output *output = NULL;
        int r, output_fd; /* the message's too */
        const char *path;
        void *map;

        r = sd_bus_message_read(reply, "ohh", &path, &x->input_fd, &output_fd);
        if (r < 0)
                return client_error_message(r, "Opening a session", e);
        output = calloc(1, sizeof(*output));
        r = output ? object_init(&x->object, client_sender(c, reply), path) : -ENOMEM;
        if (r < 0)
                return error_errno(e, r, "Opening a session");

        output->n_ref = 1;
        r = map_arena(x->input_fd, input_bytes, PROT_READ | PROT_WRITE, &x->input, &x->input_bytes);
        if (r >= 0)
                r = map_arena(output_fd, output_bytes, PROT_READ, &map, &output->size);
        if (r < 0)
                return error_set(e, r, LATENT_ERROR_INTERNAL,
                        "The session's shared memory cannot be used: %s.", strerror(-r));

        output->map = map;
        x->output = STEAL_PTR(output);
        return 0;
}

static int append_shares(sd_bus_message *m, const latent_session_options *o) {
        int r;

        if (o->n_shares == 0)
                return 0;

        r = open_list(m, "shares", "u");
        for (uint32_t i = 0; r >= 0 && i < o->n_shares; i++)
                r = sd_bus_message_append(m, "u", o->shares[i]);
        return r < 0 ? r : close_list(m);
}

static int append_gpus(sd_bus_message *m, const latent_session_options *o) {
        int r;

        if (o->n_gpus == 0)
                return 0;

        r = open_list(m, "gpus", "s");
        for (uint32_t i = 0; r >= 0 && i < o->n_gpus; i++)
                r = sd_bus_message_append(m, "s", o->gpus[i]);
        return r < 0 ? r : close_list(m);
}

static int append_session_options(
        sd_bus_message *m, const latent_model *model, const latent_session_options *o) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}", "model", "o", model->object.path);
        if (r >= 0 && o->conditioner)
                r = sd_bus_message_append(m, "{sv}", "conditioner", "o", o->conditioner->object.path);
        if (r >= 0 && o->video_vae)
                r = sd_bus_message_append(m, "{sv}", "video-vae", "o", o->video_vae->object.path);
        if (r >= 0 && o->audio_vae)
                r = sd_bus_message_append(m, "{sv}", "audio-vae", "o", o->audio_vae->object.path);
        if (r >= 0 && o->input_bytes > 0)
                r = sd_bus_message_append(m, "{sv}", "input-bytes", "t", o->input_bytes);
        if (r >= 0 && o->output_bytes > 0)
                r = sd_bus_message_append(m, "{sv}", "output-bytes", "t", o->output_bytes);
        if (r >= 0 && o->ranks > 0)
                r = sd_bus_message_append(m, "{sv}", "ranks", "u", o->ranks);
        if (r >= 0)
                r = append_string(m, "compute", o->compute);
        if (r >= 0)
                r = append_string(m, "class", o->job_class);
        if (r >= 0)
                r = append_shares(m, o);
        if (r >= 0 && o->chunks > 0)
                r = sd_bus_message_append(m, "{sv}", "chunks", "u", o->chunks);
        if (r >= 0)
                r = append_string(m, "plan", o->plan);
        if (r >= 0)
                r = append_string(m, "exchange", o->exchange);
        if (r >= 0)
                r = append_string(m, "sparse", o->sparse);
        if (r >= 0)
                r = append_gpus(m, o);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

/* reply holds the descriptors. */
static int session_call_open(latent_client *c, const latent_model *model, const latent_session_options *o, Opened *x,
        sd_bus_message **ret_reply, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = client_message(c, model->object.owner, BUS_ROOT, BUS_INTERFACE("Manager"), "OpenSession", &m, e);
        if (r < 0)
                return r;
        r = append_session_options(m, model, o);
        if (r < 0)
                return client_error_message(r, "Opening a session", e);
        r = client_call(c, m, "Opening a session", ret_reply, e);
        if (r < 0)
                return r;

        return take_reply(c, *ret_reply, o->input_bytes, o->output_bytes, x, e);
}

static int keep_options(latent_session *s, const latent_session_options *o) {
        s->options = *o;
        if (copy_string(o->compute, &s->compute) < 0 || copy_string(o->job_class, &s->job_class) < 0 ||
                copy_string(o->plan, &s->plan) < 0 || copy_string(o->exchange, &s->exchange) < 0 ||
                copy_string(o->sparse, &s->sparse) < 0)
                return -ENOMEM;
        if (o->n_shares > 0) {
                s->shares = malloc(o->n_shares * sizeof(*s->shares));
                if (!s->shares)
                        return -ENOMEM;
                memcpy(s->shares, o->shares, o->n_shares * sizeof(*s->shares));
        }

        if (o->n_gpus > 0) {
                s->gpus = calloc(o->n_gpus, sizeof(*s->gpus));
                if (!s->gpus)
                        return -ENOMEM;
        }
        for (uint32_t i = 0; i < o->n_gpus; i++)
                if (copy_string(o->gpus[i], &s->gpus[i]) < 0)
                        return -ENOMEM;

        s->options.conditioner = s->options.video_vae = s->options.audio_vae = NULL; /* the caller's */
        s->options.compute = s->compute;
        s->options.job_class = s->job_class;
        s->options.plan = s->plan;
        s->options.exchange = s->exchange;
        s->options.sparse = s->sparse;
        s->options.shares = s->shares;
        s->options.gpus = (const char *const *) s->gpus;
        return 0;
}

static int check_options(const latent_session_options *o, latent_error *e) {
        if (o->n_shares > SHARES_MAX || (o->n_shares > 0) != (o->shares != NULL))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "shares is %s with n_shares = %u; expected both or none, and at most %u.",
                        o->shares ? "given" : "NULL", o->n_shares, SHARES_MAX);
        if (o->n_gpus > GPUS_MAX || (o->n_gpus > 0) != (o->gpus != NULL))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "gpus is %s with n_gpus = %u; expected both or none, and at most %u.",
                        o->gpus ? "given" : "NULL", o->n_gpus, GPUS_MAX);
        for (uint32_t i = 0; i < o->n_gpus; i++)
                if (!o->gpus[i])
                        return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "gpus[%u] is NULL.", i);

        return 0;
}

/* Only now: the session keeps the model as it is. Without it jobs cannot be taken up, and nothing else. */
static void keep_identity(latent_session *s, latent_model *model) {
        if (s->source && !s->client->no_resume && model_ask_identity(model, NULL) >= 0)
                memcpy(s->identity, model->identity, sizeof(s->identity));
}

/* Likewise of the other parts. */
static void keep_parts(latent_session *s, const latent_session_options *o) {
        latent_model *const models[SESSION_PARTS] = {o->conditioner, o->video_vae, o->audio_vae};

        for (size_t i = 0; i < SESSION_PARTS; i++) {
                SessionPart *p = &s->parts[i];

                p->given = models[i] != NULL;
                if (!p->given || !models[i]->source || s->client->no_resume || model_ask_identity(models[i], NULL) < 0)
                        continue;
                p->source = source_ref(models[i]->source);
                memcpy(p->identity, models[i]->identity, sizeof(p->identity));
        }
}

LATENT_PUBLIC int latent_session_open(latent_client *client, latent_model *model,
        const latent_session_options *options, latent_session **ret_session, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        CLEANUP(latent_session_freep) latent_session *s = NULL;
        CLEANUP(opened_done) Opened x = {};
        latent_session_options o;
        int r;

        r = options_read(options, SESSION_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = check_options(&o, error);
        if (r < 0)
                return r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return error_errno(error, -ENOMEM, "Opening a session");
        s->n_ref = 1;
        s->client = client_ref(client);
        s->source = source_ref(model->source);
        r = keep_options(s, &o);
        if (r < 0)
                return error_errno(error, r, "Opening a session");

        r = session_call_open(client, model, &o, &x, &reply, error);
        if (r < 0)
                return r;

        s->object = x.object;
        x.object = (Object){};
        s->input = STEAL_PTR(x.input);
        s->input_bytes = x.input_bytes;
        s->output = STEAL_PTR(x.output);
        s->output_bytes = s->output->size;
        s->arena = (Arena){.size = s->input_bytes};
        keep_identity(s, model);
        keep_parts(s, &o);

        *ret_session = STEAL_PTR(s);
        return 0;
}

int session_reopen(
        latent_session *s, const latent_model *model, uint64_t spare, void **ret_spare, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        CLEANUP(opened_done) Opened x = {};
        latent_session_options o = s->options;
        void *map;
        int r;

        if (__builtin_add_overflow(s->input_bytes, spare, &o.input_bytes))
                return error_errno(e, -EOVERFLOW, "Opening a session again");
        o.output_bytes = s->output_bytes;
        o.conditioner = s->parts[0].model;
        o.video_vae = s->parts[1].model;
        o.audio_vae = s->parts[2].model;
        r = session_call_open(s->client, model, &o, &x, &reply, e);
        if (r < 0)
                return r;

        /* Where the caller knows it, so that its pointers stay good. */
        memcpy(x.input, s->input, s->input_bytes);
        map = mmap(s->input, s->input_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, x.input_fd, 0);
        if (map == MAP_FAILED)
                return error_errno(e, -errno, "Mapping a session again");
        (void) madvise(map, s->input_bytes, MADV_DONTDUMP);

        object_done(&s->object);
        s->object = x.object;
        x.object = (Object){};
        (void) output_unref(s->output);
        s->output = STEAL_PTR(x.output);
        s->output_bytes = s->output->size;
        s->spare = (Arena){.size = x.input_bytes, .used = s->input_bytes};
        s->in_force = adapters_unref(s->in_force);
        *ret_spare = STEAL_PTR(x.input);
        return 0;
}

void session_spare_done(latent_session *s, void *spare) {
        (void) munmap(spare, s->spare.size);
}

LATENT_PUBLIC const char *latent_session_path(const latent_session *session) {
        return session->object.path;
}

LATENT_PUBLIC void *latent_session_input(latent_session *session) {
        return session->input;
}

LATENT_PUBLIC const void *latent_session_output(const latent_session *session) {
        return session->output->map;
}

LATENT_PUBLIC uint64_t latent_session_input_bytes(const latent_session *session) {
        return session->input_bytes;
}

LATENT_PUBLIC uint64_t latent_session_output_bytes(const latent_session *session) {
        return session->output_bytes;
}

LATENT_PUBLIC int latent_session_allocate(
        latent_session *session, latent_tensor *tensor, void **ret_data, latent_error *error) {
        uint64_t size, offset;
        int r;

        r = tensor_size(tensor, &size);
        if (r < 0)
                return error_set(error, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "A tensor's type or shape makes no sense; expected a type such as F32, BF16 or U8 "
                        "and at most %d "
                        "dimensions, less than 2^64 bytes together.",
                        LATENT_DIMS_MAX);

        r = arena_take(&session->arena, size, &offset);
        if (r < 0)
                return error_set(error, -ENOMEM, LATENT_ERROR_DOES_NOT_FIT,
                        "%llu bytes do not fit into the input arena: %llu of %llu are taken. Open the "
                        "session with more "
                        "input_bytes.",
                        (unsigned long long) size, (unsigned long long) session->arena.used,
                        (unsigned long long) session->arena.size);

        tensor->offset = offset;
        tensor->size = size;
        *ret_data = (uint8_t *) session->input + offset;
        return 0;
}

LATENT_PUBLIC void latent_session_reset(latent_session *session) {
        session->arena.used = 0;
}

LATENT_PUBLIC int latent_session_close(latent_session *session, latent_error *error) {
        session->closed = true;
        return client_call_simple(session->client, &session->object, BUS_INTERFACE("Session"), "Close",
                "Closing a session", error);
}

/* Close() without waiting for an answer: what can be done about a failure here is nothing. */
static void session_send_close(latent_session *s) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;

        if (s->closed || !s->object.path || !s->client->bus ||
                client_message(s->client, s->object.owner, s->object.path, BUS_INTERFACE("Session"), "Close",
                        &m, NULL) < 0)
                return;

        s->closed = true;
        (void) sd_bus_message_set_expect_reply(m, false);
        (void) sd_bus_send(s->client->bus, m, NULL);
        (void) sd_bus_flush(s->client->bus);
}

LATENT_PUBLIC void latent_session_free(latent_session *session) {
        if (!session)
                return;

        session_send_close(session);
        (void) session_unref(session);
}

int session_start(latent_session *s, Request **q, latent_job **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        Before before;
        int r;

        r = recover_before(s, *q, &before, e);
        if (r < 0)
                return r;
        r = recover_send(s, *q, NULL, &reply, e);
        if (r < 0)
                return r;
        r = job_new_from_reply(s->client, s, reply, ret, e);
        if (r < 0)
                return r;

        (*ret)->request = STEAL_PTR(*q);
        (*ret)->before = before;
        return 0;
}

/* *ret: of the session as it is now. options as the caller gave them. */
static int request_step(latent_session *s, const latent_step_options *options, Request **ret, latent_error *e) {
        latent_step_options o;
        int r;

        r = options_read(options, STEP_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;

        return request_new(&o, NULL, s->adapters, ret, e);
}

static int request_sample(latent_session *s, const latent_sample_options *options, Request **ret, latent_error *e) {
        latent_sample_options o;
        int r;

        r = options_read(options, SAMPLE_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;
        if (o.flags & ~(uint32_t) LATENT_SAMPLE_KEEP_STEPS)
                return error_set(e, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                        "Unknown flags %#x; expected LATENT_SAMPLE_*.", o.flags);

        return request_new(NULL, &o, s->adapters, ret, e);
}

LATENT_PUBLIC int latent_session_step(latent_session *session, const latent_step_options *options,
        latent_job **ret_job, latent_error *error) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = request_step(session, options, &q, error);
        if (r < 0)
                return r;

        return session_start(session, &q, ret_job, error);
}

LATENT_PUBLIC int latent_session_sample(latent_session *session, const latent_sample_options *options,
        latent_job **ret_job, latent_error *error) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = request_sample(session, options, &q, error);
        if (r < 0)
                return r;

        return session_start(session, &q, ret_job, error);
}

int session_send_adapters(latent_session *s, AdapterSet *a, sd_bus_message **ret_reply, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = adapters_check(a, s->object.owner, e);
        if (r < 0)
                return r;
        r = client_message(s->client, s->object.owner, s->object.path, BUS_INTERFACE("Session"), "SetLoras", &m, e);
        if (r < 0)
                return r;
        r = adapters_append(m, a);
        if (r < 0)
                return client_error_message(r, "Setting adapters", e);
        r = client_call(s->client, m, "Setting adapters", ret_reply, e);
        if (r < 0)
                return r;

        (void) adapters_unref(s->in_force);
        s->in_force = adapters_ref(a);
        return 0;
}

LATENT_PUBLIC int latent_session_set_loras(latent_session *session, const latent_lora *loras, size_t n,
        const char *compute, latent_job **ret_job, latent_error *error) {
        CLEANUP(adapters_unrefp) AdapterSet *a = NULL;
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = adapters_new(loras, n, compute, session->client, session->object.owner, &a, error);
        if (r < 0)
                return r;
        r = request_new_merge(a, &q, error);
        if (r < 0)
                return r;
        r = session_start(session, &q, ret_job, error);
        if (r < 0)
                return r;

        (void) adapters_unref(session->adapters);
        session->adapters = STEAL_PTR(a);
        return 0;
}

int session_plan(latent_session *s, const Request *q, latent_value **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = recover_adapters(s, q, e);
        if (r < 0)
                return r;
        r = client_message(s->client, s->object.owner, s->object.path, BUS_INTERFACE("Session"), "Plan", &m, e);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "s", request_plan_kind(q));
        if (r >= 0)
                r = request_append(m, q, NULL);
        if (r < 0)
                return client_error_message(r, "Planning", e);
        r = client_call_patiently(s->client, m, "Planning", &reply, e);
        if (r < 0)
                return r;

        r = sd_bus_message_has_signature(reply, "a{sv}") ? value_read(reply, ret) : -EBADMSG;
        return r < 0 ? client_error_message(r, "Planning", e) : 0;
}

LATENT_PUBLIC int latent_session_plan_step(latent_session *session, const latent_step_options *options,
        latent_value **ret_value, latent_error *error) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = request_step(session, options, &q, error);
        if (r < 0)
                return r;

        return session_plan(session, q, ret_value, error);
}

LATENT_PUBLIC int latent_session_plan_sample(latent_session *session, const latent_sample_options *options,
        latent_value **ret_value, latent_error *error) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = request_sample(session, options, &q, error);
        if (r < 0)
                return r;

        return session_plan(session, q, ret_value, error);
}
