/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/tensor-file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "client/latentctl/report.h"

void tensor_file_done(TensorFile *t) {
        if (!t->header)
                return;
        t->header = st_header_free(t->header);
        (void) close(t->fd);
}

static int error_open(latent_error *e, int r, const char *path) {
        const char *name = r == -ENOENT || r == -ENOTDIR ? LATENT_ERROR_NOT_FOUND
                           : r == -EACCES || r == -EPERM ? LATENT_ERROR_ACCESS_DENIED
                                                         : LATENT_ERROR_IO;

        return ctl_error(e, r, name, "%s cannot be opened: %s.", format_value(path), strerror(-r));
}

/* All n bytes at offset: a file that ends before was cut while we read. */
static int read_all(int fd, const char *path, void *data, uint64_t n, uint64_t offset, latent_error *e) {
        uint64_t done = 0;

        while (done < n) {
                ssize_t k = pread(fd, (char *) data + done, n - done, (off_t) (offset + done));

                if (k < 0 && errno == EINTR)
                        continue;
                if (k < 0)
                        return ctl_error(
                                e, -errno, LATENT_ERROR_IO, "%s cannot be read: %s.", path, strerror(errno));
                if (k == 0)
                        return ctl_error(e, -ESTALE, LATENT_ERROR_FILE_CHANGED,
                                "%s got shorter while it was read.", path);
                done += (uint64_t) k;
        }

        return 0;
}

static int read_header(int fd, const char *path, uint64_t file_size, StHeader **ret, latent_error *e) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size = file_size < 512 ? file_size : 512;
        Fault f = {};
        int r;

        bytes = malloc(size > 0 ? size : 1);
        if (!bytes)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        r = read_all(fd, path, bytes, size, 0, e);
        if (r < 0)
                return r;
        r = st_header_size(bytes, size, file_size, path, &size, &f);
        if (r < 0)
                return ctl_error_fault(e, r, &f);

        free(bytes);
        bytes = malloc(size);
        if (!bytes)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        r = read_all(fd, path, bytes, size, 0, e);
        if (r < 0)
                return r;
        r = st_header_parse(bytes, size, file_size, path, ret, &f);
        return r < 0 ? ctl_error_fault(e, r, &f) : 0;
}

int tensor_file_open(const char *path, TensorFile *ret, latent_error *e) {
        CLEANUP_CLOSE int fd = -EBADF;
        StHeader *header = NULL;
        struct stat st;
        int r;

        fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (fd < 0)
                return error_open(e, -errno, path);
        if (fstat(fd, &st) < 0)
                return error_open(e, -errno, path);
        if (!S_ISREG(st.st_mode))
                return ctl_error(e, -EBADMSG, LATENT_ERROR_INVALID_FILE,
                        "%s is %s; expected a safetensors file.", path,
                        S_ISDIR(st.st_mode) ? "a directory" : "not a regular file");

        r = read_header(fd, path, (uint64_t) st.st_size, &header, e);
        if (r < 0)
                return r;

        *ret = (TensorFile){.path = path, .fd = STEAL_FD(fd), .header = header};
        return 0;
}

int tensor_file_read(const TensorFile *f, const StTensor *t, void *data, latent_error *e) {
        return read_all(f->fd, f->path, data, t->size, t->offset, e);
}
