/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fuzz input as a list of messages: each is an operation byte, its arguments, and a few changed bytes, so that a small input reaches far
 * behind the checks of size and type. */

#include <stdbool.h>
#include <string.h>

#include "service/shared/wire.h"

typedef struct Input {
        const uint8_t *data;
        size_t n;
} Input;

static inline uint8_t input_u8(Input *x) {
        if (x->n == 0)
                return 0;

        x->n--;
        return *x->data++;
}

/* Up to 7 bytes of the message: place, value. Type, size and version stay as they are: what is wrong there is raw data's part. */
static inline void input_change(Input *x, WireMessage *m) {
        unsigned n = input_u8(x) % 8;

        for (unsigned i = 0; i < n; i++) {
                size_t at = (size_t) input_u8(x) | (size_t) input_u8(x) << 8;
                uint8_t value = input_u8(x);

                at %= m->header.size;
                if (at >= offsetof(WireHeader, epoch))
                        m->bytes[at] = value;
        }
}

/* Any bytes, at most WIRE_MESSAGE_MAX + 1 of them: 0 to 255 from the input, filled up with its last one. */
static inline size_t input_raw(Input *x, uint8_t ret[static WIRE_MESSAGE_MAX + 1]) {
        size_t length = (size_t) (input_u8(x) | input_u8(x) << 8) % (WIRE_MESSAGE_MAX + 2), given = input_u8(x);
        uint8_t last = 0;

        for (size_t i = 0; i < length; i++) {
                if (i < given)
                        last = input_u8(x);
                ret[i] = last;
        }

        return length;
}
