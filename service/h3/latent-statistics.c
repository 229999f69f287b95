/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model-private.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>

#include "service/h3/number.h"

static int read_one(H3Tensor *t, bool positive, uint32_t *n, float *ret, Fault *f) {
        const StTensor *e = t->entry;

        t->used = true;
        if (!h3_is_float(e->type) || e->n_dims != 1 || e->shape[0] == 0 || e->shape[0] > H3_STATISTICS_MAX ||
                (*n > 0 && e->shape[0] != *n))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "%s of %s is no list of as many floating-point numbers as a latent has channels (at most %d).",
                        e->name, t->file, H3_STATISTICS_MAX);

        *n = (uint32_t) e->shape[0];
        for (uint32_t i = 0; i < *n; i++) {
                ret[i] = h3_number(t->data, h3_float_type(e->type), i);
                if (!isfinite(ret[i]) || (positive && !(ret[i] > 0)))
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "Number %" PRIu32 " of %s in %s is %g, expected a finite one%s.", i, e->name, t->file,
                                (double) ret[i], positive ? " above 0" : "");
        }
        return 0;
}

int h3_statistics_read(H3TensorSet *s, H3Statistics *ret, Fault *f) {
        H3Tensor *mean = h3_tensor_set_find(s, "latents_mean"), *std = h3_tensor_set_find(s, "latents_std");
        H3Statistics x = {};
        int r;

        if (mean && std) {
                r = read_one(mean, false, &x.n, x.mean, f);
                if (r >= 0)
                        r = read_one(std, true, &x.n, x.std, f);
                if (r < 0)
                        return r;
        } else if (mean || std)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The file has %s but not %s: both or neither are expected.", mean ? "latents_mean" : "latents_std",
                        mean ? "latents_std" : "latents_mean");

        *ret = x;
        return 0;
}
