/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Whether the files that a command line names are different ones: what is written last would replace what was written, or read, before. */

#include <sys/stat.h>

#include "client/latentctl/ctl.h"

typedef struct NamedFile {
        const char *option; /* "--contact-sheet", for the message */
        const char *path;   /* NULL: not given */
        bool output;
        bool stem;  /* an output: PATH.step-0001.ppm and so on */
        bool model; /* of an input: a model's file or folder, or its name in the service, see model-file.h */
} NamedFile;

/* By device and inode. */
bool same_inode(const struct stat *a, const struct stat *b);

/* CTL_ERROR_USAGE names both options: an output is another output, an input or a file of a model. Files that exist are told by device and
 * inode, others by their directory and name. Every verb that writes a file asks this before it begins, with all that it reads. */
int same_file_check(const NamedFile *files, size_t n, latent_error *e);
