/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/residency.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"
#include "service/worker/coder.h"
#include "service/worker/timeline.h"
#include "service/worker/touch.h"

/* Rows that an MLP is made for at a time, where there is memory: more read weights less often. With int8 products
 * what is between them stays in the cache with fewer. */
static const uint32_t pieces[] = {24576, 16384, 8192, 4096, 2048, 1024};
#define PIECE_INT8 8192u
#define PIECE_LEAST 1024u
#define PIECE_MODEST 4096u /* below a model's own share of a small device */

#define REGROW_FIRST_USEC UINT64_C(30000000)
#define REGROW_LAST_USEC UINT64_C(3600000000)

/* Of the memory that is planned with: what allocations are rounded up by. */
#define SLACK 64

static pthread_mutex_t protection = PTHREAD_MUTEX_INITIALIZER; /* of the regions' maps */
static pthread_mutex_t figures_lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_at_work(const Residency *x, uint32_t rank) {
        return x->plan_ranks >> rank & 1;
}

/* What a model takes of the devices, beside what was counted of the same file before. */
static void note_model(WireDeviceModel to[static WIRE_DEVICE_MODELS_MAX], const ResidencyModel *m) {
        uint32_t at = 0;

        while (at < WIRE_DEVICE_MODELS_MAX && to[at].model != 0 && to[at].model != m->base->id)
                at++;
        if (at == WIRE_DEVICE_MODELS_MAX)
                return;
        for (uint32_t i = 0; to[at].model == 0 && i < m->base->n_regions; i++)
                to[at].registered_bytes += m->base->regions[i].registered_bytes;
        if (m->merged)
                to[at].registered_bytes += m->merged->registered_bytes;
        to[at].model = m->base->id;
        for (uint32_t i = 0; i < RANKS_MAX; i++) {
                DeviceWeightsState s;

                if (!m->weights[i])
                        continue;
                device_weights_state(model_weights_device(m->weights[i]), &s);
                to[at].bytes += s.bytes;
                if (m->h3 && s.resident > 0)
                        s.resident = (s.resident - 1) / 2; /* two parts each, behind the ends */
                if (s.resident > to[at].blocks)
                        to[at].blocks = s.resident;
        }
}

void residency_note(Residency *x) {
        WireDeviceModel figures[WIRE_DEVICE_MODELS_MAX] = {};

        x->used_usec = clock_usec();
        if (x->now.base)
                note_model(figures, &x->now);
        for (uint32_t i = 0; i < x->n_kept; i++)
                note_model(figures, x->kept + i);
        (void) pthread_mutex_lock(&figures_lock);
        memcpy(x->figures, figures, sizeof(figures));
        (void) pthread_mutex_unlock(&figures_lock);
}

/* Of the one whose turn it is. */
static WireDeviceModel figures_now(const Residency *x) {
        WireDeviceModel figures[WIRE_DEVICE_MODELS_MAX] = {};

        if (x->now.base)
                note_model(figures, &x->now);
        return figures[0];
}

void residency_figures(const Residency *x, WireDeviceModel ret[static WIRE_DEVICE_MODELS_MAX]) {
        (void) pthread_mutex_lock(&figures_lock);
        memcpy(ret, x->figures, sizeof(x->figures));
        (void) pthread_mutex_unlock(&figures_lock);
}

/* The region that memory of the model lies in; NULL: it is a merged matrix, or a VAE's own copy. */
static Region *region_of(const ModelEntry *m, const void *host) {
        for (uint32_t i = 0; i < m->n_regions; i++) {
                Region *x = m->regions + i;

                if ((const uint8_t *) host >= (uint8_t *) x->map && (const uint8_t *) host < (uint8_t *) x->map + x->region_size)
                        return x;
        }
        return NULL;
}

static int protect(const void *host, uint64_t size, int protection_bits) {
        uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE), begin = (uintptr_t) host & ~(page - 1);
        uintptr_t end = ((uintptr_t) host + size + page - 1) & ~(page - 1);

        return mprotect((void *) begin, end - begin, protection_bits) < 0 ? -errno : 0;
}

