/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl status, devices, models: what the service says about itself. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

#define LINKS_COLUMNS_MAX 33
#define PARTS 3 /* of a film's models, that a GPU may run */

typedef int (*ListFn)(latent_client *client, latent_value **ret, latent_error *e);

/* Connects and asks. Returns -1 to go on, else the exit status. */
static int ask(Ctl *c, const Verb *verb, int argc, char *argv[], ListFn list, latent_value **ret) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, 0, 0, NULL, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        r = run_connect(c, &client, &e);
        if (r >= 0)
                r = list(client, ret, &e);
        return r < 0 ? report_error(c, verb, &e) : -1;
}

static void print_uint(const char *title, const latent_value *v, const char *key) {
        (void) printf("%-18s %" PRIu64 "\n", title, get_uint(v, key));
}

static void print_bytes(const char *title, const latent_value *v, const char *key) {
        char buf[FORMAT_MAX];

        (void) printf("%-18s %s\n", title, format_bytes(get_uint(v, key), buf));
}

/* key NULL: the value as it is. */
static void print_json(const char *key, const latent_value *v) {
        JsonWriter w = {.file = stdout};

        if (key)
                json_writer_object(&w, NULL);
        json_writer_value(&w, key, v);
        json_writer_line(&w);
}

int verb_status(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        char buf[FORMAT_MAX];
        int status;

        status = ask(c, verb, argc, argv, latent_client_status, &v);
        if (status >= 0)
                return status;
        if (c->json) {
                print_json(NULL, v);
                return STATUS_OK;
        }

        (void) printf("%-18s latentd %s (interface %" PRIu64 ")\n", "service", get_string(v, "Version"),
                get_uint(v, "ApiVersion"));
        (void) printf("%-18s %s%s%s\n", "state", get_string(v, "State"),
                get_string(v, "StateReason")[0] != '\0' ? ": " : "", get_string(v, "StateReason"));
        (void) printf("%-18s %s\n", "numerics",
                get_string(v, "NumericsId")[0] != '\0' ? get_string(v, "NumericsId")
                                                       : "not known until a worker has started");
        (void) printf("%-18s %" PRIu64 " running, %" PRIu64 " started%s\n", "workers", get_uint(v, "Workers"),
                get_uint(v, "WorkerStarts"),
                strcmp(get_string(v, "WorkerStart"), "socket") == 0 ? " by the service manager"
                : get_string(v, "WorkerStart")[0] != '\0'          ? " by the service"
                                                                   : "");
        print_uint("steps", v, "Steps");
        print_bytes("read", v, "BytesRead");
        (void) printf("%-18s %s in %" PRIu64 " files\n", "cache",
                format_bytes(get_uint(v, "CacheBytes"), buf), get_uint(v, "CacheRegions"));
        print_bytes("could be loaded", v, "MemoryHeadroom");
        print_bytes("kept free", v, "CacheRamReserve");
        if (get_uint(v, "CacheRamMax") > 0)
                print_bytes("cache limit", v, "CacheRamMax");
        print_bytes("session memory", v, "ArenaBytes");
        if (get_uint(v, "MergedBytes") > 0)
                print_bytes("LoRA memory", v, "MergedBytes");
        if (get_uint(v, "StuckReads") > 0)
                (void) printf("%-18s %" PRIu64 " reads were given up: a file system does not answer\n", "stuck",
                        get_uint(v, "StuckReads"));
        return STATUS_OK;
}

/* The way to another device as one cell; "-": itself, or not known. */
static const char *format_way(const latent_value *from, const char *to, char *ret, size_t size) {
        const latent_value *ways = latent_value_get(from, "Transports");
        char rate[FORMAT_MAX];

        (void) snprintf(ret, size, "-");
        for (size_t i = 0; i < latent_value_count(ways); i++) {
                const latent_value *way = latent_value_at(ways, i);
                const char *name = string_at(way, 1);
                uint64_t bytes = 0;

                if (strcmp(string_at(way, 0), to) != 0)
                        continue;
                (void) latent_value_as_uint(latent_value_at(way, strcmp(name, "p2p") == 0 ? 2 : 3), &bytes);
                if (bytes > 0)
                        (void) snprintf(ret, size, "%s/s %s", format_bytes(bytes, rate), name);
        }
        return ret;
}

/* From a row's device to a column's. */
static void print_links(const latent_value *devices) {
        CLEANUP(table_done) Table t = {.n_columns = 1};
        char cells[LINKS_COLUMNS_MAX][FORMAT_MAX + 16];
        const char *row[LINKS_COLUMNS_MAX] = {"FROM"}, *nccl = get_string(latent_value_at(devices, 0), "Nccl");
        size_t n = latent_value_count(devices);

        if (n < 2 || n >= LINKS_COLUMNS_MAX || latent_value_count(latent_value_get(latent_value_at(devices, 0), "Transports")) == 0)
                return;
        t.n_columns = n + 1;
        for (size_t i = 0; i < n; i++)
                row[i + 1] = format_id(get_string(latent_value_at(devices, i), "path"), cells[i]);
        (void) printf("\n");
        table_add(&t, row);
        for (size_t i = 0; i < n; i++) {
                const latent_value *from = latent_value_at(devices, i);

                row[0] = format_id(get_string(from, "path"), cells[n]);
                for (size_t k = 0; k < n; k++)
                        row[k + 1] = format_way(from, get_string(latent_value_at(devices, k), "path"), cells[k], sizeof(cells[k]));
                table_add(&t, row);
        }
        table_print(&t);
        if (nccl[0] != '\0')
                (void) printf("NCCL %s\n", nccl);
}

