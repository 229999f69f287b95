/* SPDX-License-Identifier: Apache-2.0 */
/* Pixels of tokens to where they belong. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"

static void unpatch_token(const void *arg, uint64_t token) {
        const LkUnpatch *a = arg;
        const uint64_t frames = a->patch[0], rows = a->patch[1], cols = a->patch[2], plane = frames * rows * cols;
        const uint64_t t = token / (a->h * a->w) * frames, y = token / a->w % a->h * rows, x = token % a->w * cols;
        const float *from = a->x + token * a->x_ld;

        for (uint64_t line = 0; line < frames * rows; line++) {
                uint64_t row = (t + line / rows) * a->h * rows + y + line % rows;
                float *to = a->y + (row * a->w * cols + x) * a->channels;

                for (uint64_t k = 0; k < cols; k++)
                        for (uint64_t c = 0; c < a->channels; c++)
                                to[k * a->channels + c] = from[c * plane + line * cols + k];
        }
}

int LK_ISA(unpatch)(LkContext *c, const LkUnpatch *a) {
        if (!c || !a || !check_unpatch(a))
                return -EINVAL;

        return rows_run(c, a->t * a->h * a->w, (uint64_t) a->channels * a->patch[0] * a->patch[1] * a->patch[2], unpatch_token, a);
}
