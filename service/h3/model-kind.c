/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model-kind.h"

#include <stdio.h>
#include <string.h>

#include "service/h3/lora.h"
#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

/* Names that one kind alone has, in every layout, also where the file holds half of it; a trailing dot:
 * names that begin so. */
static const struct {
        const char *name;
        H3ModelKind kind;
} marks[] = {
        {"model.language_model.", H3_KIND_CONDITIONER},
        {"model.embed_tokens.weight", H3_KIND_CONDITIONER},
        {"model.layers.", H3_KIND_CONDITIONER},
        {"model.visual.", H3_KIND_CONDITIONER},
        {"visual.patch_embed.", H3_KIND_CONDITIONER},
        {"encoder.conv_in.", H3_KIND_VIDEO_VAE},
        {"decoder.register_tokens", H3_KIND_VIDEO_VAE},
        {"decoder.x_embedder.", H3_KIND_VIDEO_VAE},
        {"decoder.conv_pre.", H3_KIND_AUDIO_VAE},
        {"encoder.block.", H3_KIND_AUDIO_VAE},
        {"dec_in_proj.", H3_KIND_AUDIO_VAE},
        {"pre_block.", H3_KIND_AUDIO_VAE},
};

static bool has_mark(const char *name, const char *mark) {
        size_t n = strlen(mark);

        return mark[n - 1] == '.' ? strncmp(name, mark, n) == 0 : strcmp(name, mark) == 0;
}

static H3ModelKind kind_of(const H3TensorSet *s) {
        for (size_t i = 0; i < s->n_tensors; i++)
                for (size_t k = 0; k < ELEMENTSOF(marks); k++)
                        if (has_mark(s->tensors[i].entry->name, marks[k].name))
                                return marks[k].kind;
        return H3_KIND_DENOISER;
}

static void list_types(const H3TensorSet *s, char *ret, size_t size) {
        size_t n = 0;

        for (StType t = 0; t < ST_TYPE_MAX; t++) {
                bool there = false;

                for (size_t i = 0; i < s->n_tensors && !there; i++)
                        there = s->tensors[i].entry->type == t;
                if (there && n < size)
                        n += (size_t) snprintf(
                                ret + n, size - n, "%s%s", n > 0 ? ", " : "", st_type_name(t));
        }
}

static uint32_t list_matrix_types(const H3TensorSet *s) {
        uint32_t types = 0;

        for (size_t i = 0; i < s->n_tensors; i++) {
                const StTensor *t = s->tensors[i].entry;

                if (t->n_dims >= 2 && h3_is_float(t->type))
                        types |= 1u << h3_float_type(t->type);
                else if (t->n_dims >= 2 && t->type == ST_I8)
                        types |= 1u << LK_I8;
        }
        return types;
}

void h3_model_summary(const H3File *files, size_t n_files, H3ModelSummary *ret) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        Fault ignored = {};

        *ret = (H3ModelSummary){.kind = H3_KIND_DENOISER};
        if (h3_tensor_set_new(files, n_files, &s, &ignored) < 0)
                return;
        ret->kind = h3_lora_recognises(files, n_files) ? H3_KIND_LORA : kind_of(s);
        ret->n_tensors = (uint32_t) s->n_tensors;
        for (size_t i = 0; i < s->n_tensors; i++)
                ret->tensor_bytes += s->tensors[i].entry->size;
        ret->matrix_types = list_matrix_types(s);
        list_types(s, ret->types, sizeof(ret->types));
}
