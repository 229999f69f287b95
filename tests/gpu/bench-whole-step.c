/* SPDX-License-Identifier: Apache-2.0 */

/* Whole steps through the service, one at a time, when told to: `pair` runs it beside a peer that works the same way.
 *
 *     bench-whole-step MODEL CASE... [--compute auto|f32|bf16] [--ranks N] [--exchange auto|host|p2p|nccl] [--chunks N] [--foretell]
 *                                            (the service: tests/with-latentd)
 *
 * Loads MODEL, opens a session with all cases in it and says {"ready": 1, ...}. A line FRAMES on stdin runs one step
 * of the case of so many frames and prints one line of JSON: n (rows), s (seconds of the step by the worker), wall_s
 * (from before the call until the result can be read), queued_s, crc (of the velocities: equal steps, equal bits), rms of
 * both, what the model has on the device, and every number of the job's result by its name. --foretell: and foretold-usec, what the
 * service said just before that it would take (0: it did not know). A line "release" ends the worker, so
 * that the next step starts another (ReleaseGpus). */

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/ctl.h"
#include "client/latentctl/inputs.h"
#include "client/latentctl/json-writer.h"
#include "client/latentctl/report.h"
#include "client/latentctl/tensor-file.h"
#include "service/shared/clock.h"
#include "service/shared/crc32c.h"

#define CASES_MAX 16

typedef struct Case {
        TensorFile file;
        Inputs inputs;
        uint64_t frames;
        latent_step_options step;
} Case;

typedef struct Bench {
        Case cases[CASES_MAX];
        size_t n_cases;
        latent_client *client;
        latent_model *model;
        latent_session *session;
        bool foretell;
} Bench;

/* Figures of a run in which something failed would mean nothing. */
static void check(int r, const char *doing, const latent_error *e) {
        if (r >= 0)
                return;
        (void) fprintf(stderr, "bench-whole-step: %s: %s\n", doing, e ? e->text : strerror(-r));
        exit(1);
}

static void open_case(Case *c, const char *path) {
        const char *frames;
        latent_error e;

        check(tensor_file_open(path, &c->file, &e), path, &e);
        check(inputs_find(&c->file, false, &c->inputs, &e), path, &e);
        c->step.struct_size = sizeof(c->step);
        check(inputs_sigma(&c->file, "sigma_video", &c->step.sigma_video, &e), path, &e);
        check(inputs_sigma(&c->file, "sigma_audio", &c->step.sigma_audio, &e), path, &e);
        frames = st_header_meta(c->file.header, "frames");
        check(frames ? 0 : -ENODATA, path, NULL);
        c->frames = strtoull(frames, NULL, 10);
}

static void place_case(Bench *b, Case *c) {
        latent_error e;

        check(inputs_place(&c->file, &c->inputs, b->session, &e), "The inputs", &e);
        c->step.text = inputs_get(&c->inputs, INPUT_TEXT);
        c->step.text_tags = inputs_get(&c->inputs, INPUT_TEXT_TAGS);
        c->step.video = inputs_get(&c->inputs, INPUT_VIDEO);
        c->step.audio = inputs_get(&c->inputs, INPUT_AUDIO);
        c->step.conditions = inputs_conditions(&c->inputs);
        c->step.n_conditions = c->inputs.n_conditions;
}

static void load(Bench *b, const char *path, JsonWriter *w) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        latent_client_options co = {.struct_size = sizeof(co)};
        uint64_t begin = clock_usec();
        latent_error e;

        check(latent_client_new(&co, &b->client, &e), "Connecting", &e);
        check(latent_model_load_path(b->client, path, NULL, &job, &e), "Loading", &e);
        check(latent_job_wait(job, UINT64_MAX, NULL, NULL, &e), "Loading", &e);
        check(latent_job_model(job, &b->model, &e), "The model", &e);
        json_writer_double(w, "load_s", (double) (clock_usec() - begin) / 1e6);
        json_writer_uint(w, "bytes_read", get_uint(latent_job_result(job), "bytes-read"));
}

static void open_session(Bench *b, latent_session_options so) {
        latent_error e;

        for (size_t i = 0; i < b->n_cases; i++) {
                const Inputs *in = &b->cases[i].inputs;
                uint64_t output = latent_output_bytes(&in->tensor[INPUT_VIDEO], &in->tensor[INPUT_AUDIO], NULL, 1, 0);

                so.input_bytes += inputs_bytes(in);
                if (output > so.output_bytes)
                        so.output_bytes = output;
        }
        check(latent_session_open(b->client, b->model, &so, &b->session, &e), "The session", &e);
        for (size_t i = 0; i < b->n_cases; i++)
                place_case(b, b->cases + i);
}

/* NaN shows as null. */
static uint32_t write_result(JsonWriter *w, const latent_job *job, const char *name, const char *key, uint32_t crc) {
        const float *data;
        const void *bytes;
        double sum = 0;
        latent_tensor t;
        latent_error e;

        check(latent_job_tensor(job, name, &t, &bytes, &e), name, &e);
        data = bytes;
        for (uint64_t i = 0; i < t.size / sizeof(*data); i++)
                sum += (double) data[i] * (double) data[i];
        json_writer_double(w, key, sqrt(sum / ((double) t.size / sizeof(*data))));
        return crc32c(crc, bytes, t.size);
}

