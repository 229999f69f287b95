/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl tokenize: a text's tokens. */

#include <inttypes.h>
#include <stdio.h>

#include "client/latentctl/coding-job.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

typedef struct Tokenize {
        char *text;
        size_t size;
        latent_tensor tensor;
} Tokenize;

static int tokenize_place(void *userdata, latent_session *s, latent_error *e) {
        Tokenize *t = userdata;

        return t->size > 0 ? coding_place_text(t->text, t->size, &t->tensor, s, e) : 0;
}

static int tokenize_start(void *userdata, latent_session *s, latent_job **ret, latent_error *e) {
        latent_tokenize_options o = {.struct_size = sizeof(o)};
        Tokenize *t = userdata;

        o.text = t->size > 0 ? &t->tensor : NULL;
        return latent_session_tokenize(s, &o, ret, e);
}

static int print_ids(const CodingJob *j, latent_error *e) {
        const int32_t *ids;
        latent_tensor t;
        const void *data;
        int r;

        r = latent_job_tensor(j->job, "ids", &t, &data, e);
        if (r < 0)
                return r;

        ids = data;
        if (j->ctl->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_list(&w, "ids");
                for (uint64_t i = 0; i < t.size / sizeof(*ids); i++)
                        json_writer_uint(&w, NULL, (uint64_t) ids[i]);
                json_writer_end(&w);
                json_writer_uint(&w, "count", t.size / sizeof(*ids));
                json_writer_string(&w, "numerics", get_string(latent_job_result(j->job), "numerics"));
                json_writer_line(&w);
                return 0;
        }

        for (uint64_t i = 0; i < t.size / sizeof(*ids); i++)
                (void) printf("%s%" PRIi32, i > 0 ? " " : "", ids[i]);
        (void) printf("\n");
        return 0;
}

static int run(CodingJob *j, const char *text, latent_error *e) {
        Tokenize t = {};
        CLEANUP_FREE char *owned = NULL;
        CodingWork w = {.part = "text_encoder", .place = tokenize_place, .start = tokenize_start, .userdata = &t};
        int r;

        r = coding_text(text, &owned, &t.size, e);
        if (r < 0)
                return r;

        /* No token is shorter than a byte of the text in NFC, which is at most three times as long. */
        t.text = owned;
        w.input_bytes = t.size + LATENT_ALIGNMENT;
        w.output_bytes = 12 * (uint64_t) t.size + 65536;
        r = coding_start(j, &w, e);
        if (r >= 0)
                r = run_wait(j->ctl, j->job, "tokenizing", e);
        return r < 0 ? r : print_ids(j, e);
}

int verb_tokenize(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CodingOptions o = {};
        const Option options[] = {
                {"tokenizer", OPTION_STRING, &o.tokenizer, NULL, '\0'},
        };
        CLEANUP(coding_done) CodingJob j = {.ctl = c, .options = &o};
        const char *operands[2];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 2, 2, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        o.model = operands[0];
        r = run_outcome(run(&j, operands[1], &e), &e);
        return r < 0 ? report_error(c, verb, &e) : STATUS_OK;
}
