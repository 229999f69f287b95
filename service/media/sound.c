/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/sound.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include <libavutil/channel_layout.h>
#include <libavutil/mathematics.h>
#include <libavutil/opt.h>
#include <libswresample/swresample.h>

#include "service/media/track.h"

#define CHUNK 4096
#define GAP_SEC 0.1 /* times of packets are rounded: less is no gap */
#define CHANNELS_MAX 16

typedef struct Sound {
        Track track;
        Channel *channel;
        SwrContext *swr;
        int rate, format, channels, sides; /* of what comes; channels that the resampler gives */
        int64_t begin;                     /* of the film, in units of the track */
        float *place;                      /* [2, samples_max] */
        uint64_t samples_max, samples;
        bool cut; /* what comes behind samples_max is left out */
        uint64_t before; /* samples before the film begins, which are cut */
        uint64_t skip;   /* of them still to come */
        uint64_t lead;   /* silence in front */
        uint64_t taken;  /* samples that went into the resampler */
        int64_t next;    /* when the next frame is due, in units of the track */
} Sound;

/* No samples, which is not the end: that is NULL. */
static const uint8_t no_bytes[8];
#define NONE4 no_bytes, no_bytes, no_bytes, no_bytes
static const uint8_t *const nothing[CHANNELS_MAX] = {NONE4, NONE4, NONE4, NONE4};

static void sound_done(Sound *s) {
        swr_free(&s->swr);
        track_done(&s->track);
}

static int too_long(const Sound *s, double seconds, Fault *f) {
        return fault_set(f, -EFBIG, FAULT_LIMIT,
                "The sound lasts %s%.1f seconds, expected at most %.1f: cut it first.",
                seconds > 0.0 ? "" : "more than ",
                seconds > 0.0 ? seconds : (double) s->samples_max / MEDIA_SAMPLE_RATE,
                (double) s->samples_max / MEDIA_SAMPLE_RATE);
}

static int open_resampler(Sound *s, const AVFrame *frame, Fault *f) {
        AVChannelLayout in = {}, out;
        int r;

        s->rate = frame->sample_rate;
        s->format = frame->format;
        s->channels = frame->ch_layout.nb_channels;
        if (s->rate < 1000 || s->rate > 768000 || s->channels < 1 || s->channels > CHANNELS_MAX)
                return fault_set(f, -EINVAL, FAULT_NOT_SUPPORTED,
                        "The sound has %d channels at %d samples a second, expected 1 to %d at 1000 to "
                        "768000.",
                        s->channels, s->rate, CHANNELS_MAX);

        s->sides = s->channels == 1 ? 1 : 2;
        out = s->sides == 1 ? (AVChannelLayout) AV_CHANNEL_LAYOUT_MONO
                            : (AVChannelLayout) AV_CHANNEL_LAYOUT_STEREO;
        /* What a single channel is called does not matter. */
        if (s->sides == 1)
                in = out;
        else if (frame->ch_layout.order == AV_CHANNEL_ORDER_UNSPEC)
                av_channel_layout_default(&in, s->channels);
        else
                (void) av_channel_layout_copy(&in, &frame->ch_layout);
        r = swr_alloc_set_opts2(
                &s->swr, &out, AV_SAMPLE_FMT_FLTP, MEDIA_SAMPLE_RATE, &in, s->format, s->rate, 0, NULL);
        av_channel_layout_uninit(&in);
        if (r >= 0)
                r = av_opt_set_double(s->swr, "rematrix_maxval", 1.0, 0);
        if (r >= 0)
                r = swr_init(s->swr);
        if (r < 0)
                return fault_set(f, -EINVAL, FAULT_NOT_SUPPORTED,
                        "Sound with %d channels at %d samples a second cannot be resampled.", s->channels,
                        s->rate);
        return 0;
}

