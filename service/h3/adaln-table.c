/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/adaln-table.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/dit-private.h"
#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"

struct H3ModTable {
        const H3Model *model; /* only compared */
        H3Compute compute;
        uint32_t n;
        float *t;                      /* [n], ascending, distinct */
        uint64_t block_row, final_row; /* bytes of a timestep */
        uint8_t *rows;                 /* [layers][n] of block_row, then [n] of final_row */
};

DEFINE_CLEANUP(H3ModTable *, h3_mod_table_free)

H3ModTable *h3_mod_table_free(H3ModTable *t) {
        if (!t)
                return NULL;
        free(t->t);
        free(t->rows);
        free(t);
        return NULL;
}

static int by_value(const void *a, const void *b) {
        float x = *(const float *) a, y = *(const float *) b;

        return (x > y) - (x < y);
}

/* All timesteps of the schedule, ascending and distinct, freed by the caller. */
static int schedule_timesteps(const H3ModSchedule *s, float **ret, uint32_t *ret_n) {
        CLEANUP_FREE float *all = NULL;
        uint32_t n = 0, distinct = 0;

        all = malloc((size_t) s->steps * DIT_TIMESTEPS_MAX * sizeof(*all));
        if (!all)
                return -ENOMEM;
        for (uint32_t i = 0; i < s->steps; i++) {
                DitTimesteps t;

                dit_timesteps(s->layout, s->sigmas_video[i], s->sigmas_audio[i], &t);
                memcpy(all + n, t.t, t.n * sizeof(*all));
                n += t.n;
        }
        qsort(all, n, sizeof(*all), by_value);
        for (uint32_t i = 0; i < n; i++)
                if (distinct == 0 || all[i] != all[distinct - 1])
                        all[distinct++] = all[i];
        *ret = STEAL_PTR(all);
        *ret_n = distinct;
        return 0;
}

static int check_schedule(const H3ModSchedule *s, Fault *f) {
        if (s->steps < 1 || s->steps > H3_STEPS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The schedule has %" PRIu32 " steps; expected 1 to %u.", s->steps, H3_STEPS_MAX);
        for (uint32_t i = 0; i < s->steps; i++)
                if (!(s->sigmas_video[i] >= 0 && s->sigmas_video[i] <= 1) ||
                        !(s->sigmas_audio[i] >= 0 && s->sigmas_audio[i] <= 1))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Sigma of step %" PRIu32 " is %g (video) and %g (audio); expected 0 to 1.",
                                i, (double) s->sigmas_video[i], (double) s->sigmas_audio[i]);
        return 0;
}

/* The table without its rows, and how many bytes these take. */
static int table_plan(const H3Model *m, const H3ModSchedule *s, H3Compute compute, H3ModTable **ret,
        uint64_t *ret_bytes, Fault *f) {
        CLEANUP(h3_mod_table_freep) H3ModTable *t = NULL;
        const DitRun run = dit_run_make(NULL, m, compute);
        uint64_t blocks, all;
        int r;

        r = check_schedule(s, f);
        if (r < 0)
                return r;
        t = calloc(1, sizeof(*t));
        r = t ? schedule_timesteps(s, &t->t, &t->n) : -ENOMEM;
        if (r < 0)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "No memory to list the schedule's timesteps; free some and try again.");

        t->model = m;
        t->compute = compute;
        t->block_row = 6ull * H3_TAGS * m->config.hidden * run.element;
        t->final_row = 2ull * m->config.hidden * lk_type_size(run.coordinate_type);
        if (__builtin_mul_overflow(t->block_row, m->config.layers, &blocks) ||
                __builtin_add_overflow(blocks, t->final_row, &all) ||
                __builtin_mul_overflow(all, t->n, &all) || all > SIZE_MAX)
                return fault_set(f, -EOVERFLOW, FAULT_DOES_NOT_FIT,
                        "The modulation rows of %" PRIu32 " timesteps are too many to count.", t->n);
        *ret = STEAL_PTR(t);
        *ret_bytes = all;
        return 0;
}

int h3_mod_table_bytes(
        const H3Model *m, const H3ModSchedule *s, H3Compute compute, uint64_t *ret_bytes, Fault *f) {
        CLEANUP(h3_mod_table_freep) H3ModTable *t = NULL;

        return table_plan(m, s, compute, &t, ret_bytes, f);
}

