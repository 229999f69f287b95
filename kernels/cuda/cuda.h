/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CUDA backend: every operation of ops.h. */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts up with every change of the kernels' bits. */
#define LK_CUDA_KERNELS 3

/* The static op table. context_new takes the calling thread's current device; -ENODEV without one, -ELIBACC without cublasLt. */
const LkOps *lk_cuda_ops(void);

/* Has a thread load what contexts need, beside the start of the driver: once that is loaded itself (cudaDriverGetVersion()),
 * since loading is done one after the other. The first context waits for it. Once. */
void lk_cuda_load_libraries(void);
/* Waits for that thread, if there is one: on the same thread as the call before. */
void lk_cuda_await_libraries(void);

/* How a layer's bf16 or f16 products are made, as its trial ended. large and small are numbers of the library's, which the same library
 * on a device of the same class understands. */
#define LK_CUDA_PIN_WORDS 8
typedef struct LkCudaPin {
        uint64_t k, rows;  /* of the layer's weights */
        uint32_t type;     /* LkType of what is made */
        uint32_t biased;   /* by the library */
        uint32_t own, few; /* an own kernel makes them; small is for few rows */
        uint32_t large[LK_CUDA_PIN_WORDS], small[LK_CUDA_PIN_WORDS];
} LkCudaPin;

/* The layers that this process knows on devices of an architecture (90: sm_90), at most max. Any thread. */
unsigned lk_cuda_pins(int arch, LkCudaPin *ret, unsigned max);
/* Layers that another process tried with the same library and device: they are not tried again, but where the library does not take the
 * algorithm. Returns how many were taken; of the first that was not, why says in words what is wrong with it ("": all were). Any
 * thread. */
unsigned lk_cuda_pins_take(int arch, const LkCudaPin *pins, unsigned n, char *why, size_t why_size);

/* Called when a layer is used first: known from another process or tried here, and how long that took. Set before the first context. */
extern void (*lk_cuda_on_layer)(bool known, uint64_t usec);

/* Has a thread of its own run the library's first products on the calling thread's current device, beside whatever comes before the first
 * ones that count: of layers that are known by then, else of any; calls ended (not NULL) at its end. await: for all of them, on the same
 * thread; before a device is reset and before the process ends. */
void lk_cuda_warm(void (*ended)(void));
void lk_cuda_warm_await(void);

/* Which kernel does what on this device, in a few lines of words; and what the bits depend on, in one. Both return as snprintf does. */
int lk_cuda_describe(LkContext *c, char *ret, size_t size);
int lk_cuda_numerics_id(LkContext *c, char *ret, size_t size);

/* For tests and measurements: products by mma.sync only; int8 by a library's int32 sums of so many rows at a time (0: the usual way). */
void lk_cuda_product_set(LkContext *c, bool own_only, uint64_t i8_rows);
/* Likewise: which kernels attention uses. */
typedef enum LkCudaAttention {
        LK_CUDA_ATTENTION_BEST, /* the default: those of the architecture; attention_i8's only if it has the bits of the portable one */
        LK_CUDA_ATTENTION_PORTABLE,
        LK_CUDA_ATTENTION_UNTRIED, /* those of the architecture in any case */
} LkCudaAttention;
void lk_cuda_attention_set(LkContext *c, LkCudaAttention kernels);

#ifdef __cplusplus
}
#endif
