/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/options.h"
#include "service/shared/utf8.h"

_Static_assert(sizeof(latent_load_options) == 48, "public layout changed: add fields, never alter");
#define LOAD_OPTIONS_SIZE_V1 40u
#define DEFERRED "deferred" /* as an identity */

DEFINE_CLEANUP(latent_model *, latent_model_free)

LATENT_PUBLIC void latent_model_free(latent_model *model) {
        if (!model)
                return;

        object_done(&model->object);
        (void) source_unref(model->source);
        client_unref(model->client);
        free(model);
}

int model_new(latent_client *c, const char *owner, const char *path, ModelSource *source, latent_model **ret,
        latent_error *e) {
        CLEANUP(latent_model_freep) latent_model *m = NULL;
        int r;

        m = calloc(1, sizeof(*m));
        if (!m)
                return error_errno(e, -ENOMEM, "Opening a model");
        m->client = client_ref(c);
        m->source = source_ref(source);
        r = object_init(&m->object, owner, path);
        if (r < 0)
                return error_errno(e, r, "Opening a model");

        *ret = STEAL_PTR(m);
        return 0;
}

/* The bus carries text only, and the service's names are text. */
static int check_text(const char *what, const char *s, latent_error *e) {
        CLEANUP_FREE char *escaped = NULL;

        if (!s || utf8_is_valid(s, strlen(s)))
                return 0;

        escaped = utf8_escape(s);
        if (!escaped)
                return error_errno(e, -ENOMEM, "Loading a model");
        return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                "The %s \"%s\" is not UTF-8 text, as all names and options of the service are. A file or directory with such a name "
                "can be loaded by its path.",
                what, escaped);
}

static int check_options(const latent_load_options *o, bool by_name, latent_error *e) {
        const struct {
                const char *what, *value;
        } strings[] = {
                {"name", o->name},
                {"QKV order", o->qkv_order},
                {"partition", o->partition},
                {"NUMA policy", o->numa},
                {"tokenizer", by_name ? o->tokenizer : NULL},
        };
        int r;

        if (o->flags & ~(uint32_t) LATENT_LOAD_DEFER)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "Unknown flags %#x; expected LATENT_LOAD_*.", o->flags);

        for (size_t i = 0; i < ELEMENTSOF(strings); i++) {
                r = check_text(strings[i].what, strings[i].value, e);
                if (r < 0)
                        return r;
        }

        return 0;
}

LATENT_PUBLIC int latent_model_load_name(latent_client *client, const char *name,
        const latent_load_options *options, latent_job **ret_job, latent_error *error) {
        CLEANUP(source_unrefp) ModelSource *source = NULL;
        latent_load_options o;
        int r;

        r = options_read(options, LOAD_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = check_text("name", name, error);
        if (r < 0)
                return r;
        r = check_options(&o, true, error);
        if (r < 0)
                return r;
        r = source_new(name, &o, NULL, &source);
        if (r < 0)
                return error_errno(error, r, "Loading a model");

        return source_load(client, source, ret_job, error);
}

LATENT_PUBLIC int latent_model_load_path(latent_client *client, const char *path,
        const latent_load_options *options, latent_job **ret_job, latent_error *error) {
        CLEANUP(source_unrefp) ModelSource *source = NULL;
        CLEANUP(checkpoint_done) Checkpoint c = {};
        latent_load_options o;
        Fault f = {};
        int r;

        r = options_read(options, LOAD_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;
        r = check_options(&o, false, error);
        if (r < 0)
                return r;
        r = checkpoint_open(path, o.tokenizer, &c, &f);
        if (r < 0)
                return error_fault(error, r, &f);
        r = source_new(o.name ? o.name : c.name, &o, &c, &source);
        if (r < 0)
                return error_errno(error, r, "Loading a model");

        return source_load(client, source, ret_job, error);
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

        return model_new(client, NULL, path, NULL, ret_model, error);
}

LATENT_PUBLIC const char *latent_model_path(const latent_model *model) {
        return model->object.path;
}

LATENT_PUBLIC int latent_model_properties(
        latent_model *model, latent_value **ret_value, latent_error *error) {
        return client_properties(model->client, model->object.owner, model->object.path,
                BUS_INTERFACE("Model"), "Asking for the model's properties", ret_value, error);
}

int model_ask_identity(latent_model *m, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
        static const char doing[] = "Asking for the model's identity";
        const char *s = NULL;
        int r;

        if (m->identity[0] != '\0')
                return 0;

        r = client_message(m->client, m->object.owner, m->object.path, "org.freedesktop.DBus.Properties", "Get", &call, e);
        if (r < 0)
                return r;
        r = sd_bus_message_append(call, "ss", BUS_INTERFACE("Model"), "Identity");
        if (r < 0)
                return client_error_message(r, doing, e);
        r = client_call(m->client, call, doing, &reply, e);
        if (r < 0)
                return r;
        r = sd_bus_message_read(reply, "v", "s", &s);
        if (r < 0)
                return client_error_message(r, doing, e);

        if (s[0] == '\0' && m->source && m->source->defer)
                s = DEFERRED; /* nothing was read of it that could have changed since */
        if (strlen(s) < sizeof(m->identity))
                memcpy(m->identity, s, strlen(s) + 1);
        return 0;
}

int model_check_identity(latent_model *m, const char *identity, const char *what, latent_error *e) {
        int r;

        r = model_ask_identity(m, e);
        if (r < 0)
                return r;
        if (m->identity[0] != '\0' && strcmp(m->identity, identity) == 0)
                return 0;
        if (strcmp(m->identity, DEFERRED) == 0 || strcmp(identity, DEFERRED) == 0)
                return 0; /* only Render runs on those, which begins anew */

        return error_set(e, -ESTALE, LATENT_ERROR_FILE_CHANGED,
                "The service was restarted, and the files of the %s \"%.128s\" are not those any more that the job began with: they were "
                "replaced or written to. Nothing was computed with the new ones. Start the job again.",
                what, m->source ? m->source->name : m->object.path);
}

LATENT_PUBLIC int latent_model_unload(latent_model *model, latent_error *error) {
        return client_call_simple(
                model->client, &model->object, BUS_INTERFACE("Model"), "Unload", "Unloading a model", error);
}
