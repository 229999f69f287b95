/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of f16. */

#include "kernels/cuda/attention-mma.cuh"

int attention_f16(LkContext *c, const Attention *a) {
        return attention_mma<LK_F16>(c, a);
}
