/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/request.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int append_string(sd_bus_message *m, const char *key, const char *value) {
        return value ? sd_bus_message_append(m, "{sv}", key, "s", value) : 0;
}

int open_list(sd_bus_message *m, const char *key, const char *element) {
        char type[16];
        int r;

        (void) snprintf(type, sizeof(type), "a%s", element);
        r = sd_bus_message_open_container(m, 'e', "sv");
        if (r >= 0)
                r = sd_bus_message_append(m, "s", key);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'v', type);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'a', element);
        return r;
}

int close_list(sd_bus_message *m) {
        int r = 0;

        for (unsigned i = 0; r >= 0 && i < 3; i++)
                r = sd_bus_message_close_container(m);
        return r;
}

/* {key: (offset, type, shape)} unless t is NULL. */
static int append_tensor(sd_bus_message *m, const char *key, const latent_tensor *t) {
        int r;

        if (!t)
                return 0;
        if (t->n_dims > LATENT_DIMS_MAX || strnlen(t->dtype, sizeof(t->dtype)) == sizeof(t->dtype))
                return -EINVAL;

        r = sd_bus_message_open_container(m, 'e', "sv");
        if (r >= 0)
                r = sd_bus_message_append(m, "s", key);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'v', "(tsat)");
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'r', "tsat");
        if (r >= 0)
                r = sd_bus_message_append(m, "ts", t->offset, t->dtype);
        if (r >= 0)
                r = sd_bus_message_append_array(m, 't', t->shape, t->n_dims * sizeof(t->shape[0]));
        for (unsigned i = 0; r >= 0 && i < 3; i++)
                r = sd_bus_message_close_container(m);

        return r;
}

static int append_condition(sd_bus_message *m, const latent_condition *c) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "kind", c->kind);
        if (r >= 0 && c->frame > 0)
                r = sd_bus_message_append(m, "{sv}", "frame", "u", (uint32_t) c->frame);
        if (r >= 0)
                r = append_tensor(m, "video", c->video);
        if (r >= 0)
                r = append_tensor(m, "audio", c->audio);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

static int append_conditions(sd_bus_message *m, const latent_condition *c, uint32_t n) {
        int r;

        if (n == 0)
                return 0;

        r = open_list(m, "conditions", "a{sv}");
        for (uint32_t i = 0; r >= 0 && i < n; i++)
                r = append_condition(m, &c[i]);
        return r < 0 ? r : close_list(m);
}

/* What a step has as well. */
static int append_inputs(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_tensor(m, "text", o->text);
        if (r >= 0)
                r = append_tensor(m, "text-tags", o->text_tags);
        if (r >= 0)
                r = append_tensor(m, "video", o->video);
        if (r >= 0)
                r = append_tensor(m, "audio", o->audio);
        if (r >= 0)
                r = append_conditions(m, o->conditions, o->n_conditions);
        if (r >= 0)
                r = append_string(m, "condition-noise", o->condition_noise);
        if (r >= 0 && o->has_seed)
                r = sd_bus_message_append(m, "{sv}", "seed", "t", o->seed);
        if (r >= 0)
                r = append_tensor(m, "mask-video", o->mask_video);
        if (r >= 0)
                r = append_tensor(m, "mask-audio", o->mask_audio);

        return r;
}

static int append_output(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_string(m, "compute", o->compute);
        if (r >= 0 && o->output_offset > 0)
                r = sd_bus_message_append(m, "{sv}", "output-offset", "t", o->output_offset);
        if (r >= 0 && o->output_bytes > 0)
                r = sd_bus_message_append(m, "{sv}", "output-bytes", "t", o->output_bytes);

        return r;
}

static int append_positive(sd_bus_message *m, const char *key, double value) {
        /* Zero is "not set"; everything else, NaN too, is the service's to judge. */
        return value == 0 ? 0 : sd_bus_message_append(m, "{sv}", key, "d", value);
}

static int append_sigmas(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_tensor(m, "sigmas-video", o->sigmas_video);
        return r < 0 ? r : append_tensor(m, "sigmas-audio", o->sigmas_audio);
}

