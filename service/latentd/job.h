/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One request and its states. Logic only; job-bus.c is its face. */

#include "service/latentd/manager.h"

typedef enum JobKind {
        JOB_LOAD,
        JOB_STEP,
        JOB_SAMPLE,
} JobKind;

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
        Peer *owner; /* gets the signals; the job dies with it */
        uid_t uid;
        JobKind kind;
        JobState state;
        const char *phase;
        uint32_t step, steps, block, blocks;
        double fraction;
        uint64_t eta_usec;
        uint64_t created_usec, started_usec, queued_usec, compute_usec; /* CLOCK_MONOTONIC and durations */
        uint32_t retries; /* of the current step; total in retries_total */
        uint32_t retries_total;
        uint64_t progress_sent_usec;
        Fault fault;
        Model *model;     /* LOAD: being loaded; STEP, SAMPLE: counted user */
        Session *session; /* STEP, SAMPLE; NULL once the session is closed */
        uint64_t session_id;
        uint64_t bytes_read; /* LOAD */
        WireJobOpen request; /* STEP, SAMPLE */
        WireJobReady ready;  /* valid once opened */
        bool opened;         /* JOB_READY seen from the current worker */
        char numerics_id[128];
        TAILQ_ENTRY(Job) entry;       /* manager's list, by id */
        TAILQ_ENTRY(Job) queue_entry; /* queue's list */
};

int job_new(Manager *m, Peer *owner, JobKind kind, Job **ret, Fault *f); /* LimitExceeded beyond JobsPerUser= */
Job *job_free(Job *j);
Job *job_find(Manager *m, uint64_t id);
const char *job_kind_to_string(JobKind k);
const char *job_state_to_string(JobState s);
bool job_is_finished(const Job *j);

/* Progress: sends the signal at most 10 times a second, always for the first and the last value of a step. */
void job_progress(Job *j);
/* The one end of every job: sets the state, drops references, sends Finished, trims the owner's finished jobs to 256. f: NULL if done. */
void job_finish(Job *j, JobState state, const Fault *f);
/* Cancels whatever it does: answers at once. */
void job_cancel(Job *j);
void job_peer_gone(Peer *p);
int job_path(const Job *j, char **ret);

/* job-bus.c */
int job_bus_send_progress(Job *j);
int job_bus_send_finished(Job *j);
