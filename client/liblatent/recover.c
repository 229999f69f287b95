/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/recover.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/liblatent/job.h"
#include "client/liblatent/model.h"
#include "client/liblatent/value.h"
#include "service/shared/clock.h"
#include "service/shared/wire.h"

/* A job that takes its service with it each time must not do so for ever: so often without a finished step in between. client/latent.h
 * and latentctl(1) name it. */
#define TAKEN_UP_MAX 10u

/* As dbus/org.latentd.Latent1.Session.xml describes the output range of a trajectory. */
#define SLOTS_BEGIN 64u

typedef struct Slots {
        uint64_t stride, n;
} Slots;

DEFINE_CLEANUP(latent_model *, latent_model_free)

static uint64_t output_offset(const Request *q) {
        return q->sample.output_offset;
}

static uint32_t count_steps(const Request *q) {
        const latent_tensor *t = q->sample.sigmas_video;

        if (!t)
                return q->sample.steps;
        return t->n_dims == 1 && t->shape[0] >= 2 && t->shape[0] <= 1001 ? (uint32_t) t->shape[0] - 1 : 0;
}

static uint64_t read_word(const Output *o, const Request *q) {
        const uint64_t *word = output_at(o, output_offset(q), sizeof(*word));

        return word && output_offset(q) % sizeof(*word) == 0 ? __atomic_load_n(word, __ATOMIC_ACQUIRE) : 0;
}

/* The numerics id of the service's worker; "" if it cannot be had. */
static void ask_numerics(latent_client *c, const char *owner, char ret[static 128]) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        const char *s = NULL;

        ret[0] = '\0';
        if (client_message(c, owner, BUS_ROOT, "org.freedesktop.DBus.Properties", "Get", &m, NULL) < 0 ||
                sd_bus_message_append(m, "ss", BUS_INTERFACE("Manager"), "NumericsId") < 0 ||
                client_call(c, m, "Asking for the numerics id", &reply, NULL) < 0 ||
                sd_bus_message_read(reply, "v", "s", &s) < 0 || strlen(s) >= 128)
                return;

        (void) snprintf(ret, 128, "%s", s);
}

static bool can_be_taken_up(const latent_session *s) {
        for (size_t i = 0; i < SESSION_PARTS; i++)
                if (s->parts[i].given && (!s->parts[i].source || s->parts[i].identity[0] == '\0'))
                        return false;

        return s->source && s->identity[0] != '\0' && adapters_known(s->adapters) && !s->closed && !s->client->no_resume;
}

int recover_before(latent_session *s, const Request *q, Before *ret, latent_error *e) {
        *ret = (Before){.word = read_word(s->output, q)};
        if ((q->kind == REQUEST_SAMPLE || request_makes_frames(q)) && can_be_taken_up(s))
                ask_numerics(s->client, s->object.owner, ret->numerics);
        return 0;
}

int recover_adapters(latent_session *s, const Request *q, latent_error *e) {
        if (q->kind > REQUEST_MERGE && q->kind != REQUEST_RENDER)
                return 0;
        return adapters_same(s->in_force, q->adapters) ? 0 : session_send_adapters(s, q->adapters, NULL, e);
}

int recover_send(latent_session *s, const Request *q, const Resume *resume, sd_bus_message **ret_reply, latent_error *e) {
        const char *doing = request_doing(q);
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        if (q->kind == REQUEST_MERGE)
                return session_send_adapters(s, q->adapters, ret_reply, e);

        r = recover_adapters(s, q, e);
        if (r < 0)
                return r;
        r = client_message(s->client, s->object.owner, s->object.path, BUS_INTERFACE("Session"), request_method(q), &m, e);
        if (r < 0)
                return r;
        r = request_append(m, q, resume);
        if (r < 0)
                return client_error_message(r, doing, e);

        return client_call(s->client, m, doing, ret_reply, e);
}

/* ---- states ---- */

static bool find_slots(const Request *q, Slots *ret) {
        const latent_sample_options *o = &q->sample;
        Slots x = {.n = (o->flags & LATENT_SAMPLE_KEEP_STEPS) ? (uint64_t) count_steps(q) + 1 : 2};

        if (!o->video || !o->audio || slot_bytes(o->video, o->audio, o->sampler, &x.stride) < 0 ||
                x.stride > UINT64_MAX / 4096)
                return false;

        *ret = x;
        return true;
}

static const char *slot_of(const latent_job *j, const Output *o, const Slots *x, uint32_t state) {
        return output_at(o, output_offset(j->request) + SLOTS_BEGIN + state % x->n * x->stride, x->stride);
}

