/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-model.h"
#include "service/h3/weights.h"
#include "service/shared/cleanup.h"

/* The conditioner's parts. A prompt without pictures needs the layers alone: they come first among what may stay. */

DEFINE_CLEANUP(H3TextModel *, h3_text_free)

static void add_tower(H3PartList *l, const H3TextModel *m) {
        h3_part_list_add(l, H3_PART_IN, 0, 1);
        h3_part_list_add(l, H3_PART_TOWER, 0, m->config.vision.depth);
        h3_part_list_add(l, H3_PART_OUT, 0, 1);
}

static uint32_t parts(const void *model, H3Part *ret, uint32_t *ret_staying) {
        const H3TextModel *m = model;
        H3PartList l = {.parts = ret};

        h3_part_list_add(&l, H3_PART_STAGE, 0, m->config.layers);
        add_tower(&l, m);
        *ret_staying = l.n;
        return l.n;
}

static uint32_t pass(const void *model, H3Pass pass, H3Part *ret) {
        const H3TextModel *m = model;
        H3PartList l = {.parts = ret};

        add_tower(&l, m);
        h3_part_list_add(&l, H3_PART_STAGE, 0, m->config.layers);
        return l.n;
}

static void linear(H3Visit *v, H3Linear *l) {
        h3_visit_linear(v, &l->w, &l->bias);
}

static void norm(H3Visit *v, H3LayerNorm *n) {
        h3_visit_vector(v, &n->weight);
        h3_visit_vector(v, &n->bias);
}

static void merger(H3Visit *v, H3Merger *m) {
        norm(v, &m->norm);
        linear(v, &m->fc1);
        linear(v, &m->fc2);
}

static void layer(H3Visit *v, H3TextLayer *l) {
        LkVector *vectors[] = {&l->norm1, &l->norm2, &l->q_norm, &l->k_norm};
        LkMatrix *matrices[] = {&l->q, &l->k, &l->v, &l->out, &l->gate, &l->up, &l->down};

        for (size_t i = 0; i < ELEMENTSOF(vectors); i++)
                h3_visit_vector(v, vectors[i]);
        for (size_t i = 0; i < ELEMENTSOF(matrices); i++)
                h3_visit_matrix(v, matrices[i]);
}

static void block(H3Visit *v, H3TextModel *m, uint32_t i) {
        H3VisionBlockWeights *b = m->blocks + i;

        norm(v, &b->norm1);
        linear(v, &b->qkv);
        linear(v, &b->out);
        norm(v, &b->norm2);
        linear(v, &b->fc1);
        linear(v, &b->fc2);
        for (uint32_t j = 0; j < m->config.vision.n_deepstack; j++)
                if (m->config.vision.deepstack[j] == i)
                        merger(v, m->deepstack + j);
}

static int visit(void *model, H3Part part, H3SlotFunc f, void *userdata) {
        H3TextModel *m = model;
        H3Visit v = {f, userdata, 0};

        if (part.kind == H3_PART_STAGE && part.layer < m->config.layers)
                layer(&v, m->layers + part.layer);
        else if (part.kind == H3_PART_TOWER && part.layer < m->config.vision.depth)
                block(&v, m, part.layer);
        else if (part.kind == H3_PART_IN && part.layer == 0)
                linear(&v, &m->patch);
        else if (part.kind == H3_PART_OUT && part.layer == 0)
                merger(&v, &m->merger);
        else
                return -EINVAL;
        return v.result;
}

static void *copy(const void *model) {
        const H3TextModel *base = model;
        CLEANUP(h3_text_freep) H3TextModel *m = malloc(sizeof(*m));
        size_t layers = base->config.layers * sizeof(*m->layers), blocks = base->config.vision.depth * sizeof(*m->blocks);

        if (!m)
                return NULL;
        *m = *base;
        m->layers = malloc(layers > 0 ? layers : 1);
        m->blocks = malloc(blocks > 0 ? blocks : 1);
        if (!m->layers || !m->blocks)
                return NULL;
        memcpy(m->layers, base->layers, layers);
        memcpy(m->blocks, base->blocks, blocks);
        return STEAL_PTR(m);
}

static void free_copy(void *model) {
        (void) h3_text_free(model);
}

const H3WeightsKind h3_weights_text = {
        .parts = parts,
        .pass = pass,
        .visit = visit,
        .copy = copy,
        .free = free_copy,
        .one_at_a_time = true,
};
