/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"

/* Quantised matrices of a checkpoint (h3.md 2.2, 2.3): which format a weight has and which tensors beside it
 * say how its numbers are meant. Everything but the numbers is checked here, once, when the model is opened.
 */

#define MARKER_MAX 1024
#define NAME_SIZE 256
#define ROTATION_DEFAULT 256 /* of a marker with convrot and no group size */

typedef struct Marker {
        LkType type;
        uint32_t rotation;
} Marker;

static const struct {
        const char *name;
        LkType type;
        StType stored;
} formats[] = {
        {"int8_tensorwise", LK_I8, ST_I8},
        {"float8_e4m3fn", LK_F8_E4M3, ST_F8_E4M3},
        {"float8_e5m2", LK_F8_E5M2, ST_F8_E5M2},
        {"nvfp4", LK_NVFP4, ST_U8},
};

static void json_unref(json_t **j) {
        json_decref(*j);
}

static int bad_marker(const H3Tensor *t, const char *rule, Fault *f) {
        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%.200s: the marker %.200s %s.", t->file,
                t->entry->name, rule);
}

static int read_format(const H3Tensor *t, const json_t *value, LkType *ret, Fault *f) {
        const char *name = json_string_value(value);

        if (!name)
                return bad_marker(t, "has no \"format\", a string", f);
        for (size_t i = 0; i < ELEMENTSOF(formats); i++)
                if (strcmp(name, formats[i].name) == 0) {
                        *ret = formats[i].type;
                        return 0;
                }
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "%.200s: %.200s says format \"%.100s\", which this version does not run; it runs "
                "int8_tensorwise, float8_e4m3fn, float8_e5m2 and nvfp4. Use a model in one of these, or the "
                "bf16 model.",
                t->file, t->entry->name, name);
}

static int read_rotation(const H3Tensor *t, const json_t *on, const json_t *group, uint32_t *ret, Fault *f) {
        json_int_t size = group ? json_integer_value(group) : ROTATION_DEFAULT;

        if ((on && !json_is_boolean(on)) || (group && !json_is_integer(group)))
                return bad_marker(
                        t, "must give convrot as true or false and convrot_groupsize as a number", f);
        if (!on || !json_is_true(on))
                return 0;
        if (size < 4 || (size & (size - 1)) != 0 || ((uint64_t) size & 0xaaaaaaaaaaaaaaaau) != 0)
                return bad_marker(t, "has a convrot_groupsize that is no power of 4", f);
        if (size > LK_ROTATION_MAX)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%.200s: %.200s says convrot_groupsize %" PRId64 "; this version goes up to %u.",
                        t->file, t->entry->name, (int64_t) size, LK_ROTATION_MAX);
        *ret = (uint32_t) size;
        return 0;
}

/* {"format": NAME, "convrot": BOOL, "convrot_groupsize": N}; an unknown key could change what the numbers
 * mean, so it is refused. full_precision_matrix_mult is about activations of fp8, which stay as they are
 * here. */
static int read_marker(const H3Tensor *t, Marker *ret, Fault *f) {
        CLEANUP(json_unref) json_t *root = NULL;
        char copy[MARKER_MAX];
        json_error_t error;
        const char *key;
        json_t *value;
        int r;

        if (t->entry->type != ST_U8 || t->entry->n_dims != 1 || t->entry->size > sizeof(copy))
                return bad_marker(t, "must be a list of at most 1024 bytes (U8)", f);
        memcpy(copy, t->data, t->entry->size); /* the file may change while it is read */

        root = json_loadb(copy, t->entry->size, JSON_REJECT_DUPLICATES, &error);
        if (!root || !json_is_object(root))
                return bad_marker(t, "is not a JSON object", f);
        json_object_foreach(root, key, value) {
                if (strcmp(key, "format") != 0 && strcmp(key, "convrot") != 0 &&
                        strcmp(key, "convrot_groupsize") != 0 &&
                        strcmp(key, "full_precision_matrix_mult") != 0)
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "%.200s: %.200s has the key \"%.100s\", which this version does not know.",
                                t->file, t->entry->name, key);
        }

        *ret = (Marker){};
        r = read_format(t, json_object_get(root, "format"), &ret->type, f);
        if (r < 0)
                return r;
        r = read_rotation(t, json_object_get(root, "convrot"), json_object_get(root, "convrot_groupsize"),
                &ret->rotation, f);
        if (r < 0)
                return r;
        return ret->rotation == 0 || ret->type == LK_I8
                       ? 0
                       : bad_marker(t, "rotates a format other than int8", f);
}

