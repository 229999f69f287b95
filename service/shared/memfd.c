/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/memfd.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "service/shared/cleanup.h"

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

/* One madvise() call: a signal makes the kernel give up the whole call, and a long one might never end. */
#define POPULATE_PIECE (UINT64_C(256) << 20)
#define HUGE_FROM (UINT64_C(4) << 20)

static int memfd_open(const char *name) {
        int fd;

        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
        if (fd < 0 && errno == EINVAL) /* a kernel before 6.3 refuses the flag */
                fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

        return fd < 0 ? -errno : fd;
}

int memfd_new(const char *name, uint64_t size, int *ret_fd) {
        CLEANUP_CLOSE int fd = -EBADF;

        if (size == 0)
                return -EINVAL;
        if (size > INT64_MAX)
                return -EFBIG;

        fd = memfd_open(name);
        if (fd < 0)
                return fd;

        /* The default, 0666, lets whoever holds a read-only descriptor re-open it for writing. */
        if (fchmod(fd, 0600) < 0)
                return -errno;

        if (ftruncate(fd, (off_t) size) < 0)
                return -errno;

        if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
                return -errno;

        *ret_fd = STEAL_FD(fd);
        return 0;
}

int memfd_check(int fd, uint64_t size) {
        struct statfs fs;
        struct stat st;
        int seals;

        if (fstat(fd, &st) < 0 || fstatfs(fd, &fs) < 0)
                return -errno;

        /* hugetlbfs has seals too, but its pool may be empty: a fault would be SIGBUS in spite of them. */
        seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || !S_ISREG(st.st_mode) || fs.f_type != TMPFS_MAGIC)
                return -EBADF;

        if (st.st_size < 0 || (uint64_t) st.st_size != size)
                return -EINVAL;

        if ((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
                return -EPERM;

        return 0;
}

int memfd_map(int fd, uint64_t size, int prot, void **ret_map) {
        void *map;

        if (size > PTRDIFF_MAX)
                return -EINVAL;

        map = mmap(NULL, (size_t) size, prot, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
                return -errno;

        /* A memfd counts as anonymous memory and would be dumped: gigabytes, with users' data. */
        if (madvise(map, (size_t) size, MADV_DONTDUMP) < 0) {
                int r = -errno;

                (void) munmap(map, (size_t) size);
                return r;
        }

        *ret_map = map;
        return 0;
}

static int reopen(int fd, int mode, int *ret_fd) {
        char path[sizeof("/proc/self/fd/") + 11];
        int r;

        if (fcntl(fd, F_GETFD) < 0)
                return -errno;

        (void) snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        r = open(path, mode | O_CLOEXEC | O_NOCTTY);
        if (r < 0)
                return errno == ENOENT ? -EACCES : -errno;

        *ret_fd = r;
        return 0;
}

int memfd_reopen_read_only(int fd, int *ret_fd) {
        return reopen(fd, O_RDONLY, ret_fd);
}

int memfd_reopen_read_write(int fd, int *ret_fd) {
        return reopen(fd, O_RDWR, ret_fd);
}

/* A write lease is given only to the one who has a file open, and mappings keep files open. Linux counts every opening
 * since 5.3, but not memfd_create() itself. */
int memfd_is_shared(int fd) {
        CLEANUP_CLOSE int own = -EBADF;
        int r;

        r = reopen(fd, O_RDONLY, &own);
        if (r < 0)
                return r;

        /* Somebody who opens it between the two calls below would make the kernel send SIGIO, which kills. */
        if (fcntl(own, F_SETSIG, SIGURG) < 0)
                return -errno;

        if (fcntl(own, F_SETLEASE, F_WRLCK) < 0)
                return errno == EAGAIN ? 1 : -errno;

        return fcntl(own, F_SETLEASE, F_UNLCK) < 0 ? -errno : 0;
}

/* For kernels without MADV_POPULATE_WRITE. An atomic "or 0" is a write that changes nothing, also when
 * another thread is writing there; a page that cannot be had is SIGBUS, as with any write. */
static void touch_pages(char *p, uint64_t size) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);

        for (uint64_t at = 0; at < size; at += page)
                (void) __atomic_fetch_or(p + at, 0, __ATOMIC_RELAXED);
}

void memory_prefer_huge(void *p, uint64_t size) {
        uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE), begin = ((uintptr_t) p + page - 1) & ~(page - 1);
        uintptr_t end = ((uintptr_t) p + size) & ~(page - 1);

        if (size >= HUGE_FROM)
                (void) madvise((void *) begin, end - begin, MADV_HUGEPAGE);
}

int memory_populate(void *p, uint64_t size) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);
        char *at = p;

        if ((uintptr_t) p % page != 0 || size > PTRDIFF_MAX)
                return -EINVAL;

        /* EINVAL where the kernel has none: small pages then. */
        (void) madvise(p, (size_t) size, MADV_HUGEPAGE);

        while (size > 0) {
                uint64_t piece = size < POPULATE_PIECE ? size : POPULATE_PIECE;

                if (madvise(at, (size_t) piece, MADV_POPULATE_WRITE) < 0) {
                        if (errno == EINTR || errno == EAGAIN)
                                continue;
                        /* Of no bytes it succeeds where it is known at all: then EINVAL is about this
                         * mapping. */
                        if (errno != EINVAL)
                                return -errno;
                        if (madvise(at, 0, MADV_POPULATE_WRITE) == 0)
                                return -EINVAL;
                        touch_pages(at, piece);
                }

                at += piece;
                size -= piece;
        }

        return 0;
}
