/* SPDX-License-Identifier: Apache-2.0 */
/* Manager.OpenSession and the Session interface (dbus/org.latentd.Latent1.Session.xml). */
#include "service/latentd/session.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/session-request.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/shared/memfd.h"

static int reply_fault(sd_bus_message *message, int r, const Fault *f) {
        CLEANUP(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;

        (void) bus_error_fault(&error, r, f);
        return sd_bus_reply_method_error(message, &error);
}

static int reply_session(sd_bus_message *message, Session *s) {
        CLEANUP_FREE char *path = NULL;
        CLEANUP_CLOSE int input = -EBADF, output = -EBADF;
        int r;

        r = session_path(s, &path);
        if (r < 0)
                return r;

        /* Both re-opened, so that remains.c can tell when the client has let go of them. */
        r = memfd_reopen_read_write(s->input_fd, &input);
        if (r < 0)
                return r;

        r = memfd_reopen_read_only(s->output_fd, &output);
        if (r < 0)
                return r;

        return sd_bus_reply_method_return(message, "ohh", path, input, output);
}

/* The end of OpenSession: this message is answered here and nowhere else. */
static void on_opened(void *userdata, Session *s, const Fault *f) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *message = userdata;
        int r;

        if (!s) {
                /* To a caller that left meanwhile it goes nowhere. */
                (void) reply_fault(message, -EIO, f);
                return;
        }

        r = reply_session(message, s);
        if (r < 0) {
                log_warning_errno(r, "Could not hand out a session");
                (void) reply_fault(message, r, NULL);
                session_close(s);
        }
}

