/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/gpu-set.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/gpu-names.h"
#include "service/shared/log.h"

#define SHARE_ONE 1000.0 /* of PLAN_SHARE_MAX */
#define RATE_SAME 0.93   /* of the fastest: cards of one kind differ less than one measurement from the next */

void gpu_set_note(WireHello *h, const char *format, ...) {
        size_t used = strlen(h->notes), left = sizeof(h->notes) - used;
        char line[500]; /* of Job.left_out, the longest */
        va_list ap;
        int n;

        va_start(ap, format);
        n = vsnprintf(line, sizeof(line), format, ap);
        va_end(ap);
        log_notice("%s", line);
        if (n > 0 && (size_t) n < sizeof(line) && (size_t) n + 2 <= left)
                (void) snprintf(h->notes + used, left, "%s\n", line);
}

/* Calls f for each word of a list with what is behind its '=' ("" without). */
static void each_word(const char *list, void (*f)(void *userdata, const char *name, const char *value), void *userdata) {
        CLEANUP_FREE char *copy = list ? strdup(list) : NULL;
        char *save = NULL;

        for (char *s = copy ? strtok_r(copy, " \t,", &save) : NULL; s; s = strtok_r(NULL, " \t,", &save)) {
                char *value = strchr(s, '=');

                if (value)
                        *value++ = '\0';
                f(userdata, s, value ? value : "");
        }
}

typedef struct Naming {
        WireHello *hello;
        const char *key;
        uint64_t devices; /* named so far: a bit each */
        double shares[WIRE_DEVICES_MAX];
} Naming;

static void on_name(void *userdata, const char *name, const char *value) {
        Naming *x = userdata;
        bool found = false;
        double share;

        for (uint32_t i = 0; i < x->hello->n_devices; i++) {
                if (!gpu_is_named(name, x->hello->devices + i, i))
                        continue;
                found = true;
                if (x->devices >> i & 1)
                        gpu_set_note(x->hello, "%s= names the GPU %s (%s) more than once%s.", x->key, x->hello->devices[i].name,
                                x->hello->devices[i].pci_address, value[0] != '\0' ? ": the last share counts" : "");
                x->devices |= UINT64_C(1) << i;
                if (device_parse_share(value, &share) >= 0)
                        x->shares[i] = share;
        }
        if (!found)
                gpu_set_note(x->hello, "%s= names \"%.64s\", which is not there.", x->key, name);
}

static const DeviceInfo *info_of(const DeviceInfo *infos, size_t n, const WireDevice *d) {
        for (size_t i = 0; i < n; i++)
                if (strcasecmp(infos[i].pci_address, d->pci_address) == 0)
                        return infos + i;
        return NULL;
}

/* Whether it may take part at all. */
static bool is_allowed(const Config *c, const Naming *list, const Naming *exclude, const DeviceInfo *info, WireHello *h, uint32_t i) {
        const WireDevice *d = h->devices + i;

        if (d->pci_address[0] == '\0')
                return true;
        if (info && info->ignore) {
                log_info("%s (%s) is left out: LATENTD_IGNORE.", d->name, d->pci_address);
                return false;
        }
        if ((c->gpus && !(list->devices >> i & 1)) || exclude->devices >> i & 1) {
                log_info("%s (%s) is left out by Gpus= or GpusExclude=.", d->name, d->pci_address);
                return false;
        }
        if (d->left_out) { /* it started with other lists than we have now */
                gpu_set_note(h, "The GPU %s (%s) is left out by the worker, as its environment says (" GPU_NAMES_VARIABLE ", "
                        GPU_NAMES_EXCLUDE_VARIABLE ").", d->name, d->pci_address);
                return false;
        }
        if (d->memory_free < c->gpu_min_free) {
                gpu_set_note(h, "The GPU %s (%s) is left out: %" PRIu64 " bytes of its memory are free, GpuMinFree= is %" PRIu64 ".",
                        d->name, d->pci_address, d->memory_free, c->gpu_min_free);
                return false;
        }
        return true;
}

/* Those with the largest shares stay, the first among equals. */
static void drop_beyond(const Config *c, WireHello *h, const double *shares, uint64_t *devices) {
        while (c->gpus_max > 0 && (uint32_t) __builtin_popcountll(*devices) > c->gpus_max) {
                uint32_t least = WIRE_DEVICES_MAX;

                for (uint32_t i = 0; i < h->n_devices; i++)
                        if (*devices >> i & 1 && (least == WIRE_DEVICES_MAX || shares[i] <= shares[least]))
                                least = i;
                *devices &= ~(UINT64_C(1) << least);
                gpu_set_note(h, "The GPU %s (%s) is left out: GpusMax= is %" PRIu32 ".", h->devices[least].name,
                        h->devices[least].pci_address, c->gpus_max);
        }
}

