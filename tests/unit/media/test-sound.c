/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

#define SAMPLES 40001u

/* Both sides differ; every value is a multiple of 2^-bits. */
static float *make_sound(int bits) {
        float *p = malloc(SAMPLES * 2 * sizeof(*p));
        double scale = ldexp(1.0, bits);
        uint32_t seed = 7;

        assert_non_null(p);
        for (size_t i = 0; i < SAMPLES * 2; i++) {
                seed = seed * 1664525u + 1013904223u;
                p[i] = (float) (floor(((double) seed / 4294967296.0 * 2.0 - 1.0) * scale) / scale);
        }
        p[5] = -1.0f;
        return p;
}

static void check_exact(MediaFormat format, int bits) {
        CLEANUP_FREE float *sound = make_sound(bits), *heard = NULL;
        CLEANUP_CLOSE int file = write_file(format, 0, 0, NULL, 0, sound, SAMPLES);
        uint64_t n;

        assert_int_equal(probe_file(file).samples, SAMPLES);
        assert_int_equal(probe_file(file).frames, 0);
        heard = read_sound(file, SAMPLES, &n);
        assert_int_equal(n, SAMPLES);
        assert_memory_equal(heard, sound, SAMPLES * 2 * sizeof(float));
}

static void write_wav_read_same_samples(void **state) {
        check_exact(MEDIA_WAV, 15);
}

static void write_flac_read_same_samples(void **state) {
        check_exact(MEDIA_FLAC, 23);
}

static void write_wav_too_loud_is_clipped(void **state) {
        float sound[8] = {2.0f, -3.0f, 0.5f, 1e30f, 0.0f, 1.0f, -1.0f, -0.25f};
        CLEANUP_CLOSE int file = write_file(MEDIA_WAV, 0, 0, NULL, 0, sound, 4);
        CLEANUP_FREE float *heard = NULL;
        uint64_t n;

        heard = read_sound(file, 100, &n);
        assert_int_equal(n, 4);
        assert_true(heard[0] == 32767.0f / 32768.0f && heard[1] == -1.0f && heard[2] == 0.5f &&
                    heard[3] == 32767.0f / 32768.0f);
        assert_true(heard[4] == 0.0f && heard[5] == 32767.0f / 32768.0f && heard[6] == -1.0f &&
                    heard[7] == -0.25f);
}

static float *read_ffmpeg(const char *name, uint64_t samples_max, uint64_t *ret) {
        CLEANUP_CLOSE int file = -EBADF;
        char path[128];

        (void) snprintf(path, sizeof(path), "%s/%s", temporary_folder(), name);
        file = file_open(path);
        return read_sound(file, samples_max, ret);
}

static void read_mono_is_on_both_sides(void **state) {
        CLEANUP_FREE float *p = NULL;
        uint64_t n;
        float peak = 0;

        if (!ffmpeg("-f lavfi -i \"aevalsrc=0.5*sin(2*PI*1000*t):s=32000:d=1\" -c:a pcm_f32le a.wav"))
                skip();
        p = read_ffmpeg("a.wav", 64000, &n);
        assert_int_equal(n, 32000);
        assert_memory_equal(p, p + n, n * sizeof(float));
        for (uint64_t i = 0; i < n; i++)
                peak = fmaxf(peak, p[i]);
        assert_true(fabsf(peak - 0.5f) < 1e-4f); /* not quieter */
}

static void read_many_channels_mixed_down(void **state) {
        CLEANUP_FREE float *p = NULL;
        double left = 0.0, right = 0.0;
        uint64_t n;

        /* 5.1: sound in front left and in the centre alone. */
        if (!ffmpeg("-f lavfi -i "
                    "\"aevalsrc=0.8*sin(2*PI*440*t)|0|0.4*sin(2*PI*440*t)|0|0|0:s=32000:d=1:c=5.1\" -c:a "
                    "pcm_s16le b.wav"))
                skip();
        p = read_ffmpeg("b.wav", 64000, &n);
        assert_int_equal(n, 32000);
        for (uint64_t i = 0; i < n; i++) {
                left += p[i] * p[i];
                right += p[n + i] * p[n + i];
                assert_true(fabsf(p[i]) <= 1.0f && fabsf(p[n + i]) <= 1.0f);
        }
        assert_true(right > 0.01 && left > 4 * right); /* centre on both, front left on the left */
}

