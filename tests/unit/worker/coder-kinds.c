/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/coder-kinds.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

#define PROMPT "a red circle moves left over a dark blue background, low tone"

static const char *const video_original[] = {"tests/data/vae/video/config.diffusers.json:config.json",
        "tests/data/vae/video/model.original.safetensors", NULL};
static const char *const audio_demo[] = {
        "tests/demo-model/audio_vae/config.json", "tests/demo-model/audio_vae/diffusion_pytorch_model.safetensors", NULL};

const char *const *coder_files(uint64_t model) {
        const char *const *const files[CODER_MODELS] = {[CODER_CONDITIONER] = bench_conditioner, [CODER_VIDEO] = bench_video_vae,
                [CODER_VIDEO_ORIGINAL] = video_original, [CODER_AUDIO] = bench_audio_vae, [CODER_AUDIO_DEMO] = audio_demo};

        return files[model];
}

static const ModelEntry *model_of(const CoderBench *b, uint64_t model) {
        return model_table_find(&b->models, model);
}

static void add_picture(CoderBench *b, WireJobOpen *w, uint64_t height, uint64_t width) {
        CLEANUP_FREE uint8_t *pixels = bench_bytes(height * width * 3, 11 + w->n_conditions);
        const WireTensor t = bench_put(b, ST_U8, 4, (uint64_t[]){1, height, width, 3}, pixels);

        w->conditions[w->n_conditions++] = (WireCondition){.kind = WIRE_CONDITION_KEYFRAME, .video_offset = t.offset, .frames = 1,
                .height = height, .width = width};
}

static WireJobOpen text_job(CoderBench *b, WireCompute compute, bool pictures) {
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE, CODER_CONDITIONER);

        w.text = bench_put(b, ST_U8, 1, (uint64_t[]){strlen(PROMPT)}, PROMPT);
        w.owner = 1000;
        w.compute = compute;
        w.output_type = compute == WIRE_COMPUTE_F32 ? ST_F32 : ST_BF16;
        if (pictures) {
                add_picture(b, &w, 96, 64);
                add_picture(b, &w, 64, 64);
        }
        return w;
}

static WireJobOpen words_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_BF16, false);
}

static WireJobOpen pictures_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_BF16, true);
}

static WireJobOpen pictures_f32_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_F32, true);
}

WireJobOpen coder_decode_job(CoderBench *b, uint64_t model, uint64_t height, uint64_t width) {
        uint64_t channels = h3_video_vae_config(model_of(b, model)->video_vae)->latent_channels;
        CLEANUP_FREE float *z = bench_numbers(channels * 8 * height * width, 1);
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, model);

        w.video = bench_put(b, ST_F32, 4, (uint64_t[]){channels, 8, height, width}, z);
        w.output_type = ST_F32;
        w.compute = WIRE_COMPUTE_F32;
        return w;
}

/* Two clips. */
static WireJobOpen encode_video(CoderBench *b, uint64_t model) {
        CLEANUP_FREE uint8_t *pixels = bench_bytes(18 * 64 * 32 * 3, 2);
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, model);

        w.video = bench_put(b, ST_U8, 4, (uint64_t[]){18, 64, 32, 3}, pixels);
        return w;
}

/* A piece of each channel. */
static WireJobOpen decode_audio(CoderBench *b, uint64_t model) {
        uint64_t channels = model_of(b, model)->audio_vae->config.channels, n = 20;
        CLEANUP_FREE float *latents = bench_numbers(2 * channels * n, 3);
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, model);

        w.audio = bench_put(b, ST_F32, 3, (uint64_t[]){channels, 2, n}, latents);
        return w;
}

static WireJobOpen encode_audio(CoderBench *b, uint64_t model) {
        uint64_t n = (uint64_t) model_of(b, model)->audio_vae->config.hop * 20 - 77;
        CLEANUP_FREE float *wave = bench_numbers(2 * n, 4);
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, model);

        for (uint64_t i = 0; i < 2 * n; i++)
                wave[i] *= 0.2f;
        w.audio = bench_put(b, ST_F32, 2, (uint64_t[]){2, n}, wave);
        return w;
}

static WireJobOpen decode_film(CoderBench *b) {
        return coder_decode_job(b, CODER_VIDEO, 4, 2);
}

static WireJobOpen decode_original(CoderBench *b) {
        return coder_decode_job(b, CODER_VIDEO_ORIGINAL, 4, 2);
}

static WireJobOpen decode_half(CoderBench *b) {
        WireJobOpen w = coder_decode_job(b, CODER_VIDEO_ORIGINAL, 4, 2);

        w.compute = WIRE_COMPUTE_AUTO;
        return w;
}

static WireJobOpen encode_film(CoderBench *b) {
        return encode_video(b, CODER_VIDEO);
}

static WireJobOpen encode_original(CoderBench *b) {
        return encode_video(b, CODER_VIDEO_ORIGINAL);
}

static WireJobOpen decode_sound(CoderBench *b) {
        return decode_audio(b, CODER_AUDIO);
}

static WireJobOpen decode_demo_sound(CoderBench *b) {
        return decode_audio(b, CODER_AUDIO_DEMO);
}

static WireJobOpen encode_sound(CoderBench *b) {
        return encode_audio(b, CODER_AUDIO);
}

const CoderKind coder_kinds[CODER_KINDS] = {
        {"words", CODER_CONDITIONER, words_job},
        {"words and pictures", CODER_CONDITIONER, pictures_job},
        {"words and pictures in f32", CODER_CONDITIONER, pictures_f32_job},
        {"decode video, diffusers names", CODER_VIDEO, decode_film},
        {"decode video, original names", CODER_VIDEO_ORIGINAL, decode_original},
        {"encode video, diffusers names", CODER_VIDEO, encode_film},
        {"encode video, original names", CODER_VIDEO_ORIGINAL, encode_original},
        {"decode sound, weight norm", CODER_AUDIO, decode_sound},
        {"decode sound, demo model", CODER_AUDIO_DEMO, decode_demo_sound},
        {"encode sound", CODER_AUDIO, encode_sound},
        {"decode video in f16", CODER_VIDEO_ORIGINAL, decode_half},
};
