/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/dit.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/dit-private.h"
#include "service/shared/cleanup.h"

#define ARENA_ALIGN 256

void dit_tap_host(
        const DitRun *run, const char *name, const float *values, uint64_t rows, uint64_t columns) {
        if (run->hooks && run->hooks->on_tap)
                run->hooks->on_tap(run->hooks->userdata, name, values, rows, columns);
}

int dit_tap(const DitRun *run, int layer, const char *name, const void *x, LkType type, uint64_t rows,
        uint64_t columns) {
        CLEANUP_FREE float *values = NULL;
        uint64_t n = rows * columns;
        char full[64];
        int r;

        if (!run->hooks || !run->hooks->on_tap || n == 0)
                return 0;
        values = malloc(n * sizeof(float));
        if (!values)
                return -ENOMEM;
        r = run->ops->download(run->context, values, x, n * lk_type_size(type));
        if (r < 0)
                return r;
        if (type == LK_BF16) /* widened in place from the end: element i is read before it is overwritten */
                for (uint64_t i = n; i-- > 0;) {
                        uint16_t half;
                        uint32_t bits;

                        memcpy(&half, (const uint8_t *) values + 2 * i, sizeof(half));
                        bits = (uint32_t) half << 16;
                        memcpy(values + i, &bits, sizeof(bits));
                }

        if (layer >= 0)
                (void) snprintf(full, sizeof(full), "block.%d.%s", layer, name);
        else
                (void) snprintf(full, sizeof(full), "%s", name);
        dit_tap_host(run, full, values, rows, columns);
        return 0;
}

/* Until a run is given a plan. */
static const H3Range nothing = {0, 0};
static const H3Plan no_plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &nothing, .heads = &nothing};

DitRun dit_run_make(const H3Rank *rank, const H3Model *m, H3Compute compute) {
        return (DitRun){
                .ops = rank ? rank->ops : NULL,
                .context = rank ? rank->context : NULL,
                .plan = &no_plan,
                .c = &m->config,
                .compute = compute,
                .type = compute == H3_COMPUTE_F32 ? LK_F32 : LK_BF16,
                .element = compute == H3_COMPUTE_F32 ? 4 : 2,
                .coordinate_type =
                        compute == H3_COMPUTE_F32 || m->config.curve_points > 0 ? LK_F32 : LK_BF16,
                .int8_cols = compute == H3_COMPUTE_F32 ? 0 : m->int8_cols,
                .piece_rows = rank && rank->piece_rows > 0 ? rank->piece_rows : DIT_PIECE_ROWS,
                .weights = rank ? rank->weights : NULL,
        };
}

/* The rank's part of a sequence of n_rows rows. */
static DitRun run_of_rank(const H3Rank *rank, const H3Model *m, H3Compute compute, uint64_t n_rows) {
        DitRun run = dit_run_make(rank, m, compute);

        run.rank = rank;
        run.self = rank->index;
        run.plan = rank->plan;
        run.n_rows = n_rows;
        run.rows = rank->plan->rows[rank->index];
        run.heads = h3_plan_heads(rank->plan, rank->index, m->config.heads);
        run.sparse = rank->plan->sparse;
        return run;
}

static uint64_t max_of(uint64_t a, uint64_t b) {
        return a > b ? a : b;
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

static uint64_t largest_chunk(const H3Plan *p, uint32_t begin, uint32_t end) {
        uint64_t rows = 0;

        for (uint32_t i = begin; i < end; i++)
                for (uint32_t chunk = 0; chunk < p->chunks; chunk++)
                        rows = max_of(rows, h3_range_size(h3_plan_chunk(p, i, chunk)));
        return rows;
}

/* Rows of other ranks in the chunk that has most of them. */
static uint64_t largest_rest(const H3Plan *p, uint32_t self) {
        uint64_t rows = 0;

        for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
                uint64_t n = 0;

                for (uint32_t i = 0; i < p->ranks; i++)
                        n += i != self ? h3_range_size(h3_plan_chunk(p, i, chunk)) : 0;
                rows = max_of(rows, n);
        }
        return rows;
}

