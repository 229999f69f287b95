/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves READ: a file's pictures or sound into the arena. */

#include "service/media/channel.h"
#include "service/media/input.h"

/* Whether the request makes sense and its place lies in an arena of this size (PROBE has none).
 * InvalidArgument. */
int decode_check(const MediaRead *request, uint64_t arena_size, Fault *f);
/* place: size bytes of the arena from offset on, NULL for PROBE. Whatever the file holds: done, or an error
 * that says what is wrong with it; what lies in the arena is then undefined. c may have no socket (-EBADF).
 */
int decode_run(const MediaRead *request, int fd, uint8_t *place, Channel *c, MediaDone *ret, Fault *f);