/* After how many steps it can go on: 0 if nothing is sure. All of them would leave nothing to be asked for. */
static uint32_t committed(const latent_job *j) {
        uint32_t epoch, done, steps = count_steps(j->request);
        uint64_t word = read_word(j->output, j->request);
        Slots x;

        if (j->request->kind != REQUEST_SAMPLE || word == j->before.word || wire_commit_unpack(word, &epoch, &done) < 0 || done > steps)
                return 0;
        if (done == steps)
                done--; /* the state before is there too, in the other slot */
        if (!find_slots(j->request, &x) || !slot_of(j, j->output, &x, done) ||
                ((j->request->sample.flags & LATENT_SAMPLE_KEEP_STEPS) && done > 0 && !slot_of(j, j->output, &x, done - 1)))
                return 0;

        return done;
}

/* Where it will go on. A job that was taken up and lost again before its next state has that of the time before. */
static void choose_states(latent_job *j, const char *numerics) {
        bool same = numerics[0] != '\0' && strcmp(numerics, j->before.numerics) == 0;
        uint32_t step = same ? committed(j) : 0, known = same && j->states ? j->resume.step : 0;

        /* Frames that were read are final. */
        if (request_makes_frames(j->request) && j->frames > 0 && !same) {
                job_fail_restarted(j);
                return;
        }
        if (!same) /* what is there counts for nothing, also when this has to be tried again */
                j->before.word = read_word(j->output, j->request);
        if (step == 0 && known == 0)
                j->states = output_unref(j->states);
        else if (step > known) {
                (void) output_unref(j->states);
                j->states = output_ref(j->output);
        }
        j->resume = (Resume){.step = step > known ? step : known, .numerics = j->before.numerics};
        (void) snprintf(j->before.numerics, sizeof(j->before.numerics), "%s", numerics);
}

/* States that go through the input arena: the last one, or with KEEP_STEPS all. */
static uint32_t count_states(const latent_job *j, uint32_t step) {
        if (step == 0)
                return 0;

        return (j->request->sample.flags & LATENT_SAMPLE_KEEP_STEPS) ? step + 1 : 1;
}

static uint64_t spare_bytes(const latent_job *j, uint32_t step) {
        Slots x;

        return step > 0 && find_slots(j->request, &x) ? count_states(j, step) * x.stride + 2 * LATENT_ALIGNMENT : 0;
}

static latent_tensor place(Arena *spare, uint32_t n_dims, uint64_t n, uint64_t stride) {
        latent_tensor t = {.dtype = "U8", .n_dims = n_dims, .size = n * stride, .shape = {n_dims == 1 ? stride : n, stride}};

        (void) arena_take(spare, t.size, &t.offset); /* spare_bytes() counted it */
        return t;
}

static void pass_states(latent_job *j, char *input) {
        Resume *to = &j->resume;
        Arena *spare = &j->session->spare;
        uint32_t kept = count_states(j, to->step) > 1 ? to->step : 0;
        Slots x;

        if (to->step == 0 || !find_slots(j->request, &x))
                return;

        to->slot = place(spare, 1, 1, x.stride);
        memcpy(input + to->slot.offset, slot_of(j, j->states, &x, to->step), x.stride);
        if (kept == 0)
                return;

        /* Kept states lie one behind the other, that of step 0 first. */
        to->kept = place(spare, 2, kept, x.stride);
        memcpy(input + to->kept.offset, slot_of(j, j->states, &x, 0), kept * x.stride);
}

/* ---- from lost to running ---- */

bool recover_begin(latent_job *j) {
        if (!j->request || !client_can_return(j->client) || !can_be_taken_up(j->session) || !adapters_known(j->request->adapters))
                return false;
        if (j->request->ring_frames > 0) /* what was read of it is gone */
                return false;
        if (committed(j) > j->resume.step)
                j->n_taken_up = 0;
        if (j->n_taken_up >= TAKEN_UP_MAX)
                return false;

        if (!j->lost)
                j->lost_usec = clock_usec();
        j->lost = true;
        return true;
}

static bool is_transient(int r) {
        return r == -ECONNRESET || r == -ENOTCONN || r == -ETIMEDOUT;
}

/* With the model loaded: a new session, and in it the states of all its jobs that are lost. */
static int open_again(latent_session *s, const latent_model *model, latent_error *e) {
        char numerics[128];
        uint64_t spare = 0;
        void *input;
        latent_job *j;
        int r;

        ask_numerics(s->client, model->object.owner, numerics);
        LIST_FOREACH(j, &s->client->jobs, entry) {
                if (!j->lost || j->session != s)
                        continue;
                choose_states(j, numerics);
                spare += spare_bytes(j, j->resume.step);
        }

        r = session_reopen(s, model, spare, &input, e);
        if (r < 0)
                return r;

        LIST_FOREACH(j, &s->client->jobs, entry)
                if (j->lost && j->session == s)
                        pass_states(j, input);
        session_spare_done(s, input);
        return 0;
}