/* What sparse attention works with. */
static void carve_sparse(DitRun *run, Carver *k, uint64_t rows_q) {
        uint64_t own_inner = dit_heads_width(run, run->heads), n;
        uint64_t lists = h3_range_size(run->heads) * DIT_ROUTED_BLOCKS;
        bool gated = h3_sparse_is_gated(run->sparse);

        if (!run->sparse)
                return;
        n = run->sparse->n;
        run->coarse_gate = gated ? carve(k, rows_q * own_inner * run->element) : NULL;
        run->block_start = carve(k, (n + 1) * sizeof(*run->block_start));
        run->q_mean = carve(k, n * own_inner * sizeof(float));
        run->k_mean = carve(k, n * own_inner * sizeof(float));
        run->v_mean = carve(k, n * own_inner * sizeof(float));
        run->k_centre = carve(k, 2 * own_inner * sizeof(float));
        run->coarse = gated ? carve(k, n * own_inner * sizeof(float)) : NULL;
        run->list = carve(k, lists * n * sizeof(*run->list));
        run->score = carve(k, lists * n * sizeof(float));
        run->count = carve(k, dit_counts(run) * sizeof(*run->count));
}

/* What of attention the plan asks for beside the arrays of every rank. */
static void carve_exchange(DitRun *run, Carver *k) {
        uint64_t own_inner = dit_heads_width(run, run->heads) * run->element;

        if (run->plan->ranks == 1 || run->plan->kind == H3_PLAN_KV_GATHER)
                return;
        run->o_out = carve(k, largest_rest(run->plan, run->self) * own_inner);
        if (run->plan->kind == H3_PLAN_QKV_ALL_TO_ALL)
                for (unsigned i = 0; i < (h3_sparse_is_gated(run->sparse) ? 4u : 3u); i++)
                        run->qkv_out[i] = carve(k, run->own_chunk * run->c->inner * run->element);
}

static uint64_t video_row(const H3Config *c) {
        return (uint64_t) c->video_channels * c->patch_h * c->patch_w;
}

/* Numbers of the widest latent row. */
static uint64_t io_row(const H3Config *c) {
        return max_of(video_row(c), c->audio_channels);
}

/* Where latent rows from own row `row` (of the sequence) on are, dense, in f32: in o, which no block wants before the first and after
 * the last. */
static float *io_at(const DitRun *run, uint64_t row) {
        return (float *) (void *) run->o + (row - run->rows.begin) * io_row(run->c);
}

/* Sizes cannot overflow: rows are at most 2^24 (layout.c), widths at most 2^20 (model-bind.c). */
static void carve_blocks(DitRun *run, Carver *k) {
        const H3Config *c = run->c;
        uint64_t own = dit_own_rows(run), e = run->element;
        uint64_t own_inner = dit_heads_width(run, run->heads);
        bool alone = run->plan->kind == H3_PLAN_KV_GATHER; /* among its queries */
        bool takes = run->plan->kind == H3_PLAN_HIDDEN_GATHER && own_inner > 0;
        uint64_t piece, rows_q = alone && !run->sparse ? own : run->n_rows;

        run->own_chunk = largest_chunk(run->plan, run->self, run->self + 1);
        run->in_chunk = takes ? largest_chunk(run->plan, 0, run->plan->ranks) : run->own_chunk;
        run->rope = takes ? (H3Range){0, run->n_rows} : run->rows;
        piece = run->own_chunk < run->piece_rows ? run->own_chunk : run->piece_rows;

        run->x = carve(k, own * c->hidden * e);
        run->h = carve(k, run->in_chunk * c->hidden * e);
        run->q = carve(k, rows_q * own_inner * e);
        run->k = carve(k, run->n_rows * own_inner * e);
        run->v = carve(k, run->n_rows * own_inner * e);
        run->o = carve(k, own * max_of(c->inner * e, io_row(c) * sizeof(float)));
        run->y = carve(k, run->own_chunk * c->hidden * e);
        run->gate = carve(k, piece * c->ffn * e);
        run->up = carve(k, piece * c->ffn * e);
        run->act = carve(k, piece * c->ffn * e);
        carve_sparse(run, k, rows_q);
        carve_exchange(run, k);
        if (run->int8_cols > 0) {
                uint64_t rows = max_of(max_of(run->own_chunk, run->in_chunk), run->timesteps_max);

                run->h_int8 = carve(k, run->in_chunk * c->hidden);
                run->h_scale = carve(k, run->in_chunk * sizeof(float));
                rows = rows < run->piece_rows ? rows : run->piece_rows;
                run->int8 = carve(k, rows * run->int8_cols);
                run->int8_scale = carve(k, rows * sizeof(float));
        }
}

