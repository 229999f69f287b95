/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the parts of the broker's end of a worker share: worker-link.c (life and death), worker-send.c
 * (sending), worker-feed.c (models, arenas, jobs). Tests shorten the times. */

#include "service/latentd/gpu-cost.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/queue.h"
#include "service/latentd/worker-link.h"
#include "service/latentd/worker-start.h"

typedef enum LinkState {
        LINK_IDLE,  /* no worker */
        LINK_DELAY, /* one is wanted; the timer starts it */
        LINK_HELLO, /* started, has not said Hello or not acknowledged WELCOME */
        LINK_READY,
        LINK_ENDING, /* told or made to end, or seen ending: not gone yet */
} LinkState;

typedef struct Outgoing {
        STAILQ_ENTRY(Outgoing) entry;
        int fd;              /* ours; -EBADF: none */
        WireHeader header[]; /* the message, header.size bytes */
} Outgoing;

/* A model in the worker of this epoch. */
typedef struct LinkModel {
        uint64_t id;
        Model *model; /* NULL: forgotten while it was opened; closed when the answer is here */
        bool sent;    /* else its regions are being verified */
        bool ready;
        TAILQ_ENTRY(LinkModel) entry;
} LinkModel;

typedef struct ModelRequest {
        Model *model;
        WorkerModelFn fn;
        void *userdata;
        uid_t uid; /* who is to blame */
        unsigned deaths;
        TAILQ_ENTRY(ModelRequest) entry;
} ModelRequest;

struct WorkerLink {
        Manager *manager;
        LinkState state;
        uint64_t epoch, starts;
        bool wanted;   /* there is work for one */
        bool expected; /* ENDING on request: no failure */
        bool no_cuda;  /* Worker=auto: the CUDA worker has no device */
        bool useless;  /* trying again soon gives the same: not installed, another version */
        uint32_t row_tile;

        WorkerProcess process;
        bool eof, reaped, hung;
        bool greeted;             /* HELLO: it has said Hello */
        bool was_ready, was_busy; /* ENDING: when it began */
        char end_reason[200];     /* behind "the worker "; "" while not known */
        char no_device[512];      /* why the last worker that should have some has no devices; "" it has, or nobody asked */
        WireHello hello; /* with the devices that take part alone */
        GpuSet set;      /* likewise */
        uint64_t told_out; /* devices that a step was planned without, and that this was said of: bits */
        GpuLinks links;  /* that a worker tried, until one dies */
        bool tries_links; /* it was asked to */
        WirePins pins;   /* that a worker found; n 0: none */
        WireMemory memory; /* as it said last */
        uint32_t ranks;
        sd_event_source *io, *child, *timer;
        uint64_t timer_usec; /* when it goes off; UINT64_MAX: off */

        unsigned failures; /* in a row: starts that came to nothing */
        uint64_t failed_usec;

        STAILQ_HEAD(, Outgoing) queue;
        unsigned credits_used, credits_used_max;

        TAILQ_HEAD(, LinkModel) models;
        TAILQ_HEAD(, ModelRequest) requests;
        sd_event_source *answer_source; /* requests of models that are there already */

        Job *opening; /* waits for its models; its JOB_OPEN is not sent */
        bool opening_resume;
        uint64_t asked_job;          /* the one with a JOB_OPEN or STEP that the worker has not answered; 0: none */
        bool asked_open, asked_step; /* both: by JOB_RUN */
        uint64_t patience_usec;           /* for the next sign of life of it */
        uint64_t job_usec, models_usec;   /* when it was asked or last gave one: jobs, models */

        uint64_t closing[QUEUE_WINDOW]; /* jobs that are done: their JOB_CLOSE can wait until the worker is at the next */
        unsigned n_closing;
        sd_event_source *close_timer;

        uint64_t hello_usec, stall_usec, open_usec, end_usec; /* limits */
};

/* worker-link.c */

/* Sees to it that the timer of the stall limits goes off in time: it looks then what is to be done, so that not every step has to set
 * it. */
void worker_link_watch(WorkerLink *w);

/* worker-send.c */

/* Queues a message and sends what may go. fd stays the caller's. A failure drops the worker. */
void worker_send(WorkerLink *w, const WireMessage *m, int fd);
void worker_send_flush(WorkerLink *w);
int worker_send_on_acks(WorkerLink *w, uint32_t n); /* -EPROTO: more than there are */
void worker_send_clear(WorkerLink *w);

/* worker-feed.c */
bool worker_feed_is_busy(const WorkerLink *w); /* waits for an answer */
bool worker_feed_take_answer(WorkerLink *w, const WireHeader *h, bool step); /* to JOB_OPEN or STEP; false: not asked for */
void worker_feed_on_ready(WorkerLink *w);      /* a worker is there: open what was asked for */
void worker_feed_on_model_ready(WorkerLink *w, const WireModelReady *m);
void worker_feed_on_error(WorkerLink *w, const WireError *m);
/* Forgets what the worker had. Requests under way count a death; those with two end with WorkerCrashed. crashed: what it had may have
 * been written to. */
void worker_feed_on_gone(WorkerLink *w, const char *reason, bool crashed);
void worker_feed_on_no_worker(WorkerLink *w, const Fault *f);
void worker_feed_clear(WorkerLink *w);
