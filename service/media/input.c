/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/input.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/shared/media-wire.h"

#define IO_BUFFER (64u << 10)
#define SNIFF 16u
#define STREAMS_MAX 32

static const InputKind kind_png = {"PNG", NULL, AV_CODEC_ID_PNG},
                       kind_jpeg = {"JPEG", NULL, AV_CODEC_ID_MJPEG},
                       kind_webp = {"WebP", NULL, AV_CODEC_ID_WEBP},
                       kind_bmp = {"BMP", NULL, AV_CODEC_ID_BMP},
                       kind_gif = {"GIF", "gif", AV_CODEC_ID_NONE},
                       kind_mov = {"MP4", "mov", AV_CODEC_ID_NONE},
                       kind_matroska = {"Matroska", "matroska", AV_CODEC_ID_NONE},
                       kind_avi = {"AVI", "avi", AV_CODEC_ID_NONE},
                       kind_wav = {"WAV", "wav", AV_CODEC_ID_NONE},
                       kind_flac = {"FLAC", "flac", AV_CODEC_ID_NONE},
                       kind_ogg = {"Ogg", "ogg", AV_CODEC_ID_NONE},
                       kind_mp3 = {"MP3", "mp3", AV_CODEC_ID_NONE},
                       kind_aac = {"AAC", "aac", AV_CODEC_ID_NONE};

static const enum AVCodecID codecs[] = {
        AV_CODEC_ID_PNG,
        AV_CODEC_ID_MJPEG,
        AV_CODEC_ID_WEBP,
        AV_CODEC_ID_BMP,
        AV_CODEC_ID_GIF,
        AV_CODEC_ID_H264,
        AV_CODEC_ID_HEVC,
        AV_CODEC_ID_VP8,
        AV_CODEC_ID_VP9,
        AV_CODEC_ID_AV1,
        AV_CODEC_ID_MPEG4,
        AV_CODEC_ID_MPEG2VIDEO,
        AV_CODEC_ID_PRORES,
        AV_CODEC_ID_FFV1,
        AV_CODEC_ID_THEORA,
        AV_CODEC_ID_AAC,
        AV_CODEC_ID_MP3,
        AV_CODEC_ID_FLAC,
        AV_CODEC_ID_OPUS,
        AV_CODEC_ID_VORBIS,
        AV_CODEC_ID_ALAC,
        AV_CODEC_ID_AC3,
        AV_CODEC_ID_EAC3,
        AV_CODEC_ID_PCM_U8,
        AV_CODEC_ID_PCM_S16LE,
        AV_CODEC_ID_PCM_S16BE,
        AV_CODEC_ID_PCM_S24LE,
        AV_CODEC_ID_PCM_S24BE,
        AV_CODEC_ID_PCM_S32LE,
        AV_CODEC_ID_PCM_S32BE,
        AV_CODEC_ID_PCM_F32LE,
        AV_CODEC_ID_PCM_F32BE,
        AV_CODEC_ID_PCM_F64LE,
        AV_CODEC_ID_PCM_ALAW,
        AV_CODEC_ID_PCM_MULAW,
};

static bool has(const uint8_t *p, size_t at, const char *bytes) {
        return memcmp(p + at, bytes, strlen(bytes)) == 0;
}

static const InputKind *kind_of_riff(const uint8_t *p) {
        if (has(p, 8, "WEBP"))
                return &kind_webp;
        if (has(p, 8, "WAVE"))
                return &kind_wav;
        return has(p, 8, "AVI ") ? &kind_avi : NULL;
}

