/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Messages between latentd and latent-media: one SOCK_SEQPACKET datagram each, fixed structs, native byte order (both ends are of
 * one build). A process serves one request and ends: what a hostile file does to it reaches nobody else's.
 *
 *   latent-media: HELLO
 *   latentd:      READ (fds: file; arena, none with MEDIA_PROBE) or WRITE (fds: file, arena)
 *   READ:  latent-media: PROGRESS (may be dropped), then DONE or ERROR
 *   WRITE: latentd: FRAMES whenever more frames, or the sound, are in the arena
 *          latent-media: TAKEN when frames are not needed any more, then DONE or ERROR
 *
 * The connection's end cancels. Truncation, a wrong size, type, version or number of descriptors is a protocol error: the other
 * side is dropped. Neither side blocks in a send. The file is a regular file that the client opened: read-only for READ, write-only or
 * read-write and empty for WRITE; latent-media seeks in it by offsets of its own (pread, pwrite) and never trusts its size. The arena
 * is a memfd of latentd, whose content clients may change at any time. */

#include <stddef.h>
#include <stdint.h>

#include "service/shared/fault.h"

#define MEDIA_VERSION 1u
#define MEDIA_MESSAGE_MAX 4096u
#define MEDIA_FDS_MAX 2
#define MEDIA_FPS 24        /* of all films and clips that leave or enter */
#define MEDIA_SAMPLE_RATE 32000
#define MEDIA_SIDE_MAX 16384 /* pixels */
#define MEDIA_PIXELS_MAX (UINT64_C(1) << 27) /* of one picture */
#define MEDIA_FRAMES_MAX (UINT64_C(1) << 20)

typedef enum MediaType {
        MEDIA_INVALID,
        /* from latent-media */
        MEDIA_HELLO,
        MEDIA_PROGRESS,
        MEDIA_TAKEN,
        MEDIA_DONE,
        MEDIA_ERROR,
        /* to latent-media */
        MEDIA_READ = 32,
        MEDIA_WRITE,
        MEDIA_FRAMES,
        _MEDIA_TYPE_MAX,
} MediaType;

typedef struct MediaHeader {
        uint32_t size;
        uint16_t type;
        uint16_t version;
} MediaHeader;

typedef struct MediaHello {
        MediaHeader header;
        char build_id[64]; /* LATENTD_VERSION */
        char libraries[192]; /* "libavformat 59.27, libavcodec 59.37, ..." for the log */
        char formats[256];   /* that WRITE takes here, with their encoders: "mp4 (libx264, aac), webm (...)" */
        int32_t pid;
        uint32_t reserved;
} MediaHello;

/* What is read. */
typedef enum MediaWhat {
        MEDIA_PROBE,   /* nothing: DONE says what is in the file */
        MEDIA_PICTURE, /* one picture (of an animation or film the first), its orientation applied, over black where transparent */
        MEDIA_CLIP,    /* pictures at MEDIA_FPS by dropping and repeating whole ones: each from slot = floor(time * 24 + 0.5) to the
                        * next one's, the last until its time is over (h3.md 5.7). More than frames_max are not read */
        MEDIA_SOUND,   /* all of it (but see cut) at MEDIA_SAMPLE_RATE, stereo; mono is on both sides */
        _MEDIA_WHAT_MAX,
} MediaWhat;

/* How pictures get to width x height, all by Lanczos as PIL has it (h3.md 5.7). */
typedef enum MediaFit {
        MEDIA_FIT_STRETCH, /* to exactly that */
        MEDIA_FIT_COVER,   /* scaled until both sides are covered, sizes rounded, centre cut with floor((size - side) / 2) */
        _MEDIA_FIT_MAX,
} MediaFit;

typedef struct MediaRead {
        MediaHeader header;
        uint32_t what;     /* MediaWhat */
        uint32_t fit;      /* MediaFit */
        uint32_t width, height;
        uint64_t frames_max; /* CLIP: no more than these */
        uint64_t samples_max; /* SOUND: per channel */
        uint32_t cut;         /* SOUND: what comes behind samples_max is left out; 0: it is an error */
        uint32_t reserved;
        /* Place in the arena, large enough for frames_max or samples_max: U8 [frames, height, width, 3] RGB; F32 [2, samples], dense, of
         * the samples that DONE says (room behind them is undefined). */
        uint64_t offset, size;
} MediaRead;

