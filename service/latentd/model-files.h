/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* From a model's name to open files. Blocks on the file system: pool threads only. */

#include <stddef.h>

#include "service/latentd/config.h"
#include "service/shared/fault.h"

#define MODEL_FILES_MAX 256

typedef struct ModelFile {
        char *name; /* base name */
        int fd;
} ModelFile;

typedef struct ModelFiles {
        ModelFile *files;
        size_t n_files;
} ModelFiles;

/* Opens the files of `name` below one of the ModelPath= directories (the first that has it): one
 * .safetensors file, or a directory with exactly one checkpoint: config.json if there, the
 * *.safetensors.index.json and the shards it names, or else the only .safetensors file (or, without an
 * index, all of them). A pipeline directory with transformer/ below it means that. A directory transformer brings
 * scheduler_config.json of the directories scheduler and audio_scheduler beside it where they are there, the second one as
 * audio_scheduler_config.json. A directory text_encoder brings the files of
 * the directory tokenizer beside it that are there (vocab.json, merges.txt, tokenizer.json, tokenizer_config.json,
 * added_tokens.json, no others) and preprocessor_config.json and video_preprocessor_config.json of the directory processor, or,
 * where neither is there, of the tokenizer's; tokenizer: another directory below a ModelPath= directory that has the tokenizer's
 * files, for any model; "": none. openat2(RESOLVE_BENEATH |
 * RESOLVE_NO_MAGICLINKS), O_NONBLOCK against FIFOs, regular files only. -ENOENT NotFound (says where was
 * looked), -EACCES AccessDenied, -EBADMSG InvalidFile (absent shards listed). */
int model_files_open(const Config *c, const char *name, const char *tokenizer, ModelFiles *ret, Fault *f);
void model_files_done(ModelFiles *m);
