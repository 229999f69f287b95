/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The adapters that --lora names: loaded, set in a session, and what of them does not apply. */

#include "client/latentctl/arguments.h"
#include "client/latentctl/json-writer.h"
#include "client/latentctl/same-file.h"

typedef struct LoraOption {
        char *file;
        double strength;
        latent_model *model;
} LoraOption;

typedef struct LoraOptions {
        LoraOption items[STRINGS_MAX];
        uint32_t n;
        latent_job *merge;
        bool warned;
} LoraOptions;

/* FILE or FILE:STRENGTH each. What is behind the last colon is a strength if it is a number; default 1. A strength that is
 * not finite or out of range is a usage error. */
int loras_parse(const StringList *arguments, LoraOptions *ret, latent_error *e);
void loras_done(LoraOptions *l);

/* Their files for same_file_check(): at most STRINGS_MAX, how many is returned. */
size_t loras_name(const LoraOptions *l, NamedFile *ret);

/* Loads them, sets them in the session and waits for that; says once which modules are refused. Nothing if there are none. */
int loras_set(LoraOptions *l, const Ctl *c, latent_client *client, latent_session *session, latent_error *e);

/* What belongs to a service that went away. */
void loras_forget(LoraOptions *l);

/* Members "loras", "lora_applied", "lora_refused" and "lora_bytes" of an open object; nothing if there are none. */
void loras_report(const LoraOptions *l, JsonWriter *w);
