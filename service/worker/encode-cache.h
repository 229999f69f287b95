/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What ENCODE made of prompts, kept between jobs: the same prompt is asked for again with every film of a
 * series, and clients come back with it. The newest used are kept, as many bytes as WELCOME allows. A key is
 * whole, pictures included, and compared byte by byte: what one user asked for is never found by the hash of
 * another's, and never by another user at all. A model is known by its bytes, not by when it was opened: clients
 * load it for every prompt, and what a closed one made is found again when it comes back. Filled on the steps'
 * thread; the link's clears it.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct EncodeKey {
        uint64_t owner;  /* whose job it is; never 0 */
        uint64_t model; /* its identity; 0: not known, nothing is found or kept */
        const void *bytes;
        uint64_t size; /* everything else that the result depends on */
} EncodeKey;

typedef struct Encoded {
        atomic_uint n_ref;
        uint64_t owner, model;
        void *key, *text; /* owned */
        uint64_t key_size, text_size;
        struct Encoded *next; /* the cache's, under its lock */
} Encoded;

Encoded *encoded_unref(Encoded *e);
void encoded_unrefp(Encoded **e);

typedef struct EncodeCache {
        pthread_mutex_t lock; /* of all below */
        uint64_t limit;       /* bytes, keys included; 0: nothing is kept */
        uint64_t used;
        Encoded *first; /* newest used first, counted */
} EncodeCache;

#define ENCODE_CACHE_INIT                                                                                   \
        { .lock = PTHREAD_MUTEX_INITIALIZER }

/* How many bytes it may have; before there are other threads. */
void encode_cache_set_limit(EncodeCache *c, uint64_t bytes);

/* Lets everything go; the limit stays. */
void encode_cache_clear(EncodeCache *c);

/* A counted reference to what has this key, or NULL. What is found becomes the newest. */
Encoded *encode_cache_find(EncodeCache *c, const EncodeKey *key);

/* Keeps copies of the key and of text, unless they are larger than the limit altogether; lets go what is oldest
 * for it. No memory for it is no error: it goes without. */
void encode_cache_add(EncodeCache *c, const EncodeKey *key, const void *text, uint64_t text_size);