/* The tensor beside `weight` whose name ends in `suffix` instead of "weight". */
static H3Tensor *beside(const H3TensorSet *s, const H3Tensor *weight, const char *suffix, char *ret_name) {
        (void) snprintf(ret_name, NAME_SIZE, "%.*s%s",
                (int) (strlen(weight->entry->name) - strlen("weight")), weight->entry->name, suffix);
        return h3_tensor_set_find(s, ret_name);
}

static uint64_t elements(const StTensor *t) {
        return t->size / st_type_size(t->type);
}

static bool shape_is(const StTensor *t, uint64_t rows, uint64_t cols) {
        return t->n_dims == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

/* A number beside the weight, F32. NULL after reporting, or if it is absent and may be. */
static H3Tensor *take_number(const H3TensorSet *s, const H3Tensor *weight, const char *suffix, bool needed,
        H3List *missing, H3List *wrong) {
        char name[NAME_SIZE];
        H3Tensor *t = beside(s, weight, suffix, name);

        if (!t) {
                if (needed)
                        h3_list_add(missing, "%s", name);
                return NULL;
        }
        t->used = true;
        if (t->entry->type == ST_F32 && elements(t->entry) == 1)
                return t;
        h3_list_add(wrong, "%s must be one number of F32", name);
        return NULL;
}

/* int8: one scale, or one per row. */
static void take_row_scales(const H3TensorSet *s, H3Tensor *weight, H3List *missing, H3List *wrong) {
        uint64_t rows = weight->entry->shape[0];
        char name[NAME_SIZE];
        H3Tensor *t = beside(s, weight, "weight_scale", name);
        bool one, each;

        if (!t) {
                h3_list_add(missing, "%s", name);
                return;
        }
        t->used = true;
        one = elements(t->entry) == 1 && rows != 1;
        each = (t->entry->n_dims == 1 && t->entry->shape[0] == rows) || shape_is(t->entry, rows, 1);
        if (t->entry->type != ST_F32 || (!one && !each)) {
                h3_list_add(wrong, "%s must be F32, one number or [%" PRIu64 "] or [%" PRIu64 ", 1]", name,
                        rows, rows);
                return;
        }
        weight->quant.scale = t->data;
        weight->quant.scale_stride = each ? sizeof(float) : 0;
}

static void take_nvfp4(const H3TensorSet *s, H3Tensor *weight, H3List *missing, H3List *wrong) {
        uint64_t rows = weight->entry->shape[0], cols = 2 * weight->entry->shape[1];
        uint64_t padded_rows = (rows + 127) / 128 * 128, padded_cols = (cols / 16 + 3) / 4 * 4;
        char name[NAME_SIZE];
        H3Tensor *t = beside(s, weight, "weight_scale", name);

        if (cols % 16 != 0)
                h3_list_add(wrong, "%s has %" PRIu64 " columns (nvfp4: a multiple of 16)",
                        weight->entry->name, cols);
        if (!t)
                h3_list_add(missing, "%s", name);
        else {
                t->used = true;
                if (t->entry->type != ST_F8_E4M3 || !shape_is(t->entry, padded_rows, padded_cols))
                        h3_list_add(wrong, "%s must be F8_E4M3 [%" PRIu64 ", %" PRIu64 "]", name,
                                padded_rows, padded_cols);
                weight->quant.block_scale = t->data;
                weight->quant.block_scale_cols = padded_cols;
        }

        t = take_number(s, weight, "weight_scale_2", true, missing, wrong);
        weight->quant.scale = t ? t->data : NULL;

        t = beside(s, weight, "pre_quant_scale", name);
        if (!t)
                return;
        t->used = true;
        if (!h3_is_float(t->entry->type) || t->entry->n_dims != 1 || t->entry->shape[0] != cols)
                h3_list_add(wrong, "%s must be [%" PRIu64 "]", name, cols);
        else
                weight->quant.in_scale = (LkVector){t->data, h3_float_type(t->entry->type), cols};
}

/* fp8 without a marker: scales per group of columns make it mxfp8. */
static int check_fp8_scale(const H3TensorSet *s, const H3Tensor *weight, Fault *f) {
        char name[NAME_SIZE];
        const H3Tensor *scale = beside(s, weight, "weight_scale", name);

        if (!scale || scale->entry->type != ST_F8_E8M0)
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "%.200s: %.200s has scales in F8_E8M0: it is mxfp8, which this version does not run. Use a "
                "model in int8_tensorwise, float8_e4m3fn, float8_e5m2 or nvfp4, or the bf16 model.",
                weight->file, weight->entry->name);
}

