/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/json-reader.h"

#include <errno.h>
#include <string.h>

#include "service/shared/utf8.h"

static int fail(JsonReader *j, const char *rule) {
        j->rule = rule;
        return -EBADMSG;
}

int reader_check(JsonReader *j, unsigned depth_max) {
        bool in_string = false;
        unsigned depth = 0;

        for (size_t i = 0; i < j->n;) {
                unsigned char c = (unsigned char) j->text[i];
                uint32_t code_point;
                size_t len = 1;

                if (c >= 0x80)
                        len = utf8_decode(j->text + i, j->n - i, &code_point);
                else if (in_string) {
                        if (c == '\\' && i + 1 < j->n && (unsigned char) j->text[i + 1] < 0x80)
                                len = 2; /* an escaped quote ends nothing */
                        else if (c == '"')
                                in_string = false;
                } else if (c == '"')
                        in_string = true;
                else if ((c == ']' || c == '}') && depth > 0)
                        depth--;
                else if ((c == '[' || c == '{') && ++depth > depth_max) {
                        j->at = i;
                        return fail(j, "objects and lists are nested too deeply");
                }

                if (len == 0) {
                        j->at = i;
                        return fail(j, "the text is not UTF-8");
                }
                i += len;
        }

        return 0;
}

char reader_peek(JsonReader *j) {
        while (j->at < j->n) {
                char c = j->text[j->at];

                if (c != ' ' && c != '\n' && c != '\t' && c != '\r')
                        return c;
                j->at++;
        }

        return '\0';
}

int reader_take(JsonReader *j, char c) {
        /* The end of the text looks like a NUL byte, which nobody takes. */
        if (reader_peek(j) == c) {
                j->at++;
                return 0;
        }

        if (j->at >= j->n)
                return fail(j, "the text ends too early");

        switch (c) {
        case '{':
                return fail(j, "'{' expected");
        case '[':
                return fail(j, "'[' expected");
        case ':':
                return fail(j, "':' expected");
        case '"':
                return fail(j, "a string expected");
        default:
                return fail(j, "a comma or the end of the object or list expected");
        }
}

int reader_next(JsonReader *j, char close, bool *first) {
        int r;

        if (reader_peek(j) == close) {
                j->at++;
                return 0;
        }

        if (*first) {
                *first = false;
                return 1;
        }

        r = reader_take(j, ',');
        if (r < 0)
                return r;

        if (reader_peek(j) == close)
                return fail(j, "a comma in front of the end of an object or list");

        return 1;
}

/* The four digits behind \u. */
static int read_hex(JsonReader *j, uint32_t *ret_unit) {
        uint32_t v = 0;

        if (j->n - j->at < 4)
                return fail(j, "the text ends too early");

        for (int i = 0; i < 4; i++) {
                char c = j->text[j->at];

                if (c >= '0' && c <= '9')
                        v = v << 4 | (uint32_t) (c - '0');
                else if (c >= 'a' && c <= 'f')
                        v = v << 4 | (uint32_t) (c - 'a' + 10);
                else if (c >= 'A' && c <= 'F')
                        v = v << 4 | (uint32_t) (c - 'A' + 10);
                else
                        return fail(j, "\\u without four hexadecimal digits");
                j->at++;
        }

        *ret_unit = v;
        return 0;
}

/* Behind "\u": one UTF-16 unit, or two that form a pair. */
static int read_unicode_escape(JsonReader *j, uint32_t *ret_code_point) {
        uint32_t c, low;
        int r;

        r = read_hex(j, &c);
        if (r < 0)
                return r;

        if (c >= 0xd800 && c <= 0xdbff) {
                if (j->n - j->at < 2 || j->text[j->at] != '\\' || j->text[j->at + 1] != 'u')
                        return fail(j, "half of a surrogate pair");
                j->at += 2;

                r = read_hex(j, &low);
                if (r < 0)
                        return r;
                if (low < 0xdc00 || low > 0xdfff)
                        return fail(j, "half of a surrogate pair");

                c = 0x10000 + ((c - 0xd800) << 10 | (low - 0xdc00));
        } else if (c >= 0xdc00 && c <= 0xdfff)
                return fail(j, "half of a surrogate pair");

        if (c == 0)
                return fail(j, "a NUL character in a string");

        *ret_code_point = c;
        return 0;
}

