/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sampler.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "service/h3/mask.h"
#include "service/h3/schedule.h"
#include "service/shared/fmath.h"

void h3_euler(const float *x, const float *velocity, float sigma, float next, uint64_t n, float *ret) {
        float t = 1.0f - sigma; /* diffusers hands the model and the step t, not sigma: 1 - t rounds twice */
        float back = 1.0f - t, ratio = next / sigma, rest = 1.0f - ratio;

        for (uint64_t i = 0; i < n; i++) {
                float x0 = x[i] + back * velocity[i];

                ret[i] = ratio * x[i] + rest * x0;
        }
}

/* x0 of a stream: what the model was shown and its velocity, with what is kept put back. */
static void denoise(const H3SamplerMask *mask, const float *x, const float *velocity, float sigma,
        uint64_t n, float *ret) {
        h3_sampler_input(mask, x, n, ret);
        for (uint64_t i = 0; i < n; i++)
                ret[i] = ret[i] + velocity[i] * sigma;
        if (mask)
                h3_mask_mix(mask->mask, mask->n_mask, ret, mask->clean, n, ret);
}

static void euler_stream(const H3SamplerMask *mask, const float *x, const float *velocity, float sigma,
        float next, uint64_t n, float *ret) {
        float ratio = next / sigma, rest = 1.0f - ratio;

        if (!mask) {
                h3_euler(x, velocity, sigma, next, n, ret);
                return;
        }
        denoise(mask, x, velocity, 1.0f - (1.0f - sigma), n, ret);
        for (uint64_t i = 0; i < n; i++)
                ret[i] = ratio * x[i] + rest * ret[i];
}

/* The audio's place beside a video sigma (h3.md 4.4). ComfyUI hands the model sigma * 1000, never less than
 * 1e-3. */
typedef struct Carrier {
        float sigma_video, sigma_audio;
        float carry; /* carried audio times this is the stream's own latent */
} Carrier;

static Carrier carrier_of(const H3Sampler *s, float sigma) {
        float video = sigma * 1000.0f / 1000.0f, base, audio;

        if (video < 1e-6f)
                video = 1e-6f;
        base = video / (s->shift_video + video * (1.0f - s->shift_video));
        audio = s->shift_audio * base / (1.0f + (s->shift_audio - 1.0f) * base);
        return (Carrier){video, audio, audio / video};
}

static float ratio_of(const H3Sampler *s) {
        return s->shift_video / s->shift_audio;
}

int h3_sampler_check(const H3Sampler *s, Fault *f) {
        int r;

        if (s->kind != H3_SAMPLER_EULER && s->kind != H3_SAMPLER_RES_MULTISTEP &&
                s->kind != H3_SAMPLER_RES_MULTISTEP_PERSTREAM)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "There is no sampler number %d; give euler, res_multistep or "
                        "res_multistep_perstream.",
                        (int) s->kind);
        r = h3_schedule_check("sigmas_video", s->sigmas_video, (uint64_t) s->steps + 1, f);
        if (r >= 0 && !h3_sampler_carries(s->kind))
                return h3_schedule_check("sigmas_audio", s->sigmas_audio, (uint64_t) s->steps + 1, f);
        if (r < 0)
                return r;
        if (!(isfinite(s->shift_video) && s->shift_video > 0 && isfinite(s->shift_audio) &&
                    s->shift_audio > 0))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "res_multistep needs the shifts of both streams; they are %g (video) and %g "
                        "(audio), expected finite numbers above 0, such as 12 and 3.",
                        (double) s->shift_video, (double) s->shift_audio);
        return 0;
}

void h3_sampler_start(
        const H3Sampler *s, const float *video, const float *audio, const H3SamplerState *state) {
        float carry;

        memmove(state->video, video, s->n_video * sizeof(float));
        memmove(state->audio, audio, s->n_audio * sizeof(float));
        if (!h3_sampler_carries(s->kind))
                return;
        carry = carrier_of(s, s->sigmas_video[0]).carry;
        for (uint64_t i = 0; i < s->n_audio; i++)
                state->carried[i] = state->audio[i] / carry;
}

void h3_sampler_sigmas(const H3Sampler *s, uint32_t step, float *ret_video, float *ret_audio) {
        Carrier c;

        if (!h3_sampler_carries(s->kind)) {
                *ret_video = s->sigmas_video[step];
                *ret_audio = s->sigmas_audio[step];
                return;
        }
        c = carrier_of(s, s->sigmas_video[step]);
        *ret_video = c.sigma_video;
        *ret_audio = c.sigma_audio;
}

void h3_sampler_input(const H3SamplerMask *mask, const float *latent, uint64_t n, float *ret) {
        if (mask)
                h3_mask_mix(mask->pooled, mask->n_mask, latent, mask->held, n, ret);
        else
                memmove(ret, latent, n * sizeof(float));
}

