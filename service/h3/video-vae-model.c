/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/video-vae.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3VideoVae *, h3_video_vae_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

#define ARENA_ALIGN 256u

static int check_backend(const H3VideoVae *m, const LkOps *ops, Fault *f) {
        for (unsigned t = LK_F32; t < LK_TYPE_MAX; t++)
                if ((m->matrix_types & 1u << t) && ops->weights[t] == LK_REFUSED)
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "The video VAE has weights of a type that the backend %s does not run. Use "
                                "another backend, or the f16 file.",
                                ops->backend);
        return 0;
}

int h3_video_vae_open(const H3File *files, size_t n_files, const LkOps *ops, H3VideoVae **ret, Fault *f) {
        CLEANUP(h3_video_vae_freep) H3VideoVae *m = NULL;
        CLEANUP(h3_tensor_set_freep) H3TensorSet *set = NULL;
        H3Statistics stored;
        VideoSaid said;
        int r;

        r = h3_tensor_set_new(files, n_files, &set, f);
        if (r < 0)
                return r;
        m = calloc(1, sizeof(*m));
        if (!m)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");

        r = video_config_read(set->config, set->config_size, &said, f);
        if (r >= 0)
                r = h3_statistics_read(set, &stored, f);
        if (r >= 0)
                r = video_config_stored(&stored, &said, f);
        if (r >= 0)
                r = video_vae_bind(set, &said, m, f);
        if (r >= 0)
                r = video_config_check(&said, &m->config, f);
        if (r >= 0)
                r = video_config_statistics(&said, &m->config, f);
        if (r >= 0 && ops)
                r = check_backend(m, ops, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(m);
        return 0;
}

H3VideoVae *h3_video_vae_free(H3VideoVae *m) {
        if (!m)
                return NULL;
        for (size_t i = 0; i < H3_VIDEO_LEVELS; i++)
                free(m->levels[i].blocks);
        free(m->layers);
        free(m->owned);
        free(m);
        return NULL;
}

const H3VideoConfig *h3_video_vae_config(const H3VideoVae *m) {
        return &m->config;
}

uint64_t h3_video_vae_weight_bytes(const H3VideoVae *m) {
        return m->weight_bytes;
}

const char *h3_video_vae_layout(const H3VideoVae *m) {
        return m->layout;
}

void *video_take(VideoArena *a, uint64_t count, uint64_t size) {
        uint64_t bytes, end, begin = a->used;

        if (__builtin_mul_overflow(count, size, &bytes) ||
                __builtin_add_overflow(bytes, ARENA_ALIGN - 1, &bytes) ||
                __builtin_add_overflow(begin, bytes / ARENA_ALIGN * ARENA_ALIGN, &end) ||
                end > PTRDIFF_MAX) {
                a->overflow = true;
                return NULL;
        }
        a->used = end;
        return a->base ? a->base + begin : NULL;
}

int video_tap(const H3Rank *rank, const H3StepHooks *hooks, const char *name, const float *x, uint64_t rows,
        uint64_t columns) {
        CLEANUP_FREE float *values = NULL;
        int r;

        if (!hooks || !hooks->on_tap)
                return 0;
        values = malloc(rows * columns * sizeof(float));
        if (!values)
                return -ENOMEM;
        r = rank->ops->download(rank->context, values, x, rows * columns * sizeof(float));
        if (r < 0)
                return r;
        hooks->on_tap(hooks->userdata, name, values, rows, columns);
        return 0;
}

int video_gemm(const H3Rank *rank, LkType type, uint64_t m, const void *x, const VideoLinear *l, void *y) {
        const LkGemm args = {
                .m = m,
                .x = x,
                .x_type = type,
                .x_ld = l->w.cols,
                .w = l->w,
                .bias = l->bias,
                .y = y,
                .y_type = type,
                .y_ld = l->w.rows,
        };

        return rank->ops->gemm(rank->context, &args);
}

int video_device_fault(int r, const char *what, Fault *f) {
        if (r == -ENOMEM)
                return fault_set(
                        f, r, FAULT_DOES_NOT_FIT, "No memory to %s; free some and try again.", what);
        if (r == -ECANCELED)
                return r;
        return fault_set(f, r, FAULT_INTERNAL, "Could not %s: error %d of the device.", what, r);
}

int video_check_rank(const H3Rank *rank, bool encode, Fault *f) {
        const LkOps *ops = rank->ops;

        if (ops->gemm && ops->attention && ops->norm && ops->qk_norm_rope && ops->residual && ops->swiglu &&
                ops->layer_norm && (encode || ops->unpatch) && (!encode || (ops->conv && ops->group_norm)))
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "The backend %s does not run the video VAE yet. Use another one.", ops->backend);
}

int video_check_job(uint32_t part, uint32_t parts, uint32_t tile, uint32_t n, const H3VideoAxis *rows,
        const H3VideoAxis *cols, Fault *f) {
        uint32_t tiles = rows->n * cols->n;

        if (part < parts && n > 0 && n <= tiles && tile <= tiles - n)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INTERNAL,
                "Part %u, %u tiles from %u on, are not of the plan (%u parts, %u tiles).", part, n, tile, parts, tiles);
}
