/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/gpu-cost.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define QUICKER 0.98
/* A product of int8 against one of bf16, which rates are of (1,229 to 1,333 of 700 on sm_90). */
#define INT8_RATE 1.8
/* A number of 4 bits, and a scale of 8 for 16 of them, become 16 bits. */
#define NVFP4_EXPANDED (16 / 4.5)

/* Its types are in a fixed order, quantised ones behind those of norms and biases. */
GpuWork gpu_work_of(const WireModelReady *m, uint64_t rows) {
        double expanded = strstr(m->types, "NVFP4") ? NVFP4_EXPANDED : strstr(m->types, "F8_") ? 2 : 1;

        return (GpuWork){
                .rows = rows,
                .weight_bytes = (double) m->weight_bytes * expanded,
                .layers = m->layers,
                .heads = m->heads,
                .head_dim = m->head_dim,
                .hidden = m->hidden,
                .int8 = strstr(m->types, "I8") != NULL,
        };
}

static double compute_sec(const WireHello *h, const GpuWork *x, const WirePlan *p, uint32_t rank) {
        double rate = h->rates[rank % h->n_devices] * 1e9, weights = x->weight_bytes / (x->int8 ? 1 : 2);
        double rows = (double) (p->rows[rank].end - p->rows[rank].begin), heads = p->heads[rank].end - p->heads[rank].begin;
        double all = (double) x->rows, products = 2 * weights * rows, attention = 4.0 * x->layers * heads * x->head_dim * all * all;

        return (products / (x->int8 ? INT8_RATE : 1) + attention) / rate;
}

static double bytes_between(const GpuWork *x, const WirePlan *p, uint32_t from, uint32_t to) {
        double row = x->int8 ? x->hidden + 4.0 : 2.0 * x->hidden, output = 2.0 * x->head_dim;

        return x->layers * ((double) (p->rows[from].end - p->rows[from].begin) * row +
                                   (double) (p->rows[to].end - p->rows[to].begin) * (p->heads[from].end - p->heads[from].begin) * output);
}

/* What reaches the rank, one sender after the other; < 0: a way is not known. */
static double receive_sec(const WireHello *h, const GpuWork *x, const WirePlan *p, uint32_t rank) {
        double sec = 0;

        for (uint32_t i = 0; i < p->ranks; i++) {
                uint32_t from = i % h->n_devices, to = rank % h->n_devices;
                double mbs = p->exchange != WIRE_EXCHANGE_HOST ? h->peer_mbs[from][to] : h->host_mbs[from][to];

                if (from == to || !plan_has_part(p, i))
                        continue;
                if (!(mbs > 0))
                        return -1;
                sec += bytes_between(x, p, i, rank) / (mbs * 1e6);
        }
        return sec;
}

double gpu_cost(const WireHello *h, const GpuWork *x, const WirePlan *p) {
        double most = 0;

        for (uint32_t i = 0; i < p->ranks; i++) {
                double receive, compute;

                if (!plan_has_part(p, i))
                        continue;
                receive = receive_sec(h, x, p, i);
                if (h->rates[i % h->n_devices] == 0 || receive < 0)
                        return 0;
                compute = compute_sec(h, x, p, i);
                most = compute > most ? compute : most;
                most = receive > most ? receive : most;
        }
        return most;
}

typedef struct Choice {
        const GpuSet *set;
        const WireHello *hello;
        const GpuWork *work;
        const PlanWishes *wishes;
        uint32_t ranks, row_tile;
} Choice;

/* devices: bits. *ret_sec: gpu_cost(). */
static int plan_on(const Choice *c, uint64_t devices, WirePlan *ret, double *ret_sec) {
        const WireHello *h = c->hello;
        PlanWishes w = *c->wishes;
        int r;

        for (uint32_t i = 0; devices != UINT64_MAX && i < h->n_devices; i++)
                if (devices >> i & 1)
                        memcpy(w.gpus[w.n_gpus++], h->devices[i].pci_address, sizeof(w.gpus[0]));
        r = gpu_set_wishes(c->set, h, c->ranks, &w);
        if (r >= 0)
                r = plan_make(c->work->rows, c->work->heads, c->ranks, c->row_tile, &w, ret);
        if (r < 0)
                return r;
        ret->exchange = gpu_set_exchange(h, ret, c->wishes->exchange);
        *ret_sec = gpu_cost(h, c->work, ret);
        return 0;
}

static bool is_ours_to_choose(const GpuSet *s, const WireHello *h, const PlanWishes *w) {
        return !s->given && h->n_devices > 1 && w->n_gpus == 0 && w->ranks == 0 && w->n_shares == 0;
}

/* The device without which it is quickest; n_devices: none. */
static int find_slower(const Choice *c, uint64_t devices, const WirePlan *now, double sec, WirePlan *ret, double *ret_sec,
        uint32_t *ret_device) {
        double best = sec * QUICKER;

        *ret_device = c->hello->n_devices;
        for (uint32_t i = 0; i < c->hello->n_devices; i++) {
                WirePlan p = *now; /* its header */
                double without;
                int r;

                if (!(devices >> i & 1))
                        continue;
                r = plan_on(c, devices & ~(UINT64_C(1) << i), &p, &without);
                if (r < 0)
                        return r;
                if (without > 0 && without < best) {
                        best = without;
                        *ret = p;
                        *ret_sec = without;
                        *ret_device = i;
                }
        }
        return 0;
}

int gpu_cost_plan(const GpuSet *s, const WireHello *h, uint32_t ranks, uint32_t row_tile, const GpuWork *x, const PlanWishes *wishes,
        WirePlan *ret, uint64_t *ret_out, char *why, size_t size) {
        const Choice c = {s, h, x, wishes, ranks, row_tile};
        const uint32_t n_with_ranks = ranks < h->n_devices ? ranks : h->n_devices;
        uint64_t devices = UINT64_MAX >> (64 - n_with_ranks);
        size_t used = 0;
        double sec;
        int r;

        *ret_out = 0;
        why[0] = '\0';
        r = plan_on(&c, UINT64_MAX, ret, &sec);
        if (r < 0 || sec <= 0 || !is_ours_to_choose(s, h, wishes))
                return r;
        while (__builtin_popcountll(devices) > 1) {
                double before = sec;
                uint32_t device;
                int n;

                r = find_slower(&c, devices, ret, before, ret, &sec, &device);
                if (r < 0)
                        return r;
                if (device == h->n_devices)
                        break;
                devices &= ~(UINT64_C(1) << device);
                *ret_out |= UINT64_C(1) << device;
                n = snprintf(why + used, size - used, "%s%s (%s) is left out: a step would take %.3g s with it, %.3g s without",
                        used > 0 ? "; " : "", h->devices[device].name, h->devices[device].pci_address, before, sec);
                used = n < 0 || (size_t) n >= size - used ? size - 1 : used + (size_t) n;
        }
        return 0;
}
