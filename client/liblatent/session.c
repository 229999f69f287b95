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
#include "client/liblatent/request.h"
#include "service/shared/memfd.h"

_Static_assert(sizeof(latent_session_options) == 40, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_step_options) == 80, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_sample_options) == 120, "public layout changed: add fields, never alter");
#define SESSION_OPTIONS_SIZE_V1 40u
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
        if (s->output)
                (void) munmap(s->output, s->output_bytes);
        object_done(&s->object);
        (void) client_unref(s->client);
        free(s);
        return NULL;
}

DEFINE_CLEANUP(latent_session *, latent_session_free)

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

static int session_take_reply(
        latent_session *s, sd_bus_message *reply, const latent_session_options *o, latent_error *e) {
        int r, input_fd, output_fd; /* both belong to the message */
        const char *path;

        r = sd_bus_message_read(reply, "ohh", &path, &input_fd, &output_fd);
        if (r < 0)
                return client_error_message(r, "Opening a session", e);
        r = object_init(&s->object, sd_bus_message_get_sender(reply), path);
        if (r < 0)
                return error_errno(e, r, "Opening a session");

        r = map_arena(input_fd, o->input_bytes, PROT_READ | PROT_WRITE, &s->input, &s->input_bytes);
        if (r >= 0)
                r = map_arena(output_fd, o->output_bytes, PROT_READ, &s->output, &s->output_bytes);
        if (r < 0)
                return error_set(e, r, LATENT_ERROR_INTERNAL,
                        "The session's shared memory cannot be used: %s.", strerror(-r));

        s->arena = (Arena){.size = s->input_bytes};
        return 0;
}

static int append_session_options(
        sd_bus_message *m, const latent_model *model, const latent_session_options *o) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}", "model", "o", model->object.path);
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
                r = sd_bus_message_close_container(m);

        return r;
}

LATENT_PUBLIC int latent_session_open(latent_client *client, latent_model *model,
        const latent_session_options *options, latent_session **ret_session, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        CLEANUP(latent_session_freep) latent_session *s = NULL;
        latent_session_options o;
        int r;

        r = options_read(options, SESSION_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return error_errno(error, -ENOMEM, "Opening a session");
        s->n_ref = 1;
        s->client = client_ref(client);

        r = client_message(
                client, model->object.owner, BUS_ROOT, BUS_INTERFACE("Manager"), "OpenSession", &m, error);
        if (r < 0)
                return r;
        r = append_session_options(m, model, &o);
        if (r < 0)
                return client_error_message(r, "Opening a session", error);
        r = client_call(client, m, "Opening a session", &reply, error);
        if (r < 0)
                return r;
        r = session_take_reply(s, reply, &o, error);
        if (r < 0)
                return r;

        *ret_session = STEAL_PTR(s);
        return 0;
}

LATENT_PUBLIC const char *latent_session_path(const latent_session *session) {
        return session->object.path;
}

LATENT_PUBLIC void *latent_session_input(latent_session *session) {
        return session->input;
}

LATENT_PUBLIC const void *latent_session_output(const latent_session *session) {
        return session->output;
}

LATENT_PUBLIC uint64_t latent_session_input_bytes(const latent_session *session) {
        return session->input_bytes;
}

LATENT_PUBLIC uint64_t latent_session_output_bytes(const latent_session *session) {
        return session->output_bytes;
}

const void *session_output_at(const latent_session *s, uint64_t offset, uint64_t size) {
        if (offset > s->output_bytes || size > s->output_bytes - offset)
                return NULL;

        return (const uint8_t *) s->output + offset;
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

/* What step and sample have in common. */
static int session_start(
        latent_session *s, sd_bus_message *m, const char *doing, latent_job **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        int r;

        r = client_call(s->client, m, doing, &reply, e);
        if (r < 0)
                return r;

        return job_new_from_reply(s->client, s, reply, ret, e);
}

LATENT_PUBLIC int latent_session_step(latent_session *session, const latent_step_options *options,
        latent_job **ret_job, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        latent_step_options o;
        int r;

        r = options_read(options, STEP_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = client_message(session->client, session->object.owner, session->object.path,
                BUS_INTERFACE("Session"), "Step", &m, error);
        if (r < 0)
                return r;
        r = request_append_step(m, &o);
        if (r < 0)
                return client_error_message(r, "Starting a step", error);

        return session_start(session, m, "Starting a step", ret_job, error);
}

LATENT_PUBLIC int latent_session_sample(latent_session *session, const latent_sample_options *options,
        latent_job **ret_job, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        latent_sample_options o;
        int r;

        r = options_read(options, SAMPLE_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        if (o.flags & ~(uint32_t) LATENT_SAMPLE_KEEP_STEPS)
                return error_set(error, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                        "Unknown flags %#x; expected LATENT_SAMPLE_*.", o.flags);
        r = client_message(session->client, session->object.owner, session->object.path,
                BUS_INTERFACE("Session"), "Sample", &m, error);
        if (r < 0)
                return r;
        r = request_append_sample(m, &o);
        if (r < 0)
                return client_error_message(r, "Starting a trajectory", error);

        return session_start(session, m, "Starting a trajectory", ret_job, error);
}
