/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What is done with the layers that another process found beside a worker's start, so that its first step does not wait for it. */

#include "kernels/cuda/lt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As lk_cuda_warm(), behind lk_cuda_pins_take() and of what that took alone: has another thread ask the library about them
 * (layers_check()) and run what it takes. A first use that comes earlier asks itself. lk_cuda_warm_await() waits for it, too. */
void lk_cuda_warm_told(void (*ended)(void));

/* Asks the library about layers that another process found: those that it takes are not asked about at their first use, the others are
 * tried then. Calls lk_cuda_on_layer of those that it takes. bias: any device memory. Any thread with a device of that architecture. */
void layers_check(CudaLt *lt, int arch, const void *bias);

#ifdef __cplusplus
}
#endif