static void carve_step(DitRun *run, Carver *k) {
        const H3Config *c = run->c;
        uint64_t own = dit_own_rows(run), rope = h3_range_size(run->rope) * 3 * c->rope_freqs * sizeof(float);
        uint64_t time_bytes = run->timesteps_max * dit_time_width(c) * sizeof(float);

        run->cos = carve(k, rope);
        run->sin = carve(k, rope);
        run->coordinate = carve(k, run->timesteps_max * c->time_dim * lk_type_size(run->coordinate_type));
        run->time_a = carve(k, time_bytes);
        run->time_b = carve(k, time_bytes);
        for (unsigned i = 0; i < ELEMENTSOF(run->mod); i++)
                run->mod[i] = carve(k, 6 * run->timesteps_max * H3_TAGS * c->hidden * run->element);
        run->mod_index = carve(k, own * sizeof(int32_t));
        run->time_index = carve(k, own * sizeof(int32_t));
}

int dit_arena_new(DitRun *run, void **ret_arena) {
        Carver k = {};
        int r;

        carve_blocks(run, &k);
        carve_step(run, &k);
        r = run->ops->memory_new(run->context, k.at, ret_arena);
        if (r < 0)
                return r;
        k = (Carver){.base = *ret_arena};
        carve_blocks(run, &k);
        carve_step(run, &k);
        return 0;
}

static int no_memory(Fault *f, const char *what, uint64_t bytes) {
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "%s needs %llu bytes of device memory, which are not free.", what,
                (unsigned long long) bytes);
}

static int device_fault(Fault *f, int r, const char *what) {
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "No memory left in the %s; free some and try again.", what);
        if (r == -ECANCELED)
                return fault_set(f, r, FAULT_CANCELLED, "The step was cancelled.");
        return fault_set(f, r, FAULT_INTERNAL, "The %s failed: %s.", what, strerrordesc_np(-r));
}

static int refine(DitRun *run, const H3Model *m, const uint16_t *text, void *device_text, void *ret) {
        const H3Config *c = run->c;
        uint64_t n = run->n_rows;
        const LkNorm args = {
                .type = run->type,
                .m = n,
                .n = c->hidden,
                .x = run->x,
                .x_ld = c->hidden,
                .weight = m->refiner_norm,
                .eps = c->eps,
                .y = run->y, /* [rows, hidden], with one chunk */
                .y_ld = c->hidden,
        };
        int r;

        r = run->ops->upload(run->context, device_text, text, n * c->text_dim * sizeof(*text));
        if (r >= 0)
                r = dit_gemm(run, n, device_text, LK_BF16, &m->text_in, &m->text_in_bias, run->x, run->type);
        if (r >= 0 && c->refiner_layers > 0)
                r = dit_feed(run, m->refiner, 0, 0, NULL);
        for (uint32_t i = 0; r >= 0 && i < c->refiner_layers; i++) {
                r = dit_attend(run, m->refiner + i, i);
                if (r >= 0)
                        r = dit_finish(run, m->refiner + i,
                                i + 1 < c->refiner_layers ? m->refiner + i + 1 : NULL, i);
        }
        if (r >= 0)
                r = run->ops->norm(run->context, &args);
        return r < 0 ? r : run->ops->download(run->context, ret, run->y, n * c->hidden * run->element);
}

