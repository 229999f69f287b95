/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/video.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

#define DIFFUSERS "vae/video/model.diffusers.safetensors"
#define MODEL "vae/video/model.original.safetensors"
#define CONFIG "vae/video/config.diffusers.json"

Checkpoint *video_checkpoint(void) {
        return checkpoint_of(NULL, MODEL);
}

char *video_config(void) {
        uint64_t size;

        return (char *) golden_read(NULL, CONFIG, &size);
}

int video_try_open(
        const Checkpoint *c, const char *config, uint8_t **ret_bytes, H3VideoVae **ret, Fault *f) {
        H3File files[2] = {{.name = "model.safetensors"}, {.name = "config.json"}};

        *ret_bytes = checkpoint_write(c, &files[0].size);
        files[0].bytes = *ret_bytes;
        files[1].bytes = config;
        files[1].size = config ? strlen(config) : 0;
        return h3_video_vae_open(files, config ? 2 : 1, lk_cpu_ops(LK_CPU_AUTO), ret, f);
}

bool video_data_has(const char *name) {
        const char *data = getenv("LATENT_TEST_DATA");
        char path[4096];

        (void) snprintf(path, sizeof(path), "%s/%s", data ? data : "", name);
        return access(path, R_OK) == 0;
}

static Video *open_layout(bool diffusers) {
        CLEANUP_FREE char *config = video_config();
        Video *v = calloc(1, sizeof(*v));
        Fault f = {};

        assert_non_null(v);
        v->checkpoint =
                diffusers && video_data_has(DIFFUSERS) ? checkpoint_of(NULL, DIFFUSERS) : video_checkpoint();
        if (diffusers && !video_data_has(DIFFUSERS)) {
                json_t *root = json_loads(config, 0, NULL);

                video_to_diffusers(v,
                        (uint32_t) json_integer_value(json_object_get(root, "decoder_attention_head_dim")));
                json_decref(root);
        }
        if (video_try_open(v->checkpoint, config, &v->bytes, &v->vae, &f) < 0)
                fail_msg("%s", f.text);
        return v;
}

Video *video_open(void) {
        return open_layout(false);
}

Video *video_open_diffusers(void) {
        return open_layout(true);
}

Video *video_free(Video *v) {
        if (!v)
                return NULL;
        (void) h3_video_vae_free(v->vae);
        (void) checkpoint_free(v->checkpoint);
        for (size_t i = 0; i < v->n_parts; i++)
                free(v->parts[i]);
        free(v->bytes);
        free(v);
        return NULL;
}

void video_freep(Video **v) {
        (void) video_free(*v);
}

/* ------------------------------------------------------------------------------------ the other layout */

static uint8_t *part_new(Video *v, uint64_t size) {
        uint8_t *p = malloc(size);

        assert_non_null(p);
        assert_true(v->n_parts < ELEMENTSOF(v->parts));
        v->parts[v->n_parts++] = p;
        return p;
}

/* Rows q, k, v of each head to three tensors. */
static void split_qkv(Video *v, const char *name, uint32_t head_dim) {
        const StTensor t = *checkpoint_find(v->checkpoint, name);
        const uint8_t *data = checkpoint_data(v->checkpoint, name);
        uint64_t piece = t.size / t.shape[0] * head_dim, heads = t.shape[0] / 3 / head_dim;
        int prefix = (int) (strstr(name, "to_qkv") - name);

        for (uint64_t i = 0; i < 3; i++) {
                uint8_t *part = part_new(v, t.size / 3);
                char to[128];

                for (uint64_t head = 0; head < heads; head++)
                        memcpy(part + head * piece, data + (3 * head + i) * piece, piece);
                (void) snprintf(to, sizeof(to), "%.*sto_%c%s", prefix, name, "qkv"[i],
                        name + prefix + strlen("to_qkv"));
                checkpoint_add(v->checkpoint, to, t.type, t.n_dims, t.shape[0] / 3, t.shape[1], part);
        }
        checkpoint_drop(v->checkpoint, name);
}

/* [gate ; value] to [value ; gate]. */
static void swap_halves(Video *v, const char *name, const char *to) {
        const StTensor t = *checkpoint_find(v->checkpoint, name);
        const uint8_t *data = checkpoint_data(v->checkpoint, name);
        uint8_t *part = part_new(v, t.size);

        memcpy(part, data + t.size / 2, t.size / 2);
        memcpy(part + t.size / 2, data, t.size / 2);
        checkpoint_drop(v->checkpoint, name);
        checkpoint_add(v->checkpoint, to, t.type, t.n_dims, t.shape[0], t.shape[1], part);
}

