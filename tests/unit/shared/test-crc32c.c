/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/crc32c.h"

#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

typedef uint32_t Function(uint32_t crc, const void *data, size_t n);

static Function *const functions[] = {crc32c, crc32c_tables};

/* The definition, bit by bit. */
static uint32_t by_bits(uint32_t crc, const unsigned char *p, size_t n) {
        crc = ~crc;
        for (size_t i = 0; i < n; i++) {
                crc ^= p[i];
                for (int k = 0; k < 8; k++)
                        crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
        }

        return ~crc;
}

static unsigned char *noise_new(size_t n) {
        unsigned char *p = malloc(n);
        uint64_t x = 88172645463325252u;

        assert_non_null(p);
        for (size_t i = 0; i < n; i++) {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                p[i] = (unsigned char) x;
        }

        return p;
}

/* RFC 3720, B.4 */
static void crc32c_published_vectors_match(void **state) {
        unsigned char zeros[32] = {}, ones[32], up[32], down[32];

        memset(ones, 0xff, sizeof(ones));
        for (unsigned char i = 0; i < 32; i++) {
                up[i] = i;
                down[i] = 31 - i;
        }

        for (size_t k = 0; k < ELEMENTSOF(functions); k++) {
                assert_int_equal(functions[k](0, "123456789", 9), 0xE3069283u);
                assert_int_equal(functions[k](0, zeros, 32), 0x8A9136AAu);
                assert_int_equal(functions[k](0, ones, 32), 0x62A8AB43u);
                assert_int_equal(functions[k](0, up, 32), 0x46DD794Eu);
                assert_int_equal(functions[k](0, down, 32), 0x113FDB5Cu);
                assert_int_equal(functions[k](0, NULL, 0), 0);
        }
}

static void crc32c_any_length_and_place_equals_definition(void **state) {
        static const size_t lengths[] = {
                1, 7, 8, 9, 63, 4095, 4096, 12287, 12288, 12289, 24576, 24583, 49999, 65536};
        CLEANUP_FREE unsigned char *p = noise_new(65536 + 8);

        for (size_t i = 0; i < ELEMENTSOF(lengths); i++)
                for (size_t shift = 0; shift < 8; shift += 3) {
                        uint32_t expected = by_bits(0x12345678, p + shift, lengths[i]);

                        for (size_t k = 0; k < ELEMENTSOF(functions); k++)
                                assert_int_equal(functions[k](0x12345678, p + shift, lengths[i]), expected);
                }
}

static void crc32c_pieces_equal_whole(void **state) {
        CLEANUP_FREE unsigned char *p = noise_new(40000);
        uint32_t whole = crc32c(0, p, 40000);

        for (size_t cut = 0; cut <= 40000; cut += 1777)
                for (size_t k = 0; k < ELEMENTSOF(functions); k++)
                        assert_int_equal(functions[k](functions[k](0, p, cut), p + cut, 40000 - cut), whole);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(crc32c_published_vectors_match),
                cmocka_unit_test(crc32c_any_length_and_place_equals_definition),
                cmocka_unit_test(crc32c_pieces_equal_whole),
        };

        return cmocka_run_group_tests_name("crc32c", tests, NULL, NULL);
}
