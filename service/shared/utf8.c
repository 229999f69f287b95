/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t utf8_decode(const char *s, size_t n, uint32_t *ret_code_point) {
        static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
        const unsigned char *p = (const unsigned char *) s;
        uint32_t c;
        size_t len;

        if (n == 0)
                return 0;

        c = p[0];
        if (c < 0x80) {
                *ret_code_point = c;
                return 1;
        }

        if ((c & 0xe0) == 0xc0) {
                len = 2;
                c &= 0x1f;
        } else if ((c & 0xf0) == 0xe0) {
                len = 3;
                c &= 0x0f;
        } else if ((c & 0xf8) == 0xf0) {
                len = 4;
                c &= 0x07;
        } else
                return 0;

        if (n < len)
                return 0;

        for (size_t i = 1; i < len; i++) {
                if ((p[i] & 0xc0) != 0x80)
                        return 0;
                c = c << 6 | (p[i] & 0x3f);
        }

        if (c < smallest[len] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
                return 0;

        *ret_code_point = c;
        return len;
}

size_t utf8_encode(uint32_t code_point, char buf[static 4]) {
        if (code_point < 0x80) {
                buf[0] = (char) code_point;
                return 1;
        }

        if (code_point < 0x800) {
                buf[0] = (char) (0xc0 | code_point >> 6);
                buf[1] = (char) (0x80 | (code_point & 0x3f));
                return 2;
        }

        if (code_point < 0x10000) {
                buf[0] = (char) (0xe0 | code_point >> 12);
                buf[1] = (char) (0x80 | (code_point >> 6 & 0x3f));
                buf[2] = (char) (0x80 | (code_point & 0x3f));
                return 3;
        }

        buf[0] = (char) (0xf0 | code_point >> 18);
        buf[1] = (char) (0x80 | (code_point >> 12 & 0x3f));
        buf[2] = (char) (0x80 | (code_point >> 6 & 0x3f));
        buf[3] = (char) (0x80 | (code_point & 0x3f));
        return 4;
}

bool utf8_is_valid(const char *s, size_t n) {
        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t len = utf8_decode(s + i, n - i, &c);

                if (len == 0)
                        return false;
                i += len;
        }

        return true;
}

char *utf8_escape(const char *s) {
        size_t n = strlen(s), to = 0;
        char *copy;

        if (n > SIZE_MAX / 4 - 1)
                return NULL;
        copy = malloc(4 * n + 1);
        if (!copy)
                return NULL;

        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t len = utf8_decode(s + i, n - i, &c);

                if (len > 0) {
                        memcpy(copy + to, s + i, len);
                        to += len;
                        i += len;
                } else
                        to += (size_t) sprintf(copy + to, "\\x%02x", (uint8_t) s[i++]);
        }

        copy[to] = '\0';
        return copy;
}
