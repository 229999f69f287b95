/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Memory pressure as the kernel tells it (PSI): of the machine, and of each cgroup v2 that we are in. A source that
 * refuses its trigger (kernels before 6.5 do without privileges, and a read-only /sys/fs/cgroup does) is read every two seconds; one that
 * is absent is not used. */

#include <systemd/sd-event.h>

typedef struct Pressure Pressure;

typedef void (*PressureFn)(void *userdata); /* on the loop: tasks wait for memory; at most every two seconds and source */

/* root: "" for the system, else the root of a made tree as for memory_headroom(). */
int pressure_new(sd_event *event, const char *root, PressureFn fn, void *userdata, Pressure **ret);
Pressure *pressure_free(Pressure *p);
unsigned pressure_count(const Pressure *p); /* sources in use */