/* Else it is registered anew, which costs time. */
static void note_registered(Ranges *all, _Atomic uint64_t *bytes, uintptr_t first, uint64_t size) {
        (void) ranges_add(all, first, first + size);
        *bytes = all->bytes;
}

/* Under the lock. Regions are mapped to be read, and written only by a driver that registers them. What it has registered already is left
 * alone: changing the protection of mapped memory to and fro takes 50 ms a GB. */
static int pin_in_region(const Residency *x, LkContext *c, Region *region, const void *host, uint64_t size) {
        uint64_t begin = clock_usec(), touched, open, pinned;
        uintptr_t first = (uintptr_t) host;
        int r;

        if (ranges_have(&region->registered, first, first + size))
                return 0;
        if (!touch_await(x->now.base->touch, host, size))
                touch_now(host, size);
        touched = clock_usec();
        r = protect(host, size, PROT_READ | PROT_WRITE);
        open = clock_usec();
        if (r >= 0)
                r = x->ops->pin(c, host, size);
        pinned = clock_usec();
        (void) protect(host, size, PROT_READ);
        timeline_count("touched", touched - begin);
        timeline_count("registered", pinned - open);
        timeline_count("protected", open - touched + (clock_usec() - pinned));
        if (r >= 0)
                note_registered(&region->registered, &region->registered_bytes, first, size);
        return r;
}

/* Likewise. */
static int pin_merged(const Residency *x, LkContext *c, const void *host, uint64_t size) {
        MergedModel *m = x->now.merged;
        uintptr_t first = (uintptr_t) host;
        int r;

        if (ranges_have(&m->registered, first, first + size))
                return 0;
        r = x->ops->pin(c, host, size);
        if (r >= 0)
                note_registered(&m->registered, &m->registered_bytes, first, size);
        return r;
}

/* On the rank's thread. */
static int pin(void *userdata, LkContext *c, const void *host, uint64_t size) {
        ResidencyRank *rank = userdata;
        Residency *x = rank->all;
        Region *region = region_of(x->now.base, host);
        int r;

        if (!region && !x->now.merged) /* few bytes, of the heap: others' lie in the same pages */
                return 0;
        (void) pthread_mutex_lock(&protection);
        r = region ? pin_in_region(x, c, region, host, size) : pin_merged(x, c, host, size);
        if (r < 0 && !x->warned) {
                x->warned = true;
                log_warning("The weights cannot be registered with the device (%s): copies to it are slower. Is "
                            "LimitMEMLOCK= large enough?",
                        strerror(-r));
        }
        (void) pthread_mutex_unlock(&protection);
        return r;
}

static void ignore_stuck(void *userdata, uint32_t rank) {
        /* the broker sees that nothing comes any more */
}

/* On every rank that the group has, one that never worked included: what its context keeps goes, too. */
static int on_all_ranks(RankGroup *g, RankWork work, void *userdata) {
        return rank_group_run(g,
                &(RankOrder){.ranks = UINT64_MAX >> (64 - rank_group_size(g)), .work = work, .userdata = userdata,
                        .deadline_usec = UINT64_C(600000000), .stuck = ignore_stuck});
}

/* A model, on its ranks. */
typedef struct Leaving {
        Residency *all;
        ResidencyModel *model;
} Leaving;

static int free_on_rank(void *userdata, uint32_t rank, LkContext *context) {
        const Leaving *l = userdata;

        l->model->weights[rank] = model_weights_free(l->model->weights[rank]);
        staging_drop(&l->all->staging, rank);
        l->all->ops->memory_trim(context);
        return 0;
}

static void forget(ResidencyModel *m) {
        (void) merged_model_unref(m->merged);
        (void) model_entry_unref(m->base);
        *m = (ResidencyModel){};
}

static void drop_model(Residency *x, RankGroup *g, ResidencyModel *m) {
        (void) on_all_ranks(g, free_on_rank, &(Leaving){x, m});
        forget(m);
}

/* Of those that are kept, number i is the caller's from now on. */
static ResidencyModel take_kept(Residency *x, uint32_t i) {
        ResidencyModel taken = x->kept[i];

        memmove(x->kept + i, x->kept + i + 1, (--x->n_kept - i) * sizeof(*x->kept));
        x->kept[x->n_kept] = (ResidencyModel){};
        return taken;
}

