/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

/* What a run takes and moves, and whether an input is one. */

#define ARENA_ALIGN 256
#define POSITION_MAX (1 << 24) /* whole numbers that f32 holds */

static uint64_t max_of(uint64_t a, uint64_t b) {
        return a > b ? a : b;
}

static uint64_t min_of(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

H3Plan h3_text_plan(uint32_t ranks, H3Range *rows) {
        for (uint32_t i = 0; i < ranks; i++)
                rows[i] = (H3Range){0, 1}; /* none is empty: all receive */
        return (H3Plan){
                .kind = H3_PLAN_KV_GATHER,
                .ranks = ranks,
                .row_tile = 1,
                .chunks = 1,
                .rows = rows,
                .heads = rows,
        };
}

static uint64_t patches_of(const H3VisionInput *v) {
        return v->grid_height * v->grid_width;
}

H3TextSize h3_text_size(const H3TextInput *in, uint32_t ranks) {
        H3TextSize size = {.compute = in->compute, .ranks = ranks, .tokens = in->n};

        for (size_t i = 0; i < in->n_vision; i++) {
                uint64_t n = patches_of(in->vision + i);

                size.patches = max_of(size.patches, n);
                size.all_patches += n;
        }
        return size;
}

TextRun text_run_make(const H3TextModel *m, const H3TextSize *size, uint32_t rank) {
        return (TextRun){
                .self = rank,
                .ranks = size->ranks,
                .m = m,
                .type = size->compute == H3_COMPUTE_F32 ? LK_F32 : LK_BF16,
                .element = size->compute == H3_COMPUTE_F32 ? 4 : 2,
                .size = *size,
        };
}

typedef struct Carver {
        uint8_t *base; /* NULL: only count */
        uint64_t at;
} Carver;

static void *carve(Carver *k, uint64_t bytes) {
        void *p = k->base ? k->base + k->at : NULL;

        k->at += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
        return p;
}

static void carve_layers(TextRun *run, Carver *k) {
        const H3TextConfig *c = &run->m->config;
        uint64_t n = run->size.tokens, e = run->element, piece = min_of(n, TEXT_PIECE_ROWS);
        uint64_t kv = h3_range_size(text_own(run, c->kv_heads)) * c->head_dim;
        uint64_t ffn = h3_range_size(text_own(run, c->ffn)), rope = n * (c->head_dim / 2) * sizeof(float);

        run->h = carve(k, n * c->hidden * e);
        run->y = carve(k, n * c->hidden * e);
        run->q = carve(k, n * kv * (c->heads / c->kv_heads) * e);
        run->k = carve(k, n * kv * e);
        run->v = carve(k, n * kv * e);
        run->o = carve(k, n * c->heads * c->head_dim * e);
        run->gate = carve(k, piece * ffn * e);
        run->up = carve(k, piece * ffn * e);
        run->act = carve(k, piece * c->ffn * e);
        run->cos = carve(k, rope);
        run->sin = carve(k, rope);
}

static void carve_table(TextRun *run, Carver *k) {
        const LkMatrix *table = &run->m->embed;
        uint64_t n = min_of(run->size.tokens, TEXT_PIECE_ROWS);

        run->table = carve(k, n * lk_row_size(table->type, table->cols));
        run->table_scale = carve(k, n * sizeof(float));
        run->table_blocks = carve(k, text_table_blocks(table, n));
}

static void carve_vision(TextRun *run, Carver *k) {
        const H3VisionConfig *c = &run->m->config.vision;
        uint64_t n = run->size.patches, e = run->element;
        uint64_t own = h3_range_size(text_own(run, c->heads)) * c->head_dim;
        uint64_t rope = n * (c->head_dim / 2) * sizeof(float);

        run->patches = carve(k, n * max_of(c->patch, c->hidden) * sizeof(float));
        run->vx = carve(k, n * c->hidden * e);
        run->vh = carve(k, n * c->hidden * e);
        run->vy = carve(k, n * c->hidden * e);
        run->vq = carve(k, n * own * e);
        run->vk = carve(k, n * own * e);
        run->vv = carve(k, n * own * e);
        run->vo = carve(k, n * c->hidden * e);
        run->vact = carve(k, min_of(n, TEXT_PIECE_ROWS) * c->ffn * e);
        run->vcos = carve(k, rope);
        run->vsin = carve(k, rope);
}

uint64_t text_carve(TextRun *run, uint8_t *base) {
        const H3TextConfig *c = &run->m->config;
        Carver both = {.base = base}, layers, vision, table;

        run->x = carve(&both, run->size.tokens * c->hidden * run->element);
        run->io = carve(&both, min_of(run->size.tokens, TEXT_PIECE_ROWS) * c->hidden * sizeof(float));
        for (uint32_t i = 0; run->size.patches > 0 && i < c->vision.n_deepstack; i++)
                run->deepstack[i] = carve(&both, run->size.all_patches / 4 * c->hidden * run->element);
        layers = vision = table = both;
        carve_table(run, &table);
        carve_layers(run, &layers);
        if (run->size.patches > 0)
                carve_vision(run, &vision);
        return max_of(max_of(layers.at, vision.at), table.at);
}

/* Sizes cannot overflow: rows are at most 2^20 (h3_text_check()), widths at most 2^21 (text-bind.c). */
uint64_t h3_text_memory(const H3TextModel *m, const H3TextSize *size) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < size->ranks; i++) {
                TextRun run = text_run_make(m, size, i);

                bytes = max_of(bytes, text_carve(&run, NULL));
        }
        return bytes;
}

