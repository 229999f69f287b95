/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The thread that ends the process when its broker is gone, whatever the other threads hang in (a driver
 * call, a long block): nobody holds memory as an orphan. It touches nothing but the socket. */

/* Starts it. socket must stay open. Negative errno. */
int reaper_start(int socket);

/* Ends the process at once. Messages that were sent stay readable for the peer. */
void reaper_kill_process(void) __attribute__((noreturn));
