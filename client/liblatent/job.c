/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/job.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/model.h"
#include "client/liblatent/session.h"
#include "client/liblatent/value.h"
#include "service/shared/clock.h"

_Static_assert(sizeof(latent_progress) == 80, "public layout changed: add fields, never alter");
#define PROGRESS_SIZE_V1 72u

/* Without news for this long we ask for the state: a signal may have been lost. */
#define SILENCE_USEC CLOCK_USEC_PER_SEC

/* How often a lost job looks whether something can be done for it. */
#define RECOVER_USEC (CLOCK_USEC_PER_SEC / 20)

static const char *const job_states[] = {
        [LATENT_JOB_QUEUED] = "queued",
        [LATENT_JOB_RUNNING] = "running",
        [LATENT_JOB_CANCELLING] = "cancelling",
        [LATENT_JOB_DONE] = "done",
        [LATENT_JOB_FAILED] = "failed",
        [LATENT_JOB_CANCELLED] = "cancelled",
};

static bool job_is_finished(const latent_job *j) {
        return j->progress.state >= LATENT_JOB_DONE;
}

static int job_state_from_string(const char *s) {
        for (size_t i = 0; s && i < ELEMENTSOF(job_states); i++)
                if (strcmp(job_states[i], s) == 0)
                        return (int) i;

        return -EINVAL;
}

LATENT_PUBLIC void latent_job_free(latent_job *job) {
        if (!job)
                return;

        if (job->object.path)
                LIST_REMOVE(job, entry);
        object_done(&job->object);
        latent_value_free(job->result);
        latent_value_free(job->places);
        latent_value_free(job->preview);
        (void) request_free(job->request);
        (void) source_unref(job->source);
        (void) output_unref(job->output);
        (void) output_unref(job->states);
        session_unref(job->session);
        client_unref(job->client);
        free(job);
}

DEFINE_CLEANUP(latent_job *, latent_job_free)

int job_new_from_reply(latent_client *c, latent_session *session, sd_bus_message *reply, latent_job **ret,
        latent_error *e) {
        CLEANUP(latent_job_freep) latent_job *j = NULL;
        const char *path;
        int r;

        r = sd_bus_message_read(reply, "o", &path);
        if (r < 0)
                return client_error_message(r, "Starting a job", e);

        j = calloc(1, sizeof(*j));
        if (!j)
                return error_errno(e, -ENOMEM, "Starting a job");
        j->client = client_ref(c);
        if (session) {
                j->session = session_ref(session);
                j->output = output_ref(session->output);
        }
        j->progress.struct_size = sizeof(j->progress);
        j->heard_usec = clock_usec();

        r = object_init(&j->object, client_sender(c, reply), path);
        if (r < 0)
                return error_errno(e, r, "Starting a job");
        LIST_INSERT_HEAD(&c->jobs, j, entry);

        *ret = STEAL_PTR(j);
        return 0;
}

static void job_set_failed(latent_job *j, int state, const char *name, const char *text) {
        if (name[0] == '\0')
                name = state == LATENT_JOB_CANCELLED ? LATENT_ERROR_CANCELLED : LATENT_ERROR_INTERNAL;
        if (text[0] == '\0')
                text = state == LATENT_JOB_CANCELLED ? "The job was cancelled."
                                                     : "The job failed; the service gave no reason.";

        (void) error_set(&j->error, error_code(name), name, "%s", text);
        j->progress.state = (uint32_t) state;
        j->progress.eta_usec = 0;
        j->is_news = true;
}

/* Takes result over. */
static void job_set_done(latent_job *j, latent_value *result) {
        latent_value_free(j->result);
        j->states = output_unref(j->states);
        j->result = result;
        (void) latent_value_as_uint(latent_value_get(result, "frames"), &j->frames);
        j->progress.state = LATENT_JOB_DONE;
        j->progress.fraction = 1;
        j->progress.eta_usec = 0;
        j->is_news = true;
}

/* What a job that failed leaves all the same: tensors. Takes result over. */
static void job_set_left(latent_job *j, latent_value *result) {
        if (!latent_value_get(result, "tensors")) {
                latent_value_free(result);
                return;
        }

        latent_value_free(j->result);
        j->result = result;
}

static void job_set_phase(latent_job *j, const char *phase) {
        (void) snprintf(j->progress.phase, sizeof(j->progress.phase), "%s", phase);
}