typedef enum MediaFormat {
        MEDIA_MP4,  /* H.264 (else AV1, else VP9), AAC (else Opus) */
        MEDIA_WEBM, /* VP9 (else AV1), Opus (else Vorbis) */
        MEDIA_MKV,  /* pictures as MP4, Opus (else FLAC) */
        MEDIA_PNG,  /* one picture: of one frame, or with sheet_columns a contact sheet of all */
        MEDIA_WAV,  /* sound only, 16 bit */
        MEDIA_FLAC, /* likewise, 24 bit */
        _MEDIA_FORMAT_MAX,
} MediaFormat;

typedef struct MediaWrite {
        MediaHeader header;
        uint32_t format;        /* MediaFormat */
        uint32_t width, height; /* even, of a film */
        uint32_t quality;       /* 0: default; 1 .. 100, higher is better */
        uint64_t frames;        /* of the film; 0: sound alone */
        uint64_t samples;       /* per channel at MEDIA_SAMPLE_RATE; 0: silent film. Trimmed or padded to the film's length */
        /* Frame i is U8 [height, width, 3] at frames_offset + i % ring_frames * height * width * 3. */
        uint64_t frames_offset, ring_frames;
        uint64_t sound_offset; /* F32 [2, samples] */
        char title[256];       /* metadata; "" none */
        uint32_t again;        /* 1: the file holds what an earlier try left, and is emptied first */
        uint32_t reserved;
        uint32_t sheet_columns, sheet_rows; /* PNG: cells of a contact sheet; 0: none */
} MediaWrite;

typedef struct MediaFrames {
        MediaHeader header;
        uint64_t ready; /* frames of the film that are in the arena, from the first on; those before the last TAKEN are not any more */
        uint32_t sound; /* likewise the sound, all of it */
        uint32_t reserved;
} MediaFrames;

typedef struct MediaTaken {
        MediaHeader header;
        uint64_t frames; /* these are not needed any more */
} MediaTaken;

typedef struct MediaProgress {
        MediaHeader header;
        uint64_t done, total; /* frames or samples; total 0: not known */
} MediaProgress;

typedef struct MediaDone {
        MediaHeader header;
        /* PROBE: what is in the file. READ: what is in the arena. WRITE: what was written. */
        uint32_t width, height;
        uint64_t frames;  /* PROBE: at MEDIA_FPS; a picture, or a film of unknown length: 1; 0: no picture */
        uint64_t samples; /* at MEDIA_SAMPLE_RATE; PROBE: of a sound of unknown length: 1; 0: no sound */
        uint64_t bytes;   /* WRITE: of the file */
        char format[64];  /* PROBE: "png", "mov,mp4,m4a,3gp,3g2,mj2 (h264, aac)" */
        uint32_t still;   /* PROBE: one picture, no film */
        uint32_t reserved;
} MediaDone;

typedef struct MediaError {
        MediaHeader header;
        Fault fault;
} MediaError;

typedef union MediaMessage {
        MediaHeader header;
        MediaHello hello;
        MediaRead read;
        MediaWrite write;
        MediaFrames frames;
        MediaTaken taken;
        MediaProgress progress;
        MediaDone done;
        MediaError error;
        uint8_t bytes[MEDIA_MESSAGE_MAX];
} MediaMessage;

_Static_assert(sizeof(MediaMessage) == MEDIA_MESSAGE_MAX, "a message does not fit");

/* Zeroes m and fills the header; returns its size (0: unknown type). */
uint32_t media_init(MediaMessage *m, MediaType type);
const char *media_type_name(uint16_t type); /* "?" */

/* Sends one message, never blocks. fds: as many as the type carries, the second may be -1 for MEDIA_PROBE. -EAGAIN, -EPIPE, -EINVAL. */
int media_send(int socket, const MediaMessage *m, const int *fds, size_t n_fds);
/* 1: a valid message (version, size and type checked, strings ended, padding zeroed), ret_fds filled with its descriptors
 * (O_CLOEXEC) or -EBADF; 0: end of file; -EAGAIN; -EBADMSG with f: protocol error, descriptors closed. */
int media_receive(int socket, MediaMessage *ret, int ret_fds[static MEDIA_FDS_MAX], Fault *f);
