/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the rest of latent-media needs of libav* beyond its functions. */

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>

#include "service/shared/cleanup.h"

#define CLEANUP_FRAME CLEANUP(av_frame_free)
#define CLEANUP_PACKET CLEANUP(av_packet_free)
#define CLEANUP_CODEC CLEANUP(avcodec_free_context)

/* For HELLO: versions of the libraries. */
void libraries_describe(char *ret, size_t size);
/* What the libraries say goes to our log at debug, and single allocations are limited. Once, at the start.
 */
void libraries_init(void);
/* Words for an error of libav. */
const char *libraries_error(int error, char buffer[static 128]);
/* What a file of ours does for AVIOContext.seek: moves *position (AVSEEK_SIZE only says `size`). */
int64_t libraries_seek(uint64_t *position, uint64_t size, int64_t offset, int whence);
/* Threads of a codec: as many as there are processors, at most 8. */
int libraries_threads(void);
