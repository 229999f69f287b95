/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a worker holds (models, arenas, jobs, rank threads) and what it does with each message of the broker.
 * One per process: it lives until the process ends. */

#include "service/shared/fault.h"
#include "service/worker/backend.h"

/* Says HELLO on the socket. Call it before the filter of system calls is on. no_device: why the backend did not
 * start; NULL: it did. 0 or negative errno with f. */
int worker_start(const Backend *backend, int socket, const Fault *no_device, Fault *f);

/* Serves the broker. Returns 0 at end of file, else a negative errno with f; the threads still run then: the
 * caller ends the process. */
int worker_run(Fault *f);
