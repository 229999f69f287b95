/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A file to read, from its descriptor alone: no name, no protocol and no other file is ever opened. What a
 * file is its first bytes say; only the kinds below and their usual codecs are taken. */

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "service/media/libraries.h"
#include "service/shared/fault.h"

#define INPUT_CPU_USEC (UINT64_C(600) * 1000000) /* of processor time for one request */
#define INPUT_PICTURE_BYTES (UINT64_C(512) << 20)

typedef struct InputKind {
        const char *name;     /* for people: "PNG" */
        const char *demuxer;  /* NULL: a picture, read whole */
        enum AVCodecID codec; /* of a picture */
} InputKind;

typedef struct Input {
        int fd; /* the caller's */
        uint64_t size, position;
        struct timespec changed; /* when it was opened */
        const InputKind *kind;
        uint64_t cpu_usec_max;
        bool out_of_time;
        int error; /* of a read, negative errno */
        AVIOContext *io;
        AVFormatContext *format; /* NULL for a picture */
} Input;

/* Looks at the file: a regular one, not empty, of a known kind. No bytes of it are trusted. */
int input_open(Input *in, int fd, Fault *f);
void input_done(Input *in);
/* Opens the demuxer and reads what streams there are. Not for pictures. */
int input_open_streams(Input *in, Fault *f);
/* -ETIME with f when the time for this request is used up. */
int input_check_time(Input *in, Fault *f);
/* The error for whatever went wrong: the file changed meanwhile, reading failed or took too long, else
 * InvalidFile with the text. */
int input_fail(Input *in, Fault *f, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Whether it is what it was when it was opened; FileChanged. */
int input_check_unchanged(Input *in, Fault *f);
/* All of it, with AV_INPUT_BUFFER_PADDING_SIZE. -EFBIG beyond INPUT_PICTURE_BYTES. */
int input_read_all(Input *in, AVPacket *packet, Fault *f);
/* Opens a decoder of our list. stream NULL: a picture's. */
int input_open_decoder(Input *in, AVStream *stream, AVCodecContext **ret, Fault *f);
