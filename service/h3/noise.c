/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/noise.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

#define WORDS 624
#define SHIFT 397
#define BLOCK 16 /* numbers that are made at once: 8 pairs */
#define ASK_NUMBERS 65536 /* a multiple of BLOCK; some milliseconds */
#define TWO_PI 6.283185307179586

#define CONDITION_PART 0.999f
#define CONDITION_NOISE 0.001f

void h3_noise_init(H3Noise *g, uint64_t seed) {
        g->state[0] = (uint32_t) seed;
        for (uint32_t i = 1; i < WORDS; i++) {
                uint32_t before = g->state[i - 1];

                g->state[i] = 1812433253u * (before ^ before >> 30) + i;
        }
        g->at = WORDS;
        g->has_spare = false;
        g->stop = NULL;
        g->stop_userdata = NULL;
        g->share = NULL;
}

static void renew(H3Noise *g) {
        for (uint32_t i = 0; i < WORDS; i++) {
                uint32_t bits = (g->state[i] & 0x80000000u) | (g->state[(i + 1) % WORDS] & 0x7fffffffu);
                uint32_t twist = bits & 1 ? 0x9908b0dfu : 0;

                g->state[i] = g->state[(i + SHIFT) % WORDS] ^ bits >> 1 ^ twist;
        }
        g->at = 0;
}

static uint32_t next_word(H3Noise *g) {
        uint32_t x;

        if (g->at == WORDS)
                renew(g);
        x = g->state[g->at++];
        x ^= x >> 11;
        x ^= x << 7 & 0x9d2c5680u;
        x ^= x << 15 & 0xefc60000u;
        return x ^ x >> 18;
}

/* In [0, 1), 24 bits. */
static double uniform_of(uint32_t word) {
        return (double) (word & 0xffffffu) / 0x1p24;
}

/* In [0, 1), 53 bits, the first word is the high one. */
static double next_uniform_wide(H3Noise *g) {
        uint64_t high = next_word(g), word = high << 32 | next_word(g);

        return (double) (word & 0x1fffffffffffffull) / 0x1p53;
}

static void next_words(H3Noise *g, uint32_t ret[static BLOCK]) {
        for (uint32_t j = 0; j < BLOCK; j++)
                ret[j] = next_word(g);
}

/* 16 words become 16 normals: number j and number j + 8 are a pair. */
static void make_block(const uint32_t words[static BLOCK], float *ret) {
        for (uint32_t j = 0; j < BLOCK / 2; j++) {
                double radius = sqrt(-2.0 * fmath_log(1.0 - uniform_of(words[j])));
                double angle = TWO_PI * uniform_of(words[j + BLOCK / 2]);

                ret[j] = (float) (radius * fmath_cos(angle));
                ret[j + BLOCK / 2] = (float) (radius * fmath_sin(angle));
        }
}

static float draw_one(H3Noise *g) {
        double angle, radius;

        if (g->has_spare) {
                g->has_spare = false;
                return (float) g->spare;
        }
        angle = TWO_PI * next_uniform_wide(g);
        radius = sqrt(-2.0 * fmath_log(1.0 - next_uniform_wide(g))); /* the difference is exact */
        g->spare = radius * fmath_sin(angle);
        g->has_spare = true;
        return (float) (radius * fmath_cos(angle));
}

static void skip_words(H3Noise *g, uint64_t n) {
        while (n > 0) {
                uint64_t left;

                if (g->at == WORDS)
                        renew(g);
                left = WORDS - g->at < n ? WORDS - g->at : n;
                g->at += (uint32_t) left;
                n -= left;
        }
}

/* The last numbers of a draw of n that is no multiple of BLOCK: torch has drawn uniforms for the ragged end, too, before it makes the last
 * 16 anew. */
static void draw_last(H3Noise *g, uint64_t n, float *ret) {
        uint32_t words[BLOCK];

        skip_words(g, n % BLOCK);
        next_words(g, words);
        make_block(words, ret);
}

typedef struct Blocks {
        const H3Noise *g;
        float *numbers; /* each is a word first */
} Blocks;

static void make_blocks(void *arg, uint64_t begin, uint64_t end) {
        const Blocks *b = arg;
        uint32_t words[BLOCK];

        for (uint64_t i = begin; i < end; i++) {
                float *block = b->numbers + i * BLOCK;

                if (i * BLOCK % ASK_NUMBERS == 0 && b->g->stop && b->g->stop(b->g->stop_userdata))
                        return;
                memcpy(words, block, sizeof(words));
                make_block(words, block);
        }
}

