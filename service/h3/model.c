/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

/* Parts of tensor names that mark a file of a kind that this version does not run. */
static const struct {
        const char *part, *what;
} later_formats[] = {
        {".comfy_quant", "a quantised model"},
        {".weight_scale", "a quantised model"},
        {".weight_scale_2", "a quantised model"},
        {".input_scale", "a quantised model"},
        {"adaln_t_table", "a pruned model (curve AdaLN)"},
        {"time_embedder.table", "a pruned model (curve AdaLN)"},
        {".folded_bias", "a pruned model (curve AdaLN)"},
        {"adaln_basis", "a pruned model (curve AdaLN)"},
        {".to_gate_compress.", "a model with sparse-attention gates"},
        {"control_proj_in.", "a ControlNet"},
        {"control_blocks.", "a ControlNet"},
        {".lora_A.", "a LoRA, not a model"},
        {".lora_B.", "a LoRA, not a model"},
        {".lora_down.", "a LoRA, not a model"},
};

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
        return 0;
}

static int check_types(const H3TensorSet *s, Fault *f) {
        for (size_t i = 0; i < s->n_tensors; i++) {
                const H3Tensor *t = s->tensors + i;

                switch (t->entry->type) {
                case ST_F32:
                case ST_BF16:
                case ST_F16:
                        break;
                case ST_I8:
                case ST_U8:
                case ST_F8_E4M3:
                case ST_F8_E5M2:
                case ST_F8_E8M0:
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "%.200s: tensor %.200s is %s, so this is a quantised model, which this "
                                "version does "
                                "not run. Use the bf16 model.",
                                t->file, t->entry->name, st_type_name(t->entry->type));
                default:
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "%.200s: tensor %.200s is %s; weights are F32, BF16 or F16.", t->file,
                                t->entry->name, st_type_name(t->entry->type));
                }
        }
        return 0;
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

static void describe(const H3TensorSet *s, H3QkvOrder order, H3Model *m) {
        static const StType types[] = {ST_BF16, ST_F16, ST_F32};
        size_t n = 0;

        m->qkv_order = order;
        (void) snprintf(m->layout, sizeof(m->layout), "%s%s",
                order == H3_QKV_SPLIT         ? "diffusers"
                : order == H3_QKV_INTERLEAVED ? "original"
                                              : "comfy",
                s->n_headers > 1 ? "-sharded" : "");
        m->n_tensors = (uint32_t) s->n_tensors;

        for (size_t i = 0; i < s->n_tensors; i++)
                m->weight_bytes += s->tensors[i].entry->size;
        for (size_t j = 0; j < ELEMENTSOF(types); j++) {
                bool there = false;

                for (size_t i = 0; i < s->n_tensors && !there; i++)
                        there = s->tensors[i].entry->type == types[j];
                if (there)
                        n += (size_t) snprintf(m->types + n, sizeof(m->types) - n, "%s%s", n ? ", " : "",
                                st_type_name(types[j]));
        }
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
        r = check_types(s, f);
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

        *ret = STEAL_PTR(m);
        return 0;
}

H3Model *h3_model_free(H3Model *m) {
        if (!m)
                return NULL;
        free(m->blocks);
        free(m->refiner);
        free(m);
        return NULL;
}
