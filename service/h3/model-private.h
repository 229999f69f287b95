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
        bool used;          /* by the binder */
        LkType matrix_type; /* of a quantised matrix; else 0 */
        LkQuant quant;
} H3Tensor;

/* A list for an error text: what fits, and how many there are. */
typedef struct H3List {
        char text[260];
        size_t n;
        uint32_t count;
        bool full;
} H3List;

void h3_list_add(H3List *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

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

static inline bool h3_is_float(StType t) {
        return t == ST_F32 || t == ST_BF16 || t == ST_F16;
}

static inline LkType h3_float_type(StType t) {
        return t == ST_F32 ? LK_F32 : t == ST_BF16 ? LK_BF16 : LK_F16;
}

/* latent-statistics.c: the mean and standard deviation of latents, which ComfyUI's files of both VAEs hold as
 * tensors. n 0: there are none. */
#define H3_STATISTICS_MAX 64
typedef struct H3Statistics {
        uint32_t n;
        float mean[H3_STATISTICS_MAX], std[H3_STATISTICS_MAX];
} H3Statistics;

/* Reads latents_mean and latents_std and marks them as used. -EINVAL (InvalidModel): one of them alone, a
 * wrong shape, a number that is not finite, a deviation not above 0. */
int h3_statistics_read(H3TensorSet *s, H3Statistics *ret, Fault *f);

/* Whether what config.json says is the stored number, but for rounding to a type of 8 bits of precision. */
static inline bool h3_statistics_agree(float said, float stored) {
        float difference = said > stored ? said - stored : stored - said;

        return difference <= 0.004f * (said < 0 ? -said : said) + 1e-6f;
}

/* quant.c: finds the quantised matrices, says what each is (matrix_type, quant) and marks the tensors beside
 * it as used. Absent and mis-shaped ones go to the lists; an unknown format or a broken marker is the error.
 */
int h3_quant_resolve(H3TensorSet *s, H3List *missing, H3List *wrong, Fault *f);

/* quant.c: h3_model_support() of these types (a bit per LkType). int8: products with such matrices are made in int8, as denoisers do it. */
int h3_types_support(uint32_t matrix_types, bool int8, const LkOps *ops, char *ret, size_t size, Fault *f);

/* model-probe.c: fills m->warning if the rows of the QKV matrices look as if they were in the other order.
 */
void h3_qkv_probe(H3Model *m);

/* model.c: matrix_types and int8_cols from the views. */
void h3_model_note_matrices(H3Model *m);

/* model-bind.c: fills config and every view of m, or says everything that is missing, left over or
 * mis-shaped at once. order: INTERLEAVED or STACKED (original names), SPLIT (diffusers names). */
int h3_model_bind(H3TensorSet *s, H3QkvOrder order, H3Model *m, Fault *f);

/* model-config.c: compares config.json with the configuration read from the shapes. */
int h3_config_check(const char *json, uint64_t size, const H3Config *c, Fault *f);
