/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* What libFuzzer calls. Always 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* An invariant that no input may break; on also without NDEBUG. */
#define CHECK(condition)                                                                                    \
        do {                                                                                                \
                if (!(condition)) {                                                                         \
                        (void) fprintf(stderr, "%s:%d: violated: %s\n", __FILE__, __LINE__, #condition);    \
                        abort();                                                                            \
                }                                                                                           \
        } while (0)
