/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/encode.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <libavutil/channel_layout.h>
#include <libavutil/mathematics.h>
#include <libavutil/opt.h>
#include <libswresample/swresample.h>
#include <libswscale/swscale.h>

#include "service/media/codecs.h"
#include "service/media/output.h"
#include "service/media/sheet.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define QUALITY_DEFAULT 75
#define KEY_FRAMES 48 /* every two seconds */
#define SOUND_CHUNK 4096

typedef struct Encode {
        const MediaWrite *request;
        const uint8_t *arena;
        Channel *channel;
        Output output;
        AVFormatContext *format;
        AVPacket *packet;
        uint64_t frame_bytes;

        AVCodecContext *picture;
        AVStream *picture_stream;
        AVFrame *frame;
        struct SwsContext *sws;

        AVCodecContext *sound;
        AVStream *sound_stream;
        SwrContext *swr;
        AVFrame *chunk;
        uint64_t samples,
                samples_in;   /* of the file's sound, at MEDIA_SAMPLE_RATE; that went into the resampler */
        uint64_t samples_out; /* that went into the encoder, at its rate */
        bool shift;           /* see set_start() */
        uint64_t taken_usec;  /* when the last frame was */
        float *fifo[2];       /* resampled, for whole frames of the encoder */
        unsigned n_fifo, fifo_room;
} Encode;

static void encode_done(Encode *e) {
        avcodec_free_context(&e->picture);
        avcodec_free_context(&e->sound);
        av_frame_free(&e->frame);
        av_frame_free(&e->chunk);
        av_packet_free(&e->packet);
        sws_freeContext(e->sws);
        swr_free(&e->swr);
        free(e->fifo[0]);
        free(e->fifo[1]);
        if (e->format)
                e->format->pb = NULL;
        avformat_free_context(e->format);
        output_done(&e->output);
}

static int check_place(
        const char *what, uint64_t offset, uint64_t count, uint64_t each, uint64_t arena_size, Fault *f) {
        uint64_t end;

        if (__builtin_mul_overflow(count, each, &end) || __builtin_add_overflow(offset, end, &end) ||
                end > arena_size)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%s: %" PRIu64 " x %" PRIu64 " bytes at %" PRIu64
                        " lie outside of an arena of %" PRIu64 " bytes.",
                        what, count, each, offset, arena_size);
        return 0;
}

static int check_frames(const MediaWrite *m, bool film, uint64_t arena_size, Fault *f) {
        if (m->width < 1 || m->height < 1 || m->width > MEDIA_SIDE_MAX || m->height > MEDIA_SIDE_MAX ||
                (uint64_t) m->width * m->height > MEDIA_PIXELS_MAX ||
                (film && (m->width % 2 != 0 || m->height % 2 != 0)) || m->ring_frames == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "WRITE has frames of %ux%u pixels in a ring of %" PRIu64
                        ", expected even sides of at most %u.",
                        m->width, m->height, m->ring_frames, MEDIA_SIDE_MAX);
        return check_place("frames", m->frames_offset, m->ring_frames, (uint64_t) m->width * m->height * 3,
                arena_size, f);
}

static int check_sheet(const MediaWrite *m, Fault *f) {
        uint32_t columns = m->sheet_columns, rows = m->sheet_rows;

        if (columns == 0 && rows == 0)
                return 0;

        if (columns == 0 || rows == 0 || columns > SHEET_CELLS_MAX || rows > SHEET_CELLS_MAX ||
                columns * rows > SHEET_CELLS_MAX || m->format != MEDIA_PNG || m->samples != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "WRITE asks for a contact sheet of %u x %u cells in %s: png and at most %u cells were expected.",
                        columns, rows, codecs_format_name((MediaFormat) m->format), SHEET_CELLS_MAX);
        return 0;
}

