/* SPDX-License-Identifier: Apache-2.0 */
/* Upsampling, snake and downsampling of a block of rows and channels at a time. Inside a block rows are
 * dense, so that a step in time is a fixed distance and vectors run over the end of a row: few channels cost
 * no lanes. Even and odd positions of the upsampled sound are kept apart (s[2i] in even[i], s[2i + 1] in
 * odd[i]).
 */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/snake.h"

#define BLOCK_CHANNELS 64u
#define BLOCK_NUMBERS 8192u

/* Rows of s, and of x, that a block needs before its first and behind its last row. */
#define S_REACH 3u
#define X_REACH 6u

typedef struct AliasFreeJob {
        const LkAliasFree *args;
        float up[LK_ALIAS_FREE_TAPS], down[LK_ALIAS_FREE_TAPS];
        float *scratch;
        uint64_t scratch_numbers; /* of a thread */
        uint64_t width, rows;     /* of a block */
        uint64_t slices;          /* blocks side by side */
} AliasFreeJob;

/* A block and its part of the scratch. */
typedef struct Block {
        uint64_t first, rows, channel, width;
        float *x, *even, *odd, *y, *a, *gain;
} Block;

static uint64_t block_numbers(uint64_t rows, uint64_t width) {
        return (rows + 2 * X_REACH + 2 * (rows + 2 * S_REACH) + rows) * width + 6 * VT_N + 2 * width;
}

static void place(const AliasFreeJob *j, uint64_t task, uint32_t thread, Block *b) {
        const LkAliasFree *a = j->args;
        uint64_t slice = task % j->slices, row = task / j->slices * j->rows;

        b->first = a->first + row;
        b->rows = a->m - row < j->rows ? a->m - row : j->rows;
        b->channel = slice * j->width;
        b->width = a->channels - b->channel < j->width ? a->channels - b->channel : j->width;
        b->x = j->scratch + thread * j->scratch_numbers;
        b->even = b->x + (b->rows + 2 * X_REACH) * b->width + VT_N;
        b->odd = b->even + (b->rows + 2 * S_REACH) * b->width + VT_N;
        b->y = b->odd + (b->rows + 2 * S_REACH) * b->width + VT_N;
        b->a = b->y + b->rows * b->width + VT_N;
        b->gain = b->a + b->width + VT_N;
}

/* Row `row` of the sound, which may lie before its start (counted from `reach` before). */
static uint64_t clamped(uint64_t row, uint64_t reach, uint64_t rows) {
        row = row < reach ? 0 : row - reach;
        return row < rows ? row : rows - 1;
}

static void read_x(const LkAliasFree *a, const Block *b) {
        for (uint64_t i = 0; i < b->rows + 2 * X_REACH; i++)
                memcpy(b->x + i * b->width,
                        a->x + clamped(b->first + i, X_REACH, a->rows) * a->channels + b->channel,
                        b->width * sizeof(float));

        /* read by the last vector, whose other lanes count */
        memset(b->x + (b->rows + 2 * X_REACH) * b->width, 0, VT_N * sizeof(float));
}

static void upsample(const AliasFreeJob *j, const Block *b) {
        uint64_t n = (b->rows + 2 * S_REACH) * b->width, w = b->width;

        for (uint64_t i = 0; i < n; i += VT_N) {
                const float *x = b->x + i; /* row -3 of those that this one needs */
                VT even = vt_zero(), odd = vt_zero(), a = vt_load(b->a + i % w),
                   gain = vt_load(b->gain + i % w);

                for (uint32_t k = 0; k < LK_ALIAS_FREE_TAPS / 2; k++) {
                        odd = vt_fma(vt_set1(j->up[2 * k]), vt_load(x + (6 - k) * w), odd);
                        even = vt_fma(vt_set1(j->up[2 * k + 1]), vt_load(x + (5 - k) * w), even);
                }

                vt_store(b->even + i, snake_at(vt_mul(vt_set1(2), even), a, gain));
                vt_store(b->odd + i, snake_at(vt_mul(vt_set1(2), odd), a, gain));
        }
}

static void copy_row(const Block *b, float *to, uint64_t row, const float *from, uint64_t from_row) {
        memcpy(to + row * b->width, from + from_row * b->width, b->width * sizeof(float));
}

/* Beyond the ends of s. Row i of even and odd is row first - S_REACH + i of the sound. */
static void extend(const LkAliasFree *a, const Block *b) {
        for (uint64_t i = 0; b->first + i < S_REACH; i++) {
                copy_row(b, b->even, i, b->even, S_REACH - b->first);
                copy_row(b, b->odd, i, b->even, S_REACH - b->first);
        }

        for (uint64_t i = b->rows + 2 * S_REACH; i > 0 && b->first + i - 1 >= a->rows + S_REACH; i--) {
                copy_row(b, b->even, i - 1, b->odd, a->rows - 1 + S_REACH - b->first);
                copy_row(b, b->odd, i - 1, b->odd, a->rows - 1 + S_REACH - b->first);
        }
}

static void downsample(const AliasFreeJob *j, const Block *b) {
        uint64_t n = b->rows * b->width, w = b->width;

        for (uint64_t i = 0; i < n; i += VT_N) {
                VT sum = vt_zero();

                for (uint32_t k = 0; k < LK_ALIAS_FREE_TAPS / 2; k++) {
                        sum = vt_fma(vt_set1(j->down[2 * k]), vt_load(b->odd + i + k * w), sum);
                        sum = vt_fma(vt_set1(j->down[2 * k + 1]), vt_load(b->even + i + (k + 1) * w), sum);
                }

                vt_store(b->y + i, sum);
        }
}

static void alias_free_task(void *userdata, uint64_t task, uint32_t thread) {
        const AliasFreeJob *j = userdata;
        const LkAliasFree *a = j->args;
        Block b;

        place(j, task, thread, &b);
        snake_channels(&a->alpha, &a->beta, true, b.channel, b.width, b.a, b.gain);
        read_x(a, &b);
        upsample(j, &b);
        extend(a, &b);
        downsample(j, &b);

        for (uint64_t i = 0; i < b.rows; i++)
                memcpy(a->y + (b.first - a->first + i) * a->channels + b.channel, b.y + i * b.width,
                        b.width * sizeof(float));
}

int LK_ISA(alias_free)(LkContext *c, const LkAliasFree *a) {
        AliasFreeJob j = {.args = a};
        uint64_t blocks;
        void *p;
        int r;

        if (!c || !a || !check_alias_free(a))
                return -EINVAL;
        if (a->m == 0)
                return 0;

        j.width = a->channels < BLOCK_CHANNELS ? a->channels : BLOCK_CHANNELS;
        j.rows = BLOCK_NUMBERS / j.width < a->m ? BLOCK_NUMBERS / j.width : a->m;
        j.slices = a->channels / j.width + (a->channels % j.width != 0);
        j.scratch_numbers = block_numbers(j.rows, j.width);
        for (uint32_t i = 0; i < LK_ALIAS_FREE_TAPS; i++) {
                j.up[i] = number_get(a->up.data, a->up.type, i);
                j.down[i] = number_get(a->down.data, a->down.type, i);
        }

        r = context_scratch(c, threads_count(c->threads) * j.scratch_numbers * sizeof(float), &p);
        if (r < 0)
                return r;

        j.scratch = p;
        blocks = a->m / j.rows + (a->m % j.rows != 0);
        return threads_run(c->threads, blocks * j.slices, alias_free_task, &j);
}
