/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The model in f64, in plain loops over the checkpoint's tensors by name (h3.md 1.2, 1.5 - 1.7): shares no
 * code with service/h3, so that it can judge what no published value exists for. The caller says of every
 * row what it is; nothing here knows of requests (scene.h does). */

#include <stdint.h>

#include "tests/unit/h3/golden.h"

typedef struct OracleModel {
        uint32_t layers, refiner_layers, hidden, heads, ffn, text_dim, time_hidden, time_dim;
        uint32_t threads;
        /* Sets ret[n] to the numbers first .. first + n of a tensor, by its original name (rows of QKV
         * stacked). Several threads call it. */
        void (*read)(const void *userdata, const char *name, uint64_t first, uint64_t n, double *ret);
        const void *userdata;
} OracleModel;

/* The tiny model of comfy.safetensors, which must outlive it. */
OracleModel oracle_tiny(const Golden *comfy);

typedef enum OracleRounding {
        ORACLE_EXACT, /* none */
        ORACLE_BF16, /* to bf16 wherever the published code, run in bf16, does: every product and sum of rows
                        (h3.md 1.5, 1.8). How far that is from exact is what a bf16 backend may be, too */
} OracleRounding;

typedef enum OracleKind {
        ORACLE_TEXT,
        ORACLE_VIDEO,
        ORACLE_AUDIO,
} OracleKind;

#define ORACLE_IN_MAX 5120

typedef struct OracleRow {
        OracleKind kind;
        uint32_t tag;
        double t;                 /* timestep */
        double position[3];       /* t, h, w */
        double in[ORACLE_IN_MAX]; /* text text_dim, video 96, audio 32 numbers */
        double out[96];           /* set: what the head of the row's kind says; of text rows nothing */
} OracleRow;

/* rows[0 .. n_text) are the text. */
void oracle_run(const OracleModel *m, OracleRounding rounding, OracleRow *rows, uint64_t n_text, uint64_t n);