/* Behind a backslash. Never writes more bytes than the escape has. */
static int read_escape(JsonReader *j, char out[static 4], size_t *ret_n) {
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *p;
        uint32_t c;
        int r;

        if (j->at >= j->n)
                return fail(j, "the text ends too early");

        if (j->text[j->at] == 'u') {
                j->at++;
                r = read_unicode_escape(j, &c);
                if (r < 0)
                        return r;
                *ret_n = utf8_encode(c, out);
                return 0;
        }

        p = j->text[j->at] != '\0' ? strchr(from, j->text[j->at]) : NULL;
        if (!p)
                return fail(j, "an unknown escape in a string");

        out[0] = to[p - from];
        *ret_n = 1;
        j->at++;
        return 0;
}

int reader_string(JsonReader *j, char *out, size_t *ret_n) {
        size_t n = 0;
        int r;

        r = reader_take(j, '"');
        if (r < 0)
                return r;

        while (j->at < j->n) {
                char c = j->text[j->at], escape[4];
                size_t k = 1;

                if ((unsigned char) c < 0x20)
                        return fail(j, "a control character in a string");
                j->at++;

                if (c == '"') {
                        if (out)
                                out[n] = '\0';
                        *ret_n = n;
                        return 0;
                }

                escape[0] = c;
                if (c == '\\') {
                        r = read_escape(j, escape, &k);
                        if (r < 0)
                                return r;
                }

                if (out)
                        memcpy(out + n, escape, k);
                n += k;
        }

        return fail(j, "the text ends too early");
}

static bool is_digit(char c) {
        return c >= '0' && c <= '9';
}

int reader_integer(JsonReader *j, uint64_t *ret_value) {
        static const char rule[] =
                "an integer from 0 to 9223372036854775807 expected, without sign, point or exponent";
        uint64_t v = 0;
        size_t start, i;

        if (!is_digit(reader_peek(j)))
                return fail(j, j->at >= j->n ? "the text ends too early" : rule);

        start = j->at;
        for (i = start; i < j->n && is_digit(j->text[i]); i++)
                if (__builtin_mul_overflow(v, 10, &v) ||
                        __builtin_add_overflow(v, (uint64_t) (j->text[i] - '0'), &v) || v > INT64_MAX)
                        return fail(j, rule);

        if (i < j->n && (j->text[i] == '.' || j->text[i] == 'e' || j->text[i] == 'E'))
                return fail(j, rule);
        if (j->text[start] == '0' && i > start + 1)
                return fail(j, "a number that begins with 0");

        j->at = i;
        *ret_value = v;
        return 0;
}

/* -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? */
static int skip_number(JsonReader *j) {
        const char *t = j->text;
        size_t i = j->at, start;

        if (i < j->n && t[i] == '-')
                i++;

        for (start = i; i < j->n && is_digit(t[i]);)
                i++;
        if (i == start || (t[start] == '0' && i > start + 1))
                return fail(j, "not a JSON value");

        if (i < j->n && t[i] == '.') {
                for (start = ++i; i < j->n && is_digit(t[i]);)
                        i++;
                if (i == start)
                        return fail(j, "a number without digits behind its point");
        }

        if (i < j->n && (t[i] == 'e' || t[i] == 'E')) {
                i++;
                if (i < j->n && (t[i] == '+' || t[i] == '-'))
                        i++;
                for (start = i; i < j->n && is_digit(t[i]);)
                        i++;
                if (i == start)
                        return fail(j, "a number without digits in its exponent");
        }

        j->at = i;
        return 0;
}

static int skip_container(JsonReader *j, bool object) {
        bool first = true;
        int r;
        size_t n;

        j->at++;
        for (;;) {
                r = reader_next(j, object ? '}' : ']', &first);
                if (r <= 0)
                        return r;

                if (object) {
                        r = reader_string(j, NULL, &n);
                        if (r < 0)
                                return r;
                        r = reader_take(j, ':');
                        if (r < 0)
                                return r;
                }

                r = reader_skip(j);
                if (r < 0)
                        return r;
        }
}

int reader_skip(JsonReader *j) {
        static const char *const words[] = {"true", "false", "null"};
        char c = reader_peek(j);
        size_t n;

        if (j->at >= j->n)
                return fail(j, "the text ends too early");

        if (c == '{' || c == '[')
                return skip_container(j, c == '{');
        if (c == '"')
                return reader_string(j, NULL, &n);

        for (size_t i = 0; i < 3; i++) {
                n = strlen(words[i]);
                if (j->n - j->at >= n && memcmp(j->text + j->at, words[i], n) == 0) {
                        j->at += n;
                        return 0;
                }
        }

        return skip_number(j);
}

int reader_end(JsonReader *j) {
        (void) reader_peek(j);
        return j->at < j->n ? fail(j, "text behind the end of the object") : 0;
}
