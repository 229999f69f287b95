/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/request-size.h"

#include <errno.h>
#include <math.h>

#define SHORT_EDGE 768.0
#define AREA_MAX (768.0 * 1344.0)
#define EDGE_MULTIPLE 32.0
#define ASPECT_MAX 4
#define ASPECT_NUMBER_MAX (UINT64_C(1) << 32)

int h3_request_frames(uint64_t frames, H3FilmSize *ret, Fault *f) {
        uint64_t k;

        if (frames < 1 || frames > H3_FRAMES_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%llu frames were asked for; give 1 to %u (%.2f seconds).",
                        (unsigned long long) frames, H3_FRAMES_MAX,
                        (double) H3_FRAMES_MAX / H3_FRAMES_PER_SECOND);
        k = frames <= 5 ? 0 : (frames - 5 + 16) / 17;
        ret->frames = 17 * k + 5;
        ret->latent_frames = 5 * k + 2;
        ret->audio_latents = (10 * ret->frames + 3) / 6; /* 40 / 24 of it to the nearest: never half way */
        ret->in_reference_range = ret->frames >= UINT64_C(5) * H3_FRAMES_PER_SECOND &&
                                  ret->frames <= UINT64_C(15) * H3_FRAMES_PER_SECOND;
        return 0;
}

/* To the nearest multiple, ties to the even one, by the rounding of an addition. */
static uint64_t to_multiple(double edge) {
        return (uint64_t) (((edge / EDGE_MULTIPLE + 0x1.8p52) - 0x1.8p52) * EDGE_MULTIPLE);
}

int h3_request_canvas(
        uint64_t aspect_width, uint64_t aspect_height, uint64_t *ret_width, uint64_t *ret_height, Fault *f) {
        double w = (double) aspect_width, h = (double) aspect_height, scale;

        if (aspect_width < 1 || aspect_height < 1 || aspect_width > ASPECT_NUMBER_MAX ||
                aspect_height > ASPECT_NUMBER_MAX || aspect_width > ASPECT_MAX * aspect_height ||
                aspect_height > ASPECT_MAX * aspect_width)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The aspect is %llu:%llu; expected 1:4 to 4:1.", (unsigned long long) aspect_width,
                        (unsigned long long) aspect_height);
        scale = SHORT_EDGE / (w < h ? w : h);
        w *= scale;
        h *= scale;
        if (w * h > AREA_MAX) {
                scale = sqrt(AREA_MAX / (w * h));
                w *= scale;
                h *= scale;
        }
        *ret_width = to_multiple(w);
        *ret_height = to_multiple(h);
        return 0;
}