static void keep(WireHello *h, uint64_t devices, const double *shares, GpuSet *ret) {
        WireHello old = *h;
        uint32_t n = 0;

        for (uint32_t i = 0; i < old.n_devices; i++) {
                if (!(devices >> i & 1))
                        continue;
                ret->place[n] = (uint8_t) i;
                ret->shares[n] = shares[i] * SHARE_ONE < 1 ? 1 : (uint32_t) (shares[i] * SHARE_ONE);
                h->devices[n++] = old.devices[i];
        }
        h->n_devices = n;
        if (n < old.n_devices) /* it has all of them or none */
                h->nccl = 0;
        memset(h->peer_mbs, 0, sizeof(h->peer_mbs));
        memset(h->host_mbs, 0, sizeof(h->host_mbs));
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < n; k++) {
                        h->peer_mbs[i][k] = old.peer_mbs[ret->place[i]][ret->place[k]];
                        h->host_mbs[i][k] = old.host_mbs[ret->place[i]][ret->place[k]];
                }
}

void gpu_set_note_cpu(const Config *c, WireHello *h) {
        const struct {
                const char *key;
                bool set;
        } keys[] = {
                {"Gpus", c->gpus},
                {"GpusExclude", c->gpus_exclude},
                {"GpusMax", c->gpus_max > 0},
                {"GpuMinFree", c->gpu_min_free > 0},
                {"DenoiserGpus", c->part_gpus[GPU_PART_DENOISER]},
                {"ConditionerGpus", c->part_gpus[GPU_PART_CONDITIONER]},
                {"VaeGpus", c->part_gpus[GPU_PART_VAE]},
                {"GpuShares", c->gpu_shares},
                {"VramLimit", c->vram_limit > 0},
        };
        char list[160] = "";
        size_t n = 0;

        for (size_t i = 0; i < ELEMENTSOF(keys); i++)
                if (keys[i].set)
                        n += (size_t) snprintf(list + n, sizeof(list) - n, "%s%s=", n > 0 ? ", " : "", keys[i].key);
        if (n > 0)
                gpu_set_note(h, "%s of latentd.conf: without effect, since the worker computes on the CPU.", list);
}

const char *gpu_part_key(GpuPart part) {
        static const char *const keys[] = {
                [GPU_PART_DENOISER] = "DenoiserGpus",
                [GPU_PART_CONDITIONER] = "ConditionerGpus",
                [GPU_PART_VAE] = "VaeGpus",
        };

        return keys[part];
}

/* named: by the worker's numbers. A part without any GPU is refused by its jobs, not run where nobody wants it. */
static void place_part(const Config *c, GpuPart part, uint64_t named, const WireHello *h, GpuSet *s) {
        s->parts[part] = 0;
        for (uint32_t i = 0; i < h->n_devices; i++)
                if (!c->part_gpus[part] || h->devices[i].pci_address[0] == '\0' || named >> s->place[i] & 1)
                        s->parts[part] |= UINT64_C(1) << i;
        if (s->parts[part] == 0)
                log_warning("None of the GPUs of %s= takes part: what it is for cannot run.", gpu_part_key(part));
}

int gpu_set_apply(const Config *c, const DeviceInfo *infos, size_t n_infos, WireHello *h, GpuSet *ret, Fault *f) {
        Naming list = {.hello = h, .key = "Gpus"}, exclude = {.hello = h, .key = "GpusExclude"}, shares = {.hello = h, .key = "GpuShares"};
        Naming parts[_GPU_PART_MAX];
        uint64_t devices = 0, said = 0;

        *ret = (GpuSet){};
        for (GpuPart p = 0; p < _GPU_PART_MAX; p++)
                parts[p] = (Naming){.hello = h, .key = gpu_part_key(p)};
        if (h->n_devices > 0 && h->devices[0].pci_address[0] != '\0') { /* what is said of GPUs */
                each_word(c->gpus, on_name, &list);
                each_word(c->gpus_exclude, on_name, &exclude);
                each_word(c->gpu_shares, on_name, &shares);
                for (GpuPart p = 0; p < _GPU_PART_MAX; p++)
                        each_word(c->part_gpus[p], on_name, parts + p);
        } else if (h->n_devices > 0)
                gpu_set_note_cpu(c, h);
        for (uint32_t i = 0; i < h->n_devices; i++) {
                const DeviceInfo *info = info_of(infos, n_infos, h->devices + i);

                if (shares.shares[i] > 0 || (info && (info->share < 1 || info->share > 1)))
                        said |= UINT64_C(1) << i;
                if (!(shares.shares[i] > 0))
                        shares.shares[i] = info ? info->share : 1;
                if (is_allowed(c, &list, &exclude, info, h, i))
                        devices |= UINT64_C(1) << i;
        }
        drop_beyond(c, h, shares.shares, &devices);
        if (devices == 0)
                return gpu_names_refuse(h->n_devices, f);
        keep(h, devices, shares.shares, ret);
        ret->given = said & devices;
        for (GpuPart p = 0; p < _GPU_PART_MAX; p++)
                place_part(c, p, parts[p].devices, h, ret);
        return 0;
}

