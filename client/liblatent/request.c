/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/request.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

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

int request_append_sample(sd_bus_message *m, const latent_sample_options *o) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_inputs(m, o->text, o->text_tags, o->video, o->audio);
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
