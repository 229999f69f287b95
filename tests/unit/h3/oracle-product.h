/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Products of f64 rows with a matrix, fast enough for matrices of the released size. */

#include <stdint.h>

#include "tests/unit/h3/oracle.h"

/* y[m, out] = x[m, in] . tensor[out, in]^T; x_ld numbers from one x to the next. */
void oracle_product(const OracleModel *o, const char *tensor, uint64_t m, const double *x, uint64_t in,
        uint64_t x_ld, uint64_t out, double *y);

/* task(userdata, i) for i < n, on the model's threads. */
void oracle_each(const OracleModel *o, uint64_t n, void (*task)(void *userdata, uint64_t i), void *userdata);
