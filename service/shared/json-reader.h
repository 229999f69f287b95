/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reads hostile JSON from memory without building a tree: the caller asks for what its format has next.
 * Strict RFC 8259 with these limits: integers are 0 to 2^63 - 1, strings hold no NUL character.
 *
 * Why not a library: a tree costs up to 75 bytes of memory for each byte of text ("{},{},..." in jansson),
 * which turns the permitted 100 MB header into gigabytes. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct JsonReader {
        const char *text;
        size_t n;
        size_t at;        /* first byte that is not read yet; at an error: where it is */
        const char *rule; /* what was expected or not allowed; NULL: no error so far */
} JsonReader;

/* Linear, without allocation: all bytes are UTF-8 and objects and lists are nested at most depth_max deep.
 * Call it first; the functions below rely on it. -EBADMSG, with `at` and `rule` set. */
int reader_check(JsonReader *j, unsigned depth_max);

/* Skips white space and returns the next byte without reading it, '\0' at the end of the text. */
char reader_peek(JsonReader *j);

/* Reads the character c, with white space in front of it. -EBADMSG. */
int reader_take(JsonReader *j, char c);

/* Between the elements of an object or a list that `close` ends: reads a comma, or `close` itself. 1: an
 * element follows, 0: closed. *first says that none was read yet; set it to true at the start. -EBADMSG. */
int reader_next(JsonReader *j, char close, bool *first);

/* Reads a string, writes it unescaped and terminated to out, which has room for the string's text with its
 * two quotes. out may be NULL. ret_n: length in bytes, without the terminator. -EBADMSG. */
int reader_string(JsonReader *j, char *out, size_t *ret_n);

/* Reads an integer from 0 to 2^63 - 1; no sign, fraction or exponent. -EBADMSG. */
int reader_integer(JsonReader *j, uint64_t *ret_value);

/* Reads any value and forgets it. Recursive, as deep as reader_check() allowed. -EBADMSG. */
int reader_skip(JsonReader *j);

/* Only white space is left. -EBADMSG. */
int reader_end(JsonReader *j);