/* A step of res_multistep as x' = keep * x + now * denoised + before * denoised of the step before. */
typedef struct Multistep {
        float decay, h, now, before;
} Multistep;

/* sigmas[0] is the step before, [1] where we are, [2] where we go, above 0. In f64: phi2 loses half of its
 * digits. */
static Multistep multistep_of(const float *sigmas) {
        double previous = -fmath_log((double) sigmas[0]), here = -fmath_log((double) sigmas[1]);
        double h = -fmath_log((double) sigmas[2]) - here, c2 = (previous - here) / h;
        double decay = fmath_exp(-h), phi1 = (1.0 - decay) / h, phi2 = (1.0 - phi1) / h;

        return (Multistep){(float) decay, (float) h, (float) (phi1 - phi2 / c2), (float) (phi2 / c2)};
}

/* One history: x and denoised, both at step `step` of `sigmas`. */
static void res_multistep(const float *sigmas, uint32_t step, const float *x, const float *denoised,
        const float *before, uint64_t n, float *ret) {
        float sigma = sigmas[step], next = sigmas[step + 1];
        Multistep m;

        if (step == 0 || next == 0) { /* Euler */
                for (uint64_t i = 0; i < n; i++)
                        ret[i] = x[i] + (x[i] - denoised[i]) / sigma * (next - sigma);
                return;
        }
        m = multistep_of(sigmas + step - 1);
        for (uint64_t i = 0; i < n; i++)
                ret[i] = m.decay * x[i] + m.h * (m.now * denoised[i] + m.before * before[i]);
}

/* x0 of carried audio, which is ratio times the stream's. `own` is the stream's latent. */
static void denoise_carried(const H3Sampler *s, const Carrier *c, float sigma, const float *own,
        const float *carried, const float *velocity, float *ret) {
        const H3SamplerMask *mask = s->audio_mask;
        float ratio = ratio_of(s), of_own = 1.0f - ratio,
              of_velocity = 1.0f + (ratio - 1.0f) * c->sigma_audio;

        for (uint64_t i = 0; i < s->n_audio; i++) {
                float y = carried[i], x = own[i], m = 1;

                if (mask) { /* as the model was shown it */
                        m = mask->pooled[i % mask->n_mask];
                        y = m * y + (1.0f - m) * (mask->held[i] / c->carry);
                        x = m * x + (1.0f - m) * mask->held[i];
                        m = mask->mask[i % mask->n_mask];
                }
                ret[i] = y - (of_own * x - of_velocity * velocity[i]) * sigma;
                if (mask)
                        ret[i] = m * ret[i] + (1.0f - m) * (ratio * mask->clean[i]);
        }
}

static void step_carried(const H3Sampler *s, uint32_t step, const H3SamplerState *now, const float *velocity,
        const H3SamplerState *next) {
        Carrier here = carrier_of(s, s->sigmas_video[step]);
        float sigma = s->sigmas_video[step], sigma_next = s->sigmas_video[step + 1];
        float back = sigma_next == 0 ? 1.0f / ratio_of(s) : carrier_of(s, sigma_next).carry;

        denoise_carried(s, &here, sigma, now->audio, now->carried, velocity, next->denoised_audio);
        res_multistep(s->sigmas_video, step, now->carried, next->denoised_audio, now->denoised_audio,
                s->n_audio, next->carried);
        for (uint64_t i = 0; i < s->n_audio; i++)
                next->audio[i] = next->carried[i] * back;
}

void h3_sampler_step(const H3Sampler *s, uint32_t step, const H3SamplerState *now,
        const float *velocity_video, const float *velocity_audio, const H3SamplerState *next) {
        const float *video = s->sigmas_video + step, *audio = s->sigmas_audio + step;

        if (s->kind == H3_SAMPLER_EULER) {
                euler_stream(s->video_mask, now->video, velocity_video, video[0], video[1], s->n_video,
                        next->video);
                euler_stream(s->audio_mask, now->audio, velocity_audio, audio[0], audio[1], s->n_audio,
                        next->audio);
                return;
        }

        denoise(s->video_mask, now->video, velocity_video, video[0], s->n_video, next->denoised_video);
        res_multistep(s->sigmas_video, step, now->video, next->denoised_video, now->denoised_video,
                s->n_video, next->video);
        if (h3_sampler_carries(s->kind)) {
                step_carried(s, step, now, velocity_audio, next);
                return;
        }
        denoise(s->audio_mask, now->audio, velocity_audio, audio[0], s->n_audio, next->denoised_audio);
        res_multistep(s->sigmas_audio, step, now->audio, next->denoised_audio, now->denoised_audio,
                s->n_audio, next->audio);
}
