/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/staging.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/log.h"
#include "service/shared/numa-policy.h"
#include "service/worker/crew.h"

#define TOUCH_THREADS 4u
#define HUGE_PAGE (UINT64_C(2) << 20)
/* What is kept may be so much larger than what is asked for. */
#define SLACK(size) ((size) / 8 + HUGE_PAGE)

static void touch_part(void *userdata, uint32_t i, uint32_t n) {
        const StagingArea *a = userdata;
        uint64_t pages = a->size / HUGE_PAGE, begin = pages * i / n * HUGE_PAGE, end = pages * (i + 1) / n * HUGE_PAGE;

        memset(a->memory + begin, 0, end - begin);
}

/* One thread registers 1.5 GB of pages that nobody has touched in more than a second. */
static void touch_all(StagingArea *a) {
        Crew crew;

        crew_begin(&crew, TOUCH_THREADS, touch_part, a);
        crew_end(&crew);
}

static int make(Staging *s, const LkOps *ops, LkContext *context, uint32_t rank, uint64_t size) {
        const NumaPolicy policy = {.kind = NUMA_PREFER, .node = s->nodes[rank] - 1};
        StagingArea *a = s->areas + rank;
        static atomic_bool warned;
        void *memory;
        int r;

        size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
                return -errno;
        (void) madvise(memory, size, MADV_HUGEPAGE);
        if (s->nodes[rank] > 0) /* anywhere else it is slower */
                (void) numa_policy_apply(&policy, memory, size);
        *a = (StagingArea){.ops = ops, .memory = memory, .size = size};
        touch_all(a);
        r = ops->pin(context, memory, size);
        a->registered = r >= 0;
        if (r < 0 && !atomic_exchange(&warned, true))
                log_warning("Memory that ranks exchange through cannot be registered with the device (%s): their exchange is slow. Is "
                            "LimitMEMLOCK= large enough?",
                        strerror(-r));
        return 0;
}

int staging_take(Staging *s, const LkOps *ops, LkContext *context, uint32_t rank, uint64_t size, StagingArea *ret) {
        StagingArea *a = s->areas + rank;
        int r;

        if (a->size < size || a->size - size > SLACK(size)) {
                staging_drop(s, rank);
                r = size > 0 ? make(s, ops, context, rank, size) : 0;
                if (r < 0)
                        return r;
        }
        *ret = *a;
        return 0;
}

void staging_drop(Staging *s, uint32_t rank) {
        StagingArea *a = s->areas + rank;

        if (a->registered)
                a->ops->unpin(a->memory, a->size);
        if (a->memory)
                (void) munmap(a->memory, a->size);
        *a = (StagingArea){};
}

void staging_clear(Staging *s) {
        for (uint32_t i = 0; i < RANKS_MAX; i++)
                staging_drop(s, i);
}

void staging_abandon(Staging *s) {
        memset(s->areas, 0, sizeof(s->areas));
}

uint64_t staging_bytes(const Staging *s) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < RANKS_MAX; i++)
                sum += s->areas[i].size;
        return sum;
}
