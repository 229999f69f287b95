/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The tiny model in f64, in plain loops over the checkpoint's tensors by name (h3.md 1.2, 1.5 - 1.7): shares
 * no code with service/h3, so that it can judge what no published value exists for. The caller says of every
 * row what it is; nothing here knows of requests. */

#include <stdint.h>

typedef enum OracleKind {
        ORACLE_TEXT,
        ORACLE_VIDEO,
        ORACLE_AUDIO,
} OracleKind;

typedef struct OracleRow {
        OracleKind kind;
        uint32_t tag;
        double t;           /* timestep */
        double position[3]; /* t, h, w */
        double in[160];     /* text 160, video 96, audio 32 numbers */
        double out[96];     /* set: what the head of the row's kind says; of text rows nothing */
} OracleRow;

/* rows[0 .. n_text) are the text. */
void oracle_run(OracleRow *rows, uint64_t n_text, uint64_t n);
