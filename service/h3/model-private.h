/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the files of model-*.c share; nobody else includes it. */

#include "service/h3/model.h"
#include "service/shared/safetensors.h"

/* A tensor that a checkpoint offers. */
typedef struct H3Tensor {
        const StTensor *entry; /* of a header in the set */
        const uint8_t *data;   /* into the file's memory */
        const char *file;
        bool used; /* by the binder */
} H3Tensor;

/* All tensors of a checkpoint, one per name, sorted by name. */
typedef struct H3TensorSet {
        H3Tensor *tensors;
        size_t n_tensors;
        StHeader **headers;
        size_t n_headers;
        StIndex *index; /* NULL: none */
        char *config;   /* private copy of config.json; NULL: none */
        uint64_t config_size;
} H3TensorSet;

/* model-files.c */
int h3_tensor_set_new(const H3File *files, size_t n_files, H3TensorSet **ret, Fault *f);
H3TensorSet *h3_tensor_set_free(H3TensorSet *s);
H3Tensor *h3_tensor_set_find(const H3TensorSet *s, const char *name); /* NULL if absent */

/* model-bind.c: fills config and every view of m, or says everything that is missing, left over or
 * mis-shaped at once. order: INTERLEAVED or STACKED (original names), SPLIT (diffusers names). */
int h3_model_bind(H3TensorSet *s, H3QkvOrder order, H3Model *m, Fault *f);

/* model-config.c: compares config.json with the configuration read from the shapes. */
int h3_config_check(const char *json, uint64_t size, const H3Config *c, Fault *f);
