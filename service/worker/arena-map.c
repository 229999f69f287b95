/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/arena-map.h"

#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

int arena_pair_new(uint64_t session, ArenaPair **ret) {
        ArenaPair *a;

        a = calloc(1, sizeof(*a));
        if (!a)
                return -ENOMEM;

        a->n_ref = 1;
        a->session = session;
        *ret = a;
        return 0;
}

ArenaPair *arena_pair_ref(ArenaPair *a) {
        a->n_ref++;
        return a;
}

static void arena_done(Arena *a) {
        if (a->map)
                (void) munmap(a->map, (size_t) a->size);
}

ArenaPair *arena_pair_unref(ArenaPair *a) {
        if (!a || --a->n_ref > 0)
                return NULL;

        arena_done(&a->input);
        arena_done(&a->output);
        free(a);
        return NULL;
}

int arena_pair_add(ArenaPair *a, const WireArena *w, int fd, Fault *f) {
        bool output = w->kind == WIRE_ARENA_OUTPUT;
        Arena *x = output ? &a->output : &a->input;
        int r;

        if (w->kind != WIRE_ARENA_INPUT && w->kind != WIRE_ARENA_OUTPUT)
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "ARENA is of the unknown kind %" PRIu32 ".", w->kind);

        if (x->given)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "Session %" PRIu64 " was given a second %s arena.", a->session,
                        output ? "output" : "input");
        x->given = true;

        r = memfd_check(fd, w->size);
        if (r >= 0)
                r = memfd_map(fd, w->size, output ? PROT_READ | PROT_WRITE : PROT_READ, &x->map);
        if (r < 0) {
                (void) fault_set(&a->fault, r, r == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "The %s arena of %" PRIu64 " bytes cannot be used: %s.", output ? "output" : "input",
                        w->size, strerror(-r));
                return 0;
        }

        x->size = w->size;
        return 0;
}
