/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A contact sheet: some frames of a film side by side in one picture. */

#include "service/media/channel.h"

#define SHEET_CELLS_MAX 64u
#define SHEET_SIDE 1600u /* pixels that the cells of a row take at most */
#define SHEET_GAP 4u     /* between cells, dark grey */

/* Which frame a cell shows, of n: the first has the first, the last the last, the others are evenly between.
 */
uint64_t sheet_frame(uint64_t frames, uint32_t cell, uint32_t n);

/* Takes the frames of a request with sheet_columns, which encode_check() has seen, as they come, and writes
 * the picture. */
int sheet_run(const MediaWrite *request, int fd, const uint8_t *arena, Channel *c, MediaDone *ret, Fault *f);
