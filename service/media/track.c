/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/track.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

AVStream *track_find(const Input *in, enum AVMediaType type) {
        for (unsigned i = 0; i < in->format->nb_streams; i++) {
                AVStream *s = in->format->streams[i];

                if (s->codecpar->codec_type == type && !(s->disposition & AV_DISPOSITION_ATTACHED_PIC))
                        return s;
        }
        return NULL;
}

/* Matroska files that were made by libav say it in words: "00:00:01.625000000". */
static double duration_tag(const AVStream *stream) {
        const AVDictionaryEntry *e = av_dict_get(stream->metadata, "DURATION", NULL, 0);
        unsigned hours, minutes;
        double seconds;

        if (!e || sscanf(e->value, "%4u:%2u:%lf", &hours, &minutes, &seconds) != 3 ||
                !(seconds >= 0.0 && seconds < 61.0))
                return 0.0;
        return hours * 3600.0 + minutes * 60.0 + seconds;
}

double track_duration(const Input *in, const AVStream *stream) {
        /* A guess from the rate of bits is none. */
        if (in->format->duration_estimation_method == AVFMT_DURATION_FROM_BITRATE)
                return 0.0;
        if (stream->duration > 0 && stream->duration != AV_NOPTS_VALUE)
                return (double) stream->duration * av_q2d(stream->time_base);
        if (duration_tag(stream) > 0.0)
                return duration_tag(stream);
        return in->format->duration > 0 ? (double) in->format->duration / AV_TIME_BASE : 0.0;
}

int track_open(Track *t, Input *in, AVStream *stream, Fault *f) {
        *t = (Track){.in = in, .stream = stream};
        t->packet = av_packet_alloc();
        t->frame = av_frame_alloc();
        if (!t->packet || !t->frame)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to decode the file.");
        return input_open_decoder(in, stream, &t->codec, f);
}

void track_done(Track *t) {
        avcodec_free_context(&t->codec);
        av_packet_free(&t->packet);
        av_frame_free(&t->frame);
}

static int cut_off(Track *t, const char *how, Fault *f) {
        return input_fail(t->in, f,
                "The file is %s: its %s track could be read for %.2f seconds (%" PRIu64 " %s)%s", how,
                avcodec_get_name(t->stream->codecpar->codec_id), t->track_until, t->frames,
                t->codec->codec_type == AVMEDIA_TYPE_VIDEO ? "frames" : "packets",
                ". Repair it, or take a whole copy.");
}

static double end_of(const AVStream *s, const AVPacket *p) {
        int64_t at = p->pts != AV_NOPTS_VALUE ? p->pts : p->dts;

        if (at == AV_NOPTS_VALUE)
                return 0.0;
        return ((double) at - (s->start_time == AV_NOPTS_VALUE ? 0.0 : (double) s->start_time) +
                       (double) p->duration) *
               av_q2d(s->time_base);
}

/* The track says how long it is, or the file does: less than that is a file that was cut off. A track of a
 * Matroska file alone may well be shorter than the file. */
static int check_whole(Track *t, Fault *f) {
        const Input *in = t->in;
        double want, have = t->track_until;

        if (in->format->duration_estimation_method == AVFMT_DURATION_FROM_BITRATE)
                return 0;
        if (t->stream->duration > 0 && t->stream->duration != AV_NOPTS_VALUE)
                want = (double) t->stream->duration * av_q2d(t->stream->time_base);
        else {
                want = in->format->duration > 0 ? (double) in->format->duration / AV_TIME_BASE : 0.0;
                have = t->read_until;
        }
        if (have + 0.25 + want * 0.01 >= want)
                return 0;
        return cut_off(t, "cut off", f);
}

/* The next packet of the track into t->packet; 0: the end. */
static int read_packet(Track *t, Fault *f) {
        for (;;) {
                double end;
                int r;

                r = input_check_time(t->in, f);
                if (r < 0)
                        return r;
                av_packet_unref(t->packet);
                r = av_read_frame(t->in->format, t->packet);
                if (r == AVERROR_EOF)
                        return t->in->error < 0 ? cut_off(t, "damaged", f) : check_whole(t, f);
                if (r < 0)
                        return cut_off(t, "damaged or cut off", f);
                if ((unsigned) t->packet->stream_index >= t->in->format->nb_streams)
                        continue;

                end = end_of(t->in->format->streams[t->packet->stream_index], t->packet);
                if (end > t->read_until)
                        t->read_until = end;
                if (t->packet->stream_index != t->stream->index)
                        continue;
                if (t->packet->flags & AV_PKT_FLAG_CORRUPT)
                        return cut_off(t, "cut off", f);
                if (end > t->track_until)
                        t->track_until = end;
                return 1;
        }
}

/* Such files have no index, and what is before, between and behind their packets may be anything. */
static bool is_loose(const Track *t) {
        return strcmp(t->in->kind->demuxer, "mp3") == 0 || strcmp(t->in->kind->demuxer, "aac") == 0;
}

int track_next(Track *t, Fault *f) {
        for (;;) {
                int r;

                av_frame_unref(t->frame);
                r = avcodec_receive_frame(t->codec, t->frame);
                if (r == 0) {
                        t->frames++;
                        return 1;
                }
                if (r == AVERROR_EOF)
                        return 0;
                if (r != AVERROR(EAGAIN)) {
                        if (is_loose(t) && r == AVERROR_INVALIDDATA)
                                continue;
                        return cut_off(t, "damaged", f);
                }
                if (t->ended)
                        return 0;

                r = read_packet(t, f);
                if (r < 0)
                        return r;
                t->ended = r == 0;
                r = avcodec_send_packet(t->codec, t->ended ? NULL : t->packet);
                if (r < 0 && r != AVERROR_EOF && !(is_loose(t) && r == AVERROR_INVALIDDATA))
                        return cut_off(t, "damaged", f);
        }
}
