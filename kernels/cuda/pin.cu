/* SPDX-License-Identifier: Apache-2.0 */
/* Registered host memory: one table for the process, any thread. */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/context.cuh"

/* Registering holds locks of the driver that a launch wants, too: 1.4 ms of a piece this size, 37 ms of a GiB
 * (tests/bench/RESULTS.md). Edges lie at absolute multiples, so that ranges which are registered one after the
 * other have the same ones. */
#define PIECE ((uintptr_t) 16 << 20)

typedef struct Piece {
        uintptr_t begin, end;
        uint64_t call; /* which one made it */
} Piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static Piece *pieces;                                    /* ascending, apart */
static size_t n_pieces, max_pieces;
static uint64_t last_call;

/* The first piece that ends behind `at`. */
static size_t find(uintptr_t at) {
        size_t low = 0, high = n_pieces;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (pieces[middle].end > at)
                        high = middle;
                else
                        low = middle + 1;
        }
        return low;
}

static int add(size_t i, Piece piece) {
        if (n_pieces == max_pieces) {
                size_t max = max_pieces ? 2 * max_pieces : 256;
                Piece *more = (Piece *) realloc(pieces, max * sizeof(*more));

                if (!more)
                        return -ENOMEM;
                pieces = more;
                max_pieces = max;
        }
        memmove(pieces + i + 1, pieces + i, (n_pieces - i) * sizeof(*pieces));
        pieces[i] = piece;
        n_pieces++;
        return 0;
}

static void drop(size_t i) {
        (void) cuda_result(cudaHostUnregister((void *) pieces[i].begin));
        n_pieces--;
        memmove(pieces + i, pieces + i + 1, (n_pieces - i) * sizeof(*pieces));
}

/* What of [begin, end) is in no piece yet; it lies between two edges. */
static int pin_window(uintptr_t begin, uintptr_t end, uint64_t call) {
        int r;

        while (begin < end) {
                size_t i = find(begin);
                uintptr_t until = i < n_pieces && pieces[i].begin < end ? pieces[i].begin : end;

                if (until > begin) {
                        r = cuda_result(cudaHostRegister((void *) begin, until - begin, cudaHostRegisterPortable));
                        if (r < 0)
                                return r;
                        r = add(i, (Piece) {begin, until, call});
                        if (r < 0) {
                                (void) cuda_result(cudaHostUnregister((void *) begin));
                                return r;
                        }
                }
                begin = until < end ? pieces[i + (until > begin)].end : end;
        }
        return 0;
}

static uintptr_t page_down(uintptr_t at) {
        return at & ~((uintptr_t) sysconf(_SC_PAGESIZE) - 1);
}

int cuda_pin(LkContext *c, const void *host, uint64_t size) {
        uintptr_t begin = page_down((uintptr_t) host), end;
        int r = 0;

        (void) c;
        if (size == 0)
                return 0;
        end = page_down((uintptr_t) host + size - 1) + (uintptr_t) sysconf(_SC_PAGESIZE);

        (void) pthread_mutex_lock(&lock);
        last_call++;
        for (uintptr_t at = begin, edge; r >= 0 && at < end; at = edge) {
                edge = (at / PIECE + 1) * PIECE;
                if (edge > end)
                        edge = end;
                r = pin_window(at, edge, last_call);
        }
        if (r < 0)
                for (size_t i = find(begin); i < n_pieces && pieces[i].begin < end;)
                        if (pieces[i].call == last_call)
                                drop(i);
                        else
                                i++;
        (void) pthread_mutex_unlock(&lock);
        return r;
}

void cuda_unpin(const void *host, uint64_t size) {
        uintptr_t begin = page_down((uintptr_t) host), end = (uintptr_t) host + size;

        (void) pthread_mutex_lock(&lock);
        for (size_t i = find(begin); i < n_pieces && pieces[i].begin < end;)
                drop(i);
        (void) pthread_mutex_unlock(&lock);
}

uint64_t cuda_pin_run(const void *host, uint64_t size) {
        uintptr_t at = (uintptr_t) host, end = at + size;
        size_t i;

        (void) pthread_mutex_lock(&lock);
        i = find(at);
        if (i < n_pieces && pieces[i].begin <= at)
                end = pieces[i].end < end ? pieces[i].end : end;
        else if (i < n_pieces && pieces[i].begin < end)
                end = pieces[i].begin;
        (void) pthread_mutex_unlock(&lock);
        return end - at;
}
