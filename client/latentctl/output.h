/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The file that -o names: it appears, or is replaced, only when it is complete. Until then it has no name where the file system can do
 * that, so that nothing is left whatever ends this program; else a name beside it. */

#include "client/latentctl/ctl.h"
#include "service/shared/safetensors.h"

typedef struct Output {
        int fd;
        char *path;      /* where it is to be; NULL: not open */
        char *temporary; /* its name beside it; NULL: none */
        bool unnamed;    /* to be given its name; else without a temporary one a device or pipe is written to directly */
} Output;

/* IOError: what is there is no regular file, which would be waited for or cannot be replaced. */
int output_check_regular(const char *path, latent_error *e);

/* Makes the file, so that a directory that cannot be written to shows before any work is done. */
int output_open(const char *path, Output *ret, latent_error *e);

int output_write(Output *o, const StTensor *tensors, const void *const *data, size_t n, const StMeta *meta,
        size_t n_meta, latent_error *e);

/* In parts: the header of all tensors, then their bytes in the order of their names. */
int output_write_header(Output *o, const StTensor *tensors, size_t n, const StMeta *meta, size_t n_meta, latent_error *e);
int output_append(Output *o, const void *data, uint64_t size, latent_error *e);

/* Puts it in place. */
int output_commit(Output *o, latent_error *e);

/* Removes what was not committed. */
void output_done(Output *o);