static void drop_kept(Residency *x, RankGroup *g, uint32_t i) {
        ResidencyModel dropped = take_kept(x, i);

        drop_model(x, g, &dropped);
}

static bool drop_all_kept(Residency *x, RankGroup *g) {
        const bool any = x->n_kept > 0;

        while (x->n_kept > 0)
                drop_kept(x, g, x->n_kept - 1);
        return any;
}

static void clear_now(Residency *x, RankGroup *g) {
        if (x->now.base)
                drop_model(x, g, &x->now);
        x->planned = false;
        x->regrow_usec = x->regrow_delay_usec = 0;
}

void residency_clear(Residency *x, RankGroup *g) {
        clear_now(x, g);
        (void) drop_all_kept(x, g);
        residency_note(x);
}

void residency_done(Residency *x) {
        ResidencyModel *all[WIRE_DEVICE_MODELS_MAX] = {&x->now};

        for (uint32_t i = 0; i < x->n_kept; i++)
                all[i + 1] = x->kept + i;
        for (uint32_t k = 0; k <= x->n_kept; k++) {
                for (uint32_t i = 0; i < RANKS_MAX; i++)
                        all[k]->weights[i] = model_weights_free(all[k]->weights[i]);
                forget(all[k]);
        }
        x->n_kept = 0;
        staging_clear(&x->staging);
        residency_note(x);
}

/* What was given to the devices of it has ended for those who come then: events are shared. */
static int settle_rank(void *userdata, uint32_t rank, LkContext *context) {
        const Residency *x = userdata;

        return x->now.weights[rank] ? device_weights_begin(model_weights_device(x->now.weights[rank]), NULL, 0) : 0;
}

/* The model makes place for another one, as the first of those that are kept. */
static void keep_now(Residency *x, RankGroup *g) {
        if (x->now.base && on_all_ranks(g, settle_rank, x) >= 0) {
                if (x->n_kept == RESIDENCY_KEPT)
                        drop_kept(x, g, RESIDENCY_KEPT - 1);
                memmove(x->kept + 1, x->kept, x->n_kept++ * sizeof(*x->kept));
                x->kept[0] = x->now;
                x->now = (ResidencyModel){};
        }
        clear_now(x, g);
}

static bool is_model(const ResidencyModel *m, const ResidencyModel *want) {
        return m->base && m->serial == want->serial && m->kind == want->kind && m->expand == want->expand;
}

static void take_model(Residency *x, RankGroup *g, const Backend *b, const ResidencyUse *use) {
        const Job *j = use->job;
        MergedModel *merged = use->base ? NULL : j->merged;
        ResidencyModel want = {
                .h3 = merged ? merged->h3 : j->model->h3,
                .kind = j->coder ? j->coder->weights : &h3_weights_denoiser,
                .serial = merged ? merged->serial : j->model->serial,
                .expand = b->bf16_only && !use->base, /* a merge begins with the file's numbers */
        };
        uint32_t i = 0;

        if (is_model(&x->now, &want))
                return;
        x->ops = b->ops;
        keep_now(x, g);
        while (i < x->n_kept && !is_model(x->kept + i, &want))
                i++;
        if (i < x->n_kept) {
                x->now = take_kept(x, i);
                return;
        }
        want.base = model_entry_ref(j->model);
        want.merged = merged ? merged_model_ref(merged) : NULL;
        want.model = j->coder ? j->coder->model : want.h3;
        x->now = want;
}

/* What is only kept of other steps goes, and the model with it where the rank has no part. */
static int clean_rank(void *userdata, uint32_t rank, LkContext *context) {
        Residency *x = userdata;
        ResidencyRank *own = x->ranks + rank;
        ModelWeights **weights = x->now.weights + rank;
        const DeviceWeightsConfig config = {.ops = x->ops, .context = context, .pin = pin, .userdata = own, .expand = x->now.expand};
        int r = 0;

        own->all = x;
        if (!is_at_work(x, rank))
                *weights = model_weights_free(*weights);
        else if (!*weights)
                r = model_weights_new(x->now.kind, x->now.model, &config, weights);
        if (r >= 0 && *weights && device_weights_plan(model_weights_device(*weights), 0, false, &own->least) != -ENOSPC)
                own->least = 0;
        staging_drop(&x->staging, rank);
        x->ops->memory_trim(context);
        return r;
}

