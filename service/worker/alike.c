/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/alike.h"

#include <string.h>

#include "service/worker/peers.h"

static bool was_opened(const AlikeDevice *d) {
        return d->numerics_id[0] != '\0';
}

static bool is_of_class(const AlikeDevice *a, const AlikeDevice *b) {
        return strcmp(a->architecture, b->architecture) == 0;
}

uint32_t alike_number(const AlikeDevice *listed, uint32_t n, const AlikeDevice *next) {
        uint32_t number = 0;

        for (uint32_t i = 0; i < n; i++)
                number += is_of_class(listed, listed + i);
        return n == 0 || is_of_class(listed, next) ? number : UINT32_MAX;
}

/* NULL: it has none to be like. */
static const AlikeDevice *example_for(const AlikeDevice *listed, uint32_t n, const AlikeDevice *next) {
        for (uint32_t i = 0; i < n; i++)
                if (!was_opened(next) || was_opened(listed + i))
                        return listed + i;
        return NULL;
}

bool alike_join(const AlikeDevice *listed, uint32_t n, const AlikeDevice *next, WireHello *notes) {
        const AlikeDevice *example = example_for(listed, n, next);
        bool known = example && was_opened(example) && was_opened(next);

        if (!example || (is_of_class(example, next) && (!known || strcmp(example->numerics_id, next->numerics_id) == 0)))
                return true;
        peers_note(notes, "The GPU %s (%s) is left out: beside %s (%s) its results would have other bits.", next->name, next->pci_address,
                example->name, example->pci_address);
        return false;
}
