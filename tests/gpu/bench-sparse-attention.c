/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse attention as a block of the model calls it (service/h3/dit-sparse.c): means, then routing and attention for 64 blocks of queries
 * at a time, beside dense attention. Fails if it takes more than LIMIT of the dense kernel where at most KEPT of all blocks are seen: that
 * is what leaves 0.6 of a whole bf16 step.
 *
 *     bench-sparse-attention [ROWS]
 */

#include <math.h>
#include <string.h>

#include "tests/gpu/bench.h"

#define HEADS 56u
#define DIM 128u
#define WIDTH ((uint64_t) HEADS * DIM)
#define ROUTED 64u /* DIT_ROUTED_BLOCKS */
#define KEPT 0.12
#define LIMIT 0.35

typedef struct Work {
        LkBlockMeans means[3]; /* of q, k, v */
        LkRoute route;
        LkSparseAttention attend;
        LkAttention dense;
        uint32_t n;           /* blocks */
        uint64_t rows;
        uint64_t seen[HEADS]; /* pairs of blocks, filled by count_seen() */
} Work;

static int run_dense(LkContext *c, const void *p) {
        return lk_cuda_ops()->attention(c, &((const Work *) p)->dense);
}

static int run_means(LkContext *c, const void *p) {
        const Work *w = p;
        int r = 0;

        for (int i = 0; r == 0 && i < 3; i++)
                r = lk_cuda_ops()->block_means(c, w->means + i);
        return r;
}

static uint32_t routed(const Work *w, uint32_t first) {
        return w->n - first < ROUTED ? w->n - first : ROUTED;
}

static int route_part(LkContext *c, const Work *w, uint32_t first) {
        LkRoute a = w->route;

        a.first = first;
        a.n_q = routed(w, first);
        return lk_cuda_ops()->route(c, &a);
}

static int run_route(LkContext *c, const void *p) {
        const Work *w = p;
        int r = 0;

        for (uint32_t first = 0; r == 0 && first < w->n; first += ROUTED)
                r = route_part(c, w, first);
        return r;
}

/* With `route` the lists are those of each part, else what the last one left (of the same size). */
static int attend(LkContext *c, const Work *w, bool route) {
        int r = 0;

        for (uint32_t first = 0; r == 0 && first < w->n; first += ROUTED) {
                LkSparseAttention a = w->attend;
                uint64_t row = (uint64_t) first * LK_BLOCK_ROWS, end;

                a.first_block = first;
                a.n_blocks = routed(w, first);
                end = row + (uint64_t) a.n_blocks * LK_BLOCK_ROWS;
                end = end < w->rows ? end : w->rows;
                a.a.first_row = row;
                a.a.n_q = end - row;
                a.a.q = (const uint8_t *) a.a.q + row * WIDTH * 2;
                a.a.o = (uint8_t *) a.a.o + row * WIDTH * 2;
                r = route ? route_part(c, w, first) : 0;
                if (r == 0)
                        r = lk_cuda_ops()->sparse_attention(c, &a);
        }
        return r;
}

static int run_all(LkContext *c, const void *p) {
        int r = run_means(c, p);

        return r < 0 ? r : attend(c, p, true);
}

static int run_without_means_of_others(LkContext *c, const void *p) {
        Work w = *(const Work *) p;
        int r = run_means(c, p);

        w.attend.value = NULL;
        return r < 0 ? r : attend(c, &w, true);
}

static void count_seen(LkContext *c, Work *w) {
        static uint32_t count[HEADS * ROUTED];

        memset(w->seen, 0, sizeof(w->seen));
        must_be(run_means(c, w) == 0, "means");
        for (uint32_t first = 0; first < w->n; first += ROUTED) {
                uint32_t n = routed(w, first);

                must_be(route_part(c, w, first) == 0, "route");
                must_be(lk_cuda_ops()->download(c, count, w->route.count, n * HEADS * sizeof(*count)) == 0, "counts");
                for (uint32_t i = 0; i < n * HEADS; i++)
                        w->seen[i / n] += count[i];
        }
}

static uint64_t seen_of(const Work *w, uint32_t head, uint32_t n) {
        uint64_t sum = 0;

        for (uint32_t i = head; i < head + n; i++)
                sum += w->seen[i];
        return sum;
}

/* How far apart heads are, and ranks with as many heads each, one after the other: how long the others wait for the busiest. */
static void print_imbalance(const Work *w) {
        const double pairs = (double) w->n * w->n, all = (double) seen_of(w, 0, HEADS);
        uint64_t least = UINT64_MAX, most = 0;

        for (uint32_t i = 0; i < HEADS; i++) {
                least = w->seen[i] < least ? w->seen[i] : least;
                most = w->seen[i] > most ? w->seen[i] : most;
        }
        printf("  heads: %.2f to %.2f %%; the busiest rank against the mean:", 100 * (double) least / pairs, 100 * (double) most / pairs);
        for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
                most = 0;
                for (uint32_t i = 0; i < ranks; i++) {
                        const uint64_t own = seen_of(w, i * (HEADS / ranks), HEADS / ranks);

                        most = own > most ? own : most;
                }
                printf(" %.3f of %u", (double) most * ranks / all, ranks);
        }
        printf("\n");
}

