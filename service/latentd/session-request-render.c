/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of Session.Render. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"

#define SEED_DEFAULT 42u
#define STEPS_DEFAULT 20u
#define RING_MIN 22u /* frames that a chunk makes */
#define MAP_NUMBERS 75u /* [25][3] */
#define SHEET_COLUMNS 4u
#define SHEET_ROWS 3u
#define SHEET_CELLS_MAX 64u

typedef struct Asked {
        Trajectory t;
        WireJobOpen q;
        const char *compute, *type, *format, *picture_rule;
        RequestPictures pictures;
        int file, sheet; /* the message's */
        uint32_t sheet_columns, sheet_rows;
        RequestCanvas canvas;
        uint64_t ring;
        uint32_t preview;
        double map[MAP_NUMBERS];
        size_t n_map; /* numbers that there were */
        int keep_latents;
        bool sheet_cells, prompt, seed, output_bytes;
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

/* BusKey.read; k->value is the Asked. */
static int read_map(sd_bus_message *m, const BusKey *k, Fault *f) {
        Asked *a = k->value;
        const void *numbers;
        size_t size;
        int r;

        r = sd_bus_message_read_array(m, 'd', &numbers, &size);
        if (r < 0)
                return r;

        a->n_map = size / sizeof(double);
        if (a->n_map == MAP_NUMBERS)
                memcpy(a->map, numbers, size);
        return 0;
}

static int check_preview(Asked *a, Fault *f) {
        if ((a->preview > 0) != (a->n_map > 0))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"preview\" (a number above 0) and \"preview-map\" go together: \"%s\" is missing.",
                        a->preview > 0 ? "preview-map" : "preview");
        if (a->preview == 0)
                return 0;

        if (a->n_map != MAP_NUMBERS)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"preview-map\" has %zu numbers, expected %u: 25 rows of 3.",
                        a->n_map, MAP_NUMBERS);
        for (size_t i = 0; i < MAP_NUMBERS; i++) {
                a->q.preview_map[i] = (float) a->map[i];
                if (!isfinite(a->q.preview_map[i]))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "Number %zu of \"preview-map\" is not finite.", i);
        }

        a->q.preview_steps = a->preview;
        return 0;
}

static int check_output_file(const char *key, int fd, Fault *f) {
        struct stat st;
        int flags;

        flags = fcntl(fd, F_GETFL);
        if (flags < 0 || fstat(fd, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "\"%s\" cannot be looked at: %s.", key, strerror(errno));
        if (!S_ISREG(st.st_mode) || st.st_size > 0 || (flags & O_ACCMODE) == O_RDONLY || (flags & (O_APPEND | O_PATH)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" must be a regular, empty file, open for writing and not for appending.", key);

        return 0;
}

static int check_file(const Asked *a, RenderOptions *o, Fault *f) {
        static const char *const formats[] = {[MEDIA_MP4] = "mp4", [MEDIA_WEBM] = "webm", [MEDIA_MKV] = "mkv"};
        uint32_t format = MEDIA_MP4;
        int r;

        if (a->file < 0 && a->format)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"format\" is for a film with \"output\": give that too.");
        if (a->file < 0)
                return 0;

        r = a->format ? request_choice("format", a->format, formats, ELEMENTSOF(formats), &format, f) : 0;
        if (r < 0)
                return r;

        r = check_output_file("output", a->file, f);
        if (r < 0)
                return r;

        o->format = (MediaFormat) format;
        return 0;
}

static int check_sheet(const Asked *a, RenderOptions *o, Fault *f) {
        if (a->sheet < 0 && a->sheet_cells)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sheet-columns\" and \"sheet-rows\" are of a \"contact-sheet\": give that too.");
        if (a->sheet < 0)
                return 0;

        if (a->file < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"contact-sheet\" goes with a film in a file: give \"output\" too, or make it of the frames.");
        if (a->sheet_columns == 0 || a->sheet_rows == 0 || a->sheet_columns > SHEET_CELLS_MAX || a->sheet_rows > SHEET_CELLS_MAX ||
                a->sheet_columns * a->sheet_rows > SHEET_CELLS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The contact sheet has %" PRIu32 " columns and %" PRIu32 " rows, expected 1 to %u cells.", a->sheet_columns,
                        a->sheet_rows, SHEET_CELLS_MAX);

        o->sheet_columns = a->sheet_columns;
        o->sheet_rows = a->sheet_rows;
        return check_output_file("contact-sheet", a->sheet, f);
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
        a->q.sparse = s->sparse;
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
        o->picture_rule = a->q.noise == WIRE_NOISE_COMFY ? WIRE_PICTURE_COMFY : WIRE_PICTURE_REFERENCE;
        if (!a->picture_rule)
                return 0;
        if (a->pictures.n == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"picture-rule\" is for \"pictures\": give these too, or leave it out.");

        return request_picture_rule(a->picture_rule, &o->picture_rule, f);
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
                r = check_sheet(a, o, f);
        if (r >= 0)
                r = check_preview(a, f);
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
        if (a->file >= 0 && !a->keep_latents && a->q.preview_steps == 0) {
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
        o->sample.flags = 0;
        o->sample.text = (WireTensor){};
        return 0;
}

int session_request_render(
        sd_bus_message *message, const Session *s, uint32_t flags, RenderOptions *ret, Fault *f) {
        Asked a = {
                .t = TRAJECTORY_DEFAULT,
                .q = {.kind = WIRE_JOB_SAMPLE, .flags = flags},
                .type = "u8",
                .file = -EBADF,
                .sheet = -EBADF,
                .sheet_columns = SHEET_COLUMNS,
                .sheet_rows = SHEET_ROWS,
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
                {"contact-sheet", "h", &a.sheet, .read = request_read_file},
                {"sheet-columns", "u", &a.sheet_columns, &a.sheet_cells},
                {"sheet-rows", "u", &a.sheet_rows, &a.sheet_cells},
                {"keep-latents", "b", &a.keep_latents},
                {"preview", "u", &a.preview},
                {"preview-map", "ad", &a, .read = read_map},
                {"output-offset", "t", &a.q.output_offset},
                {"output-bytes", "t", &a.q.output_size, &a.output_bytes},
        };
        RenderOptions o = {.file = -EBADF, .sheet = -EBADF, .format = _MEDIA_FORMAT_MAX};
        int r;

        a.t.noise = "comfy";
        a.t.steps = STEPS_DEFAULT;
        a.t.steps_seen = true;
        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = finish(&a, s, &o, f);
        if (r >= 0 && (flags & WIRE_JOB_PLAN_ONLY) && a.pictures.n > 0)
                r = fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "Plan does not read the files of \"pictures\", which say how many rows they are: leave them out.");
        if (r < 0)
                return r;

        r = request_own_file(a.file, &o.file);
        if (r >= 0)
                r = request_own_file(a.sheet, &o.sheet);
        if (r >= 0)
                r = request_own_pictures(&a.pictures, &o);
        if (r < 0) {
                render_options_done(&o);
                return r;
        }

        *ret = o;
        return 0;
}
