/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model: its files' regions and what the worker found in them. */

#include "service/latentd/manager.h"
#include "service/latentd/model-files.h"

typedef enum ModelState {
        MODEL_NEW,     /* files may be added */
        MODEL_LOADING,
        MODEL_READY,
        MODEL_FAILED,
} ModelState;

typedef struct ModelPart {
        char *name;
        int fd; /* until the region is there */
        uint64_t size;
        Region *region; /* one reference */
        StoreRequest *request;
} ModelPart;

struct Model {
        uint64_t id;
        Manager *manager;
        char *name;
        Peer *owner; /* private models: who made it, NULL once gone or for a shared one */
        uid_t uid;   /* private models */
        bool is_private;
        ModelState state;
        WireQkvOrder qkv_order;
        char partition[16];
        NumaPolicy numa;
        ModelPart *parts;
        size_t n_parts;
        unsigned n_users; /* open sessions and unfinished jobs */
        bool keep;
        uint64_t bytes, bytes_read;
        WireModelReady info; /* MODEL_READY */
        Job *load_job;       /* the first waiter; others in waiters */
        TAILQ_ENTRY(Model) entry;
};

Model *model_find(Manager *m, uint64_t id);
/* Visible to this user? */
bool model_visible(const Model *m, uid_t uid);
int model_path(const Model *m, char **ret); /* malloc'ed object path */
int model_from_path(Manager *m, const char *path, uid_t uid, Model **ret); /* -ENOENT */
void model_user_add(Model *m);
void model_user_remove(Model *m); /* may free a private model whose owner is gone */
/* Cancels the load for this job; the load itself stops if no other job waits. */
void model_load_cancel(Model *m, Job *j);
void model_peer_gone(Peer *p);
Model *model_free(Model *m);
