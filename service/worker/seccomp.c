/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/seccomp.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/shared/cleanup.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#if defined(__x86_64__)
#define FILTER_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define FILTER_ARCH AUDIT_ARCH_AARCH64
#endif

bool seccomp_is_supported(void) {
#ifdef FILTER_ARCH
        return !SANITIZED;
#else
        return false;
#endif
}

#ifdef FILTER_ARCH

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif

#define FILTER_MAX 512

typedef struct Filter {
        struct sock_filter code[FILTER_MAX];
        unsigned n;
        bool full;
} Filter;

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

/* Calls that nothing of ours makes and that an intruder would: the process ends. All that is in no list is
 * refused. */
static const int deadly[] = {
        SYS_execve,
        SYS_execveat,
        SYS_ptrace,
        SYS_process_vm_readv,
        SYS_process_vm_writev,
        SYS_mount,
        SYS_umount2,
        SYS_pivot_root,
        SYS_chroot,
        SYS_setns,
        SYS_unshare,
        SYS_init_module,
        SYS_finit_module,
        SYS_delete_module,
        SYS_kexec_load,
        SYS_bpf,
        SYS_perf_event_open,
        SYS_add_key,
        SYS_request_key,
        SYS_keyctl,
        SYS_userfaultfd,
        SYS_open_by_handle_at,
        SYS_swapon,
        SYS_swapoff,
        SYS_reboot,
};

static void emit(Filter *p, uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false) {
        if (p->n >= FILTER_MAX) {
                p->full = true;
                return;
        }
        p->code[p->n++] = (struct sock_filter){.code = code, .jt = if_true, .jf = if_false, .k = k};
}

static void load(Filter *p, size_t offset) {
        emit(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t) offset, 0, 0);
}

static void answer(Filter *p, uint32_t action) {
        emit(p, BPF_RET | BPF_K, action, 0, 0);
}

/* The number of the call is loaded before and after each of these. Both architectures are little endian: the
 * low half of an argument comes first, and flags have no other. */
static size_t argument(unsigned i) {
        return offsetof(struct seccomp_data, args) + i * sizeof(uint64_t);
}

static void on_call(Filter *p, int call, uint32_t action) {
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 1);
        answer(p, action);
}

/* Allows the call if none of `bits` is set in its argument i, else refuses it. */
static void allow_without(Filter *p, int call, unsigned i, uint32_t bits) {
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 4);
        load(p, argument(i));
        emit(p, BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1);
        answer(p, SECCOMP_RET_ERRNO | EPERM);
        answer(p, SECCOMP_RET_ALLOW);
}

/* Allows the call if its argument i has all of `bits` (one bit), else refuses it. */
static void allow_with(Filter *p, int call, unsigned i, uint32_t bit) {
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 4);
        load(p, argument(i));
        emit(p, BPF_JMP | BPF_JSET | BPF_K, bit, 1, 0);
        answer(p, SECCOMP_RET_ERRNO | EPERM);
        answer(p, SECCOMP_RET_ALLOW);
}

/* Allows the call if its argument i is a or b, else refuses it. */
static void allow_either(Filter *p, int call, unsigned i, uint32_t a, uint32_t b) {
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 5);
        load(p, argument(i));
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, a, 2, 0);
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, b, 1, 0);
        answer(p, SECCOMP_RET_ERRNO | EPERM);
        answer(p, SECCOMP_RET_ALLOW);
}

static void make_filter(Filter *p, bool driver) {
        const uint32_t makes = O_CREAT | O_TRUNC | O_APPEND | (O_TMPFILE & ~O_DIRECTORY);
        const uint32_t writes = O_WRONLY | O_RDWR | makes;
        uint32_t self = (uint32_t) getpid();

        load(p, offsetof(struct seccomp_data, arch));
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, FILTER_ARCH, 1, 0);
        answer(p, SECCOMP_RET_KILL_PROCESS);
        load(p, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
        emit(p, BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1); /* the x32 ABI has its own numbers */
        answer(p, SECCOMP_RET_KILL_PROCESS);
#endif

        for (size_t i = 0; i < ELEMENTSOF(allowed); i++)
                on_call(p, allowed[i], SECCOMP_RET_ALLOW);
        for (size_t i = 0; driver && i < ELEMENTSOF(allowed_driver); i++)
                on_call(p, allowed_driver[i], SECCOMP_RET_ALLOW);
        for (size_t i = 0; i < ELEMENTSOF(deadly); i++)
                on_call(p, deadly[i], SECCOMP_RET_KILL_PROCESS);

        /* A thread, never a process. clone3 has its flags in memory, where a filter cannot look: libc then
         * takes clone. */
        on_call(p, SYS_clone3, SECCOMP_RET_ERRNO | ENOSYS);
        allow_with(p, SYS_clone, 0, CLONE_THREAD);

        /* No code is made while it runs. */
        allow_without(p, SYS_mmap, 2, PROT_EXEC);
        allow_without(p, SYS_mprotect, 2, PROT_EXEC);

        /* /proc/meminfo and the like; the nodes of devices are opened to read and write. A filter sees no path: which
         * files those can be is up to the sandbox. */
        allow_without(p, SYS_openat, 2, driver ? makes : writes);
#ifdef __x86_64__
        allow_without(p, SYS_open, 1, driver ? makes : writes);
#endif
        if (driver) /* questions about our own limits, none about others' */
                allow_either(p, SYS_prlimit64, 0, 0, self);

        allow_either(p, SYS_prctl, 0, PR_SET_NAME, PR_SET_VMA);
        /* abort() and the reaper: this process alone. */
        allow_either(p, SYS_kill, 0, self, self);
        allow_either(p, SYS_tgkill, 0, self, self);
        /* A thread its own slice (what is more takes privileges that it has not). */
        allow_either(p, SYS_sched_getattr, 0, 0, 0);
        allow_either(p, SYS_sched_setattr, 0, 0, 0);

        answer(p, SECCOMP_RET_ERRNO | EPERM);
}

int seccomp_apply(bool driver) {
        static Filter filter; /* 4 KiB; static, since there is one for the whole process */
        struct sock_fprog program;

        if (!seccomp_is_supported())
                return -EOPNOTSUPP;

        filter.n = 0;
        make_filter(&filter, driver);
        if (filter.full)
                return -E2BIG;

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return -errno;

        program = (struct sock_fprog){.len = (unsigned short) filter.n, .filter = filter.code};
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0)
                return errno == EINVAL || errno == ENOSYS ? -EOPNOTSUPP : -errno;

        return 0;
}

#else

int seccomp_apply(bool driver) {
        return -EOPNOTSUPP;
}

#endif
