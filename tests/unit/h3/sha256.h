/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* SHA-256 (FIPS 180-4) for comparing with recorded sums; hexadecimal, lower case. */

#include <stddef.h>

void sha256_hex(const void *data, size_t n, char ret[65]);
