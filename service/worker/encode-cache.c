/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/encode-cache.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

Encoded *encoded_unref(Encoded *e) {
        if (!e || --e->n_ref > 0)
                return NULL;

        free(e->key);
        free(e->text);
        free(e);
        return NULL;
}

void encoded_unrefp(Encoded **e) {
        (void) encoded_unref(*e);
}

static uint64_t bytes_of(const Encoded *e) {
        return sizeof(*e) + e->key_size + e->text_size;
}

/* Takes *at out of the list, with its reference. */
static Encoded *take(EncodeCache *c, Encoded **at) {
        Encoded *e = *at;

        *at = e->next;
        e->next = NULL;
        c->used -= bytes_of(e);
        return e;
}

static void put_first(EncodeCache *c, Encoded *e) {
        e->next = c->first;
        c->first = e;
        c->used += bytes_of(e);
}

static Encoded **last_of(EncodeCache *c) {
        Encoded **at = &c->first;

        while ((*at)->next)
                at = &(*at)->next;
        return at;
}

/* Those to let go form a list that is freed without the lock. */
static void free_list(Encoded *e) {
        while (e) {
                Encoded *next = e->next;

                e->next = NULL;
                (void) encoded_unref(e);
                e = next;
        }
}

static void let_go(EncodeCache *c, Encoded **at, Encoded **gone) {
        Encoded *e = take(c, at);

        e->next = *gone;
        *gone = e;
}

void encode_cache_set_limit(EncodeCache *c, uint64_t bytes) {
        c->limit = bytes;
}

void encode_cache_clear(EncodeCache *c) {
        Encoded *gone;

        (void) pthread_mutex_lock(&c->lock);
        gone = STEAL_PTR(c->first);
        c->used = 0;
        (void) pthread_mutex_unlock(&c->lock);
        free_list(gone);
}

/* Owner and size first: most keys differ there, and pictures are large. */
static bool has_key(const Encoded *e, const EncodeKey *key) {
        return e->owner == key->owner && e->model == key->model && e->key_size == key->size &&
               memcmp(e->key, key->bytes, (size_t) key->size) == 0;
}

Encoded *encode_cache_find(EncodeCache *c, const EncodeKey *key) {
        Encoded **at, *found = NULL;

        (void) pthread_mutex_lock(&c->lock);
        for (at = &c->first; *at && !has_key(*at, key);)
                at = &(*at)->next;
        if (*at) {
                found = take(c, at);
                put_first(c, found);
                found->n_ref++;
        }
        (void) pthread_mutex_unlock(&c->lock);
        return found;
}

static void *copy_of(const void *bytes, uint64_t size) {
        void *copy = malloc((size_t) size);

        if (copy)
                memcpy(copy, bytes, (size_t) size);
        return copy;
}

static int encoded_new(const EncodeKey *key, const void *text, uint64_t text_size, Encoded **ret) {
        CLEANUP(encoded_unrefp) Encoded *e = calloc(1, sizeof(*e));

        if (!e)
                return -ENOMEM;
        e->n_ref = 1;
        e->owner = key->owner;
        e->model = key->model;
        e->key_size = key->size;
        e->text_size = text_size;
        e->key = copy_of(key->bytes, key->size);
        e->text = copy_of(text, text_size);
        if (!e->key || !e->text)
                return -ENOMEM;

        *ret = STEAL_PTR(e);
        return 0;
}

static bool fits(const EncodeCache *c, const EncodeKey *key, uint64_t text_size) {
        uint64_t sum;

        return !__builtin_add_overflow(key->size, text_size, &sum) &&
               !__builtin_add_overflow(sum, sizeof(Encoded), &sum) && sum <= c->limit;
}

void encode_cache_add(EncodeCache *c, const EncodeKey *key, const void *text, uint64_t text_size) {
        Encoded *e, *gone = NULL;

        if (key->model == 0 || !fits(c, key, text_size) || encoded_new(key, text, text_size, &e) < 0)
                return;

        (void) pthread_mutex_lock(&c->lock);
        put_first(c, e);
        while (c->used > c->limit)
                let_go(c, last_of(c), &gone);
        (void) pthread_mutex_unlock(&c->lock);
        free_list(gone);
}
