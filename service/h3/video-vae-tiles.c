/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"

/* Tiles of an axis, and what puts tiles and chunks together again (h3.md 5.3, 5.4). A product, a sum and a
 * weight are each rounded once to f32, as in the reference. */

int h3_video_split(uint64_t length, H3VideoTiling tiling, H3VideoAxis *ret, Fault *f) {
        const uint64_t step = H3_VIDEO_RATIO;
        uint64_t n, slack, at = 0;
        H3VideoAxis a = {};

        if (length == 0 || length > H3_VIDEO_PIXELS_MAX || length % step != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A height or width of %" PRIu64 " pixels; expected a multiple of 16 from 16 to %u.",
                        length, H3_VIDEO_PIXELS_MAX);
        if (tiling.tile == 0 || tiling.tile % step != 0 || tiling.min_overlap % step != 0 ||
                tiling.min_overlap >= tiling.tile || tiling.tile > H3_VIDEO_PIXELS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Tiles of %u pixels that overlap by %u; expected multiples of 16, the overlap less "
                        "than the tile. The published ones are 256 and 64.",
                        tiling.tile, tiling.min_overlap);

        a.length = (uint32_t) length;
        a.size = length < tiling.tile ? (uint32_t) length : tiling.tile;
        n = a.size == length ? 1
                             : (length - tiling.min_overlap + tiling.tile - tiling.min_overlap - 1) /
                                       (tiling.tile - tiling.min_overlap);
        if (n > H3_VIDEO_AXIS_TILES)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%" PRIu64 " pixels are %" PRIu64 " tiles of %u; at most %u. Use larger tiles.",
                        length, n, tiling.tile, H3_VIDEO_AXIS_TILES);

        /* What the tiles cover too much goes to the overlaps, 16 pixels at a time, in turn from the first.
         */
        a.n = (uint32_t) n;
        slack = n > 1 ? (tiling.tile * n - tiling.min_overlap * (n - 1) - length) / step : 0;
        for (uint64_t i = 1; i < n; i++) {
                uint64_t extra = slack / (n - 1) + (i - 1 < slack % (n - 1));

                at += tiling.tile - tiling.min_overlap - extra * step;
                a.start[i] = (uint32_t) at;
        }
        *ret = a;
        return 0;
}

int video_split_both(uint64_t height, uint64_t width, H3VideoTiling tiling, H3VideoAxis *ret_rows,
        H3VideoAxis *ret_cols, Fault *f) {
        int r;

        r = h3_video_split(height, tiling, ret_rows, f);
        return r < 0 ? r : h3_video_split(width, tiling, ret_cols, f);
}

/* ------------------------------------------------------------------------------------ blending */

/* Tiles of one chunk or clip, [frames, size, size, channels] each; axes in the unit of the tiles. */
typedef struct Mosaic {
        const H3VideoAxis *rows, *cols;
        const float *const *tiles;
        uint32_t channels;
} Mosaic;

static const float *tile_pixel(
        const Mosaic *m, uint32_t row, uint32_t col, uint64_t frame, uint64_t y, uint64_t x) {
        return m->tiles[row * m->cols->n + col] +
               ((frame * m->rows->size + y) * m->cols->size + x) * m->channels;
}

static uint32_t find_tile(const H3VideoAxis *a, uint64_t at) {
        uint32_t i = 0;

        while (i + 1 < a->n && at >= a->start[i + 1])
                i++;
        return i;
}

static float mix(float a, float b, float weight) {
        return a * (1 - weight) + b * weight;
}

/* to = other mixed with to, n numbers of one weight. */
static void mix_line(const float *other, float *to, uint64_t n, float at, float extent) {
        float weight = at / extent;

        for (uint64_t i = 0; i < n; i++)
                to[i] = mix(other[i], to[i], weight);
}

/* A tile's part of a line, n pixels: mixed with the tile above, then with the one at left; both raw. */
static void blend_part(const Mosaic *m, uint32_t row, uint32_t col, uint64_t frame, uint32_t y, uint32_t n, float *to) {
        uint32_t above = h3_video_overlap(m->rows, row), left = h3_video_overlap(m->cols, col);
        uint32_t mixed = left < n ? left : n;

        memcpy(to, tile_pixel(m, row, col, frame, y, 0), (uint64_t) n * m->channels * sizeof(float));
        if (y < above)
                mix_line(tile_pixel(m, row - 1, col, frame, m->rows->size - above + y, 0), to, (uint64_t) n * m->channels, (float) y,
                        (float) above);
        if (mixed == 0)
                return;

        const float *other = tile_pixel(m, row, col - 1, frame, y, m->cols->size - left);

        for (uint32_t x = 0; x < mixed; x++) {
                float weight = (float) x / (float) left;

                for (uint32_t c = 0; c < m->channels; c++, other++, to++)
                        *to = mix(*other, *to, weight);
        }
}

/* One line of a frame, [length of cols, channels]. */
static void blend_line(const Mosaic *m, uint64_t frame, uint64_t line, float *ret) {
        uint32_t row = find_tile(m->rows, line), y = (uint32_t) line - m->rows->start[row];

        for (uint32_t col = 0; col < m->cols->n; col++) {
                uint32_t begin = m->cols->start[col];
                uint32_t end = col + 1 < m->cols->n ? m->cols->start[col + 1] : m->cols->length;

                blend_part(m, row, col, frame, y, end - begin, ret + (uint64_t) begin * m->channels);
        }
}

/* ------------------------------------------------------------------------------------ decoding */

