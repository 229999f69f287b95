/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/seccomp.h"

#include <fcntl.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* The same beside a driver of NVIDIA (580, CUDA 13): its devices, what its threads wait on, where its memory lies,
 * questions about the machine. None of them reaches another process, the network, or makes a file. */
static const int allowed_driver[] = {
        SYS_ioctl,
        /* files that are open */
        SYS_dup,
        SYS_dup3,
        SYS_eventfd2,
        SYS_faccessat,
        SYS_flock,
        SYS_ftruncate, /* of a memfd */
        SYS_getdents64,
        SYS_memfd_create,
        SYS_pipe2,
        SYS_pwrite64,
        SYS_readlinkat,
        SYS_statfs,
        SYS_epoll_create1,
        SYS_epoll_ctl,
        SYS_epoll_pwait,
        SYS_pselect6,
        /* memory */
        SYS_get_mempolicy,
        SYS_mbind,
        SYS_mincore,
        SYS_mlock,
        SYS_msync,
        SYS_munlock,
        SYS_set_mempolicy,
        /* threads, time, who we are */
        SYS_getegid,
        SYS_geteuid,
        SYS_getgid,
        SYS_getpgid,
        SYS_getppid,
        SYS_getpriority,
        SYS_getrusage,
        SYS_getuid,
        SYS_sched_get_priority_max,
        SYS_sched_get_priority_min,
        SYS_sched_getparam,
        SYS_sched_getscheduler,
        SYS_sched_setaffinity,
        SYS_set_tid_address,
        SYS_timerfd_create,
        SYS_timerfd_settime,
        SYS_times,
#ifdef __x86_64__
        SYS_access,
        SYS_dup2,
        SYS_epoll_wait,
        SYS_getpgrp,
        SYS_lstat,
        SYS_readlink,
        SYS_select,
        SYS_stat,
#endif
};

bool seccomp_is_supported(void) {
        return call_filter_is_supported();
}

int seccomp_apply(bool driver) {
        const uint32_t makes = O_CREAT | O_TRUNC | O_APPEND | (O_TMPFILE & ~O_DIRECTORY);
        const uint32_t writes = O_WRONLY | O_RDWR | makes;
        uint32_t self = (uint32_t) getpid();
        CLEANUP(call_filter_done) CallFilter c = {};
        int r;

        r = call_filter_init(&c);
        if (r < 0)
                return r;

        call_filter_allow_usual(&c);
        call_filter_allow(&c, allowed, ELEMENTSOF(allowed));
        if (driver)
                call_filter_allow(&c, allowed_driver, ELEMENTSOF(allowed_driver));
        call_filter_kill_hostile(&c);
        call_filter_allow_threads(&c);

        /* /proc/meminfo and the like; the nodes of devices are opened to read and write. A filter sees no path: which
         * files those can be is up to the sandbox. */
        call_filter_allow_without(&c, SYS_openat, 2, driver ? makes : writes);
#ifdef __x86_64__
        call_filter_allow_without(&c, SYS_open, 1, driver ? makes : writes);
#endif
        if (driver) /* questions about our own limits, none about others' */
                call_filter_allow_either(&c, SYS_prlimit64, 0, 0, self);

        call_filter_allow_either(&c, SYS_prctl, 0, PR_SET_NAME, PR_SET_VMA);
        /* A thread its own slice (what is more takes privileges that it has not). */
        call_filter_allow_either(&c, SYS_sched_getattr, 0, 0, 0);
        call_filter_allow_either(&c, SYS_sched_setattr, 0, 0, 0);

        return call_filter_apply(&c);
}