/* p: SNIFF bytes, zeros behind the file's end. */
static const InputKind *kind_of(const uint8_t *p) {
        static const char *const boxes[] = {"ftyp", "moov", "mdat", "wide", "free", "skip"};

        if (has(p, 0, "\x89PNG\r\n\x1a\n"))
                return &kind_png;
        if (has(p, 0, "\xff\xd8\xff"))
                return &kind_jpeg;
        if (has(p, 0, "GIF87a") || has(p, 0, "GIF89a"))
                return &kind_gif;
        if (has(p, 0, "RIFF"))
                return kind_of_riff(p);
        if (has(p, 0, "RF64") && has(p, 8, "WAVE"))
                return &kind_wav;
        if (has(p, 0, "\x1a\x45\xdf\xa3"))
                return &kind_matroska;
        if (has(p, 0, "fLaC"))
                return &kind_flac;
        if (has(p, 0, "OggS"))
                return &kind_ogg;
        for (size_t i = 0; i < ELEMENTSOF(boxes); i++)
                if (has(p, 4, boxes[i]))
                        return &kind_mov;
        if (has(p, 0, "BM") && p[6] == 0 && p[7] == 0 && p[8] == 0 && p[9] == 0)
                return &kind_bmp;
        if (p[0] == 0xff && (p[1] & 0xf6) == 0xf0) /* ADTS: layer 0 */
                return &kind_aac;
        if (p[0] == 0xff && (p[1] & 0xe0) == 0xe0 && (p[1] & 0x06) == 0x02) /* layer 3 */
                return &kind_mp3;
        return NULL;
}

/* Reads n bytes; fewer only at the end. */
static ssize_t read_at(Input *in, void *p, size_t n, uint64_t offset) {
        size_t done = 0;

        while (done < n) {
                ssize_t k = pread(in->fd, (uint8_t *) p + done, n - done, (off_t) (offset + done));

                if (k < 0 && errno == EINTR)
                        continue;
                if (k < 0) {
                        in->error = -errno;
                        return -errno;
                }
                if (k == 0)
                        break;
                done += (size_t) k;
        }
        return (ssize_t) done;
}

static uint64_t cpu_usec(void) {
        struct timespec t = {};

        (void) clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (uint64_t) t.tv_sec * 1000000 + (uint64_t) t.tv_nsec / 1000;
}

/* Where the sound begins behind a tag that players put in front. */
static int sniff(Input *in, const InputKind **ret, Fault *f) {
        uint8_t p[SNIFF] = {};
        uint64_t offset = 0;

        for (unsigned tags = 0; tags < 4; tags++) {
                ssize_t n;

                memset(p, 0, sizeof(p));
                n = read_at(in, p, sizeof(p), offset);
                if (n < 0)
                        return input_fail(in, f, "It cannot be read.");
                if (!has(p, 0, "ID3") || n < 10)
                        break;
                offset += 10 + ((uint64_t) (p[6] & 0x7f) << 21 | (uint64_t) (p[7] & 0x7f) << 14 |
                                       (uint64_t) (p[8] & 0x7f) << 7 | (uint64_t) (p[9] & 0x7f));
        }

        *ret = kind_of(p);
        if (offset > 0 && *ret != &kind_aac && *ret != &kind_flac)
                *ret = *ret == &kind_mp3 ? *ret : NULL;
        return 0;
}

int input_open(Input *in, int fd, Fault *f) {
        struct stat st;
        int r;

        *in = (Input){.fd = fd, .cpu_usec_max = cpu_usec() + INPUT_CPU_USEC};
        if (fstat(fd, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "The file cannot be looked at: %s.", strerror(errno));
        if (S_ISDIR(st.st_mode))
                return fault_set(f, -EISDIR, FAULT_INVALID_FILE,
                        "This is a folder, expected a file with a picture, film or sound.");
        if (!S_ISREG(st.st_mode))
                return fault_set(
                        f, -EINVAL, FAULT_INVALID_FILE, "This is no regular file; copy it to one first.");
        if (st.st_size == 0)
                return fault_set(f, -ENODATA, FAULT_INVALID_FILE, "The file is empty (0 bytes).");

        in->size = (uint64_t) st.st_size;
        in->changed = st.st_mtim;
        r = sniff(in, &in->kind, f);
        if (r < 0)
                return r;
        if (!in->kind)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "By its first bytes the file is none of: PNG, JPEG, WebP, GIF, BMP pictures; "
                        "MP4/MOV, Matroska/WebM, AVI films; "
                        "WAV, FLAC, MP3, Ogg, AAC sounds.");
        return 0;
}

