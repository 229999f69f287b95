/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the readers of requests share: session-request.c (OpenSession, Step, what Step and Sample have in
 * common), session-request-code.c, session-request-conditions.c, session-request-gpus.c, session-request-pictures.c,
 * session-request-render.c, session-request-sample.c. */

#include "service/latentd/bus-error.h"
#include "service/latentd/session-request.h"
#include "service/shared/safetensors.h"

#define VIDEO_CHANNELS 24
#define AUDIO_CHANNELS 32

/* OpenSession's "gpus", as the caller wrote it: valid as long as the message. */
typedef struct RequestGpus {
        bool given;
        size_t n; /* how many there are; names has the first of them */
        const char *names[WIRE_DEVICES_MAX];
} RequestGpus;

/* BusKey.read; value: RequestGpus. */
int request_read_gpus(sd_bus_message *m, const BusKey *k, Fault *f);
/* They are devices of the worker, by number, UUID or PCI address: w's gpus. NotSupported: it computes on the CPU;
 * InvalidArgument: one is not there, or named twice; Busy, NoWorker: no worker has told of its devices. */
int request_check_gpus(const Manager *m, const RequestGpus *x, PlanWishes *w, Fault *f);
/* NotSupported: the worker has no such devices. */
int request_check_exchange(const Manager *m, const PlanWishes *w, Fault *f);

/* What Step and Sample have in common. */
typedef struct Request {
        WireJobOpen q;
        const char *compute, *condition_noise;
        bool text, text_tags, video, audio, mask_video, mask_audio, seed, output_bytes;
} Request;

#define REQUEST_KEYS(c)                                                                                     \
        {"text", "(tsat)", &(c)->q.text, &(c)->text},                                                       \
                {"text-tags", "(tsat)", &(c)->q.text_tags, &(c)->text_tags},                                \
                {"video", "(tsat)", &(c)->q.video, &(c)->video},                                            \
                {"audio", "(tsat)", &(c)->q.audio, &(c)->audio},                                            \
                {"conditions", "aa{sv}", &(c)->q, .read = request_read_conditions},                         \
                {"condition-noise", "s", &(c)->condition_noise}, {"seed", "t", &(c)->q.seed, &(c)->seed},   \
                {"mask-video", "(tsat)", &(c)->q.mask_video, &(c)->mask_video},                             \
                {"mask-audio", "(tsat)", &(c)->q.mask_audio, &(c)->mask_audio},                             \
                {"compute", "s", &(c)->compute}, {"output-offset", "t", &(c)->q.output_offset}, {           \
                "output-bytes", "t", &(c)->q.output_size, &(c)->output_bytes                                \
        }

/* Checks and fills what Step and Sample have in common; q.kind and q.noise are there already. */
int request_finish(Request *c, const Session *s, Fault *f);

/* What a tensor must be. shape: 0 for any number; text: all of it in words, for the message. */
typedef struct TensorRule {
        StType type;
        uint32_t n_dims;
        const char *text;
        uint64_t shape[WIRE_DIMS_MAX];
} TensorRule;

#define RULE_VIDEO ((TensorRule){ST_F32, 4, "F32 [24, T, H, W]", {VIDEO_CHANNELS}})
#define RULE_AUDIO ((TensorRule){ST_F32, 3, "F32 [32, 2, A]", {AUDIO_CHANNELS, 2}})
/* Of the shape of another one. */
#define RULE_LIKE(t, what)                                                                                  \
        ((TensorRule){ST_F32, (t)->n_dims, what,                                                            \
                {(t)->shape[0], (t)->shape[1], (t)->shape[2], (t)->shape[3], (t)->shape[4]}})

int request_missing(const char *key, const char *what, Fault *f);
/* InvalidArgument if it is required and was not given, InvalidTensor if it is not what the rule says. */
int request_check_tensor(
        const char *key, const WireTensor *t, bool seen, bool required, const TensorRule *rule, Fault *f);
/* A schedule, where one of its two tensors was given. */
int request_check_sigmas(const WireJobOpen *q, bool video, bool audio, Fault *f);
/* An array of dictionaries, into `entries` of `size` bytes each, `*n` so far; read() makes one of a dictionary. Faults get its number
 * in `key`; limit: whose the most is that `max` is, in words. */
typedef int (*RequestReadEntry)(sd_bus_message *m, void *ret, Fault *f);

typedef struct RequestEntries {
        const char *key, *limit;
        void *entries;
        size_t size;
        uint32_t max, *n;
        RequestReadEntry read;
} RequestEntries;

