/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/crash-budget.h"

#include <string.h>

#include "service/shared/cleanup.h"

typedef struct User {
        uid_t uid;
        uint64_t until;
        uint32_t n;
        uint64_t crashes[CRASH_BUDGET_MAX]; /* oldest first */
        struct User *next;
} User;

struct CrashBudget {
        uint32_t n;
        uint64_t window_usec;
        User *users;
};

int crash_budget_new(uint32_t n, uint64_t window_usec, CrashBudget **ret) {
        CrashBudget *b;

        if (n > CRASH_BUDGET_MAX)
                return -ERANGE;

        b = calloc(1, sizeof(*b));
        if (!b)
                return -ENOMEM;

        b->n = n;
        b->window_usec = window_usec;
        *ret = b;
        return 0;
}

CrashBudget *crash_budget_free(CrashBudget *b) {
        User *next;

        if (!b)
                return NULL;

        for (User *u = b->users; u; u = next) {
                next = u->next;
                free(u);
        }
        free(b);
        return NULL;
}

static User *find(const CrashBudget *b, uid_t uid) {
        for (User *u = b->users; u; u = u->next)
                if (u->uid == uid)
                        return u;

        return NULL;
}

/* Those who need not wait and whose crashes are all too old. */
static void forget_old(CrashBudget *b, uint64_t now) {
        for (User **p = &b->users; *p;) {
                User *u = *p;

                if (u->until > now || (u->n > 0 && now - u->crashes[u->n - 1] < b->window_usec)) {
                        p = &u->next;
                        continue;
                }
                *p = u->next;
                free(u);
        }
}

bool crash_budget_count(CrashBudget *b, uid_t uid, uint64_t now) {
        uint32_t old = 0;
        User *u;

        if (b->n == 0)
                return false;

        forget_old(b, now);
        u = find(b, uid);
        if (!u) {
                u = calloc(1, sizeof(*u));
                if (!u)
                        return false; /* who is short of a few bytes has other troubles */
                u->uid = uid;
                u->next = b->users;
                b->users = u;
        }

        while (old < u->n && now - u->crashes[old] >= b->window_usec)
                old++;
        u->n -= old;
        memmove(u->crashes, u->crashes + old, u->n * sizeof(u->crashes[0]));
        u->crashes[u->n++] = now;
        if (u->n < b->n)
                return false;

        u->n = 0;
        u->until = now + CRASH_WAIT_USEC;
        return true;
}

uint64_t crash_budget_until(const CrashBudget *b, uid_t uid, uint64_t now) {
        const User *u = find(b, uid);

        return u && u->until > now ? u->until : 0;
}
