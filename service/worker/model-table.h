/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The models of this worker: their files' regions, mapped, and what was found in them. Counted: a job holds
 * its model. The table is the link thread's; the last reference may go on any thread. */

#include <stdatomic.h>
#include <stdbool.h>

#include "service/h3/audio-vae.h"
#include "service/h3/lora.h"
#include "service/h3/model-kind.h"
#include "service/h3/model.h"
#include "service/h3/picture.h"
#include "service/h3/text-model.h"
#include "service/h3/tokenizer.h"
#include "service/h3/video-vae.h"
#include "service/shared/wire.h"
#include "service/worker/ranges.h"
#include "service/worker/touch.h"

#define MODELS_MAX 64
#define MODEL_FILES_MAX 256

typedef struct Region {
        int fd;               /* kept open as long as the model, as the protocol says */
        void *map;            /* PROT_READ; file bytes at their own offsets from 0 */
        uint64_t size;        /* of the file */
        uint64_t region_size; /* of the map */
        Ranges registered;    /* addresses, with the devices: residency.c's */
        _Atomic uint64_t registered_bytes; /* of them, for whoever is not at it */
        char name[256];
} Region;

typedef struct ModelEntry {
        atomic_uint n_ref;
        uint64_t id;
        uint64_t serial; /* never used twice, unlike the id */
        uint64_t identity; /* of its bytes, for what outlives it; 0: not known */
        H3QkvOrder qkv_order;
        char partition[16];
        uint32_t n_files, n_regions;
        Region *regions;    /* [n_files], n_regions filled */
        const LkOps *ops;   /* that the regions may be registered with; NULL before the commit */
        /* One of them, by kind; none before the commit. They point into the regions. */
        H3ModelSummary summary;
        H3Model *h3;
        H3Lora *lora;
        H3TextModel *conditioner;
        H3Tokenizer *tokenizer; /* of a conditioner; NULL: its files were not there */
        H3PictureRules picture_rules; /* of a conditioner */
        H3VideoVae *video_vae;
        H3AudioVae *audio_vae;
        Touch *touch; /* of what a device's first step registers first; NULL: nothing */
        atomic_bool closed; /* by MODEL_CLOSE: only jobs and merged models hold it still */
        Fault fault; /* the first region that could not be mapped, and why: MODEL_COMMIT answers with it */
} ModelEntry;

ModelEntry *model_entry_ref(ModelEntry *m);
ModelEntry *model_entry_unref(ModelEntry *m);
const char *model_entry_kind_name(const ModelEntry *m); /* "video VAE" */

typedef struct ModelTable {
        ModelEntry *models[MODELS_MAX];
        uint64_t last_serial;
} ModelTable;

/* MODEL_OPEN. -EPROTO: id taken, table full, numbers out of range; -ENOMEM. */
int model_table_open(ModelTable *t, const WireModelOpen *w, Fault *f);

/* REGION: takes *fd over. What is wrong with the memory is remembered for the commit (0); -EPROTO: unknown
 * model, wrong index, a name that is no base name. */
int model_table_add_region(ModelTable *t, const WireRegion *w, int *fd, Fault *f);

/* MODEL_COMMIT: parses the files, asks ops whether they run them, and fills everything of ret behind the
 * header. On failure (as h3_model_open() and h3_lora_open(), or -ENOENT, -ENODATA) the model is gone from
 * the table and its memory given back. */
int model_table_commit(ModelTable *t, uint64_t id, const LkOps *ops, WireModelReady *ret, Fault *f);

/* MODEL_CLOSE; an unknown id is no error: a refused model is closed already. Returns the model's serial, 0
 * for an unknown one. */
uint64_t model_table_close(ModelTable *t, uint64_t id);

/* A committed model, denoiser or adapter, NULL if there is none of this id. Not counted. */
ModelEntry *model_table_find(const ModelTable *t, uint64_t id);
