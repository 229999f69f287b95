/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One request to latent-media (service/shared/media-wire.h), in a process of its own. Loop thread only; nothing blocks. */

#include "service/latentd/manager.h"
#include "service/shared/media-wire.h"

typedef struct MediaLink MediaLink;

typedef struct MediaHandlers {
        void (*taken)(void *userdata, uint64_t frames); /* WRITE: these are not needed any more; may be NULL */
        /* Once, unless media_link_free() comes before: done, or NULL and f. It is over then, but for media_link_free(), which may be
         * called from inside. */
        void (*end)(void *userdata, const MediaDone *done, const Fault *f);
        void *userdata;
} MediaHandlers;

/* message: READ or WRITE, complete. Both descriptors stay the caller's. Faults as media_start(); handlers are never called from inside. */
int media_link_new(Manager *m, const MediaMessage *message, int file, int arena, const MediaHandlers *handlers, MediaLink **ret, Fault *f);
/* WRITE: so many frames, or the sound, are in the arena. */
void media_link_frames(MediaLink *l, uint64_t ready, bool sound);
/* Ends what still runs: at once where the process is our child. */
MediaLink *media_link_free(MediaLink *l);