int session_open(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        SessionOptions o;
        Fault f = {};
        Peer *p;
        int r;

        r = peer_of_message(m, message, &p, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_request_open(message, m, p->uid, &o, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_new(m, p, &o, on_opened, message, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        (void) sd_bus_message_ref(message); /* on_opened()'s; never called from inside session_new() */
        return 1;
}

static int submit(sd_bus_message *message, Session *s, const WireJobOpen *request, sd_bus_error *error) {
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(s->manager, message, &p, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_submit(s, p, request, &j, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return job_bus_reply(j, message, error);
}

typedef int (*RequestFn)(sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);

static int run(sd_bus_message *message, Session *s, RequestFn read, sd_bus_error *error) {
        WireJobOpen request;
        Fault f = {};
        int r;

        r = read(message, s, 0, &request, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return submit(message, s, &request, error);
}

static int method_step(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return run(message, userdata, session_request_step, error);
}

static int method_sample(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return run(message, userdata, session_request_sample, error);
}

static int method_tokenize(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return run(message, userdata, session_request_tokenize, error);
}

static int method_encode(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        RenderOptions files = { .file = -EBADF, .sheet = -EBADF };
        Session *s = userdata;
        WireJobOpen request;
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = session_request_encode_files(message, s, 0, &request, &files, &f);
        if (r >= 0 && files.n_pictures == 0)
                return submit(message, s, &request, error);
        if (r >= 0)
                r = peer_of_message(s->manager, message, &p, &f);
        if (r >= 0)
                r = render_new_encode(s, p, &files, &j, &f);
        if (r < 0) {
                render_options_done(&files);
                return bus_error_fault(error, r, &f);
        }

        return job_bus_reply(j, message, error);
}

static int method_encode_media(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return run(message, userdata, session_request_encode_media, error);
}

static int method_decode(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return run(message, userdata, session_request_decode, error);
}

static int method_render(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Session *s = userdata;
        RenderOptions o = { .file = -EBADF, .sheet = -EBADF };
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(s->manager, message, &p, &f);
        if (r >= 0)
                r = session_request_render(message, s, 0, &o, &f);
        if (r >= 0)
                r = render_new(s, p, &o, &j, &f);
        if (r < 0) {
                render_options_done(&o);
                return bus_error_fault(error, r, &f);
        }

        return job_bus_reply(j, message, error);
}

static int method_close(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        session_close(userdata);
        return sd_bus_reply_method_return(message, NULL);
}

static int property_get_model(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        CLEANUP_FREE char *model = NULL;
        const Session *s = userdata;
        int r;

        r = model_path(s->model, &model);
        if (r < 0)
                return r;

        return sd_bus_message_append(reply, "o", model);
}

/* "/": not given. */
static int property_get_part(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        CLEANUP_FREE char *name = NULL;
        const Model *model = *(Model *const *) userdata;
        int r;

        if (!model)
                return sd_bus_message_append(reply, "o", "/");

        r = model_path(model, &name);
        if (r < 0)
                return r;

        return sd_bus_message_append(reply, "o", name);
}

static int property_get_compute(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                                void *userdata, sd_bus_error *error) {
        const Session *s = userdata;

        return sd_bus_message_append(reply, "s", session_compute_to_string(s->compute));
}

static int property_get_class(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        const Session *s = userdata;

        return sd_bus_message_append(reply, "s", s->job_class);
}

static int property_get_jobs(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Session *s = userdata;
        Job *j;
        int r;

        r = sd_bus_message_open_container(reply, 'a', "o");
        if (r < 0)
                return r;

        TAILQ_FOREACH(j, &s->manager->jobs, entry) {
                CLEANUP_FREE char *job = NULL;

                if (j->session != s || j->hidden)
                        continue;

                r = job_path(j, &job);
                if (r < 0)
                        return r;

                r = sd_bus_message_append(reply, "o", job);
                if (r < 0)
                        return r;
        }

        return sd_bus_message_close_container(reply);
}

#define JOB_METHOD(name, handler) \
        SD_BUS_METHOD_WITH_ARGS(name, SD_BUS_ARGS("a{sv}", request), SD_BUS_RESULT("o", job), handler, SD_BUS_VTABLE_UNPRIVILEGED)

static const sd_bus_vtable session_vtable[] = {
        SD_BUS_VTABLE_START(0),
        JOB_METHOD("Step", method_step),
        JOB_METHOD("Sample", method_sample),
        JOB_METHOD("Tokenize", method_tokenize),
        JOB_METHOD("Encode", method_encode),
        JOB_METHOD("EncodeMedia", method_encode_media),
        JOB_METHOD("Decode", method_decode),
        JOB_METHOD("Render", method_render),
        SD_BUS_METHOD_WITH_ARGS("Plan", SD_BUS_ARGS("s", kind, "a{sv}", request), SD_BUS_RESULT("a{sv}", plan),
                                session_method_plan, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("SetLoras", SD_BUS_ARGS("a(od)", loras, "a{sv}", options), SD_BUS_RESULT("o", job),
                                session_method_set_loras, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD("Close", NULL, NULL, method_close, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_PROPERTY("Model", "o", property_get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Conditioner", "o", property_get_part, offsetof(Session, conditioner), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("VideoVae", "o", property_get_part, offsetof(Session, video_vae), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("AudioVae", "o", property_get_part, offsetof(Session, audio_vae), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Compute", "s", property_get_compute, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Ranks", "u", NULL, offsetof(Session, split.ranks), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Class", "s", property_get_class, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("InputBytes", "t", NULL, offsetof(Session, input_bytes), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("OutputBytes", "t", NULL, offsetof(Session, output_bytes), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Loras", "a(od)", session_property_loras, 0, 0),
        SD_BUS_PROPERTY("Jobs", "ao", property_get_jobs, 0, 0),
        SD_BUS_VTABLE_END
};

/* Objects of other users do not exist for the caller. */
static int find_session(sd_bus *bus, const char *path, const char *interface, void *userdata, void **ret_found, sd_bus_error *error) {
        Manager *m = userdata;
        uint64_t id;
        Session *s;
        Peer *p;

        if (bus_path_id(path, BUS_ROOT "/session/", &id) < 0)
                return 0;

        p = peer_of_call(m, bus);
        s = p ? session_find(m, id) : NULL;
        if (!s || s->uid != p->uid)
                return 0;

        *ret_found = s;
        return 1;
}

int session_bus_register(Manager *m, sd_bus *bus) {
        return sd_bus_add_fallback_vtable(bus, NULL, BUS_ROOT "/session", BUS_INTERFACE("Session"), session_vtable, find_session, m);
}
