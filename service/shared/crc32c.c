/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/crc32c.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#define POLYNOMIAL UINT32_C(0x82F63B78)

/* Bytes per lane. The instruction answers after three cycles but starts one every cycle: three lanes fill
 * the gap. The results are joined by moving a lane's CRC over the bytes behind it, which costs 4 table
 * look-ups per join. */
#define LANE 4096

/* byte_table[k][b]: the register after byte b and k zero bytes. */
static uint32_t byte_table[8][256];

/* lane_table[k][b]: what byte k of the register, with value b, has become after LANE zero bytes. */
static uint32_t lane_table[4][256];

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void) {
        for (uint32_t b = 0; b < 256; b++) {
                uint32_t c = b;

                for (int i = 0; i < 8; i++)
                        c = c & 1 ? c >> 1 ^ POLYNOMIAL : c >> 1;
                byte_table[0][b] = c;
        }

        for (size_t k = 1; k < 8; k++)
                for (size_t b = 0; b < 256; b++) {
                        uint32_t c = byte_table[k - 1][b];

                        byte_table[k][b] = c >> 8 ^ byte_table[0][c & 0xff];
                }

        /* Zero bytes act on the register linearly: the 32 single bits say all. */
        for (size_t k = 0; k < 4; k++)
                for (uint32_t bit = 1; bit < 256; bit <<= 1) {
                        uint32_t c = bit << (8 * k);

                        for (int i = 0; i < LANE; i++)
                                c = c >> 8 ^ byte_table[0][c & 0xff];
                        for (uint32_t below = 0; below < bit; below++)
                                lane_table[k][bit + below] = c ^ lane_table[k][below];
                }
}

static uint64_t load_u64(const unsigned char *p) {
        uint64_t v;

        memcpy(&v, p, sizeof(v));
        return v;
}

uint32_t crc32c_tables(uint32_t crc, const void *data, size_t n) {
        const unsigned char *p = data;
        uint32_t c = ~crc;

        (void) pthread_once(&tables_once, make_tables);

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        for (; n >= 8; p += 8, n -= 8) {
                uint64_t v = load_u64(p) ^ c;

                c = 0;
                for (size_t k = 0; k < 8; k++)
                        c ^= byte_table[7 - k][v >> (8 * k) & 0xff];
        }
#endif
        for (; n > 0; p++, n--)
                c = c >> 8 ^ byte_table[0][(c ^ *p) & 0xff];

        return ~c;
}

#if defined(__x86_64__)
static uint64_t over_lane(uint64_t c) {
        return lane_table[0][c & 0xff] ^ lane_table[1][c >> 8 & 0xff] ^ lane_table[2][c >> 16 & 0xff] ^
               lane_table[3][c >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const void *data, size_t n) {
        const unsigned char *p = data;
        uint64_t c = ~crc;

        for (; n >= 3 * LANE; p += 3 * LANE, n -= 3 * LANE) {
                uint64_t c1 = 0, c2 = 0;

                for (size_t i = 0; i < LANE; i += 8) {
                        c = _mm_crc32_u64(c, load_u64(p + i));
                        c1 = _mm_crc32_u64(c1, load_u64(p + i + LANE));
                        c2 = _mm_crc32_u64(c2, load_u64(p + i + 2 * LANE));
                }
                c = over_lane(over_lane(c) ^ c1) ^ c2;
        }

        for (; n >= 8; p += 8, n -= 8)
                c = _mm_crc32_u64(c, load_u64(p));
        for (; n > 0; p++, n--)
                c = _mm_crc32_u8((uint32_t) c, *p);

        return ~(uint32_t) c;
}
#endif

uint32_t crc32c(uint32_t crc, const void *data, size_t n) {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("sse4.2")) {
                (void) pthread_once(&tables_once, make_tables);
                return crc32c_sse42(crc, data, n);
        }
#endif
        return crc32c_tables(crc, data, n);
}
