/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Arenas of closed sessions. Their pages live as long as a descriptor or mapping of a client does, whose content stays
 * readable: until the last one is gone they count as memory of the user and of the service. Loop thread only. */

#include "service/latentd/manager.h"

struct Remains {
        uid_t uid;
        Peer *owner; /* NULL once it left */
        int input_fd, output_fd;
        void *map; /* of the output arena; NULL: none */
        uint64_t input_bytes, output_bytes;
        TAILQ_ENTRY(Remains) entry;
};

/* Takes x (malloc'ed) and what is in it over: gives the memory back at once if no client has it any more, else
 * keeps it listed and looks again every second and at each remains_collect(). Its bytes are in m->arena_bytes until then. */
void remains_add(Manager *m, Remains *x);
/* Gives back what no client has any more. */
void remains_collect(Manager *m);
void remains_peer_gone(Peer *p);
/* For the end of the service: forgets them, whoever has them. */
void remains_clear(Manager *m);
