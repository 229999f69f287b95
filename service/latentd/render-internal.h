/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What render.c, render-pictures.c and render-phases.c share. */

#include "service/latentd/job.h"
#include "service/latentd/media-link.h"
#include "service/latentd/render.h"

/* Where something lies, and what a phase reads and writes. */
typedef enum RenderPlace {
        RENDER_CLIENT_INPUT,
        RENDER_WORK,
        RENDER_PIXELS, /* until the pictures are encoded: these, their sound and the prompt */
        RENDER_CLIENT_OUTPUT,
        _RENDER_PLACE_MAX,
} RenderPlace;

/* A range of an arena. */
typedef struct RenderRange {
        RenderPlace place;
        uint64_t offset, size;
} RenderRange;

typedef enum RenderStage {
        RENDER_STAGE_PROBE,  /* latent-media says what the pictures are, file by file */
        RENDER_STAGE_ROOM,   /* memory for them is being populated */
        RENDER_STAGE_READ,   /* latent-media reads them */
        RENDER_STAGE_TOKENS, /* Encode is planned: how many tokens has the prompt? */
        RENDER_STAGE_MEMORY, /* the work arena is being populated */
        RENDER_STAGE_PHASES, /* of a Render that is only planned: their plans */
        RENDER_STAGE_STOP, /* how it ends is known; latent-media may be at its last write */
        RENDER_STAGE_END,
} RenderStage;

/* What is known of a picture. */
typedef struct RenderItem {
        uint32_t number; /* in the request */
        uint32_t kind;   /* WireConditionKind */
        bool has_sound;  /* it is read: of a video, or the audio itself */
        MediaDone probed;
        uint32_t width, height;  /* as it is read; 0: an audio */
        uint64_t room;           /* frames that there is room for */
        uint64_t shown, frames;  /* that the conditioner sees, and the VAE; of a still picture 1 */
        uint64_t samples;        /* likewise, and room before they are known */
        uint64_t pixels, wave;   /* places of both in RENDER_PIXELS */
        RenderRange to_video, to_audio; /* where the VAEs write */
        WireTensor video, audio; /* latents, once they are made; size 0: none */
} RenderItem;

typedef struct RenderFiles RenderFiles; /* render-files.c */

struct Render {
        Job *job; /* its own */
        Session *client;
        RenderOptions o;
        RenderStage stage;
        RenderPhase phase;
        Job *child; /* unfinished, hidden; NULL: none */
        bool child_waits; /* what it spends in the queue counts for the job's */
        const char *phase_before; /* of the job, when the child was made */
        bool child_ended; /* its results are below, and next_source looks at them */
        Session *work, *pixels;
        Session *aliases[_RENDER_PLACE_MAX][_RENDER_PLACE_MAX]; /* [from][to]; for as long as the render runs */
        sd_event_source *next_source; /* after a phase: what comes next, from the loop */
        bool memory_ready;        /* likewise */
        bool film_made;           /* all phases are over */
        Model *wanted; /* a deferred one, of this phase: it stays as long as this is set */
        bool loading;  /* the child loads it */
        bool waiting;  /* for another Render that loads models: they would take each other's memory; or for `files` */
        RenderFiles *files; /* the files of models that are not read yet are being looked at */
        Fault files_fault;  /* what was found */

        /* how the last hidden job ended */
        JobState child_state;
        Fault child_fault;
        WireJobReady child_ready;
        WireTensor child_results[2];
        uint64_t child_took_usec, child_compute_usec;
        bool child_cached;
        uint64_t child_ranks; /* of a plan: bits */
        WirePlan child_plan;  /* likewise, of steps */
        uint64_t child_step_usec;

        RenderSizes sizes;
        RenderRange encoded, noise, sigmas, sampled, sound, film; /* layout; noise: zeros, the latents that nothing is known of */
        WireTensor text, text_tags, video, audio; /* as made, in their arena */
        WireTensor preview;                       /* likewise; size 0: there was none yet */
        WireTensor frames_tensor, sound_tensor;   /* likewise, in the client's output arena */
        RenderPlace latents; /* where video and audio are */

        /* pictures */
        RenderItem items[RENDER_PICTURES_MAX]; /* as o.pictures */
        uint32_t item;   /* that is at work */
        bool item_sound; /* its sound is, not its pixels */
        bool item_again; /* it is the second try */
        MediaLink *reader;
        bool read_ended; /* read_done, or read_fault if that is named */
        MediaDone read_done;
        Fault read_fault;
        uint64_t read_usec; /* when reading began, then how long it took */

