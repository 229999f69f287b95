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

/* Calls that are fine with any arguments. */
static const int allowed[] = {
        /* memory */
        SYS_brk,
        SYS_madvise,
        SYS_mremap,
        SYS_munmap,
        SYS_membarrier,
        /* files that are open */
        SYS_close,
        SYS_fcntl,
        SYS_fstat,
        SYS_fstatfs,
        SYS_lseek,
        SYS_newfstatat,
        SYS_pread64,
        SYS_read,
        SYS_readv,
        SYS_statx,
        SYS_write,
        SYS_writev,
        /* the socket */
        SYS_ppoll,
        SYS_recvmsg,
        SYS_sendmsg,
        /* threads, signals, time */
        SYS_clock_getres,
        SYS_clock_gettime,
        SYS_clock_nanosleep,
        SYS_exit,
        SYS_exit_group,
        SYS_futex,
        SYS_get_robust_list,
        SYS_getcpu,
        SYS_getpid,
        SYS_getrandom,
        SYS_gettid,
        SYS_gettimeofday,
        SYS_nanosleep,
        SYS_restart_syscall,
        SYS_rseq,
        SYS_rt_sigaction,
        SYS_rt_sigprocmask,
        SYS_rt_sigreturn,
        SYS_sched_getaffinity,
        SYS_sched_yield,
        SYS_set_robust_list,
        SYS_sigaltstack,
        SYS_sysinfo,
        SYS_uname,
#ifdef __x86_64__
        SYS_pause,
        SYS_poll,
        SYS_time,
#endif
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
