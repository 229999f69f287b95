/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* cublasLt for products of dense device matrices, y [m, n] = x [m, k] . w [n, k]^T: asking, pinning, running. No policy: which layer has
 * which pin, and whether pins are to be trusted, is self-test.cu's. One thread and one device per CudaLt. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CudaLt CudaLt;

/* Everything that an algorithm can be told. One pin gives an output the same bits in any launch. */
typedef struct LtPin {
        uint32_t id, tile, stages, scheme, swizzle, custom;
        int32_t splits;
        uint16_t inner, cluster;
} LtPin;

/* x and w: bf16 or f16 (w dense), or int8. x_ld and y_ld count elements. */
typedef struct LtProduct {
        uint64_t m, n, k;
        LkType type; /* of x and w; not looked at for int8 */
        const void *x;
        uint64_t x_ld;
        const void *w;
        void *y; /* `type` or f32, as the pin was asked for; of int8: int32 */
        LkType y_type;
        uint64_t y_ld;
        const void *bias; /* [n] of `type`, added to the sum before it is rounded, as the pin was asked for; NULL: none */
} LtProduct;

/* -ELIBACC: the library cannot be loaded. */
int lt_new(CudaLt **ret);
CudaLt *lt_free(CudaLt *lt); /* accepts NULL, returns NULL */
size_t lt_version(void); /* 0: not loaded */

/* The library's first proposal for a bf16 or f16 product that keeps one chain of sums: of p sizes, types and whether there is a bias
 * (any address that is not NULL) count. -EOPNOTSUPP: it has none. */
int lt_ask(CudaLt *lt, const LtProduct *p, LtPin *ret);

/* Whether the library takes the pin for such a product; as lt_ask(). */
bool lt_takes(CudaLt *lt, const LtPin *pin, const LtProduct *p);

/* Whether the pin's sums are one chain, which is what makes parts of an output equal to the whole. */
bool lt_is_one_chain(const LtPin *pin);

/* A bf16 or f16 product. -EOPNOTSUPP: the pin does not serve this shape; nothing was launched. */
int lt_run(CudaLt *lt, cudaStream_t stream, const LtPin *pin, const LtProduct *p);

/* An int8 product by whatever the library thinks best. -EOPNOTSUPP: it has nothing; nothing was launched. */
int lt_run_i8(CudaLt *lt, cudaStream_t stream, const LtProduct *p);

#ifdef __cplusplus
}
#endif
