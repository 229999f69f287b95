/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A small model of the released shape (56 heads) with made-up weights, and requests of any number of rows. */

#include "service/h3/dit.h"

typedef enum ToyKind {
        TOY_F32,   /* in f32 */
        TOY_BF16,  /* in bf16, f32 weights */
        TOY_INT8,  /* in bf16, rotated int8 weights in all blocks */
        TOY_MIXED, /* in bf16, int8 weights in the first block only */
        _TOY_MAX,
} ToyKind;

typedef struct Toy {
        H3Model model;
        H3Block blocks[2];
        H3Compute compute;
        void *memory[128]; /* owned */
        size_t n_memory;
} Toy;

Toy *toy_new(ToyKind kind);
/* Gates of the coarse branch of sparse attention (vsa), of the type of q or of another one. */
void toy_add_gates(Toy *t, bool like_q);
Toy *toy_free(Toy *t);
void toy_freep(Toy **t);

typedef struct ToyStep {
        H3Layout *layout;
        H3StepInput in; /* points into the rest */
        float *video, *audio;
        void *text;
        uint64_t n_video, n_audio;
} ToyStep;

/* text + 2 * audio + frames * (height / 2) * (width / 2) rows of made-up latents, in two timesteps. */
ToyStep *toy_step_new(const Toy *t, uint64_t text, uint64_t audio, uint64_t frames, uint64_t height, uint64_t width);
/* The same of so many rows, at least 4: one text row, `audio` rows per channel, one video row a frame. */
ToyStep *toy_step_of_rows(const Toy *t, uint64_t rows, uint64_t audio);
ToyStep *toy_step_free(ToyStep *s);
void toy_step_freep(ToyStep **s);
