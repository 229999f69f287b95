/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/nfc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "service/shared/utf8.h"

/* The first mark is U+0300; what lies below is in form C whatever is beside it. */
#define FIRST_MARK 0x300
#define FIRST_MARK_LEAD 0xcc
/* Numbers of one character's canonical decomposition are at most 4. */
#define DECOMPOSED_MAX 4
/* One before the first final consonant of Hangul. */
#define NO_FINAL 0x11a7
#define FORM_C (UTF8PROC_STABLE | UTF8PROC_COMPOSE)

void nfc_done(NfcBuffer *b) {
        free(b->points);
        free(b->text);
        *b = (NfcBuffer){};
}

static int reserve(void *p, size_t *cap, size_t n, size_t size) {
        void **array = p, *larger;

        if (n <= *cap)
                return 0;
        larger = realloc(*array, n * size);
        if (!larger)
                return -ENOMEM;
        *array = larger;
        *cap = n;
        return 0;
}

static unsigned class_of(int32_t point) {
        return point < FIRST_MARK ? 0 : (unsigned) utf8proc_get_property(point)->combining_class;
}

/* Marks by class, those of one class in their order. scratch: n more numbers. */
static void order_marks(int32_t *marks, size_t n, int32_t *scratch) {
        size_t at[257] = {};

        for (size_t i = 0; i < n; i++)
                at[(class_of(marks[i]) & 0xff) + 1]++;
        for (size_t c = 0; c < 256; c++)
                at[c + 1] += at[c];
        for (size_t i = 0; i < n; i++)
                scratch[at[class_of(marks[i]) & 0xff]++] = marks[i];
        memcpy(marks, scratch, n * sizeof(*marks));
}

/* scratch: as many numbers again. */
static void order(int32_t *points, size_t n, int32_t *scratch) {
        for (size_t i = 0; i < n;) {
                size_t begin = i;

                while (i < n && class_of(points[i]) > 0)
                        i++;
                if (i - begin > 1)
                        order_marks(points + begin, i - begin, scratch);
                i += i == begin;
        }
}

static size_t decompose(const char *s, size_t n, int32_t *points) {
        size_t count = 0;
        int boundary = 0;

        for (size_t i = 0; i < n;) {
                uint32_t c = 0;

                i += utf8_decode(s + i, n - i, &c);
                count += (size_t) utf8proc_decompose_char(
                        (int32_t) c, points + count, DECOMPOSED_MAX, FORM_C, &boundary);
        }
        return count;
}

/* In place; returns the new number. utf8proc (2.8) takes U+11A7 for a final consonant and drops it behind a
 * syllable, but it is none and composes with nothing. */
static size_t compose(int32_t *points, size_t n) {
        size_t out = 0;

        for (size_t begin = 0; begin < n;) {
                size_t end = begin, len;

                while (end < n && points[end] != NO_FINAL)
                        end++;
                len = (size_t) utf8proc_normalize_utf32(
                        points + begin, (utf8proc_ssize_t) (end - begin), FORM_C);
                memmove(points + out, points + begin, len * sizeof(*points));
                out += len;
                if (end < n)
                        points[out++] = NO_FINAL;
                begin = end + 1;
        }
        return out;
}

int nfc_of(NfcBuffer *b, const char *s, size_t n, const char **ret, size_t *ret_n) {
        size_t characters = 0, decomposed, composed, out = 0;
        bool quiet = true;

        for (size_t i = 0; i < n; i++) {
                quiet = quiet && (uint8_t) s[i] < FIRST_MARK_LEAD;
                characters += ((uint8_t) s[i] & 0xc0) != 0x80;
        }
        if (quiet) {
                *ret = s;
                *ret_n = n;
                return 0;
        }

        /* The upper half is for order(). */
        if (reserve(&b->points, &b->points_cap, 2 * DECOMPOSED_MAX * characters, sizeof(*b->points)) < 0)
                return -ENOMEM;
        decomposed = decompose(s, n, b->points);
        order(b->points, decomposed, b->points + decomposed);
        composed = compose(b->points, decomposed);
        if (reserve(&b->text, &b->text_cap, 4 * composed, 1) < 0)
                return -ENOMEM;
        for (size_t i = 0; i < composed; i++)
                out += utf8_encode((uint32_t) b->points[i], b->text + out);
        *ret = b->text;
        *ret_n = out;
        return 0;
}
