/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Plays the broker against the real worker program: spawns it with a socketpair as descriptor 3, sends
 * messages, expects answers. Whatever does not come as expected fails the test that asked for it. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "service/shared/safetensors.h"
#include "service/shared/wire.h"
#include "tests/unit/h3/golden.h"

typedef struct Broker {
        pid_t pid;  /* 0 once reaped */
        int socket; /* -EBADF once closed */
        uint64_t epoch;
        unsigned n_acks, n_progress; /* seen so far */
        WireProgress last_progress;
        uint64_t merged_bytes; /* of the last MEMORY */
} Broker;

/* The program with this socket (a stream socket where type says so) and no messages exchanged. */
Broker *broker_spawn(int type);
/* The same, then HELLO and WELCOME with one rank. */
Broker *broker_open(uint64_t epoch);
Broker *broker_open_ranks(uint64_t epoch, uint32_t ranks, uint64_t encode_cache_bytes);
/* Closes the socket, makes sure that the process is gone. A sanitizer's report fails the test. */
Broker *broker_free(Broker *b);
void broker_freep(Broker **b);

/* Waits for the end of the process. Returns waitpid()'s status. */
int broker_wait(Broker *b);
void broker_kill(Broker *b); /* SIGKILL, and waits */

void broker_send(Broker *b, const WireMessage *m, int fd);
void broker_say(Broker *b, WireType type, uint64_t job, uint32_t step); /* a message that is only a header */

/* The next message that is neither ACK nor PROGRESS (those are counted). False: end of file. Fails after 60
 * s. */
bool broker_receive(Broker *b, WireMessage *ret);
/* That it is of this type and job. */
void broker_expect(Broker *b, WireType type, uint64_t job, WireMessage *ret);
/* That it is an ERROR of this name with `part` in its text. */
void broker_expect_error(Broker *b, uint64_t job, const char *name, const char *part);
void broker_expect_eof(Broker *b);
/* Until so many ACKs came; whatever else comes fails. */
void broker_expect_acks(Broker *b, unsigned n);

int memfd_of(const void *bytes, uint64_t size, uint64_t region_size);
/* These bytes as the one file of model `id`: MODEL_OPEN, REGION, MODEL_COMMIT. The answer is the caller's to
 * receive. */
void broker_offer_model(Broker *b, uint64_t id, const char *partition, const void *bytes, uint64_t size);
/* A file of tests/data ("dit/lora/lora_comfy.safetensors") as model `id`; MODEL_READY into ret (may be
 * NULL). */
void broker_load_file(Broker *b, uint64_t id, const char *partition, const char *file, WireMessage *ret);
/* The tiny model of tests/data likewise. */
void broker_load_model(Broker *b, uint64_t id, WireMessage *ret);

/* Files below the sources ("tests/demo-model/vae/config.json"), NULL-terminated, likewise. */
void broker_load_sources(Broker *b, uint64_t id, const char *const *files, WireMessage *ret);

typedef struct Arenas {
        int input_fd, output_fd;
        uint8_t *input, *output;
        uint64_t input_size, output_size;
        uint64_t used; /* of the input */
} Arenas;

Arenas *arenas_new(uint64_t input_size, uint64_t output_size);
Arenas *arenas_free(Arenas *a);
void arenas_freep(Arenas **a);
void broker_give_arenas(Broker *b, uint64_t session, const Arenas *a);
/* Copies data into the input arena, at an odd offset. */
WireTensor arenas_put(Arenas *a, StType type, uint32_t n_dims, const uint64_t *shape, const void *data);
/* Copies f32 data to a multiple of 4, and returns where. */
uint64_t arenas_put_floats(Arenas *a, uint64_t n, const float *data);
/* The same tensor with other data. */
WireTensor arenas_put_like(Arenas *a, const WireTensor *t, const void *data);

/* A JOB_OPEN of the tensors of a golden file ("case_t2va_tiny", "traj_euler_4") on model 1, session 2, with
 * its conditions; f32, the whole output arena. A file with sigmas makes a SAMPLE of its sampler that gives
 * them, one without a STEP. */
WireMessage job_of_golden(Broker *b, uint64_t job, Arenas *a, const char *name);
/* A STEP job with a latent that takes a while: `frames` frames of 32 x 32, made-up values. */
WireMessage job_long(Broker *b, uint64_t job, Arenas *a, uint64_t frames);

/* PLAN for one rank: all rows, all heads of the tiny model. */
void broker_plan(Broker *b, uint64_t job, uint64_t rows);
/* JOB_OPEN, JOB_READY into ret, PLAN. */
void broker_open_job(Broker *b, const WireMessage *open, WireMessage *ret);
/* STEP, STEP_DONE. */
void broker_step(Broker *b, uint64_t job, uint32_t step);

/* What the published sizes have: enough for golden_case_open(). */
extern const H3Config tiny_config;

/* Distance of n values to a golden tensor. */
void assert_near(const float *have, const Golden *g, const char *name, uint64_t n, double limit);

/* State k of a job, in the output arena. */
const float *slot_video(const Arenas *a, const WireMessage *ready, uint32_t k);
const float *slot_audio(const Arenas *a, const WireMessage *ready, uint32_t k);
const float *slot_carried(const Arenas *a, const WireMessage *ready, uint32_t k);
void assert_commit(const Arenas *a, const WireMessage *ready, uint32_t epoch, uint32_t steps_done);
void assert_no_commit(const Arenas *a, const WireMessage *ready); /* not even that nothing is done */
