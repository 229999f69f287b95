/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reading option structs that may be older (shorter) or newer (longer) than ours. */

#include <stdint.h>

#include "client/latent.h"

/* No struct of ours comes near: a garbage size must not walk us off the caller's memory. */
#define LATENT_STRUCT_SIZE_MAX 4096u

/* Copies *in (which starts with its struct_size; NULL means all defaults) to *ret of ret_size bytes, zeroing
 * what the caller's version did not have. first_size: size of the first released version. Fields that this
 * version does not know must be zero. -EINVAL, -E2BIG, with e. */
int options_read(const void *in, uint32_t first_size, void *ret, uint32_t ret_size, latent_error *e);