/* Where the noise levels come from: tables, or a schedule by name. */
static int append_schedule(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_sigmas(m, o);
        if (r >= 0 && o->steps > 0)
                r = sd_bus_message_append(m, "{sv}", "steps", "u", o->steps);
        if (r >= 0)
                r = append_string(m, "schedule", o->schedule);
        if (r >= 0)
                r = append_positive(m, "shift-video", o->shift_video);
        if (r >= 0)
                r = append_positive(m, "shift-audio", o->shift_audio);

        return r;
}

static int append_trajectory(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_schedule(m, o);
        if (r >= 0)
                r = append_string(m, "sampler", o->sampler);
        if (r >= 0)
                r = append_string(m, "noise", o->noise);
        if (r >= 0)
                r = append_tensor(m, "clean-video", o->clean_video);
        if (r >= 0)
                r = append_tensor(m, "clean-audio", o->clean_audio);
        if (r >= 0 && (o->flags & LATENT_SAMPLE_KEEP_STEPS))
                r = sd_bus_message_append(m, "{sv}", "keep-steps", "b", (int) true);

        return r;
}

static int append_picture(sd_bus_message *m, const latent_condition *c, bool sound) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "kind", c->kind);
        if (r >= 0)
                r = append_tensor(m, "picture", c->video);
        if (r >= 0 && sound)
                r = sd_bus_message_append(m, "{sv}", "sound", "b", (int) true);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

static int append_pictures(sd_bus_message *m, const Request *q) {
        const latent_sample_options *o = &q->sample;
        int r;

        if (o->n_conditions == 0)
                return 0;

        r = open_list(m, "pictures", "a{sv}");
        for (uint32_t i = 0; r >= 0 && i < o->n_conditions; i++)
                r = append_picture(m, &o->conditions[i], q->sound[i]);
        return r < 0 ? r : close_list(m);
}

static int append_file(sd_bus_message *m, const latent_media *p) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "kind", p->kind);
        if (r >= 0)
                r = append_string(m, "name", p->name);
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}", "file", "h", p->file);
        if (r >= 0 && (p->flags & LATENT_MEDIA_LAST))
                r = sd_bus_message_append(m, "{sv}", "last", "b", (int) true);
        if (r >= 0 && (p->flags & (LATENT_MEDIA_SOUND | LATENT_MEDIA_SILENT)))
                r = sd_bus_message_append(m, "{sv}", "sound", "b", (p->flags & LATENT_MEDIA_SILENT) == 0);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

static int append_files(sd_bus_message *m, const char *key, const Request *q) {
        int r;

        if (q->n_pictures == 0)
                return 0;

        r = open_list(m, key, "a{sv}");
        for (uint32_t i = 0; r >= 0 && i < q->n_pictures; i++)
                r = append_file(m, &q->pictures[i]);
        return r < 0 ? r : close_list(m);
}

static int append_map(sd_bus_message *m, const Request *q) {
        int r;

        r = open_list(m, "preview-map", "d");
        for (size_t i = 0; r >= 0 && i < sizeof(q->preview_map) / sizeof(*q->preview_map); i++)
                r = sd_bus_message_append(m, "d", q->preview_map[i]);
        return r < 0 ? r : close_list(m);
}

/* What goes there, and how films look meanwhile. */
static int append_outputs(sd_bus_message *m, const Request *q) {
        int r = 0;

        if (q->has_file)
                r = sd_bus_message_append(m, "{sv}", "output", "h", q->file);
        if (r >= 0 && q->has_sheet)
                r = sd_bus_message_append(m, "{sv}", "contact-sheet", "h", q->sheet);
        if (r >= 0 && q->sheet_columns > 0)
                r = sd_bus_message_append(m, "{sv}", "sheet-columns", "u", q->sheet_columns);
        if (r >= 0 && q->sheet_rows > 0)
                r = sd_bus_message_append(m, "{sv}", "sheet-rows", "u", q->sheet_rows);
        if (r >= 0 && q->preview_steps > 0)
                r = sd_bus_message_append(m, "{sv}", "preview", "u", q->preview_steps);
        if (r >= 0 && q->has_map)
                r = append_map(m, q);
        if (r >= 0)
                r = append_string(m, "format", q->format);
        return r;
}

static int append_canvas(sd_bus_message *m, const Request *q) {
        const struct {
                const char *key;
                uint32_t value;
        } numbers[] = {{"width", q->width}, {"height", q->height}, {"frames", q->frames}};
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(numbers); i++)
                if (numbers[i].value > 0)
                        r = sd_bus_message_append(m, "{sv}", numbers[i].key, "u", numbers[i].value);
        return r;
}

