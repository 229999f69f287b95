/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl render: from a prompt to a film. */

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/latentctl/coding-job.h"
#include "client/latentctl/compute-job.h"
#include "client/latentctl/lora-options.h"
#include "client/latentctl/pictures.h"
#include "client/latentctl/progress.h"
#include "client/latentctl/render-plan.h"
#include "client/latentctl/render-preview.h"
#include "client/latentctl/report.h"
#include "client/latentctl/results.h"
#include "client/latentctl/run.h"
#include "client/latentctl/same-file.h"
#include "service/shared/canvas.h"

#define ARENA_MIN 4096u
#define STEPS_DEFAULT 20u
#define PICTURE_PIXELS_MAX (768u * 1344u + 16u * 2540u + 256u) /* of a film that is as a picture: canvas_from_picture(), sides rounded up */

_Static_assert(CANVAS_FRAMES_MAX == 362, "range_seconds says it in words");
static const NumberRange range_seconds = {
        DBL_TRUE_MIN, CANVAS_FRAMES_MAX / 24.0, "a number greater than 0 and at most 15.083 (362 frames)"};

typedef enum Part {
        PART_DENOISER,
        PART_CONDITIONER,
        PART_VIDEO_VAE,
        PART_AUDIO_VAE,
        _PART_MAX,
} Part;

typedef struct Render {
        CodingOptions coding;
        const char *prompt, *size, *schedule, *sampler, *noise, *keep_latents, *contact_sheet, *format;
        uint64_t frames, steps, seed;
        double seconds, shift_video, shift_audio;
        bool has_frames, has_seconds, has_seed, has_steps, has_shift_video, has_shift_audio, plan;
        uint32_t width, height; /* 0: not given */
        StringList lora_arguments;
        const char *sparse;
        LoraOptions loras;
        Pictures pictures;
        char *text;
        size_t text_size;
        latent_tensor prompt_tensor;
        latent_model *parts[_PART_MAX];
        Preview preview;
        int film_fd, sheet_fd; /* borrowed; -EBADF: none */
        latent_value *planned; /* of --plan */
        bool in_place;         /* the film has its name: whatever comes later, something was written */
} Render;

/* What belongs to a service that went away. */
static void render_forget(void *userdata) {
        Render *x = userdata;

        for (size_t i = 0; i < _PART_MAX; i++)
                latent_model_free(STEAL_PTR(x->parts[i]));
        loras_forget(&x->loras);
}

static void render_done(Render *x) {
        render_forget(x);
        latent_value_free(x->planned);
        loras_done(&x->loras);
        pictures_done(&x->pictures);
        preview_done(&x->preview);
        free(x->text);
}

static int usage(latent_error *e, const char *text) {
        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "%s", text);
}

/* What the file's name ends with. */
static int choose_format(Render *x, latent_error *e) {
        static const char *const formats[] = {"mp4", "webm", "mkv"};
        const char *dot = strrchr(x->coding.output, '.');

        for (size_t i = 0; dot && i < ELEMENTSOF(formats); i++)
                if (strcasecmp(dot + 1, formats[i]) == 0) {
                        x->format = formats[i];
                        return 0;
                }

        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "-o %s: expected a name that ends with .mp4, .webm or .mkv",
                format_value(x->coding.output));
}

static int take_seconds(Render *x, latent_error *e) {
        if (x->has_frames && x->has_seconds)
                return usage(e, "--frames and --seconds do not go together");
        if (x->has_seconds) {
                x->frames = (uint64_t) fmax(ceil(x->seconds * 24 - 1e-9), 1);
                x->has_frames = true;
        }
        return 0;
}

/* What is written last would replace another output, or what was read. */
static int check_apart(const Render *x, latent_error *e) {
        const Pictures *p = &x->pictures;
        NamedFile files[9 + 2 * STRINGS_MAX] = {
                {"-o", x->coding.output, .output = true},
                {"--contact-sheet", x->contact_sheet, .output = true},
                {"--keep-latents", x->keep_latents, .output = true},
                {"--preview", x->preview.steps > 0 ? x->preview.stem : NULL, .output = true, .stem = true},
                {"--preview-map", x->preview.map_path},
                {"--image", p->image},
                {"--last-image", p->last_image},
                {"MODEL", x->coding.model, .model = true},
                {"--tokenizer", x->coding.tokenizer, .model = true},
        };
        size_t n = 9;

        for (uint32_t i = 0; i < p->references.n; i++)
                files[n++] = (NamedFile){p->references.tags[i] == PICTURES_TAG_SOUND ? "--reference-sound" : "--reference",
                        p->references.items[i]};
        n += loras_name(&x->loras, files + n);
        return same_file_check(files, n, e);
}

