/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/seccomp.h"

#include <fcntl.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "service/shared/call-filter.h"
#include "service/shared/cleanup.h"

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif

/* Beside the usual ones: */
static const int allowed[] = {
        SYS_fcntl,
        SYS_fstatfs,
        SYS_read,
        SYS_readv,
        SYS_statx,
        SYS_sysinfo,
        SYS_uname,
};

bool seccomp_is_supported(void) {
        return call_filter_is_supported();
}

int seccomp_apply(void) {
        const uint32_t writes =
                O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND | (O_TMPFILE & ~O_DIRECTORY);
        CLEANUP(call_filter_done) CallFilter c = {};
        int r;

        r = call_filter_init(&c);
        if (r < 0)
                return r;

        call_filter_allow_usual(&c);
        call_filter_allow(&c, allowed, ELEMENTSOF(allowed));
        call_filter_kill_hostile(&c);
        call_filter_allow_threads(&c);

        /* /proc/meminfo and the like. */
        call_filter_allow_without(&c, SYS_openat, 2, writes);
#ifdef __x86_64__
        call_filter_allow_without(&c, SYS_open, 1, writes);
#endif

        call_filter_allow_either(&c, SYS_prctl, 0, PR_SET_NAME, PR_SET_VMA);
        /* A thread its own slice (what is more takes privileges that it has not). */
        call_filter_allow_either(&c, SYS_sched_getattr, 0, 0, 0);
        call_filter_allow_either(&c, SYS_sched_setattr, 0, 0, 0);

        return call_filter_apply(&c);
}
