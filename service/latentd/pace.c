/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/pace.h"

#include <math.h>
#include <stddef.h>

static bool same(const PaceKey *a, const PaceKey *b) {
        return a->files == b->files && a->phase == b->phase && a->compute == b->compute && a->ranks == b->ranks &&
               a->sparse == b->sparse;
}

static PaceEntry *find(PaceTable *t, const PaceKey *key) {
        for (size_t i = 0; i < PACE_ENTRIES; i++)
                if (t->entries[i].usec > 0 && same(&t->entries[i].key, key)) {
                        t->entries[i].turn = ++t->turns;
                        return &t->entries[i];
                }

        return NULL;
}

const PaceEntry *pace_find(PaceTable *t, const PaceKey *key) {
        return find(t, key);
}

static void add(PaceTable *t, const PaceEntry *x) {
        PaceEntry *e = find(t, &x->key);

        if (!(x->usec > 0) || !isfinite(x->usec) || (e && x->rough && !e->rough))
                return;

        if (e) {
                e->usec = e->rough ? x->usec : (e->usec + x->usec) / 2;
                e->attention = x->attention;
                e->rough = x->rough;
                return;
        }

        e = &t->entries[0];
        for (size_t i = 1; i < PACE_ENTRIES; i++)
                if (t->entries[i].turn < e->turn)
                        e = &t->entries[i];
        *e = *x;
        e->turn = ++t->turns;
}

void pace_add(PaceTable *t, const PaceKey *key, double usec, double attention) {
        add(t, &(PaceEntry){ .key = *key, .usec = usec, .attention = attention });
}

void pace_add_rough(PaceTable *t, const PaceKey *key, double usec) {
        add(t, &(PaceEntry){ .key = *key, .usec = usec, .rough = true });
}
