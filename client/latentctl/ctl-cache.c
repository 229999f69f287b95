/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl cache: the weights in memory. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

static void print_regions(const latent_value *regions) {
        CLEANUP(table_done) Table t = {.n_columns = 7};
        char size[FORMAT_MAX], locked[FORMAT_MAX], huge[FORMAT_MAX], users[FORMAT_MAX];

        if (latent_value_count(regions) == 0) {
                (void) printf("The cache is empty.\n");
                return;
        }

        table_add(
                &t, (const char *const[]){"STATE", "SIZE", "HUGE PAGES", "LOCKED", "NUMA", "USERS", "FILE"});
        for (size_t i = 0; i < latent_value_count(regions); i++) {
                const latent_value *v = latent_value_at(regions, i);
                const char *name = get_string(v, "name");

                (void) snprintf(users, sizeof(users), "%" PRIu64, get_uint(v, "users"));
                table_add(
                        &t, (const char *const[]){get_string(v, "state"),
                                    format_bytes(get_uint(v, "bytes"), size),
                                    format_bytes(get_uint(v, "huge-bytes"), huge),
                                    format_bytes(get_uint(v, "locked-bytes"), locked), get_string(v, "numa"),
                                    users, name[0] != '\0' ? name : get_string(v, "id")});
        }
        table_print(&t);
}

static int cache_run(const Ctl *c, bool drop, latent_error *e) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        CLEANUP(latent_value_freep) latent_value *regions = NULL;
        char buf[FORMAT_MAX];
        JsonWriter w = {.file = stdout};
        uint64_t bytes;
        int r;

        r = run_connect(c, &client, e);
        if (r < 0)
                return r;

        if (drop) {
                r = latent_client_drop_cache(client, &bytes, e);
                if (r < 0)
                        return r;
                if (c->json) {
                        json_writer_object(&w, NULL);
                        json_writer_uint(&w, "freed_bytes", bytes);
                        json_writer_line(&w);
                } else
                        (void) printf("%s freed.\n", format_bytes(bytes, buf));
                return 0;
        }

        r = latent_client_regions(client, &regions, e);
        if (r < 0)
                return r;
        if (c->json) {
                json_writer_object(&w, NULL);
                json_writer_value(&w, "regions", regions);
                json_writer_line(&w);
        } else
                print_regions(regions);
        return 0;
}

int verb_cache(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        const char *operands[1];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, 0, 1, operands, &e);
        if (r >= 0 && operands[0] && strcmp(operands[0], "drop") != 0)
                r = ctl_error(&e, -1, CTL_ERROR_USAGE, "unexpected argument %s", operands[0]);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        r = cache_run(c, operands[0] != NULL, &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}
