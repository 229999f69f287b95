/* SPDX-License-Identifier: Apache-2.0 */
/* Attention for Hopper: what it is built for. */

#include "kernels/cuda/attention-sm90.cuh"

int attention_sm90(LkContext *c, const Attention *a) {
        if (a->a.type == LK_F16)
                return attention_launch<LK_F16, 64, 128, 3, 4, true>(c, a);
        return attention_launch<LK_BF16, 128, 176, 2, 2, false>(c, a);
}