static int append_render(sd_bus_message *m, const Request *q) {
        const latent_sample_options *o = &q->sample;
        int r;

        r = append_tensor(m, "prompt", o->text);
        if (r >= 0)
                r = append_canvas(m, q);
        if (r >= 0)
                r = append_schedule(m, o);
        if (r >= 0)
                r = append_string(m, "sampler", o->sampler);
        if (r >= 0)
                r = append_string(m, "noise", o->noise);
        if (r >= 0 && o->has_seed)
                r = sd_bus_message_append(m, "{sv}", "seed", "t", o->seed);
        if (r >= 0)
                r = append_outputs(m, q);
        if (r >= 0)
                r = append_string(m, "type", q->type);
        if (r >= 0 && q->ring_frames > 0)
                r = sd_bus_message_append(m, "{sv}", "ring", "t", q->ring_frames);
        if (r >= 0 && q->keep_latents)
                r = sd_bus_message_append(m, "{sv}", "keep-latents", "b", (int) true);
        if (r >= 0)
                r = append_files(m, "pictures", q);
        if (r >= 0)
                r = append_string(m, "picture-rule", q->picture_rule);

        return r;
}

/* What a kind does not have is not set. */
static int append_coding(sd_bus_message *m, const Request *q) {
        const latent_sample_options *o = &q->sample;
        int r;

        r = append_tensor(m, "text", o->text);
        if (r >= 0)
                r = append_pictures(m, q);
        if (r >= 0)
                r = append_files(m, "files", q);
        if (r >= 0)
                r = append_canvas(m, q);
        if (r >= 0)
                r = append_string(m, "picture-rule", q->picture_rule);
        if (r >= 0)
                r = append_tensor(m, "video", o->video);
        if (r >= 0)
                r = append_tensor(m, "audio", o->audio);
        if (r >= 0)
                r = append_string(m, "type", q->type);
        if (r >= 0 && q->ring_frames > 0)
                r = sd_bus_message_append(m, "{sv}", "frames", "t", q->ring_frames);
        if (r >= 0)
                r = append_string(m, "posterior", q->posterior);
        if (r >= 0 && o->has_seed)
                r = sd_bus_message_append(m, "{sv}", "seed", "t", o->seed);

        return r;
}

static int append_resume(sd_bus_message *m, const Resume *x, bool keep_steps) {
        int r;

        r = sd_bus_message_append(m, "{sv}", "resume-step", "u", x->step);
        if (r >= 0)
                r = append_string(m, "numerics", x->numerics);
        if (r >= 0)
                r = append_tensor(m, "resume-slot", &x->slot);
        if (r >= 0 && keep_steps)
                r = append_tensor(m, "kept-slots", &x->kept);

        return r;
}

static const struct {
        const char *method, *kind, *doing;
} request_names[] = {
        [REQUEST_STEP] = {"Step", "step", "Starting a step"},
        [REQUEST_SAMPLE] = {"Sample", "sample", "Starting a trajectory"},
        [REQUEST_MERGE] = {"SetLoras", NULL, "Setting adapters"},
        [REQUEST_TOKENIZE] = {"Tokenize", "tokenize", "Tokenizing a text"},
        [REQUEST_ENCODE] = {"Encode", "encode", "Encoding a prompt"},
        [REQUEST_DECODE] = {"Decode", "decode", "Decoding latents"},
        [REQUEST_ENCODE_MEDIA] = {"EncodeMedia", "encode-media", "Encoding frames or sound"},
        [REQUEST_RENDER] = {"Render", "render", "Rendering a film"},
};

bool request_makes_frames(const Request *q) {
        return q->kind == REQUEST_DECODE || (q->kind == REQUEST_RENDER && !q->has_file);
}

int request_rewind(const Request *q) {
        return (q->has_file && ftruncate(q->file, 0) < 0) || (q->has_sheet && ftruncate(q->sheet, 0) < 0) ? -errno : 0;
}

const char *request_method(const Request *q) {
        return request_names[q->kind].method;
}

const char *request_plan_kind(const Request *q) {
        return request_names[q->kind].kind;
}

const char *request_doing(const Request *q) {
        return request_names[q->kind].doing;
}