int h3_refine_text(const H3Rank *rank, const H3Model *m, H3Compute compute, const uint16_t *text,
        uint64_t text_rows, void **ret_refined, Fault *f) {
        const H3Range rows = {0, text_rows}, heads = {0, m->config.heads};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        const H3Rank alone = {.ops = rank->ops, .context = rank->context, .plan = &plan, .weights = rank->weights,
                .piece_rows = rank->piece_rows};
        DitRun run = run_of_rank(&alone, m, compute, text_rows);
        Carver k = {};
        CLEANUP_FREE void *refined = NULL;
        void *arena, *device_text;
        int r;

        if (text_rows < 1 || text_rows > 1u << 20)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "text has %llu rows; expected 1 to %u.",
                        (unsigned long long) text_rows, 1u << 20);
        refined = malloc(text_rows * m->config.hidden * run.element);
        if (!refined)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the refined text; free some and try again.");

        carve_blocks(&run, &k);
        (void) carve(&k, text_rows * m->config.text_dim * sizeof(*text));
        r = rank->ops->memory_new(rank->context, k.at, &arena);
        if (r < 0)
                return r == -ENOMEM ? no_memory(f, "The text refiner", k.at)
                                    : device_fault(f, r, "text refiner");
        k = (Carver){.base = arena};
        carve_blocks(&run, &k);
        device_text = carve(&k, text_rows * m->config.text_dim * sizeof(*text));

        r = dit_take(&run, m, H3_PART_TEXT, 0, &m);
        if (r >= 0) {
                r = refine(&run, m, text, device_text, refined);
                dit_give(&run, H3_PART_TEXT, 0);
        }
        rank->ops->memory_free(rank->context, arena);
        if (r < 0)
                return device_fault(f, r, "text refiner");
        *ret_refined = STEAL_PTR(refined);
        return 0;
}

/* The part of a segment that is in `rows`, relative to the segment; empty: false. */
static bool part_of(const H3Segment *s, H3Range rows, uint64_t *ret_begin, uint64_t *ret_end) {
        uint64_t begin = max_of(s->begin, rows.begin), end = s->end < rows.end ? s->end : rows.end;

        if (begin >= end)
                return false;
        *ret_begin = begin - s->begin;
        *ret_end = end - s->begin;
        return true;
}

/* Rows begin..end of a segment of latents, the target's or a condition's. */
static void latent_rows(const DitRun *run, const H3StepInput *in, const H3Segment *s, uint64_t begin,
        uint64_t end, float *ret) {
        const H3Shape *shape = &in->layout->shape;
        bool target = s->condition < 0;
        const float *video = target ? in->video : in->conditions[s->condition].video;
        const float *audio = target ? in->audio : in->conditions[s->condition].audio;
        H3Grid grid = target ? h3_shape_grid(shape) : shape->conditions[s->condition].grid;

        if (s->kind == H3_SEGMENT_VIDEO)
                for (uint64_t row = begin; row < end; row++, ret += video_row(run->c)) {
                        uint64_t at = h3_sparse_row(run->sparse, s->begin + row) - s->begin;

                        h3_video_to_rows(run->c, &grid, video, at, at + 1, ret);
                }
        else
                h3_audio_to_rows(run->c, target ? shape->audio : shape->conditions[s->condition].audio,
                        audio, begin, end, ret);
}

/* Latent rows through their patch projection into the residual stream. */
static int pack_latent(const DitRun *run, const H3Model *m, const H3StepInput *in, const H3Segment *s,
        H3Range rows, float *host) {
        const H3Config *c = run->c;
        bool video = s->kind == H3_SEGMENT_VIDEO;
        uint64_t width = video ? video_row(c) : c->audio_channels, begin, end;
        int r;

        if (!part_of(s, rows, &begin, &end))
                return 0;
        latent_rows(run, in, s, begin, end, host);
        r = run->ops->upload(run->context, io_at(run, s->begin + begin), host, (end - begin) * width * sizeof(float));
        if (r < 0)
                return r;
        return dit_gemm(run, end - begin, io_at(run, s->begin + begin), LK_F32, video ? &m->video_in : &m->audio_in,
                video ? &m->video_in_bias : &m->audio_in_bias,
                dit_own_at(run, run->x, s->begin + begin, c->hidden), run->type);
}

static int pack_rows(
        const DitRun *run, const H3Model *m, const H3StepInput *in, H3Range rows, float *host) {
        uint64_t row_bytes = run->c->hidden * run->element, begin, end;
        const H3Segment *text = in->layout->segments;
        int r = 0;

        if (part_of(text, rows, &begin, &end))
                r = run->ops->upload(run->context,
                        dit_own_at(run, run->x, text->begin + begin, run->c->hidden),
                        (const uint8_t *) in->refined_text + begin * row_bytes, (end - begin) * row_bytes);
        for (uint32_t i = 1; r >= 0 && i < in->layout->n_segments; i++)
                r = pack_latent(run, m, in, in->layout->segments + i, rows, host);
        return r;
}

