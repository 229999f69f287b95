/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Coding jobs inside the test's own process: the demo model's parts, arenas, ranks, and steps that the test
 * runs itself, so that a run can end after any of them. */

#include "service/worker/coder.h"
#include "service/worker/rank.h"
#include "service/worker/step.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

#define BENCH_SESSION 2
#define BENCH_JOB 5

typedef struct CoderBench {
        ModelTable models;
        ArenaPair *arenas;
        uint8_t *input;  /* writable map of the input arena, as a client has it */
        uint8_t *output; /* the worker's map of the output arena */
        uint64_t size;   /* of each arena */
        uint64_t identity; /* of the models that are loaded next; 1 at first */
        uint64_t used;   /* of the input */
        int sockets[2];
        Link *link;
        LkOps ops;
        Backend backend;
        RankGroup *ranks;
        StepRunner runner;
} CoderBench;

extern uint64_t bench_memory_available; /* what the backend says; 0: not known */

/* Sets cmocka's state; ranks: their number. */
CoderBench *bench_new(uint32_t ranks, uint64_t arena_size);
CoderBench *bench_free(CoderBench *b);
void bench_freep(CoderBench **b);
/* Another number of ranks. */
void bench_set_ranks(CoderBench *b, uint32_t ranks);
/* Another backend, and one rank; device_memory: Backend's, NULL for one that has none of its own. */
void bench_set_ops(CoderBench *b, const LkOps *ops, int (*device_memory)(uint32_t device, uint64_t *ret_free, uint64_t *ret_total));

/* Files below the sources ("tests/demo-model/vae/config.json"), NULL-terminated, as model `id`; behind a colon: the name
 * that the model sees instead of its own. */
void bench_load(CoderBench *b, uint64_t id, const char *const *files);
int bench_try_load(CoderBench *b, uint64_t id, const char *const *files, WireModelReady *ret, Fault *f);
extern const char *const bench_video_vae[], *const bench_audio_vae[], *const bench_conditioner[];

/* Copies data into the input arena, at an odd offset. */
WireTensor bench_put(CoderBench *b, StType type, uint32_t n_dims, const uint64_t *shape, const void *data);
/* So many made-up numbers, about normal ones; freed by the caller. */
float *bench_numbers(uint64_t n, uint32_t seed);
uint8_t *bench_bytes(uint64_t n, uint32_t seed);

/* A job of this kind on the model, the whole output arena its own. */
WireJobOpen bench_job(const CoderBench *b, WireJobKind kind, uint64_t model);
int bench_try_open(CoderBench *b, const WireJobOpen *w, Job **ret, Fault *f);
Job *bench_open(CoderBench *b, const WireJobOpen *w);
/* That it is refused with this name and `part` in its text, and the output arena stays as it was. */
void bench_refuse(CoderBench *b, const WireJobOpen *w, const char *name, const char *part);
/* The next step. */
int bench_try_step(CoderBench *b, Job *j, StepResult *ret, Fault *f);
void bench_step(CoderBench *b, Job *j);
void bench_finish(CoderBench *b, Job *j); /* all that are left */
/* Opens, runs, closes; the outputs' bytes, freed by the caller. */
uint8_t *bench_run(CoderBench *b, const WireJobOpen *w, uint64_t *ret_size);
/* Copies output i. */
void *bench_output(const CoderBench *b, const Job *j, uint32_t i);
void assert_committed(const CoderBench *b, const Job *j, uint32_t steps);

/* Tiles and messages late by up to usec microseconds, by seed. */
void bench_delay(CoderBench *b, uint32_t seed, uint32_t usec);
