/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* /proc/meminfo, and files like it. */

#include <stddef.h>
#include <stdint.h>

/* The value of the first "key : value" line of a /proc file. -ENOENT, or what fopen() says. */
int meminfo_field(const char *path, const char *key, char *ret, size_t n);

/* Bytes of "MemTotal" and the like; 0 where that is not known. */
uint64_t meminfo_read(const char *key);
uint64_t meminfo_available(void);