/* Frames of a chunk: 3 that are dropped, 17, 3 that are dropped, and the tail. */
#define LEAD_FRAMES (H3_VIDEO_TOKEN_FRAMES - H3_VIDEO_CLIP_FRAMES % H3_VIDEO_TOKEN_FRAMES)
#define TAIL_FRAME (LEAD_FRAMES + H3_VIDEO_CLIP_FRAMES + LEAD_FRAMES)

H3Range h3_video_decode_frames(const H3VideoDecodePlan *p, uint32_t chunk) {
        uint64_t begin = (uint64_t) chunk * H3_VIDEO_CLIP_FRAMES, end = begin + H3_VIDEO_CLIP_FRAMES;

        if (chunk + 1 >= p->chunks || end > p->frames)
                end = p->frames;
        return (H3Range){begin, end};
}

static float clamp_unit(float v) {
        return v > 0 ? v < 1 ? v : 1 : 0; /* NaN is 0 */
}

static void put_line(H3Pixels pixels, const float *line, uint64_t n, void *ret) {
        float *numbers = ret;
        uint8_t *bytes = ret;

        if (pixels == H3_PIXELS_NORMALISED) {
                memcpy(ret, line, n * sizeof(float));
                return;
        }
        for (uint64_t i = 0; i < n; i += 3)
                for (uint32_t c = 0; c < 3; c++) {
                        float v = clamp_unit(line[i + c] * video_pixel_std[c] + video_pixel_mean[c]);

                        if (pixels == H3_PIXELS_F32)
                                numbers[i + c] = v;
                        else /* to nearest, ties to even: adding 1.5 * 2^23 leaves no fraction */
                                bytes[i + c] = (uint8_t) (int32_t) ((v * 255 + 0x1.8p23f) - 0x1.8p23f);
                }
}

/* Frame i of those that the chunk finishes, before the cross-fade. */
static uint64_t chunk_frame(uint64_t i) {
        return i < H3_VIDEO_CLIP_FRAMES ? LEAD_FRAMES + i : TAIL_FRAME + i - H3_VIDEO_CLIP_FRAMES;
}

static void fade(const float *before, float *line, uint64_t n, uint64_t frame) {
        mix_line(before, line, n, (float) frame, H3_VIDEO_TAIL_FRAMES);
}

int h3_video_decode_blend(const H3VideoDecodePlan *p, const H3VideoBlend *b, H3Range rows) {
        const Mosaic m = {.rows = &p->rows, .cols = &p->cols, .tiles = b->tiles, .channels = 3};
        uint64_t width = p->cols.length * 3ull, height = p->rows.length;
        H3Range frames = h3_video_decode_frames(p, b->chunk);
        bool last = b->chunk + 1 == p->chunks;
        CLEANUP_FREE float *line = NULL;

        if (b->chunk >= p->chunks || rows.begin > rows.end || rows.end > height || !b->tiles || !b->frames ||
                (b->chunk > 0 && !b->tail_before) || (!last && !b->tail_after))
                return -EINVAL;
        line = malloc(width * sizeof(float));
        if (!line)
                return -ENOMEM;

        for (uint64_t i = 0; i < h3_range_size(frames); i++)
                for (uint64_t y = rows.begin; y < rows.end; y++) {
                        uint64_t at = (i * height + y) * width;

                        blend_line(&m, chunk_frame(i), y, line);
                        if (b->chunk > 0 && i < H3_VIDEO_TAIL_FRAMES)
                                fade(b->tail_before + at, line, width, i);
                        put_line(b->pixels, line, width,
                                (uint8_t *) b->frames + at * h3_pixel_size(b->pixels));
                }
        for (uint64_t i = 0; !last && i < H3_VIDEO_TAIL_FRAMES; i++)
                for (uint64_t y = rows.begin; y < rows.end; y++)
                        blend_line(&m, TAIL_FRAME + i, y, b->tail_after + (i * height + y) * width);
        return 0;
}

/* ------------------------------------------------------------------------------------ encoding */

static H3VideoAxis latent_axis(const H3VideoAxis *a) {
        H3VideoAxis l = *a;

        l.length /= H3_VIDEO_RATIO;
        l.size /= H3_VIDEO_RATIO;
        for (uint32_t i = 0; i < l.n; i++)
                l.start[i] /= H3_VIDEO_RATIO;
        return l;
}

int h3_video_encode_blend(const H3VideoVae *m, const H3VideoEncodePlan *p, uint32_t clip,
        const float *const *tiles, float *moments) {
        H3VideoAxis rows = latent_axis(&p->rows), cols = latent_axis(&p->cols);
        uint32_t channels = 2 * m->config.latent_channels;
        const Mosaic mosaic = {.rows = &rows, .cols = &cols, .tiles = tiles, .channels = channels};
        uint64_t first = (uint64_t) clip * p->clip_tokens;
        CLEANUP_FREE float *line = NULL;

        if (clip >= p->clips || !tiles || !moments)
                return -EINVAL;
        line = malloc((uint64_t) cols.length * channels * sizeof(float));
        if (!line)
                return -ENOMEM;

        for (uint64_t t = 0; t < p->clip_tokens && first + t < p->tokens; t++)
                for (uint64_t y = 0; y < rows.length; y++) {
                        blend_line(&mosaic, t, y, line);
                        for (uint64_t c = 0; c < channels; c++)
                                for (uint64_t x = 0; x < cols.length; x++)
                                        moments[((c * p->tokens + first + t) * rows.length + y) *
                                                        cols.length +
                                                x] = line[x * channels + c];
                }
        return 0;
}