int encode_check(const MediaWrite *m, uint64_t arena_size, Fault *f) {
        bool picture, sound, film, sound_only;
        const char *name;
        int r;

        if (m->format >= _MEDIA_FORMAT_MAX || m->quality > 100)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "WRITE asks for the unknown format %u, or quality %u above 100.", m->format,
                        m->quality);
        r = codecs_check((MediaFormat) m->format, f);
        if (r < 0)
                return r;

        name = codecs_format_name((MediaFormat) m->format);
        picture = codecs_has((MediaFormat) m->format, CODECS_PICTURE);
        sound = codecs_has((MediaFormat) m->format, CODECS_SOUND);
        film = picture && sound;
        sound_only = !picture;
        if (sound_only ? (m->frames != 0 || m->samples == 0)
                       : (m->frames == 0 || m->frames > MEDIA_FRAMES_MAX))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%s holds %s: %" PRIu64 " frames and %" PRIu64 " samples do not fit.",
                        name,
                        sound_only ? "sound alone"
                        : film     ? "a film"
                                   : "one picture",
                        m->frames, m->samples);
        r = check_sheet(m, f);
        if (r < 0)
                return r;
        if (picture && !sound && m->sheet_columns == 0 && (m->frames != 1 || m->samples != 0))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "png holds one picture: %" PRIu64 " frames and %" PRIu64 " samples do not fit.",
                        m->frames, m->samples);
        if (m->samples > UINT64_C(1) << 40 || m->sound_offset % sizeof(float) != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "WRITE has %" PRIu64 " samples at %" PRIu64 ".", m->samples, m->sound_offset);
        if (m->frames > 0) {
                r = check_frames(m, film, arena_size, f);
                if (r < 0)
                        return r;
        }
        return m->samples > 0
                       ? check_place("sound", m->sound_offset, m->samples, 2 * sizeof(float), arena_size, f)
                       : 0;
}

static uint32_t quality_of(const MediaWrite *m) {
        return m->quality == 0 ? QUALITY_DEFAULT : m->quality;
}

/* Takes out of an encoder what there is and gives it to the file. */
static int drain(Encode *e, AVCodecContext *codec, AVStream *stream, Fault *f) {
        for (;;) {
                int r = avcodec_receive_packet(codec, e->packet);

                if (r == AVERROR(EAGAIN) || r == AVERROR_EOF)
                        return 0;
                if (r < 0)
                        return output_fail(&e->output, f, "Encoding failed", r);
                e->packet->stream_index = stream->index;
                if (stream == e->picture_stream && e->packet->duration == 0)
                        e->packet->duration = 1;
                if (stream == e->sound_stream && e->shift) {
                        e->packet->pts += codec->initial_padding;
                        e->packet->dts += codec->initial_padding;
                }
                av_packet_rescale_ts(e->packet, codec->time_base, stream->time_base);
                r = av_interleaved_write_frame(e->format, e->packet);
                if (r < 0 || e->output.error < 0)
                        return output_fail(&e->output, f, "Writing the file failed", r);
        }
}

static int add_stream(Encode *e, AVCodecContext *codec, AVStream **ret, Fault *f) {
        AVStream *s = avformat_new_stream(e->format, NULL);
        int r;

        if (!s)
                return output_fail(&e->output, f, "Making a track failed", AVERROR(ENOMEM));
        s->time_base = codec->time_base;
        r = avcodec_parameters_from_context(s->codecpar, codec);
        if (r < 0)
                return output_fail(&e->output, f, "Making a track failed", r);
        *ret = s;
        return 0;
}

static int open_codec(Encode *e, const AVCodec *codec, AVCodecContext **ret, Fault *f) {
        AVCodecContext *c = avcodec_alloc_context3(codec);

        if (!c)
                return output_fail(&e->output, f, "Opening an encoder failed", AVERROR(ENOMEM));
        c->flags |= AV_CODEC_FLAG_BITEXACT;
        if (e->format && (e->format->oformat->flags & AVFMT_GLOBALHEADER))
                c->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
        *ret = c;
        return 0;
}

