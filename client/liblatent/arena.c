/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/arena.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "client/liblatent/error.h"
#include "service/shared/safetensors.h"
#include "service/shared/wire.h"

_Static_assert(sizeof(latent_tensor) == 104, "public layout changed");

int arena_take(Arena *a, uint64_t size, uint64_t *ret_offset) {
        uint64_t begin, end;

        if (__builtin_add_overflow(a->used, LATENT_ALIGNMENT - 1, &begin))
                return -ENOSPC;
        begin &= ~(uint64_t) (LATENT_ALIGNMENT - 1);
        if (__builtin_add_overflow(begin, size, &end) || end > a->size)
                return -ENOSPC;

        a->used = end;
        *ret_offset = begin;
        return 0;
}

int tensor_size(const latent_tensor *t, uint64_t *ret_size) {
        uint64_t size;
        bool empty = false;

        if (strnlen(t->dtype, sizeof(t->dtype)) == sizeof(t->dtype) || t->n_dims > LATENT_DIMS_MAX)
                return -EINVAL;
        size = st_type_size(st_type_parse(t->dtype));
        if (size == 0)
                return -EINVAL;

        for (uint32_t i = 0; i < t->n_dims; i++) {
                if (t->shape[i] == 0)
                        empty = true;
                else if (__builtin_mul_overflow(size, t->shape[i], &size))
                        return -EOVERFLOW;
        }

        *ret_size = empty ? 0 : size;
        return 0;
}

static WireSampler parse_sampler(const char *s) {
        if (!s || strcmp(s, "euler") == 0)
                return WIRE_SAMPLER_EULER;
        if (strcmp(s, "res_multistep_perstream") == 0)
                return WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM;
        return WIRE_SAMPLER_RES_MULTISTEP;
}

int slot_bytes(const latent_tensor *video, const latent_tensor *audio, const char *sampler, uint64_t *ret) {
        uint64_t v, a;
        WireSlot slot;
        int r;

        r = tensor_size(video, &v);
        if (r < 0)
                return r;
        r = tensor_size(audio, &a);
        if (r < 0)
                return r;
        r = wire_slot_place(parse_sampler(sampler), v, a, &slot);
        if (r < 0)
                return r;

        *ret = slot.stride;
        return 0;
}

LATENT_PUBLIC uint64_t latent_output_bytes(const latent_tensor *video, const latent_tensor *audio, const char *sampler,
        uint32_t steps, int keep_steps) {
        /* The start is a state too; without KEEP_STEPS two slots take turns. In front of them lies the commit word. */
        uint64_t slots = keep_steps ? (uint64_t) steps + 1 : 2, size;

        if (slot_bytes(video, audio, sampler, &size) < 0 || __builtin_mul_overflow(size, slots, &size) ||
                __builtin_add_overflow(size, 4096, &size))
                return UINT64_MAX;

        return size;
}
