/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inputs and the right answer for attention of the denoiser's shape: bf16, 56 heads of 128, [row, head,
 * dim], as many queries as keys. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HEADS UINT64_C(56)
#define DIM UINT64_C(128)
#define WIDTH (HEADS * DIM)

/* On the device. `o` takes the whole answer, `part` what is compared with it. */
typedef struct Case {
        uint64_t rows;
        uint8_t *q, *k, *v, *o, *part;
} Case;

/* Peaked scores; some rows' queries are 20 times their neighbours'. */
void case_init(Case *c, uint64_t rows);
void case_done(Case *c);

/* Relative L2 distance of o from f64 over a few rows and heads; at least 1001 rows. */
double case_error(const Case *c);

#ifdef __cplusplus
}
#endif
