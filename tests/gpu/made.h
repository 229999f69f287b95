/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Safetensors files whose numbers are made of counters (counter.h), by many threads: the same bytes every time. */

#include <stddef.h>
#include <stdint.h>

#include "service/shared/safetensors.h"
#include "tests/gpu/counter.h"

#define MADE_DIMS_MAX 5

/* A code of int8 has this deviation when its number has 1. */
#define MADE_CODE_DEVIATION (127.0f * COUNTER_DEVIATION / COUNTER_MEAN)
/* The same of nvfp4: a code of four bits and the scale of its block, all as often. */
#define MADE_NVFP4_DEVIATION 3.391f

typedef enum MadeFill {
        MADE_NORMAL, /* center + spread * normal */
        MADE_QUICK,  /* F16, F32: one of 4096 such numbers */
        MADE_CODES,  /* I8: normal, at most 127 */
        MADE_TEXT,   /* U8: `text` */
        MADE_BITS,   /* U8: all values as often */
        MADE_SCALES, /* F8_E4M3: 0.5 to 1.875, likewise */
        MADE_OWN,    /* MadeFiles.value() */
} MadeFill;

typedef struct MadeTensor {
        char name[96], text[80];
        StType type;
        uint32_t n_dims;
        uint64_t shape[MADE_DIMS_MAX];
        MadeFill fill;
        unsigned own; /* for value() */
        float center, spread, factor;
        uint64_t seed, bytes;
        uint32_t shard;
        uint64_t offset; /* in the file */
} MadeTensor;

typedef struct MadeFiles {
        const char *program; /* in messages */
        const char *directory, *name; /* DIRECTORY/NAME.safetensors, or NAME-00001-of-00002.safetensors and so on; without an index */
        uint64_t shard_bytes; /* of a file at most, if it has more than one tensor */
        unsigned n_threads;
        float (*value)(const void *userdata, const MadeTensor *t, uint64_t i);
        const void *userdata;
        MadeTensor *tensors;
        size_t n_tensors;
        uint64_t bytes; /* of them */
        uint32_t n_shards;
} MadeFiles;

/* One more tensor, of normal numbers around 0. Whatever goes wrong ends the program. */
MadeTensor *made_add(MadeFiles *m, StType type, uint32_t n_dims, const uint64_t *shape, const char *format, ...)
        __attribute__((format(printf, 5, 6)));
/* Writes all and forgets them. The folder is made; a file must not be there yet. */
void made_write(MadeFiles *m);

/* Says how much, and how fast since begin_usec (CLOCK_MONOTONIC). */
void made_report(const MadeFiles *m, uint64_t begin_usec);

/* What an option says, from least to most. */
uint64_t made_number(const char *program, const char *option, const char *s, uint64_t least, uint64_t most);
/* As many threads as there are processors. */
unsigned made_threads(void);

void made_die(const char *program, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