static int pack(const DitRun *run, const H3Model *m, const H3StepInput *in, float *host) {
        int r;

        r = dit_take(run, m, H3_PART_ENDS, 0, &m);
        if (r < 0)
                return r;
        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++)
                r = pack_rows(run, m, in, h3_plan_chunk(run->plan, run->self, chunk), host);
        dit_give(run, H3_PART_ENDS, 0);
        return r < 0 ? r
                     : dit_tap(run, -1, "packed_input", run->x, run->type, dit_own_rows(run),
                               run->c->hidden);
}

/* Of a table of all rows, those that this step has, in its order. */
static void ordered_rope(const DitRun *run, const H3StepInput *in, const uint64_t *order, float *cos, float *sin) {
        uint64_t width = 3ull * run->c->rope_freqs, n = in->layout->rows * width;

        for (uint64_t row = run->rope.begin; row < run->rope.end; row++, cos += width, sin += width) {
                memcpy(cos, in->rope + order[row] * width, width * sizeof(float));
                memcpy(sin, in->rope + n + order[row] * width, width * sizeof(float));
        }
}

/* The rank's rows of the table, on the host. */
typedef struct Rope {
        const float *cos, *sin; /* [rope rows, 3 * rope_freqs] */
        float *table;           /* owned; NULL: they are of a table that was given */
} Rope;

static void rope_done(Rope *x) {
        free(x->table);
}

static int rope_make(const DitRun *run, const H3StepInput *in, Rope *ret) {
        const H3Layout *l = in->layout;
        uint64_t width = 3ull * run->c->rope_freqs, rows = h3_range_size(run->rope), n = rows * width;
        const uint64_t *order = run->sparse ? run->sparse->order : NULL;

        if (rows == 0)
                return 0;
        if (in->rope && !order) {
                ret->cos = in->rope + run->rope.begin * width;
                ret->sin = ret->cos + l->rows * width;
        } else {
                ret->table = malloc(2 * n * sizeof(float));
                if (!ret->table)
                        return -ENOMEM;
                ret->cos = ret->table;
                ret->sin = ret->table + n;
                if (in->rope)
                        ordered_rope(run, in, order, ret->table, ret->table + n);
                else
                        h3_rope_table(run->c, l, order, run->rope.begin, run->rope.end, run->type == LK_BF16, ret->table, ret->table + n);
        }
        dit_tap_host(run, "rope_cos", ret->cos, rows, width);
        dit_tap_host(run, "rope_sin", ret->sin, rows, width);
        return 0;
}

static int upload_rope(const DitRun *run, const Rope *rope, H3Range rows) {
        uint64_t width = 3ull * run->c->rope_freqs, at = (rows.begin - run->rope.begin) * width;
        uint64_t bytes = h3_range_size(rows) * width * sizeof(float);
        int r;

        if (bytes == 0)
                return 0;
        r = run->ops->upload(run->context, run->cos + at, rope->cos + at, bytes);
        return r < 0 ? r : run->ops->upload(run->context, run->sin + at, rope->sin + at, bytes);
}

/* What the first block's chunk wants of it, of all ranks whose rows this one makes Q and K of: the others are copied while the device
 * works on this one. */
static int upload_rope_chunk(const DitRun *run, const Rope *rope, uint32_t chunk) {
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < run->plan->ranks; i++)
                if (i == run->self || h3_range_size(run->rope) == run->n_rows)
                        r = upload_rope(run, rope, h3_plan_chunk(run->plan, i, chunk));
        return r;
}

static int modulate(const DitRun *run, const H3Model *m, const DitTimesteps *t, uint32_t i) {
        int r;

        r = dit_modulation(run, m, i, t);
        return r < 0 ? r
                     : dit_tap(run, (int) i, "mod", dit_mod(run, i), run->type, (uint64_t) t->n * H3_TAGS,
                               6ull * run->c->hidden);
}

/* Block i was given out; progress is what is done. */
static int pace(const DitRun *run, uint32_t i) {
        uint32_t layers = run->c->layers, done = run->weights ? i : i + 1; /* or all of it is done already */
        int r;

        r = h3_part_pace(run->rank, i);
        if (r >= 0 && done > 0 && run->hooks && run->hooks->on_block)
                r = run->hooks->on_block(run->hooks->userdata, done, layers);
        if (r < 0 || !run->weights || i + 1 < layers)
                return r;

        r = run->ops->join(run->context, h3_pace_event(i));
        if (r >= 0 && run->hooks && run->hooks->on_block)
                r = run->hooks->on_block(run->hooks->userdata, layers, layers);
        return r;
}

