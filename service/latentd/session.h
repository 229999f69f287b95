/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A client's session on a model: two arenas and their jobs. */

#include <stdatomic.h>

#include "service/latentd/lora.h"
#include "service/latentd/manager.h"
#include "service/latentd/plan.h"

#define RING_JOBS_MAX 8u /* unfinished Decode jobs with a ring, per user */

typedef enum SessionState {
        SESSION_OPENING, /* its arenas are being populated */
        SESSION_OPEN,
        SESSION_CLOSED, /* gone for the client; a step still runs in it */
} SessionState;

typedef enum SessionForm {
        SESSION_CLIENT,
        SESSION_WORK,  /* one arena of the service that is input and output, for what no client reads; no object on the bus */
        SESSION_ALIAS, /* the input of one session and the output of another, for a phase of a Render; likewise */
} SessionForm;

/* Once per session_new() that succeeded: s is open and counted, or NULL and f says why not (also when its
 * owner left meanwhile). */
typedef void (*SessionOpenFn)(void *userdata, Session *s, const Fault *f);

struct Session {
        uint64_t id;
        Manager *manager;
        SessionState state;
        SessionForm form;
        Peer *owner; /* NULL once it left, and of those without an object */
        uid_t uid;
        Model *model; /* counted user; ALIAS and WORK: NULL */
        /* For Render, counted users too; NULL: not given */
        Model *conditioner, *video_vae, *audio_vae;
        Session *from, *to; /* ALIAS: busy as long as it is there */
        LoraList loras;    /* of SetLoras, held: later jobs get them */
        uint64_t merge_job; /* of that SetLoras */
        Fault lora_fault;   /* of that merge, if it failed: later requests fail with it */
        WireCompute compute;
        PlanWishes split;
        SparseOptions sparse; /* of its steps */
        char job_class[16];
        uint64_t input_bytes, output_bytes;
        int input_fd, output_fd;
        Remains *remains; /* what becomes of them, so that closing needs no memory */
        void *output_map;     /* read-only: the broker reads commit words through it */
        uint64_t arena_epoch; /* worker_link_epoch() of the worker that has the arenas */
        atomic_bool unwanted; /* it was closed: the populating ends early */
        bool bare;            /* nothing will be written to it: it is not populated */
        unsigned n_busy;      /* unfinished jobs, and the populating */

        /* queue.c: the last JOB_OPEN that the worker of this epoch answered, and how; 0: none */
        uint64_t known_epoch;
        WireJobOpen known_request;
        WireJobReady known_ready;
        int populate_result;
        SessionOpenFn open_fn;
        void *open_userdata;
        TAILQ_ENTRY(Session) entry; /* in the list in all states, so that quotas see its memory */
};

typedef struct SessionOptions {
        Model *model;                       /* MODEL_READY */
        Model *conditioner, *video_vae, *audio_vae; /* likewise, or NULL */
        uint64_t input_bytes, output_bytes; /* multiples of the page size */
        WireCompute compute;
        PlanWishes split;
        SparseOptions sparse;
        const char *job_class;
} SessionOptions;

/* Checks quota and memory (LimitExceeded, DoesNotFit with the numbers), makes the arenas and has them
 * populated on the pool. fn is called later, never from inside. */
int session_new(
        Manager *m, Peer *owner, const SessionOptions *o, SessionOpenFn fn, void *userdata, Fault *f);

/* An arena of so many bytes (a multiple of the page size) for the jobs of a Render, which counts for the user like a session's; its
 * content is zeros. bare: of a plan, which is counted like any other, but whose pages, to which next to nothing is written, are not
 * made. As session_new(), and *ret is there at once: session_forget() for whoever does not want to wait. */
int session_new_work(Manager *m, uid_t uid, uint64_t bytes, bool bare, SessionOpenFn fn, void *userdata, Session **ret, Fault *f);
/* A session whose jobs read the input arena of `from`, or with from_output its output arena, and write to the output arena of `to`. */
int session_new_alias(Session *from, Session *to, bool from_output, Session **ret);
/* session_close() of either; fn is not called any more. */
void session_forget(Session *s);
/* Memory of its arenas. */
uint64_t session_bytes(const Session *s);
/* For a client the session counts as a user of the model. */
bool session_uses(const Session *s, const Model *m);

/* NULL unless it is a client's and SESSION_OPEN. */
Session *session_find(Manager *m, uint64_t id);
int session_path(const Session *s, char **ret); /* malloc'ed object path */

/* Checks a request's places against the arenas: inputs inside the input arena and aligned to their elements
 * (InvalidTensor), the output range inside the output arena (InvalidArgument) and not one that an unfinished
 * job of the session may still write (Busy; not for WIRE_JOB_PLAN_ONLY, which writes nothing). A tensor that
 * is not there has n_dims 0 and size 0. */
int session_check_request(const Session *s, const WireJobOpen *request, Fault *f);

/* The inputs alone. */
int session_check_inputs(const Session *s, const WireJobOpen *request, Fault *f);

/* InvalidArgument unless the session's model is of a kind for this job (WireJobKind), in words. */
int session_check_kind(const Session *s, WireJobKind kind, Fault *f);

/* Makes a job of it and queues it: any but a MERGE, or with WIRE_JOB_PLAN_ONLY a plan. request is complete
 * but for header, model, session, loras, ranks and owner. LimitExceeded; the fault of the session's last merge, if it failed. */
int session_submit(Session *s, Peer *owner, const WireJobOpen *request, Job **ret, Fault *f);

/* A hidden job on this model for a Render. request is complete as for session_submit(), and its places were made by us. */
int session_submit_hidden(Session *s, Model *model, const WireJobOpen *request, const LoraList *loras, Render *render, Job **ret);
/* LimitExceeded if the user has as many jobs that wait for a reader of frames as there may be. */
int session_check_rings(const Session *s, Fault *f);

/* These adapters for later jobs, and a job that merges them. On failure the session keeps what it had. */
int session_set_loras(
        Session *s, Peer *owner, const LoraList *loras, WireCompute compute, Job **ret, Fault *f);
void session_merge_finished(Session *s, const Job *j);

/* Cancels its jobs at once for the client, waits for none of them: arenas live until the worker has answered
 * ARENA_CLOSE or is gone. */
void session_close(Session *s);
void session_peer_gone(Peer *p);
/* A job of the session has finished. May free the session. */
void session_job_finished(Session *s);
/* For the end of the service: no signal, no waiting. Jobs must be gone. */
Session *session_free(Session *s);

/* session-bus.c */

/* Manager.OpenSession; userdata is the Manager. Replies when the arenas are populated. */
int session_open(sd_bus_message *message, void *userdata, sd_bus_error *error);

/* session-loras.c, session-plan.c: methods and a property of the Session interface. */
int session_method_set_loras(sd_bus_message *message, void *userdata, sd_bus_error *error);
int session_property_loras(sd_bus *bus, const char *path, const char *interface, const char *property,
        sd_bus_message *reply, void *userdata, sd_bus_error *error);
int session_method_plan(sd_bus_message *message, void *userdata, sd_bus_error *error);
