/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Between layout.c and layout-check.c. */

#include "service/h3/layout.h"

/* Everything that h3_layout_new() is given; rows of the whole sequence. -EINVAL, -EOVERFLOW. */
int h3_shape_check(
        const H3Config *c, const H3Shape *s, const uint8_t *text_tags, uint64_t *ret_rows, Fault *f);
