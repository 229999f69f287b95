/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/job.h"
#include "client/liblatent/model.h"
#include "client/liblatent/request.h"

/* The service takes no more descriptors in a message. */
#define FILES_PER_CALL 4u

DEFINE_CLEANUP(latent_model *, latent_model_free)

ModelSource *source_ref(ModelSource *s) {
        if (s)
                s->n_ref++;
        return s;
}

ModelSource *source_unref(ModelSource *s) {
        if (!s || --s->n_ref > 0)
                return NULL;

        checkpoint_done(&s->checkpoint);
        free(s->name);
        free(s->qkv_order);
        free(s->partition);
        free(s->numa);
        free(s->tokenizer);
        free(s);
        return NULL;
}

int source_new(const char *name, const latent_load_options *o, Checkpoint *checkpoint, ModelSource **ret) {
        CLEANUP(source_unrefp) ModelSource *s = NULL;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        s->n_ref = 1;
        s->defer = o->flags & LATENT_LOAD_DEFER;
        if (copy_string(name, &s->name) < 0 || copy_string(o->qkv_order, &s->qkv_order) < 0 ||
                copy_string(o->partition, &s->partition) < 0 || copy_string(o->numa, &s->numa) < 0 ||
                (!checkpoint && copy_string(o->tokenizer, &s->tokenizer) < 0))
                return -ENOMEM;
        if (checkpoint) {
                s->checkpoint = *checkpoint;
                *checkpoint = (Checkpoint){};
        }

        *ret = STEAL_PTR(s);
        return 0;
}

static int append_load_options(sd_bus_message *m, const ModelSource *s, const char *name) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "name", name);
        if (r >= 0)
                r = append_string(m, "qkv-order", s->qkv_order);
        if (r >= 0)
                r = append_string(m, "partition", s->partition);
        if (r >= 0)
                r = append_string(m, "numa", s->numa);
        if (r >= 0)
                r = append_string(m, "tokenizer", s->tokenizer);
        if (r >= 0 && s->defer)
                r = sd_bus_message_append(m, "{sv}", "defer", "b", (int) true);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

static int load_name(latent_client *c, ModelSource *s, latent_job **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = client_message(c, NULL, BUS_ROOT, BUS_INTERFACE("Manager"), "LoadModel", &m, e);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "s", s->name);
        if (r >= 0)
                r = append_load_options(m, s, NULL);
        if (r < 0)
                return client_error_message(r, "Loading a model", e);

        r = client_call(c, m, "Loading a model", &reply, e);
        if (r < 0)
                return r;

        return job_new_from_reply(c, NULL, reply, ret, e);
}

static int model_new_private(latent_client *c, const ModelSource *s, latent_model **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        const char *path;
        int r;

        r = client_message(c, NULL, BUS_ROOT, BUS_INTERFACE("Manager"), "NewModel", &m, e);
        if (r < 0)
                return r;
        r = append_load_options(m, s, s->name);
        if (r < 0)
                return client_error_message(r, "Making a model", e);
        r = client_call(c, m, "Making a model", &reply, e);
        if (r < 0)
                return r;

        r = sd_bus_message_read(reply, "o", &path);
        if (r < 0)
                return client_error_message(r, "Making a model", e);

        return model_new(c, client_sender(c, reply), path, NULL, ret, e);
}

/* One AddFiles() call with up to FILES_PER_CALL files. */
static int model_add_files(latent_model *model, const CheckpointFile *files, size_t n, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = client_message(model->client, model->object.owner, model->object.path, BUS_INTERFACE("Model"),
                "AddFiles", &m, e);
        if (r < 0)
                return r;

        r = sd_bus_message_open_container(m, 'a', "(sh)");
        for (size_t i = 0; r >= 0 && i < n; i++)
                r = sd_bus_message_append(m, "(sh)", files[i].name, files[i].fd);
        if (r >= 0)
                r = sd_bus_message_close_container(m);
        if (r < 0)
                return client_error_message(r, "Handing over the model's files", e);

        return client_call(model->client, m, "Handing over the model's files", NULL, e);
}

static int model_commit(latent_model *model, latent_job **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = client_message(model->client, model->object.owner, model->object.path, BUS_INTERFACE("Model"),
                "Commit", &m, e);
        if (r < 0)
                return r;
        r = client_call(model->client, m, "Loading a model", &reply, e);
        if (r < 0)
                return r;

        return job_new_from_reply(model->client, NULL, reply, ret, e);
}

static int model_fill(latent_model *model, const Checkpoint *c, latent_job **ret, latent_error *e) {
        int r;

        /* A service that died during a load may have left the description in direct mode, in which headers cannot be read. */
        for (size_t i = 0; i < c->n_files; i++) {
                int flags = fcntl(c->files[i].fd, F_GETFL);

                if (flags >= 0 && (flags & O_DIRECT))
                        (void) fcntl(c->files[i].fd, F_SETFL, flags & ~O_DIRECT);
        }

        for (size_t i = 0; i < c->n_files; i += FILES_PER_CALL) {
                size_t n = c->n_files - i < FILES_PER_CALL ? c->n_files - i : FILES_PER_CALL;

                r = model_add_files(model, c->files + i, n, e);
                if (r < 0)
                        return r;
        }

        return model_commit(model, ret, e);
}

static int load_files(latent_client *c, ModelSource *s, latent_job **ret, latent_error *e) {
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        int r;

        r = model_new_private(c, s, &model, e);
        if (r < 0)
                return r;

        r = model_fill(model, &s->checkpoint, ret, e);
        if (r < 0)
                (void) latent_model_unload(
                        model, NULL); /* half a model is of no use; it goes with the connection at latest */
        return r;
}

int source_load(latent_client *c, ModelSource *s, latent_job **ret, latent_error *e) {
        latent_job *job;
        int r;

        r = s->checkpoint.n_files > 0 ? load_files(c, s, &job, e) : load_name(c, s, &job, e);
        if (r < 0)
                return r;

        job->source = source_ref(s);
        *ret = job;
        return 0;
}
