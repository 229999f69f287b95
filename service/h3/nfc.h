/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Unicode normalisation form C in linear time, whatever the text: the composition and the tables are
 * utf8proc's; the order of marks is made here, since utf8proc's takes time by the square of their number. */

#include <stddef.h>
#include <stdint.h>

/* Memory kept from one text to the next. */
typedef struct NfcBuffer {
        int32_t *points;
        size_t points_cap;
        char *text;
        size_t text_cap;
} NfcBuffer;

void nfc_done(NfcBuffer *b);

/* s: n bytes of valid UTF-8, which may hold NUL characters. *ret is s itself or b's memory, good until the
 * next call. -ENOMEM. */
int nfc_of(NfcBuffer *b, const char *s, size_t n, const char **ret, size_t *ret_n);
