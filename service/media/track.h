/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Decodes one track of a file, frame by frame. */

#include "service/media/input.h"

typedef struct Track {
        Input *in;
        AVStream *stream;
        AVCodecContext *codec;
        AVPacket *packet;
        AVFrame *frame;                 /* the one that track_next() gave */
        uint64_t frames;                /* given so far */
        double read_until, track_until; /* seconds: where what was read of the file and of this track ends */
        bool ended;
} Track;

/* The first track of a type (an album's cover is none); NULL. */
AVStream *track_find(const Input *in, enum AVMediaType type);
int track_open(Track *t, Input *in, AVStream *stream, Fault *f);
void track_done(Track *t);
/* 1: the next frame; 0: the track has ended, where the file says that it ends. */
int track_next(Track *t, Fault *f);
/* Seconds that the file says the track lasts; 0: it does not say. */
double track_duration(const Input *in, const AVStream *stream);
