/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The conditioner's golden data (tests/data/text/encoder): models in memory and cases as inputs. */

#include "service/h3/text.h"
#include "tests/unit/h3/golden.h"

#define TEXT_CASES_MAX 16
#define TEXT_VISION_MAX 16

/* Names of the cases, from index.json; freed by nobody. Returns how many. */
size_t text_case_names(const char *ret[TEXT_CASES_MAX]);

/* A model of config.json and one tensor file of the folder, and the memory it views. */
typedef struct TextModelFiles {
        H3TextModel *model;
        uint8_t *config, *bytes;
} TextModelFiles;

TextModelFiles *text_model_files_open(const char *name); /* "model.comfy.safetensors" */
TextModelFiles *text_model_files_free(TextModelFiles *t);
void text_model_files_freep(TextModelFiles **t);
bool text_model_files_exist(const char *name);

/* A part of a golden tensor that one vision input makes: "image" or "video", from which patch on. */
typedef struct TextPart {
        const char *kind;
        uint64_t patch;
} TextPart;

typedef struct TextCase {
        Golden *file;
        H3TextInput input; /* compute: f32 */
        H3VisionInput vision[TEXT_VISION_MAX];
        TextPart parts[TEXT_VISION_MAX];
        float *patches[2]; /* of image and video, owned */
} TextCase;

TextCase *text_case_open(const char *name);
TextCase *text_case_free(TextCase *k);
void text_case_freep(TextCase **k);

/* [n, hidden] of a run on one rank of the CPU backend, freed by the caller; bf16 is widened. */
float *text_case_run(const H3TextModel *m, const H3TextInput *in, const H3StepHooks *hooks);
