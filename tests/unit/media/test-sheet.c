/* SPDX-License-Identifier: Apache-2.0 */
/* Contact sheets, through the real program. */
#include "service/media/sheet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

#define RING 4

/* Each pixel says which frame it is of. */
static void fill(uint8_t *frame, uint32_t width, uint32_t height, uint64_t i) {
        for (size_t k = 0; k < (size_t) width * height; k++) {
                frame[k * 3] = (uint8_t) i;
                frame[k * 3 + 1] = (uint8_t) (k % width);
                frame[k * 3 + 2] = (uint8_t) (k / width);
        }
}

static MediaMessage request(
        uint32_t width, uint32_t height, uint64_t frames, uint32_t columns, uint32_t rows) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = MEDIA_PNG;
        m.write.width = width;
        m.write.height = height;
        m.write.frames = frames;
        m.write.ring_frames = RING;
        m.write.sheet_columns = columns;
        m.write.sheet_rows = rows;
        return m;
}

/* Through a ring of a few frames, each put there when its place was taken. Returns the picture's file. */
static int sheet(uint32_t width, uint32_t height, uint64_t frames, uint32_t columns, uint32_t rows) {
        MediaMessage m = request(width, height, frames, columns, rows);
        size_t bytes = (size_t) width * height * 3;
        CLEANUP_PEER Peer *p = peer_open();
        CLEANUP_CLOSE int arena = -EBADF;
        int file = file_new(NULL, 0);
        void *map;

        arena = arena_new(bytes * RING, &map);
        peer_send(p, &m, file, arena);
        for (uint64_t i = 0; i < frames; i++) {
                while (p->taken + RING <= i)
                        peer_take_in(p);
                fill((uint8_t *) map + i % RING * bytes, width, height, i);
                peer_say_frames(p, i + 1, false);
        }
        assert_true(peer_receive(p, &m));
        if (m.header.type == MEDIA_ERROR)
                fail_msg("%s: %s", m.error.fault.name, m.error.fault.text);
        assert_int_equal(m.header.type, MEDIA_DONE);
        assert_int_equal(m.done.bytes, file_size(file));
        return file;
}

static void sheet_has_frames_evenly_from_first_to_last(void **state) {
        static const uint8_t want[] = {0, 3, 7, 10, 14, 18, 21, 25, 29, 32, 36, 40};
        CLEANUP_CLOSE int file = sheet(32, 16, 41, 4, 3);
        const uint32_t width = 4 * 36 - 4, height = 3 * 20 - 4;
        CLEANUP_FREE uint8_t *p = NULL;
        MediaDone d = probe_file(file);

        assert_int_equal(d.width, width);
        assert_int_equal(d.height, height);
        p = read_picture(file, MEDIA_FIT_STRETCH, width, height);
        for (uint32_t y = 0; y < height; y++)
                for (uint32_t x = 0; x < width; x++) {
                        const uint8_t *c = p + ((size_t) y * width + x) * 3;
                        uint32_t column = x / 36, row = y / 20;

                        if (x % 36 >= 32 || y % 20 >= 16) {
                                assert_int_equal(c[0] | c[1] | c[2], 32);
                                continue;
                        }
                        assert_int_equal(c[0], want[row * 4 + column]);
                        assert_int_equal(c[1], x % 36);
                        assert_int_equal(c[2], y % 20);
                }
}

static void sheet_of_few_frames_has_few_cells(void **state) {
        static const struct {
                uint64_t frames;
                uint32_t width, height;
        } cases[] = {{1, 32, 16}, {2, 68, 16}, {5, 140, 36}, {12, 140, 56}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_CLOSE int file = sheet(32, 16, cases[i].frames, 4, 3);
                MediaDone d = probe_file(file);

                assert_int_equal(d.width, cases[i].width);
                assert_int_equal(d.height, cases[i].height);
        }
}

static void sheet_of_large_frames_is_made_smaller(void **state) {
        CLEANUP_CLOSE int file = sheet(1344, 768, 5, 4, 1);
        MediaDone d = probe_file(file);

        assert_int_equal(d.width, 4 * 404 - 4);
        assert_int_equal(d.height, 229); /* 768 * 400 / 1344 */
}

static void sheet_that_makes_no_sense_is_refused(void **state) {
        static const struct {
                uint32_t format, columns, rows;
                uint64_t samples;
        } cases[] = {{MEDIA_PNG, 65, 1, 0}, {MEDIA_PNG, 9, 8, 0}, {MEDIA_PNG, 1u << 16, 1u << 16, 0},
                {MEDIA_PNG, 4, 0, 0}, {MEDIA_PNG, 0, 3, 0}, {MEDIA_MP4, 4, 3, 0}, {MEDIA_PNG, 4, 3, 10}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                MediaMessage m = request(32, 16, 5, cases[i].columns, cases[i].rows);
                CLEANUP_PEER Peer *p = peer_open();
                CLEANUP_CLOSE int arena = -EBADF, file = file_new(NULL, 0);
                void *map;

                m.write.format = cases[i].format;
                m.write.samples = cases[i].samples;
                arena = arena_new(1 << 20, &map);
                peer_send(p, &m, file, arena);
                assert_true(peer_receive(p, &m));
                assert_int_equal(m.header.type, MEDIA_ERROR);
                expect_fault(&m.error.fault, FAULT_INVALID_ARGUMENT, "");
                assert_int_equal(file_size(file), 0);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(sheet_has_frames_evenly_from_first_to_last),
                cmocka_unit_test(sheet_of_few_frames_has_few_cells),
                cmocka_unit_test(sheet_of_large_frames_is_made_smaller),
                cmocka_unit_test(sheet_that_makes_no_sense_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
