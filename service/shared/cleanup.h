/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Scope cleanup and ownership transfer. Only functions that take a pointer to the variable go into CLEANUP. */

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define CLEANUP(fn) __attribute__((__cleanup__(fn)))

static inline void cleanup_freep(void *p) {
        free(*(void **) p);
}

/* Closes and keeps errno, so that it may stand behind `return -errno`. A second call does nothing: the number may be another's by then. */
static inline void cleanup_closep(int *fd) {
        if (*fd >= 0) {
                int e = errno;

                (void) close(*fd);
                *fd = -EBADF; /* the number may be another one's by the next call */
                errno = e;
        }
}

#define CLEANUP_FREE CLEANUP(cleanup_freep)
#define CLEANUP_CLOSE CLEANUP(cleanup_closep)

#define STEAL(var, none)                          \
        ({                                        \
                __typeof__(var) *_s = &(var);     \
                __typeof__(var) _v = *_s;         \
                *_s = (none);                     \
                _v;                               \
        })
#define STEAL_PTR(p) STEAL(p, NULL)
#define STEAL_FD(fd) STEAL(fd, -EBADF)

/* type is a pointer type, fn accepts it: defines fnp() for CLEANUP. */
#define DEFINE_CLEANUP(type, fn)              \
        static inline void fn##p(type *p) {   \
                if (*p)                       \
                        (void) fn(*p);        \
        }

#define ELEMENTSOF(x) (sizeof(x) / sizeof((x)[0]))