/* Whole lines; what has no room is left out. */
static void add_notes(WireHello *h, const char *notes) {
        size_t used = strlen(h->notes), left = sizeof(h->notes) - used, n = strlen(notes);

        while (n >= left) {
                n--;
                while (n > 0 && notes[n - 1] != '\n')
                        n--;
        }
        (void) snprintf(h->notes + used, left, "%.*s", (int) n, notes);
}

/* The fastest has 1. */
static void share_by_rate(GpuSet *s, const WireHello *h) {
        uint32_t best = 0;

        for (uint32_t i = 0; i < h->n_devices; i++) {
                if (h->rates[i] == 0)
                        return;
                best = h->rates[i] > best ? h->rates[i] : best;
        }
        for (uint32_t i = 0; !s->given && i < h->n_devices; i++) {
                double share = (double) h->rates[i] / (double) best;

                s->shares[i] = share >= RATE_SAME ? (uint32_t) SHARE_ONE : (uint32_t) (share * SHARE_ONE) + 1;
        }
}

void gpu_set_learn(GpuSet *s, const WireLinks *m, WireHello *h, GpuLinks *ret) {
        for (uint32_t i = 0; i < h->n_devices; i++)
                for (uint32_t k = 0; k < h->n_devices; k++)
                        if (i != k) {
                                h->peer_mbs[i][k] = m->peer_mbs[s->place[i]][s->place[k]];
                                h->host_mbs[i][k] = m->host_mbs[s->place[i]][s->place[k]];
                        }
        for (uint32_t i = 0; i < h->n_devices; i++)
                h->rates[i] = m->rates[s->place[i]];
        share_by_rate(s, h);
        ret->hello = *h;
        memcpy(ret->notes, m->notes, sizeof(ret->notes));
        add_notes(h, ret->notes);
}

bool gpu_set_recall(const GpuLinks *x, GpuSet *s, WireHello *h) {
        const WireHello *known = &x->hello;

        if (known->n_devices != h->n_devices)
                return false;
        for (uint32_t i = 0; i < h->n_devices; i++)
                if (strcmp(known->devices[i].uuid, h->devices[i].uuid) != 0 ||
                        strcmp(known->devices[i].pci_address, h->devices[i].pci_address) != 0)
                        return false;

        memcpy(h->peer_mbs, known->peer_mbs, sizeof(h->peer_mbs));
        memcpy(h->host_mbs, known->host_mbs, sizeof(h->host_mbs));
        memcpy(h->rates, known->rates, sizeof(h->rates));
        share_by_rate(s, h);
        add_notes(h, x->notes);
        return true;
}

GpuPart gpu_part_of(WireJobKind kind) {
        switch (kind) {

        case WIRE_JOB_TOKENIZE:
        case WIRE_JOB_ENCODE:
                return GPU_PART_CONDITIONER;

        case WIRE_JOB_DECODE:
        case WIRE_JOB_ENCODE_MEDIA:
                return GPU_PART_VAE;

        default:
                return GPU_PART_DENOISER;
        }
}

/* What a session names goes before what is said of the part. */
static bool is_wished(const GpuSet *s, GpuPart part, const PlanWishes *w, const WireHello *h, uint32_t device) {
        for (uint32_t i = 0; i < w->n_gpus; i++)
                if (strcmp(w->gpus[i], h->devices[device].pci_address) == 0)
                        return true;
        return w->n_gpus == 0 && s->parts[part] >> device & 1;
}

int gpu_set_wishes(const GpuSet *s, GpuPart part, const WireHello *h, uint32_t ranks, PlanWishes *w) {
        bool differ = false;
        uint32_t n = 0;

        w->without = 0;
        for (uint32_t i = 0; i < ranks; i++)
                if (!is_wished(s, part, w, h, i % h->n_devices))
                        w->without |= UINT64_C(1) << i;
                else
                        n++;
        if (n == 0)
                return -ENODEV;
        if (w->n_shares > 0)
                return 0;

        for (uint32_t i = 1; i < h->n_devices; i++)
                differ = differ || s->shares[i] != s->shares[0];
        if (differ)
                for (uint32_t i = 0; i < ranks; i++)
                        if (!(w->without >> i & 1))
                                w->shares[w->n_shares++] = s->shares[i % h->n_devices];
        return 0;
}

