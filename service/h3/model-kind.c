/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model-kind.h"

#include <string.h>

#include "service/h3/lora.h"
#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

/* Names that one kind alone has, in every layout, also where the file holds half of it; a trailing dot: names
 * that begin so. */
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

H3ModelKind h3_model_kind(const H3File *files, size_t n_files) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        Fault ignored = {};

        if (h3_lora_recognises(files, n_files))
                return H3_KIND_LORA;
        if (h3_tensor_set_new(files, n_files, &s, &ignored) < 0)
                return H3_KIND_DENOISER;
        for (size_t i = 0; i < s->n_tensors; i++)
                for (size_t k = 0; k < ELEMENTSOF(marks); k++)
                        if (has_mark(s->tensors[i].entry->name, marks[k].name))
                                return marks[k].kind;
        return H3_KIND_DENOISER;
}
