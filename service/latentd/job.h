/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One request and its states. Logic only; job-bus.c is its face. */

#include "service/latentd/lora.h"
#include "service/latentd/manager.h"

typedef enum JobKind {
        JOB_LOAD,
        JOB_STEP,
        JOB_SAMPLE,
        JOB_MERGE,
        JOB_TOKENIZE,
        JOB_ENCODE,
        JOB_DECODE,
        JOB_ENCODE_MEDIA,
        JOB_PLAN, /* the answer to Session.Plan: no object on the bus */
        JOB_RENDER, /* never queued: render.h makes hidden jobs of its phases */
} JobKind;

/* The end of a hidden job, once; j goes right after it. May be called from inside of the queue: no new job from there. */
typedef void (*JobDoneFn)(void *userdata, const Job *j);

typedef enum JobState {
        JOB_QUEUED,
        JOB_RUNNING,
        JOB_CANCELLING,
        JOB_DONE,
        JOB_FAILED,
        JOB_CANCELLED,
} JobState;

struct Job {
        uint64_t id;
        Manager *manager;
        Peer *owner; /* gets the signals; the job dies with it. NULL once it left */
        uid_t uid;
        JobKind kind;
        bool hidden; /* no object on the bus, not counted: PLAN, and what a Render makes (these have no owner) */
        JobState state;
        const char *phase;
        uint32_t step, steps, block, blocks; /* LOAD: block, blocks in MiB */
        double fraction;
        uint64_t eta_usec;
        uint64_t created_usec, started_usec, queued_usec, compute_usec; /* CLOCK_MONOTONIC and durations */
        uint32_t retries; /* of the current step; total in retries_total */
        uint32_t retries_total;
        uint64_t progress_sent_usec; /* or when it was made: what is over sooner has no Progress */
        bool progress_waits;         /* a newer value, for its tenth of a second */
        Fault fault;
        Model *model;       /* LOAD: being loaded; others: counted user; NULL once finished */
        LoraList loras;     /* held until finished; in request too */
        LoraNotes notes;    /* MERGE: of this attempt */
        uint64_t merged_bytes;  /* MERGE */
        uint64_t plan_ranks;    /* PLAN: that would work, a bit each */
        JobDoneFn done_fn;      /* hidden ones */
        void *done_userdata;
        char *result_model; /* LOAD: its path, once finished */
        Render *render;     /* RENDER, ENCODE of files: its own; hidden ones: whose phase they are, or NULL */
        Session *session;   /* all but LOAD; NULL once finished */
        uint64_t session_id;
        uint64_t bytes_read; /* LOAD */
        uint32_t sparse_steps, sparse_first, sparse_last; /* how many had sparse attention, and which */
        uint64_t blocks_seen[WIRE_RANKS_MAX], blocks_all[WIRE_RANKS_MAX]; /* in these, each rank's (WireStepDone) */
        WireJobOpen request; /* all but LOAD */
        WireJobReady ready;  /* valid once opened, expected before; kept over a worker's death */
        bool opened;         /* JOB_READY seen from the current worker */
        char numerics_id[128];

        /* DECODE of video: frames of the film, counted from its start. done: that the committed steps are known to have
         * finished; ready: the most that done ever was (another worker may have to begin again); told: those that FramesReady
         * has spoken of; released: those that the reader is done with. released <= told <= ready. */
        uint64_t frames_done, frames_ready, frames_told, frames_released;
        bool frames_wait; /* told < ready: the reader's queue was full, on_progress_timer() tries again */
        bool cached;      /* ENCODE: taken from the worker's cache */
        uint32_t preview_step; /* RENDER: steps before the last preview; 0: none yet */

        /* queue.c */
        bool resume;          /* at the next JOB_OPEN the worker goes on from the commit word */
        uint32_t first_epoch; /* of the worker that wrote the oldest valid commit word */
        uint64_t turn;        /* when it last had the worker; 0: never */
        uint64_t step_usec;   /* how long a step takes, measured; 0: not known yet */
        uint64_t step_started_usec;
        uint64_t first_kernel_usec; /* from its creation to the first kernel of block 0 of its first step here; 0: not known */
        uint64_t open_started_usec, open_took_usec; /* JOB_OPEN to JOB_READY; took: 0 once a step's time has it */

