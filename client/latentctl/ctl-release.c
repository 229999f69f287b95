/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl release: the devices' memory back from idle workers. */

#include <stdio.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

int verb_release(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        JsonWriter w = {.file = stdout};
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, NULL, 0, 0, 0, NULL, &e);
        if (r >= 0 && c->help) {
                report_help(verb);
                return STATUS_OK;
        }
        if (r >= 0)
                r = run_connect(c, &client, &e);
        if (r >= 0)
                r = latent_client_release_gpus(client, &e);
        if (r < 0)
                return report_error(c, verb, &e);

        if (c->json) {
                json_writer_object(&w, NULL);
                json_writer_line(&w);
        } else
                (void) printf("Idle workers give back the memory of their devices.\n");
        return STATUS_OK;
}
