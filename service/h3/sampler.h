/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Samplers (h3.md 4.3 - 4.5): from a state and the model's velocities to the next state. Host arithmetic in
 * f32, shared by all backends.
 *
 * What must persist between steps, and nothing else: the number of steps done and the arrays of
 * H3SamplerState that the kind has (f32, to the bit). With them, the schedule and the masks, a run goes on
 * from any step with the same bits; the sigma of the step before is taken from the schedule. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/fault.h"

typedef enum H3SamplerKind {
        H3_SAMPLER_EULER,         /* per stream, as diffusers computes it */
        H3_SAMPLER_RES_MULTISTEP, /* as ComfyUI: over [video | carried audio], both on the video's sigmas */
        H3_SAMPLER_RES_MULTISTEP_PERSTREAM, /* two of them, each stream on its own sigmas */
} H3SamplerKind;

/* Needs H3SamplerState.carried: audio as the sampler holds it, sigma_video / sigma_audio times the latent.
 */
static inline bool h3_sampler_carries(H3SamplerKind kind) {
        return kind == H3_SAMPLER_RES_MULTISTEP;
}

/* Needs H3SamplerState.denoised_*. */
static inline bool h3_sampler_remembers(H3SamplerKind kind) {
        return kind != H3_SAMPLER_EULER;
}

/* [n_video] and [n_audio] floats each; what the kind does not need may be NULL. */
typedef struct H3SamplerState {
        float *video, *audio; /* the streams' latents: input of the next step, at the end the result */
        float *carried;       /* [n_audio] */
        float *denoised_video, *denoised_audio; /* what the step before took for clean (audio: of `carried`
                                                   if there is one); undefined before the first step */
} H3SamplerState;

/* The mask of one stream (mask.h), all of it given: part of the latent is kept. */
typedef struct H3SamplerMask {
        uint64_t n_mask;     /* the masks have n / channels values */
        const float *mask;   /* as the client gave it */
        const float *pooled; /* as the model has it */
        const float *clean;  /* [n]: what is kept */
        const float *held;   /* [n]: what the model sees of it: video noised like a condition, audio clean */
} H3SamplerMask;

typedef struct H3Sampler {
        H3SamplerKind kind;
        uint32_t steps;
        const float *sigmas_video, *sigmas_audio; /* [steps + 1]; the carried form reads the video's only */
        float shift_video, shift_audio;           /* the carried form's relation of the two */
        uint64_t n_video, n_audio;
        const H3SamplerMask *video_mask, *audio_mask; /* NULL: all of it is generated */
} H3Sampler;

/* kind, steps, sigmas and shifts. -EINVAL with InvalidArgument. */
int h3_sampler_check(const H3Sampler *s, Fault *f);

/* The state before step 0 from the streams' own latents at the first sigmas (noise, if these are 1): fills
 * state->video and audio (which may be those arrays) and carried. */
void h3_sampler_start(
        const H3Sampler *s, const float *video, const float *audio, const H3SamplerState *state);

/* What the model is to be told in step i < steps. */
void h3_sampler_sigmas(const H3Sampler *s, uint32_t step, float *ret_video, float *ret_audio);

/* What the model is to be shown of a stream's latent: latent where it is generated, `held` where it is kept.
 * mask may be NULL: then it is the latent. ret may be latent. */
void h3_sampler_input(const H3SamplerMask *mask, const float *latent, uint64_t n, float *ret);

/* Step i: velocities in the model's sign, of inputs made by h3_sampler_input() of `now`. Fills every array
 * of `next` that the kind has; it must not overlap `now`. */
void h3_sampler_step(const H3Sampler *s, uint32_t step, const H3SamplerState *now,
        const float *velocity_video, const float *velocity_audio, const H3SamplerState *next);

/* One stream of H3_SAMPLER_EULER without a mask: with t = 1 - sigma in f32, x0 = x + (1 - t) * v,
 * r = next / sigma, ret = r * x + (1 - r) * x0, each operation rounded to f32. ret must not overlap x. n
 * elements. */
void h3_euler(const float *x, const float *velocity, float sigma, float next, uint64_t n, float *ret);
