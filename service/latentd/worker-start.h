/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How a worker comes to life: systemd starts it when we connect to its socket unit, or we spawn it
 * ourselves. Either way it finds the connection as fd 3. */

#include <stdbool.h>
#include <sys/types.h>

#include "service/latentd/config.h"
#include "service/shared/fault.h"

typedef struct WorkerProcess {
        int socket; /* our end: SOCK_SEQPACKET, close-on-exec, non-blocking */
        int pidfd;  /* of the child; -EBADF for a worker of a socket unit, which is not ours to wait for */
        pid_t pid;  /* 0 likewise */
        bool cuda;  /* it is latent-worker-cuda */
} WorkerProcess;

/* Whether the next one comes from its socket unit, and not from us: in a sandbox of its own. */
bool worker_start_by_socket(const Config *c);

/* no_cuda: with Worker=auto the CUDA worker was there but has no device, take the CPU worker. Does not wait
 * for the Hello; a spawned child has reached its exec. -ENOENT (fault NoWorker): none is installed where
 * latentd.conf says, trying again soon is useless; other errors (fault NoWorker): it did not start this
 * time. */
int worker_start(const Config *c, bool no_cuda, WorkerProcess *ret, Fault *f);

/* Whether there is a latent-media to start, before anything is done that needs it. NotSupported. */
int media_check(const Config *c, Fault *f);
/* As worker_start() for latent-media, which serves one request and ends. Faults NotSupported (it is not installed) and IOError. */
int media_start(const Config *c, WorkerProcess *ret, Fault *f);

/* Of an ended child, non-blocking: 1 and a text for people to go behind "the worker" ("was killed by signal
 * 9 (Killed)"), 0 if it still runs. Reaps it. */
int worker_process_reap(int pidfd, char *ret_text, size_t size);
