/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The last descriptors that this process may have are its own. A message with descriptors that finds none free costs
 * the connection it came on, be it the message bus: what clients make the service hold must end before that. */

#include <stdbool.h>

#include "service/shared/fault.h"

/* The kernel gives the lowest free number: one this high means that all below are taken. */
bool descriptor_is_reserve(int fd);

/* Of something that was opened for a client, or before that is done. what: "A session". -EMFILE with f if only the reserve is left. */
int descriptor_check(int fd, const char *what, Fault *f);
int descriptors_check(const char *what, Fault *f);
