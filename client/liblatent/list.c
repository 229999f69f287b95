/* SPDX-License-Identifier: Apache-2.0 */

/* What the service says about itself: properties and lists as trees of values. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/client.h"
#include "client/liblatent/value.h"

LATENT_PUBLIC int latent_client_status(
        latent_client *client, latent_value **ret_value, latent_error *error) {
        return client_properties(client, NULL, BUS_ROOT, BUS_INTERFACE("Manager"),
                "Asking for the service's state", ret_value, error);
}

/* A call without arguments of the root object. */
static int manager_call(latent_client *c, const char *interface, const char *member, const char *doing,
        sd_bus_message **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = client_message(c, NULL, BUS_ROOT, interface, member, &m, e);
        if (r < 0)
                return r;

        return client_call(c, m, doing, ret, e);
}

/* One object of GetManagedObjects(): oa{sa{sv}} inside an entered entry. Adds it to the list if it has the
 * interface. */
static int read_object(sd_bus_message *m, const char *interface, latent_value *list) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        const char *path, *name;
        int r;

        r = sd_bus_message_read(m, "o", &path);
        if (r < 0)
                return r;
        r = sd_bus_message_enter_container(m, 'a', "{sa{sv}}");
        if (r < 0)
                return r;

        while ((r = sd_bus_message_enter_container(m, 'e', "sa{sv}")) > 0) {
                r = sd_bus_message_read(m, "s", &name);
                if (r < 0)
                        return r;

                if (strcmp(name, interface) == 0 && !v)
                        r = value_read(m, &v);
                else
                        r = sd_bus_message_skip(m, "a{sv}");
                if (r < 0)
                        return r;
                r = sd_bus_message_exit_container(m);
                if (r < 0)
                        return r;
        }
        if (r < 0)
                return r;

        if (v) {
                r = value_add_string(v, "path", path);
                if (r >= 0)
                        r = value_add(list, NULL, STEAL_PTR(v));
                if (r < 0)
                        return r;
        }
        return sd_bus_message_exit_container(m);
}

static int read_objects(sd_bus_message *m, const char *interface, latent_value *list) {
        int r;

        r = sd_bus_message_enter_container(m, 'a', "{oa{sa{sv}}}");
        if (r < 0)
                return r;

        while ((r = sd_bus_message_enter_container(m, 'e', "oa{sa{sv}}")) > 0) {
                r = read_object(m, interface, list);
                if (r < 0)
                        return r;
                r = sd_bus_message_exit_container(m);
                if (r < 0)
                        return r;
        }

        return r;
}

static int list_managed(
        latent_client *c, const char *interface, const char *doing, latent_value **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        CLEANUP(latent_value_freep) latent_value *list = value_new(LATENT_VALUE_LIST);
        int r;

        if (!list)
                return error_errno(e, -ENOMEM, doing);
        r = manager_call(c, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", doing, &reply, e);
        if (r < 0)
                return r;
        r = read_objects(reply, interface, list);
        if (r < 0)
                return client_error_message(r, doing, e);

        value_sort_by_path(list);
        *ret = STEAL_PTR(list);
        return 0;
}

LATENT_PUBLIC int latent_client_devices(
        latent_client *client, latent_value **ret_value, latent_error *error) {
        return list_managed(client, BUS_INTERFACE("Device"), "Listing the devices", ret_value, error);
}

LATENT_PUBLIC int latent_client_models(
        latent_client *client, latent_value **ret_value, latent_error *error) {
        return list_managed(client, BUS_INTERFACE("Model"), "Listing the models", ret_value, error);
}

/* The answer of ListJobs and ListSessions names objects first; their properties are asked for one by one. */
static int list_private(latent_client *c, const char *member, const char *interface, const char *doing,
        latent_value **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        CLEANUP(latent_value_freep) latent_value *paths = NULL, *list = value_new(LATENT_VALUE_LIST);
        int r;

        if (!list)
                return error_errno(e, -ENOMEM, doing);
        r = manager_call(c, BUS_INTERFACE("Manager"), member, doing, &reply, e);
        if (r < 0)
                return r;
        r = value_read(reply, &paths);
        if (r < 0)
                return client_error_message(r, doing, e);

        for (size_t i = 0; i < latent_value_count(paths); i++) {
                const char *path = latent_value_as_string(latent_value_at(latent_value_at(paths, i), 0));
                latent_value *v;

                if (!path)
                        return client_error_message(-EBADMSG, doing, e);
                r = client_properties(c, NULL, path, interface, doing, &v, e);
                if (r == -ENOENT) /* gone since */
                        continue;
                if (r < 0)
                        return r;

                r = value_add_string(v, "path", path);
                if (r < 0)
                        latent_value_free(v);
                else
                        r = value_add(list, NULL, v);
                if (r < 0)
                        return error_errno(e, r, doing);
        }

        value_sort_by_path(list);
        *ret = STEAL_PTR(list);
        return 0;
}

LATENT_PUBLIC int latent_client_jobs(latent_client *client, latent_value **ret_value, latent_error *error) {
        return list_private(client, "ListJobs", BUS_INTERFACE("Job"), "Listing the jobs", ret_value, error);
}

LATENT_PUBLIC int latent_client_sessions(
        latent_client *client, latent_value **ret_value, latent_error *error) {
        return list_private(
                client, "ListSessions", BUS_INTERFACE("Session"), "Listing the sessions", ret_value, error);
}

LATENT_PUBLIC int latent_client_regions(
        latent_client *client, latent_value **ret_value, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        int r;

        r = manager_call(
                client, BUS_INTERFACE("Manager"), "ListRegions", "Listing the cache", &reply, error);
        if (r < 0)
                return r;
        r = value_read(reply, ret_value);
        if (r < 0)
                return client_error_message(r, "Listing the cache", error);

        return 0;
}

LATENT_PUBLIC int latent_client_drop_cache(latent_client *client, uint64_t *ret_bytes, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        int r;

        r = manager_call(client, BUS_INTERFACE("Manager"), "DropCache", "Dropping the cache", &reply, error);
        if (r < 0)
                return r;
        r = sd_bus_message_read(reply, "t", ret_bytes);
        if (r < 0)
                return client_error_message(r, "Dropping the cache", error);

        return 0;
}

LATENT_PUBLIC int latent_client_release_gpus(latent_client *client, latent_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = client_message(client, NULL, BUS_ROOT, BUS_INTERFACE("Manager"), "ReleaseGpus", &m, error);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "a{sv}", 0);
        if (r < 0)
                return client_error_message(r, "Releasing the devices", error);

        return client_call(client, m, "Releasing the devices", &reply, error);
}

LATENT_PUBLIC int latent_client_cancel_job(latent_client *client, const char *path, latent_error *error) {
        Object o = {.path = (char *) path};

        if (!sd_bus_object_path_is_valid(path) ||
                strncmp(path, BUS_ROOT "/job/", sizeof(BUS_ROOT "/job/") - 1) != 0)
                return error_set(error, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "\"%s\" is no job; expected a path such as " BUS_ROOT "/job/_31.", path);

        return client_call_simple(client, &o, BUS_INTERFACE("Job"), "Cancel", "Cancelling a job", error);
}
