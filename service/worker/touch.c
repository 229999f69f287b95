/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/touch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/worker/crew.h"
#include "service/worker/timeline.h"

#define TOUCH_THREADS 4u
/* At a time: whoever wants to map something meanwhile waits for it. */
#define PIECE ((uintptr_t) 2 << 20)

typedef struct Range {
        uintptr_t begin, at, end; /* whole pages; at: next to be handed out */
        uintptr_t left;           /* bytes that are not touched yet */
} Range;

struct Touch {
        Crew crew;
        pthread_mutex_t lock; /* of all below */
        pthread_cond_t changed;
        Range *ranges; /* [n], in the order of use */
        uint32_t n, max;
        uint64_t sum, bytes; /* of them; at most */
        uint32_t next;       /* the first that is not handed out whole */
        bool stop;
};

static Range range_of(const void *host, uint64_t size) {
        uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE), begin = ((uintptr_t) host + page - 1) & ~(page - 1);
        uintptr_t end = ((uintptr_t) host + size) & ~(page - 1);

        end = end > begin ? end : begin;
        return (Range){begin, begin, end, end - begin};
}

/* A kernel that cannot does it when they are registered. */
static void touch(uintptr_t begin, uintptr_t end) {
        (void) madvise((void *) begin, end - begin, MADV_POPULATE_READ);
}

/* The next piece, under the lock. False: there is none, or it is to end. */
static bool next_piece(Touch *t, Range **ret_range, uintptr_t *ret_begin, uintptr_t *ret_end) {
        Range *x;

        while (t->next < t->n && t->ranges[t->next].at == t->ranges[t->next].end)
                t->next++;
        if (t->stop || t->next == t->n)
                return false;
        x = t->ranges + t->next;
        *ret_range = x;
        *ret_begin = x->at;
        *ret_end = x->end - x->at > PIECE ? x->at + PIECE : x->end;
        x->at = *ret_end;
        return true;
}

static void touch_pieces(void *userdata, uint32_t i, uint32_t n) {
        Touch *t = userdata;
        uintptr_t begin, end;
        Range *x;

        (void) pthread_mutex_lock(&t->lock);
        while (next_piece(t, &x, &begin, &end)) {
                (void) pthread_mutex_unlock(&t->lock);
                touch(begin, end);
                (void) pthread_mutex_lock(&t->lock);
                x->left -= end - begin;
                if (x->left == 0)
                        (void) pthread_cond_broadcast(&t->changed);
                if (x->left == 0 && x == t->ranges + t->n - 1)
                        timeline_beside("pages touched");
        }
        (void) pthread_mutex_unlock(&t->lock);
}

/* Where the last row of a matrix ends. */
static uint64_t bytes_of(const LkMatrix *m) {
        uint64_t last = m->rows - 1;

        return last / m->block_rows * m->block_stride + last % m->block_rows * m->row_stride + lk_row_size(m->type, m->cols);
}

static int add_slot(void *userdata, LkMatrix *matrix, LkVector *vector) {
        Touch *t = userdata;
        uint64_t size = matrix && matrix->rows > 0 ? bytes_of(matrix) : 0;

        if (size < TOUCH_FROM || size > t->bytes - t->sum)
                return 0;
        if (t->n == t->max) {
                uint32_t max = t->max ? 2 * t->max : 32;
                Range *more = realloc(t->ranges, max * sizeof(*more));

                if (!more)
                        return -ENOMEM;
                t->ranges = more;
                t->max = max;
        }
        t->ranges[t->n++] = range_of(matrix->data, size);
        t->sum += size;
        return 0;
}

static int add_pass(Touch *t, const H3WeightsKind *kind, void *copy, H3Pass pass) {
        uint32_t n = kind->pass(copy, pass, NULL);
        CLEANUP_FREE H3Part *parts = calloc(n > 0 ? n : 1, sizeof(*parts));
        int r = 0;

        if (!parts)
                return -ENOMEM;
        (void) kind->pass(copy, pass, parts);
        for (uint32_t i = 0; r >= 0 && i < n && t->sum < t->bytes; i++)
                r = kind->visit(copy, parts[i], add_slot, t);
        return r;
}

Touch *touch_begin(const H3WeightsKind *kind, const void *model, uint64_t bytes) {
        void *copy = kind->copy(model); /* whose slots a visitor may change */
        Touch *t = copy ? calloc(1, sizeof(*t)) : NULL;
        int r = t ? 0 : -ENOMEM;

        if (t) {
                t->bytes = bytes;
                (void) pthread_mutex_init(&t->lock, NULL);
                (void) pthread_cond_init(&t->changed, NULL);
                r = add_pass(t, kind, copy, H3_PASS_TEXT);
                if (r >= 0)
                        r = add_pass(t, kind, copy, H3_PASS_STEP);
                if (r < 0)
                        t->n = 0;
                if (t->n > 0)
                        crew_begin(&t->crew, TOUCH_THREADS, touch_pieces, t);
        }
        if (copy)
                kind->free(copy);
        return t;
}

static Range *find(const Touch *t, Range wanted) {
        for (uint32_t i = 0; i < t->n; i++)
                if (t->ranges[i].begin <= wanted.begin && wanted.end <= t->ranges[i].end)
                        return t->ranges + i;
        return NULL;
}

bool touch_await(Touch *t, const void *host, uint64_t size) {
        Range *x = t ? find(t, range_of(host, size)) : NULL; /* which ranges there are does not change */

        if (!x || t->crew.started == 0)
                return false;
        (void) pthread_mutex_lock(&t->lock);
        while (x->left > 0)
                (void) pthread_cond_wait(&t->changed, &t->lock);
        (void) pthread_mutex_unlock(&t->lock);
        return true;
}

Touch *touch_free(Touch *t) {
        if (!t)
                return NULL;
        (void) pthread_mutex_lock(&t->lock);
        t->stop = true;
        (void) pthread_mutex_unlock(&t->lock);
        crew_end(&t->crew);
        (void) pthread_cond_destroy(&t->changed);
        (void) pthread_mutex_destroy(&t->lock);
        free(t->ranges);
        free(t);
        return NULL;
}

static void touch_part(void *userdata, uint32_t i, uint32_t n) {
        const Range *x = userdata;
        uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE), pages = (x->end - x->begin) / page;

        touch(x->begin + pages * i / n * page, x->begin + pages * (i + 1) / n * page);
}

void touch_now(const void *host, uint64_t size) {
        Range x = range_of(host, size);
        Crew crew;

        if (size < TOUCH_FROM)
                return;
        crew_begin(&crew, TOUCH_THREADS, touch_part, &x);
        crew_end(&crew);
}
