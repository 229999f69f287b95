/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/slice.h"

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SLICE_NSEC 100000u /* the least that Linux takes */

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

int slice_make_short(void) {
        SchedAttributes a = {};

        if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) < 0)
                return -errno;

        if (a.policy != SCHED_POLICY_OTHER)
                return -EOPNOTSUPP; /* somebody has decided otherwise */

        a.flags |= SCHED_RESET_ON_FORK_FLAG;
        a.runtime = SLICE_NSEC;
        return syscall(SYS_sched_setattr, 0, &a, 0) < 0 ? -errno : 0;
}
