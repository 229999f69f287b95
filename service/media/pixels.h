/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Decoded pictures to U8 RGB: colour matrices and ranges as the picture says (untagged: BT.709 from 720
 * lines on, else BT.601; JPEG full range), transparency over black, upright. Transfer functions are not
 * converted. */

#include <stdbool.h>
#include <stdint.h>

#include "service/media/libraries.h"
#include "service/shared/fault.h"
#include "service/shared/media-wire.h"

struct SwsContext;

/* How a picture is turned before it is seen: first rows and columns change places, then the axes of the
 * result are reversed. */
typedef struct PixelsTurn {
        bool swap, flip_x, flip_y;
} PixelsTurn;

typedef struct Pixels {
        uint8_t *rgb; /* [height, width, 3] */
        size_t room;
        uint32_t width, height;
        uint32_t shown_width; /* width with square pixels */
        struct SwsContext *sws;
        uint8_t *scratch;
        size_t scratch_room;
} Pixels;

void pixels_done(Pixels *p);

/* Of a display matrix (9 numbers of libavutil/display.h). */
PixelsTurn pixels_turn_from_matrix(const int32_t *matrix);
/* Of the EXIF tag, 1 to 8; others are 1. */
PixelsTurn pixels_turn_from_exif(int orientation);

/* Replaces what p holds. turn is the track's; what the frame says itself comes first. */
int pixels_take(Pixels *p, const AVFrame *frame, PixelsTurn turn, AVRational aspect, Fault *f);
/* Resizes to width x height (MediaFit): to [height, width, 3]. */
int pixels_fit(const Pixels *p, MediaFit fit, uint32_t width, uint32_t height, uint8_t *to, Fault *f);
