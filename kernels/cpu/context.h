/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What an LkContext of the CPU backend is: a thread pool and one scratch buffer that ops use in turn. */

#include <stddef.h>

#include "kernels/cpu/threads.h"
#include "kernels/ops.h"

struct LkContext {
        Threads *threads;
        void *scratch; /* CONTEXT_ALIGN-aligned; lives until the context is freed */
        size_t scratch_size;
};

#define CONTEXT_ALIGN 256u

int context_new(uint32_t threads, LkContext **ret);
LkContext *context_free(LkContext *c);
void context_stop_when(LkContext *c, LkStop stop, void *userdata);

/* At least size bytes, contents undefined, valid until the next call. Returns -ENOMEM. */
int context_scratch(LkContext *c, size_t size, void **ret);

int context_memory_new(LkContext *c, uint64_t size, void **ret);
void context_memory_free(LkContext *c, void *p);
void context_memory_trim(LkContext *c);
int context_copy(LkContext *c, void *to, const void *from, uint64_t size);

/* Everything is done when it returns: nothing to order, nothing to register. Arguments are checked. */
int context_fetch(LkContext *c, const LkFetch *a);
int context_event(LkContext *c, LkQueue queue, uint32_t event);
int context_join(LkContext *c, uint32_t event);
int context_pin(LkContext *c, const void *host, uint64_t size);
void context_unpin(const void *host, uint64_t size);