/* Whatever the rate and the codec: as many samples as its time, and a click where it was. */
static void read_rates_and_codecs_exact_length(void **state) {
        static const struct {
                const char *name, *codec;
                int rate;
                unsigned within; /* samples */
        } cases[] = {{"c.wav", "pcm_s24le", 44100, 0}, {"d.wav", "pcm_u8", 8000, 0},
                {"e.flac", "flac", 48000, 0}, {"f.wav", "pcm_s16le", 96000, 0},
                {"g.ogg", "libvorbis", 44100, 32}, {"h.mp3", "libmp3lame", 44100, 32},
                {"i.m4a", "aac", 48000, 32}, {"j.opus", "libopus", 48000, 32}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE float *p = NULL;
                double energy = 0.0, moment = 0.0;
                uint64_t n;

                if (!ffmpeg("-f lavfi -i "
                            "\"aevalsrc='if(between(t,0.7,0.702),0.9*sin(2*PI*2000*t),0)':s=%d:d=1.25:c="
                            "mono\" -c:a %s %s",
                            cases[i].rate, cases[i].codec, cases[i].name))
                        skip();
                p = read_ffmpeg(cases[i].name, 100000, &n);
                if (llabs((long long) n - 40000) > cases[i].within)
                        fail_msg("%s: %llu samples", cases[i].name, (unsigned long long) n);
                for (uint64_t k = 0; k < n; k++) {
                        energy += (double) p[k] * p[k];
                        moment += (double) p[k] * p[k] * (double) k;
                }
                if (fabs(moment / energy / 32000.0 - 0.701) > 0.001)
                        fail_msg("%s: click at %.5f s", cases[i].name, moment / energy / 32000.0);
        }
}

/* A tone up to the end is one up to the end, at another rate, too. */
static void read_resampled_to_its_last_sample(void **state) {
        CLEANUP_FREE float *p = NULL;
        double energy = 0.0;
        uint64_t n;

        if (!ffmpeg("-f lavfi -i \"aevalsrc=0.5*sin(2*PI*2000*t):s=44100:d=0.5\" -c:a pcm_s16le t.wav"))
                skip();
        p = read_ffmpeg("t.wav", 100000, &n);
        assert_int_equal(n, 16000);
        for (uint64_t i = n - 16; i < n; i++) /* a period */
                energy += (double) p[i] * p[i];
        assert_true(fabs(energy - 16 * 0.125) < 0.5);
}

static void read_film_sound_later_than_picture_has_silence(void **state) {
        CLEANUP_FREE float *p = NULL;
        uint64_t n, first = 0;

        if (!ffmpeg("-f lavfi -i color=red:s=32x32:r=24:d=2 -itsoffset 0.5 -f lavfi -i "
                    "\"aevalsrc=0.5*sin(2*PI*1000*t):s=32000:d=1\" -c:v ffv1 -c:a pcm_s16le k.mkv"))
                skip();
        p = read_ffmpeg("k.mkv", 100000, &n);
        while (first < n && fabsf(p[first]) < 0.05f)
                first++;
        assert_true(llabs((long long) first - 16000) < 64);
        assert_int_equal(n, 48000);
}

static Fault read_fault(int file, uint64_t samples_max) {
        MediaRead m = {.what = MEDIA_SOUND, .samples_max = samples_max, .size = samples_max * 8};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        void *map;

        arena = arena_new(m.size, &map);
        (void) peer_read(&m, file, arena, &f);
        return f;
}

static void put32(uint8_t *p, uint32_t v) {
        for (unsigned i = 0; i < 4; i++)
                p[i] = (uint8_t) (v >> (8 * i));
}

/* A header of WAV: F32 or S16, 2 channels, 32 kHz, that says `bytes` of data. */
static void wav_header(uint8_t p[44], bool is_float, uint32_t bytes) {
        memcpy(p, "RIFF\0\0\0\0WAVEfmt \x10\0\0\0", 20);
        put32(p + 4, bytes + 36);
        put32(p + 20, is_float ? 3 | 2 << 16 : 1 | 2 << 16);
        put32(p + 24, 32000);
        put32(p + 28, 32000 * (is_float ? 8 : 4));
        put32(p + 32, is_float ? 8 | 32 << 16 : 4 | 16 << 16);
        memcpy(p + 36, "data", 4);
        put32(p + 40, bytes);
}

static void read_nan_refused(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        uint8_t p[44 + 80];
        Fault f;

        wav_header(p, true, 80);
        memset(p + 44, 0, 80);
        put32(p + 44 + 40, 0x7fc00000);
        file = file_new(p, sizeof(p));
        f = read_fault(file, 1000);
        expect_fault(&f, FAULT_INVALID_FILE, "NaN");
}