/* latent-media writes it: the service would refuse anything else, but only then, and opening a pipe would wait for its reader. */
static int check_files(const Render *x, latent_error *e) {
        const char *outputs[] = {x->coding.output, x->contact_sheet, x->keep_latents};
        int r = check_apart(x, e);

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(outputs); i++)
                r = outputs[i] ? output_check_regular(outputs[i], e) : 0;
        return r;
}

static int check_options(Render *x, latent_error *e) {
        int r;

        if (!x->coding.output && !x->plan)
                return usage(e, "-o FILM.mp4 is missing");
        if (!x->prompt)
                return usage(e, "--prompt TEXT is missing");

        r = x->coding.output ? choose_format(x, e) : 0;
        if (r >= 0)
                r = parse_size(x->size, &x->width, &x->height, e);
        if (r >= 0)
                r = take_seconds(x, e);
        if (r >= 0)
                r = compute_check_sparse(x->sparse, e);
        if (r >= 0)
                r = preview_open(&x->preview, x->coding.model, x->coding.output, e);
        if (r >= 0)
                r = loras_parse(&x->lora_arguments, &x->loras, e);
        if (r >= 0 && !x->plan)
                r = check_files(x, e);
        return r;
}

static int open_parts(CodingJob *j, Render *x, latent_error *e) {
        static const char *const folders[_PART_MAX] = {
                [PART_DENOISER] = "transformer",
                [PART_CONDITIONER] = "text_encoder",
                [PART_VIDEO_VAE] = "vae",
                [PART_AUDIO_VAE] = "audio_vae",
        };
        int r;

        for (size_t i = 0; i < _PART_MAX; i++) {
                /* Each part is read when it is its turn; adapters are merged into the denoiser before that. */
                x->coding.defer = i != PART_DENOISER || x->lora_arguments.n == 0;
                r = coding_open_model(j, folders[i], e);
                if (r < 0)
                        return r;
                x->parts[i] = STEAL_PTR(j->model);
        }

        return 0;
}

/* Of the latents that are kept, with canvas.h's numbers: what is refused the service says better. */
static uint64_t output_bytes(const Render *x) {
        uint32_t frames, width = CANVAS_DEFAULT_WIDTH, height = CANVAS_DEFAULT_HEIGHT;
        latent_tensor video = {.dtype = "F32", .n_dims = 4}, audio = {.dtype = "F32", .n_dims = 3};
        Fault unused = {};
        uint64_t bytes;

        if ((!x->keep_latents && x->preview.steps == 0) || canvas_frames(x->has_frames ? x->frames : 124, &frames, &unused) < 0 ||
                (x->size && canvas_size(x->width, x->height, &width, &height, &unused) < 0))
                return ARENA_MIN;
        if (!x->size && x->pictures.n > 0) {
                width = PICTURE_PIXELS_MAX / 16 + 16;
                height = 16;
        }

        video.shape[0] = 24;
        video.shape[1] = canvas_video_tokens(frames);
        video.shape[2] = height / 16;
        video.shape[3] = width / 16;
        audio.shape[0] = 32;
        audio.shape[1] = 2;
        audio.shape[2] = canvas_audio_tokens(frames);
        video.size = audio.size = sizeof(float);
        for (size_t i = 0; i < 4; i++)
                video.size *= video.shape[i];
        for (size_t i = 0; i < 3; i++)
                audio.size *= audio.shape[i];
        bytes = latent_output_bytes(&video, &audio, x->sampler ? x->sampler : "euler",
                x->has_steps ? (uint32_t) x->steps : STEPS_DEFAULT, 0);
        if (x->preview.steps > 0 && bytes < UINT64_MAX / 2)
                bytes += video.size / sizeof(float) / 24 * 3;
        return bytes < UINT64_MAX - ARENA_MIN ? bytes + ARENA_MIN : ARENA_MIN;
}

