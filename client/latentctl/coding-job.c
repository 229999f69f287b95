/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/coding-job.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/latentctl/compute-job.h"
#include "client/latentctl/progress.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"
#include "service/shared/clock.h"

#define ARENA_MIN 4096u
#define TEXT_MAX (UINT64_C(4) << 20) /* as the service takes it */

void coding_next(CodingJob *j) {
        latent_job_free(STEAL_PTR(j->job));
        latent_session_free(STEAL_PTR(j->session));
        latent_model_free(STEAL_PTR(j->model));
}

void coding_done(CodingJob *j) {
        coding_next(j);
        latent_client_free(STEAL_PTR(j->client));
}

static uint64_t restart_sec(const CodingJob *j) {
        return j->options->has_restart ? j->options->restart_sec : RESTART_SEC;
}

int coding_check_options(const CodingOptions *o, latent_error *e) {
        if (!o->output)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "-o OUT.safetensors is missing");
        return 0;
}

int coding_open_output(const CodingOptions *o, const NamedFile *inputs, size_t n, Output *ret, latent_error *e) {
        NamedFile files[3 + CODING_INPUTS_MAX] = {
                {"-o", o->output, .output = true},
                {"MODEL", o->model, .model = true},
                {"--tokenizer", o->tokenizer, .model = true},
        };
        int r;

        memcpy(files + 3, inputs, n * sizeof(*inputs));
        r = same_file_check(files, 3 + n, e);
        return r < 0 ? r : output_open(o->output, ret, e);
}

static int connect_once(CodingJob *j, latent_error *e) {
        latent_client_options o = j->ctl->bus;
        uint64_t sec = restart_sec(j);

        if (j->client)
                return 0;

        if (sec == 0)
                o.flags |= LATENT_CLIENT_NO_RESUME;
        o.restart_timeout_sec = (uint32_t) sec;
        return latent_client_new(&o, &j->client, e);
}

static bool is_below(const char *directory, const char *name) {
        CLEANUP_FREE char *path = NULL;

        if (asprintf(&path, "%s/%s", directory, name) < 0) {
                path = NULL;
                return false;
        }

        return access(path, F_OK) >= 0;
}

/* A directory of this machine with parts in it. */
static bool is_pipeline(const char *name) {
        return is_below(name, "model_index.json") || is_below(name, "transformer");
}

static int open_part(CodingJob *j, const char *part, latent_error *e) {
        latent_load_options load = {.struct_size = sizeof(load), .flags = j->options->defer ? LATENT_LOAD_DEFER : 0,
                .tokenizer = j->options->tokenizer};
        CLEANUP_FREE char *inside = NULL;

        if (asprintf(&inside, "%s/%s", j->options->model, part) < 0) {
                inside = NULL;
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }

        return run_open_model(j->ctl, j->client, inside, &load, &j->model, NULL, e);
}

static int open_itself(CodingJob *j, latent_error *e) {
        latent_load_options load = {.struct_size = sizeof(load), .flags = j->options->defer ? LATENT_LOAD_DEFER : 0,
                .tokenizer = j->options->tokenizer};

        return run_open_model(j->ctl, j->client, j->options->model, &load, &j->model, NULL, e);
}

/* Only the service knows what lies below its ModelPath=. Numbers and paths of objects name models in use. */
static bool may_have_parts(const char *name) {
        return name[0] != '/' && strspn(name, "0123456789") < strlen(name);
}

int coding_open_model(CodingJob *j, const char *part, latent_error *e) {
        const char *name = j->options->model;
        int r;

        latent_model_free(STEAL_PTR(j->model));
        r = connect_once(j, e);
        if (r < 0)
                return r;

        if (access(name, F_OK) >= 0) {
                if (is_below(name, part))
                        return open_part(j, part, e);
                if (is_pipeline(name)) /* not its largest part instead */
                        return ctl_error(e, -ENOENT, LATENT_ERROR_NOT_FOUND, "%s has no folder %s.", name, part);
        } else if (may_have_parts(name)) {
                r = open_part(j, part, e);
                if (r != -ENOENT)
                        return r;
        }

        return open_itself(j, e);
}

