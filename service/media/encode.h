/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves WRITE (but contact sheets, sheet.h): frames and sound of the arena into a file. The same frames, sound and libraries give the
 * same bytes. */

#include "service/media/channel.h"

const char *encode_format_name(MediaFormat format); /* "mp4" */
/* The encoders that are used for a format here; NULL: it has none of that kind. -EOPNOTSUPP: the libraries
 * lack one. */
int encode_codecs(MediaFormat format, const char **ret_picture, const char **ret_sound);

/* Whether the request makes sense and its places lie in an arena of this size. InvalidArgument,
 * NotSupported. */
int encode_check(const MediaWrite *request, uint64_t arena_size, Fault *f);
/* Takes frames as they come; the channel says which. */
int encode_run(
        const MediaWrite *request, int fd, const uint8_t *arena, Channel *c, MediaDone *ret, Fault *f);
