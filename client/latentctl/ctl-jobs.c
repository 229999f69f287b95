/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl jobs, cancel. */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

static void print_jobs(const latent_value *jobs) {
        CLEANUP(table_done) Table t = {.n_columns = 7};

        if (latent_value_count(jobs) == 0) {
                (void) printf("You have no jobs.\n");
                return;
        }

        table_add(&t, (const char *const[]){"JOB", "KIND", "STATE", "DONE", "COMPUTED", "QUEUE", "ERROR"});
        for (size_t i = 0; i < latent_value_count(jobs); i++) {
                const latent_value *v = latent_value_at(jobs, i);
                const char *error = string_at(latent_value_get(v, "Error"), 0);
                char id[FORMAT_MAX], done[FORMAT_MAX], computed[FORMAT_MAX], position[FORMAT_MAX];
                double fraction = 0;

                (void) latent_value_as_double(latent_value_get(v, "Fraction"), &fraction);
                (void) snprintf(done, sizeof(done), "%.0f%%", fraction * 100);
                (void) snprintf(position, sizeof(position), "%" PRIu64, get_uint(v, "QueuePosition"));
                table_add(&t, (const char *const[]){format_id(get_string(v, "path"), id),
                                      get_string(v, "Kind"), get_string(v, "State"), done,
                                      format_usec(get_uint(v, "ComputeUsec"), computed), position,
                                      error});
        }
        table_print(&t);
}

/* The job by its number or path. */
static const latent_value *find_job(const latent_value *jobs, const char *name) {
        char id[FORMAT_MAX];

        for (size_t i = 0; i < latent_value_count(jobs); i++) {
                const latent_value *v = latent_value_at(jobs, i);
                const char *path = get_string(v, "path");

                if (strcmp(path, name) == 0 || strcmp(format_id(path, id), name) == 0)
                        return v;
        }

        return NULL;
}

static int cancel(
        const Ctl *c, latent_client *client, const latent_value *jobs, const char *name, latent_error *e) {
        const latent_value *job = find_job(jobs, name);
        int r;

        if (!job)
                return ctl_error(e, -ENOENT, LATENT_ERROR_NOT_FOUND,
                        "You have no job %s. latentctl jobs lists yours.", name);

        r = latent_client_cancel_job(client, get_string(job, "path"), e);
        if (r < 0)
                return r;
        if (c->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_string(&w, "cancelled", get_string(job, "path"));
                json_writer_string(&w, "state_before", get_string(job, "State"));
                json_writer_line(&w);
        }
        return 0;
}

/* name NULL: list. */
static int jobs_run(const Ctl *c, const char *name, latent_error *e) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        CLEANUP(latent_value_freep) latent_value *jobs = NULL;
        int r;

        r = run_connect(c, &client, e);
        if (r < 0)
                return r;
        r = latent_client_jobs(client, &jobs, e);
        if (r < 0)
                return r;
        if (name)
                return cancel(c, client, jobs, name, e);

        if (c->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_value(&w, "jobs", jobs);
                json_writer_line(&w);
        } else
                print_jobs(jobs);
        return 0;
}

static int verb_any(Ctl *c, const Verb *verb, int argc, char *argv[], size_t n_operands) {
        const char *operands[1] = {NULL};
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, n_operands, n_operands, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        r = jobs_run(c, operands[0], &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}

int verb_jobs(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        return verb_any(c, verb, argc, argv, 0);
}

int verb_cancel(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        return verb_any(c, verb, argc, argv, 1);
}
