/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The audio VAE of the golden data and whole sounds through it, for the tests of service/h3/audio-vae*.c. */

#include "service/h3/audio-vae.h"
#include "tests/unit/h3/golden.h"

#define AUDIO_MEMORY (1ull << 33) /* enough for any job here */

typedef struct AudioModel {
        H3AudioVae *vae;
        uint8_t *bytes[2];
} AudioModel;

/* file: "vae/audio/model.folded.safetensors" below folder (as in golden_read()); config: likewise or NULL.
 */
AudioModel *audio_model_open(const char *folder, const char *file, const char *config);
AudioModel *audio_golden(void); /* the first layout that the golden data has, with its config.json */
AudioModel *audio_model_free(AudioModel *m);
void audio_model_freep(AudioModel **m);

/* golden_open_at() below a folder. */
Golden *audio_golden_file(const char *folder, const char *file);
bool audio_has(const char *file); /* of the golden data */

/* All jobs of a sound, one after the other; results are freed by the caller. piece 0: as planned. ops: NULL
 * for the best of this machine. */
float *audio_decode(const H3AudioVae *v, const LkOps *ops, const float *latents, uint64_t n, uint64_t piece,
        const H3StepHooks *hooks);
/* ret: latents, mean and log of the standard deviation, [channels, 2, A] each. */
void audio_encode(const H3AudioVae *v, const LkOps *ops, const float *wave, uint64_t samples, uint64_t piece,
        const H3StepHooks *hooks, float *ret[3]);
