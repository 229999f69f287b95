/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/file-io.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <liburing.h>

static int system_open(const char *path, int flags) {
        return open(path, flags);
}

static int system_set_flags(int fd, int flags) {
        return fcntl(fd, F_SETFL, flags);
}

static int system_ring_init(unsigned entries, struct io_uring *ring) {
        return io_uring_queue_init(entries, ring, 0);
}

static void system_ring_read(
        struct io_uring_sqe *sqe, int fd, void *buffer, unsigned size, uint64_t offset) {
        io_uring_prep_read(sqe, fd, buffer, size, offset);
}

static int system_ring_wait(struct io_uring *ring) {
        return io_uring_submit_and_wait(ring, 1);
}

static int system_ring_result(const struct io_uring_cqe *answer) {
        return answer->res;
}

const FileIo file_io_system = {
        .fstat = fstat,
        .open = system_open,
        .set_flags = system_set_flags,
        .pread = pread,
        .ring_init = system_ring_init,
        .ring_read = system_ring_read,
        .ring_wait = system_ring_wait,
        .ring_result = system_ring_result,
};

bool file_io_retry(int error, unsigned *n_retries) {
        if ((error != -EINTR && error != -EAGAIN) || *n_retries >= FILE_IO_RETRIES)
                return false;

        (*n_retries)++;
        return true;
}

void file_io_pause(int error) {
        if (error == -EAGAIN) /* the kernel is short of memory for requests */
                (void) nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
}
