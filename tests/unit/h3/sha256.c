/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/sha256.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The standard defines its constants as the first 32 bits of the fractions of roots of primes: computed
 * here, which needs the 80-bit long double of x86 (64 bits of mantissa for up to 9 bits of integer and 32 of
 * fraction). */
static void constants(uint32_t k[64], uint32_t h[8]) {
        for (uint32_t n = 2, count = 0; count < 64; n++) {
                long double root;
                uint32_t d = 2;

                while (d * d <= n && n % d != 0)
                        d++;
                if (d * d <= n)
                        continue;
                root = cbrtl((long double) n);
                k[count] = (uint32_t) ((root - floorl(root)) * 0x1p32L);
                if (count < 8) {
                        root = sqrtl((long double) n);
                        h[count] = (uint32_t) ((root - floorl(root)) * 0x1p32L);
                }
                count++;
        }
}

static uint32_t rotate(uint32_t x, int n) {
        return x >> n | x << (32 - n);
}

static void compress(uint32_t h[8], const uint32_t k[64], const uint8_t *block) {
        uint32_t w[64], v[8];

        for (int i = 0; i < 16; i++)
                w[i] = (uint32_t) block[4 * i] << 24 | (uint32_t) block[4 * i + 1] << 16 |
                       (uint32_t) block[4 * i + 2] << 8 | block[4 * i + 3];
        for (int i = 16; i < 64; i++)
                w[i] = w[i - 16] + w[i - 7] +
                       (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
                       (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);

        memcpy(v, h, sizeof(v));
        for (int i = 0; i < 64; i++) {
                uint32_t a = v[0], e = v[4];
                uint32_t t = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                             ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
                uint32_t u = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                             ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));

                memmove(v + 1, v, 7 * sizeof(*v));
                v[4] += t;
                v[0] = t + u;
        }
        for (int i = 0; i < 8; i++)
                h[i] += v[i];
}

void sha256_hex(const void *data, size_t n, char ret[65]) {
        const uint8_t *bytes = data;
        uint8_t last[128] = {};
        uint32_t k[64], h[8];
        size_t whole = n / 64 * 64, rest = n - whole, tail = rest < 56 ? 64 : 128;

        constants(k, h);
        for (size_t at = 0; at < whole; at += 64)
                compress(h, k, bytes + at);
        memcpy(last, bytes + whole, rest);
        last[rest] = 0x80;
        for (int i = 0; i < 8; i++)
                last[tail - 1 - i] = (uint8_t) ((uint64_t) n * 8 >> 8 * i);
        for (size_t at = 0; at < tail; at += 64)
                compress(h, k, last + at);
        for (int i = 0; i < 8; i++)
                (void) snprintf(ret + 8 * i, 9, "%08x", h[i]);
}