/* What the marker or, for fp8, the type alone says. */
static int find_format(const H3TensorSet *s, const H3Tensor *weight, Marker *ret, H3List *wrong, Fault *f) {
        char name[NAME_SIZE];
        H3Tensor *marker = beside(s, weight, "comfy_quant", name);
        int r;

        *ret = (Marker){};
        if (!marker) {
                for (size_t i = 0; i < ELEMENTSOF(formats); i++)
                        if (weight->entry->type == formats[i].stored)
                                ret->type = formats[i].type;
                if (ret->type == LK_F8_E4M3 || ret->type == LK_F8_E5M2)
                        return check_fp8_scale(s, weight, f);
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%.200s: tensor %.200s is %s and there is no %.200s that says how it is quantised, "
                        "which this version needs. Use a file with markers, or the bf16 model.",
                        weight->file, weight->entry->name, st_type_name(weight->entry->type), name);
        }
        marker->used = true;
        r = read_marker(marker, ret, f);
        if (r < 0)
                return r;
        for (size_t i = 0; i < ELEMENTSOF(formats); i++)
                if (formats[i].type == ret->type && formats[i].stored != weight->entry->type)
                        h3_list_add(wrong, "%s is %s, expected %s for %s", weight->entry->name,
                                st_type_name(weight->entry->type), st_type_name(formats[i].stored),
                                formats[i].name);
        return 0;
}

static int resolve(const H3TensorSet *s, H3Tensor *weight, H3List *missing, H3List *wrong, Fault *f) {
        H3Tensor *t;
        Marker m;
        int r;

        r = find_format(s, weight, &m, wrong, f);
        if (r < 0)
                return r;
        if (m.rotation > 0 && weight->entry->shape[1] % m.rotation != 0)
                h3_list_add(wrong, "%s has %" PRIu64 " columns, no multiple of its rotation groups of %u",
                        weight->entry->name, weight->entry->shape[1], m.rotation);

        weight->matrix_type = m.type;
        weight->quant.rotation = m.rotation;
        if (m.type == LK_I8)
                take_row_scales(s, weight, missing, wrong);
        else if (m.type == LK_NVFP4)
                take_nvfp4(s, weight, missing, wrong);
        else {
                t = take_number(s, weight, "weight_scale", true, missing, wrong);
                weight->quant.scale = t ? t->data : NULL;
        }
        /* for activations of fp8, which are not made here */
        (void) take_number(s, weight, "input_scale", false, missing, wrong);
        return 0;
}

static bool is_weight(const H3Tensor *t) {
        size_t n = strlen(t->entry->name), suffix = strlen(".weight");

        return n > suffix && n < NAME_SIZE - 32 && strcmp(t->entry->name + n - suffix, ".weight") == 0;
}

int h3_quant_resolve(H3TensorSet *s, H3List *missing, H3List *wrong, Fault *f) {
        for (size_t i = 0; i < s->n_tensors; i++) {
                H3Tensor *t = s->tensors + i;
                int r;

                switch (t->entry->type) {
                case ST_I8:
                case ST_U8:
                case ST_F8_E4M3:
                case ST_F8_E5M2:
                        break;
                default:
                        continue;
                }
                if (!is_weight(t) || t->entry->n_dims != 2)
                        continue; /* refused as what it is not */
                r = resolve(s, t, missing, wrong, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

static const char *const type_names[LK_TYPE_MAX] = {
        [LK_F32] = "f32",
        [LK_BF16] = "bf16",
        [LK_F16] = "f16",
        [LK_I8] = "int8",
        [LK_F8_E4M3] = "fp8 e4m3",
        [LK_F8_E5M2] = "fp8 e5m2",
        [LK_NVFP4] = "nvfp4",
};

static const char *support_text(LkType type, unsigned support, bool int8) {
        if (support == LK_EXPANDED || (type == LK_I8 && !int8))
                return "expanded";
        return type == LK_I8 ? "native in bf16, expanded in f32" : "native";
}

int h3_types_support(uint32_t matrix_types, bool int8, const LkOps *ops, char *ret, size_t size, Fault *f) {
        size_t n = 0;

        if (size > 0)
                ret[0] = '\0';
        for (unsigned t = LK_F32; t < LK_TYPE_MAX; t++) {
                if (!(matrix_types & 1u << t))
                        continue;
                if (ops->weights[t] == LK_REFUSED)
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "The model has weights in %s, which the backend %s does not run. Use "
                                "another "
                                "backend, or the bf16 model.",
                                type_names[t], ops->backend);
                if (n < size)
                        n += (size_t) snprintf(ret + n, size - n, "%s%s: %s", n ? "; " : "", type_names[t],
                                support_text((LkType) t, ops->weights[t], int8));
        }
        return 0;
}

int h3_model_support(const H3Model *m, const LkOps *ops, char *ret, size_t size, Fault *f) {
        return h3_types_support(m->matrix_types, m->int8_cols > 0, ops, ret, size, f);
}
