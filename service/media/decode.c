/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/decode.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <libavutil/display.h>
#include <libavutil/mathematics.h>

#include "service/media/pixels.h"
#include "service/media/sound.h"
#include "service/media/track.h"

static const AVRational film_time = {1, MEDIA_FPS}, sound_time = {1, MEDIA_SAMPLE_RATE};

static int check_place(const MediaRead *m, uint64_t need, uint64_t arena_size, Fault *f) {
        uint64_t end;

        if (m->size < need || __builtin_add_overflow(m->offset, m->size, &end) || end > arena_size)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The place at %" PRIu64 " of %" PRIu64 " bytes does not hold %" PRIu64
                        " bytes inside of an arena of %" PRIu64 ".",
                        m->offset, m->size, need, arena_size);
        return 0;
}

int decode_check(const MediaRead *m, uint64_t arena_size, Fault *f) {
        uint64_t frames = m->what == MEDIA_CLIP ? m->frames_max : 1, need;

        if (m->what >= _MEDIA_WHAT_MAX || m->fit >= _MEDIA_FIT_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "READ asks for the unknown kind %u, fit %u.", m->what, m->fit);
        if (m->what == MEDIA_PROBE)
                return 0;
        if (m->what == MEDIA_SOUND) {
                if (m->samples_max == 0 || m->offset % sizeof(float) != 0 ||
                        __builtin_mul_overflow(m->samples_max, 2 * sizeof(float), &need))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "READ asks for %" PRIu64 " samples at %" PRIu64 ".", m->samples_max,
                                m->offset);
                return check_place(m, need, arena_size, f);
        }

        if (m->width < 1 || m->height < 1 || m->width > MEDIA_SIDE_MAX || m->height > MEDIA_SIDE_MAX ||
                frames < 1 || frames > MEDIA_FRAMES_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "READ asks for %" PRIu64 " pictures of %ux%u pixels, expected 1 to %" PRIu64
                        " with sides of 1 to %u.",
                        frames, m->width, m->height, MEDIA_FRAMES_MAX, MEDIA_SIDE_MAX);
        return check_place(m, (uint64_t) m->width * m->height * 3 * frames, arena_size, f);
}

static uint32_t big16(const uint8_t *p) {
        return (uint32_t) p[0] << 8 | p[1];
}

static uint32_t little(const uint8_t *p, unsigned n) {
        uint32_t v = 0;

        while (n-- > 0)
                v = v << 8 | p[n];
        return v;
}

static void jpeg_size(const uint8_t *p, size_t n, uint32_t *width, uint32_t *height) {
        for (size_t at = 2; at + 9 < n && p[at] == 0xff;) {
                uint8_t marker = p[at + 1];

                if (marker == 0xff) {
                        at++;
                        continue;
                }
                if (marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc) {
                        *height = big16(p + at + 5);
                        *width = big16(p + at + 7);
                        return;
                }
                at += 2 + big16(p + at + 2);
        }
}

/* What a picture's header says, for the text of the error: the decoder refuses by itself. Zeros: not found.
 */
static void header_size(const Input *in, const uint8_t *p, size_t n, uint32_t *width, uint32_t *height) {
        *width = *height = 0;
        if (n < 32)
                return;
        switch (in->kind->codec) {
        case AV_CODEC_ID_PNG:
                *width = big16(p + 16) << 16 | big16(p + 18);
                *height = big16(p + 20) << 16 | big16(p + 22);
                break;
        case AV_CODEC_ID_BMP:
                *width = little(p + 18, 4);
                *height = little(p + 22, 4);
                break;
        case AV_CODEC_ID_MJPEG:
                jpeg_size(p, n, width, height);
                break;
        case AV_CODEC_ID_WEBP:
                if (memcmp(p + 12, "VP8X", 4) == 0) {
                        *width = little(p + 24, 3) + 1;
                        *height = little(p + 27, 3) + 1;
                }
                break;
        default:
                break;
        }
}

static int check_sides(const char *kind, uint64_t width, uint64_t height, Fault *f) {
        if (width <= MEDIA_SIDE_MAX && height <= MEDIA_SIDE_MAX && width * height <= MEDIA_PIXELS_MAX)
                return 0;
        return fault_set(f, -EINVAL, FAULT_LIMIT,
                "%s: a picture of %" PRIu64 "x%" PRIu64 " pixels, expected sides of at most %u and %" PRIu64
                " pixels in all: shrink it first.",
                kind, width, height, MEDIA_SIDE_MAX, MEDIA_PIXELS_MAX);
}