static int open_picture_codec(Encode *e, const AVCodec *codec, Fault *f) {
        const MediaWrite *m = e->request;
        bool png = m->format == MEDIA_PNG;
        AVCodecContext *c;
        int r;

        r = open_codec(e, codec, &e->picture, f);
        if (r < 0)
                return r;
        c = e->picture;
        c->width = (int) m->width;
        c->height = (int) m->height;
        c->time_base = (AVRational){1, MEDIA_FPS};
        c->framerate = (AVRational){MEDIA_FPS, 1};
        c->sample_aspect_ratio = (AVRational){1, 1};
        c->pix_fmt = png ? AV_PIX_FMT_RGB24 : AV_PIX_FMT_YUV420P;
        c->thread_count = 1;
        if (png) { /* a contact sheet comes behind the last frame: four times as fast as by itself, and as small for most pictures */
                c->compression_level = 1;
                (void) av_opt_set(c->priv_data, "pred", "sub", 0);
        } else {
                c->gop_size = KEY_FRAMES;
                c->colorspace = AVCOL_SPC_BT709;
                c->color_primaries = AVCOL_PRI_BT709;
                c->color_trc = AVCOL_TRC_BT709;
                c->color_range = AVCOL_RANGE_MPEG;
                c->chroma_sample_location = AVCHROMA_LOC_LEFT;
                codecs_set_quality(c, quality_of(m));
        }
        r = avcodec_open2(c, codec, NULL);
        return r < 0 ? output_fail(&e->output, f, "Opening the encoder of pictures failed", r) : 0;
}

static int open_first_picture_codec(Encode *e, Fault *f) {
        const AVCodec *codec;
        int r = -ENOENT;

        /* One may be there and not open, for instance for a size that it does not take. */
        for (unsigned i = 0; r < 0 && r != -ENOMEM && (codec = codecs_find((MediaFormat) e->request->format, CODECS_PICTURE, i)); i++) {
                avcodec_free_context(&e->picture);
                r = open_picture_codec(e, codec, f);
        }
        return r;
}

static int open_picture(Encode *e, Fault *f) {
        const MediaWrite *m = e->request;
        bool png = m->format == MEDIA_PNG;
        AVCodecContext *c;
        int r;

        r = open_first_picture_codec(e, f);
        if (r < 0)
                return r;
        c = e->picture;

        e->frame = av_frame_alloc();
        if (!e->frame)
                return output_fail(&e->output, f, "Encoding failed", AVERROR(ENOMEM));
        e->frame->width = c->width;
        e->frame->height = c->height;
        e->frame->format = c->pix_fmt;
        e->frame->colorspace = c->colorspace;
        e->frame->color_range = c->color_range;
        e->frame->color_primaries = c->color_primaries;
        e->frame->color_trc = c->color_trc;
        e->frame->chroma_location = c->chroma_sample_location;
        if (png)
                return 0;

        r = add_stream(e, c, &e->picture_stream, f);
        if (r < 0)
                return r;
        e->picture_stream->avg_frame_rate = e->picture_stream->r_frame_rate = c->framerate;
        e->picture_stream->sample_aspect_ratio = c->sample_aspect_ratio;
        e->sws = sws_alloc_context();
        if (!e->sws)
                return output_fail(&e->output, f, "Encoding failed", AVERROR(ENOMEM));
        (void) av_opt_set_int(e->sws, "srcw", c->width, 0);
        (void) av_opt_set_int(e->sws, "srch", c->height, 0);
        (void) av_opt_set_int(e->sws, "src_format", AV_PIX_FMT_RGB24, 0);
        (void) av_opt_set_int(e->sws, "dstw", c->width, 0);
        (void) av_opt_set_int(e->sws, "dsth", c->height, 0);
        (void) av_opt_set_int(e->sws, "dst_format", c->pix_fmt, 0);
        (void) av_opt_set_int(e->sws, "dst_h_chr_pos", 0, 0); /* AVCHROMA_LOC_LEFT */
        (void) av_opt_set_int(e->sws, "dst_v_chr_pos", 128, 0);
        (void) av_opt_set_int(e->sws, "sws_flags",
                SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INP | SWS_FULL_CHR_H_INT | SWS_BITEXACT, 0);
        if (sws_setColorspaceDetails(e->sws, sws_getCoefficients(SWS_CS_DEFAULT), 1,
                    sws_getCoefficients(SWS_CS_ITU709), 0, 0, 1 << 16, 1 << 16) < 0 ||
                sws_init_context(e->sws, NULL, NULL) < 0)
                return output_fail(
                        &e->output, f, "Opening the conversion of colours failed", AVERROR(EINVAL));
        return 0;
}