        /* worker-link.c: epoch of the worker that has the JOB_OPEN, the PLAN */
        uint64_t worker_epoch, plan_epoch;
        WirePlan plan;            /* the last one sent */
        char left_out[400];       /* which devices that plan does without, and why; "": none */
        uint64_t exposed_usec;    /* of the exchange, over those steps; 0: not measured */
        uint64_t exchanged_bytes; /* between ranks, over the steps that this service ran */
        uint64_t tiles[WIRE_RANKS_MAX]; /* coding of video: made by each rank, likewise */

        TAILQ_ENTRY(Job) entry;       /* manager's list, by id */
        TAILQ_ENTRY(Job) unfinished_entry;
        TAILQ_ENTRY(Job) queue_entry; /* queue's list */
        bool queued;                  /* in queue's list */
};

/* The job is in the manager's list, JOB_QUEUED. LimitExceeded beyond JobsPerUser=. */
int job_new(Manager *m, Peer *owner, JobKind kind, Job **ret, Fault *f);
/* Nobody sees it: it has no owner and counts for no limit. */
int job_new_hidden(Manager *m, uid_t uid, JobKind kind, Job **ret);
/* Of a finished job, or of any at the end of the service: no signal. */
Job *job_free(Job *j);
Job *job_find(Manager *m, uint64_t id);
const char *job_kind_to_string(JobKind k);
/* What it is doing once it runs: its Phase then. */
const char *job_running_phase(const Job *j);
/* It has an output range of its own. */
bool job_writes_output(const Job *j);
const char *job_state_to_string(JobState s);
bool job_is_finished(const Job *j);

/* Of a number of each rank. */
static inline uint64_t job_sum_ranks(const uint64_t numbers[static WIRE_RANKS_MAX]) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++)
                sum += numbers[i];
        return sum;
}

/* From queued to running; phase is a literal. */
void job_start(Job *j, const char *phase);
/* Time spent in the queue so far. */
uint64_t job_queued_usec(const Job *j);
/* Sends the signal at most 10 times a second, the first one a tenth after the job was made: at once, or the newest value when its time
 * has come. */
void job_progress(Job *j);
/* frames_ready has grown: sends FramesReady for all that were not spoken of yet. For a reader that does not read it is put off, and
 * one message then speaks of all: none is lost, and not more than 64 wait. */
void job_frames_ready(Job *j);
/* There is a new preview: sends PreviewReady, which may be lost. */
void job_preview_ready(Job *j);
/* The reader is done with the frames before this one. InvalidArgument: no job that makes them, or more than were ready. */
int job_release_frames(Job *j, uint64_t up_to, Fault *f);
/* Whether the frames of the next step have room in the ring. */
bool job_has_room(const Job *j);
/* Its result can be read: it is done, or one that makes frames whose places are known, or a Render that failed behind its latents. */
bool job_has_result(const Job *j);
/* The one end of every job: sets the state, drops references, sends Finished, trims the owner's finished
 * jobs to 256. f: NULL if done. Frees a job whose owner is gone: do not touch j after it. */
void job_finish(Job *j, JobState state, const Fault *f);
/* Cancels whatever it does: answers at once. May free j like job_finish(). */
void job_cancel(Job *j);
void job_peer_gone(Peer *p);
int job_path(const Job *j, char **ret);

/* Tensors of a job that has a result: number i of them, name in ret_name, place in the output arena in
 * *ret. -ENOENT behind the last. */
int job_result_tensor(const Job *j, uint32_t i, char ret_name[static 32], WireTensor *ret);

/* job-bus.c */

/* Answers a method call with the job's path. A job that cannot be named is cancelled. */
int job_bus_reply(Job *j, sd_bus_message *message, sd_bus_error *error);
int job_bus_send_progress(Job *j);
int job_bus_send_preview(Job *j);
int job_bus_send_frames(Job *j, bool droppable); /* from frames_told to frames_ready. 1: sent; 0: dropped */
int job_bus_send_finished(Job *j);
