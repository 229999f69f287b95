/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The connection of a request: progress and frames taken, frames that arrive, the answer. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/media-wire.h"

typedef struct Channel {
        int socket;
        uint64_t progress_usec; /* when progress was last said */
        /* WRITE */
        uint64_t frames, ring_frames; /* of the film; the ring's */
        bool with_sound;
        uint64_t ready; /* frames that are there */
        bool sound_ready;
        uint64_t taken, taken_said;
} Channel;

/* Says how far the request is, a few times a second; lost where the socket is full. */
void channel_progress(Channel *c, uint64_t done, uint64_t total);
/* The first n frames are not needed any more. */
void channel_taken(Channel *c, uint64_t n);
/* Until the frame with this number is there, or with wait false: takes in what came. */
int channel_wait_frame(Channel *c, uint64_t frame, Fault *f);
int channel_wait_sound(Channel *c, Fault *f);
int channel_take_in(Channel *c, Fault *f);
/* DONE or ERROR: waits until the socket takes it. */
int channel_answer(Channel *c, const MediaMessage *m);
