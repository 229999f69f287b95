/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/text-file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "service/shared/cleanup.h"

static int check_kind(int fd) {
        struct stat st;

        if (fstat(fd, &st) < 0)
                return -errno;
        if (S_ISDIR(st.st_mode))
                return -EISDIR;
        if (S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 3)) /* /dev/null */
                return 0;

        return S_ISREG(st.st_mode) ? 0 : -ENODEV;
}

int text_file_read(const char *path, size_t max, char **ret, size_t *ret_size) {
        CLEANUP_CLOSE int fd = -EBADF;
        CLEANUP_FREE char *text = NULL;
        size_t n = 0;
        int r;

        /* O_NONBLOCK: a FIFO has no writer, perhaps for ever. */
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (fd < 0)
                return errno == ENXIO ? -ENODEV : -errno; /* a socket */
        r = check_kind(fd);
        if (r < 0)
                return r;

        text = malloc(max + 1);
        if (!text)
                return -ENOMEM;

        for (;;) { /* one byte more than may be shows that there is more */
                ssize_t k = read(fd, text + n, max + 1 - n);

                if (k < 0 && errno == EINTR)
                        continue;
                if (k < 0)
                        return -errno;
                if (k == 0)
                        break;
                n += (size_t) k;
                if (n > max)
                        return -EFBIG;
        }

        text[n] = '\0';
        *ret_size = n;
        *ret = STEAL_PTR(text);
        return 0;
}

const char *text_file_strerror(int error) {
        return error == -ENODEV  ? "it is no regular file, but a pipe, a socket or a device"
               : error == -EFBIG ? "it is too large"
                                 : strerror(-error);
}
