/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/mod-cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

ModTable *mod_table_ref(ModTable *t) {
        t->n_ref++;
        return t;
}

ModTable *mod_table_unref(ModTable *t) {
        if (!t || --t->n_ref > 0)
                return NULL;

        (void) h3_mod_table_free(t->h3);
        free(t);
        return NULL;
}

void mod_table_unrefp(ModTable **t) {
        (void) mod_table_unref(*t);
}

/* Those to let go are freed by the caller without the lock: giving back a gigabyte takes a while. */
typedef struct Gone {
        ModTable *tables[MOD_TABLES_KEPT];
        size_t n;
} Gone;

static void gone_done(Gone *g) {
        for (size_t i = 0; i < g->n; i++)
                (void) mod_table_unref(g->tables[i]);
}

static size_t count(const ModCache *c, uint64_t *ret_bytes) {
        size_t n = 0;

        for (*ret_bytes = 0; n < MOD_TABLES_KEPT && c->kept[n]; n++)
                *ret_bytes += c->kept[n]->bytes;
        return n;
}

/* Takes it out, with its reference. */
static ModTable *take(ModCache *c, size_t i) {
        ModTable *t = c->kept[i];

        for (; i + 1 < MOD_TABLES_KEPT; i++)
                c->kept[i] = c->kept[i + 1];
        c->kept[MOD_TABLES_KEPT - 1] = NULL;
        return t;
}

/* Where there is room. */
static void put_first(ModCache *c, ModTable *t) {
        memmove(c->kept + 1, c->kept, (MOD_TABLES_KEPT - 1) * sizeof(*c->kept));
        c->kept[0] = t;
}

static void make_room(ModCache *c, uint64_t bytes, Gone *gone) {
        uint64_t used;
        size_t n = count(c, &used);

        for (; n > 0 && (n == MOD_TABLES_KEPT || used + bytes > MOD_TABLES_BYTES); n--) {
                ModTable *t = take(c, n - 1);

                used -= t->bytes;
                gone->tables[gone->n++] = t;
        }
}

void mod_cache_clear(ModCache *c) {
        CLEANUP(gone_done) Gone gone = {};

        (void) pthread_mutex_lock(&c->lock);
        while (c->kept[0])
                gone.tables[gone.n++] = take(c, 0);
        (void) pthread_mutex_unlock(&c->lock);
}

ModTable *mod_cache_find(ModCache *c, const Job *j, const H3StepInput *in) {
        ModTable *found = NULL;

        (void) pthread_mutex_lock(&c->lock);
        for (size_t i = 0; i < MOD_TABLES_KEPT && c->kept[i] && !found; i++)
                if (c->kept[i]->serial == job_model_serial(j) && h3_mod_table_covers(c->kept[i]->h3, in)) {
                        put_first(c, take(c, i));
                        found = mod_table_ref(c->kept[0]);
                }
        (void) pthread_mutex_unlock(&c->lock);
        return found;
}

bool mod_cache_make_room(ModCache *c, uint64_t bytes) {
        CLEANUP(gone_done) Gone gone = {};

        if (bytes > MOD_TABLES_BYTES)
                return false;

        (void) pthread_mutex_lock(&c->lock);
        make_room(c, bytes, &gone);
        (void) pthread_mutex_unlock(&c->lock);
        return true;
}

/* Of what the job's model is made. */
static bool is_closed(const Job *j) {
        bool closed = j->model->closed;

        for (uint32_t i = 0; j->merged && i < j->n_loras; i++)
                closed = closed || j->loras[i]->closed;
        return closed;
}

int mod_cache_add(ModCache *c, const Job *j, uint64_t bytes, H3ModTable **h3, ModTable **ret) {
        CLEANUP(gone_done) Gone gone = {};
        ModTable *t;

        t = calloc(1, sizeof(*t));
        if (!t)
                return -ENOMEM;
        t->n_ref = 1;
        t->serial = job_model_serial(j);
        t->made_of = j->merged ? j->merged->key : (MergedKey){.base = j->model->serial};
        t->bytes = bytes;
        t->h3 = STEAL_PTR(*h3);

        (void) pthread_mutex_lock(&c->lock);
        if (!is_closed(j)) {
                make_room(c, bytes, &gone);
                put_first(c, mod_table_ref(t));
        }
        (void) pthread_mutex_unlock(&c->lock);
        *ret = t;
        return 0;
}

void mod_cache_drop(ModCache *c, uint64_t serial) {
        CLEANUP(gone_done) Gone gone = {};

        (void) pthread_mutex_lock(&c->lock);
        for (size_t i = 0; i < MOD_TABLES_KEPT && c->kept[i];)
                if (merged_key_has(&c->kept[i]->made_of, serial))
                        gone.tables[gone.n++] = take(c, i);
                else
                        i++;
        (void) pthread_mutex_unlock(&c->lock);
}
