/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A job of every way to encode and decode, small, on the tiny models. */

#include "tests/unit/worker/coder-bench.h"

#define CODER_ARENA (UINT64_C(16) << 20)

enum { CODER_CONDITIONER = 1, CODER_VIDEO, CODER_VIDEO_ORIGINAL, CODER_AUDIO, CODER_AUDIO_DEMO, CODER_MODELS };

/* For bench_load(). */
const char *const *coder_files(uint64_t model);

typedef struct CoderKind {
        const char *name;
        uint64_t model;
        WireJobOpen (*job)(CoderBench *b); /* its model is loaded */
} CoderKind;

#define CODER_KINDS 11u
#define CODER_DECODE_HALF 10u /* the one that is in f16 where the backend has it */
extern const CoderKind coder_kinds[CODER_KINDS];

/* Two chunks of latents, height x width, in f32. */
WireJobOpen coder_decode_job(CoderBench *b, uint64_t model, uint64_t height, uint64_t width);
