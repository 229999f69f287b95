/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/video-vae-private.h"
#include "service/h3/weights.h"
#include "service/shared/cleanup.h"

/* The halves of the video VAE: a job needs one of them. */

DEFINE_CLEANUP(H3VideoVae *, h3_video_vae_free)

/* All may stay. */
static uint32_t list(uint32_t stages, H3Part *ret) {
        H3PartList l = {.parts = ret};

        h3_part_list_add_half(&l, stages);
        return l.n;
}

static uint32_t decoder_pass(const void *model, H3Pass pass, H3Part *ret) {
        const H3VideoVae *m = model;

        return list(m->config.layers, ret);
}

static uint32_t decoder_parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        *ret_staying = decoder_pass(model, H3_PASS_CODE, ret);
        return *ret_staying;
}

static uint32_t encoder_pass(const void *model, H3Pass pass, H3Part *ret) {
        return list(H3_VIDEO_LEVELS, ret);
}

static uint32_t encoder_parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        *ret_staying = list(H3_VIDEO_LEVELS, ret);
        return *ret_staying;
}

static void linear(H3Visit *v, VideoLinear *l) {
        h3_visit_linear(v, &l->w, &l->bias);
}

static void norm(H3Visit *v, VideoNorm *n) {
        h3_visit_vector(v, &n->weight);
        h3_visit_vector(v, &n->bias);
}

static void layer(H3Visit *v, VideoLayer *l) {
        VideoLinear *linears[] = {&l->q, &l->k, &l->v, &l->out, &l->gate, &l->up, &l->down};

        h3_visit_vector(v, &l->norm1);
        h3_visit_vector(v, &l->norm2);
        for (size_t i = 0; i < ELEMENTSOF(linears); i++)
                linear(v, linears[i]);
}

static void level(H3Visit *v, VideoLevel *l, uint32_t blocks) {
        for (uint32_t i = 0; i < blocks; i++) {
                VideoResBlock *b = l->blocks + i;

                norm(v, &b->norm1);
                linear(v, &b->conv1);
                norm(v, &b->norm2);
                linear(v, &b->conv2);
                linear(v, &b->shortcut);
        }
        linear(v, &l->down);
}

static int visit_decoder(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        H3VideoVae *m = model;
        H3Visit v = {f, userdata, 0};

        if (part.kind == H3_PART_STAGE && part.layer < m->config.layers)
                layer(&v, m->layers + part.layer);
        else if (part.kind == H3_PART_IN && part.layer == 0) {
                linear(&v, &m->post_quant);
                linear(&v, &m->embed);
        } else if (part.kind == H3_PART_OUT && part.layer == 0) {
                norm(&v, &m->decoder_norm);
                linear(&v, &m->proj);
        } else
                return -EINVAL;
        return v.result;
}

static int visit_encoder(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        H3VideoVae *m = model;
        H3Visit v = {f, userdata, 0};

        if (part.kind == H3_PART_STAGE && part.layer < H3_VIDEO_LEVELS)
                level(&v, m->levels + part.layer, m->config.level_blocks);
        else if (part.kind == H3_PART_IN && part.layer == 0)
                linear(&v, &m->conv_in);
        else if (part.kind == H3_PART_OUT && part.layer == 0) {
                norm(&v, &m->norm_out);
                linear(&v, &m->conv_out);
                linear(&v, &m->quant);
        } else
                return -EINVAL;
        return v.result;
}

/* What h3_video_vae_free() frees is the copy's own, but for the numbers that views point to. */
static void *copy(const void *model) {
        const H3VideoVae *base = model;
        CLEANUP(h3_video_vae_freep) H3VideoVae *m = malloc(sizeof(*m));
        size_t layers = base->config.layers * sizeof(*m->layers), blocks = base->config.level_blocks * sizeof(VideoResBlock);
        bool ok = true;

        if (!m)
                return NULL;
        *m = *base;
        m->owned = NULL;
        m->layers = NULL;
        for (size_t i = 0; i < H3_VIDEO_LEVELS; i++)
                m->levels[i].blocks = NULL;
        if (base->layers) {
                m->layers = malloc(layers > 0 ? layers : 1);
                ok = m->layers;
                if (m->layers)
                        memcpy(m->layers, base->layers, layers);
        }
        for (size_t i = 0; i < H3_VIDEO_LEVELS; i++)
                if (base->levels[i].blocks) {
                        m->levels[i].blocks = malloc(blocks > 0 ? blocks : 1);
                        ok = ok && m->levels[i].blocks;
                        if (m->levels[i].blocks)
                                memcpy(m->levels[i].blocks, base->levels[i].blocks, blocks);
                }
        return ok ? STEAL_PTR(m) : NULL;
}

static void free_copy(void *model) {
        (void) h3_video_vae_free(model);
}

const H3WeightsKind h3_weights_video_decoder = {
        .parts = decoder_parts,
        .pass = decoder_pass,
        .visit = visit_decoder,
        .copy = copy,
        .free = free_copy,
        .one_at_a_time = true,
};
const H3WeightsKind h3_weights_video_encoder = {
        .parts = encoder_parts,
        .pass = encoder_pass,
        .visit = visit_encoder,
        .copy = copy,
        .free = free_copy,
        .one_at_a_time = true,
};
