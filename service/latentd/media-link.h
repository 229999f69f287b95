/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One request to latent-media (service/shared/media-wire.h), in a process of its own. Loop thread only; nothing blocks. */

#include "service/latentd/manager.h"
#include "service/shared/media-wire.h"

typedef struct MediaLink MediaLink;

typedef struct MediaHandlers {
        void (*taken)(void *userdata, uint64_t frames); /* WRITE: these are not needed any more; may be NULL */
        /* Once, unless media_link_free() comes before: done, or NULL and f. Nothing of it touches file and arena any more; what is
         * left is media_link_free(), which may be called from inside. */
        void (*end)(void *userdata, const MediaDone *done, const Fault *f);
        void *userdata;
} MediaHandlers;

/* message: READ or WRITE, complete. Both descriptors stay the caller's. Faults as media_start(); handlers are never called from inside. */
int media_link_new(Manager *m, const MediaMessage *message, int file, int arena, const MediaHandlers *handlers, MediaLink **ret, Fault *f);
/* WRITE: so many frames, or the sound, are in the arena. */
void media_link_frames(MediaLink *l, uint64_t ready, bool sound);
/* After end() with an error: the process was lost, whatever the request was. Another one may fare better. */
bool media_link_was_lost(const MediaLink *l);
/* Ends it. true: end() comes with "Cancelled" once nothing of it can touch the file or the arena any more, at the latest after 10 seconds;
 * false: it has neither, or is over. */
bool media_link_stop(MediaLink *l);
/* Ends what still runs, without waiting for it. */
MediaLink *media_link_free(MediaLink *l);
/* How long it may be silent while there is something to do for it: 60 seconds, less in tests. */
void media_link_set_patience(MediaLink *l, uint64_t usec);
