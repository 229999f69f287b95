/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Where the patches of a picture stand (h3.md 3.4). Patches come four of a merged token together: token by
 * token, row-major, and inside each row-major. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/text-model.h"

/* Row and column of patch i in a grid of grid_width columns. */
void h3_vision_place(uint64_t grid_width, uint64_t i, uint64_t *ret_row, uint64_t *ret_column);

/* The position rows of all patches, [height * width, hidden]: the model's table, stretched over the grid
 * with its corners on the grid's, bilinear, f32. */
void h3_vision_positions(const H3TextModel *m, uint64_t grid_height, uint64_t grid_width, float *ret);

/* cos and sin of rows and columns, [height * width, head_dim / 2] each: the first half of the angles from
 * the row, the second from the column. f32. */
void h3_vision_rope(
        const H3VisionConfig *c, uint64_t grid_height, uint64_t grid_width, float *ret_cos, float *ret_sin);
