/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Faults of the exchange for tests, in builds with -Dtests=enabled only. The environment variable
 * LATENT_TEST_EXCHANGE is a list, separated by commas, of
 *
 *     flip:RANK:BLOCK:CHUNK    one bit of what the rank sends
 *     fail:RANK:BLOCK:CHUNK    an error of the rank where it sends this, the first time
 *     stuck:RANK:BLOCK:CHUNK   the rank hangs there
 *     delay:SEED:USEC          one message in four is late, up to USEC
 *     deadline:MSEC            of every wait
 *     link:MBS                 what leaves a rank, and what comes to it, has so many 10^6 bytes a second at most (0: as fast as it is);
 *                              the job's result has exposed-usec, what the exchange took of its steps
 *     kill:N, hang:N           of a million messages so many end the process, or its rank for good; others in each process
 *
 * Blocks and chunks count from 0. */

#include "service/worker/exchange.h"

/* Both are left alone where the variable does not say. A word that makes no sense ends the process. */
void exchange_test_read(ExchangeHook *hook, uint64_t *deadline_usec);
