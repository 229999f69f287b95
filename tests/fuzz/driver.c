/* SPDX-License-Identifier: Apache-2.0 */
/* Gives every file of the folders (or the files) named on the command line to a fuzz target, once: what
 * libFuzzer found stays found, with any compiler. Each input lies in a buffer of its exact size. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"
#include "tests/fuzz/target.h"

static int run_file(int dir_fd, const char *name) {
        CLEANUP_CLOSE int fd = -EBADF;
        CLEANUP_FREE uint8_t *data = NULL;
        struct stat st;
        size_t n = 0;

        fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0)
                return -errno;

        data = malloc(st.st_size > 0 ? (size_t) st.st_size : 1);
        if (!data)
                return -ENOMEM;

        while (n < (size_t) st.st_size) {
                ssize_t k = read(fd, data + n, (size_t) st.st_size - n);

                if (k <= 0)
                        return k < 0 ? -errno : -EIO;
                n += (size_t) k;
        }

        (void) LLVMFuzzerTestOneInput(data, n);
        return 0;
}

/* Returns the number of inputs. */
static int run_folder(const char *path) {
        struct dirent *e;
        int count = 0, r;
        DIR *d;

        d = opendir(path);
        if (!d)
                return -errno;

        while ((e = readdir(d))) {
                if (e->d_name[0] == '.')
                        continue;
                r = run_file(dirfd(d), e->d_name);
                if (r < 0) {
                        (void) closedir(d);
                        return r;
                }
                count++;
        }

        (void) closedir(d);
        return count;
}

int main(int argc, char *argv[]) {
        int count = 0, r;

        for (int i = 1; i < argc; i++) {
                r = run_folder(argv[i]);
                if (r == -ENOTDIR)
                        r = run_file(AT_FDCWD, argv[i]) < 0 ? -EIO : 1;
                if (r < 0) {
                        (void) fprintf(stderr, "%s: %s\n", argv[i], strerror(-r));
                        return EXIT_FAILURE;
                }
                count += r;
        }

        /* An empty corpus tests nothing. */
        (void) printf("%d inputs\n", count);
        return count > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
