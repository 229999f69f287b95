/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"
#include "service/worker/staging.h"
#include "service/worker/trial.h"

#define TIMED_COPIES 4u
#define PIECE_ALIGN 256u
#define TIMED_PRODUCTS 8u
#define TIMED_ROUNDS 6u

typedef struct Pair {
        const PeersTrial *trial;
        uint32_t from, to;
        void *source, *target;
        uint8_t *pattern, *arrived; /* host memory */
        bool registered;            /* the latter */
        bool hangs;
} Pair;

void peers_note(WireHello *hello, const char *format, ...) {
        size_t used = strlen(hello->notes), left = sizeof(hello->notes) - used;
        char line[300];
        va_list ap;
        int n;

        va_start(ap, format);
        n = vsnprintf(line, sizeof(line), format, ap);
        va_end(ap);
        log_warning("%s", line);
        if (n > 0 && (size_t) n < sizeof(line) && (size_t) n + 2 <= left)
                (void) snprintf(hello->notes + used, left, "%s\n", line);
}

static uint32_t mega(uint64_t bytes, uint64_t usec) {
        uint64_t rate = bytes / (usec > 0 ? usec : 1);

        return rate >= WIRE_LINK_SAME ? WIRE_LINK_SAME - 1 : rate > 0 ? (uint32_t) rate : 1;
}

static int wait_for(const PeersTrial *t, uint32_t device) {
        return trial_wait(t->ops, t->contexts[device], t->deadline_usec);
}

static int wait_done(Pair *p) {
        int r = wait_for(p->trial, p->from);

        p->hangs = r == -ETIMEDOUT;
        return r;
}

static int copy(Pair *p, unsigned times) {
        const PeersTrial *t = p->trial;
        LkContext *from = t->contexts[p->from];
        const LkCopy a = {.to = p->target, .from = p->source, .rows = 1, .width = t->size, .to_stride = t->size, .from_stride = t->size};
        int r = 0;

        for (unsigned i = 0; r >= 0 && i < times; i++)
                r = t->ops->copy(from, LK_PEER, &a);
        if (r >= 0)
                r = t->ops->mark(from, LK_PEER, TRIAL_DONE);
        return r < 0 ? r : wait_done(p);
}

/* What both contexts were given is done before the copy begins. */
static int order(Pair *p) {
        const PeersTrial *t = p->trial;
        const uint32_t ends[] = {p->from, p->to};
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(ends); i++) {
                r = t->bind(ends[i]);
                if (r >= 0)
                        r = t->ops->mark(t->contexts[ends[i]], LK_COMPUTE, TRIAL_READY);
                if (r >= 0)
                        r = t->ops->join(t->contexts[ends[i]], TRIAL_READY);
        }
        if (r >= 0)
                r = t->bind(p->from);
        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(ends); i++)
                r = t->ops->wait_for(t->contexts[p->from], LK_PEER, t->contexts[ends[i]], TRIAL_READY);
        return r;
}

static int prepare(Pair *p) {
        const PeersTrial *t = p->trial;
        int r;

        r = t->bind(p->to);
        if (r >= 0)
                r = t->ops->memory_new(t->contexts[p->to], t->size, &p->target);
        if (r >= 0)
                r = t->bind(p->from);
        if (r >= 0)
                r = t->ops->memory_new(t->contexts[p->from], t->size, &p->source);
        if (r < 0)
                return r;
        trial_fill(p->pattern, t->size, p->from, p->to);
        r = t->ops->upload(t->contexts[p->from], p->source, p->pattern, t->size);
        return r < 0 ? r : order(p);
}

