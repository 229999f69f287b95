/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the header parser and the index parser share. Not for others. */

#include <stddef.h>

/* What a file really is that is not safetensors, by its first bytes: "a zip archive (PyTorch?)"; NULL if
 * unknown. */
const char *st_foreign_format(const void *start, size_t n);

/* Size of the room for elements of a growing array: doubles *p when n = *cap. -ENOMEM. */
int st_grow(void **p, size_t n, size_t *cap, size_t element);
