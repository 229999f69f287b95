/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/timeline.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "service/shared/clock.h"
#include "service/shared/log.h"

#define NOTES_MAX 32u
#define LINE_MAX 1024

typedef struct Note {
        const char *what;
        uint64_t usec;
        bool beside;
        unsigned n; /* of what is counted: usec is a time then; else 0 */
} Note;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static Note notes[NOTES_MAX];
static unsigned n_notes;
static uint64_t begin_usec, linked_usec, first_usec;

static atomic_bool ended = true; /* what a step asks first; where there was no beginning there is nothing to tell */

/* What passed before is the linker's, and nearly all of it work. */
void timeline_begin(void) {
        struct timespec cpu = {};

        (void) clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
        (void) pthread_mutex_lock(&lock);
        n_notes = 0;
        first_usec = 0;
        linked_usec = (uint64_t) cpu.tv_sec * 1000000 + (uint64_t) cpu.tv_nsec / 1000;
        begin_usec = clock_usec();
        (void) pthread_mutex_unlock(&lock);
        ended = false;
}

static bool is_noted(const char *what) {
        for (unsigned i = 0; i < n_notes; i++)
                if (strcmp(notes[i].what, what) == 0)
                        return true;
        return false;
}

static void note(const char *what, bool beside) {
        if (ended)
                return;
        (void) pthread_mutex_lock(&lock);
        if (n_notes < NOTES_MAX && !is_noted(what))
                notes[n_notes++] = (Note){.what = what, .usec = clock_usec(), .beside = beside};
        (void) pthread_mutex_unlock(&lock);
}

void timeline_count(const char *what, uint64_t usec) {
        unsigned i = 0;

        if (ended)
                return;
        (void) pthread_mutex_lock(&lock);
        while (i < n_notes && strcmp(notes[i].what, what) != 0)
                i++;
        if (i == n_notes && i < NOTES_MAX)
                notes[n_notes++] = (Note){.what = what};
        if (i < n_notes) {
                notes[i].n++;
                notes[i].usec += usec;
        }
        (void) pthread_mutex_unlock(&lock);
}

void timeline_note(const char *what) {
        note(what, false);
}

void timeline_beside(const char *what) {
        note(what, true);
}

static void append(char *ret, size_t size, size_t *at, const char *what, double msec) {
        int n = snprintf(*at < size ? ret + *at : NULL, *at < size ? size - *at : 0, "%s%s %.1f", *at > 0 ? ", " : "", what, msec);

        *at += n > 0 ? (size_t) n : 0;
}

int timeline_print(char *ret, size_t size) {
        uint64_t last;
        size_t at = 0;
        char text[64];

        (void) pthread_mutex_lock(&lock);
        last = begin_usec;
        append(ret, size, &at, "linked", (double) linked_usec / 1000);
        for (unsigned i = 0; i < n_notes; i++) {
                if (notes[i].beside || notes[i].n > 0)
                        continue;
                append(ret, size, &at, notes[i].what, (double) (notes[i].usec - last) / 1000);
                last = notes[i].usec;
        }
        if (first_usec > 0) { /* the device may have begun before the host said so */
                append(ret, size, &at, "first kernel", ((double) first_usec - (double) last) / 1000);
                append(ret, size, &at, "all", ((double) first_usec - (double) begin_usec) / 1000);
        }
        for (unsigned i = 0; i < n_notes; i++)
                if (notes[i].n > 0) {
                        (void) snprintf(text, sizeof(text), "%u %s in", notes[i].n, notes[i].what);
                        append(ret, size, &at, text, (double) notes[i].usec / 1000);
                }
        for (unsigned i = 0, n = 0; i < n_notes; i++)
                if (notes[i].beside) {
                        (void) snprintf(text, sizeof(text), "%s%s at", n++ == 0 ? "beside it " : "", notes[i].what);
                        append(ret, size, &at, text, (double) (notes[i].usec - begin_usec) / 1000);
                }
        (void) pthread_mutex_unlock(&lock);
        return (int) at;
}

void timeline_end(uint64_t usec) {
        char line[LINE_MAX];

        if (atomic_exchange(&ended, true))
                return;
        (void) pthread_mutex_lock(&lock);
        first_usec = usec;
        (void) pthread_mutex_unlock(&lock);
        (void) timeline_print(line, sizeof(line));
        log_info("The first block began (ms each): %s.", line);
}
