/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/loader-read.h"

#include <errno.h>

static bool may_submit(const LoaderRead *r) {
        return r->error == 0 && !atomic_load(&r->cancelled);
}

LoaderRequest *loader_read_next(LoaderRead *r) {
        LoaderRequest *idle = NULL, *q = NULL;

        if (!may_submit(r))
                return NULL;

        for (unsigned i = 0; i < LOADER_DEPTH && !q; i++) {
                if (r->requests[i].in_flight)
                        continue;
                if (r->requests[i].again)
                        q = &r->requests[i];
                else if (!idle)
                        idle = &r->requests[i];
        }

        if (!q) {
                if (!idle || r->next >= r->end)
                        return NULL;

                q = idle;
                q->offset = q->got = r->next;
                q->n_same_end = 0;
                q->end = r->end - r->next < LOADER_REQUEST_BYTES ? r->end : r->next + LOADER_REQUEST_BYTES;
                r->next = q->end;
        }

        q->read = r;
        q->again = false;
        q->in_flight = true;
        q->direct = r->source.direct;
        (void) atomic_fetch_add(&r->n_in_flight, 1);
        return q;
}

static void answer_error(LoaderRequest *q, int error) {
        LoaderRead *r = q->read;

        if (file_io_retry(error, &r->n_retries)) {
                q->again = true;
                return;
        }

        /* Some file systems take the flag and refuse the read. */
        if ((error == -EINVAL || error == -EOPNOTSUPP) && q->direct) {
                if (r->source.direct)
                        file_source_set_buffered(&r->source);
                q->again = true;
                return;
        }

        if (r->error == 0)
                r->error = error;
}

/* Nothing new: the file is shorter than it was, or the answer was cut short twice. */
static void answer_same_end(LoaderRequest *q, int result) {
        LoaderRead *r = q->read;

        if (result > 0 && ++q->n_same_end < FILE_IO_SAME_END)
                q->again = true;
        else if (r->error == 0)
                r->error = -ESTALE;
}

void loader_read_answer(LoaderRequest *q, int result) {
        LoaderRead *r = q->read;
        uint64_t reached, wanted = q->end < r->file_size ? q->end : r->file_size;

        q->in_flight = false;
        (void) atomic_fetch_sub(&r->n_in_flight, 1);

        if (result < 0) {
                answer_error(q, result);
                return;
        }

        /* Fewer bytes than asked for are right at the end of the file alone; otherwise go on behind them. */
        reached = q->offset + (uint64_t) result;
        if (reached <= q->got) {
                answer_same_end(q, result);
                return;
        }

        q->n_same_end = 0;
        r->n_retries = 0;
        (void) atomic_fetch_add(&r->bytes, (reached < wanted ? reached : wanted) - q->got);
        q->got = reached;
        if (reached >= wanted)
                return;

        q->offset = r->source.direct ? reached - reached % REGION_BLOCK : reached;
        q->again = true;
}

bool loader_read_finished(const LoaderRead *r) {
        if (atomic_load(&r->n_in_flight) > 0)
                return false;
        if (!may_submit(r))
                return true;
        if (r->next < r->end)
                return false;

        for (unsigned i = 0; i < LOADER_DEPTH; i++)
                if (r->requests[i].again)
                        return false;

        return true;
}
