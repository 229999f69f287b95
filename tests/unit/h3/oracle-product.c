/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/oracle-product.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

#define PANEL 24  /* rows of the matrix per task */
#define DEPTH 512 /* numbers of a row at a time: a panel and all x fit the caches */
#define THREADS_MAX 16

/* Numbers side by side; where the machine has no such registers the compiler takes several. */
typedef double Lanes __attribute__((vector_size(64), aligned(8), may_alias));
#define LANES (sizeof(Lanes) / sizeof(double))

/* sums[i][j] += x[i] . w[j], n numbers; ld numbers from one x, and DEPTH from one w, to the next. */
static inline __attribute__((always_inline)) void add_products(
        const double *x, uint64_t x_ld, const double *w, uint64_t n, double *sums, uint64_t sums_ld) {
        Lanes lanes[4][3] = {};
        uint64_t k = 0;

        for (; k + LANES <= n; k += LANES)
                for (int i = 0; i < 4; i++) {
                        const Lanes *a = (const Lanes *) (x + (uint64_t) i * x_ld + k);

                        for (int j = 0; j < 3; j++)
                                lanes[i][j] += *a * *(const Lanes *) (w + j * DEPTH + k);
                }
        for (int i = 0; i < 4; i++)
                for (int j = 0; j < 3; j++) {
                        double sum = 0;

                        for (unsigned l = 0; l < LANES; l++)
                                sum += lanes[i][j][l];
                        for (uint64_t rest = k; rest < n; rest++)
                                sum += x[(uint64_t) i * x_ld + rest] * w[j * DEPTH + rest];
                        sums[(uint64_t) i * sums_ld + (uint64_t) j] += sum;
                }
}

typedef void (*AddProducts)(
        const double *x, uint64_t x_ld, const double *w, uint64_t n, double *sums, uint64_t sums_ld);

static void add_products_plain(
        const double *x, uint64_t x_ld, const double *w, uint64_t n, double *sums, uint64_t sums_ld) {
        add_products(x, x_ld, w, n, sums, sums_ld);
}

#ifdef __x86_64__
__attribute__((target("avx512f"))) static void add_products_wide(
        const double *x, uint64_t x_ld, const double *w, uint64_t n, double *sums, uint64_t sums_ld) {
        add_products(x, x_ld, w, n, sums, sums_ld);
}

__attribute__((target("avx2"))) static void add_products_middle(
        const double *x, uint64_t x_ld, const double *w, uint64_t n, double *sums, uint64_t sums_ld) {
        add_products(x, x_ld, w, n, sums, sums_ld);
}

static AddProducts add_products_best(void) {
        return __builtin_cpu_supports("avx512f") ? add_products_wide
               : __builtin_cpu_supports("avx2")  ? add_products_middle
                                                 : add_products_plain;
}
#else
static AddProducts add_products_best(void) {
        return add_products_plain;
}
#endif

typedef struct Product {
        const OracleModel *o;
        const char *tensor;
        const double *x; /* rows padded to a multiple of 4 */
        uint64_t m, in, out;
        double *y;
} Product;

static void product_panel(void *userdata, uint64_t panel) {
        const Product *p = userdata;
        const AddProducts add = add_products_best();
        uint64_t first = panel * PANEL, n = p->out - first < PANEL ? p->out - first : PANEL;
        uint64_t padded = (p->m + 3) / 4 * 4;
        CLEANUP_FREE double *sums = calloc(padded * PANEL, sizeof(double)),
                            *w = calloc((uint64_t) PANEL * DEPTH, sizeof(double));

        assert_true(sums && w);
        for (uint64_t k = 0; k < p->in; k += DEPTH) {
                uint64_t depth = p->in - k < DEPTH ? p->in - k : DEPTH;

                for (uint64_t j = 0; j < n; j++)
                        p->o->read(p->o->userdata, p->tensor, (first + j) * p->in + k, depth, w + j * DEPTH);
                for (uint64_t i = 0; i < padded; i += 4)
                        for (uint64_t j = 0; j < PANEL; j += 3)
                                add(p->x + i * p->in + k, p->in, w + j * DEPTH, depth, sums + i * PANEL + j,
                                        PANEL);
        }
        for (uint64_t i = 0; i < p->m; i++)
                memcpy(p->y + i * p->out + first, sums + i * PANEL, n * sizeof(double));
}

typedef struct Each {
        void (*task)(void *userdata, uint64_t i);
        void *userdata;
        uint64_t n;
        atomic_ullong next;
} Each;

static void *each_main(void *userdata) {
        Each *e = userdata;

        for (uint64_t i; (i = atomic_fetch_add(&e->next, 1)) < e->n;)
                e->task(e->userdata, i);
        return NULL;
}

void oracle_each(
        const OracleModel *o, uint64_t n, void (*task)(void *userdata, uint64_t i), void *userdata) {
        Each e = {.task = task, .userdata = userdata, .n = n};
        pthread_t threads[THREADS_MAX];

        assert_in_range(o->threads, 1, THREADS_MAX);
        for (uint32_t i = 1; i < o->threads; i++)
                assert_int_equal(pthread_create(threads + i, NULL, each_main, &e), 0);
        (void) each_main(&e);
        for (uint32_t i = 1; i < o->threads; i++)
                assert_int_equal(pthread_join(threads[i], NULL), 0);
}

void oracle_product(const OracleModel *o, const char *tensor, uint64_t m, const double *x, uint64_t in,
        uint64_t x_ld, uint64_t out, double *y) {
        CLEANUP_FREE double *padded = calloc((m + 3) / 4 * 4 * in, sizeof(double));
        Product p = {o, tensor, padded, m, in, out, y};

        assert_non_null(padded);
        for (uint64_t i = 0; i < m; i++)
                memcpy(padded + i * in, x + i * x_ld, in * sizeof(double));
        oracle_each(o, (out + PANEL - 1) / PANEL, product_panel, &p);
}