int request_append(sd_bus_message *m, const Request *q, const Resume *resume) {
        const latent_sample_options *o = &q->sample;
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = q->kind == REQUEST_RENDER  ? append_render(m, q)
                    : q->kind > REQUEST_MERGE ? append_coding(m, q)
                                              : append_inputs(m, o);
        if (r >= 0 && q->kind == REQUEST_STEP)
                r = sd_bus_message_append(m, "{sv}", "sigma-video", "d", q->sigma_video);
        if (r >= 0 && q->kind == REQUEST_STEP)
                r = sd_bus_message_append(m, "{sv}", "sigma-audio", "d", q->sigma_audio);
        if (r >= 0 && q->kind == REQUEST_STEP)
                r = append_sigmas(m, o);
        if (r >= 0 && q->kind == REQUEST_SAMPLE)
                r = append_trajectory(m, o);
        if (r >= 0 && resume && resume->step > 0)
                r = append_resume(m, resume, (o->flags & LATENT_SAMPLE_KEEP_STEPS) != 0);
        if (r >= 0)
                r = append_output(m, o);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

int copy_string(const char *s, char **ret) {
        char *copy = NULL;

        if (s) {
                copy = strdup(s);
                if (!copy)
                        return -ENOMEM;
        }

        *ret = copy;
        return 0;
}

Request *request_free(Request *r) {
        if (!r)
                return NULL;

        for (size_t i = 0; i < ELEMENTSOF(r->strings); i++)
                free(r->strings[i]);
        for (size_t i = 0; i < ELEMENTSOF(r->condition_kinds); i++)
                free(r->condition_kinds[i]);
        (void) adapters_unref(r->adapters);
        if (r->has_file)
                (void) close(r->file);
        for (uint32_t i = 0; i < r->n_pictures; i++) {
                (void) close(r->pictures[i].file);
                free(r->picture_kinds[i]);
                free(r->picture_names[i]);
        }
        if (r->has_sheet)
                (void) close(r->sheet);
        free(r);
        return NULL;
}

static latent_sample_options from_step(const latent_step_options *s) {
        return (latent_sample_options){
                .text = s->text,
                .text_tags = s->text_tags,
                .video = s->video,
                .audio = s->audio,
                .compute = s->compute,
                .output_offset = s->output_offset,
                .output_bytes = s->output_bytes,
                .conditions = s->conditions,
                .n_conditions = s->n_conditions,
                .has_seed = s->has_seed,
                .condition_noise = s->condition_noise,
                .seed = s->seed,
                .mask_video = s->mask_video,
                .mask_audio = s->mask_audio,
                .sigmas_video = s->sigmas_video,
                .sigmas_audio = s->sigmas_audio,
        };
}

/* Points *t to a copy of what it points to. */
static void own_tensor(const latent_tensor **t, latent_tensor *copy) {
        if (!*t)
                return;

        *copy = **t;
        *t = copy;
}

static int own_string(const char **s, char **copy) {
        int r;

        r = copy_string(*s, copy);
        *s = *copy;
        return r;
}

static int check_conditions(const latent_sample_options *o, latent_error *e) {
        if (o->n_conditions > CONDITIONS_MAX || (o->n_conditions > 0 && !o->conditions))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%u conditions%s; expected an array of at most %u.", o->n_conditions,
                        o->conditions ? "" : " at no place", CONDITIONS_MAX);

        for (uint32_t i = 0; i < o->n_conditions; i++)
                if (o->conditions[i].frame > UINT32_MAX)
                        return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                                "Condition %u is at frame %llu, which no film has.", i,
                                (unsigned long long) o->conditions[i].frame);

        return 0;
}

static int own_conditions(Request *q) {
        latent_sample_options *o = &q->sample;

        for (uint32_t i = 0; i < o->n_conditions; i++) {
                latent_condition *c = &q->conditions[i];

                *c = o->conditions[i];
                own_tensor(&c->video, &q->condition_video[i]);
                own_tensor(&c->audio, &q->condition_audio[i]);
                if (own_string(&c->kind, &q->condition_kinds[i]) < 0)
                        return -ENOMEM;
        }

        o->conditions = q->conditions;
        return 0;
}

