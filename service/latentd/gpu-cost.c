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

static double rows_of(const WirePlan *p, uint32_t rank) {
        return (double) (p->rows[rank].end - p->rows[rank].begin);
}

static double heads_of(const WirePlan *p, uint32_t rank) {
        return p->heads[rank].end - p->heads[rank].begin;
}

static double operations_of(const GpuWork *x, const WirePlan *p, uint32_t rank) {
        double weights = x->weight_bytes / (x->int8 ? 1 : 2), products = 2 * weights * rows_of(p, rank), all = (double) x->rows;
        double queries = p->kind == WIRE_PLAN_KV_GATHER ? rows_of(p, rank) * x->heads : all * heads_of(p, rank);

        return products / (x->int8 ? INT8_RATE : 1) + 4.0 * x->layers * x->head_dim * queries * all;
}

/* 0: none is known. */
static uint32_t best_rate(const WireHello *h) {
        uint32_t best = 0;

        for (uint32_t i = 0; i < h->n_devices; i++)
                best = h->rates[i] > best ? h->rates[i] : best;
        return best;
}

double gpu_rate(const WireHello *h, const WirePlan *p) {
        for (uint32_t i = 0; i < p->ranks; i++)
                if (plan_has_part(p, i) && h->rates[i % h->n_devices] == 0)
                        return 0;
        return best_rate(h) * 1e9;
}

double gpu_operations(const WireHello *h, const GpuWork *x, const WirePlan *p) {
        const double best = best_rate(h);
        double most = 0;

        for (uint32_t device = 0; device < h->n_devices; device++) {
                double sum = 0;

                for (uint32_t i = device; i < p->ranks; i += h->n_devices)
                        sum += operations_of(x, p, i);
                if (h->rates[device] > 0)
                        sum *= best / h->rates[device];
                most = sum > most ? sum : most;
        }
        return most;
}

/* Of a layer. */
static double bytes_between(const GpuWork *x, const WirePlan *p, uint32_t from, uint32_t to) {
        double head = 2.0 * x->head_dim, row = x->int8 ? x->hidden + 4.0 : 2.0 * x->hidden;

        if (p->kind == WIRE_PLAN_KV_GATHER)
                return rows_of(p, from) * 2 * x->heads * head;
        if (p->kind == WIRE_PLAN_QKV_ALL_TO_ALL)
                row = 3 * heads_of(p, to) * head;
        return rows_of(p, from) * row + rows_of(p, to) * heads_of(p, from) * head;
}

static double receive_sec(const WireHello *h, const GpuWork *x, const WirePlan *p, uint32_t rank) {
        double sec = 0;

        for (uint32_t i = 0; i < p->ranks; i++) {
                uint32_t from = i % h->n_devices, to = rank % h->n_devices;
                double mbs = p->exchange != WIRE_EXCHANGE_HOST ? h->peer_mbs[from][to] : h->host_mbs[from][to];

                if (from == to || !plan_has_part(p, i))
                        continue;
                if (!(mbs > 0))
                        return -1;
                sec += x->layers * bytes_between(x, p, i, rank) / (mbs * 1e6);
        }
        return sec;
}

double gpu_receive_sec(const WireHello *h, const GpuWork *x, const WirePlan *p) {
        double most = 0;

        for (uint32_t i = 0; i < p->ranks; i++) {
                double receive = plan_has_part(p, i) ? receive_sec(h, x, p, i) : 0;

                if (receive < 0)
                        return receive;
                most = receive > most ? receive : most;
        }
        return most;
}

double gpu_cost(const WireHello *h, const GpuWork *x, const WirePlan *p) {
        double rate = gpu_rate(h, p), receive = gpu_receive_sec(h, x, p), compute;

        if (rate <= 0 || receive < 0)
                return 0;
        compute = gpu_operations(h, x, p) / rate;
        return compute > receive ? compute : receive;
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
        r = gpu_set_wishes(c->set, GPU_PART_DENOISER, h, c->ranks, &w);
        if (r >= 0)
                r = plan_make(c->work->rows, c->work->heads, c->ranks, c->row_tile, &w, ret);
        if (r < 0)
                return r;
        ret->exchange = gpu_set_exchange(h, ret, c->wishes->exchange);
        *ret_sec = gpu_cost(h, c->work, ret);
        return 0;
}

static bool is_ours_to_choose(const GpuSet *s, const WireHello *h, const PlanWishes *w) {
        const bool chosen = s->given || s->parts[GPU_PART_DENOISER] != UINT64_MAX >> (64 - h->n_devices);

        return !chosen && h->n_devices > 1 && w->n_gpus == 0 && w->ranks == 0 && w->n_shares == 0;
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
