/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Builds a program's own filter of system calls, for after its start. Nothing of what it was given is undone
 * by later rules: the first that matches decides; a call that no rule names is refused with EPERM. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CALL_FILTER_MAX 512

typedef struct CallFilter {
        struct sock_filter *code; /* CALL_FILTER_MAX */
        unsigned n;
        bool full;
} CallFilter;

/* Whether this build can be filtered: sanitizers need calls that a filter refuses. */
bool call_filter_is_supported(void);

/* -EOPNOTSUPP, -ENOMEM. */
int call_filter_init(CallFilter *c);
void call_filter_done(CallFilter *c);

void call_filter_allow(CallFilter *c, const int *calls, size_t n);
/* What any program of ours needs after its start. */
void call_filter_allow_usual(CallFilter *c);
/* Ends the process: for calls that nothing of ours makes and that an intruder would. */
void call_filter_kill(CallFilter *c, const int *calls, size_t n);
/* The same for what no program of ours may do at any time: to start programs, to look into processes, to
 * mount, ... */
void call_filter_kill_hostile(CallFilter *c);
/* Allows the call if none of `bits` is set in its argument i (its low half), else refuses it. */
void call_filter_allow_without(CallFilter *c, int call, unsigned i, uint32_t bits);
/* Allows it if its argument i is a or b, else refuses it. */
void call_filter_allow_either(CallFilter *c, int call, unsigned i, uint32_t a, uint32_t b);
/* Threads, never processes; memory, never code; signals to this process alone. */
void call_filter_allow_threads(CallFilter *c);

/* Filters the calling thread and the threads it starts from now on, for good; sets no_new_privs. Call it
 * before there are others. -EOPNOTSUPP: the kernel knows no filters. -E2BIG: more than CALL_FILTER_MAX
 * instructions. Other negative errno. */
int call_filter_apply(CallFilter *c);
