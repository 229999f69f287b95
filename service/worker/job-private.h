/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The steps of job_new(), and what job-*.c share; nobody else includes it. Each of them fills its part of a
 * job that is being made; on failure the caller drops the job. */

#include "service/h3/noise.h"
#include "service/worker/job-context.h"

enum {
        STREAM_VIDEO,
        STREAM_AUDIO,
};

/* job-context.c */
int latents_new(const Job *j, bool whole_slot, Latents *ret); /* zeros; else the streams alone */
H3SamplerState latents_state(const Latents *l);
char *job_slot(const Job *j, uint32_t state); /* in the output arena */
uint64_t job_read_commit(const Job *j);
void job_write_commit(const Job *j, uint32_t steps_done);
/* Whether the place for results lies in the output arena. -EINVAL. */
int job_check_output(const Job *j, const WireJobOpen *w, Fault *f);

/* job-start.c: how many steps of the job the output says are done, for RESUME. -EINVAL, -ENODATA. */
int job_resume_commit(const Job *j, uint32_t *ret, Fault *f);

/* job-text.c: text, layout with the conditions' places, conditions' latents (not yet noised) */
int job_take_text(Job *j, const WireJobOpen *w, uint8_t **ret_tags, Fault *f);
int job_make_layout(Job *j, const WireJobOpen *w, const uint8_t *tags, Fault *f);
int job_take_conditions(Job *j, const WireJobOpen *w, Fault *f);

/* job-sparse.c: what is asked against the model (NotSupported, InvalidArgument); its blocks, if there are rows enough */
int job_check_sparse(const WireJobOpen *w, const H3Model *m, Fault *f);
int job_make_sparse(Job *j, const WireJobOpen *w);

/* job-schedule.c: sampler, sigmas, steps */
int job_make_schedule(Job *j, const WireJobOpen *w, Fault *f);

/* job-masks.c: masks and what they keep. given: the request's own latents; where the kept part is not given
 * it is copied from there. held video is not made yet: job_hold_video() does, with the noise that the model
 * sees. */
int job_take_masks(Job *j, const WireJobOpen *w, const Latents *given, Fault *f);
void job_hold_video(Job *j, const float *noise);

/* job-start.c: the conditions' noise, the kept video's noise, and the state that the job goes on from: its
 * start, the slot that the client gives, or what is committed in the output arena. */
int job_make_start(Job *j, const WireJobOpen *w, Latents *given, Fault *f); /* given: may be taken over */
bool job_start_is_open(const Job *j); /* the state is still to be drawn */
JobStart *job_start_free(JobStart *x);  /* accepts NULL, returns NULL */
