/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/lora-private.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

/* One matrix and the adapters that change it. Row by row of the result depends on the same rows alone, so a
 * matrix may be merged in parts. Products are the op table's; sums are made here. */

#define CHUNK_ROWS 1024u

typedef struct Merge {
        const LkOps *ops;
        LkContext *context;
        LkMatrix base;
        LkMatrix device; /* the base where the operations may read it */
        LkType type;    /* of the result */
        uint64_t chunk; /* rows */

        /* device memory, parts of one piece */
        uint8_t *arena;
        float *sum, *product, *b, *a_transposed;
        int8_t *int8;
        float *int8_scale;

        float *host_sum, *host_product, *host_b, *host_a; /* as above, owned */
        uint8_t *data;                                    /* of the result */
        float *scale;                                     /* int8 only */
} Merge;

static LkType merged_type(LkType base, H3Compute compute) {
        if (base == LK_I8)
                return LK_I8;
        return compute == H3_COMPUTE_F32 || base == LK_F32 || base == LK_F16 ? LK_F32 : LK_BF16;
}

static uint64_t rounded_up(uint64_t bytes) {
        return (bytes + 255) / 256 * 256;
}

static uint64_t whole_pages(uint64_t bytes) {
        return (bytes + H3_MERGED_ALIGN - 1) / H3_MERGED_ALIGN * H3_MERGED_ALIGN;
}

static int merge_memory(Merge *g, uint64_t rank) {
        uint64_t cell = g->chunk * g->base.cols * sizeof(float), b = g->chunk * rank * sizeof(float);
        uint64_t a = g->base.cols * rank * sizeof(float), sum = rounded_up(cell), at = 0;
        void *arena;
        int r;

        g->host_sum = malloc(cell);
        g->host_product = malloc(cell);
        g->host_b = malloc(b);
        g->host_a = malloc(a);
        if (!g->host_sum || !g->host_product || !g->host_b || !g->host_a)
                return -ENOMEM;

        r = g->ops->memory_new(g->context,
                3 * sum + rounded_up(b) + rounded_up(a) + rounded_up(g->chunk * sizeof(float)), &arena);
        if (r < 0)
                return r;
        g->arena = arena;
        g->sum = (float *) arena;
        at += sum;
        g->product = (float *) (void *) (g->arena + at);
        at += sum;
        g->int8 = (int8_t *) (g->arena + at);
        at += sum;
        g->b = (float *) (void *) (g->arena + at);
        at += rounded_up(b);
        g->a_transposed = (float *) (void *) (g->arena + at);
        at += rounded_up(a);
        g->int8_scale = (float *) (void *) (g->arena + at);
        return 0;
}

static void merge_done(Merge *g) {
        if (g->arena)
                g->ops->memory_free(g->context, g->arena);
        free(g->host_sum);
        free(g->host_product);
        free(g->host_b);
        free(g->host_a);
        free(g->data);
        free(g->scale);
}

static bool finite_numbers(const float *x, uint64_t n) {
        for (uint64_t i = 0; i < n; i++)
                if (!isfinite(x[i]))
                        return false;
        return true;
}

/* Rows [begin, begin + n) of base, expanded, into host_sum. */
static int expand(const Merge *g, uint64_t begin, uint64_t n) {
        const LkDequantise args = {
                .w = lk_matrix_rows(&g->device, begin, n), .y = g->sum, .y_ld = g->base.cols};
        const LkVector *in_scale = &g->base.quant.in_scale;
        int r;

        r = g->ops->dequantise(g->context, &args);
        if (r >= 0)
                r = g->ops->download(g->context, g->host_sum, g->sum, n * g->base.cols * sizeof(float));
        if (r < 0 || !in_scale->data)
                return r;
        for (uint64_t i = 0; i < n; i++)
                for (uint64_t k = 0; k < g->base.cols; k++)
                        g->host_sum[i * g->base.cols + k] *= h3_number(in_scale->data, in_scale->type, k);
        return 0;
}

