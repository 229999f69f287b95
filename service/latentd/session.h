/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A client's session on a model: two arenas and their jobs. */

#include "service/latentd/manager.h"

struct Session {
        uint64_t id;
        Manager *manager;
        Peer *owner;
        uid_t uid;
        Model *model; /* counted user */
        WireCompute compute;
        uint32_t ranks;
        char job_class[16];
        uint64_t input_bytes, output_bytes;
        int input_fd, output_fd;
        void *output_map; /* the broker reads commit words through it */
        TAILQ_ENTRY(Session) entry;
};

Session *session_find(Manager *m, uint64_t id);
/* Cancels its jobs at once for the client, waits for none of them: arenas live until the worker has answered ARENA_CLOSE or is gone. */
void session_close(Session *s);
void session_peer_gone(Peer *p);