/* Bytes arrive as they were sent: 0, -EBADMSG with the first that does not. */
static int verify(Pair *p, uint64_t *ret_at) {
        const PeersTrial *t = p->trial;
        int r;

        r = copy(p, 1);
        if (r >= 0)
                r = t->bind(p->to);
        if (r >= 0) /* on LK_COMPUTE of the other one, which the wait orders it behind */
                r = t->ops->wait_for(t->contexts[p->to], LK_COMPUTE, t->contexts[p->from], TRIAL_DONE);
        if (r >= 0)
                r = t->ops->download(t->contexts[p->to], p->arrived, p->target, t->size);
        if (r < 0)
                return r;
        for (uint64_t i = 0; i < t->size; i++)
                if (p->arrived[i] != p->pattern[i]) {
                        *ret_at = i;
                        return -EBADMSG;
                }
        return 0;
}

static int measure(Pair *p, WireHello *hello) {
        const PeersTrial *t = p->trial;
        uint64_t begin;
        int r;

        r = order(p);
        begin = clock_usec();
        if (r >= 0)
                r = copy(p, TIMED_COPIES);
        if (r >= 0)
                hello->peer_mbs[p->from][p->to] = mega(TIMED_COPIES * t->size, clock_usec() - begin);
        return r;
}

static uint64_t piece_begin(const PeersTrial *t, uint32_t piece) {
        return piece == TRIAL_PIECES ? t->size : t->size * piece / TRIAL_PIECES / PIECE_ALIGN * PIECE_ALIGN;
}

/* A piece leaves when the one that was in its place has arrived: as exchange-staged.c does it. */
static int stage_piece(Pair *p, uint32_t piece, bool again) {
        const PeersTrial *t = p->trial;
        LkContext *from = t->contexts[p->from], *to = t->contexts[p->to];
        uint64_t begin = piece_begin(t, piece), size = piece_begin(t, piece + 1) - begin;
        const LkCopy out = {.to = p->arrived + begin, .from = (uint8_t *) p->source + begin, .rows = 1, .width = size};
        const LkCopy in = {.to = (uint8_t *) p->target + begin, .from = p->arrived + begin, .rows = 1, .width = size};
        int r;

        r = t->bind(p->from);
        if (r >= 0 && again)
                r = t->ops->wait_for(from, LK_PEER, to, TRIAL_ARRIVED + piece);
        if (r >= 0)
                r = t->ops->copy(from, LK_PEER, &out);
        if (r >= 0)
                r = t->ops->mark(from, LK_PEER, TRIAL_SENT + piece);
        if (r >= 0)
                r = t->bind(p->to);
        if (r >= 0)
                r = t->ops->wait_for(to, LK_TAKE, from, TRIAL_SENT + piece);
        if (r >= 0)
                r = t->ops->copy(to, LK_TAKE, &in);
        return r < 0 ? r : t->ops->mark(to, LK_TAKE, TRIAL_ARRIVED + piece);
}

static int stage(Pair *p, unsigned times) {
        const PeersTrial *t = p->trial;
        int r = 0;

        for (unsigned i = 0; r >= 0 && i < times; i++)
                for (uint32_t piece = 0; r >= 0 && piece < TRIAL_PIECES; piece++)
                        r = stage_piece(p, piece, i > 0);
        if (r >= 0)
                r = t->ops->mark(t->contexts[p->to], LK_TAKE, TRIAL_DONE);
        if (r >= 0)
                r = wait_for(t, p->to);
        p->hangs = r == -ETIMEDOUT;
        return r;
}

/* As exchange-host.c does it. */
static int pass(Pair *p, unsigned times) {
        const PeersTrial *t = p->trial;
        int r = 0;

        for (unsigned i = 0; r >= 0 && i < times; i++) {
                r = t->bind(p->from);
                if (r >= 0)
                        r = t->ops->download(t->contexts[p->from], p->arrived, p->source, t->size);
                if (r >= 0)
                        r = t->bind(p->to);
                if (r >= 0)
                        r = t->ops->upload(t->contexts[p->to], p->target, p->arrived, t->size);
                if (r >= 0)
                        r = t->ops->mark(t->contexts[p->to], LK_COMPUTE, TRIAL_READY);
                if (r >= 0)
                        r = t->ops->join(t->contexts[p->to], TRIAL_READY);
        }
        return r;
}