static int has_part(CodingJob *j, const char *part, latent_error *e) {
        int r;

        r = open_part(j, part, e);
        latent_model_free(STEAL_PTR(j->model));
        return r == -ENOENT ? 0 : r < 0 ? r : 1;
}

int coding_single_kind(CodingJob *j, CodingKind *ret, latent_error *e) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        const char *name = j->options->model, *kind;
        int r = 0;

        *ret = CODING_BOTH;
        if (is_below(name, "vae") || is_below(name, "audio_vae"))
                return 0;

        r = connect_once(j, e);
        if (r >= 0 && access(name, F_OK) < 0 && may_have_parts(name)) {
                r = has_part(j, "vae", e);
                if (r == 0)
                        r = has_part(j, "audio_vae", e);
                if (r != 0)
                        return r < 0 ? r : 0;
        }
        if (r >= 0)
                r = open_itself(j, e);
        if (r >= 0)
                r = latent_model_properties(j->model, &v, e);
        if (r < 0)
                return r;

        kind = get_string(v, "Kind");
        if (strcmp(kind, "video-vae") != 0 && strcmp(kind, "audio-vae") != 0)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%s is of kind %s; expected a VAE, or a pipeline with vae/ or audio_vae/ in it.", name, kind);
        *ret = kind[0] == 'v' ? CODING_VIDEO : CODING_AUDIO;
        return 0;
}

int coding_nothing_for(const CodingJob *j, CodingKind kind, const char *input, latent_error *e) {
        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR, "%s has nothing for %s, which is for %s.", input, j->options->model,
                kind == CODING_VIDEO ? "pictures" : "sound");
}

static int open_session(CodingJob *j, const CodingWork *w, uint64_t output_bytes, latent_error *e) {
        latent_session_options o = {.struct_size = sizeof(o), .compute = j->options->compute};
        int r;

        o.input_bytes = w->input_bytes > ARENA_MIN ? w->input_bytes : ARENA_MIN;
        o.output_bytes = output_bytes > ARENA_MIN ? output_bytes : ARENA_MIN;
        latent_session_free(STEAL_PTR(j->session));
        r = latent_session_open(j->client, j->model, &o, &j->session, e);
        return r < 0 ? r : w->place(w->userdata, j->session, e);
}

static int try_to_start(CodingJob *j, void *userdata, latent_error *e) {
        CLEANUP(latent_value_freep) latent_value *plan = NULL;
        const CodingWork *w = userdata;
        uint64_t output_bytes = w->output_bytes;
        int r;

        r = coding_open_model(j, w->part, e);
        if (r >= 0 && output_bytes == 0) {
                r = open_session(j, w, ARENA_MIN, e);
                if (r >= 0)
                        r = w->plan(w->userdata, j->session, &plan, e);
                if (r >= 0)
                        output_bytes = get_uint(plan, "output-bytes");
        }
        if (r >= 0)
                r = open_session(j, w, output_bytes, e);
        return r < 0 ? r : w->start(w->userdata, j->session, &j->job, e);
}

/* A running job is taken up by the library; before that everything is done again here. */
int coding_retry(CodingJob *j, CodingAttempt attempt, void (*forget)(void *userdata), void *userdata, latent_error *e) {
        uint64_t until = 0;
        int r;

        run_catch_signals();
        for (;;) {
                r = attempt(j, userdata, e);
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

                coding_next(j);
                if (forget)
                        forget(userdata);
                (void) usleep(100000);
        }
}

int coding_start(CodingJob *j, const CodingWork *w, latent_error *e) {
        return coding_retry(j, try_to_start, NULL, (void *) w, e);
}

/* Of several ranks: who has made what. */
static void print_tiles(const latent_value *tiles) {
        for (size_t i = 0; latent_value_count(tiles) > 1 && i < latent_value_count(tiles); i++) {
                uint64_t n = 0;

                (void) latent_value_as_uint(latent_value_at(tiles, i), &n);
                (void) printf("%s%" PRIu64, i == 0 ? ", tiles by rank: " : " ", n);
        }
}