static bool is_number(const latent_value *v) {
        int type = latent_value_type(v);

        return type == LATENT_VALUE_UINT || type == LATENT_VALUE_INT || type == LATENT_VALUE_DOUBLE;
}

static void write_model(JsonWriter *w, const Bench *b) {
        latent_value *v;
        latent_error e;

        check(latent_model_properties(b->model, &v, &e), "The model", &e);
        json_writer_uint(w, "device-blocks", get_uint(v, "DeviceBlocks"));
        json_writer_uint(w, "device-bytes", get_uint(v, "DeviceBytes"));
        latent_value_free(v);
}

static void release(Bench *b) {
        JsonWriter w = {.file = stdout};
        latent_error e;

        check(latent_client_release_gpus(b->client, &e), "Releasing", &e);
        json_writer_object(&w, NULL);
        json_writer_uint(&w, "released", 1);
        json_writer_line(&w);
        (void) fflush(stdout);
}

/* Microseconds, 0: nothing like it was run yet. */
static uint64_t foretell(const Bench *b, const Case *c) {
        latent_value *plan;
        latent_error e;
        uint64_t usec;

        check(latent_session_plan_step(b->session, &c->step, &plan, &e), "The plan", &e);
        usec = get_uint(plan, "step-usec");
        latent_value_free(plan);
        return usec;
}

static void run(Bench *b, const Case *c) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        JsonWriter w = {.file = stdout};
        const latent_value *result;
        latent_error e;
        uint64_t foretold = b->foretell ? foretell(b, c) : 0, begin = clock_usec(), wall;
        uint32_t crc;

        check(latent_session_step(b->session, &c->step, &job, &e), "Starting a step", &e);
        check(latent_job_wait(job, UINT64_MAX, NULL, NULL, &e), "The step", &e);
        wall = clock_usec() - begin;

        result = latent_job_result(job);
        json_writer_object(&w, NULL);
        json_writer_uint(&w, "frames", c->frames);
        json_writer_uint(&w, "n", get_uint(result, "rows"));
        json_writer_double(&w, "s", (double) get_uint(result, "compute-usec") / 1e6);
        json_writer_double(&w, "wall_s", (double) wall / 1e6);
        json_writer_double(&w, "queued_s", (double) get_uint(result, "queued-usec") / 1e6);
        crc = write_result(&w, job, "video_velocity", "video_rms", 0);
        crc = write_result(&w, job, "audio_velocity", "audio_rms", crc);
        json_writer_uint(&w, "crc", crc);
        if (b->foretell)
                json_writer_uint(&w, "foretold-usec", foretold);
        write_model(&w, b);
        for (size_t i = 0; i < latent_value_count(result); i++)
                if (is_number(latent_value_at(result, i)))
                        json_writer_value(&w, latent_value_key_at(result, i), latent_value_at(result, i));
        json_writer_line(&w);
        (void) fflush(stdout);
}

static void serve(Bench *b) {
        char line[64];

        while (fgets(line, sizeof(line), stdin)) {
                uint64_t frames = strtoull(line, NULL, 10);
                size_t i = 0;

                if (strcmp(line, "release\n") == 0) {
                        release(b);
                        continue;
                }
                while (i < b->n_cases && b->cases[i].frames != frames)
                        i++;
                check(i < b->n_cases ? 0 : -ENOENT, "A case of so many frames", NULL);
                run(b, b->cases + i);
        }
}

int main(int argc, char *argv[]) {
        static const struct option options[] = {{"compute", required_argument, NULL, 'c'}, {"ranks", required_argument, NULL, 'r'},
                {"exchange", required_argument, NULL, 'e'}, {"chunks", required_argument, NULL, 'n'},
                {"sparse", required_argument, NULL, 's'}, {"foretell", no_argument, NULL, 'f'}, {}};
        static Bench b;
        JsonWriter w = {.file = stdout};
        latent_session_options so = {.struct_size = sizeof(so), .compute = "auto"};
        int o;

        while ((o = getopt_long(argc, argv, "", options, NULL)) != -1 && o != '?')
                if (o == 'c')
                        so.compute = optarg;
                else if (o == 'e')
                        so.exchange = optarg;
                else if (o == 'n')
                        so.chunks = (uint32_t) atoi(optarg);
                else if (o == 's')
                        so.sparse = optarg;
                else if (o == 'f')
                        b.foretell = true;
                else
                        so.ranks = (uint32_t) atoi(optarg);
        if (o != -1 || argc - optind < 2 || argc - optind - 1 > CASES_MAX) {
                (void) fprintf(stderr, "usage: bench-whole-step MODEL CASE... [--compute auto|f32|bf16] [--ranks N] "
                                       "[--exchange auto|host|p2p|nccl] [--chunks N] [--sparse METHOD[:KEY=VALUE,...]] [--foretell]\n");
                return 2;
        }
        for (int i = optind + 1; i < argc; i++)
                open_case(b.cases + b.n_cases++, argv[i]);

        json_writer_object(&w, NULL);
        load(&b, argv[optind], &w);
        open_session(&b, so);
        json_writer_uint(&w, "ready", 1);
        json_writer_line(&w);
        (void) fflush(stdout);
        serve(&b);

        for (size_t i = 0; i < b.n_cases; i++)
                tensor_file_done(&b.cases[i].file);
        latent_session_free(b.session);
        latent_model_free(b.model);
        latent_client_free(b.client);
        return 0;
}
