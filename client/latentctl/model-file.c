/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/model-file.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/latentctl/same-file.h"
#include "client/latentctl/tensor-file.h"
#include "service/shared/suffix.h"

DEFINE_CLEANUP(DIR *, closedir)

/* Of a pipeline, and beside a part of one. */
static const char *const folders[] = {
        ".",
        "transformer",
        "text_encoder",
        "vae",
        "audio_vae",
        "scheduler",
        "audio_scheduler",
        "processor",
        "tokenizer",
        "../scheduler",
        "../audio_scheduler",
        "../processor",
        "../tokenizer",
};

static bool is_settings(const char *name) {
        return has_suffix(name, ".json") || has_suffix(name, ".txt");
}

/* 1: tensors that latentctl wrote, see results_meta(); 0: other tensors; -1: none. */
static int is_result(const char *path) {
        CLEANUP(tensor_file_done) TensorFile f = {};

        if (tensor_file_open(path, &f, NULL) < 0)
                return -1;
        return st_header_meta(f.header, "numerics") && st_header_meta(f.header, "rows");
}

static bool folder_has(const char *folder, const struct stat *file) {
        CLEANUP(closedirp) DIR *d = opendir(folder);
        struct dirent *entry;
        struct stat st;

        while (d && (entry = readdir(d)))
                if ((has_suffix(entry->d_name, ".safetensors") || is_settings(entry->d_name)) &&
                        fstatat(dirfd(d), entry->d_name, &st, 0) >= 0 && same_inode(&st, file))
                        return true;
        return false;
}

static bool is_below(const char *model, const struct stat *file) {
        for (size_t i = 0; i < ELEMENTSOF(folders); i++) {
                CLEANUP_FREE char *folder = NULL;

                if (asprintf(&folder, "%s/%s", model, folders[i]) < 0) {
                        folder = NULL;
                        return true; /* not known: nothing is lost by a refusal */
                }
                if (folder_has(folder, file))
                        return true;
        }
        return false;
}

bool model_file_is(const char *path, const char *model) {
        struct stat file, st;

        if (stat(path, &file) < 0 || !S_ISREG(file.st_mode))
                return false;
        if (stat(model, &st) < 0)
                return is_settings(path) || is_result(path) == 0;
        if (!S_ISDIR(st.st_mode))
                return same_inode(&st, &file);
        return is_below(model, &file) && is_result(path) != 1;
}