void coding_report(const CodingJob *j, const latent_job *job) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        const latent_value *result = latent_job_result(job), *cached = latent_value_get(result, "cached"),
                           *tiles = latent_value_get(result, "rank-tiles");
        const char *numerics = get_string(result, "numerics");
        uint64_t rows = get_uint(result, "rows"), usec = get_uint(result, "compute-usec");
        char buf[FORMAT_MAX];

        /* The file is there; figures that cannot be had any more are no failure. */
        (void) latent_job_properties((latent_job *) job, &v, NULL);
        if (j->ctl->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_string(&w, "output", j->options->output);
                json_writer_uint(&w, "rows", rows);
                json_writer_string(&w, "numerics", numerics);
                json_writer_uint(&w, "compute_usec", usec);
                json_writer_uint(&w, "queued_usec", get_uint(result, "queued-usec"));
                json_writer_uint(&w, "retries", get_uint(v, "Retries"));
                if (latent_value_get(result, "frames"))
                        json_writer_uint(&w, "frames", get_uint(result, "frames"));
                if (tiles)
                        json_writer_value(&w, "rank_tiles", tiles);
                if (cached)
                        json_writer_value(&w, "cached", cached);
                json_writer_line(&w);
        } else {
                (void) printf("%s: %" PRIu64 " rows in %s%s, %s", j->options->output, rows, format_usec(usec, buf),
                        latent_value_as_bool(cached) > 0 ? " (from the cache)" : "", numerics);
                print_tiles(tiles);
                (void) printf("\n");
        }
}

int coding_tensor(const TensorFile *f, const StTensor *t, latent_tensor *ret, latent_error *e) {
        latent_tensor x = {.n_dims = t->n_dims, .size = t->size};

        if (t->n_dims > LATENT_DIMS_MAX)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR, "%s: %s has %u dimensions; expected at most %d.", f->path,
                        t->name, t->n_dims, LATENT_DIMS_MAX);

        (void) snprintf(x.dtype, sizeof(x.dtype), "%s", st_type_name(t->type));
        memcpy(x.shape, t->shape, t->n_dims * sizeof(t->shape[0]));
        *ret = x;
        return 0;
}

int coding_place(const TensorFile *f, const StTensor *t, latent_tensor *tensor, latent_session *s, latent_error *e) {
        void *data;
        int r;

        r = latent_session_allocate(s, tensor, &data, e);
        return r < 0 ? r : tensor_file_read(f, t, data, e);
}

static int read_stdin(char **ret, size_t *ret_size, latent_error *e) {
        CLEANUP_FREE char *text = malloc(TEXT_MAX + 1);
        size_t n = 0;

        if (!text)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");

        while (n <= TEXT_MAX) {
                ssize_t k = read(STDIN_FILENO, text + n, TEXT_MAX + 1 - n);

                if (k < 0 && errno == EINTR && !run_interrupted())
                        continue;
                if (k < 0)
                        return ctl_error(e, -errno, LATENT_ERROR_IO, "Standard input cannot be read: %s.", strerror(errno));
                if (k == 0)
                        break;
                n += (size_t) k;
        }

        *ret = STEAL_PTR(text);
        *ret_size = n;
        return 0;
}

int coding_text(const char *text, char **ret, size_t *ret_size, latent_error *e) {
        CLEANUP_FREE char *copy = NULL;
        size_t n = strlen(text);
        int r;

        if (strcmp(text, "-") == 0) {
                r = read_stdin(&copy, &n, e);
                if (r < 0)
                        return r;
        } else {
                copy = strdup(text);
                if (!copy)
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }
        if (n > TEXT_MAX)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "The text has more than %" PRIu64 " bytes.", TEXT_MAX);

        *ret = STEAL_PTR(copy);
        *ret_size = n;
        return 0;
}

int coding_place_text(const char *text, size_t size, latent_tensor *tensor, latent_session *s, latent_error *e) {
        void *data;
        int r;

        *tensor = (latent_tensor){.dtype = "U8", .n_dims = 1, .shape = {size}};
        r = latent_session_allocate(s, tensor, &data, e);
        if (r < 0)
                return r;

        memcpy(data, text, size);
        return 0;
}
