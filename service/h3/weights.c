/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/weights.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)

static void feed(H3Visit *v, H3Block *b) {
        h3_visit_vector(v, &b->norm1);
        h3_visit_matrix(v, &b->attn.q);
        h3_visit_matrix(v, &b->attn.k);
        h3_visit_matrix(v, &b->attn.v);
        h3_visit_matrix(v, &b->attn.gate);
        h3_visit_vector(v, &b->attn.q_norm);
        h3_visit_vector(v, &b->attn.k_norm);
}

static void finish(H3Visit *v, H3Block *b) {
        h3_visit_matrix(v, &b->attn.out);
        h3_visit_vector(v, &b->norm2);
        h3_visit_matrix(v, &b->mlp.gate);
        h3_visit_matrix(v, &b->mlp.up);
        h3_visit_matrix(v, &b->mlp.down);
}

static void text(H3Visit *v, H3Model *m) {
        h3_visit_linear(v, &m->text_in, &m->text_in_bias);
        for (uint32_t i = 0; i < m->config.refiner_layers; i++) {
                feed(v, m->refiner + i);
                finish(v, m->refiner + i);
        }
        h3_visit_vector(v, &m->refiner_norm);
}

static void ends(H3Visit *v, H3Model *m) {
        h3_visit_linear(v, &m->video_in, &m->video_in_bias);
        h3_visit_linear(v, &m->audio_in, &m->audio_in_bias);
        h3_visit_vector(v, &m->final_norm);
        h3_visit_linear(v, &m->video_out, &m->video_out_bias);
        h3_visit_linear(v, &m->audio_out, &m->audio_out_bias);
}

static bool part_is_there(const H3Model *m, H3Part part) {
        switch (part.kind) {
        case H3_PART_ADALN:
                return part.layer <= m->config.layers;
        case H3_PART_FEED:
        case H3_PART_FINISH:
                return part.layer < m->config.layers;
        default:
                return part.layer == 0;
        }
}

int h3_model_visit(H3Model *m, H3Part part, H3SlotFunc f, void *userdata) {
        H3Visit v = {f, userdata, 0};

        if (!part_is_there(m, part))
                return -EINVAL;

        switch (part.kind) {

        case H3_PART_TEXT:
                text(&v, m);
                break;

        case H3_PART_TIME:
                h3_visit_linear(&v, &m->time_1, &m->time_1_bias);
                h3_visit_linear(&v, &m->time_2, &m->time_2_bias);
                break;

        case H3_PART_ADALN:
                if (part.layer < m->config.layers)
                        h3_visit_linear(&v, &m->blocks[part.layer].adaln, &m->blocks[part.layer].adaln_bias);
                else
                        h3_visit_linear(&v, &m->final_adaln, &m->final_adaln_bias);
                break;

        case H3_PART_ENDS:
                ends(&v, m);
                break;

        case H3_PART_FEED:
                feed(&v, m->blocks + part.layer);
                break;

        case H3_PART_FINISH:
                finish(&v, m->blocks + part.layer);
                break;

        default:
                return -EINVAL;
        }
        return v.result;
}

static void add(H3PartList *l, H3PartKind kind, uint32_t layer) {
        h3_part_list_add(l, kind, layer, 1);
}

uint32_t h3_pass_parts(const H3Model *m, H3Pass pass, H3Part *ret) {
        uint32_t layers = m->config.layers;
        bool rows = pass != H3_PASS_STEP_TABLE; /* of modulation are computed */
        H3PartList l = {.parts = ret};

        if (pass == H3_PASS_TEXT) {
                add(&l, H3_PART_TEXT, 0);
                return l.n;
        }
        if (rows && !m->curve.data)
                add(&l, H3_PART_TIME, 0);
        if (pass == H3_PASS_TABLE) {
                h3_part_list_add(&l, H3_PART_ADALN, 0, layers + 1);
                return l.n;
        }

        add(&l, H3_PART_ENDS, 0);
        if (rows)
                add(&l, H3_PART_ADALN, 0);
        add(&l, H3_PART_FEED, 0);
        for (uint32_t i = 0; i < layers; i++) {
                if (rows && i + 1 < layers)
                        add(&l, H3_PART_ADALN, i + 1);
                add(&l, H3_PART_FINISH, i);
                if (i + 1 < layers)
                        add(&l, H3_PART_FEED, i + 1);
        }
        if (rows)
                add(&l, H3_PART_ADALN, layers);
        add(&l, H3_PART_ENDS, 0);
        return l.n;
}

H3Model *h3_model_copy(const H3Model *base) {
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        uint32_t layers = base->config.layers, refiner = base->config.refiner_layers;

        m = malloc(sizeof(*m));
        if (!m)
                return NULL;
        *m = *base;
        m->merged = NULL;
        m->n_merged = 0;
        m->private_bytes = 0;
        m->blocks = malloc(layers * sizeof(*m->blocks));
        m->refiner = malloc(refiner * sizeof(*m->refiner));
        if ((layers > 0 && !m->blocks) || (refiner > 0 && !m->refiner))
                return NULL;
        if (layers > 0)
                memcpy(m->blocks, base->blocks, layers * sizeof(*m->blocks));
        if (refiner > 0)
                memcpy(m->refiner, base->refiner, refiner * sizeof(*m->refiner));
        return STEAL_PTR(m);
}

static uint32_t all_parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        const H3Model *m = model;
        H3PartList l = {.parts = ret};

        add(&l, H3_PART_ENDS, 0);
        for (uint32_t i = 0; i < m->config.layers; i++) {
                add(&l, H3_PART_FEED, i);
                add(&l, H3_PART_FINISH, i);
        }
        *ret_staying = l.n;

        /* of a prompt or a schedule */
        add(&l, H3_PART_TIME, 0);
        add(&l, H3_PART_TEXT, 0);
        h3_part_list_add(&l, H3_PART_ADALN, 0, m->config.layers + 1);
        return l.n;
}

static uint32_t pass_parts(const void *model, H3Pass pass, H3Part *ret) {
        return h3_pass_parts(model, pass, ret);
}

static int visit(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        return h3_model_visit(model, part, f, userdata);
}

static void *copy(const void *model) {
        return h3_model_copy(model);
}

static void free_copy(void *model) {
        (void) h3_model_free(model);
}

const H3WeightsKind h3_weights_denoiser = {
        .parts = all_parts, .pass = pass_parts, .visit = visit, .copy = copy, .free = free_copy,
        .bf16_parts = 1u << H3_PART_FEED | 1u << H3_PART_FINISH};