static int decode_still(Input *in, Pixels *p, Fault *f) {
        CLEANUP_CODEC AVCodecContext *codec = NULL;
        CLEANUP_PACKET AVPacket *packet = av_packet_alloc();
        CLEANUP_FRAME AVFrame *frame = av_frame_alloc();
        uint32_t width, height;
        char words[128];
        int r;

        if (!packet || !frame)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to decode a picture.");
        r = input_read_all(in, packet, f);
        if (r < 0)
                return r;
        header_size(in, packet->data, (size_t) packet->size, &width, &height);
        r = check_sides(in->kind->name, width, height, f);
        if (r < 0)
                return r;
        r = input_open_decoder(in, NULL, &codec, f);
        if (r < 0)
                return r;

        r = avcodec_send_packet(codec, packet);
        if (r >= 0)
                r = avcodec_receive_frame(codec, frame);
        if (r == AVERROR(EAGAIN)) { /* a decoder that keeps a picture until the end */
                (void) avcodec_send_packet(codec, NULL);
                r = avcodec_receive_frame(codec, frame);
        }
        if (r < 0)
                return input_fail(in, f,
                        "The picture cannot be decoded (%s): the file is damaged, cut off or not what its "
                        "first bytes say.",
                        libraries_error(r, words));
        return pixels_take(p, frame, (PixelsTurn){}, (AVRational){}, f);
}

static const int32_t *display_matrix(const AVStream *s) {
#if LIBAVCODEC_VERSION_INT >= AV_VERSION_INT(60, 31, 102)
        const AVPacketSideData *d = av_packet_side_data_get(
                s->codecpar->coded_side_data, s->codecpar->nb_coded_side_data, AV_PKT_DATA_DISPLAYMATRIX);

        return d && d->size >= 9 * sizeof(int32_t) ? (const int32_t *) (const void *) d->data : NULL;
#else
        size_t n = 0;
        const uint8_t *p = av_stream_get_side_data(s, AV_PKT_DATA_DISPLAYMATRIX, &n);

        return p && n >= 9 * sizeof(int32_t) ? (const int32_t *) (const void *) p : NULL;
#endif
}

static PixelsTurn turn_of_track(const AVStream *s) {
        const int32_t *p = display_matrix(s);
        int32_t matrix[9];

        if (!p)
                return (PixelsTurn){};
        memcpy(matrix, p, sizeof(matrix));
        return pixels_turn_from_matrix(matrix);
}

static int find_film(Input *in, AVStream **ret, Fault *f) {
        int r;

        r = input_open_streams(in, f);
        if (r < 0)
                return r;
        *ret = track_find(in, AVMEDIA_TYPE_VIDEO);
        return *ret ? 0 : input_fail(in, f, "There is no picture in this file, only sound or other data.");
}

static int open_film_track(Input *in, AVStream *s, Track *t, Fault *f) {
        int r;

        r = check_sides(in->kind->name, (uint64_t) s->codecpar->width, (uint64_t) s->codecpar->height, f);
        return r < 0 ? r : track_open(t, in, s, f);
}

static int open_film(Input *in, Track *t, Fault *f) {
        AVStream *s;
        int r;

        r = find_film(in, &s, f);
        return r < 0 ? r : open_film_track(in, s, t, f);
}

static int take_frame(Pixels *p, const Track *t, const AVFrame *frame, Fault *f) {
        AVRational aspect = frame->sample_aspect_ratio.num > 0 ? frame->sample_aspect_ratio
                                                               : t->stream->sample_aspect_ratio;

        return pixels_take(p, frame, turn_of_track(t->stream), aspect, f);
}

/* ret_alone: NULL, or whether no second one is there; what is behind it may be anything, then it is a clip. */
static int first_picture(Input *in, AVStream *s, Pixels *p, bool *ret_alone, Fault *f) {
        CLEANUP(track_done) Track t = {};
        Fault unused = {};
        int r;

        r = open_film_track(in, s, &t, f);
        if (r < 0)
                return r;
        r = track_next(&t, f);
        if (r < 0)
                return r;
        if (r == 0)
                return input_fail(in, f, "Its film has no picture.");
        r = take_frame(p, &t, t.frame, f);
        if (r < 0)
                return r;
        if (ret_alone)
                *ret_alone = track_next(&t, &unused) == 0;
        return 0;
}