/* Of one device. */
typedef struct Room {
        uint64_t ranks;        /* at work on it: bits; 0: nothing is planned there */
        uint64_t bytes;        /* for everything */
        uint64_t least, whole, wide; /* of the weights, over its ranks: with a ring alone, with all of them there, and expanded */
        uint64_t use;          /* what the use takes beside them */
        bool tight;            /* with more memory more weights would stay, or more rows be taken at a time */
} Room;

static bool has_rank(const Room *room, uint32_t rank) {
        return room->ranks >> rank & 1;
}

/* Of those that are kept, on a device. */
static uint64_t kept_bytes(const Residency *x, uint32_t device) {
        uint64_t sum = 0;

        for (uint32_t k = 0; k < x->n_kept; k++)
                for (uint32_t i = 0; i < RANKS_MAX; i++) {
                        DeviceWeightsState s;

                        if (x->device_of[i] != device || !x->kept[k].weights[i])
                                continue;
                        device_weights_state(model_weights_device(x->kept[k].weights[i]), &s);
                        sum += s.bytes;
                }
        return sum;
}

/* After clean_rank(): weights are all that we have on the device. */
static int measure_room(const Residency *x, const Backend *b, uint32_t device, Room *ret) {
        uint64_t n_free, total, limit = x->limits.limit;
        int r;

        *ret = (Room){};
        for (uint32_t i = 0; i < RANKS_MAX; i++)
                if (x->device_of[i] == device && is_at_work(x, i))
                        ret->ranks |= UINT64_C(1) << i;
        if (ret->ranks == 0)
                return 0;

        r = b->device_memory(device, &n_free, &total);
        if (r < 0)
                return r;
        ret->bytes = n_free;
        for (uint32_t i = 0; i < RANKS_MAX; i++) {
                DeviceWeightsState s;

                if (!has_rank(ret, i) || !x->now.weights[i])
                        continue;
                device_weights_state(model_weights_device(x->now.weights[i]), &s);
                ret->bytes += s.bytes;
                ret->whole += s.all_bytes;
                ret->wide += s.wide_bytes > 0 ? s.wide_bytes : s.all_bytes;
                ret->least += x->ranks[i].least < s.all_bytes ? x->ranks[i].least : s.all_bytes;
        }

        ret->bytes -= ret->bytes > x->limits.reserve ? x->limits.reserve : ret->bytes;
        if (limit > 0) {
                const uint64_t others = RESIDENCY_OVERHEAD + kept_bytes(x, device);

                limit -= limit > others ? others : limit;
                ret->bytes = limit < ret->bytes ? limit : ret->bytes;
        }
        ret->bytes -= ret->bytes / SLACK;
        return 0;
}

/* Of device memory beside the weights, over these of the ranks at work. */
static int bytes_of_use(const Residency *x, const ResidencyUse *use, uint64_t ranks, uint32_t piece, uint64_t *ret) {
        uint64_t sum = use->bytes, bytes;
        int r;

        if (ranks != x->plan_ranks) /* they take alike */
                sum = sum / (uint64_t) __builtin_popcountll(x->plan_ranks) * (uint64_t) __builtin_popcountll(ranks);
        for (uint32_t i = 0; use->plan && i < use->plan->ranks; i++) {
                const ExchangeStep sizes = {x->now.h3, use->plan, use->job->compute};

                if (!(ranks >> i & 1))
                        continue;
                r = h3_step_memory(x->now.h3, use->job->layout, use->plan, i, use->job->compute, piece, &bytes);
                if (r < 0)
                        return r;
                if (__builtin_add_overflow(sum, bytes, &sum) ||
                        __builtin_add_overflow(sum,
                                exchange_device_memory(use->exchange, use->plan, (ExchangeSize){exchange_step_message, &sizes}, i), &sum))
                        return -EOVERFLOW;
        }
        *ret = sum;
        return 0;
}

/* The most rows at a time that leave room for all weights: expanded, if the number is not small for that, or as they are; else for half
 * of them or a modest number of rows; else that fit at all. */