/* Where the rows of layer `layer` begin; layer = layers: the final ones. */
static uint8_t *table_rows(const H3ModTable *t, uint32_t layer) {
        return t->rows + (uint64_t) layer * t->n * t->block_row;
}

static uint64_t row_bytes(const H3ModTable *t, uint32_t layer) {
        return layer < t->model->config.layers ? t->block_row : t->final_row;
}

static int table_fill(const DitRun *run, const H3Model *m, H3ModTable *t, const H3StepHooks *hooks) {
        uint32_t layers = m->config.layers;
        int r;

        r = dit_time_embedding(run, m, t->t, t->n);
        for (uint32_t i = 0; r >= 0 && i <= layers; i++) {
                r = dit_modulation_rows(run, m, i, t->n);
                if (r >= 0)
                        r = run->ops->download(
                                run->context, table_rows(t, i), dit_mod(run, i), t->n * row_bytes(t, i));
                if (r >= 0 && i < layers && hooks && hooks->on_block)
                        r = hooks->on_block(hooks->userdata, i + 1, layers);
        }
        return r;
}

int h3_mod_table_new(const H3Rank *rank, const H3Model *m, const H3ModSchedule *s, H3Compute compute,
        const H3StepHooks *hooks, H3ModTable **ret, Fault *f) {
        CLEANUP(h3_mod_table_freep) H3ModTable *t = NULL;
        DitRun run = dit_run_make(rank, m, compute);
        uint64_t bytes;
        void *arena;
        int r;

        r = table_plan(m, s, compute, &t, &bytes, f);
        if (r < 0)
                return r;
        run.timesteps_max = t->n;
        t->rows = malloc((size_t) bytes);
        r = t->rows ? dit_arena_new(&run, &arena) : -ENOMEM;
        if (r >= 0) {
                r = table_fill(&run, m, t, hooks);
                run.ops->memory_free(run.context, arena);
        }
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "The modulation rows of %" PRIu32 " timesteps need %" PRIu64
                        " bytes, which are not free. Steps can do without them.",
                        t->n, bytes);
        if (r == -ECANCELED)
                return fault_set(f, r, FAULT_CANCELLED, "The step was cancelled.");
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The modulation rows failed: %s.", strerrordesc_np(-r));
        *ret = STEAL_PTR(t);
        return 0;
}

/* Which row a timestep has; n: none. */
static uint32_t find(const H3ModTable *t, float value) {
        const float *at = bsearch(&value, t->t, t->n, sizeof(*t->t), by_value);

        return at ? (uint32_t) (at - t->t) : t->n;
}

/* The first timestep of the step that the table lacks. False: it has all. */
static bool lacks(const H3ModTable *table, const H3StepInput *in, float *ret) {
        DitTimesteps t;

        dit_timesteps(in->layout, in->sigma_video, in->sigma_audio, &t);
        for (uint32_t i = 0; i < t.n; i++)
                if (find(table, t.t[i]) == table->n) {
                        *ret = t.t[i];
                        return true;
                }
        return false;
}

bool h3_mod_table_covers(const H3ModTable *t, const H3StepInput *in) {
        float missing;

        return t->compute == in->compute && !lacks(t, in, &missing);
}

int dit_table_check(const H3ModTable *table, const H3Model *m, const H3StepInput *in, Fault *f) {
        float missing;

        if (table->model != m || table->compute != in->compute)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The modulation rows are of another model or another arithmetic than the step.");
        if (lacks(table, in, &missing))
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The modulation rows are of another schedule: there are none for the timestep %.9g.",
                        (double) missing);
        return 0;
}

int dit_table_load(const DitRun *run, uint32_t layer, const DitTimesteps *t) {
        const H3ModTable *table = run->table;
        uint64_t bytes = row_bytes(table, layer);

        for (uint32_t i = 0, n; i < t->n; i += n) {
                uint32_t row = find(table, t->t[i]);
                int r;

                n = 1; /* neighbours travel together: both lists ascend */
                while (i + n < t->n && row + n < table->n && table->t[row + n] == t->t[i + n])
                        n++;
                r = run->ops->upload(run->context, dit_mod(run, layer) + i * bytes,
                        table_rows(table, layer) + row * bytes, n * bytes);
                if (r < 0)
                        return r;
        }
        return 0;
}