/* Numbers of a rank's part of rows of n units. */
static uint64_t part_row(uint64_t n, uint64_t width, const H3TextSize *size, uint32_t rank) {
        return h3_range_size(text_part(n, size->ranks, rank)) * width;
}

uint64_t h3_text_message_max(const H3TextModel *m, const H3TextSize *size, const H3Message *x) {
        const H3TextConfig *c = &m->config;
        const H3VisionConfig *v = &c->vision;
        uint64_t tokens = size->tokens, patches = size->patches, merged = patches / 4, n = 0;
        const struct {
                uint64_t rows, units, width;
        } gathers[] = {
                {tokens, c->kv_heads, (uint64_t) c->heads / c->kv_heads * c->head_dim},
                {tokens, c->hidden, 1},
                {min_of(tokens, TEXT_PIECE_ROWS), c->ffn, 1},
                {patches, v->hidden, 1},
                {patches, v->heads, v->head_dim},
                {min_of(patches, TEXT_PIECE_ROWS), v->ffn, 1},
                {merged, v->merged, 1},
                {merged, c->hidden, 1},
        };

        if (size->ranks < 2 || x->phase != H3_PHASE_IN || x->to != H3_TO_ALL || x->chunk != 0)
                return 0;
        for (size_t i = 0; i < sizeof(gathers) / sizeof(*gathers); i++)
                n = max_of(n, gathers[i].rows * part_row(gathers[i].units, gathers[i].width, size, x->from));
        return n * (size->compute == H3_COMPUTE_F32 ? 4 : 2);
}

/* Bytes of the rank's rows of w, which are cut as n units. */
static uint64_t rows_bytes(const LkMatrix *w, uint64_t n, uint32_t ranks, uint32_t rank) {
        return h3_range_size(text_part(n, ranks, rank)) * (w->rows / n) * lk_row_size(w->type, w->cols);
}

static uint64_t linear_bytes(const LkMatrix *w, uint32_t ranks, uint32_t rank) {
        return rows_bytes(w, w->rows, ranks, rank);
}

static uint64_t merger_bytes(const H3Merger *w, uint32_t ranks, uint32_t rank) {
        return linear_bytes(&w->fc1.w, ranks, rank) + linear_bytes(&w->fc2.w, ranks, rank);
}