static int choose_piece(const Residency *x, const ResidencyUse *use, Room *room, uint32_t *ret) {
        room->tight = true;
        if (!x->now.h3) { /* nothing to choose */
                *ret = 0;
                (void) bytes_of_use(x, use, room->ranks, 0, &room->use); /* without a plan it cannot fail */
                if (room->use > room->bytes || room->least > room->bytes - room->use)
                        return -ENOMEM;
                room->tight = room->wide > room->bytes - room->use;
                return 0;
        }
        for (unsigned round = 0; round < 4; round++)
                for (size_t i = 0; i < ELEMENTSOF(pieces); i++) {
                        const uint64_t weights[] = {room->wide, room->whole, room->least, room->least};
                        uint64_t want = room->bytes;
                        int r;

                        if ((x->now.h3->int8_cols > 0 && pieces[i] > PIECE_INT8) || (round == 0 && pieces[i] < PIECE_MODEST))
                                continue;
                        r = bytes_of_use(x, use, room->ranks, pieces[i], &room->use);
                        if (r < 0)
                                return r;
                        *ret = pieces[i];
                        if (round == 2 && pieces[i] > PIECE_MODEST)
                                want /= 2;
                        if (room->use <= want && weights[round] <= want - room->use) {
                                room->tight = round > 0 || pieces[i] < (x->now.h3->int8_cols > 0 ? PIECE_INT8 : pieces[0]);
                                return 0;
                        }
                }
        return -ENOMEM;
}

typedef struct Planning {
        Residency *all;
        Room rooms[WIRE_DEVICES_MAX];
        uint64_t share[WIRE_DEVICES_MAX]; /* bytes of a rank's weights */
} Planning;

/* Ranks may share a device: those that have more than their share let go before others take it. */
static int yield_rank(void *userdata, uint32_t rank, LkContext *context) {
        const Planning *p = userdata;
        ModelWeights *w = p->all->now.weights[rank];
        uint64_t least, share = p->share[p->all->device_of[rank]];
        DeviceWeightsState s = {};

        if (w)
                device_weights_state(model_weights_device(w), &s);
        return s.bytes > share ? device_weights_plan(model_weights_device(w), share, false, &least) : 0;
}

static int plan_rank(void *userdata, uint32_t rank, LkContext *context) {
        const Planning *p = userdata;
        ModelWeights *w = p->all->now.weights[rank];
        uint64_t least;

        return w ? device_weights_plan(model_weights_device(w), p->share[p->all->device_of[rank]], true, &least) : 0;
}

static int does_not_fit(const Residency *x, const Room *room, Fault *f) {
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "The step needs %" PRIu64 " bytes of device memory, and %" PRIu64 " for weights to pass through; %" PRIu64
                " may be taken%s. Make the film smaller or shorter, or give the worker more of the device.",
                room->use, room->least, room->bytes, x->limits.limit > 0 ? " (VramLimit=, VramReserve=)" : " (VramReserve=)");
}

/* One number of rows at a time for all: what the device with the least room has. */
static int measure_rooms(Residency *x, const Backend *b, const ResidencyUse *use, Planning *p, Fault *f) {
        uint32_t piece = UINT32_MAX, own = 0;
        int r;

        for (uint32_t d = 0; d < WIRE_DEVICES_MAX; d++) {
                r = measure_room(x, b, d, p->rooms + d);
                if (r < 0)
                        return r;
                if (p->rooms[d].ranks == 0)
                        continue;
                r = choose_piece(x, use, p->rooms + d, &own);
                if (r == -ENOMEM)
                        return does_not_fit(x, p->rooms + d, f);
                if (r < 0)
                        return r;
                piece = own < piece ? own : piece;
        }
        x->piece_rows = piece;

        for (uint32_t d = 0; d < WIRE_DEVICES_MAX; d++) {
                Room *room = p->rooms + d;

                if (room->ranks == 0)
                        continue;
                r = bytes_of_use(x, use, room->ranks, piece, &room->use);
                if (r < 0)
                        return r;
                p->share[d] = (room->bytes - room->use) / (uint64_t) __builtin_popcountll(room->ranks);
        }
        return 0;
}

