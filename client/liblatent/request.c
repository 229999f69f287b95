/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

int append_string(sd_bus_message *m, const char *key, const char *value) {
        return value ? sd_bus_message_append(m, "{sv}", key, "s", value) : 0;
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

static int append_inputs(sd_bus_message *m, const latent_tensor *text, const latent_tensor *text_tags,
        const latent_tensor *video, const latent_tensor *audio) {
        int r;

        r = append_tensor(m, "text", text);
        if (r >= 0)
                r = append_tensor(m, "text-tags", text_tags);
        if (r >= 0)
                r = append_tensor(m, "video", video);
        if (r >= 0)
                r = append_tensor(m, "audio", audio);

        return r;
}

static int append_output(sd_bus_message *m, const char *compute, uint64_t offset, uint64_t bytes) {
        int r;

        r = append_string(m, "compute", compute);
        if (r >= 0 && offset > 0)
                r = sd_bus_message_append(m, "{sv}", "output-offset", "t", offset);
        if (r >= 0 && bytes > 0)
                r = sd_bus_message_append(m, "{sv}", "output-bytes", "t", bytes);

        return r;
}

static int append_positive(sd_bus_message *m, const char *key, double value) {
        /* Zero is "not set"; everything else, NaN too, is the service's to judge. */
        return value == 0 ? 0 : sd_bus_message_append(m, "{sv}", key, "d", value);
}

int request_append_step(sd_bus_message *m, const latent_step_options *o) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_inputs(m, o->text, o->text_tags, o->video, o->audio);
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}", "sigma-video", "d", o->sigma_video);
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}", "sigma-audio", "d", o->sigma_audio);
        if (r >= 0)
                r = append_output(m, o->compute, o->output_offset, o->output_bytes);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

/* Where the noise levels come from: tables, or a schedule by name. */
static int append_schedule(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = append_tensor(m, "sigmas-video", o->sigmas_video);
        if (r >= 0)
                r = append_tensor(m, "sigmas-audio", o->sigmas_audio);
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

static int append_resume(sd_bus_message *m, const Resume *x, bool keep_steps) {
        int r;

        r = sd_bus_message_append(m, "{sv}", "resume-step", "u", x->step);
        if (r >= 0)
                r = append_string(m, "numerics", x->numerics);
        if (r >= 0 && keep_steps)
                r = append_tensor(m, "kept-video", &x->kept_video);
        if (r >= 0 && keep_steps)
                r = append_tensor(m, "kept-audio", &x->kept_audio);

        return r;
}

int request_append_sample(sd_bus_message *m, const latent_sample_options *o, const Resume *resume) {
        bool goes_on = resume && resume->step > 0;
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_inputs(m, o->text, o->text_tags, goes_on ? &resume->video : o->video,
                        goes_on ? &resume->audio : o->audio);
        if (r >= 0 && goes_on)
                r = append_resume(m, resume, (o->flags & LATENT_SAMPLE_KEEP_STEPS) != 0);
        if (r >= 0)
                r = append_schedule(m, o);
        if (r >= 0)
                r = append_string(m, "sampler", o->sampler);
        if (r >= 0 && (o->flags & LATENT_SAMPLE_KEEP_STEPS))
                r = sd_bus_message_append(m, "{sv}", "keep-steps", "b", (int) true);
        if (r >= 0)
                r = append_output(m, o->compute, o->output_offset, o->output_bytes);
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

static const latent_tensor *keep_tensor(Request *r, unsigned i, const latent_tensor *t) {
        if (!t)
                return NULL;

        r->tensors[i] = *t;
        return &r->tensors[i];
}

Request *request_free(Request *r) {
        if (!r)
                return NULL;

        for (size_t i = 0; i < ELEMENTSOF(r->strings); i++)
                free(r->strings[i]);
        free(r);
        return NULL;
}

DEFINE_CLEANUP(Request *, request_free)

int request_new(const latent_step_options *step, const latent_sample_options *sample, Request **ret) {
        CLEANUP(request_freep) Request *r = NULL;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;

        if (step) {
                latent_step_options *o = &r->step;

                *o = *step;
                o->text = keep_tensor(r, 0, o->text);
                o->text_tags = keep_tensor(r, 1, o->text_tags);
                o->video = keep_tensor(r, 2, o->video);
                o->audio = keep_tensor(r, 3, o->audio);
                if (copy_string(o->compute, &r->strings[0]) < 0)
                        return -ENOMEM;
                o->compute = r->strings[0];
        } else {
                latent_sample_options *o = &r->sample;

                *o = *sample;
                r->is_sample = true;
                o->text = keep_tensor(r, 0, o->text);
                o->text_tags = keep_tensor(r, 1, o->text_tags);
                o->video = keep_tensor(r, 2, o->video);
                o->audio = keep_tensor(r, 3, o->audio);
                o->sigmas_video = keep_tensor(r, 4, o->sigmas_video);
                o->sigmas_audio = keep_tensor(r, 5, o->sigmas_audio);
                if (copy_string(o->compute, &r->strings[0]) < 0 || copy_string(o->schedule, &r->strings[1]) < 0 ||
                        copy_string(o->sampler, &r->strings[2]) < 0)
                        return -ENOMEM;
                o->compute = r->strings[0];
                o->schedule = r->strings[1];
                o->sampler = r->strings[2];
        }

        *ret = STEAL_PTR(r);
        return 0;
}
