/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl doctor: checks this machine and the service. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/doctor-checks.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

static const char *const level_names[] = {
        [LEVEL_OK] = "ok",
        [LEVEL_WARNING] = "warning",
        [LEVEL_PROBLEM] = "problem",
};

static void check_service(Findings *f, latent_client *client) {
        CLEANUP(latent_value_freep) latent_value *status = NULL, *devices = NULL, *regions = NULL;
        latent_error e;

        if (latent_client_status(client, &status, &e) < 0 ||
                latent_client_devices(client, &devices, &e) < 0 ||
                latent_client_regions(client, &regions, &e) < 0) {
                finding_add(f, "service", LEVEL_PROBLEM,
                        strcmp(e.name, LATENT_ERROR_ACCESS_DENIED) == 0
                                ? "Add this user to AllowedUsers= in latentd.conf."
                                : "journalctl -u latentd says more.",
                        "%s", e.text);
                return;
        }

        finding_add(f, "service", LEVEL_OK, "", "answers");
        check_version(f, status);
        check_state(f, status);
        check_sandbox(f, status);
        check_headroom(f, status);
        check_stuck(f, get_uint(status, "StuckReads"));
        check_devices(f, devices);
        check_device_reason(f, status);
        check_parts(f, devices);
        check_device_notes(f, status);
        check_links(f, "", devices);
        check_kernels(f, devices);
        check_cache(f, regions);
        check_locked(f, regions);
        check_numa_applied(f, regions);
}

static size_t count(const Findings *f, Level level) {
        size_t n = 0;

        for (size_t i = 0; i < f->n; i++)
                n += f->list[i].level == level;
        return n;
}

static void print_findings(const Findings *f) {
        size_t problems = count(f, LEVEL_PROBLEM), warnings = count(f, LEVEL_WARNING);

        for (size_t i = 0; i < f->n; i++) {
                const Finding *x = &f->list[i];

                (void) printf("%-8s %-14s %s\n", level_names[x->level], x->name, x->text);
                if (x->advice[0] != '\0')
                        (void) printf("%-8s %-14s -> %s\n", "", "", x->advice);
        }
        (void) printf("%zu problem%s, %zu warning%s\n", problems, problems == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s");
}

static void print_findings_json(const Findings *f) {
        JsonWriter w = {.file = stdout};

        json_writer_object(&w, NULL);
        json_writer_list(&w, "checks");
        for (size_t i = 0; i < f->n; i++) {
                json_writer_object(&w, NULL);
                json_writer_string(&w, "check", f->list[i].name);
                json_writer_string(&w, "level", level_names[f->list[i].level]);
                json_writer_string(&w, "text", f->list[i].text);
                json_writer_string(&w, "advice", f->list[i].advice);
                json_writer_end(&w);
        }
        json_writer_end(&w);
        json_writer_uint(&w, "problems", count(f, LEVEL_PROBLEM));
        json_writer_uint(&w, "warnings", count(f, LEVEL_WARNING));
        json_writer_line(&w);
}

int verb_doctor(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        Findings f = {};
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, 0, 0, NULL, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        check_memory(&f, "");
        check_huge_pages(&f, "");
        check_io_uring(&f, "");
        check_numa(&f, "");
        if (run_connect(c, &client, &e) < 0)
                finding_add(&f, "bus", LEVEL_PROBLEM, "", "%s", e.text);
        else {
                finding_add(
                        &f, "bus", LEVEL_OK, "", "reachable, and the service is there or can be started");
                check_service(&f, client);
        }

        if (c->json)
                print_findings_json(&f);
        else
                print_findings(&f);
        return count(&f, LEVEL_PROBLEM) > 0 ? STATUS_FAILED : STATUS_OK;
}
