/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of Session.Render. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"

#define SEED_DEFAULT 42u
#define STEPS_DEFAULT 20u
#define RING_MIN 22u /* frames that a chunk makes */

typedef struct Asked {
        Trajectory t;
        WireJobOpen q;
        const char *compute, *type, *format, *picture_rule;
        RequestPictures pictures;
        int file; /* the message's */
        RequestCanvas canvas;
        uint64_t ring;
        int keep_latents;
        bool prompt, seed, output_bytes;
} Asked;

static int read_frames(const Asked *a, RenderOptions *o, Fault *f) {
        static const char *const types[] = {"u8", "f32"};
        uint32_t type;
        int r;

        r = request_choice("type", a->type, types, ELEMENTSOF(types), &type, f);
        if (r < 0)
                return r;

        if (a->file >= 0 && (type != 0 || a->ring > 0))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"type\" f32 and \"ring\" are for frames in the output arena: leave them out, or \"output\".");

        if (a->ring > 0 && a->ring < RING_MIN && a->ring < o->frames)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"ring\" is %" PRIu64 ", expected at least the %u frames that are made at a time, or 0 for all.", a->ring,
                        RING_MIN);

        o->frame_type = type == 0 ? ST_U8 : ST_F32;
        o->ring_frames = a->ring;
        return 0;
}

static int check_file(const Asked *a, RenderOptions *o, Fault *f) {
        static const char *const formats[] = {[MEDIA_MP4] = "mp4", [MEDIA_WEBM] = "webm", [MEDIA_MKV] = "mkv"};
        uint32_t format = MEDIA_MP4;
        struct stat st;
        int flags, r;

        if (a->file < 0 && a->format)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"format\" is for a film with \"output\": give that too.");
        if (a->file < 0)
                return 0;

        r = a->format ? request_choice("format", a->format, formats, ELEMENTSOF(formats), &format, f) : 0;
        if (r < 0)
                return r;

        flags = fcntl(a->file, F_GETFL);
        if (flags < 0 || fstat(a->file, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "\"output\" cannot be looked at: %s.", strerror(errno));
        if (!S_ISREG(st.st_mode) || st.st_size > 0 || (flags & O_ACCMODE) == O_RDONLY || (flags & (O_APPEND | O_PATH)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"output\" must be a regular, empty file, open for writing and not for appending.");

        o->format = (MediaFormat) format;
        return 0;
}

static int read_trajectory(Asked *a, RenderOptions *o, const Session *s, Fault *f) {
        int r;

        r = request_trajectory_names(&a->t, &a->q, f);
        if (r < 0)
                return r;
        if (a->q.noise == WIRE_NOISE_GIVEN)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"noise\" is \"given\", expected comfy or diffusers.");

        r = request_trajectory_schedule(&a->t, &a->q, f);
        if (r < 0)
                return r;

        a->q.compute = s->compute;
        if (a->compute) {
                r = request_compute(a->compute, &a->q.compute, f);
                if (r < 0)
                        return r;
        }
        if (!a->seed)
                a->q.seed = SEED_DEFAULT;
        return 0;
}

/* As the program has them whose noise it is, unless asked otherwise. */
static int read_picture_rule(const Asked *a, RenderOptions *o, Fault *f) {
        static const char *const rules[] = {
                [WIRE_PICTURE_REFERENCE] = "reference",
                [WIRE_PICTURE_COMFY] = "comfy",
        };

        o->picture_rule = a->q.noise == WIRE_NOISE_COMFY ? WIRE_PICTURE_COMFY : WIRE_PICTURE_REFERENCE;
        if (!a->picture_rule)
                return 0;
        if (a->pictures.n == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"picture-rule\" is for \"pictures\": give these too, or leave it out.");

        return request_choice("picture-rule", a->picture_rule, rules, ELEMENTSOF(rules), &o->picture_rule, f);
}

static int finish(Asked *a, const Session *s, RenderOptions *o, Fault *f) {
        int r;

        r = request_check_prompt(&a->q.text, a->prompt, f);
        if (r >= 0)
                r = request_check_pictures(&a->pictures, o, f);
        if (r >= 0)
                r = request_read_canvas(&a->canvas, &a->pictures, o, f);
        if (r >= 0)
                r = check_file(a, o, f);
        if (r >= 0)
                r = read_frames(a, o, f);
        if (r >= 0)
                r = read_trajectory(a, o, s, f);
        if (r >= 0)
                r = read_picture_rule(a, o, f);
        if (r < 0)
                return r;

        /* An offset behind the arena is refused by session_check_request(). */
        if (!a->output_bytes && a->q.output_offset < s->output_bytes)
                a->q.output_size = s->output_bytes - a->q.output_offset;
        if (a->file >= 0 && !a->keep_latents) {
                a->q.output_offset = a->q.output_size = 0; /* nothing goes there */
                r = session_check_inputs(s, &a->q, f);
        } else
                r = session_check_request(s, &a->q, f);
        if (r < 0)
                return r;

        o->prompt = a->q.text;
        o->output_offset = a->q.output_offset;
        o->output_size = a->q.output_size;
        o->keep_latents = a->keep_latents;
        o->sample = a->q;
        o->sample.text = (WireTensor){};
        return 0;
}

int session_request_render(sd_bus_message *message, const Session *s, RenderOptions *ret, Fault *f) {
        Asked a = {
                .t = TRAJECTORY_DEFAULT,
                .q = {.kind = WIRE_JOB_SAMPLE},
                .type = "u8",
                .file = -EBADF,
                .canvas = REQUEST_CANVAS_DEFAULT,
        };
        const BusKey keys[] = {
                {"prompt", "(tsat)", &a.q.text, &a.prompt},
                {"pictures", "aa{sv}", &a.pictures, .read = request_read_pictures},
                {"picture-rule", "s", &a.picture_rule},
                CANVAS_KEYS(&a.canvas),
                TRAJECTORY_KEYS(&a.t, &a.q),
                {"seed", "t", &a.q.seed, &a.seed},
                {"compute", "s", &a.compute},
                {"type", "s", &a.type},
                {"ring", "t", &a.ring},
                {"output", "h", &a.file, .read = request_read_file},
                {"format", "s", &a.format},
                {"keep-latents", "b", &a.keep_latents},
                {"output-offset", "t", &a.q.output_offset},
                {"output-bytes", "t", &a.q.output_size, &a.output_bytes},
        };
        RenderOptions o = {.file = -EBADF, .format = _MEDIA_FORMAT_MAX};
        int r;

        a.t.noise = "comfy";
        a.t.steps = STEPS_DEFAULT;
        a.t.steps_seen = true;
        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = finish(&a, s, &o, f);
        if (r < 0)
                return r;

        if (a.file >= 0) {
                o.file = fcntl(a.file, F_DUPFD_CLOEXEC, 3);
                if (o.file < 0)
                        return -errno;
        }
        r = request_own_pictures(&a.pictures, &o);
        if (r < 0) {
                render_options_done(&o);
                return r;
        }
        *ret = o;
        return 0;
}
