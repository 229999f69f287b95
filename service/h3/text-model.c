/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/text-model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3TextModel *, h3_text_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

static bool has_prefix(const H3TensorSet *s, const char *prefix) {
        for (size_t i = 0; i < s->n_tensors; i++)
                if (strncmp(s->tensors[i].entry->name, prefix, strlen(prefix)) == 0)
                        return true;
        return false;
}

static int choose_names(const H3TensorSet *s, bool *ret_published, Fault *f) {
        bool published = has_prefix(s, "model.language_model."), comfy = has_prefix(s, "model.layers.");

        if (published == comfy)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "Not a conditioner (Qwen3-VL): it has %s tensors named model.language_model.* "
                        "(published "
                        "folder) %s model.layers.* (single file); expected one of the two.",
                        published ? "both" : "neither", published ? "and" : "nor");
        *ret_published = published;
        return 0;
}

static void describe(const H3TensorSet *s, bool published, H3TextModel *m) {
        static const char *const names[LK_TYPE_MAX] = {
                [LK_F32] = "F32",
                [LK_BF16] = "BF16",
                [LK_F16] = "F16",
                [LK_I8] = "I8",
                [LK_F8_E4M3] = "F8_E4M3",
                [LK_F8_E5M2] = "F8_E5M2",
                [LK_NVFP4] = "NVFP4",
        };
        size_t n = 0;

        (void) snprintf(m->layout, sizeof(m->layout), "%s%s", published ? "published" : "comfy",
                s->n_headers > 1 ? "-sharded" : "");
        m->n_tensors = (uint32_t) s->n_tensors;
        for (size_t t = 0; t < ELEMENTSOF(names); t++)
                if (m->matrix_types & 1u << t)
                        n += (size_t) snprintf(
                                m->types + n, sizeof(m->types) - n, "%s%s", n ? ", " : "", names[t]);
}

int h3_text_open(const H3File *files, size_t n_files, const LkOps *ops, H3TextModel **ret, Fault *f) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        CLEANUP(h3_text_freep) H3TextModel *m = NULL;
        TextSaid said = {};
        bool published = false;
        int r;

        r = h3_tensor_set_new(files, n_files, &s, f);
        if (r >= 0)
                r = choose_names(s, &published, f);
        if (r >= 0 && s->config)
                r = text_config_read(s->config, s->config_size, &said, f);
        if (r < 0)
                return r;

        m = calloc(1, sizeof(*m));
        if (!m)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");
        r = text_bind(s, published, &said, m, f);
        if (r >= 0 && s->config)
                r = text_config_check(s->config, s->config_size, &m->config, f);
        if (r >= 0 && ops)
                r = h3_types_support(m->matrix_types, false, ops, NULL, 0, f);
        if (r < 0)
                return r;
        describe(s, published, m);
        *ret = STEAL_PTR(m);
        return 0;
}

H3TextModel *h3_text_free(H3TextModel *m) {
        if (!m)
                return NULL;
        free(m->layers);
        free(m->blocks);
        free(m);
        return NULL;
}
