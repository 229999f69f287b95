/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over int8, by the steps of ops.h. All integers are kept as f32: products of a tile add up to
 * less than 2^24, so the sums of the register tile that gemm has are exact too, and their order is free. A
 * task is one head and some query rows: a block of them, or those of one list. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"

#define DIM LK_I8_DIM
#define KEYS LK_I8_KEYS
#define BLOCK_PANELS (224u / TILE_ROWS)
#define BLOCK_ROWS (BLOCK_PANELS * TILE_ROWS)

_Static_assert(BLOCK_ROWS >= LK_BLOCK_ROWS && KEYS == 2 * LK_BLOCK_ROWS, "a block of queries in a task, two of keys in a tile");

#define SIXTEENTH (0x1.715476p+0f / 16) /* log2(e) / 16 */
#define ROUND_16THS (0x1.8p19f + 111.0f / 16)
#define ROUND_UNITS 0x1p23f

typedef struct Scratch {
        float q[BLOCK_PANELS][DIM * TILE_LD]; /* [dim][row] of each panel */
        float k[DIM * KEYS];                  /* [dim][key] */
        float v[KEYS * DIM];                  /* [place][dim], as LkKeysI8 has them */
        float s[TILE_ROWS][KEYS];             /* scores, then weights, of one panel */
        float p[TILE_ROWS][KEYS];             /* weights by the places of v */
        float sums[TILE_ROWS][DIM];
        float o[BLOCK_ROWS][DIM];
        float max[BLOCK_ROWS], sum[BLOCK_ROWS], scale[BLOCK_ROWS];
} Scratch;

typedef struct Job {
        const LkAttentionI8 *args;
        const Threads *threads;
        Scratch *scratch; /* one per thread */
        uint64_t tasks; /* per head */
        uint64_t tiles;
} Job;

/* Keys of a tile that are seen. */
typedef struct Part {
        uint64_t tile;
        uint32_t begin, end;
} Part;

/* [rows, n] to [n, ld]; the missing rows become 0. */
static void turn(const int8_t *x, uint64_t x_ld, uint32_t rows, uint32_t n, uint32_t ld, float *y) {
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t r = 0; r < ld; r++)
                        y[i * ld + r] = r < rows ? (float) x[r * x_ld + i] : 0;
}

/* What a row keeps of a tile. */
typedef struct Step {
        float f, g;
} Step;

/* Scores of a row to weights; key places are those of v. */
static Step softmax_row(Scratch *s, uint32_t i, uint32_t row, float k_scale, float scale, const Part *part) {
        const VT zero = vt_zero(), minus = vt_set1(-1), round = vt_set1(ROUND_16THS),
                 units = vt_set1(ROUND_UNITS);
        float *p = s->s[i], top = p[part->begin], u = (s->scale[row] * k_scale) * (scale * 0.5f), t, e[VT_N], a,
              sum = 0;
        VT va, base;
        Step step;

        for (uint32_t j = part->begin + 1; j < part->end; j++)
                top = p[j] > top ? p[j] : top;

        t = top * u;
        a = t - s->max[row];
        vt_store(e, vt_exp(vt_set1(a > 0 ? -a : a)));
        step = t > s->max[row] ? (Step){.f = e[0], .g = 1} : (Step){.f = 1, .g = e[0]};
        s->max[row] = t > s->max[row] ? t : s->max[row];

        a = u * SIXTEENTH;
        va = vt_set1(a);
        base = vt_set1(f32_fma(-top, a, 1));
        for (uint32_t j = 0; j < KEYS; j += VT_N) {
                VT w = vt_max(vt_fma(vt_load(p + j), va, base), zero), n;

                w = vt_negate(vt_max(vt_negate(w), minus));
                n = vt_add(w, round);
                w = vt_sub(w, vt_sub(n, round));
                w = vt_fma(vt_fma(vt_set1(LK_I8_EXP_2), w, vt_set1(LK_I8_EXP_1)), w, vt_set1(LK_I8_EXP_0));
                vt_store(p + j, vt_sub(vt_fma(w, vt_raise(n), units), units));
        }
        for (uint32_t j = 0; j < part->begin; j++)
                p[j] = 0;
        for (uint32_t j = part->end; j < KEYS; j++)
                p[j] = 0;
        for (uint32_t j = 0; j < KEYS; j++) {
                sum += p[j];
                s->p[i][j] = p[lk_i8_key(j)];
        }
        s->sum[row] = f32_fma(sum, step.g, s->sum[row] * step.f);
        return step;
}

/* h rows of a panel against the keys in s->k, s->v. */
static void attend_panel(const Job *j, Scratch *s, uint32_t panel, uint32_t h, uint64_t at, const Part *part) {
        const LkAttentionI8 *a = j->args;
        const float *v_scale = a->keys.v_scale + at * DIM;
        Step steps[TILE_ROWS];

        tile_columns((Tile){.a = s->q[panel], .b = s->k, .c = s->s[0], .b_ld = KEYS, .c_ld = KEYS, .k = DIM}, KEYS, 1, TILE_LD, h);
        for (uint32_t i = 0; i < h; i++)
                steps[i] = softmax_row(s, i, panel * TILE_ROWS + i, a->keys.k_scale[at], a->scale, part);

        tile_columns((Tile){.a = s->p[0], .b = s->v, .c = s->sums[0], .b_ld = DIM, .c_ld = DIM, .k = KEYS}, DIM, KEYS, 1, h);
        for (uint32_t i = 0; i < h; i++) {
                float *o = s->o[panel * TILE_ROWS + i];

                for (uint32_t d = 0; d < DIM; d += VT_N) {
                        VT sum = vt_mul(vt_load(s->sums[i] + d), vt_load(v_scale + d));

                        vt_store(o + d, vt_fma(sum, vt_set1(steps[i].g),
                                                vt_mul(vt_load(o + d), vt_set1(steps[i].f))));
                }
        }
}

