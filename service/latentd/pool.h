/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A small pool of threads for work in proportion to bytes (populate, unmap, free, checksum),
 * which must never run on the event loop. Results come back to the loop through an eventfd source. */

#include <systemd/sd-event.h>

typedef struct Pool Pool;

typedef int (*PoolWork)(void *userdata);              /* on a pool thread */
typedef void (*PoolDone)(void *userdata, int result); /* on the loop; exactly once */

int pool_new(sd_event *event, unsigned n_threads, Pool **ret);
/* Finishes queued work, joins, calls the outstanding done functions. */
Pool *pool_free(Pool *p);

/* done may be NULL. First in, first out. */
int pool_submit(Pool *p, PoolWork work, PoolDone done, void *userdata);
