/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "service/shared/cleanup.h"

/* A message of the bus brings 16 at most, a few come at once; the rest is for a worker, files in /proc, the pool's own. */
#define RESERVE_MAX 256u

bool descriptor_is_reserve(int fd) {
        struct rlimit files;
        rlim_t reserve;

        if (getrlimit(RLIMIT_NOFILE, &files) < 0)
                return false;

        reserve = files.rlim_cur / 4 < RESERVE_MAX ? files.rlim_cur / 4 : RESERVE_MAX;
        return (rlim_t) fd >= files.rlim_cur - reserve;
}

static int refuse(const char *what, Fault *f) {
        return fault_set(f, -EMFILE, FAULT_LIMIT,
                "%s needs descriptors, and the service has hardly any left (LimitNOFILE= of latentd.service): close sessions, "
                "unload models or wait until others have.",
                what);
}

int descriptor_check(int fd, const char *what, Fault *f) {
        return descriptor_is_reserve(fd) ? refuse(what, f) : 0;
}

int descriptors_check(const char *what, Fault *f) {
        CLEANUP_CLOSE int fd = eventfd(0, EFD_CLOEXEC);

        if (fd >= 0)
                return descriptor_check(fd, what, f);

        return errno == EMFILE || errno == ENFILE ? refuse(what, f) : -errno;
}
