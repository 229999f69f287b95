/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/quota.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/remains.h"
#include "service/latentd/session.h"

#define SESSIONS_MAX 1024 /* of all users: as many as a worker takes arenas of */

/* " N bytes of them are ..", or "": memory of closed sessions that is about to be free. */
static void describe_leaving(const Manager *m, uid_t uid, char *ret, size_t size) {
        const Session *s;
        uint64_t bytes = 0;

        TAILQ_FOREACH(s, &m->sessions, entry)
                if (s->uid == uid && s->state == SESSION_CLOSED)
                        bytes += session_bytes(s);
        ret[0] = '\0';
        if (bytes > 0)
                (void) snprintf(ret, size,
                        " %" PRIu64 " bytes are of sessions and films that just ended and come back by themselves, mostly within a "
                        "second: try again.",
                        bytes);
}

int quota_check_session(const Manager *m, uid_t uid, uint64_t arena_bytes, Fault *f) {
        const Config *c = m->config;
        const Session *s;
        const Remains *x;
        char closed[160] = "", leaving[160];
        uint64_t bytes = 0;
        uint32_t n = 0, n_closed = 0, all = 0;

        /* Closed ones that a step still runs in are counted too: their memory is not free yet. */
        TAILQ_FOREACH(s, &m->sessions, entry) {
                all++;
                if (s->uid == uid) {
                        n += s->form == SESSION_CLIENT;
                        bytes += session_bytes(s);
                }
        }

        TAILQ_FOREACH(x, &m->remains, entry) {
                all++;
                if (x->uid == uid) {
                        n++;
                        n_closed++;
                        bytes += x->input_bytes + x->output_bytes;
                }
        }
        if (n_closed > 0)
                (void) snprintf(closed, sizeof(closed),
                        " %" PRIu32 " of them are closed, but you still have their arenas: close those descriptors and "
                        "mappings.",
                        n_closed);

        describe_leaving(m, uid, leaving, sizeof(leaving));
        if (all >= SESSIONS_MAX)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                        "The service has %" PRIu32 " sessions, as many as it can: wait until one is closed.",
                        all);

        if (n >= c->sessions_per_user)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                        "You have %" PRIu32 " sessions, the limit is %" PRIu32
                        " (SessionsPerUser=): close one first.%s",
                        n, c->sessions_per_user, closed);

        if (arena_bytes > c->arena_bytes_per_user || bytes > c->arena_bytes_per_user - arena_bytes)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                        "Arenas of %" PRIu64 " bytes do not fit: your sessions hold %" PRIu64
                        " bytes and the limit is %" PRIu64
                        " (ArenaBytesPerUser=). Ask for smaller ones or close a session.%s%s",
                        arena_bytes, bytes, c->arena_bytes_per_user, leaving, closed);

        return 0;
}

int quota_check_arena(const Manager *m, uid_t uid, uint64_t bytes, Fault *f) {
        const Config *c = m->config;
        const Session *s;
        const Remains *x;
        char leaving[160];
        uint64_t held = 0;

        TAILQ_FOREACH(s, &m->sessions, entry)
                held += s->uid == uid ? session_bytes(s) : 0;
        TAILQ_FOREACH(x, &m->remains, entry)
                held += x->uid == uid ? x->input_bytes + x->output_bytes : 0;

        describe_leaving(m, uid, leaving, sizeof(leaving));
        if (bytes > c->arena_bytes_per_user || held > c->arena_bytes_per_user - bytes)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                        "The film needs %" PRIu64 " bytes between its phases: your sessions hold %" PRIu64
                        " bytes and the limit is %" PRIu64
                        " (ArenaBytesPerUser=). Ask for a smaller film or close a session.%s",
                        bytes, held, c->arena_bytes_per_user, leaving);

        return 0;
}

/* What it has been committed with takes room. */
static bool is_committed(const Model *m) {
        return m->is_private && m->state != MODEL_NEW && m->state != MODEL_FAILED;
}

int quota_check_model(const Model *model, Fault *f) {
        uint64_t files[MODELS_PRIVATE_MAX];
        const Model *m;
        size_t n = 0;

        TAILQ_FOREACH(m, &model->manager->models, entry) {
                size_t i = 0;

                if (!is_committed(m) || m->uid != model->uid)
                        continue;
                if (m->files_hash == model->files_hash)
                        return 0;
                while (i < n && files[i] != m->files_hash)
                        i++;
                if (i == n && n < MODELS_PRIVATE_MAX)
                        files[n++] = m->files_hash;
        }

        if (n < MODELS_PRIVATE_MAX)
                return 0;

        return fault_set(f, -EDQUOT, FAULT_LIMIT,
                "You have %zu different models of your own, the most that one user may have (the same files count once, however many "
                "programs opened them): unload one, or end a program that has one.",
                n);
}

int quota_check_job(const Manager *m, uid_t uid, Fault *f) {
        const Job *j;
        uint32_t n = 0;

        TAILQ_FOREACH(j, &m->unfinished, unfinished_entry)
                if (j->uid == uid && !(j->hidden && !j->owner))
                        n++;

        if (n >= m->config->jobs_per_user)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                        "You have %" PRIu32 " unfinished jobs, the limit is %" PRIu32
                        " (JobsPerUser=): wait for one or cancel it.",
                        n, m->config->jobs_per_user);

        return 0;
}