static void job_on_progress(latent_job *j, sd_bus_message *m) {
        uint32_t step, steps, block, blocks;
        const char *phase;
        double fraction;
        uint64_t eta;

        if (sd_bus_message_read(m, "suuuudt", &phase, &step, &steps, &block, &blocks, &fraction, &eta) < 0)
                return;

        job_set_phase(j, phase);
        j->progress.step = step;
        j->progress.steps = steps;
        j->progress.block = block;
        j->progress.blocks = blocks;
        j->progress.fraction = fraction >= 0 && fraction <= 1 ? fraction : 0;
        j->progress.eta_usec = eta;
        if (j->progress.state == LATENT_JOB_QUEUED)
                j->progress.state = LATENT_JOB_RUNNING;
        j->is_news = true;
}

static void job_on_preview(latent_job *j, sd_bus_message *m) {
        uint32_t step;

        if (sd_bus_message_read(m, "u", &step) < 0)
                return;

        j->progress.preview = step;
        j->is_news = true;
}

/* In order; those that were told of twice count once. */
static void job_on_frames(latent_job *j, sd_bus_message *m) {
        uint64_t first, count, end;

        if (sd_bus_message_read(m, "tt", &first, &count) < 0 || first > j->frames || __builtin_add_overflow(first, count, &end))
                return;
        if (end > j->frames)
                j->frames = end;
}

void job_fail(latent_job *j, const latent_error *e) {
        j->lost = false;
        job_set_failed(j, LATENT_JOB_FAILED, e->name, e->text);
}

void job_fail_restarted(latent_job *j) {
        j->lost = false;
        job_set_failed(j, LATENT_JOB_FAILED, LATENT_ERROR_RESTARTED,
                "The service went away during the job (it stopped, crashed or was restarted, or this client "
                "was closed). Open a session again and repeat the job.");
}

void job_taken_up(latent_job *j) {
        job_set_phase(j, "queue");
        j->frames = 0;
        latent_value_free(STEAL_PTR(j->places));
        latent_value_free(STEAL_PTR(j->preview));
        j->progress.preview = 0;
        j->progress.state = LATENT_JOB_QUEUED;
        j->heard_usec = clock_usec();
        j->is_news = true;
}

/* Its service is gone: it waits for the next, or ends. */
static void job_lose(latent_job *j) {
        if (j->cancel_asked) {
                j->lost = false;
                job_set_failed(j, LATENT_JOB_CANCELLED, "", "");
        } else if (recover_begin(j)) {
                job_set_phase(j, "restart");
                j->is_news = true;
        } else
                job_fail_restarted(j);
}

static void job_on_finished(latent_job *j, sd_bus_message *m) {
        CLEANUP(latent_value_freep) latent_value *result = NULL;
        const char *state_name, *name, *text;
        int state;

        if (!sd_bus_message_has_signature(m, "sssa{sv}") ||
                sd_bus_message_read(m, "sss", &state_name, &name, &text) < 0 || value_read(m, &result) < 0) {
                job_set_failed(j, LATENT_JOB_FAILED, LATENT_ERROR_INTERNAL,
                        "The end of the job could not be understood. Are liblatent and latentd of one "
                        "version?");
                return;
        }

        state = job_state_from_string(state_name);
        if (state == LATENT_JOB_DONE)
                job_set_done(j, STEAL_PTR(result));
        else if (strcmp(name, LATENT_ERROR_RESTARTED) == 0) {
                j->client->said_goodbye = true;
                job_lose(j);
        } else {
                job_set_failed(j, state == LATENT_JOB_CANCELLED ? state : LATENT_JOB_FAILED, name, text);
                job_set_left(j, STEAL_PTR(result));
        }
}

void job_on_signal(latent_client *c, sd_bus_message *m) {
        const char *path = sd_bus_message_get_path(m), *sender = client_sender(c, m);
        latent_job *j, *next;

        if (!path || !sd_bus_message_is_signal(m, BUS_INTERFACE("Job"), NULL))
                return;

        for (j = LIST_FIRST(&c->jobs); j; j = next) {
                next = LIST_NEXT(j, entry);

                /* Anybody on the bus may send us a signal: only the service that made the job is believed.
                 */
                if (job_is_finished(j) || strcmp(j->object.path, path) != 0 ||
                        (j->object.owner && (!sender || strcmp(j->object.owner, sender) != 0)))
                        continue;

                (void) sd_bus_message_rewind(m, true);
                j->heard_usec = clock_usec();
                if (strcmp(sd_bus_message_get_member(m), "Progress") == 0)
                        job_on_progress(j, m);
                else if (strcmp(sd_bus_message_get_member(m), "FramesReady") == 0)
                        job_on_frames(j, m);
                else if (strcmp(sd_bus_message_get_member(m), "PreviewReady") == 0)
                        job_on_preview(j, m);
                else if (strcmp(sd_bus_message_get_member(m), "Finished") == 0)
                        job_on_finished(j, m);
        }
        (void) sd_bus_message_rewind(m, true);
}

