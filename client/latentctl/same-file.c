/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/same-file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/model-file.h"
#include "client/latentctl/report.h"

#define STEP ".step-"
#define ENDING ".ppm"
#define DIGITS_MIN 4u

static const char *base_of(const char *path) {
        const char *slash = strrchr(path, '/');

        return slash ? slash + 1 : path;
}

static int stat_directory(const char *path, struct stat *ret) {
        CLEANUP_FREE char *directory = strndup(path, (size_t) (base_of(path) - path));

        if (!directory)
                return -ENOMEM;
        return stat(directory[0] != '\0' ? directory : ".", ret) < 0 ? -errno : 0;
}

bool same_inode(const struct stat *a, const struct stat *b) {
        return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Of directories that cannot be looked at nothing is known: opening the file says why. */
static bool same_directory(const char *a, const char *b) {
        struct stat x, y;

        return stat_directory(a, &x) >= 0 && stat_directory(b, &y) >= 0 && same_inode(&x, &y);
}

/* Whether `path` is a picture's name: STEM.step-NNNN.ppm. */
static bool is_step_of(const char *path, const char *stem) {
        const char *name = base_of(path), *begin = base_of(stem);
        size_t n = strlen(begin), digits;

        if (strncmp(name, begin, n) != 0 || strncmp(name + n, STEP, strlen(STEP)) != 0)
                return false;
        name += n + strlen(STEP);
        digits = strspn(name, "0123456789");
        return digits >= DIGITS_MIN && strcmp(name + digits, ENDING) == 0 && same_directory(path, stem);
}

/* A link that leads nowhere is told by its own name: an output takes its place. */
static bool same_path(const char *a, const char *b) {
        struct stat x, y;
        bool there = stat(a, &x) >= 0;

        if (there != (stat(b, &y) >= 0))
                return false;
        if (there)
                return same_inode(&x, &y);
        return strcmp(base_of(a), base_of(b)) == 0 && same_directory(a, b);
}

/* Nothing of a model is called as pictures of steps are. */
static bool collide(const NamedFile *a, const NamedFile *b) {
        if (!a->path || !b->path || (!a->output && !b->output))
                return false;
        if (a->model || b->model)
                return !a->stem && !b->stem && model_file_is(a->model ? b->path : a->path, a->model ? a->path : b->path);
        if (a->stem || b->stem)
                return a->stem != b->stem && is_step_of(a->stem ? b->path : a->path, a->stem ? a->path : b->path);
        return same_path(a->path, b->path);
}

static int error_model(const NamedFile *output, const NamedFile *model, latent_error *e) {
        struct stat st;

        if (stat(model->path, &st) >= 0)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "%s %s is a file of %s %s, which is read", output->option, output->path,
                        model->option, model->path);
        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE,
                "%s %s is there, and latentctl did not write it: it may be a file of %s %s, which only the service can find. "
                "Name another file",
                output->option, output->path, model->option, model->path);
}

static int error_same(const NamedFile *a, const NamedFile *b, latent_error *e) {
        if (a->model || b->model)
                return error_model(a->model ? b : a, a->model ? a : b, e);
        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "%s and %s name the same file, %s", a->option, b->option, (a->stem ? b : a)->path);
}

int same_file_check(const NamedFile *files, size_t n, latent_error *e) {
        for (size_t i = 0; i < n; i++)
                for (size_t k = i + 1; k < n; k++)
                        if (collide(files + i, files + k))
                                return error_same(files + i, files + k, e);
        return 0;
}
