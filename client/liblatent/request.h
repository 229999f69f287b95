/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The a{sv} dictionaries of Session.Step and Session.Sample (dbus/org.latentd.Latent1.Session.xml). Only
 * what the caller set is sent: the service knows the defaults and judges the values. Negative errno of
 * sd-bus. */

#include <stdbool.h>

#include <systemd/sd-bus.h>

#include "client/latent.h"

/* {key: string} unless value is NULL. */
int append_string(sd_bus_message *m, const char *key, const char *value);

/* NULL stays NULL. -ENOMEM. */
int copy_string(const char *s, char **ret);

/* Where a trajectory goes on that an earlier run of the service began. */
typedef struct Resume {
        uint32_t step;             /* 0: it starts at its beginning */
        latent_tensor video, audio; /* the state */
        latent_tensor kept_video, kept_audio; /* with KEEP_STEPS: the states before */
        const char *numerics;
} Resume;

int request_append_step(sd_bus_message *m, const latent_step_options *o);
int request_append_sample(sd_bus_message *m, const latent_sample_options *o, const Resume *resume); /* resume may be NULL */

/* A request as the caller made it, with copies of all that it points to. */
typedef struct Request {
        bool is_sample;
        latent_step_options step;
        latent_sample_options sample;
        latent_tensor tensors[6];
        char *strings[3];
} Request;

/* One of step and sample is NULL. -ENOMEM. */
int request_new(const latent_step_options *step, const latent_sample_options *sample, Request **ret);
Request *request_free(Request *r);