static bool is_tight(const Planning *p) {
        for (uint32_t d = 0; d < WIRE_DEVICES_MAX; d++)
                if (p->rooms[d].ranks != 0 && p->rooms[d].tight)
                        return true;
        return false;
}

/* Models that are kept go while the one whose turn it is could do with their memory, the oldest first. */
static int make_room(Residency *x, const Backend *b, RankGroup *g, const ResidencyUse *use, Planning *p, Fault *f) {
        int r;

        for (;;) {
                Fault own = {};

                *p = (Planning){.all = x};
                r = on_all_ranks(g, clean_rank, x);
                if (r >= 0)
                        r = measure_rooms(x, b, use, p, &own);
                if (x->n_kept == 0 || (r < 0 && r != -ENOMEM) || (r >= 0 && !is_tight(p))) {
                        if (r < 0)
                                *f = own;
                        return r;
                }
                drop_kept(x, g, x->n_kept - 1);
        }
}

static int take_memory(Residency *x, const Backend *b, RankGroup *g, const ResidencyUse *use, Fault *f) {
        uint64_t bytes = 0, whole = 0, kept = 0;
        WireDeviceModel now;
        Planning p;
        int r;

        r = make_room(x, b, g, use, &p, f);
        if (r < 0)
                return r;

        r = on_all_ranks(g, yield_rank, &p);
        if (r >= 0)
                r = on_all_ranks(g, plan_rank, &p);
        residency_note(x);
        for (uint32_t d = 0; d < WIRE_DEVICES_MAX; d++) {
                bytes += p.rooms[d].use;
                whole += p.rooms[d].whole;
                kept += kept_bytes(x, d);
        }
        now = figures_now(x);
        x->all_bytes = bytes + now.bytes + kept;
        x->regrow_usec = 0;
        log_debug("A step takes %" PRIu64 " bytes of the devices with %" PRIu32 " rows at a time, weights %" PRIu64 " of %" PRIu64
                  ", %" PRIu32 " blocks stay; other models %" PRIu64 ".",
                bytes, x->piece_rows, now.bytes, whole, now.blocks, kept);
        if (r >= 0 && x->n_kept > 0 && now.bytes < whole) /* there was less memory than was said */
                return -ENOMEM;
        if (r == -ENOSPC)
                for (uint32_t d = 0; d < WIRE_DEVICES_MAX; d++)
                        if (p.rooms[d].ranks != 0)
                                return does_not_fit(x, p.rooms + d, f);
        return r;
}

static uint64_t ranks_of(const ResidencyUse *use) {
        uint64_t ranks = UINT64_C(1) << job_first_rank(use->job);

        for (uint32_t i = 0; use->plan && i < use->plan->ranks; i++)
                if (!h3_plan_is_idle(use->plan, i))
                        ranks |= UINT64_C(1) << i;
        return use->ranks > 0 ? use->ranks : ranks;
}

int residency_prepare(Residency *x, const Backend *b, RankGroup *g, const ResidencyUse *use, Fault *f) {
        uint64_t ranks, bytes;
        bool same_ranks;
        int r;

        if (b->ops->host_weights)
                return 0;

        x->used_usec = clock_usec();
        take_model(x, g, b, use);
        ranks = ranks_of(use);
        same_ranks = x->plan_ranks == ranks;
        x->plan_ranks = ranks;
        x->planned = x->planned && same_ranks;
        r = bytes_of_use(x, use, ranks, PIECE_LEAST, &bytes);
        if (r < 0)
                return r;
        if (x->planned && x->plan_bytes == bytes && !(x->regrow_usec > 0 && x->regrow_usec <= x->used_usec))
                return 0;

        x->planned = false;
        x->plan_bytes = bytes;
        r = take_memory(x, b, g, use, f);
        if (r == -ENOMEM && drop_all_kept(x, g)) {
                *f = (Fault){};
                r = take_memory(x, b, g, use, f);
        }
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "The device has no memory for the weights to pass through: others have taken it.");
        if (r < 0)
                return r;
        x->planned = true;
        return 0;
}

