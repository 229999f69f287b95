/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/crew.h"

#include <sched.h>

#include "service/shared/slice.h"

static void *part_main(void *userdata) {
        const struct CrewPart *p = userdata;

        (void) slice_make_long(); /* devices wait for ranks, not for this */
        p->crew->func(p->crew->userdata, p->i, p->crew->n);
        return NULL;
}

static uint32_t processors(uint32_t most) {
        cpu_set_t set;
        int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;

        return n < 1 ? 1 : n > (int) most ? most : (uint32_t) n;
}

void crew_begin(Crew *c, uint32_t most, CrewFunc func, void *userdata) {
        *c = (Crew){.func = func, .userdata = userdata, .n = processors(most < CREW_MAX ? most : CREW_MAX)};
        for (; c->started < c->n; c->started++) {
                struct CrewPart *p = c->parts + c->started;

                p->crew = c;
                p->i = c->started;
                if (pthread_create(&p->thread, NULL, part_main, p) != 0)
                        return;
        }
}

void crew_end(Crew *c) {
        for (uint32_t i = c->started; i < c->n; i++)
                c->func(c->userdata, i, c->n);
        for (uint32_t i = 0; i < c->started; i++)
                (void) pthread_join(c->parts[i].thread, NULL);
}
