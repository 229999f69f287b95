/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/slice.h"

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHORT_NSEC 100000u  /* the least that Linux takes */
#define LONG_NSEC 20000000u /* many times the usual one */

/* struct sched_attr of the kernel, first version: the headers that have it do not get on with each other. */
typedef struct SchedAttributes {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
} SchedAttributes;

#define SCHED_POLICY_OTHER 0u
#define SCHED_RESET_ON_FORK_FLAG UINT64_C(1)

static int set_slice(uint64_t nsec, uint64_t flags) {
        SchedAttributes a = {};

        if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) < 0)
                return -errno;

        if (a.policy != SCHED_POLICY_OTHER)
                return -EOPNOTSUPP;

        a.flags |= flags;
        a.runtime = nsec;
        return syscall(SYS_sched_setattr, 0, &a, 0) < 0 ? -errno : 0;
}

int slice_make_short(void) {
        return set_slice(SHORT_NSEC, SCHED_RESET_ON_FORK_FLAG);
}

int slice_make_long(void) {
        return set_slice(LONG_NSEC, 0);
}
