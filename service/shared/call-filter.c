/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/call-filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdlib.h>
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
#else
#define FILTER_ARCH 0
#endif

bool call_filter_is_supported(void) {
        return FILTER_ARCH != 0 && !SANITIZED;
}

static void emit(CallFilter *c, uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false) {
        if (c->n >= CALL_FILTER_MAX) {
                c->full = true;
                return;
        }
        c->code[c->n++] = (struct sock_filter){.code = code, .jt = if_true, .jf = if_false, .k = k};
}

static void load(CallFilter *c, size_t offset) {
        emit(c, BPF_LD | BPF_W | BPF_ABS, (uint32_t) offset, 0, 0);
}

static void answer(CallFilter *c, uint32_t action) {
        emit(c, BPF_RET | BPF_K, action, 0, 0);
}

/* The number of the call is loaded before and after each of these. Both architectures are little endian: the
 * low half of an argument comes first, and flags have no other. */
static size_t argument(unsigned i) {
        return offsetof(struct seccomp_data, args) + i * sizeof(uint64_t);
}

static void on_call(CallFilter *c, int call, uint32_t action) {
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 1);
        answer(c, action);
}

int call_filter_init(CallFilter *c) {
        if (!call_filter_is_supported())
                return -EOPNOTSUPP;

        *c = (CallFilter){.code = calloc(CALL_FILTER_MAX, sizeof(*c->code))};
        if (!c->code)
                return -ENOMEM;

        load(c, offsetof(struct seccomp_data, arch));
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, FILTER_ARCH, 1, 0);
        answer(c, SECCOMP_RET_KILL_PROCESS);
        load(c, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
        emit(c, BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1); /* the x32 ABI has its own numbers */
        answer(c, SECCOMP_RET_KILL_PROCESS);
#endif
        return 0;
}

void call_filter_done(CallFilter *c) {
        free(c->code);
        *c = (CallFilter){};
}

void call_filter_allow(CallFilter *c, const int *calls, size_t n) {
        for (size_t i = 0; i < n; i++)
                on_call(c, calls[i], SECCOMP_RET_ALLOW);
}

void call_filter_kill(CallFilter *c, const int *calls, size_t n) {
        for (size_t i = 0; i < n; i++)
                on_call(c, calls[i], SECCOMP_RET_KILL_PROCESS);
}

/* Calls that are fine with any arguments and that every program of ours makes after its start. */
static const int usual[] = {
        /* memory */
        SYS_brk,
        SYS_madvise,
        SYS_mremap,
        SYS_munmap,
        SYS_membarrier,
        /* files that are open, the log */
        SYS_close,
        SYS_fstat,
        SYS_lseek,
        SYS_newfstatat,
        SYS_pread64,
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
#ifdef __x86_64__
        SYS_pause,
        SYS_poll,
        SYS_time,
#endif
};

void call_filter_allow_usual(CallFilter *c) {
        call_filter_allow(c, usual, ELEMENTSOF(usual));
}

void call_filter_kill_hostile(CallFilter *c) {
        static const int hostile[] = {
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

        call_filter_kill(c, hostile, ELEMENTSOF(hostile));
}

void call_filter_allow_without(CallFilter *c, int call, unsigned i, uint32_t bits) {
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 4);
        load(c, argument(i));
        emit(c, BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1);
        answer(c, SECCOMP_RET_ERRNO | EPERM);
        answer(c, SECCOMP_RET_ALLOW);
}

/* Allows the call if its argument i has `bit`, else refuses it. */
static void allow_with(CallFilter *c, int call, unsigned i, uint32_t bit) {
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 4);
        load(c, argument(i));
        emit(c, BPF_JMP | BPF_JSET | BPF_K, bit, 1, 0);
        answer(c, SECCOMP_RET_ERRNO | EPERM);
        answer(c, SECCOMP_RET_ALLOW);
}

void call_filter_allow_either(CallFilter *c, int call, unsigned i, uint32_t a, uint32_t b) {
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 5);
        load(c, argument(i));
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, a, 2, 0);
        emit(c, BPF_JMP | BPF_JEQ | BPF_K, b, 1, 0);
        answer(c, SECCOMP_RET_ERRNO | EPERM);
        answer(c, SECCOMP_RET_ALLOW);
}

void call_filter_allow_threads(CallFilter *c) {
        uint32_t self = (uint32_t) getpid();

        /* clone3 has its flags in memory, where a filter cannot look: libc then takes clone. */
        on_call(c, SYS_clone3, SECCOMP_RET_ERRNO | ENOSYS);
        allow_with(c, SYS_clone, 0, CLONE_THREAD);
        /* No code is made while it runs. */
        call_filter_allow_without(c, SYS_mmap, 2, PROT_EXEC);
        call_filter_allow_without(c, SYS_mprotect, 2, PROT_EXEC);
        /* abort() and the reaper: this process alone. */
        call_filter_allow_either(c, SYS_kill, 0, self, self);
        call_filter_allow_either(c, SYS_tgkill, 0, self, self);
}

int call_filter_apply(CallFilter *c) {
        struct sock_fprog program;

        answer(c, SECCOMP_RET_ERRNO | EPERM);
        if (c->full)
                return -E2BIG;

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return -errno;

        program = (struct sock_fprog){.len = (unsigned short) c->n, .filter = c->code};
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0)
                return errno == EINVAL || errno == ENOSYS ? -EOPNOTSUPP : -errno;
        return 0;
}
