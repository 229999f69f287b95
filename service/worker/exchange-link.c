/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange-link.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

struct ExchangeLink {
        uint64_t bytes_usec;
        uint32_t ranks;
        uint64_t out[RANKS_MAX], in[RANKS_MAX]; /* busy until then */
        uint64_t arrives[]; /* [places, ranks] */
};

int exchange_link_new(const H3Plan *p, uint64_t bytes_usec, ExchangeLink **ret) {
        ExchangeLink *l = calloc(1, sizeof(*l) + exchange_places(p) * p->ranks * sizeof(l->arrives[0]));

        if (!l)
                return -ENOMEM;
        l->bytes_usec = bytes_usec;
        l->ranks = p->ranks;
        *ret = l;
        return 0;
}

ExchangeLink *exchange_link_free(ExchangeLink *l) {
        free(l);
        return NULL;
}

static uint64_t later(uint64_t a, uint64_t b) {
        return a > b ? a : b;
}

void exchange_link_send(ExchangeLink *l, size_t place, uint32_t from, uint64_t readers, uint64_t size, bool at_once) {
        uint64_t takes = size / l->bytes_usec + 1, begin = later(clock_usec(), l->out[from]);

        for (uint32_t to = 0; to < l->ranks; to++) {
                if (!(readers >> to & 1))
                        continue;
                l->in[to] = later(l->in[to], begin) + takes;
                l->arrives[place * l->ranks + to] = later(l->in[to], begin + takes);
                if (!at_once)
                        begin += takes;
        }
        l->out[from] = at_once ? begin + takes : begin;
}

uint64_t exchange_link_arrives(const ExchangeLink *l, size_t place, uint32_t reader) {
        return l->arrives[place * l->ranks + reader];
}
