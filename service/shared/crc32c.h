/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* CRC-32C: Castagnoli, reflected 0x82F63B78, start and final xor 0xFFFFFFFF. Of "123456789" it is
 * 0xE3069283. */

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 at the start) over n bytes. SSE4.2 where present, else tables. Thread-safe. */
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

/* The same from tables alone, for machines without the instruction. */
uint32_t crc32c_tables(uint32_t crc, const void *data, size_t n);
