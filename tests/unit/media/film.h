/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A film whose frames, flash and click can be told when it comes back. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

#define WIDTH 96u
#define HEIGHT 64u
#define FRAMES 39u /* 17k + 5 */
#define FLASH 20u  /* the white frame, with a click at its first sample */
#define SIZE ((size_t) WIDTH * HEIGHT * 3)
#define SAMPLES (FRAMES * 32000u / 24)

/* A soft picture that moves, and one white frame. */
static inline uint8_t *make_frames(void) {
        uint8_t *p = malloc(SIZE * FRAMES), *q = p;

        assert_non_null(p);
        for (uint32_t i = 0; i < FRAMES; i++)
                for (uint32_t y = 0; y < HEIGHT; y++)
                        for (uint32_t x = 0; x < WIDTH; x++, q += 3) {
                                q[0] = (uint8_t) (100.0 + 60.0 * sin((x + i) * 0.1));
                                q[1] = (uint8_t) (90.0 + 50.0 * cos((y + 2.0 * i) * 0.08));
                                q[2] = (uint8_t) (80 + i);
                                if (i == FLASH)
                                        q[0] = q[1] = q[2] = 255;
                        }
        return p;
}

/* Silence, a click of 2 ms, and different tones on both sides behind it. */
static inline float *make_sound(uint64_t n) {
        float *p = calloc(n * 2, sizeof(*p));
        uint64_t at = FLASH * 32000u / 24;

        assert_non_null(p);
        for (uint64_t i = at; i < at + 64 && i < n; i++)
                p[i] = p[n + i] = (i % 8 < 4) ? 0.9f : -0.9f;
        return p;
}

static inline double brightness(const uint8_t *frame) {
        double sum = 0.0;

        for (size_t i = 0; i < SIZE; i++)
                sum += frame[i];
        return sum / SIZE;
}

static inline double psnr(const uint8_t *a, const uint8_t *b, size_t n) {
        double sum = 0.0;

        for (size_t i = 0; i < n; i++)
                sum += ((double) a[i] - b[i]) * ((double) a[i] - b[i]);
        return sum == 0.0 ? 99.0 : 10.0 * log10(255.0 * 255.0 * (double) n / sum);
}

/* Centre of the sound's energy, seconds. */
static inline double click_of(const float *p, uint64_t n) {
        double energy = 0.0, moment = 0.0;

        for (uint64_t i = 0; i < n; i++) {
                double e = (double) p[i] * p[i];

                energy += e;
                moment += e * (double) i;
        }
        assert_true(energy > 1.0);
        return moment / energy / 32000.0;
}

/* A film goes out and comes back: frames, flash and click where they were. */
static inline void check_round_trip(MediaFormat format) {
        CLEANUP_FREE uint8_t *frames = make_frames(), *back = NULL;
        CLEANUP_FREE float *sound = make_sound(SAMPLES), *heard = NULL;
        CLEANUP_CLOSE int file = -EBADF;
        uint64_t n, samples;
        unsigned flash = 0;
        MediaDone d;

        file = write_file(format, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);
        d = probe_file(file);
        assert_int_equal(d.width, WIDTH);
        assert_int_equal(d.height, HEIGHT);
        assert_int_equal(d.frames, FRAMES);
        assert_true(llabs((long long) d.samples - SAMPLES) <= 32000 / 24);

        back = read_clip(file, WIDTH, HEIGHT, FRAMES + 20, &n);
        assert_int_equal(n, FRAMES);
        for (uint32_t i = 0; i < FRAMES; i++) {
                double p = psnr(frames + i * SIZE, back + i * SIZE, SIZE);

                if (p <= 30.0)
                        fail_msg("frame %u: PSNR %.1f dB", i, p);
                if (brightness(back + i * SIZE) > brightness(back + flash * SIZE))
                        flash = i;
        }
        assert_int_equal(flash, FLASH);

        heard = read_sound(file, SAMPLES + 32000, &samples);
        print_message("%d: %llu of %u samples, click %.2f ms off\n", (int) format,
                (unsigned long long) samples, SAMPLES,
                1000.0 * (click_of(heard, samples) - click_of(sound, SAMPLES)));
        assert_true(llabs((long long) samples - SAMPLES) <= 32); /* 1 ms: Matroska's unit of time */
        assert_true(fabs(click_of(heard, samples) - click_of(sound, SAMPLES)) < 0.002);
        assert_true(fabs(click_of(heard + samples, samples) - click_of(sound, SAMPLES)) < 0.002);
}
