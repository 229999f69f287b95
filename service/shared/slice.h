/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Time slices of threads: who has a shorter one runs sooner when it wakes up beside one that runs; over time all get the same. From Linux
 * 6.12 on, before that nothing happens. Needs no privilege. Negative errno: nothing has changed, which is no reason to stop; -EOPNOTSUPP:
 * the thread has another policy than the usual one. */

/* For a thread that runs briefly and is waited for: a tenth of a millisecond. Not for the threads and processes that it makes. */
int slice_make_short(void);

/* For a thread that works for long: whoever wakes up goes first. Also for the threads that it makes from now on. */
int slice_make_long(void);
