/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/attention-case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/device.h"

void case_init(Case *c, uint64_t rows) {
        uint64_t n = rows * WIDTH;

        *c = (Case){.rows = rows};
        c->q = device_new(2 * n);
        c->k = device_new(2 * n);
        c->v = device_new(2 * n);
        c->o = device_new(2 * n);
        c->part = device_new(2 * n);
        fill_bf16(c->q, n, 2, 1);
        fill_bf16(c->k, n, 2, 2);
        fill_bf16(c->v, n, 1, 3);
        /* Rows far larger than their neighbours: a decision for a whole tile would show. */
        for (uint64_t r = 5; r < rows; r += 97)
                fill_bf16(c->q + r * WIDTH * 2, WIDTH, 40, (uint32_t) r);
}

void case_done(Case *c) {
        device_free(c->q);
        device_free(c->k);
        device_free(c->v);
        device_free(c->o);
        device_free(c->part);
}

static float widen(uint16_t u) {
        uint32_t w = (uint32_t) u << 16;
        float f;

        memcpy(&f, &w, 4);
        return f;
}

double case_error(const Case *c) {
        static const uint64_t samples[][2] = {{0, 0}, {0, 55}, {5, 3}, {127, 7}, {128, 8}, {1000, 30}};
        uint16_t *k = malloc(c->rows * DIM * 2), *v = malloc(c->rows * DIM * 2), q[DIM], o[DIM];
        double *w = malloc(c->rows * sizeof(*w)), off = 0, all = 0;

        must_be(k && v && w, "memory");
        for (size_t s = 0; s < sizeof(samples) / sizeof(*samples); s++) {
                uint64_t row = samples[s][0], at = samples[s][1] * DIM * 2;
                double top = -INFINITY, sum = 0, y[DIM] = {0};

                must(cudaMemcpy2D(
                             k, DIM * 2, c->k + at, WIDTH * 2, DIM * 2, c->rows, cudaMemcpyDeviceToHost),
                        "copy");
                must(cudaMemcpy2D(
                             v, DIM * 2, c->v + at, WIDTH * 2, DIM * 2, c->rows, cudaMemcpyDeviceToHost),
                        "copy");
                must(cudaMemcpy(q, c->q + row * WIDTH * 2 + at, sizeof(q), cudaMemcpyDeviceToHost), "copy");
                must(cudaMemcpy(o, c->o + row * WIDTH * 2 + at, sizeof(o), cudaMemcpyDeviceToHost), "copy");
                for (uint64_t i = 0; i < c->rows; i++) {
                        w[i] = 0;
                        for (uint64_t j = 0; j < DIM; j++)
                                w[i] += (double) widen(q[j]) * widen(k[i * DIM + j]);
                        w[i] /= sqrt((double) DIM);
                        top = fmax(top, w[i]);
                }
                for (uint64_t i = 0; i < c->rows; i++) {
                        w[i] = exp(w[i] - top);
                        sum += w[i];
                        for (uint64_t j = 0; j < DIM; j++)
                                y[j] += w[i] * widen(v[i * DIM + j]);
                }
                for (uint64_t j = 0; j < DIM; j++) {
                        off += pow(y[j] / sum - widen(o[j]), 2);
                        all += pow(y[j] / sum, 2);
                }
        }
        free(k);
        free(v);
        free(w);
        return sqrt(off / all);
}