static int append(Sound *s, float *const *p, uint64_t n, Fault *f) {
        uint64_t from = s->skip < n ? s->skip : n;

        s->skip -= from;
        n -= from;
        if (n > s->samples_max - s->samples && !s->cut)
                return too_long(s, 0.0, f);
        if (n > s->samples_max - s->samples)
                n = s->samples_max - s->samples;
        for (int side = 0; side < 2; side++) {
                const float *x = p[side < s->sides ? side : 0] + from;
                float *to = s->place + (uint64_t) side * s->samples_max + s->samples;

                for (uint64_t i = 0; i < n; i++)
                        if (!isfinite(x[i]))
                                return input_fail(s->track.in, f,
                                        "The sound holds NaN or infinite samples (at %.3f seconds).",
                                        (double) (s->samples + i) / MEDIA_SAMPLE_RATE);
                memcpy(to, x, n * sizeof(*to));
        }
        s->samples += n;
        return 0;
}

/* Puts samples in (none: the end) and takes out what there is. */
static int pass(Sound *s, const uint8_t *const *data, int n, Fault *f) {
        float room[2][CHUNK], *out[2] = {room[0], room[1]};

        for (;;) {
                int k, r;

                k = swr_convert(s->swr, (uint8_t **) out, CHUNK, (const uint8_t **) data, n);
                if (k < 0)
                        return fault_set(f, -EIO, FAULT_INTERNAL, "Resampling failed.");
                r = append(s, out, (uint64_t) k, f);
                if (r < 0)
                        return r;
                if (k < CHUNK)
                        return 0;
                if (data) { /* they are in; the rest comes out with nothing new */
                        n = 0;
                        data = nothing;
                }
        }
}

/* Where the first samples lie against the film. */
static int begin(Sound *s, int64_t at, Fault *f) {
        AVRational unit = s->track.stream->time_base, out = {1, MEDIA_SAMPLE_RATE};
        int64_t ahead;

        if (s->begin == AV_NOPTS_VALUE || at == AV_NOPTS_VALUE ||
                __builtin_sub_overflow(at, s->begin, &ahead))
                return 0;
        ahead = av_rescale_q(ahead, unit, out);
        if (ahead <= 0) {
                s->skip = s->before = (uint64_t) -ahead;
                return 0;
        }
        if ((uint64_t) ahead > s->samples_max && !s->cut)
                return too_long(s, 0.0, f);
        s->lead = (uint64_t) ahead < s->samples_max ? (uint64_t) ahead : s->samples_max;
        memset(s->place, 0, s->lead * sizeof(float));
        memset(s->place + s->samples_max, 0, s->lead * sizeof(float));
        s->samples = s->lead;
        return 0;
}

