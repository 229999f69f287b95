/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The worker's own filter of system calls, for after the start: what a step needs, and nothing that opens
 * sockets, starts programs, writes files or looks into other processes. It holds also where no service
 * manager set one. */

#include <stdbool.h>

/* Whether this build can be filtered: sanitizers need calls that the filter refuses. */
bool seccomp_is_supported(void);

/* Filters the calling thread and the threads it starts from now on, for good; sets no_new_privs. Call it
 * before there are others of ours. driver: the process also uses a GPU's driver through the vendor's library,
 * whose own threads may be there already and stay as they are: calls to open devices, and to open more of
 * them. -EOPNOTSUPP: this build or this machine's architecture has no filter, or the
 * kernel knows none. Other negative errno. */
int seccomp_apply(bool driver);
