/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/output.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define IO_BUFFER (256u << 10)

static int write_at(Output *o, const uint8_t *p, size_t n) {
        size_t done = 0;

        while (done < n && o->error == 0) {
                ssize_t k = pwrite(o->fd, p + done, n - done, (off_t) o->position);

                if (k < 0 && errno == EINTR)
                        continue;
                if (k <= 0) {
                        o->error = k < 0 ? -errno : -EIO;
                        break;
                }
                done += (size_t) k;
                o->position += (uint64_t) k;
                if (o->position > o->size)
                        o->size = o->position;
        }
        return o->error;
}

#if LIBAVFORMAT_VERSION_MAJOR >= 61
static int on_write(void *userdata, const uint8_t *p, int n) {
#else
static int on_write(void *userdata, uint8_t *p, int n) {
#endif
        Output *o = userdata;

        return write_at(o, p, (size_t) n) < 0 ? AVERROR(EIO) : n;
}

static int64_t on_seek(void *userdata, int64_t offset, int whence) {
        Output *o = userdata;

        return libraries_seek(&o->position, o->size, offset, whence);
}

int output_open(Output *o, int fd, bool again, Fault *f) {
        uint8_t *buffer;
        struct stat st;
        int flags;

        *o = (Output){.fd = fd};
        flags = fcntl(fd, F_GETFL);
        if (flags < 0 || fstat(fd, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "The file cannot be looked at: %s.", strerror(errno));
        if (!S_ISREG(st.st_mode) || (st.st_size != 0 && !again) || (flags & O_ACCMODE) == O_RDONLY || (flags & O_APPEND))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The file to write must be a regular, empty one that is open for writing, not for "
                        "appending.");
        if (again && ftruncate(fd, 0) < 0)
                return fault_set(f, -errno, FAULT_IO, "The file cannot be emptied: %s.", strerror(errno));

        buffer = av_malloc(IO_BUFFER);
        if (buffer)
                o->io = avio_alloc_context(buffer, IO_BUFFER, 1, o, NULL, on_write, on_seek);
        if (!o->io) {
                av_free(buffer);
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to write a file.");
        }
        return 0;
}

void output_done(Output *o) {
        if (o->io) {
                av_freep(&o->io->buffer);
                avio_context_free(&o->io);
        }
}

int output_fail(const Output *o, Fault *f, const char *what, int averror) {
        char words[128];

        if (o->error == -ENOSPC || o->error == -EDQUOT)
                return fault_set(f, o->error, FAULT_IO,
                        "The disk is full (%s) after %" PRIu64
                        " bytes of the file: make room, or write elsewhere.",
                        strerror(-o->error), o->size);
        if (o->error == -EFBIG)
                return fault_set(f, o->error, FAULT_IO,
                        "The file may not get larger than the %" PRIu64
                        " bytes that were written (a limit of the process or of the file system).",
                        o->size);
        if (o->error < 0)
                return fault_set(f, o->error, FAULT_IO,
                        "Writing the file failed after %" PRIu64 " bytes: %s.", o->size,
                        strerror(-o->error));
        if (averror == AVERROR(ENOMEM))
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "%s: not enough memory.", what);
        return fault_set(f, -EIO, FAULT_INTERNAL, "%s: %s.", what, libraries_error(averror, words));
}

int output_write(Output *o, const void *p, size_t n, Fault *f) {
        return write_at(o, p, n) < 0 ? output_fail(o, f, "Writing", 0) : 0;
}

int output_finish(Output *o, Fault *f) {
        avio_flush(o->io);
        if (o->error == 0 && o->io->error < 0)
                o->error = -EIO;
        if (o->error == 0 && fsync(o->fd) < 0 && errno != EINVAL && errno != EROFS)
                o->error = -errno;
        return o->error < 0 ? output_fail(o, f, "Writing", 0) : 0;
}
