/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A file to write, through its descriptor alone. */

#include <stdbool.h>

#include "service/media/libraries.h"
#include "service/shared/fault.h"

typedef struct Output {
        int fd;                  /* the caller's */
        uint64_t position, size; /* where the next byte goes; bytes that the file has */
        int error;               /* of a write, negative errno: the first */
        AVIOContext *io;
} Output;

/* fd: a regular file, writable, and empty, or emptied where `again`. InvalidArgument, IOError. */
int output_open(Output *o, int fd, bool again, Fault *f);
void output_done(Output *o);
/* What libav wrote is in the file, and the file is on its disk; an error of the disk is one now or never. */
int output_finish(Output *o, Fault *f);
/* Writes without libav. */
int output_write(Output *o, const void *p, size_t n, Fault *f);
/* The error for whatever went wrong: IOError when a write failed, else Internal with the text. */
int output_fail(const Output *o, Fault *f, const char *what, int averror);