/* The rows of a task of its head. */
static uint64_t task_rows(const Job *j, uint64_t index, uint32_t *ret_n) {
        const LkAttentionI8 *a = j->args;
        uint64_t begin, end;

        if (!a->list) {
                begin = index * BLOCK_ROWS;
                end = begin + BLOCK_ROWS;
        } else {
                begin = (a->first_block + index) * LK_BLOCK_ROWS;
                end = begin + LK_BLOCK_ROWS > a->first_row ? begin + LK_BLOCK_ROWS - a->first_row : 0;
                begin = begin > a->first_row ? begin - a->first_row : 0;
        }
        end = end < a->n_q ? end : a->n_q;
        *ret_n = begin < end ? (uint32_t) (end - begin) : 0;
        return begin;
}

/* The next keys of a task; *entry: of its list, or the tile. False: there are no more. */
static bool next_part(const Job *j, uint64_t task, uint64_t *entry, Part *ret) {
        const LkAttentionI8 *a = j->args;
        const uint32_t *list = a->list ? a->list + task * lk_i8_blocks(a->keys.n) : NULL;
        uint64_t left;

        if (*entry == (list ? a->count[task] : j->tiles))
                return false;
        *ret = (Part){*entry, 0, KEYS};
        if (list) {
                uint32_t b = list[*entry], half = b % 2;

                if (half == 0 && *entry + 1 < a->count[task] && list[*entry + 1] == b + 1) {
                        *ret = (Part){b / 2, 0, KEYS};
                        (*entry)++;
                } else
                        *ret = (Part){b / 2, half * LK_BLOCK_ROWS, (half + 1) * LK_BLOCK_ROWS};
        }
        (*entry)++;
        left = a->keys.n - ret->tile * KEYS;
        ret->end = left < ret->end ? (uint32_t) left : ret->end;
        return true;
}

static void attention_task(void *userdata, uint64_t task, uint32_t thread) {
        const Job *j = userdata;
        const LkAttentionI8 *a = j->args;
        Scratch *s = &j->scratch[thread];
        uint32_t n;
        uint64_t head = task / j->tasks, row = task_rows(j, task % j->tasks, &n), entry = 0;
        Part part;

        if (n == 0)
                return;
        memset(s->o, 0, sizeof(s->o));
        for (uint32_t i = 0; i < n; i += TILE_ROWS)
                turn(a->q + (row + i) * a->q_ld + head * DIM, a->q_ld, n - i < TILE_ROWS ? n - i : TILE_ROWS,
                        DIM, TILE_LD, s->q[i / TILE_ROWS]);
        for (uint32_t i = 0; i < n; i++) {
                s->scale[i] = a->q_scale[(row + i) * (a->q_ld / DIM) + head];
                s->max[i] = -F32_INFINITY;
                s->sum[i] = 0;
        }

        /* all keys of a long film are seconds of work for one task */
        while (!threads_stopped(j->threads) && next_part(j, task, &entry, &part)) {
                uint64_t at = head * j->tiles + part.tile;

                turn(a->keys.k + at * KEYS * DIM, DIM, KEYS, DIM, KEYS, s->k);
                turn(a->keys.v + at * KEYS * DIM, KEYS, DIM, KEYS, DIM, s->v);
                for (uint32_t i = 0; i < n; i += TILE_ROWS)
                        attend_panel(j, s, i / TILE_ROWS, n - i < TILE_ROWS ? n - i : TILE_ROWS, at, &part);
        }

        for (uint32_t i = 0; i < n; i++) {
                void *o = (uint8_t *) a->o + ((row + i) * a->o_ld + head * DIM) * lk_type_size(a->o_type);

                for (uint32_t d = 0; d < DIM; d += VT_N)
                        vt_put(o, a->o_type, d, DIM, vt_div(vt_load(s->o[i] + d), vt_set1(s->sum[i])));
        }
}

int LK_ISA(attention_i8)(LkContext *c, const LkAttentionI8 *a) {
        Job j = {.args = a};
        void *scratch;
        int r;

        if (!c || !a || !check_attention_i8(a))
                return -EINVAL;
        if (a->n_q == 0 || a->keys.heads == 0)
                return 0;

        r = context_scratch(c, threads_count(c->threads) * sizeof(Scratch), &scratch);
        if (r < 0)
                return r;

        j.threads = c->threads;
        j.scratch = scratch;
        j.tiles = lk_i8_tiles(a->keys.n);
        j.tasks = a->list ? a->n_blocks : a->n_q / BLOCK_ROWS + (a->n_q % BLOCK_ROWS != 0);
        return threads_run(c->threads, j.tasks * a->keys.heads, attention_task, &j);
}
