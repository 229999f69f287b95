/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Links that tests play where the transport's own are too fast, by the clock of the host: each rank has one out and one in, which are
 * busy beside each other. A message leaves when the ones before have, and comes with the slower of both. */

#include "service/worker/exchange-private.h"

/* bytes_usec: of each link. */
int exchange_link_new(const H3Plan *p, uint64_t bytes_usec, ExchangeLink **ret);
ExchangeLink *exchange_link_free(ExchangeLink *l);

/* Under the exchange's lock: the message of a place leaves now, once for each reader, or for all of them. */
void exchange_link_send(ExchangeLink *l, size_t place, uint32_t from, uint64_t readers, uint64_t size, bool at_once);

/* Likewise: when it has come to the reader (CLOCK_MONOTONIC, usec). */
uint64_t exchange_link_arrives(const ExchangeLink *l, size_t place, uint32_t reader);
