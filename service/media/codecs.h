/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which encoders a format is written with: of those that are known to be right for it the first that the libraries have and that opens.
 * None of hardware: there are no devices in the sandbox, and their bytes would differ from machine to machine. */

#include <stdbool.h>

#include "service/media/libraries.h"
#include "service/shared/fault.h"
#include "service/shared/media-wire.h"

typedef enum CodecsKind {
        CODECS_PICTURE,
        CODECS_SOUND,
} CodecsKind;

const char *codecs_format_name(MediaFormat format);  /* "mp4" */
const char *codecs_format_muxer(MediaFormat format); /* NULL: of one picture, written as it is */
/* The format has a track of this kind. */
bool codecs_has(MediaFormat format, CodecsKind kind);
/* Number i of the encoders that are here, the best first; NULL: there are no more. */
const AVCodec *codecs_find(MediaFormat format, CodecsKind kind, unsigned i);
/* NotSupported, with what is missing and what can be written. */
int codecs_check(MediaFormat format, Fault *f);
/* "mp4 (libx264, aac), webm (...)": what can be written here. */
void codecs_describe(char *ret, size_t size);
/* Of films. Constant quality: what 1 to 100 mean to each encoder, and what makes its bytes the same on every machine: its threads, too. */
void codecs_set_quality(AVCodecContext *c, uint32_t quality);
/* For tests: as if the libraries had none of these, a NULL-terminated list, or NULL. */
void codecs_hide(const char *const *names);