void job_on_service_gone(latent_client *c, const char *owner) {
        latent_job *j;

        LIST_FOREACH(j, &c->jobs, entry) {
                if (job_is_finished(j))
                        continue;
                if (owner && j->object.owner && strcmp(owner, j->object.owner) != 0)
                        continue;
                if (!j->lost)
                        job_lose(j);
                else if (!client_can_return(c))
                        job_fail_restarted(j);
        }
}

static uint32_t get_u32(const latent_value *v, const char *key) {
        uint64_t u = 0;

        (void) latent_value_as_uint(latent_value_get(v, key), &u);
        return u <= UINT32_MAX ? (uint32_t) u : UINT32_MAX;
}

static void job_take_progress(latent_job *j, const latent_value *v, int state) {
        const char *phase = latent_value_as_string(latent_value_get(v, "Phase"));

        job_set_phase(j, phase ? phase : "");
        j->progress.state = (uint32_t) state;
        j->progress.step = get_u32(v, "Step");
        j->progress.steps = get_u32(v, "Steps");
        j->progress.block = get_u32(v, "Block");
        j->progress.blocks = get_u32(v, "Blocks");
        (void) latent_value_as_double(latent_value_get(v, "Fraction"), &j->progress.fraction);
        (void) latent_value_as_uint(latent_value_get(v, "EtaUsec"), &j->progress.eta_usec);
        j->is_news = true;
}

/* A deep copy is not needed elsewhere: reads the one property again as a tree of its own. */
static int job_read_result(latent_job *j, latent_value **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = client_message(
                j->client, j->object.owner, j->object.path, "org.freedesktop.DBus.Properties", "Get", &m, e);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "ss", BUS_INTERFACE("Job"), "Result");
        if (r < 0)
                return client_error_message(r, "Reading the result", e);
        r = client_call(j->client, m, "Reading the result", &reply, e);
        if (r < 0)
                return r;

        r = value_read(reply, ret);
        return r < 0 ? client_error_message(r, "Reading the result", e) : 0;
}

/* Asks the service how the job stands. A service that is gone ends the job here; other failures are the
 * caller's. */
static int job_refresh(latent_job *j, latent_error *e) {
        CLEANUP(latent_value_freep) latent_value *v = NULL, *result = NULL;
        latent_error own;
        const char *name, *text;
        int r, state;

        r = client_properties(j->client, j->object.owner, j->object.path, BUS_INTERFACE("Job"),
                "Asking for the job's state", &v, &own);
        if (r >= 0 && !job_is_finished(j)) {
                state = job_state_from_string(latent_value_as_string(latent_value_get(v, "State")));
                if (state < 0)
                        r = client_error_message(-EBADMSG, "Asking for the job's state", &own);
                else if (state < LATENT_JOB_DONE)
                        job_take_progress(j, v, state);
                else if (state == LATENT_JOB_DONE) {
                        r = job_read_result(j, &result, &own);
                        if (r >= 0)
                                job_set_done(j, STEAL_PTR(result));
                } else {
                        name = latent_value_as_string(latent_value_at(latent_value_get(v, "Error"), 0));
                        text = latent_value_as_string(latent_value_at(latent_value_get(v, "Error"), 1));
                        job_set_failed(j, state, name ? name : "", text ? text : "");
                        if (job_read_result(j, &result, &own) >= 0) /* else it is the failure that counts */
                                job_set_left(j, STEAL_PTR(result));
                }
        }
        j->heard_usec = clock_usec();
        if (r >= 0)
                return 0;

        if (r == -ECONNRESET && recover_begin(j)) {
                job_lose(j);
                return 0;
        }
        if (r == -ECONNRESET || r == -ENOENT) {
                job_set_failed(j, LATENT_JOB_FAILED, own.name, own.text);
                return 0;
        }
        if (e)
                *e = own;
        return r;
}

static int job_outcome(const latent_job *j, latent_error *e) {
        if (j->progress.state == LATENT_JOB_DONE)
                return 0;
        if (e)
                *e = j->error;
        return j->error.code;
}

