/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/compute-job.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/latentctl/progress.h"
#include "client/latentctl/report.h"
#include "client/latentctl/results.h"
#include "client/latentctl/run.h"
#include "client/latentctl/same-file.h"
#include "service/shared/clock.h"
#include "service/shared/sparse.h"

static void compute_done(ComputeJob *j) {
        loras_done(&j->loras);
        latent_job_free(j->job);
        latent_session_free(j->session);
        latent_model_free(j->model);
        latent_client_free(j->client);
        tensor_file_done(&j->file);
        output_done(&j->output);
}

static uint64_t restart_sec(const ComputeJob *j) {
        return j->options->has_restart ? j->options->restart_sec : RESTART_SEC;
}

static bool is_made(const char *noise) {
        return noise && strcmp(noise, "given") != 0;
}

int compute_check_sparse(const char *text, latent_error *e) {
        SparseOptions unused;
        Fault f = {};
        int r;

        r = text ? sparse_parse(text, &unused, &f) : 0;
        return r < 0 ? ctl_error(e, r, CTL_ERROR_USAGE, "%s", f.text) : 0;
}

static int check_options(const ComputeOptions *o, latent_error *e) {
        bool made = is_made(o->noise) || is_made(o->condition_noise);

        if (!o->output)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "-o OUT.safetensors is missing");
        if (compute_check_sparse(o->sparse, e) < 0)
                return -EINVAL;
        if (made && !o->has_seed)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--seed N is missing: the service makes noise from it (%s %s)",
                        is_made(o->noise) ? "--noise" : "--condition-noise", is_made(o->noise) ? o->noise : o->condition_noise);
        if (!made && o->has_seed)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE,
                        "--seed is for noise that the service makes, and nothing here asks for it");
        return 0;
}

static int check_apart(const ComputeJob *j, latent_error *e) {
        NamedFile files[3 + STRINGS_MAX] = {
                {"-o", j->options->output, .output = true},
                {"IN", j->options->input},
                {"MODEL", j->options->model, .model = true},
        };

        return same_file_check(files, 3 + loras_name(&j->loras, files + 3), e);
}

int compute_open_files(ComputeJob *j, bool is_sample, latent_error *e) {
        int r;

        r = check_options(j->options, e);
        if (r < 0)
                return r;
        r = loras_parse(&j->options->loras, &j->loras, e);
        if (r < 0)
                return r;

        r = tensor_file_open(j->options->input, &j->file, e);
        if (r < 0)
                return r;
        r = inputs_find(&j->file, is_sample, &j->inputs, e);
        if (r >= 0)
                r = check_apart(j, e);
        if (r < 0)
                return r;

        return output_open(j->options->output, &j->output, e);
}

static int connect_once(ComputeJob *j, latent_error *e) {
        latent_client_options o = j->ctl->bus;
        uint64_t sec = restart_sec(j);

        if (j->client)
                return 0;

        if (sec == 0)
                o.flags |= LATENT_CLIENT_NO_RESUME;
        o.restart_timeout_sec = (uint32_t) sec;
        return latent_client_new(&o, &j->client, e);
}

static int open_session(ComputeJob *j, const ComputeSize *size, latent_error *e) {
        latent_load_options load = {.struct_size = sizeof(load), .qkv_order = j->options->qkv_order};
        latent_session_options o = {.struct_size = sizeof(o), .compute = j->options->compute, .sparse = j->options->sparse};
        CLEANUP(latent_job_freep) latent_job *loaded = NULL;
        int r;

        o.input_bytes = inputs_bytes(&j->inputs);
        o.output_bytes = latent_output_bytes(
                &j->inputs.tensor[INPUT_VIDEO], &j->inputs.tensor[INPUT_AUDIO], size->sampler, size->steps, size->keep_steps);
        if (o.output_bytes == UINT64_MAX)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%u steps of this size are more than memory can hold.", size->steps);

        r = connect_once(j, e);
        if (r < 0)
                return r;
        r = run_open_model(j->ctl, j->client, j->options->model, &load, &j->model, &loaded, e);
        if (r < 0)
                return r;
        if (loaded)
                j->bytes_read = get_uint(latent_job_result(loaded), "bytes-read");

        r = latent_session_open(j->client, j->model, &o, &j->session, e);
        if (r < 0)
                return r;
        r = loras_set(&j->loras, j->ctl, j->client, j->session, e);
        if (r < 0)
                return r;
        return inputs_place(&j->file, &j->inputs, j->session, e);
}