/* Ten hours, of which the file has holes alone: refused by its header, at once. */
static void read_ten_hours_refused_at_once(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        uint8_t p[44];
        Fault f;

        wav_header(p, false, 4u * 32000 * 3600 * 9);
        file = file_new(p, sizeof(p));
        assert_int_equal(ftruncate(file, 44 + 4ll * 32000 * 3600 * 9), 0);
        f = read_fault(file, 32000 * 15);
        expect_fault(&f, FAULT_LIMIT, "lasts 32400.0 seconds, expected at most 15.0");
}

static void read_longer_than_header_says_refused(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        uint8_t *p = calloc(1, 44 + 4000 * 4);
        uint64_t n;
        float *sound;
        Fault f;

        wav_header(p, false, 4000 * 4);
        file = file_new(p, 44 + 4000 * 4);
        free(p);
        sound = read_sound(file, 4000, &n);
        assert_int_equal(n, 4000);
        free(sound);
        f = read_fault(file, 3999);
        expect_fault(&f, FAULT_LIMIT, "more than 0.1 seconds");
}

static MediaDone read_cut(int file, uint64_t samples_max, float **ret) {
        MediaRead m = {.what = MEDIA_SOUND, .samples_max = samples_max, .cut = 1, .size = samples_max * 8};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        MediaDone d;
        void *map;

        arena = arena_new(m.size, &map);
        d = peer_read(&m, file, arena, &f);
        assert_string_equal(f.text, "");
        *ret = malloc(m.size);
        memcpy(*ret, map, m.size);
        return d;
}

/* What is cut is the same as what is read of all of it; and nobody reads ten hours for that. */
static void read_cut_gives_the_beginning(void **state) {
        CLEANUP_CLOSE int file = -EBADF, hours = -EBADF;
        CLEANUP_FREE float *all = NULL, *cut = NULL, *silence = NULL;
        uint8_t *p = calloc(1, 44 + 4000 * 4), head[44];
        uint64_t n;

        wav_header(p, false, 4000 * 4);
        for (unsigned i = 0; i < 8000; i++)
                p[44 + 2 * i + 1] = (uint8_t) (i * 7 % 251);
        file = file_new(p, 44 + 4000 * 4);
        free(p);
        all = read_sound(file, 4000, &n);
        assert_int_equal(n, 4000);
        assert_int_equal(read_cut(file, 1234, &cut).samples, 1234);
        assert_memory_equal(cut, all, 1234 * sizeof(float));
        assert_memory_equal(cut + 1234, all + 4000, 1234 * sizeof(float));
        free(cut);
        assert_int_equal(read_cut(file, 5000, &cut).samples, 4000);
        assert_memory_equal(cut, all, 8000 * sizeof(float));

        wav_header(head, false, 4u * 32000 * 3600 * 9);
        hours = file_new(head, sizeof(head));
        assert_int_equal(ftruncate(hours, 44 + 4ll * 32000 * 3600 * 9), 0);
        assert_int_equal(read_cut(hours, 32000, &silence).samples, 32000);
}

static void write_nan_refused(void **state) {
        CLEANUP_PEER Peer *p = peer_open();
        CLEANUP_CLOSE int arena = -EBADF, file = file_new(NULL, 0);
        MediaMessage m;
        float *map;

        arena = arena_new(8000, (void **) &map);
        map[777] = NAN;
        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = MEDIA_WAV;
        m.write.samples = 1000;
        peer_send(p, &m, file, arena);
        peer_say_frames(p, 0, true);
        assert_true(peer_receive(p, &m));
        assert_int_equal(m.header.type, MEDIA_ERROR);
        expect_fault(&m.error.fault, FAULT_INVALID_TENSOR, "sound[0, 777] is NaN");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(write_wav_read_same_samples),
                cmocka_unit_test(write_flac_read_same_samples),
                cmocka_unit_test(write_wav_too_loud_is_clipped),
                cmocka_unit_test(write_nan_refused),
                cmocka_unit_test(read_mono_is_on_both_sides),
                cmocka_unit_test(read_many_channels_mixed_down),
                cmocka_unit_test(read_rates_and_codecs_exact_length),
                cmocka_unit_test(read_resampled_to_its_last_sample),
                cmocka_unit_test(read_film_sound_later_than_picture_has_silence),
                cmocka_unit_test(read_nan_refused),
                cmocka_unit_test(read_ten_hours_refused_at_once),
                cmocka_unit_test(read_longer_than_header_says_refused),
                cmocka_unit_test(read_cut_gives_the_beginning),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
