/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reading the dictionaries of OpenSession, Step and Sample (dbus/org.latentd.Latent1.Session.xml) into
 * numbers that are in range. What the arenas hold and whether shapes fit the model is the worker's to check.
 */

#include <systemd/sd-bus.h>

#include "service/latentd/session.h"

/* The caller's model is looked up: NotFound; Busy while it loads. */
int session_request_open(sd_bus_message *message, Manager *m, uid_t uid, SessionOptions *ret, Fault *f);
int session_request_step(sd_bus_message *message, const Session *s, WireJobOpen *ret, Fault *f);
int session_request_sample(sd_bus_message *message, const Session *s, WireJobOpen *ret, Fault *f);

const char *session_compute_to_string(WireCompute c);