static void replace_text(char *name, size_t size, const char *from, const char *to) {
        char *at = strstr(name, from), rest[128];

        if (!at)
                return;
        (void) snprintf(rest, sizeof(rest), "%s", at + strlen(from));
        (void) snprintf(at, size - (size_t) (at - name), "%s%s", to, rest);
}

void video_to_diffusers(Video *v, uint32_t head_dim) {
        static const char *const names[][2] = {
                {"encoder.down.", "encoder.down_blocks."},
                {".block.", ".resnets."},
                {".downsample.conv.", ".downsamplers.0.conv."},
                {".nin_shortcut.", ".conv_shortcut."},
                {"decoder.x_embedder.", "decoder.proj_in."},
                {".attn.to_out.", ".attn.to_out.0."},
                {".ff.w1.", ".ff.net.0.proj."},
                {".ff.w2.", ".ff.net.2."},
        };
        char all[CHECKPOINT_TENSORS_MAX][128];
        size_t n = v->checkpoint->n;

        for (size_t i = 0; i < n; i++)
                (void) snprintf(all[i], sizeof(all[i]), "%s", v->checkpoint->names[i]);
        for (size_t i = 0; i < n; i++) {
                char to[128];

                memcpy(to, all[i], sizeof(to));
                for (size_t k = 0; k < ELEMENTSOF(names); k++)
                        replace_text(to, sizeof(to), names[k][0], names[k][1]);
                if (strstr(to, "to_qkv"))
                        split_qkv(v, all[i], head_dim);
                else if (strstr(to, ".ff.net.0.proj."))
                        swap_halves(v, all[i], to);
                else if (strcmp(to, "decoder.mask_token") == 0)
                        checkpoint_drop(v->checkpoint, to);
                else if (strcmp(to, all[i]) != 0)
                        checkpoint_rename(v->checkpoint, all[i], to);
        }
}

/* ------------------------------------------------------------------------------------ running */

H3Rank video_rank(uint32_t threads) {
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};

        assert_int_equal(rank.ops->context_new(threads, &rank.context), 0);
        return rank;
}

static void *memory_of(uint64_t size) {
        void *p = malloc(size);

        assert_non_null(p);
        return p;
}

float **video_decode_all(
        const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z, const H3StepHooks *hooks) {
        uint64_t jobs = h3_video_decode_jobs(p), n = h3_video_decode_tiles(p);
        float **tiles = memory_of(jobs * sizeof(*tiles));
        H3Rank rank = video_rank(2);
        void *work = NULL;
        Fault f = {};

        assert_int_equal(rank.ops->memory_new(rank.context, p->memory.device, &work), 0);
        for (uint64_t i = 0; i < jobs; i++) {
                tiles[i] = memory_of(p->memory.tile);
                if (h3_video_decode_tile(&rank, m, p, z, (uint32_t) (i / n), (uint32_t) (i % n), work,
                            i == 0 ? hooks : NULL, tiles[i], &f) < 0)
                        fail_msg("%s", f.text);
        }
        rank.ops->memory_free(rank.context, work);
        (void) rank.ops->context_free(rank.context);
        return tiles;
}

float **video_encode_all(const H3VideoVae *m, const H3VideoEncodePlan *p, H3Pixels pixels,
        const void *frames, const H3StepHooks *hooks) {
        uint64_t jobs = h3_video_encode_jobs(p), n = h3_video_encode_tiles(p);
        float **tiles = memory_of(jobs * sizeof(*tiles));
        H3Rank rank = video_rank(2);
        void *work = NULL;
        Fault f = {};

        assert_int_equal(rank.ops->memory_new(rank.context, p->memory.device, &work), 0);
        for (uint64_t i = 0; i < jobs; i++) {
                tiles[i] = memory_of(p->memory.tile);
                if (h3_video_encode_tile(&rank, m, p, pixels, frames, (uint32_t) (i / n), (uint32_t) (i % n),
                            work, i == 0 ? hooks : NULL, tiles[i], &f) < 0)
                        fail_msg("%s", f.text);
        }
        rank.ops->memory_free(rank.context, work);
        (void) rank.ops->context_free(rank.context);
        return tiles;
}

void video_tiles_free(float **tiles, uint64_t n) {
        for (uint64_t i = 0; i < n; i++)
                free(tiles[i]);
        free(tiles);
}