int residency_begin(Residency *x, uint32_t rank, H3Pass pass, H3Rank *to) {
        ModelWeights *w = x->now.weights[rank];
        int r;

        if (!w)
                return 0;
        r = pass == RESIDENCY_ANY_ORDER ? device_weights_begin(model_weights_device(w), NULL, 0) : model_weights_begin(w, pass);
        if (r < 0)
                return r;
        to->weights = model_weights_interface(w);
        to->piece_rows = x->piece_rows;
        return 0;
}

void residency_trim(const Residency *x, LkContext *context) {
        if (x->now.base) /* else nothing was planned either */
                x->ops->memory_trim(context);
}

typedef struct Shrinking {
        Residency *all;
        atomic_bool done;
} Shrinking;

static int shrink_rank(void *userdata, uint32_t rank, LkContext *context) {
        Shrinking *s = userdata;
        ModelWeights *w = s->all->now.weights[rank];
        DeviceWeightsState state;

        if (!w)
                return 0;
        device_weights_state(model_weights_device(w), &state);
        if (state.resident > 0 && (device_weights_shrink(model_weights_device(w), state.bytes / 8 + 1) >= 0 ||
                                          device_weights_shrink(model_weights_device(w), 1) >= 0))
                s->done = true;
        s->all->ops->memory_trim(context);
        return 0;
}

bool residency_shrink(Residency *x, RankGroup *g) {
        Shrinking s = {.all = x};

        if (!x->planned)
                return false;
        if (drop_all_kept(x, g)) {
                residency_note(x);
                return true;
        }
        (void) on_all_ranks(g, shrink_rank, &s);
        residency_note(x);
        if (!s.done && x->now.h3 && x->piece_rows > PIECE_LEAST) {
                x->piece_rows /= 2;
                x->piece_rows = x->piece_rows > PIECE_LEAST ? x->piece_rows : PIECE_LEAST;
                s.done = true;
        }
        if (!s.done)
                return false;

        x->regrow_delay_usec = x->regrow_delay_usec > 0 ? 2 * x->regrow_delay_usec : REGROW_FIRST_USEC;
        if (x->regrow_delay_usec > REGROW_LAST_USEC)
                x->regrow_delay_usec = REGROW_LAST_USEC;
        x->regrow_usec = clock_usec() + x->regrow_delay_usec;
        log_notice("The device has less memory than it said: %" PRIu32 " blocks stay there now, %" PRIu32
                   " rows are taken at a time.",
                figures_now(x).blocks, x->piece_rows);
        return true;
}

bool residency_again(Residency *x, RankGroup *g, const Job *j, int r, Fault *f) {
        if (r != -ENOMEM || j->cancelled || !residency_shrink(x, g))
                return false;
        *f = (Fault){};
        return true;
}

static int release_rank(void *userdata, uint32_t rank, LkContext *context) {
        Residency *x = userdata;

        if (x->now.weights[rank])
                device_weights_release(model_weights_device(x->now.weights[rank]));
        staging_drop(&x->staging, rank);
        x->ops->memory_trim(context);
        return 0;
}

/* The model was closed; or the job that it was made for is gone, and the cache of merged models has let go of it. */
static bool is_left(const ResidencyModel *m) {
        return m->base && (m->base->closed || (m->merged && m->merged->n_ref == 1));
}

uint64_t residency_rest(Residency *x, RankGroup *g) {
        bool left = is_left(&x->now);
        uint64_t end;

        if (left)
                clear_now(x, g);
        for (uint32_t i = x->n_kept; i-- > 0;)
                if (is_left(x->kept + i)) {
                        drop_kept(x, g, i);
                        left = true;
                }
        if (left)
                residency_note(x);
        if (x->limits.idle_usec == 0)
                return UINT64_MAX;
        end = x->used_usec + x->limits.idle_usec;
        if (clock_usec() < end)
                return end;

        if (x->planned || x->n_kept > 0) {
                (void) drop_all_kept(x, g);
                (void) on_all_ranks(g, release_rank, x);
                x->planned = false;
                log_info("Gave the device's memory back: no step came for %" PRIu64 " s.", x->limits.idle_usec / 1000000);
        }
        residency_note(x);
        x->idle++;
        return x->used_usec + x->limits.idle_usec;
}