static void set_samples(AVCodecContext *c, const char *name, uint32_t quality) {
        c->sample_rate = MEDIA_SAMPLE_RATE;
        c->sample_fmt = AV_SAMPLE_FMT_FLTP;
        if (strcmp(name, "pcm_s16le") == 0)
                c->sample_fmt = AV_SAMPLE_FMT_S16;
        else if (strcmp(name, "flac") == 0) {
                c->sample_fmt = AV_SAMPLE_FMT_S32;
                c->bits_per_raw_sample = 24;
        } else
                c->bit_rate = 64000 + (int64_t) quality * 1600; /* 184 kbit/s by default */
        if (strcmp(name, "libopus") == 0) {
                c->sample_rate = 48000;
                c->sample_fmt = AV_SAMPLE_FMT_FLT;
        }
}

static int open_sound_codec(Encode *e, const AVCodec *codec, Fault *f) {
        AVChannelLayout stereo = AV_CHANNEL_LAYOUT_STEREO;
        AVCodecContext *c;
        int r;

        r = open_codec(e, codec, &e->sound, f);
        if (r < 0)
                return r;
        c = e->sound;
        set_samples(c, codec->name, quality_of(e->request));
        c->time_base = (AVRational){1, c->sample_rate};
        (void) av_channel_layout_copy(&c->ch_layout, &stereo);
        r = avcodec_open2(c, codec, NULL);
        return r < 0 ? output_fail(&e->output, f, "Opening the encoder of sound failed", r) : 0;
}

static int open_sound(Encode *e, Fault *f) {
        AVChannelLayout stereo = AV_CHANNEL_LAYOUT_STEREO;
        const AVCodec *codec;
        AVCodecContext *c;
        int r = -ENOENT;

        for (unsigned i = 0; r < 0 && r != -ENOMEM && (codec = codecs_find((MediaFormat) e->request->format, CODECS_SOUND, i)); i++) {
                avcodec_free_context(&e->sound);
                r = open_sound_codec(e, codec, f);
        }
        if (r < 0)
                return r;
        c = e->sound;

        e->fifo_room = SOUND_CHUNK * 2 + 65536;
        e->fifo[0] = malloc(e->fifo_room * sizeof(float));
        e->fifo[1] = malloc(e->fifo_room * sizeof(float));
        e->chunk = av_frame_alloc();
        if (!e->chunk || !e->fifo[0] || !e->fifo[1])
                return output_fail(&e->output, f, "Encoding failed", AVERROR(ENOMEM));
        if (c->sample_rate != MEDIA_SAMPLE_RATE) {
                r = swr_alloc_set_opts2(&e->swr, &stereo, AV_SAMPLE_FMT_FLTP, c->sample_rate, &stereo,
                        AV_SAMPLE_FMT_FLTP, MEDIA_SAMPLE_RATE, 0, NULL);
                if (r >= 0)
                        r = swr_init(e->swr);
                if (r < 0)
                        return output_fail(&e->output, f, "Opening the resampler failed", r);
        }
        return add_stream(e, c, &e->sound_stream, f);
}

/* One picture of the arena for the encoder; afterwards the arena's is not needed any more. */
static int fill_frame(Encode *e, uint64_t i, Fault *f) {
        const MediaWrite *m = e->request;
        const uint8_t *rgb = e->arena + m->frames_offset + i % m->ring_frames * e->frame_bytes;
        int stride = (int) m->width * 3, r;

        av_buffer_unref(&e->frame->buf[0]);
        av_buffer_unref(&e->frame->buf[1]);
        av_buffer_unref(&e->frame->buf[2]);
        r = av_frame_get_buffer(e->frame, 0);
        if (r < 0)
                return output_fail(&e->output, f, "Encoding failed", r);
        e->frame->pts = (int64_t) i;
        if (e->sws) {
                r = sws_scale(e->sws, (const uint8_t *const[]){rgb, NULL, NULL, NULL},
                        (int[]){stride, 0, 0, 0}, 0, (int) m->height, e->frame->data, e->frame->linesize);
                return r == (int) m->height ? 0 : output_fail(&e->output, f, "Converting a frame failed", r);
        }
        for (uint32_t y = 0; y < m->height; y++)
                memcpy(e->frame->data[0] + (ptrdiff_t) y * e->frame->linesize[0],
                        rgb + (size_t) y * (size_t) stride, (size_t) stride);
        return 0;
}

static float clip(float x) {
        return x > 1.0f ? 1.0f : x < -1.0f ? -1.0f : x;
}

static int32_t to_int(float x, double scale, double max) {
        double v = rint((double) x * scale);

        return (int32_t) (v > max ? max : v < -scale ? -scale : v);
}

