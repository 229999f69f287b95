/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Test data of tests/data for the H3 tests: files in memory, tensors by name, distances. Everything fails
 * the test that asks for something that is not there. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "service/h3/dit.h"
#include "service/h3/layout.h"
#include "service/h3/model.h"
#include "service/shared/safetensors.h"

/* A file's bytes, freed by the caller. folder: NULL for the test data, else an absolute one. */
uint8_t *golden_read(const char *folder, const char *name, uint64_t *ret_size);

typedef struct Golden {
        uint8_t *bytes;
        StHeader *header;
} Golden;

Golden *golden_open(const char *name); /* "case_t2va_tiny" of tests/data/dit */
bool golden_is_there(const char *name);
Golden *golden_open_at(const char *file); /* "lora/lora_comfy.safetensors" of tests/data */
Golden *golden_free(Golden *g);
void golden_freep(Golden **g);

const StTensor *golden_tensor(const Golden *g, const char *name);
/* Data of a tensor of that type; ret_n (may be NULL): elements. */
const void *golden_data(const Golden *g, const char *name, StType type, uint64_t *ret_n);
float golden_meta_float(const Golden *g, const char *key);

/* |a - b| / |b| over the whole, in f64 (README of the golden data), and the largest difference. NaN gives
 * infinity. */
double golden_distance(const float *a, const float *b, uint64_t n, double *ret_largest);

/* A model and the memory it views. */
typedef struct GoldenModel {
        H3Model *model;
        uint8_t *bytes[8];
        size_t n_bytes;
} GoldenModel;

/* names: NULL-terminated, paths below folder (as in golden_read()); the model sees their last parts. */
GoldenModel *golden_model_open(const char *folder, const char *const *names, H3QkvOrder order);
GoldenModel *golden_comfy(void);
GoldenModel *golden_model_free(GoldenModel *g);
void golden_model_freep(GoldenModel **g);

const char *golden_derived(void); /* the folder of what derive-layouts.py made */

/* A case, ready to run. */
typedef struct GoldenCase {
        Golden *file;
        H3Layout *layout;
        H3ConditionLatents conditions[H3_CONDITIONS_MAX];
        const uint16_t *text;
        const float *video, *audio;
        uint64_t n_video, n_audio;
        float sigma_video, sigma_audio;
} GoldenCase;

GoldenCase *golden_case_open(const char *name, const H3Config *c);
GoldenCase *golden_case_free(GoldenCase *k);
void golden_case_freep(GoldenCase **k);

/* The velocities of a step; both arrays are owned. */
typedef struct GoldenStep {
        float *video, *audio;
        uint64_t n_video, n_audio;
} GoldenStep;

/* Room for those of the case, zeros. */
GoldenStep golden_step_new(const GoldenCase *k);
void golden_step_done(GoldenStep *s);
/* One step of a case by its name ("t2va_tiny"), by the CPU backend. */
void golden_step_run(const H3Model *m, const char *name, H3Compute compute, GoldenStep *ret);

/* The arguments of a step at the case's own latents and sigmas; refined: h3_refine_text() of it. */
H3StepInput golden_input(const GoldenCase *k, H3Compute compute, const void *refined);
/* One step of any input on one rank of the CPU backend. sparse: as in H3Plan. Velocities (n_video and n_audio values) are
 * freed by the caller. */
void golden_run(const H3Model *m, const H3StepInput *in, const H3Sparse *sparse, const H3StepHooks *hooks, uint64_t n_video,
        uint64_t n_audio, float **ret_video, float **ret_audio);
/* Refined text of a case, freed by the caller. */
void *golden_refine(const H3Model *m, const GoldenCase *k, H3Compute compute);

/* One step of a case on one rank of the CPU backend: refined text, then the model. Velocities are freed by
 * the caller. */
void golden_step(const H3Model *m, const GoldenCase *k, H3Compute compute, const float *video,
        const float *audio, float sigma_video, float sigma_audio, const H3StepHooks *hooks,
        float **ret_video, float **ret_audio);
