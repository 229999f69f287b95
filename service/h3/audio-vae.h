/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The audio VAE (h3.md 6): sound to latents and back, on the host's arrays, by independent jobs. A mono
 * network that runs once for each of the two channels; all numbers are f32.
 *
 *  wave     [2, samples], left and right, normally -1 .. 1; 32,000 samples a second
 *  latents  [32, 2, A], normalised ((mean - latents_mean) / latents_std), A = samples / 800 rounded up. As
 *           rows of the transformer: h3_audio_to_rows()
 *
 * Decoding and the encoder's convolutions are local: they are cut into time pieces of whole latents with
 * exact surroundings. A job is one piece of one channel. Any number of threads or ranks may run the jobs of
 * a plan in any order, each with a context of its own, and any piece length gives the same bits; memory is
 * that of a job. The encoder's last part attends over all latents and is one job a channel
 * (h3_audio_encode_finish()). */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/dit.h"
#include "service/h3/model.h"
#include "service/h3/rank.h"
#include "service/shared/fault.h"

#define H3_AUDIO_CHANNELS_MAX 64
#define H3_AUDIO_STAGES_MAX 8
#define H3_AUDIO_BLOCKS 3    /* AMP blocks of a decoder stage, one per kernel size */
#define H3_AUDIO_DILATIONS 3 /* of a block */

typedef struct H3AudioConfig {
        uint32_t channels;    /* of the latent: 32 */
        uint32_t latent_dim;  /* between encoder, projection and decoder: 2048 */
        uint32_t hop;         /* samples per latent: 800, the product of the rates */
        uint32_t sample_rate; /* 32000 */
        /* the encoder; 0 in a file without one */
        uint32_t encoder_dim, encoder_stages, heads;
        uint32_t encoder_rates[H3_AUDIO_STAGES_MAX];
        /* the decoder; 0 in a file without one */
        uint32_t decoder_dim, decoder_stages;
        uint32_t decoder_rates[H3_AUDIO_STAGES_MAX], decoder_kernels[H3_AUDIO_STAGES_MAX];
        uint32_t block_kernels[H3_AUDIO_BLOCKS], block_dilations[H3_AUDIO_BLOCKS][H3_AUDIO_DILATIONS];
        float mean[H3_AUDIO_CHANNELS_MAX], std[H3_AUDIO_CHANNELS_MAX];
} H3AudioConfig;

typedef struct H3AudioWeights H3AudioWeights; /* audio-vae-private.h */

typedef struct H3AudioVae {
        H3AudioConfig config;
        bool has_encoder, has_decoder;
        H3AudioWeights *weights; /* owned */
        /* what it was made of, for people */
        const char *layout; /* "weight norm" or "folded" */
        uint32_t n_tensors;
        uint64_t weight_bytes;  /* in the files */
        uint64_t private_bytes; /* copies: folded weights, and those that the network needs in another order
                                 */
} H3AudioVae;

/* Opens the VAE from the files of its folder, or from a single file. Weights as pairs (X.weight_g and
 * X.weight_v, or X.parametrizations.weight.original0 and 1) or folded (X.weight), F32, BF16 or F16. Sizes
 * come from the shapes; config.json adds what shapes do not say (heads, dilations, latent statistics;
 * without it those of the released model) and must agree with them. A file with only the decoder or only the
 * encoder is fine. Views point into the files' memory, which must stay mapped as long as the model lives.
 * -EBADMSG (InvalidFile), -EINVAL (InvalidModel: one error lists what is missing, left over and mis-shaped),
 * -ENOMEM. */
int h3_audio_vae_open(const H3File *files, size_t n_files, H3AudioVae **ret, Fault *f);
H3AudioVae *h3_audio_vae_free(H3AudioVae *v); /* accepts NULL, returns NULL */

/* How a sound is worked on. Job j is channel j % 2 of piece j / 2, so that low numbers are early sound;
 * piece i is latents [i * piece, (i + 1) * piece) as far as there are any. */
typedef struct H3AudioPlan {
        uint64_t samples; /* per channel, of the wave */
        uint64_t latents; /* A */
        uint64_t piece;   /* latents per job, > 0 */
        uint64_t jobs;
        uint64_t job_memory;    /* device bytes that the largest job takes */
        uint64_t finish_memory; /* device bytes of h3_audio_encode_finish(); 0 when decoding */
        uint64_t hidden_bytes;  /* host bytes between the encoder's jobs and its finish; 0 when decoding */
} H3AudioPlan;

/* Latents that a wave of so many samples has. */
uint64_t h3_audio_latents(const H3AudioVae *v, uint64_t samples);

/* A plan for `latents` latents with jobs that take at most `memory` bytes of device memory each. piece:
 * latents per job, cut to what there is; 0: chosen (as long as fits, at most H3_AUDIO_PIECE). -EINVAL
 * (NotSupported: no decoder; InvalidArgument: no latents), -ENOMEM (DoesNotFit, with the numbers). */
#define H3_AUDIO_PIECE 128
int h3_audio_decode_plan(
        const H3AudioVae *v, uint64_t latents, uint64_t piece, uint64_t memory, H3AudioPlan *ret, Fault *f);

/* One job. rank: its ops and context (plan and exchange are not looked at). latents: host, [channels, 2, A],
 * the same for all jobs. work: plan.job_memory bytes of the rank's device, contents do not matter. Writes
 * the job's samples of the host's ret_wave [2, samples], clamped to -1 .. 1. hooks: NULL, or on_tap gets
 * every stage under the names of the golden data, [positions, channels] of the job's window. -EINVAL
 * (Internal: a job that the plan does not have), -ENOMEM or a device error. */
int h3_audio_decode_job(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p, const float *latents,
        uint64_t job, void *work, const H3StepHooks *hooks, float *ret_wave, Fault *f);

/* The same for the encoder; the wave counts as followed by zeros up to a whole latent. `memory` also bounds
 * finish_memory, and hidden_bytes, which grow with the sound: too long a sound is -ENOMEM (DoesNotFit). */
int h3_audio_encode_plan(
        const H3AudioVae *v, uint64_t samples, uint64_t piece, uint64_t memory, H3AudioPlan *ret, Fault *f);

/* One job: reads the host's wave [2, samples] and writes its rows of the host's ret_hidden
 * [2, A, latent_dim]. Otherwise as h3_audio_decode_job(). */
int h3_audio_encode_job(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p, const float *wave,
        uint64_t job, void *work, const H3StepHooks *hooks, float *ret_hidden, Fault *f);

/* After all jobs, for channel 0 and 1, on any rank: from hidden to the channel's part of ret_latents
 * [channels, 2, A], the normalised mean. ret_mean and ret_log_std, of the same shape and as the network says
 * them, may be NULL. work: plan.finish_memory bytes of device memory. */
int h3_audio_encode_finish(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p,
        const float *hidden, uint32_t channel, void *work, const H3StepHooks *hooks, float *ret_latents,
        float *ret_mean, float *ret_log_std, Fault *f);