/* Block i after its attention, and the next one's norm; *feed: the model with the FEED of block i + 1, which was
 * not taken yet. */
static int finish_block(const DitRun *run, const H3Model *m, uint32_t i, const H3Model **feed) {
        bool last = i + 1 == run->c->layers;
        const H3Model *taken;
        int r;

        r = dit_take(run, m, H3_PART_FINISH, i, &taken);
        if (r < 0)
                return r;
        if (!last)
                r = dit_take(run, m, H3_PART_FEED, i + 1, feed);
        if (r >= 0) {
                r = dit_finish(run, taken->blocks + i, last ? NULL : (*feed)->blocks + i + 1, i);
                if (r < 0 && !last)
                        dit_give(run, H3_PART_FEED, i + 1);
        }
        dit_give(run, H3_PART_FINISH, i);
        return r;
}

static int run_blocks(const DitRun *run, const H3Model *m, const DitTimesteps *t, const Rope *rope) {
        uint32_t layers = run->c->layers;
        const H3Model *feed;
        int r;

        r = modulate(run, m, t, 0);
        if (r >= 0)
                r = dit_take(run, m, H3_PART_FEED, 0, &feed);
        if (r < 0)
                return r;
        r = upload_rope_chunk(run, rope, 0);
        if (r >= 0 && run->hooks && run->hooks->on_first)
                run->hooks->on_first(run->hooks->userdata);
        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++) {
                r = dit_feed(run, feed->blocks, 0, chunk, NULL);
                if (r >= 0 && chunk + 1 < run->plan->chunks)
                        r = upload_rope_chunk(run, rope, chunk + 1);
        }

        for (uint32_t i = 0; i < layers; i++) {
                if (r >= 0)
                        r = dit_attend(run, feed->blocks + i, i);
                dit_give(run, H3_PART_FEED, i);
                if (r >= 0 && i + 1 < layers)
                        r = modulate(run, m, t, i + 1);
                if (r >= 0)
                        r = finish_block(run, m, i, &feed);
                if (r < 0)
                        return r;
                r = pace(run, i);
                if (r < 0 && i + 1 < layers)
                        dit_give(run, H3_PART_FEED, i + 1);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int final_rows(const DitRun *run, const H3Model *m, H3Range rows) {
        uint64_t hidden = run->c->hidden;
        const LkNorm args = {
                .type = run->type,
                .m = h3_range_size(rows),
                .n = hidden,
                .x = dit_own_at(run, run->x, rows.begin, hidden),
                .x_ld = hidden,
                .weight = m->final_norm,
                .eps = run->c->eps,
                .mod = dit_mod(run, run->c->layers),
                .mod_type = run->coordinate_type,
                .mod_ld = 2 * hidden,
                .mod_index = run->time_index + (rows.begin - run->rows.begin),
                .shift_at = 0,
                .scale_at = hidden,
                .y = run->y,
                .y_ld = hidden,
        };
        int r;

        r = run->ops->norm(run->context, &args);
        return r < 0 ? r
                     : dit_tap(run, -1, "final_norm", run->y, run->type, h3_range_size(rows), hidden);
}

/* Rows begin..end of a segment times their part of the mask. */
static void mask_rows(const H3Layout *l, const H3Sparse *sparse, const H3Segment *s, uint64_t begin, uint64_t end, uint64_t width,
        float *rows) {
        for (uint64_t row = begin; l->level && row < end; row++) {
                float m = (float) l->level[h3_sparse_row(sparse, s->begin + row)] / (float) H3_MASK_LEVELS;

                for (uint64_t i = 0; i < width; i++)
                        *rows++ *= m;
        }
}

static uint64_t target_row(const H3Config *c, const H3Segment *s) {
        return s->kind == H3_SEGMENT_VIDEO ? video_row(c) : c->audio_channels;
}

/* Final rows, which are in y, of a target segment through its head, in f32. */
static int project_out(const DitRun *run, const H3Model *m, const H3Segment *s, H3Range rows) {
        bool video = s->kind == H3_SEGMENT_VIDEO;
        uint64_t begin, end;

        if (!part_of(s, rows, &begin, &end))
                return 0;
        return dit_gemm(run, end - begin,
                run->y + (s->begin + begin - rows.begin) * run->c->hidden * run->element, run->type,
                video ? &m->video_out : &m->audio_out,
                video ? &m->video_out_bias : &m->audio_out_bias, io_at(run, s->begin + begin), LK_F32);
}

/* These into the latent. */
static int unpack(const DitRun *run, const H3Layout *l, const H3Segment *s, H3Range rows, float *host, float *ret) {
        const H3Config *c = run->c;
        H3Grid grid = h3_shape_grid(&l->shape);
        uint64_t width = target_row(c, s), begin, end;
        int r;

        if (!part_of(s, rows, &begin, &end))
                return 0;
        r = run->ops->download(run->context, host, io_at(run, s->begin + begin), (end - begin) * width * sizeof(float));
        if (r < 0)
                return r;
        mask_rows(l, run->sparse, s, begin, end, width, host);
        if (s->kind == H3_SEGMENT_VIDEO)
                for (uint64_t row = begin; row < end; row++, host += width) {
                        uint64_t at = h3_sparse_row(run->sparse, s->begin + row) - s->begin;

                        h3_rows_to_video(c, &grid, host, at, at + 1, ret);
                }
        else
                h3_rows_to_audio(c, l->shape.audio, host, begin, end, ret);
        return 0;
}

/* The final layer of all chunks. */
static int final_layer(const DitRun *run, const H3Model *m, const H3Layout *l, const DitTimesteps *t) {
        int r;

        r = dit_modulation(run, m, m->config.layers, t);
        if (r >= 0)
                r = dit_take(run, m, H3_PART_ENDS, 0, &m);
        if (r < 0)
                return r;
        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++) {
                H3Range rows = h3_plan_chunk(run->plan, run->self, chunk);

                if (h3_range_size(rows) == 0)
                        continue;
                r = final_rows(run, m, rows);
                if (r >= 0)
                        r = project_out(run, m, h3_layout_audio(l), rows);
                if (r >= 0)
                        r = project_out(run, m, h3_layout_video(l), rows);
        }
        dit_give(run, H3_PART_ENDS, 0);
        return r;
}

