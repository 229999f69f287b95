/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "service/h3/audio-vae-private.h"
#include "service/h3/weights.h"
#include "service/shared/cleanup.h"

/* The halves of the audio VAE: a job needs one of them. */

DEFINE_CLEANUP(H3AudioVae *, h3_audio_vae_free)

static uint32_t decoder_pass(const void *model, H3Pass pass, H3Part *ret) {
        const H3AudioVae *m = model;
        H3PartList l = {.parts = ret};

        h3_part_list_add_half(&l, m->config.decoder_stages);
        return l.n;
}

static uint32_t decoder_parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        *ret_staying = decoder_pass(model, H3_PASS_CODE, ret);
        return *ret_staying;
}

static uint32_t encoder_parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        const H3AudioVae *m = model;
        H3PartList l = {.parts = ret};

        h3_part_list_add_half(&l, m->config.encoder_stages);
        h3_part_list_add(&l, H3_PART_LATENT, 0, 1);
        *ret_staying = l.n;
        return l.n;
}

/* LATENT is taken by another job. */
static uint32_t encoder_pass(const void *model, H3Pass pass, H3Part *ret) {
        uint32_t n;

        return encoder_parts(model, ret, &n);
}

static void conv(H3Visit *v, AudioConv *c) {
        h3_visit_linear(v, &c->w, &c->bias);
}

static void linear(H3Visit *v, AudioLinear *l) {
        h3_visit_linear(v, &l->w, &l->bias);
}

static void activation(H3Visit *v, AudioActivation *a) {
        h3_visit_vector(v, &a->alpha);
        h3_visit_vector(v, &a->beta);
        h3_visit_vector(v, &a->up);
        h3_visit_vector(v, &a->down);
}

static void decoder_stage(H3Visit *v, AudioStage *s) {
        conv(v, &s->up);
        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++)
                for (uint32_t k = 0; k < AUDIO_CONVS; k++) {
                        conv(v, s->blocks[i].conv + k);
                        activation(v, s->blocks[i].act + k);
                }
}

static void encoder_stage(H3Visit *v, AudioEncoderStage *s) {
        for (uint32_t i = 0; i < AUDIO_UNITS; i++)
                for (uint32_t k = 0; k < 2; k++) {
                        h3_visit_vector(v, s->units[i].alpha + k);
                        conv(v, s->units[i].conv + k);
                }
        h3_visit_vector(v, &s->alpha);
        conv(v, &s->down);
}

static void latent(H3Visit *v, H3AudioWeights *w) {
        AudioNorm *norms[] = {&w->norm1, &w->norm2, &w->norm3, &w->mlp_norm};
        AudioLinear *linears[] = {&w->proj, &w->qkv, &w->attn_proj, &w->w0, &w->w1, &w->w2, &w->mean, &w->logs};

        for (size_t i = 0; i < ELEMENTSOF(norms); i++) {
                h3_visit_vector(v, &norms[i]->weight);
                h3_visit_vector(v, &norms[i]->bias);
        }
        for (size_t i = 0; i < ELEMENTSOF(linears); i++)
                linear(v, linears[i]);
        h3_visit_matrix(v, &w->pool);
}

static int visit_decoder(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        H3AudioVae *m = model;
        H3AudioWeights *w = m->weights;
        H3Visit v = {f, userdata, 0};

        if (part.kind == H3_PART_STAGE && part.layer < m->config.decoder_stages)
                decoder_stage(&v, w->stages + part.layer);
        else if (part.kind == H3_PART_IN && part.layer == 0) {
                conv(&v, &w->dec_in);
                conv(&v, &w->dec_pre);
        } else if (part.kind == H3_PART_OUT && part.layer == 0) {
                activation(&v, &w->post);
                conv(&v, &w->dec_post);
        } else
                return -EINVAL;
        return v.result;
}

static int visit_encoder(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        H3AudioVae *m = model;
        H3AudioWeights *w = m->weights;
        H3Visit v = {f, userdata, 0};

        if (part.kind == H3_PART_STAGE && part.layer < m->config.encoder_stages)
                encoder_stage(&v, w->enc + part.layer);
        else if (part.kind == H3_PART_IN && part.layer == 0)
                conv(&v, &w->enc_first);
        else if (part.kind == H3_PART_OUT && part.layer == 0) {
                h3_visit_vector(&v, &w->enc_alpha);
                conv(&v, &w->enc_last);
        } else if (part.kind == H3_PART_LATENT && part.layer == 0)
                latent(&v, w);
        else
                return -EINVAL;
        return v.result;
}

static void *copy(const void *model) {
        const H3AudioVae *base = model;
        CLEANUP(h3_audio_vae_freep) H3AudioVae *m = malloc(sizeof(*m));

        if (!m)
                return NULL;
        *m = *base;
        m->weights = malloc(sizeof(*m->weights));
        if (!m->weights)
                return NULL;
        *m->weights = *base->weights;
        m->weights->owned = NULL; /* numbers that views point to stay the base's */
        m->weights->n_owned = 0;
        return STEAL_PTR(m);
}

static void free_copy(void *model) {
        (void) h3_audio_vae_free(model);
}

const H3WeightsKind h3_weights_audio_decoder = {
        .parts = decoder_parts,
        .pass = decoder_pass,
        .visit = visit_decoder,
        .copy = copy,
        .free = free_copy,
        .one_at_a_time = true,
};
const H3WeightsKind h3_weights_audio_encoder = {
        .parts = encoder_parts,
        .pass = encoder_pass,
        .visit = visit_encoder,
        .copy = copy,
        .free = free_copy,
        .one_at_a_time = true,
};
