/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/film.h"

static void write_mp4_read_same_film_in_sync(void **state) {
        check_round_trip(MEDIA_MP4);
}

static void write_mkv_read_same_film_in_sync(void **state) {
        check_round_trip(MEDIA_MKV);
}

static void write_webm_read_same_film_in_sync(void **state) {
        check_round_trip(MEDIA_WEBM);
}

/* Without sound, too, the first frame is at the start. */
static void write_silent_film_read_every_frame(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames();

        for (MediaFormat format = MEDIA_MP4; format <= MEDIA_MKV; format++) {
                CLEANUP_CLOSE int file = write_file(format, WIDTH, HEIGHT, frames, FRAMES, NULL, 0);
                CLEANUP_FREE uint8_t *back = NULL;
                uint64_t n;

                back = read_clip(file, WIDTH, HEIGHT, FRAMES + 20, &n);
                assert_int_equal(n, FRAMES);
                for (uint32_t i = 0; i < FRAMES; i++)
                        assert_true(psnr(frames + i * SIZE, back + i * SIZE, SIZE) > 30.0);
        }
}

/* Plain colours come back as they were: the matrix is the one that the file names. */
static void write_plain_colours_read_the_same(void **state) {
        static const uint8_t colours[][3] = {{200, 40, 30}, {30, 180, 60}, {40, 60, 190}, {128, 128, 128}, {250, 250, 250}, {4, 4, 4}};
        CLEANUP_FREE uint8_t *frames = malloc(SIZE * ELEMENTSOF(colours));

        assert_non_null(frames);
        for (size_t i = 0; i < SIZE * ELEMENTSOF(colours); i++)
                frames[i] = colours[i / SIZE][i % 3];
        for (MediaFormat format = MEDIA_MP4; format <= MEDIA_MKV; format++) {
                CLEANUP_CLOSE int file = write_file(format, WIDTH, HEIGHT, frames, ELEMENTSOF(colours), NULL, 0);
                CLEANUP_FREE uint8_t *back = NULL;
                uint64_t n;

                back = read_clip(file, WIDTH, HEIGHT, ELEMENTSOF(colours) + 20, &n);
                assert_int_equal(n, ELEMENTSOF(colours));
                for (size_t i = 0; i < ELEMENTSOF(colours); i++)
                        for (unsigned c = 0; c < 3; c++) {
                                int got = back[i * SIZE + (HEIGHT / 2 * WIDTH + WIDTH / 2) * 3 + c];

                                if (abs(got - colours[i][c]) > 5)
                                        fail_msg("format %d, colour %zu: %d, was %d", (int) format, i, got, colours[i][c]);
                        }
        }
}

static double value_of(const char *text, const char *key) {
        const char *p = strstr(text, key);

        if (!p)
                fail_msg("no %s in: %s", key, text);
        return atof(p + strlen(key));
}

static void check_ffprobe(MediaFormat format) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        CLEANUP_FREE float *sound = make_sound(SAMPLES);
        CLEANUP_FREE char *video = NULL, *audio = NULL, *length = NULL;
        CLEANUP_CLOSE int file = write_file(format, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);

        video = ffprobe(path_of(file), "-count_frames -select_streams v:0 -show_entries "
                                       "stream=start_time,r_frame_rate,avg_frame_rate,nb_read_frames,pix_fmt,color_"
                                       "space,color_range,width,height");
        if (!video)
                skip();
        audio = ffprobe(path_of(file), "-select_streams a:0 -show_entries stream=channels,sample_rate");
        length = ffprobe(path_of(file), "-show_entries format=duration:format_tags=title");
        assert_non_null(strstr(video, "r_frame_rate=24/1"));
        assert_non_null(strstr(video, "avg_frame_rate=24/1"));
        assert_non_null(strstr(video, "pix_fmt=yuv420p"));
        assert_non_null(strstr(video, "color_space=bt709"));
        assert_non_null(strstr(video, "color_range=tv"));
        assert_int_equal(value_of(video, "nb_read_frames="), FRAMES);
        assert_true(fabs(value_of(video, "start_time=")) < 0.001);
        assert_int_equal(value_of(audio, "channels="), 2);
        assert_true(fabs(value_of(length, "duration=") - FRAMES / 24.0) < 1.0 / 24);
        assert_non_null(strstr(length, "A test"));
        if (format == MEDIA_MP4) {
                free(video);
                free(audio);
                video = ffprobe(
                        path_of(file), "-select_streams v:0 -show_entries stream=duration,start_time");
                audio = ffprobe(
                        path_of(file), "-select_streams a:0 -show_entries stream=duration,start_time");
                assert_true(fabs(value_of(video, "duration=") - FRAMES / 24.0) < 0.001);
                assert_true(fabs(value_of(audio, "duration=") - FRAMES / 24.0) < 1.0 / 24);
                assert_true(fabs(value_of(video, "start_time=")) < 0.001);
                assert_true(fabs(value_of(audio, "start_time=")) < 0.001);
        }
}

