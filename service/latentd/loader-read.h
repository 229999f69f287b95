/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One range of a file on its way into memory, cut into requests: what to ask for next and what an answer
 * means. No threads of its own: whoever calls holds what protects it (loader.c), except for the atomics. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "service/latentd/file-source.h"
#include "service/latentd/loader.h"

#define LOADER_DEPTH 32u /* requests in flight, over all reads */
#define LOADER_REQUEST_BYTES (UINT64_C(1) << 20)

/* Without the ring: threads for one read, and reads at a time. Abandoned ones do not count, so that files
 * that never answer hold up others no longer than the stall time. */
#define LOADER_READ_THREADS 4u
#define LOADER_READS 8u

typedef struct LoaderRequest {
        struct LoaderRead *read;
        uint64_t offset; /* where the next attempt starts */
        uint64_t end;
        uint64_t got; /* everything before it has arrived */
        bool direct;  /* the attempt was made with O_DIRECT */
        bool again;   /* to be submitted again */
        bool in_flight;
        unsigned n_same_end;
} LoaderRequest;

struct LoaderRead {
        Loader *loader;
        FileSource source;
        char *map; /* of the region: byte 0 of the file */
        uint64_t end, file_size, next;
        LoaderDone done;
        LoaderLate late;
        void *userdata;

        LoaderRequest requests[LOADER_DEPTH];
        int error; /* the first one; nothing is submitted after it */
        unsigned n_retries;
        uint64_t started_usec;

        pthread_t threads[LOADER_READ_THREADS]; /* without the ring */
        unsigned n_threads;
        unsigned n_running; /* of these; under the loader's lock */
        bool started;

        atomic_uint n_in_flight;
        atomic_uint_fast64_t bytes, progress_usec;
        atomic_bool cancelled; /* by the loop */
        atomic_bool abandoned; /* by the loop: done was called, only the struct waits for its answers */

        TAILQ_ENTRY(LoaderRead) entry;      /* loader thread's or the hand-over lists */
        TAILQ_ENTRY(LoaderRead) loop_entry; /* loop: all that are not finished */
};

/* The next request, with offset, end and direct set and counted as in flight; NULL if there is nothing to
 * ask for now. */
LoaderRequest *loader_read_next(LoaderRead *r);

/* The answer of read(2) to it: bytes or a negative errno. Sets r->error where that ends the read. */
void loader_read_answer(LoaderRequest *q, int result);

/* Nothing in flight and nothing more to ask. */
bool loader_read_finished(const LoaderRead *r);