/* What a driver does once, the first copies do. */
static int measure_host(Pair *p, WireHello *hello) {
        int (*const way)(Pair * p, unsigned times) = p->registered ? stage : pass;
        uint64_t begin;
        int r;

        r = way(p, 1);
        begin = clock_usec();
        if (r >= 0)
                r = way(p, TIMED_COPIES);
        if (r >= 0)
                hello->host_mbs[p->from][p->to] = mega(TIMED_COPIES * p->trial->size, clock_usec() - begin);
        return r;
}

static void explain(const Pair *p, WireHello *hello, int r, uint64_t at) {
        const char *from = p->trial->devices[p->from].pci_address, *to = p->trial->devices[p->to].pci_address;

        if (r == -EBADMSG)
                peers_note(hello, "GPU %s to %s: copies between them arrive with wrong bytes (the first at %" PRIu64
                                  "): they exchange through the host.", from, to, at);
        else if (p->hangs)
                peers_note(hello, "GPU %s to %s: a copy between them did not end in %" PRIu64 " s: they exchange through the host.", from,
                        to, (p->trial->deadline_usec + 999999) / 1000000);
        else if (r == -EOPNOTSUPP)
                peers_note(hello, "GPU %s to %s: the driver has no direct way between them: they exchange through the host.", from, to);
        else
                peers_note(hello, "GPU %s to %s: copies between them fail (%s): they exchange through the host.", from, to, strerror(-r));
}

/* false: it hangs. */
static bool try_pair(Pair *p, WireHello *hello) {
        const PeersTrial *t = p->trial;
        uint64_t at = 0;
        int r;

        r = prepare(p);
        if (r >= 0)
                r = measure_host(p, hello);
        if (r >= 0 && t->connect)
                r = t->connect(p->from, p->to);
        if (r >= 0)
                r = order(p);
        if (r >= 0)
                r = verify(p, &at);
        if (r >= 0)
                r = measure(p, hello);
        if (r < 0) {
                hello->peer_mbs[p->from][p->to] = 0;
                explain(p, hello, r, at);
        }
        if (p->hangs) /* its memory may still be written */
                return false;

        if (t->bind(p->from) >= 0)
                t->ops->memory_free(t->contexts[p->from], p->source);
        if (t->bind(p->to) >= 0)
                t->ops->memory_free(t->contexts[p->to], p->target);
        return true;
}

static bool is_without(const PeersTrial *t, uint32_t device) {
        return t->without >> device & 1;
}

/* bf16 between 1 and 2, of both signs. */
static void fill_factors(uint16_t *factors, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                uint32_t x = (uint32_t) i * 2654435761u;

                factors[i] = (uint16_t) (0x3f80u | (x >> 31) << 15 | (x >> 20 & 0x7f));
        }
}

static int time_products(const PeersTrial *t, uint32_t device, const LkGemm *a, uint64_t *ret_usec) {
        LkContext *c = t->contexts[device];
        uint64_t begin = clock_usec();
        int r = 0;

        for (unsigned i = 0; r >= 0 && i < TIMED_PRODUCTS; i++)
                r = t->ops->gemm(c, a);
        if (r >= 0)
                r = t->ops->mark(c, LK_COMPUTE, TRIAL_DONE);
        if (r >= 0)
                r = wait_for(t, device);
        *ret_usec = clock_usec() - begin;
        return r;
}

