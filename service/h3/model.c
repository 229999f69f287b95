/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

/* Parts of tensor names that mark a file of a kind that this version does not run. */
static const struct {
        const char *part, *what;
} later_formats[] = {
        {"control_proj_in.", "a ControlNet"},
        {"control_blocks.", "a ControlNet"},
        {".bitsandbytes__nf4", "in NF4 (bitsandbytes)"},
        {".bitsandbytes__fp4", "in FP4 (bitsandbytes)"},
        {".lora_A.", "a LoRA, not a model"},
        {".lora_B.", "a LoRA, not a model"},
        {".lora_down.", "a LoRA, not a model"},
};

/* A bank of output heads, one per part of the schedule (PDD, h3.md 1.13): the head has several times the
 * rows that the latent has. */
static int check_heads(const H3TensorSet *s, Fault *f) {
        static const char *const heads[][2] = {
                {"final_layer.video_out.weight", "video_patch_proj.weight"},
                {"final_layer.audio_out.weight", "audio_patch_proj.weight"},
                {"proj_out.weight", "proj_in.weight"},
                {"audio_proj_out.weight", "audio_proj_in.weight"},
        };

        for (size_t i = 0; i < ELEMENTSOF(heads); i++) {
                const H3Tensor *out = h3_tensor_set_find(s, heads[i][0]), *in;
                uint64_t rows, wanted;

                in = h3_tensor_set_find(s, heads[i][1]);
                if (!out || !in || out->entry->n_dims != 2 || in->entry->n_dims != 2)
                        continue;
                rows = out->entry->shape[0];
                wanted = in->entry->shape[1];
                if (wanted == 0 || rows <= wanted || rows % wanted != 0)
                        continue;
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%.200s: %.200s is a bank of %" PRIu64
                        " output heads (PDD), which this version does not run. Use the bf16 model.",
                        out->file, heads[i][0], rows / wanted);
        }
        return 0;
}

static int check_supported(const H3TensorSet *s, Fault *f) {
        for (size_t i = 0; i < s->n_tensors; i++) {
                const H3Tensor *t = s->tensors + i;

                for (size_t j = 0; j < ELEMENTSOF(later_formats); j++)
                        if (strstr(t->entry->name, later_formats[j].part))
                                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                        "%.200s has tensor %.200s: it is %s, which this version does not "
                                        "run. Use the "
                                        "bf16 model.",
                                        t->file, t->entry->name, later_formats[j].what);
        }
        return check_heads(s, f);
}

static bool has_prefix(const H3TensorSet *s, const char *prefix) {
        for (size_t i = 0; i < s->n_tensors; i++)
                if (strncmp(s->tensors[i].entry->name, prefix, strlen(prefix)) == 0)
                        return true;
        return false;
}

/* Which names, and with them where a head's q, k and v rows are. Names do not tell the order of original
 * files (h3.md 1.2). */
static int choose_order(const H3TensorSet *s, H3QkvOrder asked, H3QkvOrder *ret, Fault *f) {
        bool diffusers = has_prefix(s, "transformer_blocks."), original = has_prefix(s, "blocks.");

        if (diffusers == original)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "Not an H3 denoiser: %s tensors named blocks.* (original names) %s "
                        "transformer_blocks.* "
                        "(diffusers names); expected one of the two.",
                        diffusers ? "it has" : "it has neither", diffusers ? "and" : "nor");

        switch (asked) {
        case H3_QKV_AUTO:
                *ret = diffusers ? H3_QKV_SPLIT : s->index ? H3_QKV_INTERLEAVED : H3_QKV_STACKED;
                return 0;
        case H3_QKV_INTERLEAVED:
        case H3_QKV_STACKED:
                if (diffusers)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "A QKV order was asked for, but this model keeps q, k and v in tensors of "
                                "their own; "
                                "leave it at auto.");
                *ret = asked;
                return 0;
        case H3_QKV_SPLIT:
                break;
        }
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "QKV order %d cannot be asked for; give auto, interleaved or stacked.", (int) asked);
}

static void note_matrix(H3Model *m, const LkMatrix *w) {
        if (!w->data)
                return;
        m->matrix_types |= 1u << w->type;
        if (w->type == LK_I8 && w->cols > m->int8_cols)
                m->int8_cols = (uint32_t) w->cols;
}