static void write_mp4_ffprobe_says_so(void **state) {
        check_ffprobe(MEDIA_MP4);
}

static void write_mkv_ffprobe_says_so(void **state) {
        check_ffprobe(MEDIA_MKV);
}

static void write_webm_ffprobe_says_so(void **state) {
        check_ffprobe(MEDIA_WEBM);
}

static void expect_same_bytes(int a, int b) {
        uint64_t n = file_size(a);
        CLEANUP_FREE uint8_t *x = malloc(n), *y = malloc(n);

        assert_int_equal(file_size(b), n);
        assert_int_equal(pread(a, x, n, 0), n);
        assert_int_equal(pread(b, y, n, 0), n);
        assert_memory_equal(x, y, n);
}

static void write_mp4_twice_same_bytes(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        CLEANUP_FREE float *sound = make_sound(SAMPLES);
        CLEANUP_CLOSE int a = write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES),
                          b = write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);
        uint64_t n = file_size(a);
        CLEANUP_FREE uint8_t *x = malloc(n);

        expect_same_bytes(a, b);
        /* The index is in front. */
        assert_int_equal(pread(a, x, n, 0), n);
        assert_non_null(memmem(x, n, "moov", 4));
        assert_true(memmem(x, n, "moov", 4) < memmem(x, n, "mdat", 4));
}

/* By itself x264 has as many threads as there are processors, and with each number of them other bytes. */
static void write_mp4_on_one_processor_same_bytes(void **state) {
        static const uint32_t width = 320, height = 320, n = 60;
        size_t size = (size_t) width * height * 3;
        CLEANUP_FREE uint8_t *frames = malloc(size * n);
        CLEANUP_CLOSE int a = -EBADF, b = -EBADF;
        cpu_set_t all, one;
        uint32_t seed = 1;

        assert_non_null(frames);
        for (size_t i = 0; i < size * n; i++)
                frames[i] = (uint8_t) (i / 3 % width + i / size * 3 + ((seed = seed * 1664525 + 1013904223) >> 28));
        assert_int_equal(sched_getaffinity(0, sizeof(all), &all), 0);
        if (CPU_COUNT(&all) < 2)
                skip();

        a = write_file(MEDIA_MP4, width, height, frames, n, NULL, 0);
        CPU_ZERO(&one);
        for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
                if (CPU_ISSET(i, &all))
                        CPU_SET(i, &one);
        assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
        b = write_file(MEDIA_MP4, width, height, frames, n, NULL, 0);
        assert_int_equal(sched_setaffinity(0, sizeof(all), &all), 0);
        expect_same_bytes(a, b);
}

/* The sound comes before, with and after the frames; a ring of 3 frames holds the film: same bytes. */
static int write_by_ring(const uint8_t *frames, const float *sound, uint64_t ring, uint64_t sound_after) {
        CLEANUP_PEER Peer *p = peer_open();
        uint64_t at = SIZE * ring, ready = 0;
        CLEANUP_CLOSE int arena = -EBADF;
        int file = file_new(NULL, 0);
        uint8_t *map;
        MediaMessage m;

        arena = arena_new(at + SAMPLES * 8, (void **) &map);
        memcpy(map + at, sound, SAMPLES * 8);
        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = MEDIA_MP4;
        m.write.width = WIDTH;
        m.write.height = HEIGHT;
        m.write.frames = FRAMES;
        m.write.ring_frames = ring;
        m.write.samples = SAMPLES;
        m.write.sound_offset = at;
        (void) snprintf(m.write.title, sizeof(m.write.title), "A test");
        peer_send(p, &m, file, arena);
        while (ready < FRAMES) {
                while (ready - p->taken == ring)
                        peer_take_in(p);
                memcpy(map + ready % ring * SIZE, frames + ready * SIZE, SIZE);
                ready++;
                peer_say_frames(p, ready, ready > sound_after);
        }
        if (ready <= sound_after)
                peer_say_frames(p, ready, true);
        assert_true(peer_receive(p, &m));
        if (m.header.type == MEDIA_ERROR)
                fail_msg("%s", m.error.fault.text);
        assert_int_equal(p->taken, FRAMES);
        return file;
}

