/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of bf16. */

#include "kernels/cuda/attention-mma.cuh"

int attention_bf16(LkContext *c, const Attention *a) {
        return attention_mma<LK_BF16>(c, a);
}
