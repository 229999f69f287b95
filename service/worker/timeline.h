/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a new worker did until its first step's first kernel of block 0, and when: one line of its log. Any thread. */

#include <stddef.h>
#include <stdint.h>

/* At the start of main(). */
void timeline_begin(void);

/* `what` (a static string) was done; the first time counts, and nothing does after the end. */
void timeline_note(const char *what);

/* The same of what a thread did that is waited for at most: the line says at its end when that was, since the start. */
void timeline_beside(const char *what);

/* One more of `what`, which took so long: the line has how many there were, and how long all of them took. */
void timeline_count(const char *what, uint64_t usec);

/* The first kernel began at first_usec (CLOCK_MONOTONIC; 0: not known): the line is written, once. */
void timeline_end(uint64_t first_usec);

/* The line, as snprintf does: what was done, each with the milliseconds that it took. */
int timeline_print(char *ret, size_t size);
