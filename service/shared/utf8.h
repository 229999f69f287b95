/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Decodes the first character of n bytes. Returns its length, 1 to 4, or 0 if it is malformed or cut short;
 * the code point is written on success only. */
size_t utf8_decode(const char *s, size_t n, uint32_t *ret_code_point);

/* Encodes a code point (<= 0x10FFFF, no surrogate: the caller's duty). Returns the length, 1 to 4. */
size_t utf8_encode(uint32_t code_point, char buf[static 4]);

/* True if all n bytes are UTF-8. */
bool utf8_is_valid(const char *s, size_t n);

/* A copy in which each byte that is no part of a character is written as \xNN. NULL: no memory. */
char *utf8_escape(const char *s);
