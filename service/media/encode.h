/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves WRITE (but contact sheets, sheet.h): frames and sound of the arena into a file. The same frames, sound and libraries give the
 * same bytes. */

#include "service/media/channel.h"

/* Whether the request makes sense and its places lie in an arena of this size. InvalidArgument,
 * NotSupported. */
int encode_check(const MediaWrite *request, uint64_t arena_size, Fault *f);
/* Takes frames as they come; the channel says which. */
int encode_run(
        const MediaWrite *request, int fd, const uint8_t *arena, Channel *c, MediaDone *ret, Fault *f);
