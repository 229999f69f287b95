/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reads a private connection before sd-bus does, which would take any 128 MiB and 253 descriptors from whoever has authenticated, and
 * hold the loop meanwhile. What breaks the limits is not passed on. */

#include <sys/types.h>

#include <systemd/sd-event.h>

#define GUARD_MESSAGE_MAX (UINT32_C(1) << 20) /* the interface needs 64 KiB */
#define GUARD_FDS_MAX 16u                     /* of a message, as on the message bus; more than 4 are refused with a text */

typedef struct Guard Guard;

/* On the loop, once: the connection must end. */
typedef void (*GuardBroken)(void *userdata, const char *why);

/* fd: the client's, non-blocking; stays the caller's. uid: the client's by the kernel's word: it may authenticate as nobody else.
 * ret_fd: what sd-bus is to read from, the caller's; its end of file is the client's. */
int guard_new(sd_event *event, int fd, uid_t uid, GuardBroken broken, void *userdata, Guard **ret, int *ret_fd);
Guard *guard_free(Guard *g);
