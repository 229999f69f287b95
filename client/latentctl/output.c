/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "client/latentctl/report.h"

static int error_output(latent_error *e, int r, const char *path) {
        return ctl_error(e, r, r == -EACCES || r == -EPERM ? LATENT_ERROR_ACCESS_DENIED : LATENT_ERROR_IO,
                "%s cannot be written: %s.", path, strerror(-r));
}

void output_done(Output *o) {
        if (!o->path)
                return;
        if (o->fd >= 0)
                (void) close(o->fd);
        if (o->temporary)
                (void) unlink(o->temporary);
        free(o->temporary);
        free(o->path);
        *o = (Output){.fd = -EBADF};
}

static mode_t mode_for_new_file(void) {
        mode_t mask = umask(0);

        (void) umask(mask);
        return 0666 & ~mask;
}

/* A file beside `path`, on the same file system: rename() must not copy. */
static int open_temporary(Output *o, mode_t mode, latent_error *e) {
        const char *slash = strrchr(o->path, '/');
        int n = slash ? (int) (slash + 1 - o->path) : 0;

        if (asprintf(&o->temporary, "%.*s.latentctl.XXXXXX", n, o->path) < 0) {
                o->temporary = NULL;
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }
        o->fd = mkostemp(o->temporary, O_CLOEXEC);
        if (o->fd < 0) {
                int r = -errno;

                free(o->temporary);
                o->temporary = NULL;
                return error_output(e, r, o->path);
        }
        if (fchmod(o->fd, mode) < 0)
                return error_output(e, -errno, o->path);
        return 0;
}

int output_open(const char *path, Output *ret, latent_error *e) {
        CLEANUP(output_done) Output o = {.fd = -EBADF};
        mode_t mode = mode_for_new_file();
        size_t n = strlen(path);
        struct stat st;
        int r;

        /* rename() would find out, but only when the work is done. */
        if (n == 0 || path[n - 1] == '/')
                return error_output(e, n == 0 ? -ENOENT : -EISDIR, path);

        /* What a link names is replaced, not the link. */
        o.path = realpath(path, NULL);
        if (!o.path)
                o.path = strdup(path);
        if (!o.path)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");

        if (stat(o.path, &st) >= 0) {
                if (S_ISDIR(st.st_mode))
                        return error_output(e, -EISDIR, path);
                mode = st.st_mode & 0777;
                if (!S_ISREG(st.st_mode)) {
                        o.fd = open(o.path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
                        if (o.fd < 0)
                                return error_output(e, -errno, path);
                }
        } else if (errno != ENOENT)
                return error_output(e, -errno, path);

        if (o.fd < 0) {
                r = open_temporary(&o, mode, e);
                if (r < 0)
                        return r;
        }

        *ret = o;
        o = (Output){.fd = -EBADF};
        return 0;
}

int output_write(Output *o, const StTensor *tensors, const void *const *data, size_t n, const StMeta *meta,
        size_t n_meta, latent_error *e) {
        int r;

        r = st_write(o->fd, tensors, data, n, meta, n_meta);
        return r < 0 ? error_output(e, r, o->path) : 0;
}

int output_commit(Output *o, latent_error *e) {
        if (o->temporary && (fsync(o->fd) < 0 || rename(o->temporary, o->path) < 0))
                return error_output(e, -errno, o->path);

        free(o->temporary);
        o->temporary = NULL;
        return 0;
}
