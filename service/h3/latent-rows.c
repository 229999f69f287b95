/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "service/h3/layout.h"

/* Latents to rows of patches and back. */

/* Where a row sits in the patch grid. */
typedef struct VideoPlace {
        uint64_t frame, y, x;
} VideoPlace;

static VideoPlace video_place(const H3Config *c, const H3Grid *g, uint64_t row) {
        uint64_t w = h3_grid_rows_w(c, g), per_frame = h3_grid_rows_h(c, g) * w;

        return (VideoPlace){row / per_frame, row % per_frame / w, row % w};
}

/* Padding goes round. */
static uint64_t wrapped(uint64_t i, uint64_t n) {
        return i < n ? i : i % n;
}

/* Numbers that lie side by side in a row and in the latent: nearly always two, which is why no call is made for them. */
static inline void copy_patch_line(float *to, const float *from, uint64_t n) {
        if (n == 2)
                memcpy(to, from, 2 * sizeof(*to));
        else
                memcpy(to, from, n * sizeof(*to));
}

void h3_video_to_rows(const H3Config *c, const H3Grid *g, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows) {
        const uint64_t patch_h = c->patch_h, patch_w = c->patch_w, plane = g->height * g->width;

        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, g, row);
                const float *frame = latent + p.frame * plane;
                uint64_t at = p.x * patch_w;

                for (uint64_t channel = 0; channel < c->video_channels; channel++, frame += g->frames * plane)
                        for (uint64_t ph = 0; ph < patch_h; ph++, ret_rows += patch_w) {
                                const float *line = frame + wrapped(p.y * patch_h + ph, g->height) * g->width;

                                if (at + patch_w <= g->width)
                                        copy_patch_line(ret_rows, line + at, patch_w);
                                else
                                        for (uint64_t pw = 0; pw < patch_w; pw++)
                                                ret_rows[pw] = line[wrapped(at + pw, g->width)];
                        }
        }
}

void h3_rows_to_video(const H3Config *c, const H3Grid *g, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent) {
        const uint64_t patch_h = c->patch_h, patch_w = c->patch_w, plane = g->height * g->width;

        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, g, row);
                float *frame = ret_latent + p.frame * plane;
                uint64_t at = p.x * patch_w, left = g->width - at;

                for (uint64_t channel = 0; channel < c->video_channels; channel++, frame += g->frames * plane)
                        for (uint64_t ph = 0; ph < patch_h; ph++, rows += patch_w) {
                                uint64_t y = p.y * patch_h + ph;

                                if (y < g->height) /* else padding */
                                        copy_patch_line(frame + y * g->width + at, rows, left < patch_w ? left : patch_w);
                        }
        }
}

void h3_audio_to_rows(const H3Config *c, uint64_t n_audio, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows) {
        for (uint64_t row = begin; row < end; row++)
                for (uint64_t channel = 0; channel < c->audio_channels; channel++)
                        *ret_rows++ = latent[channel * 2 * n_audio + row];
}

void h3_rows_to_audio(const H3Config *c, uint64_t n_audio, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent) {
        for (uint64_t row = begin; row < end; row++)
                for (uint64_t channel = 0; channel < c->audio_channels; channel++)
                        ret_latent[channel * 2 * n_audio + row] = *rows++;
}