/* A draw of at least BLOCK numbers. Words come one after the other, and quickly; what takes time are the logarithms. */
static void draw_many(H3Noise *g, uint64_t n, float *ret) {
        Blocks all = {g, ret};
        float *at = ret;

        for (uint64_t i = 0; i < n / BLOCK; i++, at += BLOCK) {
                uint32_t words[BLOCK];

                if (i * BLOCK % ASK_NUMBERS == 0 && g->stop && g->stop(g->stop_userdata))
                        return;
                next_words(g, words);
                memcpy(at, words, sizeof(words));
        }
        if (g->share)
                g->share(n / BLOCK, make_blocks, &all);
        else
                make_blocks(&all, 0, n / BLOCK);
        if (n % BLOCK != 0)
                draw_last(g, n, ret + n - BLOCK);
}

void h3_noise_draw(H3Noise *g, uint64_t n, float *ret) {
        if (n >= BLOCK) {
                draw_many(g, n, ret);
                return;
        }
        for (uint64_t i = 0; i < n; i++)
                ret[i] = draw_one(g);
}

/* Numbers first .. first + BLOCK - 1 of a draw of which the first `part` of every `period` are wanted. */
static void keep_block(const float *block, uint64_t first, uint64_t period, uint64_t part, float *ret) {
        for (uint64_t i = 0; i < BLOCK; i++) {
                uint64_t at = first + i;

                if (at % period < part)
                        ret[at / period * part + at % period] = block[i];
        }
}

/* A draw of at least BLOCK numbers, of which the first `part` of every `period` are kept. Of a long film's noise a condition has
 * little: the others' logarithms are not taken. */
static void draw_parts(H3Noise *g, uint64_t n, uint64_t period, uint64_t part, float *ret) {
        uint64_t whole = n / BLOCK * BLOCK;
        uint32_t words[BLOCK];
        float block[BLOCK];

        for (uint64_t i = 0; i < whole; i += BLOCK) {
                uint64_t at = i % period;

                if (i % ASK_NUMBERS == 0 && g->stop && g->stop(g->stop_userdata))
                        return;
                if (at >= part && at + BLOCK <= period) {
                        skip_words(g, BLOCK);
                        continue;
                }
                next_words(g, words);
                make_block(words, block);
                keep_block(block, i, period, part, ret);
        }
        if (whole == n)
                return;
        draw_last(g, n, block);
        keep_block(block, n - BLOCK, period, part, ret);
}

int h3_noise_target(H3Noise *g, H3NoiseOrder order, const H3Config *c, const H3Shape *s, float *ret_video,
        float *ret_audio) {
        uint64_t n_audio = 2 * s->audio * c->audio_channels;
        CLEANUP_FREE float *rows = NULL;

        if (order == H3_NOISE_DIFFUSERS) {
                rows = malloc(n_audio * sizeof(float));
                if (!rows)
                        return -ENOMEM;
        }
        h3_noise_draw(g, c->video_channels * s->frames * s->height * s->width, ret_video);
        h3_noise_draw(g, n_audio, rows ? rows : ret_audio);
        if (rows)
                h3_rows_to_audio(c, s->audio, rows, 0, 2 * s->audio, ret_audio);
        return 0;
}

int h3_noise_condition_comfy(H3Noise *g, const H3Config *c, const H3Grid *grid, float *ret) {
        uint64_t n_rows = grid->frames * h3_grid_rows_h(c, grid) * h3_grid_rows_w(c, grid);
        uint64_t n = n_rows * c->video_channels * c->patch_h * c->patch_w;
        CLEANUP_FREE float *rows = malloc(n * sizeof(float));

        if (!rows)
                return -ENOMEM;
        h3_noise_draw(g, n, rows);
        h3_rows_to_video(c, grid, rows, 0, n_rows, ret);
        return 0;
}

void h3_noise_condition_official(
        H3Noise *g, const H3Config *c, const H3Grid *grid, uint64_t full_frames, float *ret) {
        uint64_t per_frame = grid->height * grid->width;
        uint64_t full = full_frames > grid->frames ? full_frames : grid->frames;

        if (full == grid->frames)
                h3_noise_draw(g, c->video_channels * full * per_frame, ret);
        else
                draw_parts(g, c->video_channels * full * per_frame, full * per_frame, grid->frames * per_frame, ret);
}

void h3_noise_mix(const float *z, const float *noise, uint64_t n, float *ret) {
        for (uint64_t i = 0; i < n; i++)
                ret[i] = CONDITION_PART * z[i] + CONDITION_NOISE * noise[i];
}
