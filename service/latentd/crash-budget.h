/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A job that crashes its worker costs everybody the worker's start, so a user whose jobs do it too often waits.
 * CrashBudget=N/TIME: at the Nth crash within the time the user's jobs wait for CRASH_WAIT_USEC, and the count starts again.
 * Times are CLOCK_MONOTONIC. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CRASH_WAIT_USEC (60 * UINT64_C(1000000))
#define CRASH_BUDGET_MAX 100

typedef struct CrashBudget CrashBudget;

/* n: 1 .. CRASH_BUDGET_MAX, or 0: nobody ever waits. */
int crash_budget_new(uint32_t n, uint64_t window_usec, CrashBudget **ret);
CrashBudget *crash_budget_free(CrashBudget *b);

/* One of this user's jobs had the worker when that crashed. Returns true if the user has to wait now. */
bool crash_budget_count(CrashBudget *b, uid_t uid, uint64_t now_usec);
/* Until when the user's jobs wait; 0 if they need not. */
uint64_t crash_budget_until(const CrashBudget *b, uid_t uid, uint64_t now_usec);
