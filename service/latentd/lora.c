/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/lora.h"

#include <errno.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/model.h"
#include "service/shared/cleanup.h"

#define NOTES_MAX 4096
#define COST_MAX 30000 /* of each kind, in bytes; the rest of a Finished signal needs less than 4 KiB */

enum {
        APPLIED,
        REFUSED,
};

void lora_list_hold(const LoraList *list) {
        for (uint32_t i = 0; i < list->n; i++)
                model_user_add(list->models[i]);
}

void lora_list_done(LoraList *list) {
        LoraList copy = *list;

        *list = (LoraList){};
        for (uint32_t i = 0; i < copy.n; i++)
                model_user_remove(copy.models[i]);
}

bool lora_list_has(const LoraList *list, const Model *model) {
        for (uint32_t i = 0; i < list->n; i++)
                if (list->models[i] == model)
                        return true;

        return false;
}

/* One string behind the others. */
static int put(LoraNotes *notes, int kind, const char *s) {
        size_t size = strlen(s) + 1;
        char *text;

        text = realloc(notes->text[kind], notes->used[kind] + size);
        if (!text)
                return -ENOMEM;

        bus_text(memcpy(text + notes->used[kind], s, size));
        notes->text[kind] = text;
        notes->used[kind] += size;
        return 0;
}

/* An upper bound of what the strings take in a message: each its length, its NUL and padding, pairs aligned
 * to 8. */
static size_t entry_cost(const WireLoraNote *x) {
        return strlen(x->name) + 8 + (x->refused ? strlen(x->reason) + 8 + 8 : 0);
}

static int add_one(LoraNotes *notes, const WireLoraNote *x) {
        int kind = x->refused ? REFUSED : APPLIED, r;
        size_t cost = entry_cost(x);

        if (notes->n >= NOTES_MAX || cost > COST_MAX - notes->cost[kind]) {
                if (notes->n_more < UINT32_MAX)
                        notes->n_more++;
                return 0;
        }

        r = put(notes, kind, x->name);
        if (r < 0)
                return r;

        if (x->refused) {
                r = put(notes, kind, x->reason);
                if (r < 0)
                        return r;
        }

        notes->cost[kind] += cost;
        notes->n++;
        return 0;
}

int lora_notes_add(LoraNotes *notes, const WireLoraNotes *m, uint32_t n_loras) {
        if (m->n > WIRE_LORA_NOTES_MAX)
                return -EPROTO;

        for (uint32_t i = 0; i < m->n; i++)
                if (m->notes[i].lora >= n_loras || m->notes[i].refused > 1)
                        return -EPROTO;

        for (uint32_t i = 0; i < m->n; i++) {
                int r;

                r = add_one(notes, &m->notes[i]);
                if (r < 0)
                        return r;
        }

        return 0;
}

void lora_notes_done(LoraNotes *notes) {
        free(notes->text[APPLIED]);
        free(notes->text[REFUSED]);
        *notes = (LoraNotes){};
}

/* The strings in order; those of a refused module come in pairs. */
static int append_entry(sd_bus_message *m, const LoraNotes *notes, int kind) {
        const char *s = notes->text[kind], *end = s ? s + notes->used[kind] : NULL;
        int r;

        r = bus_open_list(m, kind == REFUSED ? "refused" : "applied", kind == REFUSED ? "(ss)" : "s");
        while (s < end && r >= 0) {
                const char *next = s + strlen(s) + 1;

                if (kind == REFUSED) {
                        r = sd_bus_message_append(m, "(ss)", s, next);
                        next += strlen(next) + 1;
                } else
                        r = sd_bus_message_append(m, "s", s);
                s = next;
        }
        return r < 0 ? r : bus_close_list(m);
}

int lora_notes_append(sd_bus_message *m, const LoraNotes *notes) {
        int r;

        r = append_entry(m, notes, APPLIED);
        if (r < 0)
                return r;

        r = append_entry(m, notes, REFUSED);
        if (r < 0)
                return r;

        return notes->n_more > 0 ? sd_bus_message_append(m, "{sv}", "more", "u", notes->n_more) : 0;
}
