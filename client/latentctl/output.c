/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

#include "client/latentctl/report.h"

static int error_output(latent_error *e, int r, const char *path) {
        return ctl_error(e, r, r == -EACCES || r == -EPERM ? LATENT_ERROR_ACCESS_DENIED : LATENT_ERROR_IO,
                "%s cannot be written: %s.", format_value(path), strerror(-r));
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

/* How its name beside `path` begins. */
static int directory_length(const char *path) {
        const char *slash = strrchr(path, '/');

        return slash ? (int) (slash + 1 - path) : 0;
}

static int out_of_memory(latent_error *e) {
        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
}

/* A named file beside `path`, on the same file system: rename() must not copy. */
static int open_temporary(Output *o, int *ret_fd, latent_error *e) {
        int fd;

        if (asprintf(&o->temporary, "%.*s.latentctl.XXXXXX", directory_length(o->path), o->path) < 0) {
                o->temporary = NULL;
                return out_of_memory(e);
        }
        fd = mkostemp(o->temporary, O_CLOEXEC);
        if (fd < 0) {
                int r = -errno;

                free(o->temporary);
                o->temporary = NULL;
                return error_output(e, r, o->path);
        }

        *ret_fd = fd;
        return 0;
}

static void link_path(int fd, char ret[static 40]) {
        (void) snprintf(ret, 40, "/proc/self/fd/%d", fd);
}

/* 0: the file system, or a machine without /proc, cannot do that. */
static int open_unnamed(Output *o, latent_error *e) {
        CLEANUP_FREE char *directory = NULL;
        char path[40];
        int r;

        if (asprintf(&directory, "%.*s.", directory_length(o->path), o->path) < 0) {
                directory = NULL;
                return out_of_memory(e);
        }
        o->fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (o->fd < 0) {
                r = -errno;
                return r == -EOPNOTSUPP || r == -EISDIR || r == -EINVAL ? 0 : error_output(e, r, o->path);
        }

        link_path(o->fd, path);
        if (access(path, F_OK) < 0) {
                cleanup_closep(&o->fd);
                return 0;
        }

        o->unnamed = true;
        return 1;
}

static int open_new(Output *o, mode_t mode, latent_error *e) {
        int r;

        r = open_unnamed(o, e);
        if (r == 0)
                r = open_temporary(o, &o->fd, e);
        if (r >= 0 && fchmod(o->fd, mode) < 0)
                r = error_output(e, -errno, o->path);
        return r;
}

int output_check_regular(const char *path, latent_error *e) {
        struct stat st;

        if (stat(path, &st) < 0 || S_ISREG(st.st_mode)) /* what else is wrong output_open() says */
                return 0;
        if (S_ISDIR(st.st_mode))
                return error_output(e, -EISDIR, path);
        return ctl_error(e, -EINVAL, LATENT_ERROR_IO, "%s cannot be written: it must be a regular file, or not be there yet.", path);
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
                r = open_new(&o, mode, e);
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

int output_write_header(Output *o, const StTensor *tensors, size_t n, const StMeta *meta, size_t n_meta, latent_error *e) {
        int r;

        r = st_write_header(o->fd, tensors, n, meta, n_meta);
        return r < 0 ? error_output(e, r, o->path) : 0;
}

int output_append(Output *o, const void *data, uint64_t size, latent_error *e) {
        const char *p = data;

        while (size > 0) {
                ssize_t n = write(o->fd, p, size < SSIZE_MAX ? size : SSIZE_MAX);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        return error_output(e, n < 0 ? -errno : -EIO, o->path);
                p += n;
                size -= (uint64_t) n;
        }

        return 0;
}

static int copy_all(int from, int to) {
        off_t at = 0;
        struct stat st;

        if (fstat(from, &st) < 0 || fchmod(to, st.st_mode & 0777) < 0)
                return -errno;
        while (at < st.st_size) {
                ssize_t n = sendfile(to, from, &at, (size_t) (st.st_size - at));

                if (n <= 0)
                        return n < 0 ? -errno : -EIO;
        }

        return fsync(to) < 0 ? -errno : 0;
}

/* A name that nobody has: the file gets it and then that of the old one, at once. */
static int name_over_old(Output *o, const char *own, latent_error *e) {
        CLEANUP_CLOSE int fd = -EBADF;
        int r;

        r = open_temporary(o, &fd, e);
        if (r < 0)
                return r;

        if (unlink(o->temporary) >= 0 && linkat(AT_FDCWD, own, AT_FDCWD, o->temporary, AT_SYMLINK_FOLLOW) >= 0)
                return 0;

        /* It cannot have a name: the work is not lost for that. */
        (void) close(fd);
        fd = open(o->temporary, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        r = fd < 0 ? -errno : copy_all(o->fd, fd);
        return r < 0 ? error_output(e, r, o->path) : 0;
}

static int give_name(Output *o, latent_error *e) {
        char own[40];

        link_path(o->fd, own);
        if (linkat(AT_FDCWD, own, AT_FDCWD, o->path, AT_SYMLINK_FOLLOW) >= 0)
                return 0;

        return name_over_old(o, own, e);
}

int output_commit(Output *o, latent_error *e) {
        int r;

        if ((o->temporary || o->unnamed) && fsync(o->fd) < 0)
                return error_output(e, -errno, o->path);
        if (o->unnamed) {
                r = give_name(o, e);
                if (r < 0)
                        return r;
                o->unnamed = false;
        }
        if (o->temporary && rename(o->temporary, o->path) < 0)
                return error_output(e, -errno, o->path);

        free(o->temporary);
        o->temporary = NULL;
        return 0;
}
