/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/codecs.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <libavutil/opt.h>

/* Fixed numbers: with others other bytes come out. Those of x264 are for a machine that decodes 30 frames of 1344x768 a second. */
#define THREADS 4
#define THREADS_X264 16

typedef struct Format {
        const char *name, *muxer;
        const char *encoders[2][4]; /* by kind, the best first */
} Format;

static const Format formats[_MEDIA_FORMAT_MAX] = {
        [MEDIA_MP4] = {"mp4", "mp4", {{"libx264", "libsvtav1", "libvpx-vp9"}, {"aac", "libopus"}}},
        [MEDIA_WEBM] = {"webm", "webm", {{"libvpx-vp9", "libsvtav1"}, {"libopus", "libvorbis"}}},
        [MEDIA_MKV] = {"mkv", "matroska", {{"libx264", "libsvtav1", "libvpx-vp9"}, {"libopus", "flac"}}},
        [MEDIA_PNG] = {"png", NULL, {{"png"}, {}}},
        [MEDIA_WAV] = {"wav", "wav", {{}, {"pcm_s16le"}}},
        [MEDIA_FLAC] = {"flac", "flac", {{}, {"flac"}}},
};

static const char *const *hidden;

void codecs_hide(const char *const *names) {
        hidden = names;
}

const char *codecs_format_name(MediaFormat format) {
        return formats[format].name;
}

const char *codecs_format_muxer(MediaFormat format) {
        return formats[format].muxer;
}

bool codecs_has(MediaFormat format, CodecsKind kind) {
        return formats[format].encoders[kind][0];
}

static const AVCodec *find(const char *name) {
        for (const char *const *h = hidden; h && *h; h++)
                if (strcmp(*h, name) == 0)
                        return NULL;

        return avcodec_find_encoder_by_name(name);
}

const AVCodec *codecs_find(MediaFormat format, CodecsKind kind, unsigned i) {
        const char *const *names = formats[format].encoders[kind];

        for (unsigned k = 0; k < ELEMENTSOF(formats[format].encoders[kind]) && names[k]; k++) {
                const AVCodec *c = find(names[k]);

                if (c && i-- == 0)
                        return c;
        }
        return NULL;
}

static bool can_write(MediaFormat format) {
        for (CodecsKind kind = CODECS_PICTURE; kind <= CODECS_SOUND; kind++)
                if (codecs_has(format, kind) && !codecs_find(format, kind, 0))
                        return false;

        return !formats[format].muxer || av_guess_format(formats[format].muxer, NULL, NULL);
}

void codecs_describe(char *ret, size_t size) {
        ret[0] = '\0';
        for (MediaFormat i = 0; i < _MEDIA_FORMAT_MAX; i++) {
                const AVCodec *picture = codecs_find(i, CODECS_PICTURE, 0), *sound = codecs_find(i, CODECS_SOUND, 0);
                size_t n = strlen(ret);

                if (!can_write(i))
                        continue;
                (void) snprintf(ret + n, size - n, "%s%s (%s%s%s)", n > 0 ? ", " : "", formats[i].name, picture ? picture->name : "",
                        picture && sound ? ", " : "", sound ? sound->name : "");
        }
}

int codecs_check(MediaFormat format, Fault *f) {
        const Format *x = &formats[format];
        char missing[160] = "", here[256];

        if (can_write(format))
                return 0;

        for (CodecsKind kind = CODECS_PICTURE; kind <= CODECS_SOUND; kind++)
                for (unsigned k = 0; !codecs_find(format, kind, 0) && k < ELEMENTSOF(x->encoders[kind]) && x->encoders[kind][k]; k++) {
                        const char *between = missing[0] == '\0' ? "" : k == 0 ? ", and " : " or ";
                        size_t n = strlen(missing);

                        (void) snprintf(missing + n, sizeof(missing) - n, "%s%s", between, x->encoders[kind][k]);
                }
        if (missing[0] == '\0')
                (void) snprintf(missing, sizeof(missing), "the format itself");
        codecs_describe(here, sizeof(here));
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "The installed libav libraries cannot write %s, they lack %s. What can be written here: %s.", x->name, missing,
                here[0] != '\0' ? here : "nothing");
}

void codecs_set_quality(AVCodecContext *c, uint32_t quality) {
        const char *name = c->codec->name;
        double q = quality;

        c->thread_count = THREADS;
        if (strcmp(name, "libx264") == 0) {
                /* "medium" has the same SSIM and size with a higher crf by 1, and takes four times as long: a film would wait for it. */
                c->thread_count = THREADS_X264;
                (void) av_opt_set_double(c->priv_data, "crf", 44.0 - 0.36 * q, 0);
                (void) av_opt_set(c->priv_data, "preset", "veryfast", 0);
        } else if (strcmp(name, "libvpx-vp9") == 0) {
                (void) av_opt_set_double(c->priv_data, "crf", floor(60.0 - 0.48 * q), 0);
                (void) av_opt_set(c->priv_data, "deadline", "good", 0);
                (void) av_opt_set_int(c->priv_data, "cpu-used", 4, 0);
        } else if (strcmp(name, "libsvtav1") == 0) {
                (void) av_opt_set_double(c->priv_data, "crf", floor(60.0 - 0.45 * q), 0);
                (void) av_opt_set_int(c->priv_data, "preset", 8, 0);
                /* Else it takes threads and memory by the number of processors. */
                (void) av_opt_set(c->priv_data, "svtav1-params", "lp=4", 0);
        }
}
