/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/results.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/report.h"

void results_meta(const latent_job *job, const char *compute, ResultsMeta *ret) {
        const latent_value *result = latent_job_result(job);

        *ret = (ResultsMeta){};
        (void) snprintf(ret->rows, sizeof(ret->rows), "%" PRIu64, get_uint(result, "rows"));
        if (compute)
                ret->entries[ret->n++] = (StMeta){"compute", compute};
        ret->entries[ret->n++] = (StMeta){"numerics", get_string(result, "numerics")};
        ret->entries[ret->n++] = (StMeta){"rows", ret->rows};
}

StTensor results_tensor(const char *name, const latent_tensor *t) {
        StTensor x = {.name = name, .type = st_type_parse(t->dtype), .n_dims = t->n_dims, .size = t->size};

        memcpy(x.shape, t->shape, t->n_dims * sizeof(t->shape[0]));
        return x;
}

int results_write(Output *o, const latent_job *job, const char *compute, latent_error *e) {
        CLEANUP_FREE StTensor *tensors = NULL;
        CLEANUP_FREE const void **data = NULL;
        ResultsMeta meta;
        size_t n;
        int r;

        n = latent_value_count(latent_value_get(latent_job_result(job), "tensors"));
        if (n > 0 && strcmp(latent_job_tensor_name(job, n - 1), "preview") == 0)
                n--; /* the last one, which is no result */
        if (n == 0)
                return ctl_error(e, -EPROTO, LATENT_ERROR_INTERNAL, "The service gave no results.");
        tensors = calloc(n, sizeof(*tensors));
        data = calloc(n, sizeof(*data));
        if (!tensors || !data)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");

        for (size_t i = 0; i < n; i++) {
                const char *name = latent_job_tensor_name(job, i);
                latent_tensor t;

                r = latent_job_tensor(job, name ? name : "", &t, &data[i], e);
                if (r < 0)
                        return r;
                tensors[i] = results_tensor(name, &t);
        }

        results_meta(job, compute, &meta);
        return output_write(o, tensors, data, n, meta.entries, meta.n, e);
}
