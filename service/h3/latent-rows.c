/* SPDX-License-Identifier: Apache-2.0 */
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

/* Index of (channel, frame, y, x) in [C, T, H, W]. */
static uint64_t video_at(const H3Grid *g, uint64_t channel, uint64_t frame, uint64_t y, uint64_t x) {
        return ((channel * g->frames + frame) * g->height + y) * g->width + x;
}

/* Padding goes round. */
static uint64_t wrapped(uint64_t i, uint64_t n) {
        return i < n ? i : i % n;
}

void h3_video_to_rows(const H3Config *c, const H3Grid *g, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows) {
        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, g, row);

                for (uint64_t channel = 0; channel < c->video_channels; channel++)
                        for (uint64_t ph = 0; ph < c->patch_h; ph++)
                                for (uint64_t pw = 0; pw < c->patch_w; pw++) {
                                        uint64_t y = wrapped(p.y * c->patch_h + ph, g->height);
                                        uint64_t x = wrapped(p.x * c->patch_w + pw, g->width);

                                        *ret_rows++ = latent[video_at(g, channel, p.frame, y, x)];
                                }
        }
}

void h3_rows_to_video(const H3Config *c, const H3Grid *g, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent) {
        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, g, row);

                for (uint64_t channel = 0; channel < c->video_channels; channel++)
                        for (uint64_t ph = 0; ph < c->patch_h; ph++)
                                for (uint64_t pw = 0; pw < c->patch_w; pw++, rows++) {
                                        uint64_t y = p.y * c->patch_h + ph, x = p.x * c->patch_w + pw;

                                        if (y < g->height && x < g->width) /* else padding */
                                                ret_latent[video_at(g, channel, p.frame, y, x)] = *rows;
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
