/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/options.h"

#include <errno.h>
#include <string.h>

#include "client/liblatent/error.h"

int options_read(const void *in, uint32_t first_size, void *ret, uint32_t ret_size, latent_error *e) {
        const unsigned char *bytes = in;
        uint32_t n;

        if (!in) {
                memset(ret, 0, ret_size);
                memcpy(ret, &ret_size, sizeof(ret_size));
                return 0;
        }

        memcpy(&n, in, sizeof(n));
        if (n < first_size)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "struct_size of an option struct is %u; expected at least %u: set it to sizeof the "
                        "struct.",
                        n, first_size);
        if (n > LATENT_STRUCT_SIZE_MAX)
                return error_set(e, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                        "struct_size of an option struct is %u, more than the %u that any version has: was "
                        "the "
                        "struct zeroed and the field set?",
                        n, LATENT_STRUCT_SIZE_MAX);

        for (uint32_t i = ret_size; i < n; i++)
                if (bytes[i] != 0)
                        return error_set(e, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                                "An option is set that liblatent %s does not know (byte %u of its struct): "
                                "update "
                                "the library.",
                                LATENTD_VERSION, i);

        memset(ret, 0, ret_size);
        memcpy(ret, in, n < ret_size ? n : ret_size);
        memcpy(ret, &ret_size, sizeof(ret_size));
        return 0;
}
