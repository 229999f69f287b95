/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* cuDNN's attention by its C interface, the library loaded at run time. The engine and its knobs are asked for once, with a fixed shape
 * that no job changes, and set for every other. bf16, head size 128, no mask. One thread per CudaDnn. */

#include <stddef.h>

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CudaDnn CudaDnn;

/* -EOPNOTSUPP: the build has no headers, or no usable libcudnn.so.9 is there. Only loads it; the first attention starts it. */
int dnn_new(CudaDnn **ret);
CudaDnn *dnn_free(CudaDnn *d); /* accepts NULL, returns NULL */
size_t dnn_version(const CudaDnn *d);

/* -EOPNOTSUPP: not for this shape; nothing was launched. */
int dnn_attention(CudaDnn *d, cudaStream_t stream, const LkAttention *a);

/* Whether the pinned engine was asked for, and its number (of this version of the library). */
bool dnn_engine(const CudaDnn *d, int64_t *ret);

#ifdef __cplusplus
}
#endif