/* The file's first picture. */
static int decode_first(Input *in, Pixels *p, Fault *f) {
        AVStream *s;
        int r;

        if (!in->kind->demuxer)
                return decode_still(in, p, f);

        r = find_film(in, &s, f);
        return r < 0 ? r : first_picture(in, s, p, NULL, f);
}

static int decode_picture(const MediaRead *m, Input *in, uint8_t *place, MediaDone *ret, Fault *f) {
        CLEANUP(pixels_done) Pixels p = {};
        int r;

        r = decode_first(in, &p, f);
        if (r < 0)
                return r;
        r = pixels_fit(&p, m->fit, m->width, m->height, place, f);
        if (r < 0)
                return r;
        ret->frames = 1;
        ret->width = m->width;
        ret->height = m->height;
        return 0;
}

/* A clip's frames on their way to the 24 a second. */
typedef struct Clip {
        const MediaRead *request;
        uint8_t *place;
        Pixels pixels;
        AVFrame *frame; /* the one that is shown from `slot` on until the next comes */
        bool any;
        int64_t begin, duration, last; /* the clip's, and a frame's, in units of the track */
        uint64_t slot, slots;          /* slots written */
} Clip;

static uint64_t slot_of(const Clip *clip, const Track *t, int64_t at) {
        int64_t since, slot;

        if (__builtin_sub_overflow(at, clip->begin, &since) || since <= 0)
                return 0;
        slot = av_rescale_q_rnd(since, t->stream->time_base, film_time, AV_ROUND_NEAR_INF);
        return slot < 0 || (uint64_t) slot > clip->request->frames_max ? clip->request->frames_max
                                                                       : (uint64_t) slot;
}

/* Writes the frame that is held to the slots up to `end`; none where the next one has the same. */
static int show_until(Clip *clip, const Track *t, uint64_t end, Fault *f) {
        size_t size = (size_t) clip->request->width * clip->request->height * 3;
        uint8_t *first = clip->place + clip->slots * size;
        int r;

        if (end <= clip->slots)
                return 0;
        r = take_frame(&clip->pixels, t, clip->frame, f);
        if (r < 0)
                return r;
        r = pixels_fit(
                &clip->pixels, clip->request->fit, clip->request->width, clip->request->height, first, f);
        if (r < 0)
                return r;
        for (clip->slots++; clip->slots < end; clip->slots++)
                memcpy(clip->place + clip->slots * size, first, size);
        return 0;
}

static int64_t duration_of(const Track *t) {
#if LIBAVUTIL_VERSION_INT >= AV_VERSION_INT(57, 30, 100)
        int64_t d = t->frame->duration;
#else
        int64_t d = t->frame->pkt_duration;
#endif
        AVRational rate = t->stream->avg_frame_rate;

        if (d > 0)
                return d;
        return rate.num > 0 && rate.den > 0 ? av_rescale_q(1, av_inv_q(rate), t->stream->time_base) : 0;
}

static int take_clip_frame(Clip *clip, Track *t, Fault *f) {
        int64_t at = t->frame->best_effort_timestamp;
        int r;

        if (at == AV_NOPTS_VALUE) /* it follows the one before */
                at = clip->any ? clip->last + clip->duration : 0;
        if (!clip->any) {
                int64_t start = t->stream->start_time;

                clip->begin = start != AV_NOPTS_VALUE && start < at ? start : at;
        } else {
                r = show_until(clip, t, slot_of(clip, t, at), f);
                if (r < 0)
                        return r;
        }
        clip->any = true;
        clip->last = at;
        clip->duration = duration_of(t);
        av_frame_unref(clip->frame);
        av_frame_move_ref(clip->frame, t->frame);
        return 0;
}

static int run_clip(Clip *clip, Track *t, Channel *c, Fault *f) {
        double seconds = track_duration(t->in, t->stream);
        uint64_t total = seconds > 0.0 && seconds < 1e9 ? (uint64_t) (seconds * MEDIA_FPS + 0.5) : 0, end;
        int64_t at;
        int r;

        if (total > clip->request->frames_max)
                total = clip->request->frames_max;
        while (clip->slots < clip->request->frames_max) {
                r = track_next(t, f);
                if (r < 0)
                        return r;
                if (r == 0)
                        break;
                r = take_clip_frame(clip, t, f);
                if (r < 0)
                        return r;
                channel_progress(c, clip->slots, total);
        }
        if (!clip->any)
                return input_fail(t->in, f, "Its film has no picture.");

        if (__builtin_add_overflow(clip->last, clip->duration, &at))
                at = clip->last;
        end = slot_of(clip, t, at);
        return show_until(clip, t, end > 0 ? end : 1, f);
}

