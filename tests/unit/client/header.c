/* SPDX-License-Identifier: Apache-2.0 */

/* latent.h alone, as C99 -pedantic and (included by header.cpp) as C++; and that the layouts are what was
 * released. */

#include "client/latent.h"

#include <stdio.h>

typedef struct layout {
        const char *what;
        size_t is, was;
} layout;

#define SIZE(type, was)                                                                                     \
        { #type, sizeof(type), was }
#define PLACE(type, member, was)                                                                            \
        { #type "." #member, offsetof(type, member), was }

/* Of version 0.1.0, on 64-bit machines. Entries are added, never changed. */
static const layout layouts[] = {
        SIZE(latent_error, 1088),
        PLACE(latent_error, name, 4),
        PLACE(latent_error, text, 64),
        SIZE(latent_client_options, 32),
        PLACE(latent_client_options, address, 8),
        PLACE(latent_client_options, socket, 16),
        SIZE(latent_load_options, 48),
        PLACE(latent_load_options, name, 8),
        PLACE(latent_load_options, qkv_order, 16),
        PLACE(latent_load_options, partition, 24),
        PLACE(latent_load_options, numa, 32),
        PLACE(latent_load_options, tokenizer, 40),
        SIZE(latent_tensor, 104),
        PLACE(latent_tensor, size, 8),
        PLACE(latent_tensor, dtype, 16),
        PLACE(latent_tensor, n_dims, 32),
        PLACE(latent_tensor, shape, 40),
        SIZE(latent_session_options, 120),
        PLACE(latent_session_options, ranks, 4),
        PLACE(latent_session_options, input_bytes, 8),
        PLACE(latent_session_options, output_bytes, 16),
        PLACE(latent_session_options, compute, 24),
        PLACE(latent_session_options, job_class, 32),
        PLACE(latent_session_options, shares, 40),
        PLACE(latent_session_options, n_shares, 48),
        PLACE(latent_session_options, chunks, 52),
        PLACE(latent_session_options, plan, 56),
        PLACE(latent_session_options, exchange, 64),
        PLACE(latent_session_options, gpus, 72),
        PLACE(latent_session_options, n_gpus, 80),
        PLACE(latent_session_options, conditioner, 88),
        PLACE(latent_session_options, audio_vae, 104),
        PLACE(latent_session_options, sparse, 112),
        SIZE(latent_step_options, 144),
        PLACE(latent_step_options, text, 8),
        PLACE(latent_step_options, sigma_video, 40),
        PLACE(latent_step_options, compute, 56),
        PLACE(latent_step_options, output_bytes, 72),
        PLACE(latent_step_options, conditions, 80),
        PLACE(latent_step_options, n_conditions, 88),
        PLACE(latent_step_options, has_seed, 92),
        PLACE(latent_step_options, condition_noise, 96),
        PLACE(latent_step_options, seed, 104),
        PLACE(latent_step_options, mask_audio, 120),
        PLACE(latent_step_options, sigmas_video, 128),
        PLACE(latent_step_options, sigmas_audio, 136),
        SIZE(latent_sample_options, 192),
        PLACE(latent_sample_options, flags, 4),
        PLACE(latent_sample_options, sigmas_video, 40),
        PLACE(latent_sample_options, steps, 56),
        PLACE(latent_sample_options, schedule, 64),
        PLACE(latent_sample_options, shift_audio, 80),
        PLACE(latent_sample_options, sampler, 88),
        PLACE(latent_sample_options, output_bytes, 112),
        PLACE(latent_sample_options, conditions, 120),
        PLACE(latent_sample_options, has_seed, 132),
        PLACE(latent_sample_options, seed, 144),
        PLACE(latent_sample_options, mask_audio, 160),
        PLACE(latent_sample_options, noise, 168),
        PLACE(latent_sample_options, clean_audio, 184),
        SIZE(latent_condition, 32),
        PLACE(latent_condition, frame, 8),
        PLACE(latent_condition, audio, 24),
        SIZE(latent_lora, 16),
        PLACE(latent_lora, strength, 8),
        SIZE(latent_tokenize_options, 32),
        PLACE(latent_tokenize_options, text, 8),
        PLACE(latent_tokenize_options, output_bytes, 24),
        SIZE(latent_picture, 24),
        PLACE(latent_picture, picture, 8),
        PLACE(latent_picture, sound, 16),
        SIZE(latent_encode_options, 88),
        PLACE(latent_encode_options, n_pictures, 4),
        PLACE(latent_encode_options, text, 8),
        PLACE(latent_encode_options, pictures, 16),
        PLACE(latent_encode_options, picture_rule, 24),
        PLACE(latent_encode_options, type, 32),
        PLACE(latent_encode_options, compute, 40),
        PLACE(latent_encode_options, output_bytes, 56),
        PLACE(latent_encode_options, files, 64),
        PLACE(latent_encode_options, n_files, 72),
        PLACE(latent_encode_options, frames, 84),
        SIZE(latent_decode_options, 64),
        PLACE(latent_decode_options, video, 8),
        PLACE(latent_decode_options, audio, 16),
        PLACE(latent_decode_options, type, 24),
        PLACE(latent_decode_options, frames, 32),
        PLACE(latent_decode_options, compute, 40),
        PLACE(latent_decode_options, output_bytes, 56),
        SIZE(latent_encode_media_options, 56),
        PLACE(latent_encode_media_options, has_seed, 4),
        PLACE(latent_encode_media_options, video, 8),
        PLACE(latent_encode_media_options, audio, 16),
        PLACE(latent_encode_media_options, posterior, 24),
        PLACE(latent_encode_media_options, seed, 32),
        PLACE(latent_encode_media_options, output_bytes, 48),
        SIZE(latent_media, 24),
        PLACE(latent_media, name, 8),
        PLACE(latent_media, file, 16),
        PLACE(latent_media, flags, 20),
        SIZE(latent_render_options, 200),
        PLACE(latent_render_options, flags, 4),
        PLACE(latent_render_options, prompt, 8),
        PLACE(latent_render_options, frames, 24),
        PLACE(latent_render_options, sigmas_video, 32),
        PLACE(latent_render_options, shift_video, 56),
        PLACE(latent_render_options, seed, 88),
        PLACE(latent_render_options, file, 100),
        PLACE(latent_render_options, ring, 120),
        PLACE(latent_render_options, output_bytes, 144),
        PLACE(latent_render_options, pictures, 152),
        PLACE(latent_render_options, n_pictures, 160),
        PLACE(latent_render_options, picture_rule, 168),
        PLACE(latent_render_options, sheet, 176),
        PLACE(latent_render_options, sheet_columns, 180),
        PLACE(latent_render_options, sheet_rows, 184),
        PLACE(latent_render_options, preview_steps, 188),
        PLACE(latent_render_options, preview_map, 192),
        SIZE(latent_progress, 80),
        PLACE(latent_progress, state, 4),
        PLACE(latent_progress, phase, 8),
        PLACE(latent_progress, step, 40),
        PLACE(latent_progress, fraction, 56),
        PLACE(latent_progress, eta_usec, 64),
};

int main(void) {
        int failed = 0;
        size_t i;

        for (i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++)
                if (layouts[i].is != layouts[i].was) {
                        printf("%s: %lu, was released as %lu\n", layouts[i].what,
                                (unsigned long) layouts[i].is, (unsigned long) layouts[i].was);
                        failed = 1;
                }

        return failed;
}