void input_done(Input *in) {
        avformat_close_input(&in->format);
        if (in->io) {
                av_freep(&in->io->buffer);
                avio_context_free(&in->io);
        }
}

int input_check_unchanged(Input *in, Fault *f) {
        struct stat st;

        if (fstat(in->fd, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "The file cannot be looked at: %s.", strerror(errno));
        if ((uint64_t) st.st_size != in->size || st.st_mtim.tv_sec != in->changed.tv_sec ||
                st.st_mtim.tv_nsec != in->changed.tv_nsec)
                return fault_set(f, -ESTALE, FAULT_FILE_CHANGED,
                        "The file changed while it was read: it had %" PRIu64 " bytes, now %" PRIu64
                        ". Try again when it is complete.",
                        in->size, (uint64_t) st.st_size);
        return 0;
}

int input_check_time(Input *in, Fault *f) {
        if (!in->out_of_time && cpu_usec() < in->cpu_usec_max)
                return 0;
        in->out_of_time = true;
        return fault_set(f, -ETIME, FAULT_LIMIT,
                "Reading the file took more than %" PRIu64
                " seconds of processor time: shorten or shrink it first.",
                INPUT_CPU_USEC / 1000000);
}

int input_fail(Input *in, Fault *f, const char *format, ...) {
        char text[512];
        va_list ap;
        int r;

        if (in->error < 0)
                return fault_set(
                        f, in->error, FAULT_IO, "Reading the file failed: %s.", strerror(-in->error));
        r = input_check_unchanged(in, f);
        if (r < 0)
                return r;
        r = input_check_time(in, f);
        if (r < 0)
                return r;

        va_start(ap, format);
        (void) vsnprintf(text, sizeof(text), format, ap);
        va_end(ap);
        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s%s%s", in->kind ? in->kind->name : "",
                in->kind ? ": " : "", text);
}

int input_read_all(Input *in, AVPacket *packet, Fault *f) {
        ssize_t n;

        if (in->size > INPUT_PICTURE_BYTES)
                return fault_set(f, -EFBIG, FAULT_LIMIT,
                        "A picture of %" PRIu64 " bytes is too large, at most %" PRIu64 " are read.",
                        in->size, INPUT_PICTURE_BYTES);
        if (av_new_packet(packet, (int) in->size) < 0)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "Not enough memory for a file of %" PRIu64 " bytes.", in->size);

        n = read_at(in, packet->data, (size_t) in->size, 0);
        if (n < 0 || (uint64_t) n < in->size)
                return input_fail(in, f, "Only %zd of %" PRIu64 " bytes could be read.", n, in->size);
        packet->flags |= AV_PKT_FLAG_KEY;
        return 0;
}

static int on_read(void *userdata, uint8_t *p, int n) {
        Input *in = userdata;
        ssize_t k;

        if (input_check_time(in, NULL) < 0)
                return AVERROR_EXIT;
        if (in->position >= in->size) /* what a growing file gets later does not count */
                return AVERROR_EOF;
        if ((uint64_t) n > in->size - in->position)
                n = (int) (in->size - in->position);
        k = read_at(in, p, (size_t) n, in->position);
        if (k <= 0)
                return k < 0 ? AVERROR(EIO) : AVERROR_EOF;
        in->position += (uint64_t) k;
        return (int) k;
}

static int64_t on_seek(void *userdata, int64_t offset, int whence) {
        Input *in = userdata;

        return libraries_seek(&in->position, in->size, offset, whence);
}

static int on_interrupt(void *userdata) {
        return input_check_time(userdata, NULL) < 0;
}

/* References of a file to others are refused. */
static int on_open(
        AVFormatContext *format, AVIOContext **ret, const char *url, int flags, AVDictionary **options) {
        return AVERROR(EACCES);
}

static bool is_codec(enum AVCodecID id) {
        for (size_t i = 0; i < ELEMENTSOF(codecs); i++)
                if (codecs[i] == id)
                        return true;
        return false;
}

