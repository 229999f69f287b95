/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Quantised conditioners (h3.md 2.2, 2.3), made from the tiny one. */

#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/text-case.h"

typedef struct TextQuantised {
        const LkOps *ops;
        LkContext *context;
        Checkpoint *original, *quantised, *expanded;
        char *config;
        uint8_t *bytes[3];
        H3TextModel *models[3]; /* original, quantised, expanded in advance */
        void *memory[512];
        size_t n_memory;
} TextQuantised;

typedef enum TextFormat {
        TEXT_INT8,        /* rotated, the token table not */
        TEXT_NVFP4,       /* with input scales; the table as in INT8 */
        TEXT_NVFP4_TABLE, /* the table, too, without them */
} TextFormat;

TextQuantised *text_quantised_new(TextFormat format);
void text_quantised_freep(TextQuantised **p);