static int open_session(CodingJob *j, Render *x, latent_error *e) {
        latent_session_options o = {
                .struct_size = sizeof(o),
                .input_bytes = x->text_size + ARENA_MIN,
                .output_bytes = output_bytes(x),
                .compute = x->coding.compute,
                .sparse = x->sparse,
                .conditioner = x->parts[PART_CONDITIONER],
                .video_vae = x->parts[PART_VIDEO_VAE],
                .audio_vae = x->parts[PART_AUDIO_VAE],
        };
        int r;

        r = latent_session_open(j->client, x->parts[PART_DENOISER], &o, &j->session, e);
        if (r >= 0)
                r = loras_set(&x->loras, j->ctl, j->client, j->session, e);
        if (r >= 0 && x->text_size > 0)
                r = coding_place_text(x->text, x->text_size, &x->prompt_tensor, j->session, e);
        return r;
}

static latent_render_options make_options(const Render *x) {
        return (latent_render_options){
                .struct_size = sizeof(latent_render_options),
                .flags = LATENT_RENDER_FILE |
                        (x->sheet_fd >= 0 ? LATENT_RENDER_SHEET : 0) | (x->keep_latents ? LATENT_RENDER_KEEP_LATENTS : 0),
                .prompt = x->text_size > 0 ? &x->prompt_tensor : NULL,
                .width = x->width,
                .height = x->height,
                .frames = (uint32_t) x->frames,
                .steps = (uint32_t) x->steps,
                .schedule = x->schedule,
                .shift_video = x->shift_video,
                .shift_audio = x->shift_audio,
                .sampler = x->sampler,
                .noise = x->noise,
                .seed = x->seed,
                .has_seed = x->has_seed,
                .file = x->film_fd,
                .format = x->format,
                .pictures = x->pictures.items,
                .n_pictures = x->pictures.n,
                .picture_rule = x->pictures.rule,
                .sheet = x->sheet_fd,
                .preview_steps = (uint32_t) x->preview.steps,
                .preview_map = x->preview.steps > 0 ? x->preview.map : NULL,
        };
}

/* A service that went away may have begun to write. */
static int make_empty(int fd, latent_error *e) {
        if (fd >= 0 && (ftruncate(fd, 0) < 0 || lseek(fd, 0, SEEK_SET) < 0))
                return ctl_error(e, -errno, LATENT_ERROR_IO, "What was begun cannot be made empty: %s.", strerror(errno));
        return 0;
}

/* CodingAttempt. */
static int try_to_start(CodingJob *j, void *userdata, latent_error *e) {
        latent_render_options o;
        Render *x = userdata;
        int r;

        r = open_parts(j, x, e);
        if (r >= 0)
                r = open_session(j, x, e);
        if (r >= 0 && !x->plan)
                r = make_empty(x->film_fd, e);
        if (r >= 0 && !x->plan)
                r = make_empty(x->sheet_fd, e);
        if (r < 0)
                return r;

        o = make_options(x);
        return x->plan ? latent_session_plan_render(j->session, &o, &x->planned, e)
                       : latent_session_render(j->session, &o, &j->job, e);
}

/* What can be found wrong without the service. */
static int prepare(Render *x, latent_error *e) {
        int r;

        r = check_options(x, e);
        if (r >= 0)
                r = coding_text(x->prompt, &x->text, &x->text_size, e);
        return r < 0 ? r : pictures_open(&x->pictures, e);
}

/* Nothing is run or written. The film counts as one for a file, which it will be. */
static int run_plan(CodingJob *j, Render *x, latent_error *e) {
        CLEANUP_CLOSE int fd = -EBADF;
        int r;

        r = prepare(x, e);
        if (r < 0)
                return r;

        fd = memfd_create("latentctl-plan", MFD_CLOEXEC);
        if (fd < 0)
                return ctl_error(e, -errno, LATENT_ERROR_INTERNAL, "A file in memory cannot be made: %s.", strerror(errno));

        x->film_fd = fd;
        return coding_retry(j, try_to_start, render_forget, x, e);
}

static int wait_for_film(CodingJob *j, Render *x, latent_error *e) {
        int r;

        x->preview.job = j->job;
        x->preview.all = x->has_steps ? (uint32_t) x->steps : STEPS_DEFAULT;
        r = run_wait_and(j->ctl, j->job, PROGRESS_PHASES, preview_on_news, &x->preview, e);
        if (r >= 0)
                preview_finish(&x->preview);
        return r;
}