/* A running job is taken up by the library; before that everything is done again here. */
int compute_start(ComputeJob *j, const ComputeSize *size, ComputeStart start, const void *userdata, latent_error *e) {
        uint64_t until = 0;
        int r;

        run_catch_signals();
        for (;;) {
                r = open_session(j, size, e);
                if (r >= 0)
                        r = start(j, userdata, e);
                if (r >= 0 || run_interrupted())
                        return r;

                /* Who never saw it wants to hear that it is not there, and waits only if asked to. */
                if (r != -ECONNRESET && !(r == -ENOTCONN && (j->client || j->options->has_restart)))
                        return r;
                if (restart_sec(j) == 0 || (until > 0 && clock_usec() >= until))
                        return r;
                if (until == 0) {
                        progress_restart(j->client);
                        until = clock_usec() + restart_sec(j) * 1000000;
                }

                loras_forget(&j->loras);
                latent_session_free(STEAL_PTR(j->session));
                latent_model_free(STEAL_PTR(j->model));
                (void) usleep(100000);
        }
}

/* What auto means is part of the interface: bf16. */
static const char *compute_used(const ComputeJob *j) {
        const char *s = j->options->compute;

        return s && strcmp(s, "auto") != 0 ? s : "bf16";
}

int compute_finish(ComputeJob *j, const char *label, latent_error *e) {
        int r;

        r = run_wait(j->ctl, j->job, label, e);
        if (r < 0)
                return r;

        r = results_write(&j->output, j->job, compute_used(j), e);
        if (r < 0)
                return r;
        return output_commit(&j->output, e);
}

/* Says what was done. */
static void compute_report(const ComputeJob *j) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        const latent_value *result = latent_job_result(j->job);
        const char *numerics = get_string(result, "numerics");
        uint64_t rows = get_uint(result, "rows"), usec;
        char buf[FORMAT_MAX];

        /* The file is there; figures that cannot be had any more are no failure. */
        (void) latent_job_properties(j->job, &v, NULL);
        usec = get_uint(v, "ComputeUsec");

        if (j->ctl->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_string(&w, "output", j->options->output);
                json_writer_uint(&w, "rows", rows);
                json_writer_string(&w, "numerics", numerics);
                json_writer_string(&w, "compute", compute_used(j));
                json_writer_uint(&w, "compute_usec", usec);
                json_writer_uint(&w, "queued_usec", get_uint(v, "QueuedUsec"));
                json_writer_uint(&w, "retries", get_uint(v, "Retries"));
                json_writer_uint(&w, "bytes_read", j->bytes_read);
                loras_report(&j->loras, &w);
                json_writer_line(&w);
        } else
                (void) printf("%s: %" PRIu64 " rows in %s, %s, %s\n", j->options->output, rows,
                        format_usec(usec, buf), compute_used(j), numerics);
}

int compute_verb(Ctl *c, const Verb *verb, int argc, char *argv[], const Option *options, size_t n_options,
        ComputeOptions *o, ComputeRun run, void *userdata) {
        CLEANUP(compute_done) ComputeJob j = {.ctl = c, .options = o};
        const char *operands[2];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, n_options, 2, 2, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        o->model = operands[0];
        o->input = operands[1];
        r = run_outcome(run(&j, userdata, &e), &e);
        if (r < 0)
                return report_error(c, verb, &e);

        compute_report(&j);
        return STATUS_OK;
}
