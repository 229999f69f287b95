/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/tokenizer-split.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

/* tokenizer_word_pattern as PCRE2 has to be told: its own \s also takes U+180E, which is no white space. */
#define SPACE "\\x09-\\x0d\\x{85}\\p{Z}"
static const char pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" SPACE
                              "\\p{L}\\p{N}]+[\\r\\n]*"
                              "|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+";

int split_compile(pcre2_code **ret, int *ret_error, size_t *ret_offset) {
        /* No JIT: the worker may not make code (seccomp), and it would be another way through. */
        *ret = pcre2_compile((PCRE2_SPTR) pattern, PCRE2_ZERO_TERMINATED,
                PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, ret_error, ret_offset, NULL);
        return *ret ? 0 : -ENOTRECOVERABLE;
}

int split_init(Splitter *s, const pcre2_code *words) {
        s->words = words;
        s->match = pcre2_match_data_create(1, NULL);
        s->limits = pcre2_match_context_create(NULL);
        if (!s->match || !s->limits)
                return -ENOMEM;
        /* Bounded by the length of the text, whatever stands in it: the pattern goes back over single runs
         * of white space only. */
        (void) pcre2_set_match_limit(s->limits, UINT32_MAX);
        return 0;
}

void split_done(Splitter *s) {
        pcre2_match_data_free(s->match);
        pcre2_match_context_free(s->limits);
        *s = (Splitter){};
}

static bool is_letter(char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c) {
        return c >= '0' && c <= '9';
}

static bool is_break(char c) {
        return c == '\n' || c == '\r';
}

static bool is_space(char c) {
        return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool is_foreign(char c) {
        return (uint8_t) c >= 0x80;
}

static bool is_other(char c) {
        return !is_foreign(c) && !is_letter(c) && !is_digit(c) && !is_space(c);
}

/* White space: up to the last line break, else all but the last one if a word follows. */
static size_t plain_space(const char *s, size_t n) {
        size_t i = 0, behind_break = 0;

        for (; i < n && is_space(s[i]); i++)
                if (is_break(s[i]))
                        behind_break = i + 1;
        if (i < n && is_foreign(s[i]))
                return 0;
        if (behind_break > 0)
                return behind_break;
        return i == n || i == 1 ? i : i - 1;
}

static size_t plain_other(const char *s, size_t n) {
        size_t i = s[0] == ' ';

        while (i < n && is_other(s[i]))
                i++;
        if (i < n && is_foreign(s[i]))
                return 0;
        while (i < n && is_break(s[i]))
                i++;
        return i;
}

size_t split_plain(const char *s, size_t n) {
        size_t lead = !is_letter(s[0]), i = lead;

        if (is_foreign(s[0]) || s[0] == '\'') /* perhaps a contraction */
                return 0;
        if (is_digit(s[0]))
                return 1;
        if (lead && n > 1 && is_foreign(s[1]))
                return 0;
        if (lead && (n == 1 || is_break(s[0]) || !is_letter(s[1])))
                return is_other(s[0]) || (s[0] == ' ' && n > 1 && is_other(s[1])) ? plain_other(s, n)
                                                                                  : plain_space(s, n);
        while (i < n && is_letter(s[i]))
                i++;
        return i == n || !is_foreign(s[i]) ? i : 0;
}

int split_next(Splitter *s, const char *text, size_t n, size_t at, size_t *ret) {
        size_t len = split_plain(text + at, n - at);
        int r;

        if (len == 0) {
                r = pcre2_match(s->words, (PCRE2_SPTR) text, n, at, PCRE2_NO_UTF_CHECK, s->match, s->limits);
                if (r == PCRE2_ERROR_NOMEMORY || r == PCRE2_ERROR_HEAPLIMIT)
                        return -ENOMEM;
                if (r <= 0)
                        return -ENOTRECOVERABLE;
                len = pcre2_get_ovector_pointer(s->match)[1] - at;
        }
        if (len == 0)
                return -ENOTRECOVERABLE;
        *ret = len;
        return 0;
}
