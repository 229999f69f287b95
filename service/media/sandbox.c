/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/shared/call-filter.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif

/* Beside the usual ones: */
static const int allowed[] = {
        SYS_fsync,
        SYS_ftruncate,
        SYS_pwrite64,
};

/* What is mapped now, bytes. */
static uint64_t address_space(void) {
        unsigned long pages = 0;
        FILE *s = fopen("/proc/self/statm", "re");

        if (!s)
                return 0;
        if (fscanf(s, "%lu", &pages) != 1)
                pages = 0;
        (void) fclose(s);
        return (uint64_t) pages * (uint64_t) sysconf(_SC_PAGESIZE);
}

/* Never above what the service manager allows. */
static int limit(int resource, uint64_t soft, uint64_t hard) {
        struct rlimit now, want = {.rlim_cur = soft, .rlim_max = hard};

        if (getrlimit((__rlimit_resource_t) resource, &now) < 0)
                return -errno;
        if (want.rlim_max > now.rlim_max)
                want.rlim_max = now.rlim_max;
        if (want.rlim_cur > want.rlim_max)
                want.rlim_cur = want.rlim_max;
        return setrlimit((__rlimit_resource_t) resource, &want) < 0 ? -errno : 0;
}

static int set_limits(bool write) {
        uint64_t memory = address_space() + SANDBOX_MEMORY,
                 cpu = write ? SANDBOX_WRITE_CPU_SEC : SANDBOX_READ_CPU_SEC;
        uint64_t file = write ? SANDBOX_FILE_BYTES : 0;
        int r;

        /* A write beyond the limit is an error with a name (EFBIG), not the end. */
        (void) signal(SIGXFSZ, SIG_IGN);

        r = limit(RLIMIT_CPU, cpu, cpu);
        if (r >= 0)
                r = limit(RLIMIT_FSIZE, file, file);
        if (r >= 0 && call_filter_is_supported()) /* sanitizers reserve all of the address space */
                r = limit(RLIMIT_AS, memory, memory);
        return r;
}

static int filter_calls(void) {
        CLEANUP(call_filter_done) CallFilter c = {};
        int r;

        r = call_filter_init(&c);
        if (r < 0)
                return r;

        call_filter_allow_usual(&c);
        call_filter_allow(&c, allowed, ELEMENTSOF(allowed));
        call_filter_kill_hostile(&c);
        call_filter_allow_threads(&c);
        call_filter_allow_either(&c, SYS_prctl, 0, PR_SET_NAME, PR_SET_VMA);
        call_filter_allow_either(&c, SYS_fcntl, 1, F_GETFL, F_GETFL);
        return call_filter_apply(&c);
}

int sandbox_enter(bool write, Fault *f) {
        int r;

        r = set_limits(write);
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The limits of the process cannot be set: %s.", strerror(-r));

        r = filter_calls();
        if (r == -EOPNOTSUPP) {
                log_debug("There is no filter of system calls here (sanitizer, architecture or kernel "
                          "without one).");
                return 0;
        }
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The filter of system calls cannot be set: %s.", strerror(-r));
        return 0;
}