static void write_ring_smaller_than_film_same_bytes(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        CLEANUP_FREE float *sound = make_sound(SAMPLES);
        CLEANUP_CLOSE int whole = write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);
        static const uint64_t cases[][2] = {{3, 0}, {1, FRAMES / 2}, {3, FRAMES}};
        uint64_t n = file_size(whole);
        CLEANUP_FREE uint8_t *x = malloc(n), *y = malloc(n);

        assert_int_equal(pread(whole, x, n, 0), n);
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_CLOSE int file = write_by_ring(frames, sound, cases[i][0], cases[i][1]);

                assert_int_equal(file_size(file), n);
                assert_int_equal(pread(file, y, n, 0), n);
                assert_memory_equal(x, y, n);
        }
}

static void write_sound_longer_and_shorter_fits_film(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        static const uint64_t lengths[] = {FRAMES * 32000 / 24 / 2, FRAMES * 32000 / 24 + 5000};

        for (size_t i = 0; i < ELEMENTSOF(lengths); i++) {
                CLEANUP_FREE float *sound = make_sound(lengths[i]), *heard = NULL;
                CLEANUP_CLOSE int file =
                        write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, sound, lengths[i]);
                uint64_t n;

                heard = read_sound(file, 100000, &n);
                assert_true(llabs((long long) n - SAMPLES) <= 32);
        }
}

static void write_silent_film_has_no_sound(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        CLEANUP_CLOSE int file = write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, NULL, 0),
                          arena = -EBADF;
        MediaRead m = {.what = MEDIA_SOUND, .samples_max = 100, .size = 800};
        Fault f = {};
        void *map;

        arena = arena_new(800, &map);
        assert_int_equal(probe_file(file).samples, 0);
        (void) peer_read(&m, file, arena, &f);
        expect_fault(&f, FAULT_INVALID_FILE, "no sound in this file");
}

static void read_clip_frame_rates_by_slots(void **state) {
        static const struct {
                int numerator, denominator, frames;
        } cases[] = {
                {12, 1, 8}, {60, 1, 31}, {30000, 1001, 20}, {25, 1, 25}, {8, 1, 3}, {24, 1, 9}, {1, 1, 2}};

        for (size_t c = 0; c < ELEMENTSOF(cases); c++) {
                CLEANUP_FREE uint8_t *p = NULL;
                CLEANUP_CLOSE int file = -EBADF;
                uint64_t n, slots = 0;
                char path[128];

                /* Frame i is grey of 16 + 7 i. */
                if (!ffmpeg("-f lavfi -i "
                            "\"color=black:s=32x32:r=%d/%d,format=gray,geq=lum=16+7*N,format=rgb24\" "
                            "-frames:v %d -c:v ffv1 -pix_fmt bgr0 a.mkv",
                            cases[c].numerator, cases[c].denominator, cases[c].frames))
                        skip();
                (void) snprintf(path, sizeof(path), "%s/a.mkv", temporary_folder());
                file = file_open(path);
                p = read_clip(file, 32, 32, 100, &n);
                for (int i = 0; i < cases[c].frames; i++) {
                        double rate = (double) cases[c].numerator / cases[c].denominator;
                        uint64_t end = (uint64_t) floor((i + 1) * 24 / rate + 0.5);

                        for (; slots < end && slots < n; slots++)
                                if (p[slots * 32 * 32 * 3] != 16 + 7 * i)
                                        fail_msg("case %zu slot %llu: %d, expected frame %d", c,
                                                (unsigned long long) slots, p[slots * 32 * 32 * 3], i);
                }
                assert_int_equal(n, slots);
                assert_int_equal(
                        n, floor(cases[c].frames * 24.0 * cases[c].denominator / cases[c].numerator + 0.5));
        }
}

static void read_clip_more_frames_than_asked_stops(void **state) {
        CLEANUP_FREE uint8_t *frames = make_frames(), *p = NULL;
        CLEANUP_CLOSE int file = write_file(MEDIA_MP4, WIDTH, HEIGHT, frames, FRAMES, NULL, 0);
        uint64_t n;

        p = read_clip(file, WIDTH, HEIGHT, 7, &n);
        assert_int_equal(n, 7);
        assert_true(psnr(p + 6 * SIZE, frames + 6 * SIZE, SIZE) > 30.0);
}