static int without(const char *what, const latent_error *why, latent_error *e) {
        return ctl_error(e, -EIO, LATENT_ERROR_IO, "The film was written, its %s not: %s", what, why->text);
}

static int commit_latents(const CodingJob *j, const Render *x, Output *latents, latent_error *e) {
        const char *compute = x->coding.compute;
        int r;

        r = results_write(latents, j->job, compute && strcmp(compute, "auto") != 0 ? compute : "bf16", e);
        return r < 0 ? r : output_commit(latents, e);
}

/* Sampling, which takes longest, was done when it failed: what was asked for of it is in its place. */
static void save_latents(const CodingJob *j, const Render *x, Output *latents, latent_error *e) {
        latent_error failed = *e, why = {};
        latent_tensor t;
        const void *data;

        if (run_interrupted() || !j->job || latent_job_tensor(j->job, "video", &t, &data, &why) < 0)
                return;

        if (commit_latents(j, x, latents, &why) < 0)
                (void) ctl_error(e, failed.code, failed.name, "%.700s The latents were done, but could not be written: %.250s",
                        failed.text, why.text);
        else
                (void) ctl_error(e, failed.code, failed.name,
                        "%.700s The latents were done: they are in %.200s, and latentctl decode makes frames and sound of them.",
                        failed.text, x->keep_latents);
}

static int commit_sheet(const CodingJob *j, Output *sheet, latent_error *e) {
        const latent_value *fault = latent_value_get(latent_job_result(j->job), "sheet-error");
        const char *name = latent_value_as_string(latent_value_at(fault, 0)),
                   *text = latent_value_as_string(latent_value_at(fault, 1));

        if (fault)
                return ctl_error(e, -EIO, name ? name : LATENT_ERROR_IO, "%s", text ? text : "?");

        return output_commit(sheet, e);
}

/* Each is complete, and in place whatever becomes of the others. */
static int commit(const CodingJob *j, Render *x, Output *film, Output *latents, Output *sheet, latent_error *e) {
        latent_error why = {};
        int r, error;

        r = output_commit(film, e);
        x->in_place = r >= 0;
        error = x->keep_latents ? commit_latents(j, x, latents, &why) : 0;
        if (r >= 0 && error < 0)
                r = without("latents were", &why, e);
        error = x->contact_sheet ? commit_sheet(j, sheet, &why) : 0;
        if (r >= 0 && error < 0)
                r = without("contact sheet was", &why, e);
        return r;
}

static int run(CodingJob *j, Render *x, latent_error *e) {
        CLEANUP(output_done) Output film = {.fd = -EBADF}, latents = {.fd = -EBADF}, sheet = {.fd = -EBADF};
        int r;

        r = prepare(x, e);
        if (r >= 0)
                r = output_open(x->coding.output, &film, e);
        if (r >= 0 && x->keep_latents)
                r = output_open(x->keep_latents, &latents, e);
        if (r >= 0 && x->contact_sheet)
                r = output_open(x->contact_sheet, &sheet, e);
        if (r < 0)
                return r;

        x->film_fd = film.fd;
        x->sheet_fd = sheet.fd;
        r = coding_retry(j, try_to_start, render_forget, x, e);
        if (r >= 0) {
                r = wait_for_film(j, x, e);
                if (r < 0 && x->keep_latents)
                        save_latents(j, x, &latents, e);
        }
        return r < 0 ? r : commit(j, x, &film, &latents, &sheet, e);
}

static void report(const CodingJob *j, const Render *x) {
        const latent_value *v = latent_job_result(j->job), *phases = latent_value_get(v, "phases");
        uint64_t frames = get_uint(v, "frames"), usec = get_uint(v, "compute-usec");
        char buf[FORMAT_MAX];
        JsonWriter w = {.file = stdout};

        if (!j->ctl->json) {
                (void) printf("%s: %" PRIu64 " frames of %" PRIu64 "x%" PRIu64 " (%.2f s), %" PRIu64
                              " bytes, made in %s\n",
                        x->coding.output, frames, get_uint(v, "width"), get_uint(v, "height"),
                        (double) frames / 24, get_uint(v, "bytes"), format_usec(usec, buf));
                return;
        }

        json_writer_object(&w, NULL);
        json_writer_string(&w, "output", x->coding.output);
        json_writer_uint(&w, "frames", frames);
        json_writer_uint(&w, "width", get_uint(v, "width"));
        json_writer_uint(&w, "height", get_uint(v, "height"));
        json_writer_uint(&w, "samples", get_uint(v, "samples"));
        json_writer_uint(&w, "bytes", get_uint(v, "bytes"));
        if (x->contact_sheet)
                json_writer_string(&w, "contact_sheet", x->contact_sheet);
        json_writer_string(&w, "numerics", get_string(v, "numerics"));
        json_writer_uint(&w, "compute_usec", usec);
        json_writer_uint(&w, "queued_usec", get_uint(v, "queued-usec"));
        if (phases)
                json_writer_value(&w, "phases", phases);
        loras_report(&x->loras, &w);
        json_writer_line(&w);
}

