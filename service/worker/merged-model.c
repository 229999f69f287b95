/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/merged-model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* Models of the table count from 1 (model-table.h): the two never meet. */
#define FIRST_SERIAL (UINT64_C(1) << 63)

static _Atomic uint64_t all_bytes;

uint64_t merged_model_bytes(void) {
        return atomic_load(&all_bytes);
}

MergedModel *merged_model_ref(MergedModel *m) {
        m->n_ref++;
        return m;
}

MergedModel *merged_model_unref(MergedModel *m) {
        if (!m || --m->n_ref > 0)
                return NULL;

        (void) atomic_fetch_sub(&all_bytes, m->h3->private_bytes);
        for (size_t i = 0; m->base->ops && !m->base->ops->host_weights && i < m->h3->n_merged; i++)
                m->base->ops->unpin(m->h3->merged[i].data, m->h3->merged[i].size);
        ranges_done(&m->registered);
        (void) h3_model_free(m->h3);
        (void) h3_lora_report_free(m->report);
        (void) model_entry_unref(m->base);
        free(m);
        return NULL;
}

/* Not memcmp(): 0 and -0 are one strength, and entries behind the last one do not count. */
static bool keys_equal(const MergedKey *a, const MergedKey *b) {
        if (a->base != b->base || a->compute != b->compute || a->n_loras != b->n_loras)
                return false;
        for (uint32_t i = 0; i < a->n_loras; i++)
                if (a->loras[i] != b->loras[i] || a->strengths[i] != b->strengths[i])
                        return false;
        return true;
}

/* Puts m first, and returns what falls out at the end, for which it takes the cache's reference. */
static MergedModel *put_first(MergedCache *c, MergedModel *m) {
        for (size_t i = 0; i < MERGED_KEPT; i++) {
                MergedModel *old = c->kept[i];

                c->kept[i] = m;
                if (!old || old == c->kept[0])
                        return NULL;
                m = old;
        }
        return m;
}

void merged_cache_clear(MergedCache *c) {
        MergedModel *gone[MERGED_KEPT];

        (void) pthread_mutex_lock(&c->lock);
        memcpy(gone, c->kept, sizeof(gone));
        memset(c->kept, 0, sizeof(c->kept));
        (void) pthread_mutex_unlock(&c->lock);
        for (size_t i = 0; i < MERGED_KEPT; i++)
                (void) merged_model_unref(gone[i]);
}

MergedModel *merged_cache_find(MergedCache *c, const MergedKey *key) {
        MergedModel *found = NULL;

        (void) pthread_mutex_lock(&c->lock);
        for (size_t i = 0; i < MERGED_KEPT && !found; i++)
                if (c->kept[i] && keys_equal(&c->kept[i]->key, key))
                        found = merged_model_ref(c->kept[i]);
        if (found)
                (void) put_first(c, found);
        (void) pthread_mutex_unlock(&c->lock);
        return found;
}

int merged_cache_add(MergedCache *c, const MergedKey *key, ModelEntry *base, ModelEntry *const *loras,
        H3Model **h3, H3LoraReport **report, MergedModel **ret) {
        MergedModel *m, *gone = NULL;
        bool closed = false;

        m = calloc(1, sizeof(*m));
        if (!m)
                return -ENOMEM;
        m->n_ref = 1;
        m->key = *key;
        m->base = model_entry_ref(base);
        m->h3 = STEAL_PTR(*h3);
        (void) atomic_fetch_add(&all_bytes, m->h3->private_bytes);
        m->report = STEAL_PTR(*report);

        (void) pthread_mutex_lock(&c->lock);
        m->serial = FIRST_SERIAL + ++c->last_serial;
        for (uint32_t i = 0; i < key->n_loras; i++)
                closed = closed || loras[i]->closed;
        if (!closed && !base->closed)
                gone = put_first(c, merged_model_ref(m));
        (void) pthread_mutex_unlock(&c->lock);

        (void) merged_model_unref(gone);
        *ret = m;
        return 0;
}

bool merged_key_has(const MergedKey *k, uint64_t serial) {
        bool has = k->base == serial;

        for (uint32_t i = 0; i < k->n_loras; i++)
                has = has || k->loras[i] == serial;
        return has;
}

void merged_cache_drop(MergedCache *c, uint64_t serial) {
        MergedModel *kept[MERGED_KEPT] = {}, *gone[MERGED_KEPT] = {};
        size_t n_kept = 0, n_gone = 0;

        (void) pthread_mutex_lock(&c->lock);
        for (size_t i = 0; i < MERGED_KEPT; i++)
                if (c->kept[i] && merged_key_has(&c->kept[i]->key, serial))
                        gone[n_gone++] = c->kept[i];
                else if (c->kept[i])
                        kept[n_kept++] = c->kept[i];
        memcpy(c->kept, kept, sizeof(kept));
        (void) pthread_mutex_unlock(&c->lock);
        for (size_t i = 0; i < n_gone; i++)
                (void) merged_model_unref(gone[i]);
}
