/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* From a path that a user gave to the open files of one checkpoint, by the rules that the service has for
 * its own directories. */

#include <stddef.h>

#include "service/shared/fault.h"

/* The service takes no more in a model. */
#define CHECKPOINT_FILES_MAX 256u

typedef struct CheckpointFile {
        char *name; /* base name */
        int fd;     /* open for reading, a regular file */
} CheckpointFile;

typedef struct Checkpoint {
        char *name; /* for people: the last part of the path */
        CheckpointFile *files;
        size_t n_files, n_allocated;
} Checkpoint;

/* path: a .safetensors file, or a directory: config.json if there, and the *.safetensors.index.json and the
 * shards that it names, or without an index all .safetensors files (usually one). A directory without either
 * but with transformer/ in it means that. A directory transformer brings scheduler_config.json of scheduler/ and
 * audio_scheduler/ beside it, the second one as audio_scheduler_config.json. A directory text_encoder brings the
 * files of tokenizer/ beside it, and of
 * processor/ or else of tokenizer/ those that say how large pictures are shown; tokenizer: another
 * directory that has them, for any path; NULL: none. -ENOENT NotFound, -EACCES AccessDenied, -EBADMSG InvalidFile
 * (absent shards are listed), -EIO IOError. */
int checkpoint_open(const char *path, const char *tokenizer, Checkpoint *ret, Fault *f);
void checkpoint_done(Checkpoint *c);
