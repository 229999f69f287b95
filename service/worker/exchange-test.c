/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange-test.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/reaper.h"

#define FAULTS_MAX 8

typedef enum FaultKind {
        FAULT_FLIP,
        FAULT_FAIL,
        FAULT_STUCK,
        FAULT_DELAY,
        FAULT_DEADLINE,
        FAULT_LINK,
        FAULT_KILL,
        FAULT_HANG,
} FaultKind;

typedef struct ExchangeFault {
        FaultKind kind;
        uint32_t a, b, c;
        atomic_bool done;
} ExchangeFault;

typedef struct Faults {
        ExchangeFault faults[FAULTS_MAX];
        size_t n;
} Faults;

static Faults faults;

static uint32_t mix(uint32_t x) {
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x *= 0x846ca68bu;
        return x ^ x >> 16;
}

/* Others in each process. */
static bool happens(uint32_t per_million) {
        static atomic_uint n;

        return mix(mix((uint32_t) getpid()) ^ ++n) % 1000000 < per_million;
}

static int apply(ExchangeFault *f, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        bool here = m->from == rank && rank == f->a && m->sequence == f->b + 1 && m->chunk == f->c;
        uint32_t x;

        switch (f->kind) {

        case FAULT_FLIP:
                if (here && bytes && size > 1)
                        bytes[1] ^= 0x40;
                return 0;

        case FAULT_FAIL:
                return here && !bytes && !atomic_exchange(&f->done, true) ? -EIO : 0;

        case FAULT_STUCK:
                while (here && !bytes)
                        (void) usleep(10000);
                return 0;

        case FAULT_DELAY:
                x = mix(f->a ^ mix(rank * 64u + m->chunk * 4u + m->phase * 2u + (bytes != NULL)));
                x = mix(x ^ mix(m->from * 977u + m->sequence));
                if (x % 4 == 0)
                        (void) usleep(x / 4 % (f->b + 1));
                return 0;

        case FAULT_KILL:
                if (!bytes && happens(f->a))
                        reaper_kill_process();
                return 0;

        case FAULT_HANG:
                if (!bytes && happens(f->a))
                        for (;;)
                                (void) usleep(10000);
                return 0;

        default:
                return 0;
        }
}

static int hook(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        Faults *all = userdata;
        int r = 0;

        for (size_t i = 0; r >= 0 && i < all->n; i++)
                r = apply(all->faults + i, rank, m, bytes, size);
        return r;
}

static bool parse(const char *word, ExchangeFault *ret) {
        static const struct {
                const char *name;
                int numbers;
        } kinds[] = {{"flip", 3}, {"fail", 3}, {"stuck", 3}, {"delay", 2}, {"deadline", 1}, {"link", 1}, {"kill", 1}, {"hang", 1}};
        char name[16];
        int n;

        n = sscanf(word, "%15[a-z]:%" SCNu32 ":%" SCNu32 ":%" SCNu32, name, &ret->a, &ret->b, &ret->c);
        for (size_t i = 0; i < ELEMENTSOF(kinds); i++)
                if (n > 0 && strcmp(name, kinds[i].name) == 0) {
                        ret->kind = (FaultKind) i;
                        return n - 1 == kinds[i].numbers;
                }
        return false;
}

void exchange_test_read(ExchangeHook *ret_hook, uint64_t *deadline_usec) {
        const char *text = getenv("LATENT_TEST_EXCHANGE");
        uint64_t link_bytes = 0;
        bool measures = false;

        while (text && *text) {
                ExchangeFault *f = faults.faults + faults.n;
                size_t n = strcspn(text, ",");
                char word[64];

                (void) snprintf(word, sizeof(word), "%.*s", (int) n, text);
                if (faults.n == FAULTS_MAX || n >= sizeof(word) || !parse(word, f)) {
                        fprintf(stderr, "LATENT_TEST_EXCHANGE: \"%s\" makes no sense.\n", text);
                        _exit(EXIT_FAILURE);
                }
                if (f->kind == FAULT_DEADLINE)
                        *deadline_usec = (uint64_t) f->a * 1000u;
                if (f->kind == FAULT_LINK) {
                        measures = true;
                        link_bytes = f->a;
                }
                faults.n++;
                text += n + (text[n] == ',');
        }
        if (faults.n > 0)
                *ret_hook = (ExchangeHook){hook, &faults, measures, link_bytes};
}
