/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Before a byte of a file is looked at: limits of memory, time and size, and a filter that leaves no way to
 * open, connect or start anything. It holds also where no service manager set one. */

#include <stdbool.h>

#include "service/shared/fault.h"

#define SANDBOX_MEMORY                                                                                      \
        (UINT64_C(6) << 30) /* of address space beyond what is mapped already: two pictures of              \
                               MEDIA_PIXELS_MAX and codecs */
#define SANDBOX_READ_CPU_SEC 660
#define SANDBOX_WRITE_CPU_SEC (24 * 3600)
#define SANDBOX_FILE_BYTES (UINT64_C(64) << 30)

/* Call it with the arena mapped and before other threads are there. */
int sandbox_enter(bool write, Fault *f);
