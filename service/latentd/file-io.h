/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The system calls that read a file, in one table: a test puts its own in their place and lets a disk fail,
 * answer late or never. Results are as of the calls they are named after: -1 and errno, the ring's a
 * negative errno. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

struct io_uring;
struct io_uring_cqe;
struct io_uring_sqe;

/* EINTR and EAGAIN in a row, a millisecond apart, before they count as an error. */
#define FILE_IO_RETRIES 5000u

/* A direct read goes on at a block that has begun: one that ends no further than the last either found the
 * end of a shorter file or was cut short. So many in a row are the end. */
#define FILE_IO_SAME_END 100u

typedef struct FileIo {
        int (*fstat)(int fd, struct stat *ret);
        int (*open)(const char *path, int flags);
        int (*set_flags)(int fd, int flags); /* F_SETFL */
        ssize_t (*pread)(int fd, void *buffer, size_t size, off_t offset);

        int (*ring_init)(unsigned entries, struct io_uring *ring);
        void (*ring_read)(struct io_uring_sqe *sqe, int fd, void *buffer, unsigned size, uint64_t offset);
        int (*ring_wait)(struct io_uring *ring);               /* submits, then waits for one answer */
        int (*ring_result)(const struct io_uring_cqe *answer); /* user data: the LoaderRequest, or NULL */
} FileIo;

extern const FileIo file_io_system;

/* Whether a call that failed with this negative errno is to be made again. n_retries: 0 at first and after
 * each success. */
bool file_io_retry(int error, unsigned *n_retries);
/* Waits a moment before that where it helps. */
void file_io_pause(int error);
