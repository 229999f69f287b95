/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/render-plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/report.h"

#define NOT_MEASURED "not measured"

/* "0, 1"; "-": none. */
static void list_text(const latent_value *list, char *buf, size_t size) {
        size_t used = 0;

        (void) snprintf(buf, size, "-");
        for (size_t i = 0; i < latent_value_count(list) && used < size; i++)
                used += (size_t) snprintf(buf + used, size - used, "%s%s", i > 0 ? ", " : "",
                        latent_value_as_string(latent_value_at(list, i)));
}

/* The GPUs or ranks that run it, and the NUMA nodes that its weights are on. */
static void place_text(const latent_value *phase, char *buf, size_t size) {
        const latent_value *nodes = latent_value_get(phase, "node-bytes"), *gpus = latent_value_get(phase, "gpus");
        uint64_t ranks = get_uint(phase, "ranks"), bytes;
        char names[160];
        int used;
        bool any = false;

        list_text(gpus, names, sizeof(names));
        used = gpus             ? snprintf(buf, size, "GPU %s", names)
                   : ranks == 0 ? snprintf(buf, size, "ranks not known")
                   : ranks == 1 ? snprintf(buf, size, "rank 0")
                                : snprintf(buf, size, "ranks 0-%" PRIu64, ranks - 1);

        for (size_t i = 0; i < latent_value_count(nodes) && used > 0 && (size_t) used < size; i++) {
                if (latent_value_as_uint(latent_value_at(nodes, i), &bytes) < 0 || bytes == 0)
                        continue;
                used += snprintf(buf + used, size - (size_t) used, any ? ", %zu" : "; node %zu", i);
                any = true;
        }
        if (!any && used > 0 && (size_t) used < size)
                (void) snprintf(buf + used, size - (size_t) used, "; numa %s", get_string(phase, "numa"));
}

/* How steps are cut, and what one takes, where the service knows: of sampling. */
static void print_split(const latent_value *phase) {
        char usec[FORMAT_MAX] = NOT_MEASURED;

        if (!latent_value_get(phase, "plan"))
                return;
        if (latent_value_get(phase, "step-usec"))
                (void) format_usec(get_uint(phase, "step-usec"), usec);
        (void) printf("\neach step of %s: %" PRIu64 " ranks, %s by %s, %" PRIu64 " chunks, time %s\n", get_string(phase, "phase"),
                get_uint(phase, "ranks"), get_string(phase, "plan"), get_string(phase, "exchange"), get_uint(phase, "chunks"), usec);
}

static void add_phase(Table *t, const latent_value *phase) {
        char weights[FORMAT_MAX], step[FORMAT_MAX] = "not known yet", usec[FORMAT_MAX] = NOT_MEASURED,
                                  place[240], leave[160];

        (void) format_bytes(get_uint(phase, "weight-bytes"), weights);
        if (latent_value_get(phase, "step-bytes"))
                (void) format_bytes(get_uint(phase, "step-bytes"), step);
        if (latent_value_get(phase, "usec"))
                (void) format_usec(get_uint(phase, "usec"), usec);
        place_text(phase, place, sizeof(place));
        list_text(latent_value_get(phase, "leave"), leave, sizeof(leave));
        table_add(t, (const char *[]){get_string(phase, "phase"), get_string(phase, "model"),
                             latent_value_as_bool(latent_value_get(phase, "loaded")) > 0 ? "in memory"
                                                                                         : "to be read",
                             weights, step, usec, place, leave});
}

void render_plan_print(const latent_value *plan) {
        const latent_value *phases = latent_value_get(plan, "phases");
        CLEANUP(table_done) Table t = {.n_columns = 8};
        char memory[FORMAT_MAX], between[FORMAT_MAX], usec[FORMAT_MAX] = NOT_MEASURED;
        uint64_t frames = get_uint(plan, "frames");

        if (latent_value_get(plan, "usec"))
                (void) format_usec(get_uint(plan, "usec"), usec);
        (void) printf("%" PRIu64 " frames of %" PRIu64 "x%" PRIu64 " (%.2f s), %" PRIu64 " steps of %" PRIu64
                      " rows, %" PRIu64 " tokens\nmemory %s at most at a time, %s of it for what lies "
                                        "between the phases; time %s\n\n",
                frames, get_uint(plan, "width"), get_uint(plan, "height"), (double) frames / 24,
                get_uint(plan, "steps"), get_uint(plan, "rows"), get_uint(plan, "tokens"),
                format_bytes(get_uint(plan, "memory-bytes"), memory),
                format_bytes(get_uint(plan, "work-bytes"), between), usec);
        table_add(&t, (const char *[]){"PHASE", "MODEL", "WEIGHTS ARE", "WEIGHTS", "STEP", "TIME", "PLACE",
                              "LEAVE BEFORE IT"});
        for (size_t i = 0; i < latent_value_count(phases); i++)
                add_phase(&t, latent_value_at(phases, i));
        table_print(&t);
        for (size_t i = 0; i < latent_value_count(phases); i++)
                print_split(latent_value_at(phases, i));
}
