/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sigma schedules (h3.md 4.2), to the bit as the published ones. */

#include <stddef.h>
#include <stdint.h>

#include "service/h3/model.h"
#include "service/shared/fault.h"

#define H3_STEPS_MAX 1000

typedef enum H3ScheduleKind {
        H3_SCHEDULE_SIMPLE,    /* ComfyUI: 1000-entry table, n evaluations */
        H3_SCHEDULE_REFERENCE, /* diffusers: linspace(1, 0, n + 1), equal neighbours merged */
} H3ScheduleKind;

/* evaluations 1 .. H3_STEPS_MAX, shift finite and > 0. ret_sigmas[evaluations + 1], *ret_n = evaluations
 * really there (merged neighbours lower it); the last sigma is 0. -EINVAL with InvalidArgument. */
int h3_schedule(H3ScheduleKind kind, uint32_t evaluations, float shift, float *ret_sigmas, uint32_t *ret_n,
        Fault *f);

/* The audio's sigmas beside the video's, by the two shifts (h3.md 4.4): the same place on the unshifted
 * grid. n values; ret may be sigmas_video. */
void h3_schedule_audio(float shift_video, float shift_audio, const float *sigmas_video, uint64_t n,
        float *ret_sigmas_audio);

/* A list that a client gives: 2 .. H3_STEPS_MAX + 1 values, finite, in [0, 1], strictly descending. */
int h3_schedule_check(const char *what, const float *sigmas, uint64_t n, Fault *f);

/* Of a pipeline's folders scheduler/ and audio_scheduler/, whose files have one name: these in a model. */
#define H3_SCHEDULER_VIDEO "scheduler_config.json"
#define H3_SCHEDULER_AUDIO "audio_scheduler_config.json"

/* The shifts that these files of a checkpoint give, 0 where none does: the released model's then, 12 and 3. -EBADMSG (InvalidFile),
 * -ENOMEM. */
int h3_shifts_read(const H3File *files, size_t n_files, float *ret_video, float *ret_audio, Fault *f);
