/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/pixels.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <libavutil/imgutils.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>

#include "service/media/resample.h"

void pixels_done(Pixels *p) {
        free(p->rgb);
        free(p->scratch);
        sws_freeContext(p->sws);
        *p = (Pixels){};
}

PixelsTurn pixels_turn_from_matrix(const int32_t *m) {
        int64_t a = m[0], b = m[1], c = m[3], d = m[4];

        /* x' = a x + c y, y' = b x + d y: whichever is nearest of the eight. */
        if (llabs(b) + llabs(c) > llabs(a) + llabs(d))
                return (PixelsTurn){.swap = true, .flip_x = c < 0, .flip_y = b < 0};
        return (PixelsTurn){.flip_x = a < 0, .flip_y = d < 0};
}

PixelsTurn pixels_turn_from_exif(int orientation) {
        static const PixelsTurn turns[9] = {
                [2] = {.flip_x = true},
                [3] = {.flip_x = true, .flip_y = true},
                [4] = {.flip_y = true},
                [5] = {.swap = true},
                [6] = {.swap = true, .flip_x = true},
                [7] = {.swap = true, .flip_x = true, .flip_y = true},
                [8] = {.swap = true, .flip_y = true},
        };

        return orientation >= 1 && orientation <= 8 ? turns[orientation] : turns[1];
}

static PixelsTurn turn_of(const AVFrame *frame, PixelsTurn turn) {
        const AVFrameSideData *s = av_frame_get_side_data(frame, AV_FRAME_DATA_DISPLAYMATRIX);
        const AVDictionaryEntry *e;

        if (s && s->size >= 9 * sizeof(int32_t)) {
                int32_t matrix[9];

                memcpy(matrix, s->data, sizeof(matrix));
                return pixels_turn_from_matrix(matrix);
        }
        e = av_dict_get(frame->metadata, "Orientation", NULL, 0);
        return e ? pixels_turn_from_exif(atoi(e->value)) : turn;
}

static int make_room(uint8_t **p, size_t *room, size_t size, Fault *f) {
        uint8_t *q;

        if (*room >= size)
                return 0;
        q = realloc(*p, size);
        if (!q)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "Not enough memory for a picture of %zu bytes.", size);
        *p = q;
        *room = size;
        return 0;
}

static uint8_t to_8_bits(uint32_t v, int depth) {
        uint32_t max = (1u << depth) - 1;

        return depth == 8 ? (uint8_t) v : (uint8_t) (((uint64_t) v * 255 + max / 2) / max);
}

static void take_palette(const AVFrame *frame, uint8_t *rgb) {
        for (int y = 0; y < frame->height; y++)
                for (int x = 0; x < frame->width; x++, rgb += 3) {
                        uint32_t argb;

                        memcpy(&argb,
                                frame->data[1] +
                                        (size_t) frame->data[0][(ptrdiff_t) y * frame->linesize[0] + x] * 4,
                                4);
                        for (unsigned c = 0; c < 3; c++)
                                rgb[c] = (uint8_t) (((argb >> (16 - 8 * c) & 0xff) * (argb >> 24) + 127) /
                                                    255);
                }
}

/* Formats whose components are red, green and blue, or grey: exact, for any order and depth. */
static int take_rgb(const AVFrame *frame, const AVPixFmtDescriptor *d, uint8_t *rgb, Fault *f) {
        bool alpha = d->flags & AV_PIX_FMT_FLAG_ALPHA;
        unsigned n = d->nb_components, colours = n - (alpha ? 1 : 0);
        bool limited = colours == 1 && frame->color_range == AVCOL_RANGE_MPEG;
        CLEANUP_FREE uint16_t *line = calloc((size_t) frame->width * 4, sizeof(*line));

        if (!line)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory for a picture.");

        for (int y = 0; y < frame->height; y++) {
                uint8_t *to = rgb + (size_t) y * (size_t) frame->width * 3;

                for (unsigned c = 0; c < n; c++)
                        av_read_image_line2(line + (size_t) c * (size_t) frame->width,
                                (const uint8_t **) frame->data, frame->linesize, d, 0, y, (int) c,
                                frame->width, 0, 2);
                for (size_t x = 0; x < (size_t) frame->width; x++, to += 3) {
                        for (unsigned c = 0; c < 3; c++) {
                                unsigned from = colours == 1 ? 0 : c;
                                int depth = d->comp[from].depth;

                                to[c] = to_8_bits(line[from * (size_t) frame->width + x], depth);
                                if (limited)
                                        to[c] = to[c] <= 16 ? 0
                                                : to[c] >= 235
                                                        ? 255
                                                        : (uint8_t) (((to[c] - 16) * 255 + 109) / 219);
                        }
                        if (alpha) {
                                unsigned a = to_8_bits(
                                        line[(n - 1) * (size_t) frame->width + x], d->comp[n - 1].depth);

                                for (unsigned c = 0; c < 3; c++)
                                        to[c] = (uint8_t) ((to[c] * a + 127) / 255);
                        }
                }
        }
        return 0;
}