static int plan(CodingJob *j, Render *x, const Verb *verb) {
        JsonWriter w = {.file = stdout};
        latent_error e;
        int r;

        r = run_outcome(run_plan(j, x, &e), &e);
        if (r < 0)
                return report_error(j->ctl, verb, &e);

        if (!j->ctl->json) {
                render_plan_print(x->planned);
                return STATUS_OK;
        }

        json_writer_object(&w, NULL);
        json_writer_value(&w, "plan", x->planned);
        json_writer_line(&w);
        return STATUS_OK;
}

int verb_render(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(render_done) Render x = {.film_fd = -EBADF, .sheet_fd = -EBADF};
        const Option options[] = {
                CODING_OPTIONS(x.coding),
                {"prompt", OPTION_STRING, &x.prompt, NULL, 'p'},
                {"size", OPTION_STRING, &x.size, NULL, '\0'},
                {"seconds", OPTION_DOUBLE, &x.seconds, &x.has_seconds, '\0', .range = &range_seconds},
                {"frames", OPTION_UINT, &x.frames, &x.has_frames, '\0', .min = 1, .max = CANVAS_FRAMES_MAX},
                {"steps", OPTION_UINT, &x.steps, &x.has_steps, '\0', .min = 1, .max = STEPS_MAX},
                {"seed", OPTION_UINT, &x.seed, &x.has_seed, '\0'},
                {"noise", OPTION_STRING, &x.noise, NULL, '\0'},
                {"schedule", OPTION_STRING, &x.schedule, NULL, '\0'},
                {"shift-video", OPTION_DOUBLE, &x.shift_video, &x.has_shift_video, '\0', .range = &range_shift},
                {"shift-audio", OPTION_DOUBLE, &x.shift_audio, &x.has_shift_audio, '\0', .range = &range_shift},
                {"sampler", OPTION_STRING, &x.sampler, NULL, '\0'},
                {"lora", OPTION_STRINGS, &x.lora_arguments, NULL, '\0'},
                {"sparse", OPTION_STRING, &x.sparse, NULL, '\0'},
                PICTURES_OPTIONS(x.pictures),
                {"plan", OPTION_FLAG, &x.plan, NULL, '\0'},
                {"keep-latents", OPTION_STRING, &x.keep_latents, NULL, '\0'},
                {"contact-sheet", OPTION_STRING, &x.contact_sheet, NULL, '\0'},
                {"preview", OPTION_UINT, &x.preview.steps, &x.preview.has_steps, '\0', .min = 1, .max = STEPS_MAX},
                {"preview-map", OPTION_STRING, &x.preview.map_path, NULL, '\0'},
                {"compute", OPTION_STRING, &x.coding.compute, NULL, '\0'},
                {"tokenizer", OPTION_STRING, &x.coding.tokenizer, NULL, '\0'},
        };
        CLEANUP(coding_done) CodingJob j = {.ctl = c, .options = &x.coding};
        const char *operands[1];
        latent_error e;
        int r;

        /* A program reads along: each line is an object. */
        c->json = c->json || isatty(STDOUT_FILENO) == 0;
        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 1, 1, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        x.coding.model = operands[0];
        if (x.plan)
                return plan(&j, &x, verb);

        r = run(&j, &x, &e);
        if (!x.in_place)
                r = run_outcome(r, &e);
        if (r < 0 && strcmp(e.name, CTL_ERROR_INTERRUPTED) == 0)
                preview_say_left(&x.preview, &e);
        if (r < 0)
                return report_error(c, verb, &e);

        report(&j, &x);
        return STATUS_OK;
}
