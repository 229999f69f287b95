/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How much a plan moves: for a transport's buffers, for the
 * figures that a job shows, and to check that a step moved just this. */

#include "service/h3/dit.h"
#include "service/h3/sparse.h"

/* Whether the block's normed rows are made int8 once for Q, K and V, and the gate if it is asked for: then they travel so,
 * too (hidden + 4 bytes a row). */
bool h3_block_is_int8(const H3Block *b, H3Compute compute, bool gated);

/* Bytes of the largest message of this (phase, from, to, chunk) over all blocks; 0: it is never sent. */
uint64_t h3_message_max(const H3Model *m, const H3Plan *p, H3Compute compute, const H3Message *message);

/* Bytes that a rank sends and receives in a step. What goes to all is sent once. */
void h3_exchange_size(const H3Model *m, const H3Plan *p, H3Compute compute, uint32_t rank,
        uint64_t *ret_sent, uint64_t *ret_received);