static uint64_t add_saturating(uint64_t a, uint64_t b) {
        uint64_t v;

        return __builtin_add_overflow(a, b, &v) ? UINT64_MAX : v;
}

/* Blocks until something arrives, `until` or the time to ask. */
static void job_sleep(latent_job *j, uint64_t until) {
        uint64_t now = clock_usec(), ask = j->lost ? now + RECOVER_USEC : add_saturating(j->heard_usec, SILENCE_USEC);

        if (ask < until)
                until = ask;
        if (until <= now)
                return;
        if (j->client->bus)
                (void) sd_bus_wait(
                        j->client->bus, until - now); /* an error shows again in client_dispatch() */
        else
                (void) poll(NULL, 0, (int) ((until - now) / 1000) + 1); /* lost: not for long */
}

/* A signal may have been lost. */
static int job_ask(latent_job *j, latent_error *e) {
        if (job_is_finished(j) || j->lost || clock_usec() < add_saturating(j->heard_usec, SILENCE_USEC))
                return 0;

        return job_refresh(j, e);
}

int job_look(latent_job *j, latent_error *e) {
        int r;

        r = job_ask(j, e);
        if (r < 0)
                return r;

        return job_is_finished(j) ? job_outcome(j, e) : 1;
}

/* As latent_job_wait(); 0 also when there are more frames than `known`. */
static int job_wait(latent_job *job, uint64_t known, uint64_t timeout_usec, latent_progress_fn progress, void *userdata,
        latent_error *error) {
        uint64_t deadline = add_saturating(clock_usec(), timeout_usec);
        latent_error own;
        int r;

        for (;;) {
                /* A connection that is lost ends the job, which says more than the failure here, or begins its recovery. */
                if (!job_is_finished(job)) {
                        r = client_dispatch(job->client, &own);
                        if (r < 0 && !job_is_finished(job) && !job->lost) {
                                if (error)
                                        *error = own;
                                return r;
                        }
                }

                if (job->lost)
                        recover_go_on(job);
                r = job_ask(job, error);
                if (r < 0)
                        return r;

                if (job->is_news && progress) {
                        job->is_news = false;
                        progress(&job->progress, userdata);
                }

                if (job_is_finished(job))
                        return job_outcome(job, error);
                if (job->frames > known)
                        return 0;
                if (clock_usec() >= deadline)
                        return 1;

                job_sleep(job, deadline);
        }
}

LATENT_PUBLIC int latent_job_wait(latent_job *job, uint64_t timeout_usec, latent_progress_fn progress,
        void *userdata, latent_error *error) {
        return job_wait(job, UINT64_MAX, timeout_usec, progress, userdata, error);
}

LATENT_PUBLIC int latent_job_frames_ready(latent_job *job, uint64_t known, uint64_t timeout_usec, latent_progress_fn progress,
        void *userdata, uint64_t *ret_frames, latent_error *error) {
        int r;

        if (!job->request || !request_makes_frames(job->request))
                return error_set(error, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "The job makes no frames: expected a decode or render.");

        r = job_wait(job, known, timeout_usec, progress, userdata, error);
        if (r != 0)
                return r;

        if (!job_is_finished(job) && !job->places) {
                r = job_read_result(job, &job->places, error);
                if (r < 0)
                        return r;
        }

        *ret_frames = job->frames;
        return 0;
}

LATENT_PUBLIC int latent_job_release_frames(latent_job *job, uint64_t up_to, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        if (!job->request || !request_makes_frames(job->request) || up_to > job->frames)
                return error_set(error, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%llu frames cannot be released: the job has made %llu of them so far.", (unsigned long long) up_to,
                        (unsigned long long) job->frames);
        if (job_is_finished(job) || job->lost || job->request->ring_frames == 0)
                return 0;

        r = client_message(job->client, job->object.owner, job->object.path, BUS_INTERFACE("Job"), "ReleaseFrames", &m, error);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "t", up_to);
        if (r < 0)
                return client_error_message(r, "Releasing frames", error);

        return client_call(job->client, m, "Releasing frames", NULL, error);
}

LATENT_PUBLIC int latent_job_progress(const latent_job *job, latent_progress *ret_progress) {
        uint32_t n = ret_progress->struct_size;

        if (n < PROGRESS_SIZE_V1)
                return -EINVAL;

        /* What a newer caller has more stays as it set it: zero. */
        if (n > sizeof(job->progress))
                n = sizeof(job->progress);
        memcpy(ret_progress, &job->progress, n);
        ret_progress->struct_size = n;
        return 0;
}