static int matrix_of(const AVFrame *frame, bool jpeg) {
        switch (frame->colorspace) {
        case AVCOL_SPC_BT709:
                return SWS_CS_ITU709;
        case AVCOL_SPC_BT470BG:
        case AVCOL_SPC_SMPTE170M:
                return SWS_CS_ITU601;
        case AVCOL_SPC_SMPTE240M:
                return SWS_CS_SMPTE240M;
        case AVCOL_SPC_FCC:
                return SWS_CS_FCC;
        case AVCOL_SPC_BT2020_NCL:
        case AVCOL_SPC_BT2020_CL:
                return SWS_CS_BT2020;
        default:
                return !jpeg && (frame->height >= 720 || frame->width >= 1280) ? SWS_CS_ITU709
                                                                               : SWS_CS_ITU601;
        }
}

static bool is_full_range(enum AVPixelFormat format) {
        return format == AV_PIX_FMT_YUVJ420P || format == AV_PIX_FMT_YUVJ422P ||
               format == AV_PIX_FMT_YUVJ444P || format == AV_PIX_FMT_YUVJ440P ||
               format == AV_PIX_FMT_YUVJ411P;
}

static int take_yuv(Pixels *p, const AVFrame *frame, const AVPixFmtDescriptor *d, uint8_t *rgb, Fault *f) {
        bool alpha = d->flags & AV_PIX_FMT_FLAG_ALPHA, jpeg = is_full_range(frame->format);
        bool full = jpeg || frame->color_range == AVCOL_RANGE_JPEG;
        enum AVPixelFormat to = alpha ? AV_PIX_FMT_RGBA : AV_PIX_FMT_RGB24;
        size_t stride = (size_t) frame->width * (alpha ? 4 : 3);
        /* libswscale writes whole vectors: rows of its own, with room behind them. */
        size_t padded = (stride + 63) / 64 * 64;
        const int *matrix = sws_getCoefficients(matrix_of(frame, jpeg));
        int r;

        p->sws = sws_getCachedContext(p->sws, frame->width, frame->height, frame->format, frame->width,
                frame->height, to,
                SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_FULL_CHR_H_INP | SWS_BITEXACT,
                NULL, NULL, NULL);
        if (!p->sws || sws_setColorspaceDetails(p->sws, matrix, full, sws_getCoefficients(SWS_CS_DEFAULT), 1,
                               0, 1 << 16, 1 << 16) < 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "Pictures of the pixel format %s cannot be converted.", d->name);
        r = make_room(&p->scratch, &p->scratch_room, padded * ((size_t) frame->height + 1), f);
        if (r < 0)
                return r;
        if (sws_scale(p->sws, (const uint8_t *const *) frame->data, frame->linesize, 0, frame->height,
                    (uint8_t *[]){p->scratch, NULL, NULL, NULL},
                    (int[]){(int) padded, 0, 0, 0}) != frame->height)
                return fault_set(f, -EIO, FAULT_INTERNAL,
                        "Converting a picture of the pixel format %s failed.", d->name);

        for (size_t y = 0; y < (size_t) frame->height; y++) {
                const uint8_t *from = p->scratch + y * padded;
                uint8_t *row = rgb + y * (size_t) frame->width * 3;

                if (!alpha) {
                        memcpy(row, from, stride);
                        continue;
                }
                for (size_t x = 0; x < (size_t) frame->width; x++, from += 4, row += 3)
                        for (unsigned c = 0; c < 3; c++)
                                row[c] = (uint8_t) ((from[c] * from[3] + 127) / 255);
        }
        return 0;
}

