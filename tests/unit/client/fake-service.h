/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A private dbus-daemon and a fake of the service in a child process, whose behaviour the names of models
 * choose. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "client/latent.h"

/* Both arenas, unless the session asks for more input. */
#define ARENA 65536u
#define SECOND UINT64_C(1000000)
#define LONG (60 * SECOND) /* only what never comes takes as long */

/* A trajectory of the fake. */
#define SAMPLE_STATES 3u
#define SAMPLE_COPIES (ARENA / 2)

typedef struct Fake {
        int bus_pid, service_pid;
        unsigned n_starts; /* of the service */
        char directory[64], address[128];
        latent_client *client; /* connected to it */
} Fake;

/* CMocka set-up and tear-down: *state is a Fake with bus, service and client. */
int fake_setup(void **state);
int fake_teardown(void **state);

/* Starts the service again after it left, and waits for it. In its first run a step with sigma_video 0.125 is its last; in the
 * second one with 0.0625 too. */
void fake_start_service(Fake *f);
void fake_kill_service(Fake *f);

/* The job of a load by this name, which names the behaviour; "lora-..." is an adapter. One whose name
 * ends with "changes" has other files in each run of the service. */
latent_job *fake_load(Fake *f, const char *behaviour);
