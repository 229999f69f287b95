/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The a{sv} dictionaries of Session.Step and Session.Sample (dbus/org.latentd.Latent1.Session.xml). Only
 * what the caller set is sent: the service knows the defaults and judges the values. Negative errno of
 * sd-bus. */

#include <systemd/sd-bus.h>

#include "client/latent.h"

/* {key: string} unless value is NULL. */
int append_string(sd_bus_message *m, const char *key, const char *value);

int request_append_step(sd_bus_message *m, const latent_step_options *o);
int request_append_sample(sd_bus_message *m, const latent_sample_options *o);
