/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/fault.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/utf8.h"

/* What may reach a terminal or a log as it is: no controls, and none of the characters that reorder or break
 * a line (a hostile tensor name could otherwise make a message read differently from what it says). */
static bool is_printable(uint32_t c) {
        if (c < 0x20 || (c >= 0x7f && c <= 0x9f))
                return false;

        return !(c == 0x200e || c == 0x200f || (c >= 0x2028 && c <= 0x202e) ||
                 (c >= 0x2066 && c <= 0x2069) || c == 0xfeff || (c & 0xfffe) == 0xfffe);
}

/* Replaces in place what is not printable UTF-8: a '?' for each bad byte, one for a whole character. */
static void sanitise(char *s) {
        size_t n = strlen(s), to = 0;

        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t len = utf8_decode(s + i, n - i, &c);

                if (len > 0 && is_printable(c)) {
                        memmove(s + to, s + i, len);
                        to += len;
                } else
                        s[to++] = '?';

                i += len > 0 ? len : 1;
        }

        s[to] = '\0';
}

/* Drops a character that the end of the buffer cut through: at most three bytes. */
static void drop_cut_character(char *s, size_t n) {
        for (size_t back = 1; back <= 3 && back <= n; back++) {
                unsigned char c = (unsigned char) s[n - back];
                size_t want = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;

                if ((c & 0xc0) == 0x80)
                        continue;
                if (want > back)
                        s[n - back] = '\0';
                return;
        }
}

int fault_set(Fault *f, int error, const char *name, const char *format, ...) {
        va_list ap;
        int n;

        if (!f || f->name[0] != '\0')
                return error;

        va_start(ap, format);
        n = vsnprintf(f->text, sizeof(f->text), format, ap);
        va_end(ap);

        if (n < 0)
                (void) snprintf(f->text, sizeof(f->text), "(the text of this error cannot be formatted)");
        else if ((size_t) n >= sizeof(f->text))
                drop_cut_character(f->text, sizeof(f->text) - 1);

        sanitise(f->text);
        (void) snprintf(f->name, sizeof(f->name), "%s", name);
        return error;
}
