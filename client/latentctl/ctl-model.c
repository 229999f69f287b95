/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl load, unload. */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

static int load_run(const Ctl *c, const char *name, const latent_load_options *o, latent_error *e) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        char size[FORMAT_MAX], read_size[FORMAT_MAX];
        uint64_t bytes_read;
        int r;

        run_catch_signals();
        r = run_connect(c, &client, e);
        if (r < 0)
                return r;
        r = run_open_model(c, client, name, o, &model, &job, e);
        if (r < 0)
                return r;
        r = latent_model_properties(model, &v, e);
        if (r < 0)
                return r;

        bytes_read = job ? get_uint(latent_job_result(job), "bytes-read") : 0;
        if (c->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_string(&w, "path", latent_model_path(model));
                json_writer_uint(&w, "bytes_read", bytes_read);
                json_writer_value(&w, "model", v);
                json_writer_line(&w);
                return 0;
        }

        (void) printf("%s: %s%s%s, %s, %s%s%s, %s read\n", get_string(v, "Name"), get_string(v, "Kind"),
                get_string(v, "Kind")[0] != '\0' ? ", " : "", format_bytes(get_uint(v, "Bytes"), size),
                get_string(v, "Types"), get_string(v, "Layout"),
                get_string(v, "QkvOrder")[0] != '\0' ? "/" : "", get_string(v, "QkvOrder"),
                format_bytes(bytes_read, read_size));
        if (get_string(v, "Support")[0] != '\0')
                (void) printf("Weights: %s\n", get_string(v, "Support"));
        if (get_string(v, "Warning")[0] != '\0')
                (void) fprintf(stderr, "latentctl: warning: %s\n", get_string(v, "Warning"));
        if (latent_value_as_bool(latent_value_get(v, "Private")) == 1)
                (void) printf("The weights stay in memory until it is needed for others; name the same "
                              "files to use them.\n");
        return 0;
}

int verb_load(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        latent_load_options o = {.struct_size = sizeof(o)};
        const Option options[] = {
                {"qkv-order", OPTION_STRING, &o.qkv_order, NULL, '\0'},
                {"partition", OPTION_STRING, &o.partition, NULL, '\0'},
                {"numa", OPTION_STRING, &o.numa, NULL, '\0'},
        };
        const char *operands[1];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 1, 1, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        r = run_outcome(load_run(c, operands[0], &o, &e), &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}

/* By path, number or name; a name that several have is not enough. */
static int find_to_unload(
        const latent_value *models, const char *name, const char **ret_path, latent_error *e) {
        const char *found = NULL;
        char id[FORMAT_MAX];

        for (size_t i = 0; i < latent_value_count(models); i++) {
                const latent_value *v = latent_value_at(models, i);
                const char *path = get_string(v, "path");

                if (strcmp(path, name) == 0 || strcmp(format_id(path, id), name) == 0) {
                        *ret_path = path;
                        return 0;
                }
                if (strcmp(get_string(v, "Name"), name) != 0)
                        continue;
                if (found)
                        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                                "Several models are called \"%s\". Name one by its number: latentctl "
                                "models.",
                                name);
                found = path;
        }
        if (!found)
                return ctl_error(e, -ENOENT, LATENT_ERROR_NOT_FOUND,
                        "No model in use is called \"%s\". latentctl models lists those that are.", name);

        *ret_path = found;
        return 0;
}

static int unload_run(const Ctl *c, const char *name, latent_error *e) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        CLEANUP(latent_value_freep) latent_value *models = NULL;
        const char *path = NULL;
        int r;

        r = run_connect(c, &client, e);
        if (r < 0)
                return r;
        r = latent_client_models(client, &models, e);
        if (r < 0)
                return r;
        r = find_to_unload(models, name, &path, e);
        if (r < 0)
                return r;
        r = latent_model_find(client, path, &model, e);
        if (r < 0)
                return r;
        r = latent_model_unload(model, e);
        if (r < 0)
                return r;

        if (c->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_string(&w, "unloaded", path);
                json_writer_line(&w);
        }
        return 0;
}

int verb_unload(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        const char *operands[1];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, 1, 1, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        r = unload_run(c, operands[0], &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}