/* n samples of the fifo for the encoder, in the layout it wants. */
static int fill_chunk(Encode *e, unsigned n, Fault *f) {
        AVCodecContext *c = e->sound;
        int r;

        av_frame_unref(e->chunk);
        e->chunk->nb_samples = (int) n;
        e->chunk->format = c->sample_fmt;
        e->chunk->sample_rate = c->sample_rate;
        (void) av_channel_layout_copy(&e->chunk->ch_layout, &c->ch_layout);
        r = av_frame_get_buffer(e->chunk, 0);
        if (r < 0)
                return output_fail(&e->output, f, "Encoding failed", r);
        e->chunk->pts = (int64_t) e->samples_out;
        for (unsigned side = 0; side < 2; side++)
                for (unsigned i = 0; i < n; i++) {
                        float x = e->fifo[side][i];

                        switch (c->sample_fmt) {
                        case AV_SAMPLE_FMT_S16:
                                ((int16_t *) (void *) e->chunk->data[0])[i * 2 + side] =
                                        (int16_t) to_int(x, 32768.0, 32767.0);
                                break;
                        case AV_SAMPLE_FMT_S32: /* the 24 bits of FLAC are the upper ones */
                                ((int32_t *) (void *) e->chunk->data[0])[i * 2 + side] =
                                        to_int(x, 8388608.0, 8388607.0) * 256;
                                break;
                        case AV_SAMPLE_FMT_FLT:
                                ((float *) (void *) e->chunk->data[0])[i * 2 + side] = clip(x);
                                break;
                        default:
                                ((float *) (void *) e->chunk->data[side])[i] = clip(x);
                        }
                }
        return 0;
}