/* 0: *ret is loaded; 1: it is being loaded. */
static int load_again(latent_session *s, ModelSource *source, const char *identity, latent_model **ret, latent_error *e) {
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        int r;

        if (!s->load) {
                r = source_load(s->client, source, &s->load, e);
                return r < 0 ? r : 1;
        }

        r = job_look(s->load, e);
        if (r == 1)
                return 1;
        if (r >= 0)
                r = latent_job_model(s->load, &model, e);
        latent_job_free(STEAL_PTR(s->load));
        if (r >= 0)
                r = model_check_identity(model, identity, "model", e);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(model);
        return 0;
}

static void forget_parts(latent_session *s) {
        for (size_t i = 0; i < SESSION_PARTS; i++)
                latent_model_free(STEAL_PTR(s->parts[i].model));
}

/* 0: the session is open again; 1: its models are being loaded, one after the other. */
static int reopen(latent_session *s, latent_error *e) {
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        int r;

        for (size_t i = 0; i < SESSION_PARTS; i++) {
                SessionPart *p = &s->parts[i];

                if (!p->given)
                        continue;
                /* gone with another service */
                if (p->model && (!s->client->owner || strcmp(p->model->object.owner, s->client->owner) != 0))
                        latent_model_free(STEAL_PTR(p->model));
                r = p->model ? 0 : load_again(s, p->source, p->identity, &p->model, e);
                if (r != 0)
                        return r;
        }

        r = load_again(s, s->source, s->identity, &model, e);
        if (r != 0)
                return r;

        r = open_again(s, model, e);
        forget_parts(s);
        return r;
}

/* The job's adapters, and those that the session has by now. 0: all are in the service that has the session; 1: not yet. */
static int load_adapters(latent_job *j, latent_error *e) {
        latent_session *s = j->session;
        int r, own;

        r = adapters_load(s->adapters, j->client, s->object.owner, e);
        if (r < 0)
                return r;
        own = adapters_load(j->request->adapters, j->client, s->object.owner, e);
        return own < 0 ? own : r | own;
}

/* Where the service is that has the session: the job is sent there. */
static int send_again(latent_job *j, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        latent_session *s = j->session;
        const char *path;
        Object object;
        int r;

        r = request_rewind(j->request);
        if (r < 0)
                return error_errno(e, r, request_doing(j->request));
        r = recover_send(s, j->request, &j->resume, &reply, e);
        if (r < 0)
                return r;
        r = sd_bus_message_read(reply, "o", &path);
        if (r < 0)
                return client_error_message(r, "Starting a job again", e);
        r = object_init(&object, client_sender(s->client, reply), path);
        if (r < 0)
                return error_errno(e, r, "Starting a job again");

        object_done(&j->object);
        j->object = object;
        (void) output_unref(j->output);
        j->output = output_ref(s->output);
        j->before.word = read_word(j->output, j->request);
        j->n_taken_up++;
        j->lost = false;
        job_taken_up(j);
        return 0;
}

/* The session that it waited for is gone as well. */
static int follow_session(latent_job *j) {
        Object object;
        int r;

        r = object_init(&object, j->session->object.owner, j->object.path);
        if (r < 0)
                return r;

        object_done(&j->object);
        j->object = object;
        return 0;
}

void recover_go_on(latent_job *j) {
        latent_session *s = j->session;
        latent_client *c = j->client;
        latent_error e = {};
        int r = 0;

        if (!client_can_return(c)) {
                job_fail_restarted(j);
                return;
        }

        client_ask_start(c);
        r = client_connect_again(c, &e);
        if (r >= 0 && strcmp(s->object.owner, j->object.owner) == 0) {
                r = -ENOTCONN;
                if (c->owner && strcmp(c->owner, j->object.owner) != 0)
                        r = reopen(s, &e);
        }
        if (r == 0 && !j->lost) /* it cannot go on there */
                return;
        if (r == 0) {
                r = load_adapters(j, &e);
                if (r == 0)
                        r = send_again(j, &e);
                if (is_transient(r) && follow_session(j) < 0)
                        r = -ENOMEM;
        }

        if (r >= 0)
                return;
        if (!is_transient(r))
                job_fail(j, &e);
        else if (clock_usec() >= j->lost_usec + c->restart_usec)
                job_fail_restarted(j);
}