/* A hole in the track is silence. */
static int fill_gap(Sound *s, int64_t at, Fault *f) {
        AVRational unit = s->track.stream->time_base;
        int64_t gap;

        if (at == AV_NOPTS_VALUE || s->next == AV_NOPTS_VALUE || __builtin_sub_overflow(at, s->next, &gap) ||
                (double) gap * av_q2d(unit) < GAP_SEC)
                return 0;
        gap = av_rescale_q(gap, unit, (AVRational){1, s->rate});
        if (gap < 0 || (double) gap / s->rate > (double) s->samples_max / MEDIA_SAMPLE_RATE) {
                if (!s->cut || gap < 0)
                        return too_long(s, 0.0, f);
                gap = (int64_t) ((double) s->samples_max / MEDIA_SAMPLE_RATE * s->rate) + 1; /* the rest is cut anyway */
        }
        s->taken += (uint64_t) gap;
        while (gap > 0) {
                int n = gap > CHUNK ? CHUNK : (int) gap, r;

                if (swr_inject_silence(s->swr, n) < 0)
                        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory for silence.");
                gap -= n;
                r = pass(s, nothing, 0, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int take_sound(Sound *s, Fault *f) {
        const AVFrame *frame = s->track.frame;
        int64_t at = frame->best_effort_timestamp;
        int r;

        if (!s->swr) {
                r = open_resampler(s, frame, f);
                if (r >= 0)
                        r = begin(s, at, f);
        } else if (frame->sample_rate != s->rate || frame->format != s->format ||
                   frame->ch_layout.nb_channels != s->channels)
                r = fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The sound changes from %d channels at %d samples a second to %d at %d in the "
                        "middle; convert the file first.",
                        s->channels, s->rate, frame->ch_layout.nb_channels, frame->sample_rate);
        else
                r = fill_gap(s, at, f);
        if (r < 0)
                return r;

        s->taken += (uint64_t) frame->nb_samples;
        s->next = at == AV_NOPTS_VALUE ? AV_NOPTS_VALUE
                                       : at + av_rescale_q(frame->nb_samples, (AVRational){1, s->rate},
                                                      s->track.stream->time_base);
        return pass(s, (const uint8_t *const *) frame->extended_data, frame->nb_samples, f);
}

/* Exactly as many as went in, at the other rate; in an MP4 no more than its edit list shows of the last
 * packet. */
static int finish(Sound *s, Fault *f) {
        const AVStream *stream = s->track.stream;
        uint64_t want, end;
        int r;

        r = pass(s, NULL, 0, f);
        if (r < 0)
                return r;
        want = (uint64_t) av_rescale((int64_t) s->taken, MEDIA_SAMPLE_RATE, s->rate);
        want = s->lead + (want > s->before ? want - s->before : 0);
        if (strcmp(s->track.in->kind->demuxer, "mov") == 0 && stream->duration > 0 &&
                stream->start_time != AV_NOPTS_VALUE && s->begin != AV_NOPTS_VALUE) {
                int64_t n = av_rescale_q(stream->start_time - s->begin + stream->duration, stream->time_base,
                        (AVRational){1, MEDIA_SAMPLE_RATE});

                end = n > 0 ? (uint64_t) n : 0;
                if (want > end && want - end < MEDIA_SAMPLE_RATE / 4)
                        want = end;
        }
        if (want > s->samples_max && !s->cut)
                return too_long(s, 0.0, f);
        if (want > s->samples_max)
                want = s->samples_max;
        for (; s->samples < want; s->samples++)
                s->place[s->samples] = s->place[s->samples_max + s->samples] = 0.0f;
        s->samples = want;
        return 0;
}

static int run(Sound *s, uint64_t total, Fault *f) {
        while (!s->cut || s->samples < s->samples_max) {
                int r = track_next(&s->track, f);

                if (r < 0)
                        return r;
                if (r == 0)
                        break;
                r = take_sound(s, f);
                if (r < 0)
                        return r;
                channel_progress(s->channel, s->samples, total);
        }
        if (!s->swr)
                return input_fail(s->track.in, f, "Its sound track is empty.");
        return finish(s, f);
}

int sound_decode(
        Input *in, uint64_t samples_max, bool cut, float *place, Channel *c, uint64_t *ret_samples, Fault *f) {
        CLEANUP(sound_done)
        Sound s = {.channel = c,
                .place = place,
                .samples_max = samples_max,
                .cut = cut,
                .begin = AV_NOPTS_VALUE,
                .next = AV_NOPTS_VALUE};
        AVStream *sound, *film;
        double seconds;
        int r;

        if (!in->kind->demuxer)
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE,
                        "%s: this is a picture, where sound is asked.", in->kind->name);
        r = input_open_streams(in, f);
        if (r < 0)
                return r;
        sound = track_find(in, AVMEDIA_TYPE_AUDIO);
        if (!sound)
                return input_fail(in, f, "There is no sound in this file, where sound is asked.");
        seconds = track_duration(in, sound);
        if (!cut && seconds > (double) samples_max / MEDIA_SAMPLE_RATE + 0.5)
                return too_long(&s, seconds, f);

        film = track_find(in, AVMEDIA_TYPE_VIDEO);
        s.begin = film && film->start_time != AV_NOPTS_VALUE
                          ? av_rescale_q(film->start_time, film->time_base, sound->time_base)
                          : sound->start_time;
        r = track_open(&s.track, in, sound, f);
        if (r < 0)
                return r;
        r = run(&s, seconds > 0.0 ? (uint64_t) (seconds * MEDIA_SAMPLE_RATE) : 0, f);
        if (r < 0)
                return r;

        memmove(place + s.samples, place + samples_max, s.samples * sizeof(*place));
        *ret_samples = s.samples;
        return 0;
}
