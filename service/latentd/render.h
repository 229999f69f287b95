/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* From a prompt to a film. A Render is a job that the queue never sees: phase by phase it makes hidden jobs, each on a model of the
 * session, whose results lie where the next one reads. Between phases everything lies in one arena of the service (SESSION_WORK), sized
 * when the number of the prompt's tokens is known; frames and sound, and latents that are to be kept, go to the client's output arena.
 * Nothing here is proportional to bytes. A worker's death costs a phase what it costs such a job (queue.h).
 *
 * Logic and order: render.c; what each phase asks for and where it lies: render-phases.c. Loop thread only. */

#include "service/latentd/session.h"
#include "service/shared/canvas.h"
#include "service/shared/media-wire.h"

#define RENDER_PICTURES_MAX 12u /* in all; of references 9 images, 3 videos, 3 audios (h3.md 5.7) */

typedef enum RenderSound {
        RENDER_SOUND_AS_IT_HAS,
        RENDER_SOUND_NONE,
        RENDER_SOUND_NEEDED,
} RenderSound;

#define RENDER_KIND_BY_CONTENT UINT32_MAX /* a reference: image, video or audio, as the file is */

/* What the film begins or ends with, or a reference: a file that latent-media reads. */
typedef struct RenderPicture {
        int file;          /* open for reading */
        uint32_t kind;     /* WireConditionKind, or RENDER_KIND_BY_CONTENT */
        bool last;         /* KEYFRAME: the film's last frame, else its first */
        RenderSound sound; /* of a video */
        char name[64];     /* for messages; "": none */
} RenderPicture;

typedef struct RenderOptions {
        WireTensor prompt; /* U8 [bytes] in the client's input arena; size 0: empty */
        uint32_t width, height, frames; /* as canvas.h has rounded them; sides 0: from the first keyframe */
        RenderPicture pictures[RENDER_PICTURES_MAX]; /* keyframes, the first before the last, or references in the order of the request */
        uint32_t n_pictures;
        uint32_t picture_rule; /* WirePictureRule: of sizes, of the latents, of the conditioner */
        /* SAMPLE without its tensors: steps, schedule, sampler, shifts, noise, seed, compute, previews. sigmas_* are in the client's input
         * arena. */
        WireJobOpen sample;
        uint32_t frame_type;  /* StType: U8 or F32 */
        uint64_t ring_frames; /* 0: all */
        bool keep_latents;
        uint64_t output_offset, output_size; /* of the client's output arena */
        bool encode_only;       /* the conditioner's work alone, into the output range: an Encode of files */
        uint32_t text_type;     /* StType of it: BF16 or F32 */
        int file;           /* the film goes there, and not to the output arena; -EBADF: none */
        MediaFormat format; /* of it */
        int sheet;          /* with a file: a contact sheet, PNG, goes there; -EBADF: none */
        uint32_t sheet_columns, sheet_rows;
} RenderOptions;

static inline bool render_to_file(const RenderOptions *o) {
        return o->format != _MEDIA_FORMAT_MAX;
}

typedef enum RenderPhase {
        RENDER_ENCODE,
        RENDER_CONDITION, /* only with pictures: their latents. After ENCODE, whose model has counted the tokens: nothing is read twice */
        RENDER_SAMPLE,
        RENDER_SOUND,
        RENDER_DECODE,
        _RENDER_PHASE_MAX,
} RenderPhase;

/* What a render takes, once the tokens are counted. */
typedef struct RenderSizes {
        uint64_t tokens, rows; /* of the prompt; of a step */
        uint64_t work_bytes;   /* between phases */
        uint64_t output_bytes; /* of the client's output arena */
} RenderSizes;

/* Closes its files. */
void render_options_done(RenderOptions *o);

/* A JOB_RENDER that owns a Render, which takes o's files over on success. InvalidArgument: the session has not all models, or a denoiser
 * that is for others; NotSupported: there is no latent-media for the file; DoesNotFit; LimitExceeded. */
int render_new(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f);
/* A JOB_ENCODE with encode_only, likewise. */
int render_new_encode(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f);
/* The job of r is cancelled: at once, or as JOB_CANCELLING until nothing is written to its file any more. May free r. */
void render_cancel(Render *r);
/* Of the same request only what it would take: answers the call when that is known. o has no pictures, and its files are not touched. */
int render_plan(Session *s, Peer *owner, const RenderOptions *o, sd_bus_message *message, Fault *f);
/* The job has ended: nothing of it runs any more for the client's eyes. What the worker is at ends soon after. */
void render_stop(Render *r);
Render *render_free(Render *r);

/* From a hidden job of r. */
void render_on_progress(Render *r, const Job *child);
void render_on_frames(Render *r, const Job *child);
void render_on_preview(Render *r, const Job *child);
/* How long the hidden job that waits for the worker now has done so, beyond what the job's queued_usec has. */
uint64_t render_waits_usec(const Render *r);
/* From the reader of the film. */
void render_release_frames(Render *r, uint64_t up_to);

/* It has failed, and the latents that were asked for were done before that: they are its result then, and nothing else. */
bool render_left_latents(const Render *r);
/* As job_result_tensor(): frames, sound, and with keep_latents video and audio. */
int render_result_tensor(const Render *r, uint32_t i, char ret_name[static 32], WireTensor *ret);
int render_append_result(sd_bus_message *m, const Render *r);

/* What there is to say before the tokens are counted: DoesNotFit if the client's output range is too small. Bytes of it that are used. */
int render_check_output(const RenderOptions *o, uint64_t *ret_bytes, Fault *f);

const char *render_phase_name(RenderPhase p);
