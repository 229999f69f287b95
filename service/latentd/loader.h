/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reads files into memory: one thread that owns one io_uring, or starts a few threads for each read, that
 * call pread(), where the ring is refused. The loop hands in ranges and gets answers; it never waits for a
 * disk. */

#include <stdbool.h>
#include <stdint.h>

#include <systemd/sd-event.h>

#include "service/latentd/file-source.h"

#define LOADER_STALL_USEC (30 * UINT64_C(1000000))

typedef struct Loader Loader;
typedef struct LoaderRead LoaderRead;

/* On the loop, exactly once, never from inside loader_read(). result: 0; -ESTALE: the file is shorter than
 * it was; -ECANCELED; -ETIMEDOUT: no byte came for the stall time, and late answers may still be written to
 * the memory, so that it must stay as it is, and the descriptor open, until LoaderLate; other errors as of
 * read(2). usec: how long it took. */
typedef void (*LoaderDone)(void *userdata, int result, uint64_t bytes, uint64_t usec);

/* On the loop, at most once, after done with -ETIMEDOUT: the answers came after all, nothing is written any
 * more. Not after loader_free(). */
typedef void (*LoaderLate)(void *userdata);

int loader_new(sd_event *event, const FileIo *io, uint64_t stall_usec, Loader **ret);

/* Stops asking, waits for answers that are due (at most the stall time), calls the outstanding done
 * functions. */
Loader *loader_free(Loader *l);

/* 0: the ring works; else why not (negative errno), and reads go through pread(). */
int loader_ring_error(const Loader *l);

/* Reads [begin, end) of a file of file_size bytes to map + begin. map and begin are multiples of 4096; end
 * too, and at most file_size rounded up to that, with memory behind it: the last block is written whole.
 * Memory should be populated. The descriptor of source (which is copied) and map stay the caller's and alive
 * until done. */
int loader_read(Loader *l, const FileSource *source, void *map, uint64_t begin, uint64_t end,
        uint64_t file_size, LoaderDone done, LoaderLate late, void *userdata, LoaderRead **ret);

/* Asks for no more; done comes with -ECANCELED once nothing is in flight. */
void loader_cancel(LoaderRead *r);

/* Bytes of the file that have arrived. */
uint64_t loader_read_bytes(const LoaderRead *r);
