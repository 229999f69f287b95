/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl parity: one step on one rank, then on every plan, transport and number of ranks that the service
 * offers; all of them must give the same bits. */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"

/* The shortest request that all ranks have a part of: rows go in tiles of 128. */
#define TILE_ROWS 128u
#define TEXT_ROWS 11u
#define AUDIO 21u      /* two rows each */
#define FRAME_ROWS 16u /* of 8 x 8 latents */
#define RANKS_MAX 64u

static const char *const plans[] = {"hidden-gather", "kv-gather", "qkv-all-to-all"};
static const char *const exchanges[] = {"host", "p2p", "nccl"};

typedef struct ParityOptions {
        const char *compute, *qkv_order;
} ParityOptions;

/* How a step was split and what it gave. */
typedef struct Outcome {
        uint32_t asked; /* ranks */
        const char *plan, *exchange;
        uint64_t ranks, chunks, bytes, usec, rows;
        uint64_t n, n_different; /* values */
} Outcome;

typedef struct Parity {
        const Ctl *ctl;
        const ParityOptions *options;
        latent_client *client;
        latent_model *model;
        uint32_t ranks;     /* offered */
        size_t n_exchanges; /* that the service has */
        uint64_t text_dim, frames;
        float *reference;   /* video, then audio velocity, of one rank */
        uint64_t n_reference;
        Outcome outcomes[1 + (RANKS_MAX - 1) * ELEMENTSOF(plans) * ELEMENTSOF(exchanges)]; /* the first on one rank */
        size_t n_outcomes;
} Parity;

static void parity_done(Parity *p) {
        latent_model_free(p->model);
        latent_client_free(p->client);
        free(p->reference);
}

/* Numbers of a fixed seed, -1.7 .. 1.7 (a deviation of about 1). */
static float next_number(uint32_t *seed) {
        *seed = *seed * 1664525u + 1013904223u;
        return (float) (int32_t) *seed / 2147483648.0f * 1.7f;
}

static int put(latent_session *s, const char *dtype, uint32_t n_dims, const uint64_t *shape, uint32_t seed,
        latent_tensor *ret, latent_error *e) {
        bool half = strcmp(dtype, "BF16") == 0;
        uint64_t n = 1;
        void *data;
        int r;

        *ret = (latent_tensor){.n_dims = n_dims};
        (void) snprintf(ret->dtype, sizeof(ret->dtype), "%s", dtype);
        for (uint32_t i = 0; i < n_dims; i++) {
                ret->shape[i] = shape[i];
                n *= shape[i];
        }
        r = latent_session_allocate(s, ret, &data, e);
        if (r < 0)
                return r;

        for (uint64_t i = 0; i < n; i++) {
                float x = next_number(&seed);
                uint32_t bits;

                memcpy(&bits, &x, sizeof(bits));
                if (half)
                        ((uint16_t *) data)[i] = (uint16_t) (bits >> 16);
                else
                        ((float *) data)[i] = x;
        }
        return 0;
}

static int start(const Parity *p, latent_session *s, latent_job **ret, latent_error *e) {
        latent_tensor text, video, audio;
        const latent_step_options o = {
                .struct_size = sizeof(o),
                .text = &text,
                .video = &video,
                .audio = &audio,
                .sigma_video = 0.75,
                .sigma_audio = 0.625,
        };
        int r;

        r = put(s, "BF16", 2, (uint64_t[]){TEXT_ROWS, p->text_dim}, 1, &text, e);
        if (r >= 0)
                r = put(s, "F32", 4, (uint64_t[]){24, p->frames, 8, 8}, 2, &video, e);
        if (r >= 0)
                r = put(s, "F32", 3, (uint64_t[]){32, 2, AUDIO}, 3, &audio, e);
        return r < 0 ? r : latent_session_step(s, &o, ret, e);
}

static int tensor_of(
        const latent_job *j, const char *name, const float **ret, uint64_t *ret_n, latent_error *e) {
        const void *data;
        latent_tensor t;
        int r;

        r = latent_job_tensor(j, name, &t, &data, e);
        if (r < 0)
                return r;

        *ret = data;
        *ret_n = t.size / sizeof(float);
        return 0;
}

