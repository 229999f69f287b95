/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* For a thread that runs briefly and is waited for: asks the scheduler to let it run soon after it wakes up, at the price of being
 * interrupted sooner when it runs long (a time slice of a tenth of a millisecond; Linux 6.12, before that nothing happens). Only this
 * thread: the threads and processes that it makes are as usual. Needs no privilege. Negative errno: nothing has changed, which is no
 * reason to stop. */
int slice_make_short(void);