void *video_blend_all(const H3VideoDecodePlan *p, float **tiles, H3Pixels pixels, uint32_t band) {
        uint64_t frame = 3ull * p->rows.length * p->cols.length * h3_pixel_size(pixels);
        uint32_t n = h3_video_decode_tiles(p);
        uint8_t *frames = memory_of(p->frames * frame);
        float *tails[2] = {memory_of(p->memory.tail + 1), memory_of(p->memory.tail + 1)};

        for (uint32_t chunk = 0; chunk < p->chunks; chunk++)
                for (uint64_t row = 0; row < p->rows.length; row += band) {
                        uint64_t end = row + band < p->rows.length ? row + band : p->rows.length;
                        const H3VideoBlend b = {
                                .chunk = chunk,
                                .tiles = (const float *const *) tiles + (uint64_t) chunk * n,
                                .tail_before = tails[chunk % 2],
                                .tail_after = tails[(chunk + 1) % 2],
                                .pixels = pixels,
                                .frames = frames + h3_video_decode_frames(p, chunk).begin * frame,
                        };

                        assert_int_equal(h3_video_decode_blend(p, &b, (H3Range){row, end}), 0);
                }
        free(tails[0]);
        free(tails[1]);
        return frames;
}

float *video_moments_all(const H3VideoVae *m, const H3VideoEncodePlan *p, float **tiles) {
        uint64_t n = 2ull * h3_video_vae_config(m)->latent_channels * p->tokens *
                     (p->height / H3_VIDEO_RATIO) * (p->width / H3_VIDEO_RATIO);
        float *moments = memory_of(n * sizeof(float));

        for (uint32_t clip = p->clips; clip-- > 0;)
                assert_int_equal(
                        h3_video_encode_blend(m, p, clip,
                                (const float *const *) tiles + (uint64_t) clip * h3_video_encode_tiles(p),
                                moments),
                        0);
        return moments;
}

/* ------------------------------------------------------------------------------------ published numbers */

void video_tap_record(
        void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns) {
        VideoTaps *t = userdata;
        VideoTap *tap = t->taps + t->n;

        assert_true(t->n < ELEMENTSOF(t->taps));
        t->n++;
        (void) snprintf(tap->name, sizeof(tap->name), "%s", name);
        tap->values = memory_of(rows * columns * sizeof(float));
        memcpy(tap->values, values, rows * columns * sizeof(float));
        tap->rows = rows;
        tap->columns = columns;
}

void video_taps_free(VideoTaps *t) {
        for (size_t i = 0; i < t->n; i++)
                free(t->taps[i].values);
}

json_t *video_index(void) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "vae/video/index.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL);

        assert_non_null(root);
        return root;
}

uint64_t video_case_number(const json_t *c, const char *key, uint64_t otherwise) {
        const json_t *v = json_object_get(c, key);

        return json_is_integer(v) ? (uint64_t) json_integer_value(v) : otherwise;
}

H3VideoTiling video_case_tiling(const json_t *c) {
        const json_t *v = json_object_get(c, "tile");

        assert_int_equal(json_array_size(v), 2);
        return (H3VideoTiling){(uint32_t) json_integer_value(json_array_get(v, 0)),
                (uint32_t) json_integer_value(json_array_get(v, 1))};
}

bool video_has(const Golden *g, const char *name) {
        return st_header_find(g->header, name) != NULL;
}

void video_check(const Golden *g, const char *name, const float *got, uint64_t n, double rel_max,
        double largest_max) {
        uint64_t expected_n;
        const float *expected = golden_data(g, name, ST_F32, &expected_n);
        double largest, rel;

        if (n != expected_n)
                fail_msg("%s: %llu numbers, expected %llu", name, (unsigned long long) n,
                        (unsigned long long) expected_n);
        rel = golden_distance(got, expected, n, &largest);
        if (!(rel <= rel_max) || (largest_max > 0 && !(largest <= largest_max)))
                fail_msg("%s: rel %.3g, largest difference %.3g (limits %g, %g)", name, rel, largest,
                        rel_max, largest_max);
}

float *video_transposed(const float *x, uint64_t rows, uint64_t columns) {
        float *y = memory_of(rows * columns * sizeof(float));

        for (uint64_t i = 0; i < rows; i++)
                for (uint64_t k = 0; k < columns; k++)
                        y[k * rows + i] = x[i * columns + k];
        return y;
}
