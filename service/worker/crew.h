/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Helpers for work on the host's memory, e.g. while the ranks' threads are busy with their devices: threads for one piece of work
 * that end with it. */

#include <pthread.h>
#include <stdint.h>

#define CREW_MAX 16u

/* Part `i` of n, on any thread. */
typedef void (*CrewFunc)(void *userdata, uint32_t i, uint32_t n);

typedef struct Crew {
        CrewFunc func;
        void *userdata;
        uint32_t n, started; /* parts; of them those with a thread */
        struct CrewPart {
                struct Crew *crew;
                pthread_t thread;
                uint32_t i;
        } parts[CREW_MAX];
} Crew;

/* Begins as many parts as there are processors for the calling thread, at most `most` and CREW_MAX. c stays where it is until
 * crew_end(). */
void crew_begin(Crew *c, uint32_t most, CrewFunc func, void *userdata);

/* Does what no thread could be had for, and waits for all. */
void crew_end(Crew *c);