static int own_all(Request *q) {
        latent_sample_options *o = &q->sample;
        const latent_tensor **tensors[REQUEST_TENSORS] = {&o->text, &o->text_tags, &o->video, &o->audio, &o->sigmas_video,
                &o->sigmas_audio, &o->mask_video, &o->mask_audio, &o->clean_video, &o->clean_audio};
        const char **strings[REQUEST_STRINGS] = {&o->compute, &o->schedule, &o->sampler, &o->noise, &o->condition_noise, &q->type,
                &q->picture_rule, &q->posterior, &q->format};

        for (size_t i = 0; i < REQUEST_TENSORS; i++)
                own_tensor(tensors[i], &q->tensors[i]);
        for (size_t i = 0; i < REQUEST_STRINGS; i++)
                if (own_string(strings[i], &q->strings[i]) < 0)
                        return -ENOMEM;

        return own_conditions(q);
}

int request_new(const latent_step_options *step, const latent_sample_options *sample, AdapterSet *adapters,
        Request **ret, latent_error *e) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        q = calloc(1, sizeof(*q));
        if (!q)
                return error_errno(e, -ENOMEM, "Starting a job");

        q->kind = step ? REQUEST_STEP : REQUEST_SAMPLE;
        q->adapters = adapters_ref(adapters);
        q->sample = step ? from_step(step) : *sample;
        if (step) {
                q->sigma_video = step->sigma_video;
                q->sigma_audio = step->sigma_audio;
        }

        r = check_conditions(&q->sample, e);
        if (r < 0)
                return r;
        r = own_all(q);
        if (r < 0)
                return error_errno(e, r, "Starting a job");

        *ret = STEAL_PTR(q);
        return 0;
}

/* Duplicates of the files, and copies of the texts. */
static int own_pictures(const Request *q, Request *copy, latent_error *e) {
        copy->n_pictures = 0;
        for (uint32_t i = 0; i < q->n_pictures; i++) {
                latent_media *p = &copy->pictures[i];

                p->file = fcntl(q->pictures[i].file, F_DUPFD_CLOEXEC, 3);
                if (p->file < 0)
                        return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "The file of picture %u cannot be used: %s.", i,
                                strerror(errno));
                copy->n_pictures = i + 1; /* from here on it is freed with the request */
                if (own_string(&p->kind, &copy->picture_kinds[i]) < 0 || own_string(&p->name, &copy->picture_names[i]) < 0)
                        return error_errno(e, -ENOMEM, request_doing(q));
        }

        return 0;
}

int request_new_coding(const Request *q, Request **ret, latent_error *e) {
        CLEANUP(request_freep) Request *copy = NULL;
        int r;

        r = check_conditions(&q->sample, e);
        if (r < 0)
                return r;

        copy = malloc(sizeof(*copy));
        if (!copy)
                return error_errno(e, -ENOMEM, request_doing(q));

        *copy = *q;
        copy->adapters = adapters_ref(q->adapters);
        copy->has_file = copy->has_sheet = false; /* until they are ours */
        copy->n_pictures = 0;
        if (q->has_file) {
                copy->file = fcntl(q->file, F_DUPFD_CLOEXEC, 3);
                if (copy->file < 0)
                        return error_set(e, -errno, LATENT_ERROR_INVALID_ARGUMENT, "The file cannot be used: %s.", strerror(errno));
                copy->has_file = true;
        }
        if (q->has_sheet) {
                copy->sheet = fcntl(q->sheet, F_DUPFD_CLOEXEC, 3);
                if (copy->sheet < 0)
                        return error_set(e, -errno, LATENT_ERROR_INVALID_ARGUMENT,
                                "The file of the contact sheet cannot be used: %s.", strerror(errno));
                copy->has_sheet = true;
        }
        r = own_pictures(q, copy, e);
        if (r < 0)
                return r;
        r = own_all(copy);
        if (r < 0)
                return error_errno(e, r, request_doing(q));

        *ret = STEAL_PTR(copy);
        return 0;
}

int request_new_merge(AdapterSet *adapters, Request **ret, latent_error *e) {
        Request *q;

        q = calloc(1, sizeof(*q));
        if (!q)
                return error_errno(e, -ENOMEM, "Setting adapters");

        q->kind = REQUEST_MERGE;
        q->adapters = adapters_ref(adapters);
        *ret = q;
        return 0;
}
