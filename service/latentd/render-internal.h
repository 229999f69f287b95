/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What render.c and render-phases.c share. */

#include "service/latentd/job.h"
#include "service/latentd/media-link.h"
#include "service/latentd/render.h"

/* Where something lies, and what a phase reads and writes. */
typedef enum RenderPlace {
        RENDER_CLIENT_INPUT,
        RENDER_WORK,
        RENDER_CLIENT_OUTPUT,
        _RENDER_PLACE_MAX,
} RenderPlace;

/* A range of an arena. */
typedef struct RenderRange {
        RenderPlace place;
        uint64_t offset, size;
} RenderRange;

typedef enum RenderStage {
        RENDER_STAGE_TOKENS, /* Encode is planned: how many tokens has the prompt? */
        RENDER_STAGE_MEMORY, /* the work arena is being populated */
        RENDER_STAGE_PHASES,
        RENDER_STAGE_STOP, /* how it ends is known; latent-media may be at its last write */
        RENDER_STAGE_END,
} RenderStage;

struct Render {
        Job *job; /* its own */
        Session *client;
        RenderOptions o;
        RenderStage stage;
        RenderPhase phase;
        Job *child; /* unfinished, hidden; NULL: none */
        bool child_ended; /* its results are below, and next_source looks at them */
        Session *work;
        Session *aliases[_RENDER_PLACE_MAX][_RENDER_PLACE_MAX]; /* [from][to]; for as long as the render runs */
        sd_event_source *next_source; /* after a phase: what comes next, from the loop */
        bool memory_ready;        /* likewise */
        bool film_made;           /* all phases are over */

        /* how the last hidden job ended */
        JobState child_state;
        Fault child_fault;
        WireJobReady child_ready;
        WireTensor child_results[2];
        uint64_t child_took_usec, child_compute_usec;
        bool child_cached;

        RenderSizes sizes;
        RenderRange encoded, noise, sigmas, sampled, sound, film; /* layout; noise: zeros, the latents that nothing is known of */
        WireTensor text, text_tags, video, audio; /* as made, in their arena */
        WireTensor frames_tensor, sound_tensor;   /* likewise, in the client's output arena */
        RenderPlace latents; /* where video and audio are */

        MediaLink *media;     /* the film is being written */
        bool media_done;
        bool media_again; /* it was lost: the frames are made for another one */
        bool decode_again; /* likewise, as soon as nothing runs */
        int media_error;   /* it could not be started */
        Fault media_fault; /* likewise */
        uint64_t bytes;       /* of the file */

        JobState end_state; /* RENDER_STAGE_STOP */
        Fault end_fault;    /* likewise; "": none */

        double weights[_RENDER_PHASE_MAX]; /* expected usec of each */
        bool measured;                     /* all of them were */
        uint64_t took_usec[_RENDER_PHASE_MAX];
};

/* render-phases.c */

/* Places of everything, once the tokens are known. ready: of the plan of Encode. */
void render_make_layout(Render *r, const WireJobReady *ready);
/* The request of a phase, and what it reads and writes. */
void render_make_request(const Render *r, RenderPhase p, WireJobOpen *ret, RenderPlace *ret_from, RenderPlace *ret_to);
/* Takes what the finished job of this phase made. */
void render_take_results(Render *r, RenderPhase p);
Model *render_model(const Render *r, RenderPhase p);
/* The film that latent-media is to write, once the frames have a place. */
void render_make_write(const Render *r, MediaMessage *ret);
/* Rows that go through a phase's model. */
double render_work(const Render *r, RenderPhase p);