/* The first one is kept, the others are compared with it, bit by bit. */
static int compare(Parity *p, const latent_job *j, Outcome *o, latent_error *e) {
        const float *video, *audio;
        uint64_t n_video, n_audio;
        int r;

        r = tensor_of(j, "video_velocity", &video, &n_video, e);
        if (r >= 0)
                r = tensor_of(j, "audio_velocity", &audio, &n_audio, e);
        if (r < 0)
                return r;

        o->n = n_video + n_audio;
        if (!p->reference) {
                p->reference = malloc(o->n * sizeof(float));
                if (!p->reference)
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
                p->n_reference = o->n;
                memcpy(p->reference, video, n_video * sizeof(float));
                memcpy(p->reference + n_video, audio, n_audio * sizeof(float));
        }
        if (o->n != p->n_reference)
                return ctl_error(e, -EPROTO, LATENT_ERROR_INTERNAL, "The results have other sizes.");

        for (uint64_t i = 0; i < o->n; i++) {
                const float *x = i < n_video ? video + i : audio + (i - n_video);

                o->n_different += memcmp(x, p->reference + i, sizeof(*x)) != 0;
        }
        return 0;
}

/* One step in a session of its own. plan, exchange: NULL: the service's choice. */
static int run_step(Parity *p, Outcome *o, latent_error *e) {
        CLEANUP(latent_session_freep) latent_session *s = NULL;
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        latent_session_options so = {
                .struct_size = sizeof(so),
                .ranks = o->asked,
                .compute = p->options->compute,
                .plan = o->plan,
                .exchange = o->exchange,
                .input_bytes = (p->frames * 24 * 64 + 64 * AUDIO) * sizeof(float) +
                               TEXT_ROWS * p->text_dim * 2 + 4096,
        };
        const latent_value *result;
        char label[64];
        int r;

        so.output_bytes = so.input_bytes;
        r = latent_session_open(p->client, p->model, &so, &s, e);
        if (r >= 0)
                r = start(p, s, &job, e);
        if (r < 0)
                return r;
        (void) snprintf(label, sizeof(label), "%" PRIu32 " rank%s, %s", o->asked, o->asked == 1 ? "" : "s",
                o->plan ? o->plan : "auto");
        r = run_wait(p->ctl, job, label, e);
        if (r < 0)
                return r;

        result = latent_job_result(job);
        o->ranks = get_uint(result, "ranks");
        o->chunks = get_uint(result, "chunks");
        o->bytes = get_uint(result, "exchanged-bytes");
        o->rows = get_uint(result, "rows");
        o->usec = get_uint(result, "compute-usec");
        return compare(p, job, o, e);
}

static int open_model(Parity *p, const char *name, latent_error *e) {
        const latent_load_options load = {.struct_size = sizeof(load), .qkv_order = p->options->qkv_order};
        CLEANUP(latent_value_freep) latent_value *model = NULL, *service = NULL, *devices = NULL;
        const char *kind;
        int r;

        r = run_connect(p->ctl, &p->client, e);
        if (r >= 0)
                r = run_open_model(p->ctl, p->client, name, &load, &p->model, NULL, e);
        if (r >= 0)
                r = latent_model_properties(p->model, &model, e);
        if (r >= 0)
                r = latent_client_status(p->client, &service, e);
        if (r >= 0)
                r = latent_client_devices(p->client, &devices, e);
        if (r < 0)
                return r;
        p->n_exchanges = strcmp(get_string(latent_value_at(devices, 0), "Kind"), "cpu") == 0    ? 1
                         : get_string(latent_value_at(devices, 0), "Nccl")[0] == '\0' ? 2
                                                                                      : ELEMENTSOF(exchanges);

        kind = latent_value_as_string(latent_value_get(model, "Kind"));
        if (kind && strcmp(kind, "lora") == 0)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%s is a LoRA adapter, no model: there is no step of it to split over ranks. Name the model that it is for.", name);

        p->text_dim = get_uint(latent_value_get(model, "Config"), "text-dim");
        p->ranks = (uint32_t) get_uint(service, "Ranks");
        if (p->text_dim == 0 || p->ranks == 0 || p->ranks > RANKS_MAX)
                return ctl_error(e, -EPROTO, LATENT_ERROR_INTERNAL,
                        "The service says that its worker has %" PRIu32 " ranks and that the text has %" PRIu64
                        " columns.",
                        p->ranks, p->text_dim);
        p->frames = p->ranks * TILE_ROWS / FRAME_ROWS;
        return 0;
}

