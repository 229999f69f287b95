/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "service/media/channel.h"
#include "service/media/input.h"

/* All of the file's sound at MEDIA_SAMPLE_RATE, from where its film begins (else its first sample) on: place
 * becomes F32 [2, n] of the n samples that *ret_samples says. Mono is on both sides, more than two channels
 * are mixed down without getting louder than full. Beyond samples_max: cut there, and no more is decoded; else
 * LimitExceeded, at once where the file says how long it is. */
int sound_decode(
        Input *in, uint64_t samples_max, bool cut, float *place, Channel *c, uint64_t *ret_samples, Fault *f);