/* Gives whole frames of the fifo to the encoder; all of it at the end. */
static int encode_fifo(Encode *e, bool end, Fault *f) {
        unsigned size = e->sound->frame_size > 0 ? (unsigned) e->sound->frame_size : SOUND_CHUNK;

        while (e->n_fifo >= size || (end && e->n_fifo > 0)) {
                unsigned n = e->n_fifo < size ? e->n_fifo : size;
                int r;

                r = fill_chunk(e, n, f);
                if (r < 0)
                        return r;
                e->samples_out += n;
                e->n_fifo -= n;
                for (unsigned side = 0; side < 2; side++)
                        memmove(e->fifo[side], e->fifo[side] + n, e->n_fifo * sizeof(float));
                r = avcodec_send_frame(e->sound, e->chunk);
                if (r < 0)
                        return output_fail(&e->output, f, "Encoding the sound failed", r);
                r = drain(e, e->sound, e->sound_stream, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* The next n samples of the arena, silence behind its end. Read once: a client may change them meanwhile. */
static int copy_samples(const Encode *e, unsigned n, float *const *to, Fault *f) {
        const MediaWrite *m = e->request;

        for (unsigned side = 0; side < 2; side++) {
                const float *from =
                        (const float *) (const void *) (e->arena + m->sound_offset) + side * m->samples;

                for (unsigned i = 0; i < n; i++) {
                        uint64_t at = e->samples_in + i;

                        to[side][i] = at < m->samples ? *(const volatile float *) (from + at) : 0.0f;
                        if (!isfinite(to[side][i]))
                                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                        "sound[%u, %" PRIu64 "] is NaN or infinite.", side, at);
                }
        }
        return 0;
}

/* Encodes the sound up to (not much beyond) sample `until` of the file's. */
static int encode_sound(Encode *e, uint64_t until, Fault *f) {
        while (e->samples_in < until) {
                unsigned n = until - e->samples_in > SOUND_CHUNK ? SOUND_CHUNK
                                                                 : (unsigned) (until - e->samples_in);
                float *tail[2] = {e->fifo[0] + e->n_fifo, e->fifo[1] + e->n_fifo};
                float left[SOUND_CHUNK], right[SOUND_CHUNK], *in[2] = {left, right};
                int k, r;

                r = copy_samples(e, n, e->swr ? in : tail, f);
                if (r < 0)
                        return r;
                k = (int) n;
                if (e->swr)
                        k = swr_convert(e->swr, (uint8_t **) tail, (int) (e->fifo_room - e->n_fifo),
                                (const uint8_t **) in, (int) n);
                if (k < 0)
                        return output_fail(&e->output, f, "Resampling failed", k);
                e->samples_in += n;
                e->n_fifo += (unsigned) k;
                r = encode_fifo(e, false, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* The rest of it: to the sample what it lasts. */
static int finish_sound(Encode *e, Fault *f) {
        uint64_t want =
                (uint64_t) av_rescale((int64_t) e->samples, e->sound->sample_rate, MEDIA_SAMPLE_RATE);
        int r;

        r = encode_sound(e, e->samples, f);
        if (r < 0)
                return r;
        if (e->swr) {
                float *tail[2] = {e->fifo[0] + e->n_fifo, e->fifo[1] + e->n_fifo};
                int k = swr_convert(e->swr, (uint8_t **) tail, (int) (e->fifo_room - e->n_fifo), NULL, 0);

                if (k < 0)
                        return output_fail(&e->output, f, "Resampling failed", k);
                e->n_fifo += (unsigned) k;
                for (; e->samples_out + e->n_fifo < want && e->n_fifo < e->fifo_room; e->n_fifo++)
                        e->fifo[0][e->n_fifo] = e->fifo[1][e->n_fifo] = 0.0f;
                if (e->samples_out + e->n_fifo > want)
                        e->n_fifo = (unsigned) (want - e->samples_out);
        }
        r = encode_fifo(e, true, f);
        if (r < 0)
                return r;
        r = avcodec_send_frame(e->sound, NULL);
        return r < 0 ? output_fail(&e->output, f, "Encoding the sound failed", r)
                     : drain(e, e->sound, e->sound_stream, f);
}

/* Room for the index in front of an MP4, which is written last: players can begin before they have all of
 * the file, and nothing has to be moved, for which the file would have to be readable. */
static int64_t index_room(const Encode *e) {
        uint64_t packets = e->request->frames, sound = e->sound ? e->samples * 48 / 32 / 960 + 16 : 0;

        return (int64_t) (8192 + packets * 48 + sound * 40);
}

static int begin_file(Encode *e, Fault *f) {
        AVDictionary *options = NULL;
        char room[32];
        int r;

        if (e->request->title[0] != '\0')
                (void) av_dict_set(&e->format->metadata, "title", e->request->title, 0);
        if (e->request->format == MEDIA_MP4) {
                (void) snprintf(room, sizeof(room), "%" PRId64, index_room(e));
                (void) av_dict_set(&options, "moov_size", room, 0);
        }
        r = avformat_write_header(e->format, &options);
        av_dict_free(&options);
        return r < 0 || e->output.error < 0 ? output_fail(&e->output, f, "Writing the header failed", r) : 0;
}

/* Opus begins with silence before time 0. Matroska's times count from that silence on (CodecDelay), which the muxer
 * of FFmpeg 6 and older leaves to us: it would move the film instead, and part it from its sound. An MP4 has an edit
 * list. */
static void set_start(Encode *e) {
#if LIBAVFORMAT_VERSION_MAJOR < 61
        e->shift = e->picture && e->sound && strcmp(e->sound->codec->name, "libopus") == 0 && e->request->format != MEDIA_MP4;
#endif
}

static int open_format(Encode *e, Fault *f) {
        const MediaWrite *m = e->request;
        int r;

        r = avformat_alloc_output_context2(&e->format, NULL, codecs_format_muxer((MediaFormat) m->format), NULL);
        if (r < 0)
                return output_fail(&e->output, f, "Opening the format failed", r);
        e->format->pb = e->output.io;
        e->format->flags |= AVFMT_FLAG_CUSTOM_IO | AVFMT_FLAG_BITEXACT;
        e->format->max_interleave_delta = 0; /* sound may come after the last frame; packets wait for it */

        if (codecs_has((MediaFormat) m->format, CODECS_PICTURE)) {
                r = open_picture(e, f);
                if (r < 0)
                        return r;
        }
        e->samples = m->frames > 0 ? m->frames * MEDIA_SAMPLE_RATE / MEDIA_FPS : m->samples;
        if (m->samples > 0) {
                r = open_sound(e, f);
                if (r < 0)
                        return r;
        }
        set_start(e);
        return begin_file(e, f);
}

/* Sound goes along with the frames where it is there already, so that little of either waits for the other.
 */
static int follow_with_sound(Encode *e, uint64_t frames, Fault *f) {
        uint64_t until = (frames + MEDIA_FPS / 2) * MEDIA_SAMPLE_RATE / MEDIA_FPS;

        if (!e->sound || !e->channel->sound_ready)
                return 0;
        return encode_sound(e, until < e->samples ? until : e->samples, f);
}

static int encode_frames(Encode *e, Fault *f) {
        uint64_t n = e->request->frames;
        int r;

        for (uint64_t i = 0; i < n; i++) {
                r = channel_wait_frame(e->channel, i, f);
                if (r < 0)
                        return r;
                r = fill_frame(e, i, f);
                if (r < 0)
                        return r;
                channel_taken(e->channel, i + 1);
                r = avcodec_send_frame(e->picture, e->frame);
                if (r < 0)
                        return output_fail(&e->output, f, "Encoding a frame failed", r);
                r = drain(e, e->picture, e->picture_stream, f);
                if (r < 0)
                        return r;
                r = channel_take_in(e->channel, f);
                if (r < 0)
                        return r;
                r = follow_with_sound(e, i + 1, f);
                if (r < 0)
                        return r;
                channel_progress(e->channel, i + 1, n);
        }
        e->taken_usec = clock_usec();
        r = avcodec_send_frame(e->picture, NULL);
        return r < 0 ? output_fail(&e->output, f, "Encoding the film failed", r)
                     : drain(e, e->picture, e->picture_stream, f);
}

static int encode_film(Encode *e, Fault *f) {
        int r;

        r = open_format(e, f);
        if (r < 0)
                return r;
        if (e->picture) {
                r = encode_frames(e, f);
                if (r < 0)
                        return r;
        }
        if (e->sound) {
                r = channel_wait_sound(e->channel, f);
                if (r < 0)
                        return r;
                r = finish_sound(e, f);
                if (r < 0)
                        return r;
        }
        r = av_write_trailer(e->format);
        return r < 0 || e->output.error < 0 ? output_fail(&e->output, f, "Completing the file failed", r)
                                            : 0;
}

static int encode_png(Encode *e, Fault *f) {
        int r;

        r = open_picture(e, f);
        if (r < 0)
                return r;
        r = channel_wait_frame(e->channel, 0, f);
        if (r < 0)
                return r;
        r = fill_frame(e, 0, f);
        if (r < 0)
                return r;
        channel_taken(e->channel, 1);
        r = avcodec_send_frame(e->picture, e->frame);
        if (r >= 0)
                r = avcodec_send_frame(e->picture, NULL);
        if (r >= 0)
                r = avcodec_receive_packet(e->picture, e->packet);
        if (r < 0)
                return output_fail(&e->output, f, "Encoding the picture failed", r);
        return output_write(&e->output, e->packet->data, (size_t) e->packet->size, f);
}

int encode_run(const MediaWrite *m, int fd, const uint8_t *arena, Channel *c, MediaDone *ret, Fault *f) {
        CLEANUP(encode_done)
        Encode e = {.request = m,
                .arena = arena,
                .channel = c,
                .frame_bytes = (uint64_t) m->width * m->height * 3};
        uint64_t encoded_usec;
        int r;

        r = output_open(&e.output, fd, m->again != 0, f);
        if (r < 0)
                return r;
        e.packet = av_packet_alloc();
        if (!e.packet)
                return output_fail(&e.output, f, "Encoding failed", AVERROR(ENOMEM));

        r = m->format == MEDIA_PNG ? encode_png(&e, f) : encode_film(&e, f);
        if (r < 0)
                return r;
        encoded_usec = clock_usec();
        r = output_finish(&e.output, f);
        if (r < 0)
                return r;
        if (e.taken_usec > 0)
                log_debug("After the last frame %" PRIu64 " ms of encoding, and %" PRIu64 " ms until %" PRIu64 " bytes were on the disk.",
                        (encoded_usec - e.taken_usec) / 1000, (clock_usec() - encoded_usec) / 1000, e.output.size);

        *ret = (MediaDone){.header = ret->header,
                .width = m->frames > 0 ? m->width : 0,
                .height = m->frames > 0 ? m->height : 0,
                .frames = m->frames,
                .samples = e.sound ? e.samples : 0,
                .bytes = e.output.size};
        return 0;
}