static int run_all(Parity *p, latent_error *e) {
        Outcome *o = p->outcomes;
        int r;

        *o = (Outcome){.asked = 1};
        r = run_step(p, o++, e);
        for (uint32_t ranks = 2; ranks <= p->ranks; ranks++)
                for (size_t i = 0; i < ELEMENTSOF(plans); i++)
                        for (size_t k = 0; k < p->n_exchanges; k++) {
                                if (r < 0)
                                        return r;
                                *o = (Outcome){.asked = ranks, .plan = plans[i], .exchange = exchanges[k]};
                                r = run_step(p, o++, e);
                        }
        p->n_outcomes = (size_t) (o - p->outcomes);
        return r;
}

static bool differs(const Parity *p) {
        for (size_t i = 0; i < p->n_outcomes; i++)
                if (p->outcomes[i].n_different > 0)
                        return true;
        return false;
}

static void print_json(const Parity *p) {
        JsonWriter w = {.file = stdout};

        json_writer_object(&w, NULL);
        json_writer_uint(&w, "rows", p->outcomes[0].rows);
        json_writer_list(&w, "runs");
        for (const Outcome *o = p->outcomes; o < p->outcomes + p->n_outcomes; o++) {
                json_writer_object(&w, NULL);
                json_writer_uint(&w, "ranks", o->ranks);
                json_writer_uint(&w, "ranks_asked", o->asked);
                json_writer_string(&w, "plan", o->plan ? o->plan : "");
                json_writer_string(&w, "exchange", o->exchange ? o->exchange : "");
                json_writer_uint(&w, "chunks", o->chunks);
                json_writer_uint(&w, "exchanged_bytes", o->bytes);
                json_writer_uint(&w, "compute_usec", o->usec);
                json_writer_uint(&w, "values", o->n);
                json_writer_uint(&w, "different", o->n_different);
                json_writer_end(&w);
        }
        json_writer_line(&w);
}

static void print_table(const Parity *p) {
        CLEANUP(table_done) Table t = {.n_columns = 7};
        char ranks[48], chunks[24], bytes[FORMAT_MAX], usec[FORMAT_MAX], result[80];

        table_add(&t, (const char *[]){"RANKS", "PLAN", "EXCHANGE", "CHUNKS", "EXCHANGED", "TIME", "RESULT"});
        for (const Outcome *o = p->outcomes; o < p->outcomes + p->n_outcomes; o++) {
                if (o->ranks == o->asked)
                        (void) snprintf(ranks, sizeof(ranks), "%" PRIu64, o->ranks);
                else
                        (void) snprintf(ranks, sizeof(ranks), "%" PRIu64 " of %" PRIu32, o->ranks, o->asked);
                (void) snprintf(chunks, sizeof(chunks), "%" PRIu64, o->chunks);
                if (o->n_different > 0)
                        (void) snprintf(result, sizeof(result), "DIFFERENT: %" PRIu64 " of %" PRIu64 " values",
                                o->n_different, o->n);
                else
                        (void) snprintf(result, sizeof(result), "%s", o->plan ? "same bits" : "reference");
                table_add(&t, (const char *[]){ranks, o->plan ? o->plan : "-", o->exchange ? o->exchange : "-",
                                      chunks, format_bytes(o->bytes, bytes), format_usec(o->usec, usec), result});
        }
        table_print(&t);
        if (p->ranks == 1)
                (void) printf("The service's worker has one rank: there is nothing to compare. WorkerRanks= sets "
                              "more.\n");
        else
                (void) printf("%" PRIu64 " rows. %s\n", p->outcomes[0].rows,
                        differs(p) ? "The splits DIFFER." : "All splits give the same bits.");
}

int verb_parity(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        ParityOptions o = {};
        const Option options[] = {
                {"compute", OPTION_STRING, &o.compute, NULL, '\0'},
                {"qkv-order", OPTION_STRING, &o.qkv_order, NULL, '\0'},
        };
        CLEANUP(parity_done) Parity p = {.ctl = c, .options = &o};
        const char *model;
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 1, 1, &model, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        run_catch_signals();
        r = open_model(&p, model, &e);
        if (r >= 0)
                r = run_all(&p, &e);
        r = run_outcome(r, &e);
        if (r < 0)
                return report_error(c, verb, &e);

        if (c->json)
                print_json(&p);
        else
                print_table(&p);
        return differs(&p) ? STATUS_FAILED : STATUS_OK;
}