static void read_clip_turned_upright(void **state) {
        CLEANUP_FREE uint8_t *p = NULL;
        CLEANUP_CLOSE int file = -EBADF;
        char path[128];
        uint64_t n;

        /* Left half red, right half blue, to be shown turned by 90 degrees. */
        if (!ffmpeg("-f lavfi -i \"color=red:s=64x96:r=24[a];color=blue:s=64x96:r=24[b];[a][b]hstack\" "
                    "-frames:v 3 -c:v libx264 -pix_fmt yuv420p b.mp4") ||
                !ffmpeg("-i b.mp4 -c copy -metadata:s:v:0 rotate=90 c.mp4"))
                skip();
        (void) snprintf(path, sizeof(path), "%s/c.mp4", temporary_folder());
        file = file_open(path);
        assert_int_equal(probe_file(file).width, 96);
        assert_int_equal(probe_file(file).height, 128);
        p = read_clip(file, 96, 128, 10, &n);
        assert_int_equal(n, 3);
        /* One half is above now: which, ffmpeg says (it turns by itself). */
        assert_true(ffmpeg("-i c.mp4 -frames:v 1 -f rawvideo -pix_fmt rgb24 c.raw"));
        (void) snprintf(path, sizeof(path), "%s/c.raw", temporary_folder());
        {
                CLEANUP_CLOSE int raw = file_open(path);
                CLEANUP_FREE uint8_t *want = malloc(96 * 128 * 3);

                assert_int_equal(file_size(raw), 96 * 128 * 3);
                assert_int_equal(pread(raw, want, 96 * 128 * 3, 0), 96 * 128 * 3);
                assert_true(psnr(p, want, 96 * 128 * 3) > 30.0);
        }
}

/* One colour, written by ffmpeg in each matrix and range and tagged so, comes back as that colour. */
static void read_clip_matrices_and_ranges_right(void **state) {
        static const char *const matrices[] = {"bt709", "smpte170m"}, *const ranges[] = {"tv", "pc"};

        for (size_t i = 0; i < 4; i++) {
                CLEANUP_FREE uint8_t *p = NULL;
                CLEANUP_CLOSE int file = -EBADF;
                char path[128];
                uint64_t n;

                if (!ffmpeg("-f lavfi -i "
                            "\"color=0xD08030:s=64x64:r=24,format=rgb24,scale=out_color_matrix=%s:out_range="
                            "%s:flags=accurate_rnd,format=yuv444p\" "
                            "-frames:v 2 -c:v libx264 -crf 1 -colorspace %s -color_range %s d.mp4",
                            matrices[i % 2], ranges[i / 2], matrices[i % 2], ranges[i / 2]))
                        skip();
                (void) snprintf(path, sizeof(path), "%s/d.mp4", temporary_folder());
                file = file_open(path);
                p = read_clip(file, 64, 64, 4, &n);
                for (size_t k = 0; k < 64 * 64 * 3; k++) {
                        static const int want[] = {0xd0, 0x80, 0x30};

                        if (abs(p[k] - want[k % 3]) > 3)
                                fail_msg("%s %s: channel %zu is %d, expected %d", matrices[i % 2],
                                        ranges[i / 2], k % 3, p[k], want[k % 3]);
                }
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(write_mp4_read_same_film_in_sync),
                cmocka_unit_test(write_mkv_read_same_film_in_sync),
                cmocka_unit_test(write_webm_read_same_film_in_sync),
                cmocka_unit_test(write_silent_film_read_every_frame),
                cmocka_unit_test(write_plain_colours_read_the_same),
                cmocka_unit_test(write_mp4_ffprobe_says_so),
                cmocka_unit_test(write_mkv_ffprobe_says_so),
                cmocka_unit_test(write_webm_ffprobe_says_so),
                cmocka_unit_test(write_mp4_twice_same_bytes),
                cmocka_unit_test(write_mp4_on_one_processor_same_bytes),
                cmocka_unit_test(write_ring_smaller_than_film_same_bytes),
                cmocka_unit_test(write_sound_longer_and_shorter_fits_film),
                cmocka_unit_test(write_silent_film_has_no_sound),
                cmocka_unit_test(read_clip_frame_rates_by_slots),
                cmocka_unit_test(read_clip_more_frames_than_asked_stops),
                cmocka_unit_test(read_clip_turned_upright),
                cmocka_unit_test(read_clip_matrices_and_ranges_right),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
