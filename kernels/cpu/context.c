/* SPDX-License-Identifier: Apache-2.0 */
/* Context, scratch and "device" memory, which is ordinary memory here. */

#include "kernels/cpu/context.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

DEFINE_CLEANUP(LkContext *, context_free)

/* A mask of more than 1024 CPUs does not fit cpu_set_t, so the set grows until the kernel accepts it. */
static int count_allowed_cpus(uint32_t *ret) {
        for (int n = CPU_SETSIZE; n <= 1 << 20; n *= 2) {
                size_t size = CPU_ALLOC_SIZE(n);
                cpu_set_t *set = CPU_ALLOC(n);
                int r = 0, count = 0;

                if (!set)
                        return -ENOMEM;

                if (sched_getaffinity(0, size, set) < 0)
                        r = -errno;
                else
                        count = CPU_COUNT_S(size, set);

                CPU_FREE(set);

                if (r == -EINVAL)
                        continue;
                if (r < 0)
                        return r;

                *ret = count < 1 ? 1 : (uint32_t) count > THREADS_MAX ? THREADS_MAX : (uint32_t) count;
                return 0;
        }

        return -EINVAL;
}

int context_new(uint32_t threads, LkContext **ret) {
        CLEANUP(context_freep) LkContext *c = NULL;
        int r;

        if (!ret)
                return -EINVAL;

        if (threads == 0) {
                r = count_allowed_cpus(&threads);
                if (r < 0)
                        return r;
        }

        c = calloc(1, sizeof(*c));
        if (!c)
                return -ENOMEM;

        r = threads_new(threads, &c->threads);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(c);
        return 0;
}

LkContext *context_free(LkContext *c) {
        if (!c)
                return NULL;

        (void) threads_free(c->threads);
        free(c->scratch);
        free(c);
        return NULL;
}

void context_stop_when(LkContext *c, LkStop stop, void *userdata) {
        threads_stop_when(c->threads, stop, userdata);
}

static int memory_aligned(uint64_t size, void **ret) {
        void *p;

        if (size > PTRDIFF_MAX - CONTEXT_ALIGN)
                return -ENOMEM;

        /* aligned_alloc() wants a multiple of the alignment */
        size = (size + CONTEXT_ALIGN) / CONTEXT_ALIGN * CONTEXT_ALIGN;
        p = aligned_alloc(CONTEXT_ALIGN, size);
        if (!p)
                return -ENOMEM;

        *ret = p;
        return 0;
}

int context_scratch(LkContext *c, size_t size, void **ret) {
        int r;

        if (c->scratch_size < size) {
                free(c->scratch);
                c->scratch = NULL;
                c->scratch_size = 0;

                r = memory_aligned(size, &c->scratch);
                if (r < 0)
                        return r;

                c->scratch_size = size;
        }

        *ret = c->scratch;
        return 0;
}

int context_memory_new(LkContext *c, uint64_t size, void **ret) {
        if (!c || !ret)
                return -EINVAL;

        return memory_aligned(size, ret);
}

void context_memory_free(LkContext *c, void *p) {
        free(p);
}

/* free() has done it. */
void context_memory_trim(LkContext *c) {
        (void) c;
}

int context_copy(LkContext *c, void *to, const void *from, uint64_t size) {
        if (!c || (size > 0 && (!to || !from)))
                return -EINVAL;

        if (size > 0)
                memcpy(to, from, size);

        return 0;
}

int context_fetch(LkContext *c, const LkFetch *a) {
        if (!c || !a || (a->rows > 0 && a->width > 0 && (!a->device || !a->host)) ||
                (a->rows > 1 && a->stride < a->width))
                return -EINVAL;

        for (uint64_t i = 0; a->width > 0 && i < a->rows; i++)
                memcpy((uint8_t *) a->device + i * a->width, (const uint8_t *) a->host + i * a->stride, a->width);
        return 0;
}

int context_event(LkContext *c, LkQueue queue, uint32_t event) {
        return !c || (unsigned) queue >= _LK_QUEUE_MAX || event >= LK_EVENTS_MAX ? -EINVAL : 0;
}

int context_join(LkContext *c, uint32_t event) {
        return context_event(c, LK_COMPUTE, event);
}

int context_pin(LkContext *c, const void *host, uint64_t size) {
        return !c || (size > 0 && !host) ? -EINVAL : 0;
}

void context_unpin(const void *host, uint64_t size) {
        (void) host;
        (void) size;
}
