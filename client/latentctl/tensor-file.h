/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A safetensors file for reading: the header is checked as a whole before anything is used. */

#include "client/latentctl/ctl.h"
#include "service/shared/safetensors.h"

typedef struct TensorFile {
        const char *path; /* the caller's */
        int fd;
        StHeader *header; /* NULL: not open */
} TensorFile;

/* NotFound, AccessDenied, InvalidFile, IOError. */
int tensor_file_open(const char *path, TensorFile *ret, latent_error *e);
void tensor_file_done(TensorFile *t);

/* Reads a tensor of this file into t->size bytes. */
int tensor_file_read(const TensorFile *f, const StTensor *t, void *data, latent_error *e);
