/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model: its files' regions and what the worker found in them.
 *
 * Shared models come from LoadModel and are known by (name, qkv order, partition, NUMA policy). Loading one that is there opens its files
 * again and compares their identities: unchanged, nothing is read; changed, a new Model object is loaded in its place and the old one,
 * which no name leads to any more, goes with its last user. A shared model without users and without Pin makes room when another one does
 * not fit: conditioners first, then VAEs, then the others, of these the one idle for longest. A model of EvictAfterUse= goes when its last
 * user does, unless it has Pin. Private models come from NewModel and go with their maker.
 *
 * A deferred model has its files open and nothing of them in memory. Only a Render loads it, when a phase needs it (model_want()); from
 * then on it is as good as any other, but its weights go as soon as another load needs their room and no job runs on it, even with users.
 *
 * Logic only; model-bus.c is its face, model-load.c takes it from files to ready. */

#include "service/latentd/manager.h"
#include "service/latentd/model-files.h"

#define MODELS_SHARED_MAX 256    /* shared ones */
#define MODELS_PRIVATE_MAX 64    /* per user, of different files */
#define MODELS_OPEN_MAX 1024     /* per user: objects, those that several clients have of the same files too */
#define MODEL_OPEN_FILES_MAX 512 /* descriptors of a user's models that are not loaded yet */
#define MODEL_FILES_PER_CALL 4

typedef enum ModelState {
        MODEL_NEW,     /* files may be added */
        MODEL_DEFERRED, /* will be loaded when a Render needs it */
        MODEL_LOADING,
        MODEL_READY,
        MODEL_FAILED,
} ModelState;

typedef struct ModelPart {
        Model *model;
        char *name;
        int fd; /* until the region is there; a deferred model's for good */
        uint64_t size;
        FileIdentity identity; /* when it was opened; of a private model what the kernel knew then, for limits only */
        Region *region; /* one reference */
        StoreRequest *request;
} ModelPart;

typedef struct ModelOptions {
        char name[256]; /* NewModel: for people */
        char tokenizer[512]; /* LoadModel: below a ModelPath= directory; empty: not given */
        WireQkvOrder qkv_order;
        char partition[16]; /* empty: not given */
        NumaPolicy numa;
        bool defer;
} ModelOptions;

typedef struct ModelOpen ModelOpen;
typedef struct ModelMend ModelMend;

struct Model {
        uint64_t id;
        Manager *manager;
        char *name;
        char *tokenizer; /* of LoadModel's options; "": not given */
        Peer *owner; /* private models: who made it, NULL once gone or for a shared one */
        uid_t uid;   /* private models */
        bool is_private;
        uint64_t files_hash; /* private models, once committed: the same for the same files and options */
        bool announced;  /* has a path; a shared one only once its files were found */
        bool superseded; /* its files have changed since: goes with its last user */
        ModelState state;
        WireQkvOrder qkv_order;
        char partition[16];
        NumaPolicy numa;
        ModelPart *parts;
        size_t n_parts;
        unsigned n_users; /* open sessions and unfinished jobs */
        bool defer;       /* it may be MODEL_DEFERRED */
        unsigned n_wanted; /* phases of Renders that load it or run on it */
        bool keep;
        uint64_t bytes, bytes_read;
        WireModelReady info; /* MODEL_READY */
        uint64_t identity;   /* likewise: model_identity() as it was then */
        ModelOpen *open;     /* LOADING: files are being opened on the pool */
        ModelMend *mend;     /* its regions are being verified or read again */
        bool checking;       /* LOADING: the worker has it */
        Job **waiters;       /* LOADING: load jobs; the first caused it */
        size_t n_waiters;
        sd_event_source *timer; /* LOADING: progress */
        uint64_t last_used_usec; /* CLOCK_MONOTONIC */
        TAILQ_ENTRY(Model) entry;
};

Model *model_find(Manager *m, uint64_t id);
/* Visible to this user? */
bool model_visible(const Model *m, uid_t uid);
const char *model_state_to_string(ModelState s);
/* The worker has seen it: info is there, of a deferred model as it was when it was loaded last. */
static inline bool model_is_known(const Model *m) {
        return m->state == MODEL_READY || m->info.header.size > 0;
}
const char *model_kind_to_string(uint32_t kind); /* WireModelKind: "denoiser", "lora", ... */
/* How easily a model of this kind is given up when memory is short: conditioners, which a film needs once, before VAEs, before all
 * others. */