/* The device has all of its work before the host waits for the first of it. */
static int finish(const DitRun *run, const H3Model *m, const H3Layout *l, const DitTimesteps *t, float *host,
        float *ret_video, float *ret_audio) {
        int r;

        r = final_layer(run, m, l, t);
        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++) {
                H3Range rows = h3_plan_chunk(run->plan, run->self, chunk);

                r = unpack(run, l, h3_layout_audio(l), rows, host, ret_audio);
                if (r >= 0)
                        r = unpack(run, l, h3_layout_video(l), rows, host, ret_video);
        }
        return r;
}

static int step(DitRun *run, const H3Model *m, const H3StepInput *in, float *ret_video, float *ret_audio) {
        const H3Layout *l = in->layout;
        CLEANUP_FREE float *host = NULL; /* latent rows on their way in and out */
        CLEANUP(rope_done) Rope rope = {};
        DitTimesteps t;
        int r;

        host = malloc(max_of(1, run->own_chunk) * io_row(run->c) * sizeof(float));
        if (!host)
                return -ENOMEM;

        r = run->sparse ? dit_sparse_start(run) : 0;
        if (r < 0)
                return r;
        dit_timesteps(l, in->sigma_video, in->sigma_audio, &t);
        dit_tap_host(run, "timestep", t.t, t.n, 1);
        r = rope_make(run, in, &rope);
        if (r >= 0)
                r = dit_index_rows(run, l, &t);
        if (r >= 0 && !run->table)
                r = dit_time_embedding(run, m, t.t, t.n);
        if (r >= 0)
                r = pack(run, m, in, host);
        if (r >= 0)
                r = run_blocks(run, m, &t, &rope);
        if (r >= 0)
                r = finish(run, m, l, &t, host, ret_video, ret_audio);
        return r >= 0 && run->sparse ? dit_sparse_end(run) : r;
}

static bool range_fits(H3Range r, uint64_t end) {
        return r.begin <= r.end && r.end <= end;
}

