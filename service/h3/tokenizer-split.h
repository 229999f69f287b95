/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Text into words, by the pattern of the Qwen2 family. */

#define PCRE2_CODE_UNIT_WIDTH 8

#include <stddef.h>

#include <pcre2.h>

/* What compiles is used by any number of threads. -ENOTRECOVERABLE: PCRE2 refuses the pattern (its own error
 * number and place are given), which no input can cause. */
int split_compile(pcre2_code **ret, int *ret_error, size_t *ret_offset);

typedef struct Splitter {
        const pcre2_code *words;
        pcre2_match_data *match;
        pcre2_match_context *limits;
} Splitter;

int split_init(Splitter *s, const pcre2_code *words); /* -ENOMEM */
void split_done(Splitter *s);

/* The length of the word at text[at], at < n, text valid UTF-8. -ENOMEM, -ENOTRECOVERABLE: PCRE2 finds none,
 * which no text can cause. */
int split_next(Splitter *s, const char *text, size_t n, size_t at, size_t *ret);

/* The same of words that ASCII alone decides, much faster than PCRE2. 0: it takes the pattern to say. */
size_t split_plain(const char *s, size_t n);