uint64_t gpu_set_ranks(const GpuSet *s, WireJobKind kind, const WireHello *h, uint32_t ranks, const PlanWishes *wishes) {
        bool alone = kind == WIRE_JOB_MERGE || (kind == WIRE_JOB_ENCODE && wishes->ranks == 0 && h->devices[0].pci_address[0] != '\0');
        uint32_t n = alone ? 1 : wishes->ranks > 0 ? wishes->ranks : WIRE_RANKS_MAX;
        PlanWishes w = *wishes;
        uint64_t bits = 0;

        if (gpu_set_wishes(s, gpu_part_of(kind), h, ranks, &w) < 0)
                return 0;
        for (uint32_t i = 0; i < ranks && n > 0; i++)
                if (!(w.without >> i & 1)) {
                        bits |= UINT64_C(1) << i;
                        n--;
                }
        return bits;
}

size_t gpu_set_addresses(const WireHello *h, uint64_t ranks, const char *ret[static WIRE_DEVICES_MAX]) {
        size_t n = 0;

        for (uint32_t device = 0; device < h->n_devices; device++) {
                bool any = false;

                for (uint32_t i = device; i < WIRE_RANKS_MAX; i += h->n_devices)
                        any = any || ranks >> i & 1;
                if (any && h->devices[device].pci_address[0] != '\0')
                        ret[n++] = h->devices[device].pci_address;
        }
        return n;
}

int gpu_set_refuse(GpuPart part, const PlanWishes *w, Fault *f) {
        if (w->n_gpus > 0)
                return fault_set(f, -ENODEV, FAULT_NO_WORKER,
                        "None of the session's \"gpus\" is there any more. Open another session; latentctl doctor says what there is.");
        return fault_set(f, -ENODEV, FAULT_NO_WORKER,
                "None of the GPUs of %s= of latentd.conf takes part. Name others there, or in the session's \"gpus\"; latentctl "
                "doctor says what there is.",
                gpu_part_key(part));
}

/* AUTO is never NCCL: on one machine it goes the way of p2p, but with kernels that take part of each device from the step's own,
 * and after a step that failed badly there is none until another worker starts. tests/gpu/visit compares them (stage nccl). */
static WireExchange choose_exchange(const WireHello *h, uint64_t ranks, uint32_t n_ranks, WireExchange wish) {
        uint64_t peer = UINT64_MAX, host = UINT64_MAX; /* the slowest ways */

        if (wish == WIRE_EXCHANGE_HOST || h->n_devices == 0)
                return WIRE_EXCHANGE_HOST;
        for (uint32_t i = 0; i < n_ranks; i++)
                for (uint32_t k = 0; k < n_ranks; k++) {
                        uint32_t from = i % h->n_devices, to = k % h->n_devices;

                        if (i == k || !(ranks >> i & 1) || !(ranks >> k & 1))
                                continue;
                        peer = h->peer_mbs[from][to] < peer ? h->peer_mbs[from][to] : peer;
                        if (from != to)
                                host = h->host_mbs[from][to] < host ? h->host_mbs[from][to] : host;
                }
        if (wish == WIRE_EXCHANGE_NCCL)
                return h->nccl > 0 && n_ranks <= h->n_devices && peer != UINT64_MAX ? WIRE_EXCHANGE_NCCL : WIRE_EXCHANGE_HOST;
        if (peer == 0 || peer == UINT64_MAX)
                return WIRE_EXCHANGE_HOST;
        return wish == WIRE_EXCHANGE_P2P || host == UINT64_MAX || peer >= host ? WIRE_EXCHANGE_P2P : WIRE_EXCHANGE_HOST;
}

WireExchange gpu_set_exchange(const WireHello *h, const WirePlan *p, WireExchange wish) {
        uint64_t ranks = 0;

        for (uint32_t i = 0; i < p->ranks; i++)
                if (plan_has_part(p, i))
                        ranks |= UINT64_C(1) << i;
        return choose_exchange(h, ranks, p->ranks, wish);
}

WireExchange gpu_set_exchange_of(const WireHello *h, uint64_t ranks, WireExchange wish) {
        return choose_exchange(h, ranks, WIRE_RANKS_MAX, wish == WIRE_EXCHANGE_NCCL ? WIRE_EXCHANGE_AUTO : wish);
}