/* host_sum += factor * B . A */
static int add(const Merge *g, const LoraDelta *d, uint64_t begin, uint64_t n, Fault *f) {
        const H3Tensor *a = d->module->a, *b = d->module->b;
        LkType a_type = h3_float_type(a->entry->type), b_type = h3_float_type(b->entry->type);
        uint64_t rank = a->entry->shape[0], cols = g->base.cols;
        const LkGemm args = {
                .m = n,
                .x = g->b,
                .x_type = LK_F32,
                .x_ld = rank,
                .w = {.data = g->a_transposed,
                        .type = LK_F32,
                        .rows = cols,
                        .cols = rank,
                        .row_stride = rank * sizeof(float),
                        .block_rows = cols,
                        .block_stride = cols * rank * sizeof(float)},
                .y = g->product,
                .y_type = LK_F32,
                .y_ld = cols,
        };
        int r;

        for (uint64_t i = 0; i < rank; i++)
                for (uint64_t k = 0; k < cols; k++)
                        g->host_a[k * rank + i] = h3_number(a->data, a_type, i * cols + k);
        for (uint64_t i = 0; i < n; i++) {
                uint64_t row = begin + i;
                uint64_t from = d->slot.first + row / d->slot.block_rows * d->slot.block_step +
                                row % d->slot.block_rows;

                for (uint64_t k = 0; k < rank; k++)
                        g->host_b[i * rank + k] = h3_number(b->data, b_type, from * rank + k);
        }
        if (!finite_numbers(g->host_a, rank * cols) || !finite_numbers(g->host_b, n * rank))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The adapter's module %.200s has numbers that are not finite.", d->module->name);

        r = g->ops->upload(g->context, g->a_transposed, g->host_a, rank * cols * sizeof(float));
        if (r >= 0)
                r = g->ops->upload(g->context, g->b, g->host_b, n * rank * sizeof(float));
        if (r >= 0)
                r = g->ops->gemm(g->context, &args);
        if (r >= 0)
                r = g->ops->download(g->context, g->host_product, g->product, n * cols * sizeof(float));
        if (r < 0)
                return r;
        for (uint64_t i = 0; i < n * cols; i++)
                g->host_sum[i] = g->host_sum[i] + d->factor * g->host_product[i];
        return 0;
}

/* host_sum to rows [begin, begin + n) of the result. */
static int store(const Merge *g, uint64_t begin, uint64_t n) {
        uint64_t cols = g->base.cols, size = lk_row_size(g->type, 1);
        uint8_t *to = g->data + begin * cols * size;
        const LkConvert convert = {
                .m = n,
                .n = cols,
                .x = g->sum,
                .x_type = LK_F32,
                .x_ld = cols,
                .y = g->product,
                .y_type = LK_BF16,
                .y_ld = cols,
        };
        const LkQuantise quantise = {
                .x_type = LK_F32,
                .m = n,
                .k = cols,
                .x = g->sum,
                .x_ld = cols,
                .rotation = g->base.quant.rotation,
                .q = g->int8,
                .q_ld = cols,
                .scale = g->int8_scale,
        };
        int r;

        if (g->type == LK_F32) {
                memcpy(to, g->host_sum, n * cols * size);
                return 0;
        }
        r = g->ops->upload(g->context, g->sum, g->host_sum, n * cols * sizeof(float));
        if (r < 0)
                return r;
        if (g->type == LK_BF16) {
                r = g->ops->convert(g->context, &convert);
                return r < 0 ? r : g->ops->download(g->context, to, g->product, n * cols * size);
        }
        r = g->ops->quantise(g->context, &quantise);
        if (r >= 0)
                r = g->ops->download(g->context, to, g->int8, n * cols);
        return r < 0 ? r : g->ops->download(g->context, g->scale + begin, g->int8_scale, n * sizeof(float));
}

/* Hands data and scale to the model and lets the slot point to them. */
static int own(H3Model *m, LkMatrix *slot, Merge *g) {
        uint64_t stride = lk_row_size(g->type, g->base.cols);
        H3Merged *merged = realloc(m->merged, (m->n_merged + 2) * sizeof(*merged));

        if (!merged)
                return -ENOMEM;
        m->merged = merged;
        *slot = (LkMatrix){
                .data = g->data,
                .type = g->type,
                .rows = g->base.rows,
                .cols = g->base.cols,
                .row_stride = stride,
                .block_rows = g->base.rows,
                .block_stride = g->base.rows * stride,
        };
        m->private_bytes += g->base.rows * stride;
        m->merged[m->n_merged++] = (H3Merged){STEAL_PTR(g->data), whole_pages(g->base.rows * stride)};
        if (g->type == LK_I8) {
                slot->quant = (LkQuant){.scale = g->scale,
                        .scale_stride = sizeof(float),
                        .rotation = g->base.quant.rotation};
                m->private_bytes += g->base.rows * sizeof(float);
                m->merged[m->n_merged++] =
                        (H3Merged){STEAL_PTR(g->scale), whole_pages(g->base.rows * sizeof(float))};
        }
        return 0;
}

static int merge_rows(Merge *g, const LoraDelta *deltas, size_t n, Fault *f) {
        for (uint64_t begin = 0; begin < g->base.rows; begin += g->chunk) {
                uint64_t rows = g->base.rows - begin < g->chunk ? g->base.rows - begin : g->chunk;
                int r;

                r = expand(g, begin, rows);
                for (size_t i = 0; r >= 0 && i < n; i++)
                        r = add(g, deltas + i, begin, rows, f);
                if (r >= 0)
                        r = store(g, begin, rows);
                if (r < 0)
                        return r;
        }
        return 0;
}