static int decode_clip(const MediaRead *m, Input *in, uint8_t *place, Channel *c, MediaDone *ret, Fault *f) {
        CLEANUP(track_done) Track t = {};
        Clip clip = {.request = m, .place = place};
        int r;

        if (!in->kind->demuxer)
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE,
                        "%s: this is a picture, where a clip is asked.", in->kind->name);
        r = open_film(in, &t, f);
        if (r < 0)
                return r;
        clip.frame = av_frame_alloc();
        r = clip.frame ? run_clip(&clip, &t, c, f)
                       : fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to decode a clip.");
        av_frame_free(&clip.frame);
        pixels_done(&clip.pixels);
        if (r < 0)
                return r;
        ret->frames = clip.slots;
        ret->width = m->width;
        ret->height = m->height;
        return 0;
}

static uint64_t count_of(double seconds, AVRational unit) {
        double n = seconds * unit.den / unit.num;

        return n >= 1e18 ? UINT64_C(1000000000000000000) : n < 0.0 ? 0 : (uint64_t) (n + 0.5);
}

static int probe_streams(Input *in, Pixels *p, MediaDone *ret, Fault *f) {
        const AVStream *sound;
        bool alone = false;
        AVStream *film;
        int r;

        r = input_open_streams(in, f);
        if (r < 0)
                return r;
        film = track_find(in, AVMEDIA_TYPE_VIDEO);
        sound = track_find(in, AVMEDIA_TYPE_AUDIO);
        if (!film && !sound)
                return input_fail(in, f, "There is neither a picture nor sound in this file.");
        (void) snprintf(ret->format, sizeof(ret->format), "%s (%s%s%s)", in->format->iformat->name,
                film ? avcodec_get_name(film->codecpar->codec_id) : "", film && sound ? ", " : "",
                sound ? avcodec_get_name(sound->codecpar->codec_id) : "");
        if (sound) {
                ret->samples = count_of(track_duration(in, sound), sound_time);
                ret->samples += ret->samples == 0;
        }
        if (!film)
                return 0;

        ret->frames = count_of(track_duration(in, film), film_time);
        ret->frames += ret->frames == 0;
        r = first_picture(in, film, p, &alone, f); /* it knows how it is turned */
        if (r < 0)
                return r;
        if (alone && !sound) { /* for however long it would be shown */
                ret->frames = 1;
                ret->still = 1;
        }
        return 0;
}

static int probe(Input *in, MediaDone *ret, Fault *f) {
        CLEANUP(pixels_done) Pixels p = {};
        int r;

        r = in->kind->demuxer ? probe_streams(in, &p, ret, f) : decode_still(in, &p, f);
        if (r < 0)
                return r;
        if (!in->kind->demuxer) {
                ret->frames = ret->still = 1;
                (void) snprintf(ret->format, sizeof(ret->format), "%s", avcodec_get_name(in->kind->codec));
        }
        ret->width = p.shown_width;
        ret->height = p.height;
        return 0;
}

int decode_run(const MediaRead *m, int fd, uint8_t *place, Channel *c, MediaDone *ret, Fault *f) {
        CLEANUP(input_done) Input in = {};
        int r;

        r = input_open(&in, fd, f);
        if (r < 0)
                return r;

        switch ((MediaWhat) m->what) {
        case MEDIA_PROBE:
                r = probe(&in, ret, f);
                break;
        case MEDIA_PICTURE:
                r = decode_picture(m, &in, place, ret, f);
                break;
        case MEDIA_CLIP:
                r = decode_clip(m, &in, place, c, ret, f);
                break;
        case MEDIA_SOUND:
                r = sound_decode(&in, m->samples_max, m->cut != 0, (float *) (void *) place, c, &ret->samples, f);
                break;
        default:
                r = fault_set(f, -EINVAL, FAULT_INTERNAL, "READ asks for the unknown kind %u.", m->what);
                break;
        }
        return r < 0 ? r : input_check_unchanged(&in, f);
}
