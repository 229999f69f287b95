/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/weights.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)

typedef struct Visit {
        H3SlotFunc f;
        void *userdata;
        int result;
} Visit;

static void matrix(Visit *v, LkMatrix *m) {
        if (v->result >= 0 && m->data)
                v->result = v->f(v->userdata, m, NULL);
}

static void vector(Visit *v, LkVector *x) {
        if (v->result >= 0 && x->data)
                v->result = v->f(v->userdata, NULL, x);
}

static void linear(Visit *v, LkMatrix *m, LkVector *bias) {
        matrix(v, m);
        vector(v, bias);
}

static void feed(Visit *v, H3Block *b) {
        vector(v, &b->norm1);
        matrix(v, &b->attn.q);
        matrix(v, &b->attn.k);
        matrix(v, &b->attn.v);
        vector(v, &b->attn.q_norm);
        vector(v, &b->attn.k_norm);
}

static void finish(Visit *v, H3Block *b) {
        matrix(v, &b->attn.out);
        vector(v, &b->norm2);
        matrix(v, &b->mlp.gate);
        matrix(v, &b->mlp.up);
        matrix(v, &b->mlp.down);
}

static void text(Visit *v, H3Model *m) {
        linear(v, &m->text_in, &m->text_in_bias);
        for (uint32_t i = 0; i < m->config.refiner_layers; i++) {
                feed(v, m->refiner + i);
                finish(v, m->refiner + i);
        }
        vector(v, &m->refiner_norm);
}

static void ends(Visit *v, H3Model *m) {
        linear(v, &m->video_in, &m->video_in_bias);
        linear(v, &m->audio_in, &m->audio_in_bias);
        vector(v, &m->final_norm);
        linear(v, &m->video_out, &m->video_out_bias);
        linear(v, &m->audio_out, &m->audio_out_bias);
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
        Visit v = {f, userdata, 0};

        if (!part_is_there(m, part))
                return -EINVAL;

        switch (part.kind) {

        case H3_PART_TEXT:
                text(&v, m);
                break;

        case H3_PART_TIME:
                linear(&v, &m->time_1, &m->time_1_bias);
                linear(&v, &m->time_2, &m->time_2_bias);
                break;

        case H3_PART_ADALN:
                if (part.layer < m->config.layers)
                        linear(&v, &m->blocks[part.layer].adaln, &m->blocks[part.layer].adaln_bias);
                else
                        linear(&v, &m->final_adaln, &m->final_adaln_bias);
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

typedef struct List {
        H3Part *parts; /* NULL: only count */
        uint32_t n;
} List;

static void add(List *l, H3PartKind kind, uint32_t layer) {
        if (l->parts)
                l->parts[l->n] = (H3Part){kind, layer};
        l->n++;
}

uint32_t h3_pass_parts(const H3Model *m, H3Pass pass, H3Part *ret) {
        uint32_t layers = m->config.layers;
        bool rows = pass != H3_PASS_STEP_TABLE; /* of modulation are computed */
        List l = {.parts = ret};

        if (pass == H3_PASS_TEXT) {
                add(&l, H3_PART_TEXT, 0);
                return l.n;
        }
        if (rows && !m->curve.data)
                add(&l, H3_PART_TIME, 0);
        for (uint32_t i = 0; pass == H3_PASS_TABLE && i <= layers; i++)
                add(&l, H3_PART_ADALN, i);
        if (pass == H3_PASS_TABLE)
                return l.n;

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
