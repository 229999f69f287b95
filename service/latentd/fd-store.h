/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the service manager keeps for us while we are not there (FileDescriptorStoreMax= of the unit). Without a service
 * manager nothing is kept and nothing comes. Loop thread only. */

#include <stdbool.h>

/* As in the unit. What is more would be closed by the manager without a word. */
#define FD_STORE_MAX 512

typedef struct FdStore FdStore;

/* Called on each descriptor that came: true takes fd over, false has it closed and its name removed from the store. */
typedef bool (*FdStoreTake)(void *userdata, int fd, const char *name);

/* Takes over what the service manager handed in ($LISTEN_FDS, $LISTEN_FDNAMES, which are unset). To be called before
 * anything else opens a descriptor or starts a thread. */
int fd_store_new(FdStore **ret);
/* Closes what nobody took; the service manager keeps what it has. */
FdStore *fd_store_free(FdStore *s);

/* Offers each once. A name that came more than once is refused without asking: it names nothing. */
void fd_store_offer(FdStore *s, FdStoreTake take, void *userdata);

/* Gives it to the service manager under this name. False: it is not kept (no manager, FD_STORE_MAX are there). */
bool fd_store_push(FdStore *s, int fd, const char *name);
void fd_store_remove(FdStore *s, const char *name);

unsigned fd_store_count(const FdStore *s); /* that the service manager should have */
