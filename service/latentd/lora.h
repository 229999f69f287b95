/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* LoRA adapters: the list that a session or a job uses, and what a merge found in them. */

#include <systemd/sd-bus.h>

#include "service/latentd/manager.h"

typedef struct LoraList {
        uint32_t n;
        Model *models[WIRE_LORAS_MAX];
        double strengths[WIRE_LORAS_MAX];
} LoraList;

/* Counts a user of each of its models; lora_list_done() takes it back, empties the list and may free models.
 */
void lora_list_hold(const LoraList *list);
void lora_list_done(LoraList *list);
bool lora_list_has(const LoraList *list, const Model *model);

/* "module\0" of those that apply, "module\0why\0" of those that do not, both bounded so that they fit into a
 * D-Bus message of 64 KiB. What does not fit any more is counted. */
typedef struct LoraNotes {
        char *text[2];           /* applied, refused */
        size_t used[2], cost[2]; /* bytes, and what they take in a message */
        uint32_t n, n_more;
} LoraNotes;

/* 0, or -EPROTO: no such adapter or more notes than a message can have; -ENOMEM. */
int lora_notes_add(LoraNotes *notes, const WireLoraNotes *m, uint32_t n_loras);
void lora_notes_done(LoraNotes *notes);
/* The entries applied, refused and, if there is any, more. */
int lora_notes_append(sd_bus_message *message, const LoraNotes *notes);