uint64_t h3_text_rank_bytes(const H3TextModel *m, uint32_t ranks, uint32_t rank, bool vision) {
        const H3TextConfig *c = &m->config;
        uint64_t n = 0;

        for (uint32_t i = 0; i < c->layers; i++) {
                const H3TextLayer *l = m->layers + i;
                const LkMatrix *heads[] = {&l->q, &l->k, &l->v},
                               *rest[] = {&l->out, &l->gate, &l->up, &l->down};

                for (size_t j = 0; j < sizeof(heads) / sizeof(*heads); j++)
                        n += rows_bytes(heads[j], c->kv_heads, ranks, rank);
                for (size_t j = 0; j < sizeof(rest) / sizeof(*rest); j++)
                        n += linear_bytes(rest[j], ranks, rank);
        }
        if (!vision)
                return n;
        n += linear_bytes(&m->patch.w, ranks, rank) + merger_bytes(&m->merger, ranks, rank);
        for (uint32_t i = 0; i < c->vision.n_deepstack; i++)
                n += merger_bytes(m->deepstack + i, ranks, rank);
        for (uint32_t i = 0; i < c->vision.depth; i++) {
                const H3VisionBlockWeights *w = m->blocks + i;

                n += rows_bytes(&w->qkv.w, c->vision.heads, ranks, rank) +
                     linear_bytes(&w->out.w, ranks, rank) + linear_bytes(&w->fc1.w, ranks, rank) +
                     linear_bytes(&w->fc2.w, ranks, rank);
        }
        return n;
}

static int check_vision(const H3TextInput *in, Fault *f) {
        uint64_t end = 0;

        for (size_t i = 0; i < in->n_vision; i++) {
                const H3VisionInput *v = in->vision + i;
                uint64_t patches, merged;

                if (v->grid_height == 0 || v->grid_width == 0 || v->grid_height % 2 != 0 ||
                        v->grid_width % 2 != 0 ||
                        __builtin_mul_overflow(v->grid_height, v->grid_width, &patches) ||
                        patches > H3_VISION_PATCHES_MAX)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "Vision input %zu has %" PRIu64 " x %" PRIu64
                                " patches; expected even numbers, at most %" PRIu64 " patches.",
                                i, v->grid_height, v->grid_width, H3_VISION_PATCHES_MAX);
                if (!v->patches)
                        return fault_set(
                                f, -EINVAL, FAULT_INVALID_TENSOR, "Vision input %zu has no patches.", i);
                merged = patches / 4;
                if (v->first_token < end || merged > in->n || v->first_token > in->n - merged)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Vision input %zu has the tokens from %" PRIu64 " on, %" PRIu64
                                " of them; expected from %" PRIu64 " on and at most %" PRIu64 " in all.",
                                i, v->first_token, merged, end, in->n);
                end = v->first_token + merged;
        }
        return 0;
}

static int check_ids(const H3TextModel *m, const H3TextInput *in, Fault *f) {
        size_t next = 0;

        for (uint64_t i = 0; i < in->n; i++) {
                if (next < in->n_vision && i == in->vision[next].first_token) {
                        i += patches_of(in->vision + next) / 4 - 1;
                        next++;
                        continue;
                }
                if (in->ids[i] < 0 || (uint32_t) in->ids[i] >= m->config.vocab)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Token %" PRIu64 " has the id %" PRId32 "; the model has 0 to %" PRIu32 ".",
                                i, in->ids[i], m->config.vocab - 1);
        }
        for (uint64_t i = 0; i < 3 * in->n; i++)
                if (in->positions[i] < 0 || in->positions[i] > POSITION_MAX)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Token %" PRIu64 " has the position %" PRId32 "; expected 0 to %d.",
                                i % in->n, in->positions[i], POSITION_MAX);
        return 0;
}

int h3_text_check_length(const H3TextModel *m, uint64_t n, Fault *f) {
        if (n < 1 || n > m->config.tokens_max)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "There are %" PRIu64 " tokens; this conditioner takes 1 to %" PRIu32
                        " (max_position_embeddings). Give it a shorter prompt, or fewer or smaller pictures.",
                        n, m->config.tokens_max);
        return 0;
}

int h3_text_check(const H3TextModel *m, const H3TextInput *in, Fault *f) {
        int r;

        r = h3_text_check_length(m, in->n, f);
        if (r < 0)
                return r;
        if (!in->ids || !in->positions || (in->n_vision > 0 && !in->vision))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Ids, positions or vision inputs were not given.");
        r = check_vision(in, f);
        return r < 0 ? r : check_ids(m, in, f);
}
