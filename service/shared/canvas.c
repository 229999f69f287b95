/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/canvas.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>

#define RATIO_MAX 4u
#define SHORT_EDGE 768u
#define AREA_MAX (768u * 1344u)
#define REFERENCE_EDGE 2048u
#define CLIP 17u /* frames that become 5 tokens */
#define TAIL 5u

int canvas_frames(uint64_t wanted, uint32_t *ret, Fault *f) {
        if (wanted == 0 || wanted > CANVAS_FRAMES_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A film of %" PRIu64 " frames was asked for, expected 1 to %u (%.1f seconds at 24 frames a second).",
                        wanted, CANVAS_FRAMES_MAX, CANVAS_FRAMES_MAX / 24.0);

        *ret = wanted <= TAIL ? TAIL : ((uint32_t) wanted - TAIL + CLIP - 1) / CLIP * CLIP + TAIL;
        return 0;
}

uint32_t canvas_video_tokens(uint32_t frames) {
        return 5 * (frames - TAIL) / CLIP + 2;
}

/* F * 40 / 24 = F * 5 / 3 is never half way between two integers, so that any rule of rounding gives the same. */
uint32_t canvas_audio_tokens(uint32_t frames) {
        return (frames * 10 + 3) / 6;
}

/* Another size of the film does not help a reference, which keeps its own shape. */
#define CROP_REFERENCE "crop it first, the size of the film does not matter"

/* help: what does. */
static int check_ratio(uint64_t width, uint64_t height, const char *help, Fault *f) {
        if (width == 0 || height == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A picture of %" PRIu64 "x%" PRIu64 " pixels was asked for: both sides must be above 0.", width, height);
        if (width / RATIO_MAX > height || (width / RATIO_MAX == height && width % RATIO_MAX > 0) ||
                height / RATIO_MAX > width || (height / RATIO_MAX == width && height % RATIO_MAX > 0))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%" PRIu64 "x%" PRIu64 " pixels are more than %u:1: %s.", width, height, RATIO_MAX, help);
        return 0;
}

static uint32_t round_side(double side) {
        double steps = floor(side / CANVAS_STEP + 0.5);

        return steps < 1 ? CANVAS_STEP : (uint32_t) steps * CANVAS_STEP;
}

/* As Python's round(). */
static uint32_t round_even(double side) {
        double steps = nearbyint(side / CANVAS_STEP);

        return steps < 1 ? CANVAS_STEP : (uint32_t) steps * CANVAS_STEP;
}

int canvas_size(uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f) {
        int r;

        if (width > CANVAS_SIDE_MAX || height > CANVAS_SIDE_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A film of %" PRIu64 "x%" PRIu64 " pixels was asked for, expected sides of at most %u.", width, height,
                        CANVAS_SIDE_MAX);
        r = check_ratio(width, height, "ask for another size", f);
        if (r < 0)
                return r;

        *ret_width = round_side((double) width);
        *ret_height = round_side((double) height);
        return 0;
}

int canvas_from_picture(uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f) {
        double w = (double) width, h = (double) height, scale;
        int r;

        r = check_ratio(width, height, "crop the picture, or ask for a size", f);
        if (r < 0)
                return r;

        scale = SHORT_EDGE / (w < h ? w : h);
        if (w * scale * h * scale > AREA_MAX)
                scale = sqrt(AREA_MAX / (w * h));

        *ret_width = round_even(w * scale);
        *ret_height = round_even(h * scale);
        return 0;
}

int canvas_of_reference(CanvasRule rule, uint64_t width, uint64_t height, uint32_t film_width, uint32_t film_height,
        uint32_t *ret_width, uint32_t *ret_height, Fault *f) {
        double w = (double) width, h = (double) height, scale;
        int r;

        r = check_ratio(width, height, CROP_REFERENCE, f);
        if (r < 0)
                return r;

        if (rule == CANVAS_REFERENCE)
                scale = REFERENCE_EDGE / (w < h ? w : h);
        else
                scale = fmin(1, sqrt((double) film_width * film_height / (w * h)));

        *ret_width = round_even(w * scale);
        *ret_height = round_even(h * scale);
        return 0;
}

int canvas_of_clip(
        CanvasRule rule, uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f) {
        uint32_t w, h;
        int r;

        r = check_ratio(width, height, CROP_REFERENCE, f);
        if (r < 0)
                return r;
        r = canvas_from_picture(width, height, &w, &h, f);
        if (r < 0)
                return r;

        if (rule == CANVAS_COMFY && width * height < (uint64_t) w * h) {
                w = round_even((double) width);
                h = round_even((double) height);
        }

        *ret_width = w;
        *ret_height = h;
        return 0;
}

uint64_t canvas_clip_frames(uint64_t frames) {
        return frames < TAIL ? 0 : (frames - TAIL) / CLIP * CLIP + TAIL;
}