LATENT_PUBLIC int latent_job_cancel(latent_job *job, latent_error *error) {
        if (job_is_finished(job))
                return 0;

        job->cancel_asked = true;
        if (job->lost) {
                job_lose(job);
                return 0;
        }

        return client_call_simple(
                job->client, &job->object, BUS_INTERFACE("Job"), "Cancel", "Cancelling a job", error);
}

LATENT_PUBLIC const char *latent_job_path(const latent_job *job) {
        return job->object.path;
}

LATENT_PUBLIC int latent_job_properties(latent_job *job, latent_value **ret_value, latent_error *error) {
        return client_properties(job->client, job->object.owner, job->object.path, BUS_INTERFACE("Job"),
                "Asking for the job's properties", ret_value, error);
}

LATENT_PUBLIC const latent_value *latent_job_result(const latent_job *job) {
        return job->result ? job->result : job->places;
}

LATENT_PUBLIC int latent_job_model(latent_job *job, latent_model **ret_model, latent_error *error) {
        const char *path = latent_value_as_string(latent_value_get(job->result, "model"));

        if (!path)
                return error_set(error, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "The job has no model to give: expected a load that is done.");

        return model_new(job->client, job->object.owner, path, job->source, ret_model, error);
}

static const latent_value *job_tensors(const latent_job *j) {
        return latent_value_get(latent_job_result(j), "tensors");
}

LATENT_PUBLIC const char *latent_job_tensor_name(const latent_job *job, size_t index) {
        return latent_value_as_string(latent_value_at(latent_value_at(job_tensors(job), index), 0));
}

/* (name, offset, type, shape) as the bus has it. */
static int tensor_from_value(const latent_value *v, latent_tensor *ret) {
        const latent_value *shape = latent_value_at(v, 3);
        const char *dtype = latent_value_as_string(latent_value_at(v, 2));
        latent_tensor t = {};
        int r;

        if (!dtype || strlen(dtype) >= sizeof(t.dtype) || latent_value_count(shape) > LATENT_DIMS_MAX)
                return -EBADMSG;
        (void) snprintf(t.dtype, sizeof(t.dtype), "%s", dtype);

        r = latent_value_as_uint(latent_value_at(v, 1), &t.offset);
        for (size_t i = 0; r >= 0 && i < latent_value_count(shape); i++)
                r = latent_value_as_uint(latent_value_at(shape, i), &t.shape[t.n_dims++]);
        if (r < 0)
                return -EBADMSG;

        r = tensor_size(&t, &t.size);
        if (r < 0)
                return r;

        *ret = t;
        return 0;
}

static int find_tensor(const latent_job *job, const latent_value *list, const char *name, latent_tensor *ret_tensor,
        const void **ret_data, latent_error *error) {
        const void *data;
        latent_tensor t;

        for (size_t i = 0; i < latent_value_count(list); i++) {
                const latent_value *v = latent_value_at(list, i);
                const char *s = latent_value_as_string(latent_value_at(v, 0));

                if (!s || strcmp(s, name) != 0)
                        continue;

                data = tensor_from_value(v, &t) < 0 || !job->output ? NULL : output_at(job->output, t.offset, t.size);
                if (!data)
                        return error_set(error, -EPROTO, LATENT_ERROR_INTERNAL,
                                "The service gave a place for the result %s that is not in the output "
                                "arena.",
                                name);
                *ret_tensor = t;
                *ret_data = data;
                return 0;
        }

        return error_set(error, -ENOENT, LATENT_ERROR_NOT_FOUND, "The job has no result called %s%s.", name,
                job->progress.state == LATENT_JOB_DONE ? "" : ": it is not done");
}

LATENT_PUBLIC int latent_job_tensor(const latent_job *job, const char *name, latent_tensor *ret_tensor,
        const void **ret_data, latent_error *error) {
        return find_tensor(job, job_tensors(job), name, ret_tensor, ret_data, error);
}

LATENT_PUBLIC int latent_job_preview(
        latent_job *job, latent_tensor *ret_tensor, const void **ret_data, latent_error *error) {
        int r;

        if (job->progress.state == LATENT_JOB_DONE)
                return latent_job_tensor(job, "preview", ret_tensor, ret_data, error);

        if (!job->preview && job->progress.preview > 0 && !job->lost) {
                r = job_read_result(job, &job->preview, error);
                if (r < 0)
                        return r;
        }

        return find_tensor(job, latent_value_get(job->preview, "tensors"), "preview", ret_tensor, ret_data, error);
}