/* The best of some: the first one has what a library does once. */
static int measure_rate(const PeersTrial *t, uint32_t device, const uint16_t *factors, uint32_t *ret) {
        const uint64_t n = t->product, size = n * n * sizeof(*factors);
        LkContext *c = t->contexts[device];
        uint64_t best = UINT64_MAX, usec;
        void *x = NULL, *w = NULL, *y = NULL;
        LkGemm a = {.m = n, .x_type = LK_BF16, .x_ld = n, .y_type = LK_BF16, .y_ld = n,
                .w = {.type = LK_BF16, .rows = n, .cols = n, .row_stride = 2 * n, .block_rows = n, .block_stride = size}};
        int r;

        r = t->bind(device);
        if (r >= 0)
                r = t->ops->memory_new(c, size, &x);
        if (r >= 0)
                r = t->ops->memory_new(c, size, &w);
        if (r >= 0)
                r = t->ops->memory_new(c, size, &y);
        if (r >= 0)
                r = t->ops->upload(c, x, factors, size);
        if (r >= 0)
                r = t->ops->upload(c, w, factors, size);
        a.x = x;
        a.w.data = w;
        a.y = y;
        for (unsigned i = 0; r >= 0 && i < TIMED_ROUNDS; i++) {
                r = time_products(t, device, &a, &usec);
                best = usec < best ? usec : best;
        }
        if (r == -ETIMEDOUT) /* its memory may still be written */
                return r;
        t->ops->memory_free(c, x);
        t->ops->memory_free(c, w);
        t->ops->memory_free(c, y);
        if (r >= 0)
                *ret = mega(2 * n * n * n * TIMED_PRODUCTS / 1000, best);
        return r;
}

/* What has no rate takes part like any other. */
static void try_rates(const PeersTrial *t, WireHello *hello, bool *hangs) {
        const uint64_t n = t->product * t->product;
        CLEANUP_FREE uint16_t *factors = n > 0 ? malloc(n * sizeof(*factors)) : NULL;

        if (!factors)
                return;
        fill_factors(factors, n);
        for (uint32_t i = 0; i < t->n; i++) {
                int r = is_without(t, i) ? 0 : measure_rate(t, i, factors, hello->rates + i);

                hangs[i] = r == -ETIMEDOUT;
                if (r < 0)
                        peers_note(hello, "GPU %s: its rate cannot be measured (%s): it counts like the others.", t->devices[i].pci_address,
                                strerror(-r));
        }
}

/* Host memory that pairs use one after the other, by the first device that is tried. */
static int take_staging(const PeersTrial *t, Staging *s, StagingArea *ret) {
        uint32_t first = 0;
        int r;

        while (first < t->n && is_without(t, first))
                first++;
        if (first == t->n)
                return -ENODEV;
        r = t->bind(first);
        return r < 0 ? r : staging_take(s, t->ops, t->contexts[first], 0, t->size, ret);
}

void peers_try(const PeersTrial *t, WireHello *hello) {
        CLEANUP_FREE uint8_t *pattern = NULL;
        bool hangs[WIRE_DEVICES_MAX] = {}, any_hangs = false;
        Staging staging = {};
        StagingArea area;

        for (uint32_t i = 0; t->ops->copy && i < t->n; i++)
                hello->peer_mbs[i][i] = WIRE_LINK_SAME;
        if (!t->ops->copy || t->n < 2)
                return;
        pattern = malloc(t->size);
        if (!pattern || take_staging(t, &staging, &area) < 0) {
                peers_note(hello, "There is no memory to try copies between GPUs with: they exchange through the host.");
                return;
        }

        try_rates(t, hello, hangs);
        for (uint32_t from = 0; from < t->n; from++)
                for (uint32_t to = 0; to < t->n; to++) {
                        Pair p = {.trial = t, .from = from, .to = to, .pattern = pattern, .arrived = area.memory,
                                .registered = area.registered};

                        if (from == to || hangs[from] || hangs[to] || is_without(t, from) || is_without(t, to))
                                continue;
                        if (!try_pair(&p, hello))
                                hangs[from] = hangs[to] = any_hangs = true;
                }
        if (any_hangs)
                staging_abandon(&staging);
        staging_clear(&staging);
        for (uint32_t i = 0; i < t->n; i++) /* what the trial took is not kept */
                if (!hangs[i] && !is_without(t, i) && t->bind(i) >= 0)
                        t->ops->memory_trim(t->contexts[i]);
}
