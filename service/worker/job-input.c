/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-input.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

#define SHAPE_TEXT_MAX (WIRE_DIMS_MAX * 22 + 3)

/* "[24, *, 4]"; wildcard: 0 is "any size". */
static const char *format_dims(
        const uint64_t *dims, uint32_t n, bool wildcard, char buf[static SHAPE_TEXT_MAX]) {
        size_t at = 0;

        buf[at++] = '[';
        for (uint32_t i = 0; i < n && i < WIRE_DIMS_MAX; i++) {
                const char *comma = i > 0 ? ", " : "";
                int k;

                if (wildcard && dims[i] == 0)
                        k = snprintf(buf + at, SHAPE_TEXT_MAX - at, "%s*", comma);
                else
                        k = snprintf(buf + at, SHAPE_TEXT_MAX - at, "%s%" PRIu64, comma, dims[i]);
                at += (size_t) k;
        }
        (void) snprintf(buf + at, SHAPE_TEXT_MAX - at, "]");
        return buf;
}

bool tensor_is_absent(const WireTensor *w) {
        return w->n_dims == 0 && w->size == 0;
}

static int check_shape(const WireTensor *w, const TensorRule *rule, uint64_t *ret_elements, Fault *f) {
        char have[SHAPE_TEXT_MAX], want[SHAPE_TEXT_MAX];
        bool ok = w->n_dims == rule->n_dims;
        uint64_t n = 1;

        for (uint32_t i = 0; ok && i < rule->n_dims; i++)
                ok = w->shape[i] >= 1 && (rule->shape[i] == 0 || w->shape[i] == rule->shape[i]) &&
                     !__builtin_mul_overflow(n, w->shape[i], &n);

        if (!ok)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s has the shape %s, expected %s.", rule->name,
                        format_dims(w->shape, w->n_dims, false, have),
                        format_dims(rule->shape, rule->n_dims, true, want));

        if (rule->elements_max > 0 && n > rule->elements_max)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s has %" PRIu64 " elements, at most %" PRIu64 " are allowed.", rule->name,
                        n, rule->elements_max);

        *ret_elements = n;
        return 0;
}

static int check_place(
        const WireTensor *w, const TensorRule *rule, uint64_t elements, uint64_t arena_size, Fault *f) {
        uint64_t size, end;

        if (__builtin_mul_overflow(elements, st_type_size(rule->type), &size) || size != w->size)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s is given %" PRIu64 " bytes, its shape needs %" PRIu64
                        " elements of %" PRIu64 " bytes.",
                        rule->name, w->size, elements, st_type_size(rule->type));

        if (__builtin_add_overflow(w->offset, w->size, &end) || end > arena_size)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s lies outside its arena: %" PRIu64 " bytes at offset %" PRIu64
                        ", the arena has %" PRIu64 ".",
                        rule->name, w->size, w->offset, arena_size);
        return 0;
}

int tensor_check(const WireTensor *w, const TensorRule *rule, const Arena *arena, Fault *f) {
        uint64_t elements = 0;
        int r;

        if (w->dtype != (uint32_t) rule->type) {
                const char *name = w->dtype < ST_TYPE_MAX ? st_type_name((StType) w->dtype) : NULL;

                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "Tensor %s has the type %s, expected %s.",
                        rule->name, name ? name : "(unknown)", st_type_name(rule->type));
        }

        r = check_shape(w, rule, &elements, f);
        if (r < 0)
                return r;

        return check_place(w, rule, elements, arena->size, f);
}

int tensor_copy(const WireTensor *w, const TensorRule *rule, const Arena *arena, void **ret, Fault *f) {
        void *copy;
        int r;

        r = tensor_check(w, rule, arena, f);
        if (r < 0)
                return r;

        copy = malloc((size_t) w->size);
        if (!copy)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "There is no memory for a copy of tensor %s: %" PRIu64 " bytes.", rule->name,
                        w->size);

        memory_prefer_huge(copy, w->size);
        memcpy(copy, (const char *) arena->map + w->offset, (size_t) w->size);
        *ret = copy;
        return 0;
}

static bool is_special(StType type, const void *values, uint64_t i, bool *ret_nan) {
        if (type == ST_F32) {
                uint32_t v;

                memcpy(&v, (const char *) values + i * 4, sizeof(v));
                *ret_nan = (v & 0x007fffffu) != 0;
                return (v & 0x7f800000u) == 0x7f800000u;
        } else {
                uint16_t v;

                memcpy(&v, (const char *) values + i * 2, sizeof(v));
                *ret_nan = (v & 0x007fu) != 0;
                return (v & 0x7f80u) == 0x7f80u;
        }
}

/* How many are finite for sure, from the first on: whole pieces, without a branch for every number. */
#define PIECE 1024u

static uint64_t skip_finite(StType type, const void *values, uint64_t n) {
        uint64_t at = 0;

        for (bool special = false; n - at >= PIECE; at += PIECE) {
                if (type == ST_F32)
                        for (uint32_t i = 0; i < PIECE; i++) {
                                uint32_t v;

                                memcpy(&v, (const char *) values + (at + i) * sizeof(v), sizeof(v));
                                special |= (v & 0x7f800000u) == 0x7f800000u;
                        }
                else
                        for (uint32_t i = 0; i < PIECE; i++) {
                                uint16_t v;

                                memcpy(&v, (const char *) values + (at + i) * sizeof(v), sizeof(v));
                                special |= (v & 0x7f80u) == 0x7f80u;
                        }
                if (special)
                        break;
        }
        return at;
}

int tensor_check_finite(const char *name, StType type, const void *values, uint32_t n_dims,
        const uint64_t *shape, Fault *f) {
        uint64_t n = 1, place[WIRE_DIMS_MAX] = {};
        char text[SHAPE_TEXT_MAX];

        if (n_dims > WIRE_DIMS_MAX || (type != ST_F32 && type != ST_BF16))
                return -EINVAL;
        for (uint32_t i = 0; i < n_dims; i++)
                n *= shape[i];

        for (uint64_t i = skip_finite(type, values, n); i < n; i++) {
                bool nan;

                if (!is_special(type, values, i, &nan))
                        continue;

                for (uint32_t d = n_dims; d > 0; d--) {
                        place[d - 1] = i % shape[d - 1];
                        i /= shape[d - 1];
                }
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s has %s at %s: only finite numbers are allowed.", name,
                        nan ? "NaN" : "Inf", format_dims(place, n_dims, false, text));
        }
        return 0;
}
