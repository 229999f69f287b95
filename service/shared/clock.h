/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC in microseconds. */
static inline uint64_t clock_usec(void) {
        struct timespec t = {};

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t) t.tv_sec * 1000000 + (uint64_t) t.tv_nsec / 1000;
}

/* The time of CLOCK_MONOTONIC in usec microseconds from now, for pthread_cond_timedwait() and the like. */
static inline struct timespec clock_after(uint64_t usec) {
        uint64_t until = clock_usec() + usec;

        return (struct timespec){.tv_sec = (time_t) (until / 1000000), .tv_nsec = (long) (until % 1000000) * 1000};
}