static H3Part part_of(const H3Model *m, const LoraTarget *t) {
        if (t->refiner)
                return (H3Part){H3_PART_TEXT, 0};

        switch (t->part) {
        case LORA_QKV:
        case LORA_Q:
        case LORA_K:
        case LORA_V:
                return (H3Part){H3_PART_FEED, t->layer};
        case LORA_OUT:
        case LORA_FC1:
        case LORA_FC2:
                return (H3Part){H3_PART_FINISH, t->layer};
        case LORA_ADALN:
                return (H3Part){H3_PART_ADALN, t->layer};
        case LORA_FINAL_ADALN:
                return (H3Part){H3_PART_ADALN, m->config.layers};
        case LORA_TIME_1:
        case LORA_TIME_2:
                return (H3Part){H3_PART_TIME, 0};
        case LORA_TEXT_IN:
                return (H3Part){H3_PART_TEXT, 0};
        default:
                return (H3Part){H3_PART_ENDS, 0};
        }
}

/* With the base's matrix in device memory, where that is needed. */
static int merge_taken(const H3Model *m, Merge *g, const LoraDelta *deltas, size_t n, H3Weights *weights, Fault *f) {
        const LoraTarget *target = &deltas[0].module->target;
        H3Part part = part_of(m, target);
        LoraSlot slots[LORA_SLOTS_MAX];
        const void *taken;
        int r;

        g->device = g->base;
        if (!weights)
                return merge_rows(g, deltas, n, f);

        r = weights->take(weights, part, &taken);
        if (r < 0)
                return r;
        if (lora_slots((void *) taken, target, false, slots) > deltas[0].index) {
                g->device = *slots[deltas[0].index].matrix;
                r = merge_rows(g, deltas, n, f);
        } else
                r = -EINVAL;
        weights->give(weights, part);
        return r;
}

/* Whole blocks of rows. */
static uint64_t chunk_of(const LkMatrix *base) {
        uint64_t block = base->block_rows < base->rows ? base->block_rows : 1;
        uint64_t chunk = block >= CHUNK_ROWS ? block : CHUNK_ROWS / block * block;

        return chunk < base->rows ? chunk : base->rows;
}

static uint64_t largest_rank(const LoraDelta *deltas, size_t n) {
        uint64_t rank = 0;

        for (size_t i = 0; i < n; i++)
                rank = deltas[i].module->a->entry->shape[0] > rank ? deltas[i].module->a->entry->shape[0]
                                                                   : rank;
        return rank;
}

int lora_merge_size(
        const LoraDelta *deltas, size_t n, H3Compute compute, uint64_t *ret_kept, uint64_t *ret_work) {
        const LkMatrix *base = deltas[0].slot.matrix;
        LkType type = merged_type(base->type, compute);
        uint64_t chunk = chunk_of(base), rank = largest_rank(deltas, n), cell, factors, kept;

        /* on the host: sum, product, B and A; on the device the same and the quantised rows (merge_memory())
         */
        if (__builtin_mul_overflow(chunk * sizeof(float), base->cols, &cell) ||
                __builtin_mul_overflow(rank * sizeof(float), chunk + base->cols, &factors) ||
                __builtin_mul_overflow(lk_row_size(type, base->cols), base->rows, &kept) ||
                cell > UINT64_MAX / 16 || factors > UINT64_MAX / 16)
                return -EOVERFLOW;
        *ret_kept = kept + (type == LK_I8 ? base->rows * sizeof(float) : 0);
        *ret_work = 5 * cell + 2 * factors;
        return 0;
}

int lora_merge(H3Model *m, const LoraDelta *deltas, size_t n, H3Compute compute, const H3Rank *on, Fault *f) {
        LkMatrix *slot = deltas[0].slot.matrix;
        Merge g = {.ops = on->ops, .context = on->context, .base = *slot, .type = merged_type(slot->type, compute)};
        uint64_t rank = largest_rank(deltas, n);
        int r;

        g.chunk = chunk_of(&g.base);

        g.data = aligned_alloc(H3_MERGED_ALIGN, whole_pages(g.base.rows * lk_row_size(g.type, g.base.cols)));
        if (g.type == LK_I8)
                g.scale = aligned_alloc(H3_MERGED_ALIGN, whole_pages(g.base.rows * sizeof(float)));
        r = g.data && (g.scale || g.type != LK_I8) ? merge_memory(&g, rank) : -ENOMEM;
        if (r >= 0)
                r = merge_taken(m, &g, deltas, n, on->weights, f);
        if (r >= 0)
                r = own(m, slot, &g);
        merge_done(&g);
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "No memory for the merged copies of the matrices that the adapters change (%llu "
                        "bytes so "
                        "far); free some and try again.",
                        (unsigned long long) m->private_bytes);
        return r < 0 ? fault_set(f, r, FAULT_INTERNAL, "Merging %.200s failed: %s.", deltas[0].module->name,
                               strerrordesc_np(-r))
                     : 0;
}
