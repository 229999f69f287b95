/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/* Reads a small file that people write into malloc'ed memory, with a NUL behind it: a regular one of at most `max` bytes. /dev/null counts
 * as an empty one, as which it is used. Nothing is waited for that has no end or says nothing: a pipe, a terminal, another device is
 * -ENODEV, a directory -EISDIR. -EFBIG: more than max bytes; otherwise what open() and read() say. */
int text_file_read(const char *path, size_t max, char **ret, size_t *ret_size);

/* Such an error in words, to follow "... cannot be read: ". */
const char *text_file_strerror(int error);