static Work work_new(uint64_t rows) {
        Work w = { .rows = rows, .n = (uint32_t) ((rows + LK_BLOCK_ROWS - 1) / LK_BLOCK_ROWS) };
        uint32_t *start = malloc((w.n + 1) * sizeof(*start));
        const uint64_t lists = (uint64_t) HEADS * ROUTED * w.n * 4;
        LkBlocks blocks = { w.n, device_new((w.n + 1) * sizeof(*start)) };
        float *mean[3], *centre = device_new(2 * WIDTH * 4);
        void *x[4];

        must_be(start != NULL, "memory");
        for (uint32_t b = 0; b <= w.n; b++)
                start[b] = (uint32_t) (b < w.n ? b * LK_BLOCK_ROWS : rows);
        must(cudaMemcpy((void *) blocks.start, start, (w.n + 1) * sizeof(*start), cudaMemcpyHostToDevice), "starts");
        free(start);
        for (int i = 0; i < 4; i++)
                x[i] = device_new(rows * WIDTH * 2);
        for (int i = 0; i < 3; i++) {
                mean[i] = device_new(w.n * WIDTH * 4);
                w.means[i] = (LkBlockMeans){ LK_BF16, HEADS, DIM, blocks, x[i], WIDTH, mean[i], i == 1 ? centre : NULL };
        }
        w.dense = (LkAttention){ .type = LK_BF16,
                .n_q = rows,
                .n_k = rows,
                .heads = HEADS,
                .head_dim = DIM,
                .scale = 1 / sqrtf(DIM),
                .q = x[0],
                .k = x[1],
                .v = x[2],
                .o = x[3],
                .q_ld = WIDTH,
                .k_ld = WIDTH,
                .v_ld = WIDTH,
                .o_ld = WIDTH };
        w.route = (LkRoute){ .heads = HEADS,
                .head_dim = DIM,
                .n = w.n,
                .scale = w.dense.scale,
                .q = mean[0],
                .k = mean[1],
                .variance = centre + WIDTH,
                .tau = 1.3f,
                .sinks = 5,
                .reach = 2,
                .list = device_new(lists),
                .count = device_new(HEADS * ROUTED * 4),
                .score = device_new(lists) };
        w.attend = (LkSparseAttention){ .a = w.dense,
                .blocks = blocks,
                .list = w.route.list,
                .count = w.route.count,
                .score = w.route.score,
                .value = mean[2],
                .centre = centre };
        return w;
}

static double line(const char *what, double msec, double dense) {
        printf("  %-42s %9.3f ms %6.3f of dense\n", what, msec, msec / dense);
        return msec / dense;
}

/* Whether it keeps the limit. */
static bool measure(LkContext *c, Work *w, const char *what, double dense) {
        const double all = (double) HEADS * w->n * w->n;
        double means, route, total, share, ratio;

        count_seen(c, w);
        share = (double) seen_of(w, 0, HEADS) / all;
        printf("%s: %.2f %% of the blocks are kept\n", what, share * 100);
        print_imbalance(w);
        means = bench_msec(c, run_means, w, BENCH_SAMPLES, w->route.count);
        route = bench_msec(c, run_route, w, BENCH_SAMPLES, w->route.count);
        total = bench_msec(c, run_all, w, BENCH_SAMPLES, w->route.count);
        (void) line("means of q, k, v", means, dense);
        (void) line("routing", route, dense);
        (void) line("attention", total - means - route, dense);
        printf("  %-42s %9.0f TF\n", "what of it is tiles of kept blocks, at least",
                share * 4 * (double) w->rows * (double) w->rows * WIDTH / (total - means - route) / 1e9);
        (void) line("all, without means of the others", bench_msec(c, run_without_means_of_others, w, BENCH_SAMPLES, w->route.count),
                dense);
        ratio = line("all", total, dense);
        if (share > KEPT)
                return true;
        printf("  %s: %.3f, the limit is %.2f\n", ratio <= LIMIT ? "good" : "TOO SLOW", ratio, LIMIT);
        return ratio <= LIMIT;
}

int main(int argc, char **argv) {
        const uint64_t rows = argc > 1 ? strtoull(argv[1], NULL, 10) : 73686;
        LkContext *c;
        double dense;
        bool good;
        Work w;

        device_open();
        must_be(lk_cuda_ops()->context_new(0, &c) == 0, "context");
        w = work_new(rows);
        for (uint32_t i = 0; i < 3; i++)
                fill_bf16((void *) w.means[i].x, rows * WIDTH, 1, i + 1);
        must(cudaDeviceSynchronize(), "data");
        dense = bench_msec(c, run_dense, &w, BENCH_SAMPLES, w.dense.o);
        printf("dense, %llu rows: %.3f ms, %.0f TF\n", (unsigned long long) rows, dense,
                4 * (double) rows * (double) rows * WIDTH / dense / 1e9);
        good = measure(c, &w, "random", dense);

        w.route.by_rank = true;
        w.route.keep = w.n / 10;
        good = measure(c, &w, "random, the best tenth", dense) && good;
        w.route.by_rank = false;

        /* q and k follow the same slow walk, each with noise of its own */
        for (uint32_t i = 0; i < 2; i++)
                fill_walk((void *) w.means[i].x, rows, WIDTH, 512, 0.4f, 1, 4, 5 + i);
        must(cudaDeviceSynchronize(), "data");
        good = measure(c, &w, "locally correlated", dense) && good;
        lk_cuda_ops()->context_free(c);
        return good ? 0 : 1;
}
