/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/checkpoint.h"
#include "client/liblatent/job.h"
#include "client/liblatent/options.h"
#include "client/liblatent/request.h"

_Static_assert(sizeof(latent_load_options) == 40, "public layout changed: add fields, never alter");
#define LOAD_OPTIONS_SIZE_V1 40u

/* The service takes no more descriptors in a message. */
#define FILES_PER_CALL 4u

DEFINE_CLEANUP(latent_model *, latent_model_free)

LATENT_PUBLIC void latent_model_free(latent_model *model) {
        if (!model)
                return;

        object_done(&model->object);
        client_unref(model->client);
        free(model);
}

int model_new(latent_client *c, const char *owner, const char *path, latent_model **ret, latent_error *e) {
        CLEANUP(latent_model_freep) latent_model *m = NULL;
        int r;

        m = calloc(1, sizeof(*m));
        if (!m)
                return error_errno(e, -ENOMEM, "Opening a model");
        m->client = client_ref(c);
        r = object_init(&m->object, owner, path);
        if (r < 0)
                return error_errno(e, r, "Opening a model");

        *ret = STEAL_PTR(m);
        return 0;
}

static int append_load_options(sd_bus_message *m, const latent_load_options *o, const char *name) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "name", name);
        if (r >= 0)
                r = append_string(m, "qkv-order", o->qkv_order);
        if (r >= 0)
                r = append_string(m, "partition", o->partition);
        if (r >= 0)
                r = append_string(m, "numa", o->numa);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}

LATENT_PUBLIC int latent_model_load_name(latent_client *client, const char *name,
        const latent_load_options *options, latent_job **ret_job, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        latent_load_options o;
        int r;

        r = options_read(options, LOAD_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = client_message(client, NULL, BUS_ROOT, BUS_INTERFACE("Manager"), "LoadModel", &m, error);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "s", name);
        if (r >= 0)
                r = append_load_options(m, &o, NULL);
        if (r < 0)
                return client_error_message(r, "Loading a model", error);

        r = client_call(client, m, "Loading a model", &reply, error);
        if (r < 0)
                return r;

        return job_new_from_reply(client, NULL, reply, ret_job, error);
}

static int model_new_private(latent_client *c, const latent_load_options *o, const char *name,
        latent_model **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        const char *path;
        int r;

        r = client_message(c, NULL, BUS_ROOT, BUS_INTERFACE("Manager"), "NewModel", &m, e);
        if (r < 0)
                return r;
        r = append_load_options(m, o, name);
        if (r < 0)
                return client_error_message(r, "Making a model", e);
        r = client_call(c, m, "Making a model", &reply, e);
        if (r < 0)
                return r;

        r = sd_bus_message_read(reply, "o", &path);
        if (r < 0)
                return client_error_message(r, "Making a model", e);

        return model_new(c, sd_bus_message_get_sender(reply), path, ret, e);
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

        for (size_t i = 0; i < c->n_files; i += FILES_PER_CALL) {
                size_t n = c->n_files - i < FILES_PER_CALL ? c->n_files - i : FILES_PER_CALL;

                r = model_add_files(model, c->files + i, n, e);
                if (r < 0)
                        return r;
        }

        return model_commit(model, ret, e);
}

LATENT_PUBLIC int latent_model_load_path(latent_client *client, const char *path,
        const latent_load_options *options, latent_job **ret_job, latent_error *error) {
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        CLEANUP(checkpoint_done) Checkpoint c = {};
        latent_load_options o;
        Fault f = {};
        int r;

        r = options_read(options, LOAD_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = checkpoint_open(path, &c, &f);
        if (r < 0)
                return error_fault(error, r, &f);
        r = model_new_private(client, &o, o.name ? o.name : c.name, &model, error);
        if (r < 0)
                return r;

        r = model_fill(model, &c, ret_job, error);
        if (r < 0)
                (void) latent_model_unload(
                        model, NULL); /* half a model is of no use; it goes with the connection at latest */
        return r;
}

/* Of several models of that name the newest, which comes last. */
static const char *find_path(const latent_value *models, const char *name) {
        const char *found = NULL;

        for (size_t i = 0; i < latent_value_count(models); i++) {
                const latent_value *v = latent_value_at(models, i);
                const char *path = latent_value_as_string(latent_value_get(v, "path"));
                const char *s = latent_value_as_string(latent_value_get(v, "Name"));

                if (path && ((s && strcmp(s, name) == 0) || strcmp(path, name) == 0))
                        found = path;
        }

        return found;
}

LATENT_PUBLIC int latent_model_find(
        latent_client *client, const char *name, latent_model **ret_model, latent_error *error) {
        CLEANUP(latent_value_freep) latent_value *models = NULL;
        const char *path;
        int r;

        r = latent_client_models(client, &models, error);
        if (r < 0)
                return r;

        path = find_path(models, name);
        if (!path)
                return error_set(error, -ENOENT, LATENT_ERROR_NOT_FOUND,
                        "The service has no model called \"%s\" in use. latentctl models lists those that "
                        "are.",
                        name);

        return model_new(client, NULL, path, ret_model, error);
}

LATENT_PUBLIC const char *latent_model_path(const latent_model *model) {
        return model->object.path;
}

LATENT_PUBLIC int latent_model_properties(
        latent_model *model, latent_value **ret_value, latent_error *error) {
        return client_properties(model->client, model->object.owner, model->object.path,
                BUS_INTERFACE("Model"), "Asking for the model's properties", ret_value, error);
}

LATENT_PUBLIC int latent_model_unload(latent_model *model, latent_error *error) {
        return client_call_simple(
                model->client, &model->object, BUS_INTERFACE("Model"), "Unload", "Unloading a model", error);
}