/* Its name, and what latentd.conf says of it beside others: "Card (share 0.5, for vae)". */
static void format_device(const latent_value *d, char *ret, size_t size) {
        const latent_value *parts = latent_value_get(d, "Parts");
        char share_text[24] = "", parts_text[64] = "";
        size_t n = latent_value_count(parts), used = 0;
        double share = 1;

        (void) latent_value_as_double(latent_value_get(d, "Share"), &share);
        if (share < 1 || share > 1)
                (void) snprintf(share_text, sizeof(share_text), "share %g", share);
        if (parts && n == 0)
                (void) snprintf(parts_text, sizeof(parts_text), "for nothing");
        for (size_t i = 0; i < n && n < PARTS && used < sizeof(parts_text); i++)
                used += (size_t) snprintf(parts_text + used, sizeof(parts_text) - used, "%s%s", i == 0 ? "for " : " and ",
                        string_at(parts, i));
        if (share_text[0] == '\0' && parts_text[0] == '\0')
                (void) snprintf(ret, size, "%s", get_string(d, "Name"));
        else
                (void) snprintf(ret, size, "%s (%s%s%s)", get_string(d, "Name"), share_text,
                        share_text[0] != '\0' && parts_text[0] != '\0' ? ", " : "", parts_text);
}

int verb_devices(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        CLEANUP(table_done) Table t = {.n_columns = 8};
        char id[FORMAT_MAX], total[FORMAT_MAX], available[FORMAT_MAX], node[FORMAT_MAX];
        int64_t numa;
        int status;

        status = ask(c, verb, argc, argv, latent_client_devices, &v);
        if (status >= 0)
                return status;
        if (c->json) {
                print_json("devices", v);
                return STATUS_OK;
        }
        if (latent_value_count(v) == 0) {
                (void) printf("No devices are known yet: a worker starts with the first model.\n");
                return STATUS_OK;
        }

        table_add(&t, (const char *const[]){
                              "DEVICE", "KIND", "STATE", "ADDRESS", "ARCHITECTURE", "MEMORY (FREE)", "NODE", "NAME"});
        for (size_t i = 0; i < latent_value_count(v); i++) {
                const latent_value *d = latent_value_at(v, i);
                const char *address = get_string(d, "PciAddress"); /* as Gpus= and a session's "gpus" take it */
                char memory[2 * FORMAT_MAX + 4], name[256];

                format_device(d, name, sizeof(name));

                (void) snprintf(memory, sizeof(memory), "%s (%s)",
                        format_bytes(get_uint(d, "MemoryTotal"), total),
                        format_bytes(get_uint(d, "MemoryFree"), available));
                if (latent_value_as_int(latent_value_get(d, "NumaNode"), &numa) < 0 || numa < 0)
                        (void) snprintf(node, sizeof(node), "-");
                else
                        (void) snprintf(node, sizeof(node), "%" PRId64, numa);
                table_add(&t, (const char *const[]){format_id(get_string(d, "path"), id),
                                      get_string(d, "Kind"), get_string(d, "State"), address[0] != '\0' ? address : "-",
                                      get_string(d, "Architecture"), memory, node, name});
        }
        table_print(&t);
        print_links(v);
        return STATUS_OK;
}

/* What has no room in a table. */
static void print_notes(const latent_value *models) {
        char id[FORMAT_MAX];

        for (size_t i = 0; i < latent_value_count(models); i++) {
                const latent_value *m = latent_value_at(models, i);
                const char *support = get_string(m, "Support"), *warning = get_string(m, "Warning");

                (void) format_id(get_string(m, "path"), id);
                if (support[0] != '\0')
                        (void) printf("%s: %s\n", id, support);
                if (warning[0] != '\0')
                        (void) printf("%s: warning: %s\n", id, warning);
        }
}

int verb_models(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        CLEANUP(table_done) Table t = {.n_columns = 9};
        char id[FORMAT_MAX], size[FORMAT_MAX], resident[FORMAT_MAX];
        int status;

        status = ask(c, verb, argc, argv, latent_client_models, &v);
        if (status >= 0)
                return status;
        if (c->json) {
                print_json("models", v);
                return STATUS_OK;
        }
        if (latent_value_count(v) == 0) {
                (void) printf("No models are loaded.\n");
                return STATUS_OK;
        }

        table_add(&t, (const char *const[]){
                              "MODEL", "KIND", "STATE", "SIZE", "IN MEMORY", "TYPES", "LAYOUT", "SESSIONS", "NAME"});
        for (size_t i = 0; i < latent_value_count(v); i++) {
                const latent_value *m = latent_value_at(v, i);
                char layout[64], users[FORMAT_MAX];

                (void) snprintf(layout, sizeof(layout), "%s%s%s", get_string(m, "Layout"),
                        get_string(m, "QkvOrder")[0] != '\0' ? "/" : "", get_string(m, "QkvOrder"));
                (void) snprintf(users, sizeof(users), "%" PRIu64, get_uint(m, "Users"));
                table_add(&t, (const char *const[]){format_id(get_string(m, "path"), id), get_string(m, "Kind"),
                                      get_string(m, "State"), format_bytes(get_uint(m, "Bytes"), size),
                                      format_bytes(get_uint(m, "ResidentBytes"), resident),
                                      get_string(m, "Types"), layout, users, get_string(m, "Name")});
        }
        table_print(&t);
        print_notes(v);
        return STATUS_OK;
}