void h3_model_note_matrices(H3Model *m) {
        const LkMatrix *ends[] = {&m->video_in, &m->audio_in, &m->text_in, &m->time_1, &m->time_2,
                &m->final_adaln, &m->video_out, &m->audio_out};

        m->matrix_types = 0;
        m->int8_cols = 0;
        for (size_t i = 0; i < ELEMENTSOF(ends); i++)
                note_matrix(m, ends[i]);
        for (uint32_t i = 0; i < m->config.layers + m->config.refiner_layers; i++) {
                const H3Block *b =
                        i < m->config.layers ? m->blocks + i : m->refiner + (i - m->config.layers);
                const LkMatrix *all[] = {&b->attn.q, &b->attn.k, &b->attn.v, &b->attn.out, &b->attn.gate,
                        &b->mlp.gate, &b->mlp.up, &b->mlp.down, &b->adaln};

                for (size_t j = 0; j < ELEMENTSOF(all); j++)
                        note_matrix(m, all[j]);
        }
}

static void describe_types(const H3TensorSet *s, H3Model *m) {
        static const StType types[] = {ST_BF16, ST_F16, ST_F32};
        static const struct {
                LkType type;
                const char *name;
        } quantised[] = {
                {LK_I8, "I8"}, {LK_F8_E4M3, "F8_E4M3"}, {LK_F8_E5M2, "F8_E5M2"}, {LK_NVFP4, "NVFP4"}};
        size_t n = 0;

        for (size_t j = 0; j < ELEMENTSOF(types) + ELEMENTSOF(quantised); j++) {
                bool plain = j < ELEMENTSOF(types), there = false, rotated = false;

                for (size_t i = 0; i < s->n_tensors; i++) {
                        const H3Tensor *t = s->tensors + i;

                        if (plain ? t->entry->type == types[j]
                                  : t->matrix_type == quantised[j - ELEMENTSOF(types)].type) {
                                there = true;
                                rotated = rotated || t->quant.rotation > 0;
                        }
                }
                if (there)
                        n += (size_t) snprintf(m->types + n, sizeof(m->types) - n, "%s%s%s", n ? ", " : "",
                                plain ? st_type_name(types[j]) : quantised[j - ELEMENTSOF(types)].name,
                                rotated ? " (rotated)" : "");
        }
        if (m->config.curve_points > 0)
                (void) snprintf(m->types + n, sizeof(m->types) - n, ", AdaLN curve");
}

static void describe(const H3TensorSet *s, H3QkvOrder order, H3Model *m) {
        m->qkv_order = order;
        (void) snprintf(m->layout, sizeof(m->layout), "%s%s",
                order == H3_QKV_SPLIT         ? "diffusers"
                : order == H3_QKV_INTERLEAVED ? "original"
                                              : "comfy",
                s->n_headers > 1 ? "-sharded" : "");
        m->n_tensors = (uint32_t) s->n_tensors;

        for (size_t i = 0; i < s->n_tensors; i++)
                m->weight_bytes += s->tensors[i].entry->size;
        describe_types(s, m);
        h3_model_note_matrices(m);
}

int h3_model_check_references(const H3Model *m, bool references, Fault *f) {
        if (m->partition == H3_PARTITION_UNKNOWN || (m->partition == H3_PARTITION_REF2VA) == references)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                references
                        ? "The request has references, and this model is of the fl2va partition (text and "
                          "keyframes). Use the ref2va model."
                        : "The request has no references, and this model is of the ref2va partition. Use "
                          "the "
                          "fl2va model.");
}

int h3_model_open(
        const H3File *files, size_t n_files, const H3ModelOptions *options, H3Model **ret, Fault *f) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        H3QkvOrder order = H3_QKV_AUTO;
        int r;

        r = h3_tensor_set_new(files, n_files, &s, f);
        if (r < 0)
                return r;
        r = check_supported(s, f);
        if (r < 0)
                return r;
        r = choose_order(s, options ? options->qkv_order : H3_QKV_AUTO, &order, f);
        if (r < 0)
                return r;

        m = calloc(1, sizeof(*m));
        if (!m)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");
        r = h3_model_bind(s, order, m, f);
        if (r < 0)
                return r;
        if (s->config) {
                r = h3_config_check(s->config, s->config_size, &m->config, f);
                if (r < 0)
                        return r;
        }
        describe(s, order, m);
        m->partition = options ? options->partition : H3_PARTITION_UNKNOWN;
        r = h3_shifts_read(files, n_files, &m->shift_video, &m->shift_audio, f);
        if (r < 0)
                return r;
        if (options && options->ops) {
                r = h3_model_support(m, options->ops, m->support, sizeof(m->support), f);
                if (r < 0)
                        return r;
        }
        h3_qkv_probe(m);

        *ret = STEAL_PTR(m);
        return 0;
}

H3Model *h3_model_free(H3Model *m) {
        if (!m)
                return NULL;
        for (size_t i = 0; i < m->n_merged; i++)
                free(m->merged[i].data);
        free(m->merged);
        free(m->blocks);
        free(m->refiner);
        free(m);
        return NULL;
}