/* Names of the decoders of our list, with which libav looks into streams while it opens a file. */
static char *decoder_names(void) {
        char names[2048] = "";

        for (size_t i = 0; i < ELEMENTSOF(codecs); i++) {
                const AVCodec *c = avcodec_find_decoder(codecs[i]);

                if (c && strlen(names) + strlen(c->name) + 2 < sizeof(names)) {
                        (void) strcat(names, names[0] != '\0' ? "," : "");
                        (void) strcat(names, c->name);
                }
        }
        return av_strdup(names);
}

static int make_format(Input *in) {
        AVFormatContext *c = avformat_alloc_context();
        uint8_t *buffer = av_malloc(IO_BUFFER);

        in->format = c;
        if (c && buffer)
                in->io = avio_alloc_context(buffer, IO_BUFFER, 0, in, on_read, NULL, on_seek);
        if (!in->io) {
                av_free(buffer);
                return -ENOMEM;
        }
        c->pb = in->io;
        c->flags |= AVFMT_FLAG_CUSTOM_IO;
        c->io_open = on_open;
        c->interrupt_callback = (AVIOInterruptCB){.callback = on_interrupt, .opaque = in};
        c->max_streams = STREAMS_MAX;
        c->protocol_whitelist = av_strdup("none");
        c->format_whitelist = av_strdup("gif,mov,mp4,matroska,webm,avi,wav,flac,ogg,mp3,aac");
        c->codec_whitelist = decoder_names();
        return c->protocol_whitelist && c->format_whitelist && c->codec_whitelist ? 0 : -ENOMEM;
}

int input_open_streams(Input *in, Fault *f) {
        const AVInputFormat *demuxer = av_find_input_format(in->kind->demuxer);
        char words[128];
        int r;

        if (!demuxer)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The installed libavformat does not read %s files.", in->kind->name);
        if (make_format(in) < 0)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to open the file.");

        r = avformat_open_input(&in->format, NULL, demuxer, NULL);
        if (r < 0)
                return input_fail(in, f, "The file's header cannot be read (%s): it is damaged or cut off.",
                        libraries_error(r, words));
        r = avformat_find_stream_info(in->format, NULL);
        if (r < 0)
                return input_fail(in, f, "The file's tracks cannot be read (%s): it is damaged or cut off.",
                        libraries_error(r, words));
        return 0;
}

/* Before a decoder allocates a picture: its size as it really is in the stream. */
static int on_buffer(AVCodecContext *c, AVFrame *frame, int flags) {
        if (c->codec_type == AVMEDIA_TYPE_VIDEO &&
                (frame->width > (int) MEDIA_SIDE_MAX || frame->height > (int) MEDIA_SIDE_MAX))
                return AVERROR(EINVAL);
        return avcodec_default_get_buffer2(c, frame, flags);
}

int input_open_decoder(Input *in, AVStream *stream, AVCodecContext **ret, Fault *f) {
        enum AVCodecID id = stream ? stream->codecpar->codec_id : in->kind->codec;
        CLEANUP_CODEC AVCodecContext *c = NULL;
        const AVCodec *codec;
        char words[128];
        int r;

        codec = is_codec(id) ? avcodec_find_decoder(id) : NULL;
        if (!codec)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%s: the codec %s is not read here; convert the file first.", in->kind->name,
                        avcodec_get_name(id));

        c = avcodec_alloc_context3(codec);
        if (!c || (stream && avcodec_parameters_to_context(c, stream->codecpar) < 0))
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory to open a decoder.");
        c->get_buffer2 = on_buffer;
        c->max_pixels = (int64_t) MEDIA_PIXELS_MAX;
        c->thread_count = stream && c->codec_type == AVMEDIA_TYPE_VIDEO ? libraries_threads() : 1;
        if (stream)
                c->pkt_timebase = stream->time_base;
        else
                c->err_recognition = AV_EF_EXPLODE; /* a picture is whole or an error */

        r = avcodec_open2(c, codec, NULL);
        if (r < 0)
                return input_fail(in, f, "Its %s track cannot be decoded (%s).", avcodec_get_name(id),
                        libraries_error(r, words));
        *ret = STEAL_PTR(c);
        return 0;
}