/* A run of one rank of a plan, without memory yet. */
static int run_of_plan(
        const H3Rank *rank, const H3Model *m, const H3Layout *l, H3Compute compute, DitRun *ret) {
        const H3Plan *plan = rank->plan;

        if (rank->index >= plan->ranks || plan->kind >= _H3_PLAN_MAX || plan->row_tile == 0 ||
                plan->chunks == 0 || (plan->ranks > 1 && plan->rows[plan->ranks - 1].end != l->rows))
                return -EINVAL;
        for (uint32_t i = 0; i < plan->ranks; i++)
                if (!range_fits(plan->rows[i], l->rows) || !range_fits(plan->heads[i], m->config.heads))
                        return -EINVAL;
        if (plan->sparse && (plan->sparse->rows != l->rows || h3_sparse_is_gated(plan->sparse) != m->gated))
                return -EINVAL;
        *ret = run_of_rank(rank, m, compute, l->rows);
        ret->timesteps_max = l->timesteps_max;
        return 0;
}

int h3_step_memory(const H3Model *m, const H3Layout *l, const H3Plan *plan, uint32_t rank, H3Compute compute,
        uint32_t piece_rows, uint64_t *ret_bytes) {
        const H3Rank x = {.index = rank, .plan = plan, .piece_rows = piece_rows};
        Carver k = {};
        DitRun run;
        int r;

        r = run_of_plan(&x, m, l, compute, &run);
        if (r < 0)
                return r;
        if (!h3_plan_is_idle(plan, rank)) {
                carve_blocks(&run, &k);
                carve_step(&run, &k);
        }
        *ret_bytes = k.at;
        return 0;
}

static int check_input(const H3StepInput *in, Fault *f) {
        const H3Shape *s = &in->layout->shape;

        if (!(in->sigma_video >= 0 && in->sigma_video <= 1) ||
                !(in->sigma_audio >= 0 && in->sigma_audio <= 1))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Sigma is %g (video) and %g (audio); expected 0 to 1.", (double) in->sigma_video,
                        (double) in->sigma_audio);
        for (uint32_t i = 0; i < s->n_conditions; i++) {
                const H3Condition *k = s->conditions + i;

                if (!in->conditions || (k->grid.frames > 0 && !in->conditions[i].video) ||
                        (k->audio > 0 && !in->conditions[i].audio))
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "The layout has a condition %u, whose latent was not given.", i);
        }
        return 0;
}

static int step_of_rank(const H3Rank *rank, const H3Model *m, const H3StepInput *in,
        const H3StepHooks *hooks, float *ret_video, float *ret_audio, Fault *f) {
        uint64_t bytes;
        void *arena;
        DitRun run;
        int r;

        r = check_input(in, f);
        if (r >= 0 && in->mod_table)
                r = dit_table_check(in->mod_table, m, in, f);
        if (r < 0)
                return r;
        r = run_of_plan(rank, m, in->layout, in->compute, &run);
        if (r >= 0)
                r = h3_step_memory(
                        m, in->layout, rank->plan, rank->index, in->compute, rank->piece_rows, &bytes);
        if (r >= 0 && rank->plan->ranks > 1 && !rank->exchange)
                r = -EINVAL;
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL,
                        "The plan does not fit the step: rank %u of %u, %llu rows.", rank->index,
                        rank->plan->ranks, (unsigned long long) in->layout->rows);
        if (run.sparse && !rank->ops->sparse_attention)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "The %s backend has no sparse attention.", rank->ops->backend);
        if (h3_plan_is_idle(rank->plan, rank->index))
                return 0;
        run.table = in->mod_table;
        run.hooks = hooks;

        r = dit_arena_new(&run, &arena);
        if (r < 0)
                return r == -ENOMEM ? no_memory(f, "The step", bytes) : device_fault(f, r, "step");

        r = step(&run, m, in, ret_video, ret_audio);
        run.ops->memory_free(run.context, arena);
        return r < 0 ? device_fault(f, r, "step") : 0;
}

int h3_step(const H3Rank *rank, const H3Model *m, const H3StepInput *in, const H3StepHooks *hooks,
        float *ret_video, float *ret_audio, Fault *f) {
        Fault why = {};
        int r;

        r = step_of_rank(rank, m, in, hooks, ret_video, ret_audio, &why);
        if (r < 0 && rank->exchange) /* also what failed before its first message: others wait for it */
                rank->exchange->fail(rank->exchange, rank->index, r, &why);
        if (r < 0 && f && f->name[0] == '\0')
                *f = why;
        return r;
}