        MediaLink *media;     /* the film is being written */
        bool media_done;
        bool media_again; /* it was lost: the frames are made for another one */
        bool decode_again; /* likewise, as soon as nothing runs */
        int media_error;   /* it could not be started */
        Fault media_fault; /* likewise */
        uint64_t bytes;       /* of the file */
        MediaLink *sheet;     /* likewise; its failure is told and costs no film */
        bool sheet_over;      /* or none is made */
        bool media_stops, sheet_stops; /* their ends are awaited */
        uint64_t sheet_taken, sheet_bytes;
        Fault sheet_fault;
        uint64_t taken; /* frames */
        uint64_t film_made_usec;

        JobState end_state; /* RENDER_STAGE_STOP */
        Fault end_fault;    /* likewise; "": none */

        double weights[_RENDER_PHASE_MAX]; /* expected usec of each */
        double loads[_RENDER_PHASE_MAX];   /* likewise of reading its model; 0: it is there */
        double load_of_sounds;             /* part of CONDITION's: that of the audio VAE */
        double tail;                       /* likewise, until the file is written */
        bool measured[_RENDER_PHASE_MAX];
        uint64_t took_usec[_RENDER_PHASE_MAX];

        sd_bus_message *plan_message; /* nothing is run: this call is answered; NULL: a Render */
        struct RenderPlanned {
                bool known; /* its model is loaded */
                uint64_t memory; /* a step's, beside arenas and weights */
                uint32_t steps;
                uint64_t ranks;     /* bits */
                WirePlan plan;      /* SAMPLE */
                uint64_t step_usec; /* likewise; 0: no such step was run yet */
        } planned[_RENDER_PHASE_MAX];
};

/* render-pictures.c */

/* Has the first file looked at. */
int render_pictures_start(Render *r, Fault *f);
/* What comes after what has just ended in the stages PROBE, ROOM and READ. 1: all of it is read. An error without a fault is one of
 * our own. */
int render_pictures_next(Render *r, Fault *f);
/* Memory of pictures is not needed any more. */
void render_pictures_drop(Render *r);
/* The first thing that a VAE has to encode; the one after it. False: there is none. */
bool render_condition_first(Render *r);
bool render_condition_next(Render *r);
/* Work of the phase so far, of what is at work, and in all. */
void render_condition_work(const Render *r, double *ret_done, double *ret_now, double *ret_all);

/* render-files.c */

/* Has the files of all deferred models looked at; next_source tells of the end, files_fault of the outcome. r->files stays NULL if there
 * are none. */
int render_files_start(Render *r, Fault *f);
void render_files_stop(Render *r);

/* render.c */
void render_on_memory(void *userdata, Session *s, const Fault *f);

/* render-phases.c */

/* Places of everything, once the tokens are known. ready: of the plan of Encode. */
void render_make_layout(Render *r, const WireJobReady *ready);
/* Of the job that runs a phase. */
WireJobKind render_phase_kind(RenderPhase p);
/* The request of a phase, and what it reads and writes. */
void render_make_request(const Render *r, RenderPhase p, WireJobOpen *ret, RenderPlace *ret_from, RenderPlace *ret_to);
/* For a plan: as if they lay there already. */
void render_assume_latents(Render *r);
/* Takes what the finished job of this phase made. */
void render_take_results(Render *r, RenderPhase p);
/* CONDITION is a phase of Renders with pictures alone. */
static inline bool render_has_phase(const Render *r, RenderPhase p) {
        return p != RENDER_CONDITION || r->o.n_pictures > 0;
}
/* CONDITION: of what is at work. */
Model *render_model(const Render *r, RenderPhase p);
/* The film that latent-media is to write, once the frames have a place. */
void render_make_write(const Render *r, MediaMessage *ret);
void render_make_sheet(const Render *r, MediaMessage *ret);
/* Previews are not made where the output range has no room for them. */
void render_drop_preview(RenderOptions *o);
/* Rows that go through a phase's model. */
double render_work(const Render *r, RenderPhase p);

/* render-cost.c */

/* weights, loads, tail and measured, of what is known now. */
void render_weigh(Render *r);
bool render_is_measured(const Render *r, RenderPhase p);
/* What it took this time. */
void render_measure_phase(Render *r, RenderPhase p, uint64_t usec);
void render_measure_load(Render *r, uint64_t bytes, uint64_t usec);
void render_measure_write(Render *r, uint64_t usec);
/* Memory of a model's weights once it is loaded. */
uint64_t render_weights_bytes(const Model *m);
/* DoesNotFit with the numbers: a phase's weights, and what lies between the phases, have no room even if all else leaves that can. */
int render_check_memory(const Render *r, Fault *f);

/* render-plan.c */

/* The answer to Plan, once all of it is there. */
int render_plan_reply(const Render *r, sd_bus_message *message);