static void turn_pixels(const uint8_t *from, uint32_t width, uint32_t height, PixelsTurn t, uint8_t *to) {
        uint32_t to_width = t.swap ? height : width, to_height = t.swap ? width : height;

        for (uint32_t y = 0; y < to_height; y++)
                for (uint32_t x = 0; x < to_width; x++, to += 3) {
                        uint32_t u = t.flip_x ? to_width - 1 - x : x, v = t.flip_y ? to_height - 1 - y : y;

                        memcpy(to, from + (t.swap ? (size_t) u * width + v : (size_t) v * width + u) * 3, 3);
                }
}

static int check_size(const AVFrame *frame, Fault *f) {
        int side = (int) MEDIA_SIDE_MAX;

        if (frame->width >= 1 && frame->height >= 1 && frame->width <= side && frame->height <= side &&
                (uint64_t) frame->width * (uint64_t) frame->height <= MEDIA_PIXELS_MAX)
                return 0;
        return fault_set(f, -EINVAL, FAULT_LIMIT,
                "A picture has %dx%d pixels, expected sides of at most %u.", frame->width, frame->height,
                MEDIA_SIDE_MAX);
}

int pixels_take(Pixels *p, const AVFrame *frame, PixelsTurn turn, AVRational aspect, Fault *f) {
        const AVPixFmtDescriptor *d = av_pix_fmt_desc_get(frame->format);
        uint32_t width = (uint32_t) frame->width, height = (uint32_t) frame->height;
        double ratio = 1.0;
        size_t size;
        int r;

        r = check_size(frame, f);
        if (r < 0)
                return r;
        if (!d || (d->flags & (AV_PIX_FMT_FLAG_HWACCEL | AV_PIX_FMT_FLAG_BAYER | AV_PIX_FMT_FLAG_FLOAT)) ||
                ((d->flags & AV_PIX_FMT_FLAG_PAL) && frame->format != AV_PIX_FMT_PAL8))
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "Pictures of the pixel format %s cannot be converted.", d ? d->name : "?");

        size = (size_t) width * height * 3;
        r = make_room(&p->rgb, &p->room, size, f);
        if (r < 0)
                return r;
        if (frame->format == AV_PIX_FMT_PAL8)
                take_palette(frame, p->rgb);
        else if ((d->flags & AV_PIX_FMT_FLAG_RGB) || d->nb_components <= 2)
                r = take_rgb(frame, d, p->rgb, f);
        else
                r = take_yuv(p, frame, d, p->rgb, f);
        if (r < 0)
                return r;

        if (aspect.num > 0 && aspect.den > 0)
                ratio = av_q2d(aspect);
        if (!(ratio >= 0.125 && ratio <= 8.0))
                ratio = 1.0;
        turn = turn_of(frame, turn);
        p->width = turn.swap ? height : width;
        p->height = turn.swap ? width : height;
        p->shown_width = (uint32_t) fmax(1.0, floor(p->width * (turn.swap ? 1.0 / ratio : ratio) + 0.5));
        if (!turn.swap && !turn.flip_x && !turn.flip_y)
                return 0;

        r = make_room(&p->scratch, &p->scratch_room, size, f);
        if (r < 0)
                return r;
        turn_pixels(p->rgb, width, height, turn, p->scratch);
        memcpy(p->rgb, p->scratch, size);
        return 0;
}

int pixels_fit(const Pixels *p, MediaFit fit, uint32_t width, uint32_t height, uint8_t *to, Fault *f) {
        uint32_t to_width = width, to_height = height;
        ResampleCrop crop;
        int r;

        if (fit == MEDIA_FIT_COVER && (p->shown_width != width || p->height != height)) {
                double scale = fmax((double) width / p->shown_width, (double) height / p->height);
                double w = fmax(width, rint(p->shown_width * scale)),
                       h = fmax(height, rint(p->height * scale));

                /* A strip of 1 pixel would become one of a million: nothing of that is a picture. */
                if (w > 65536.0 || h > 65536.0)
                        return fault_set(f, -EINVAL, FAULT_INVALID_FILE,
                                "A picture of %ux%u pixels cannot cover %ux%u: crop it to a shape that is "
                                "nearer.",
                                p->width, p->height, width, height);
                to_width = (uint32_t) w;
                to_height = (uint32_t) h;
        }
        crop = (ResampleCrop){(to_width - width) / 2, (to_height - height) / 2, width, height};
        r = resample_rgb(p->rgb, p->width, p->height, to_width, to_height, &crop, to);
        if (r < 0)
                return fault_set(f, r, r == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "Resizing a picture of %ux%u pixels failed: %s.", p->width, p->height, strerror(-r));
        return 0;
}
