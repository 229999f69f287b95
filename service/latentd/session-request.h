/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reading the arguments of OpenSession, the jobs and SetLoras (dbus/org.latentd.Latent1.Session.xml) into
 * numbers that are in range. What the arenas hold and whether shapes fit the model is the worker's to check.
 */

#include <systemd/sd-bus.h>

#include "service/latentd/render.h"
#include "service/latentd/session.h"

/* The caller's model is looked up: NotFound; Busy while it loads. */
int session_request_open(sd_bus_message *message, Manager *m, uid_t uid, SessionOptions *ret, Fault *f);
/* flags: WIRE_JOB_PLAN_ONLY or 0. */
int session_request_step(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
/* Shifts that were not given (0, as session_request_render() leaves them) are those that the model was made for, or else the released
 * model's. When it is MODEL_READY. */
void session_request_shifts(const Model *m, WireJobOpen *q);
/* What a session's steps are, with the shift by which parts of the schedule become sigmas: the request's, else the model's. */
void session_request_sparse(const SparseOptions *o, const Model *m, WireJobOpen *q);
int session_request_sample(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
/* session-request-code.c */
int session_request_tokenize(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
int session_request_encode(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
/* The same; with "files" ret_files->n_pictures is not 0, and it is what counts. Its files are the caller's. */
int session_request_encode_files(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, RenderOptions *ret_files, Fault *f);
int session_request_encode_media(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
int session_request_decode(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
/* session-request-render.c. Shifts that were not given are 0. ret's files are duplicates and the caller's. */
int session_request_render(
        sd_bus_message *message, const Session *s, uint32_t flags, RenderOptions *ret, Fault *f);
/* Both arguments. The models are those of the caller's user and not counted yet. */
int session_request_loras(
        sd_bus_message *message, const Session *s, LoraList *ret, WireCompute *ret_compute, Fault *f);

const char *session_compute_to_string(WireCompute c);
