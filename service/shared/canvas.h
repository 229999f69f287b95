/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sizes of films and references: which numbers a request becomes (h3.md 4.1, 5.7). Pure arithmetic, no data.
 */

#include <stdint.h>

#include "service/shared/fault.h"

#define CANVAS_STEP 32u /* sides are multiples of it */

/* Frames of a film: rounded up to 17k + 5. 0 and more than CANVAS_FRAMES_MAX: InvalidArgument. */
#define CANVAS_FRAMES_MAX 362u
int canvas_frames(uint64_t wanted, uint32_t *ret, Fault *f);
/* Video tokens in time, T = 5 (F - 5) / 17 + 2, and audio tokens, A = round_half_even(F / 24 * 40), of F =
 * 17k + 5 frames. */
uint32_t canvas_video_tokens(uint32_t frames);
uint32_t canvas_audio_tokens(uint32_t frames);

/* A film's size as asked: rounded to multiples of CANVAS_STEP (to nearest, half up), at least one.
 * InvalidArgument for 0, more than 4:1 or a side above CANVAS_SIDE_MAX. */
#define CANVAS_SIDE_MAX 4096u
#define CANVAS_DEFAULT_WIDTH 1344u /* where neither a size nor a picture is given */
#define CANVAS_DEFAULT_HEIGHT 768u
int canvas_size(uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f);
/* The film's size where none is asked: from a picture's: short edge 768, at most 768 * 1344 pixels (both
 * sides scaled alike), then each side to the nearest multiple of CANVAS_STEP (of two the even one).
 * InvalidArgument beyond 4:1. */
int canvas_from_picture(
        uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f);

/* How references are brought in (h3.md 5.7), sides rounded as above, InvalidArgument beyond 4:1. */
typedef enum CanvasRule {
        CANVAS_REFERENCE, /* pictures: short edge 2048; clips: as canvas_from_picture() */
        CANVAS_COMFY,     /* pictures: made smaller, not larger, to a film's area; clips: smaller ones keep their size */
} CanvasRule;

/* A reference picture's size in a film of film_width x film_height. */
int canvas_of_reference(CanvasRule rule, uint64_t width, uint64_t height, uint32_t film_width, uint32_t film_height,
        uint32_t *ret_width, uint32_t *ret_height, Fault *f);
/* A reference clip's. */
int canvas_of_clip(
        CanvasRule rule, uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f);
/* The frames of a clip that count: the most 17m + 5 that are not more than there are; 0 of less than 5. */
uint64_t canvas_clip_frames(uint64_t frames);