uint32_t model_ease(uint32_t kind);
int model_path(const Model *m, char **ret); /* malloc'ed object path */
int model_from_path(Manager *m, const char *path, uid_t uid, Model **ret); /* -ENOENT */
void model_user_add(Model *m);
void model_user_remove(Model *m); /* may free it: a private one whose owner is gone, one of EvictAfterUse= */
void model_peer_gone(Peer *p);
/* Waiting jobs must be gone. Regions stay cached. */
Model *model_free(Model *m);

/* An object without files, in the manager's list, not announced. owner: NULL for a shared one. LimitExceeded. */
int model_new(Manager *m, Peer *owner, const ModelOptions *o, const char *name, Model **ret, Fault *f);
/* All or none; the descriptors are duplicated. */
int model_add_files(Model *m, const ModelFile *files, size_t n_files, Fault *f);
/* files_hash, of a private model that has its files. */
void model_hash_files(Model *m);
/* Busy with users or while loading. Frees the regions that no other model uses. */
int model_unload(Model *m, Fault *f);
void model_pin(Model *m, bool pin);
/* Whether the weights of a deferred model may go now, and that they do. */
bool model_can_rest(const Model *m);
void model_rest(Model *m);
/* A phase of a Render needs it from now on, and does not any more: it rests then if EvictAfterUse= says so. */
void model_wanted_add(Model *m);
void model_wanted_remove(Model *m);
void model_set_state(Model *m, ModelState state);
/* Lets go of files and regions; drop: regions that no other model uses are freed at once. */
void model_release_parts(Model *m, bool drop);
/* Bytes of its files that are in memory. */
uint64_t model_resident_bytes(const Model *m);
/* A hash over what it is made of: names, sizes and checksums of its files, all of which are in memory. The same in every run of the
 * service as long as its files have the same bytes. */
uint64_t model_identity(const Model *m);
/* How texts name a file of it: as FOLDER/FILE if it is one of those that several parts of a pipeline have under the same name. The folder
 * is the end of the model's name. */
#define MODEL_LABEL_MAX 520
const char *model_file_label(const Model *m, const char *file, char ret[static MODEL_LABEL_MAX]);
/* "fl2va" or "ref2va" if the name says so, else "". */
const char *model_partition_of_name(const char *name);

/* model-load.c. *ret: the job, whose end always comes after this call has returned. */
int model_load(Manager *m, Peer *p, const char *name, const ModelOptions *o, Job **ret, Fault *f);
int model_commit(Model *m, Peer *p, Job **ret, Fault *f);
/* Of the shared models that nobody uses and nobody has pinned the one of most ease, idle for longest, is unloaded, other than
 * `loading` (may be NULL), which needs the room. Without such a one the weights of a deferred model go that no phase wants now. False:
 * there is none. */
bool model_idle_gives_way(Manager *m, const Model *loading);
/* Such weights alone. */
bool model_deferred_gives_way(Manager *m, const Model *loading);
/* j: hidden, of a Render's phase that needs a deferred model, which is not MODEL_READY. Its end, which may come before this call returns,
 * says whether it is. */
int model_want(Model *m, Job *j);
/* Cancels the load for this job (finishing the job is the caller's part); the load itself stops if no other job waits. May free m. */
void model_load_cancel(Model *m, Job *j);
/* Stops whatever a load has under way; jobs that still wait end with f. */
void model_load_stop(Model *m, const Fault *f);

/* model-mend.c. f == NULL: the regions are what was loaded. Else the model is of no use any more (a MODEL_READY one is MODEL_FAILED). */
typedef void (*ModelMendFn)(void *userdata, Model *m, const Fault *f);

bool model_is_sound(const Model *m); /* nothing to verify */
/* Verifies what a dead worker may have written to and reads damaged files again. fn is never called from inside, and once for all who ask
 * meanwhile; it must be the same each time. */
int model_mend(Model *m, ModelMendFn fn, void *userdata);
void model_mend_stop(Model *m); /* fn will not be called */

/* model-bus.c */
int model_bus_read_options(sd_bus_message *message, Manager *m, bool with_name, ModelOptions *ret, Fault *f);
void model_bus_announce(Model *m);
void model_bus_withdraw(Model *m);
void model_bus_emit_state(Model *m);