int request_read_entries(sd_bus_message *m, const RequestEntries *e, Fault *f);
/* The index of value among the names. */
int request_choice(
        const char *key, const char *value, const char *const *names, size_t n, uint32_t *ret, Fault *f);
int request_compute(const char *value, uint32_t *ret, Fault *f);
/* A WirePictureRule. */
int request_picture_rule(const char *value, uint32_t *ret, Fault *f);
/* The message's descriptor becomes ours; -EBADF: there is none, and *ret is that, too. */
int request_own_file(int fd, int *ret);

/* session-request-sample.c: the names of noise, sampler and schedule, steps and shifts into q, as Sample has them. Sigmas are
 * GIVEN where one of the two tensors was; shifts that were not given stay 0: session_request_shifts(). */
typedef struct Trajectory {
        const char *noise, *sampler, *schedule;
        double shift_video, shift_audio;
        uint32_t steps;
        bool sigmas_video, sigmas_audio, steps_seen, shift_video_seen, shift_audio_seen;
} Trajectory;

#define TRAJECTORY_DEFAULT                                                                                          \
        {.noise = "given", .sampler = "euler", .schedule = "simple"}
#define TRAJECTORY_KEYS(t, q)                                                                                       \
        {"noise", "s", &(t)->noise}, {"sampler", "s", &(t)->sampler},                                              \
                {"sigmas-video", "(tsat)", &(q)->sigmas_video, &(t)->sigmas_video},                                \
                {"sigmas-audio", "(tsat)", &(q)->sigmas_audio, &(t)->sigmas_audio},                                \
                {"steps", "u", &(t)->steps, &(t)->steps_seen}, {"schedule", "s", &(t)->schedule},                  \
                {"shift-video", "d", &(t)->shift_video, &(t)->shift_video_seen},                                   \
                {"shift-audio", "d", &(t)->shift_audio, &(t)->shift_audio_seen}

int request_trajectory_names(const Trajectory *t, WireJobOpen *q, Fault *f);
int request_trajectory_schedule(const Trajectory *t, WireJobOpen *q, Fault *f);

/* session-request-code.c */
int request_check_prompt(const WireTensor *text, bool seen, Fault *f);

/* session-request-pictures.c: the key "pictures" of Render. The files are the message's. */
typedef struct RequestPictures {
        RenderPicture items[RENDER_PICTURES_MAX];
        uint32_t n;
} RequestPictures;

/* BusKey.read: k->value is an int. */
int request_read_file(sd_bus_message *m, const BusKey *k, Fault *f);
/* BusKey.read: k->value is the RequestPictures. */
int request_read_pictures(sd_bus_message *m, const BusKey *k, Fault *f);
/* The film's size and length; without a size that of the first keyframe counts, once it is known. */
typedef struct RequestCanvas {
        uint32_t width, height, frames;
        bool width_seen, height_seen, frames_seen;
} RequestCanvas;

#define CANVAS_FRAMES_DEFAULT 124u
#define REQUEST_CANVAS_DEFAULT                                                                              \
        {.width = CANVAS_DEFAULT_WIDTH, .height = CANVAS_DEFAULT_HEIGHT, .frames = CANVAS_FRAMES_DEFAULT}
#define CANVAS_KEYS(c)                                                                                      \
        {"width", "u", &(c)->width, &(c)->width_seen}, {"height", "u", &(c)->height, &(c)->height_seen}, {  \
                "frames", "u", &(c)->frames, &(c)->frames_seen                                                                 \
        }
int request_read_canvas(const RequestCanvas *c, const RequestPictures *p, RenderOptions *o, Fault *f);

/* Which of them go together; o->pictures gets them, o->n_pictures not yet. */
int request_check_pictures(RequestPictures *p, RenderOptions *o, Fault *f);
/* o gets duplicates; those that it has on failure are the caller's, too. */
int request_own_pictures(const RequestPictures *p, RenderOptions *o);

/* session-request-conditions.c */

/* BusKey.read: k->value is the WireJobOpen. */
int request_read_conditions(sd_bus_message *m, const BusKey *k, Fault *f);
int request_condition_kind(const char *name, uint32_t *ret, Fault *f);
/* Entries into q->conditions. */
int request_read_wire_conditions(sd_bus_message *m, const char *key, WireJobOpen *q, RequestReadEntry read, Fault *f);
/* What of them depends on the request's video. */
int request_check_conditions(const WireJobOpen *q, Fault *f);
