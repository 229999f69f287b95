/* SPDX-License-Identifier: Apache-2.0 */

/* What a step costs beside its computation: tests/bench/bench-step runs it.
 *
 *     bench-step-client bus|socket ADDRESS MODEL INPUT CLIENTS STEPS
 *
 * Times Peer.Ping alone, without and with a rest before each, then the same of a step that the worker refuses at
 * sight of a NaN: the way of a step through all processes without the step, which is as little as it can cost. Then
 * STEPS steps of each of so many clients at once, a thread, connection and open session each. Prints one line
 * "ping USEC", "rested-ping USEC", "relay USEC", "rested-relay USEC" each and "step CLIENT-USEC COMPUTE-USEC
 * QUEUED-USEC" a step: from before the call until the result can be read. */

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-bus.h>
#include <unistd.h>

#include "client/latentctl/ctl.h"
#include "client/latentctl/inputs.h"
#include "client/latentctl/report.h"
#include "client/latentctl/run.h"
#include "client/latentctl/tensor-file.h"
#include "client/liblatent/error.h"
#include "service/shared/clock.h"

#define PINGS 1000u
#define RESTED_PINGS 300u
#define RELAYS 300u /* of each kind */
#define REST_USEC 2000u /* about as long as a step of the tiny case */
#define WARM_UP 20u /* steps that are not counted */
#define CLIENTS_MAX 64u

typedef struct Sample {
        uint64_t client, compute, queued; /* microseconds */
} Sample;

typedef struct Bench {
        bool is_socket;
        const char *address, *model, *input;
        uint32_t n_clients, n_steps;
        pthread_barrier_t ready;
} Bench;

typedef struct Client {
        Bench *bench;
        bool is_first;
        pthread_t thread;
        Sample *samples;
} Client;

/* Figures of a run in which something failed would mean nothing. */
static void check(int r, const char *doing, const latent_error *e) {
        if (r >= 0)
                return;
        (void) fprintf(stderr, "bench-step-client: %s: %s\n", doing, e ? e->text : strerror(-r));
        exit(1);
}

static void check_bus(int r, const char *doing) {
        check(r, doing, NULL);
}

/* Microseconds. Without a bus nobody has a name. */
static uint64_t ping(const Bench *b, sd_bus *bus) {
        uint64_t begin = clock_usec();

        check_bus(sd_bus_call_method(bus, b->is_socket ? NULL : BUS_NAME, BUS_ROOT,
                          "org.freedesktop.DBus.Peer", "Ping", NULL, NULL, NULL),
                "Ping");
        return clock_usec() - begin;
}

static void bench_ping(const Bench *b) {
        CLEANUP(sd_bus_unrefp) sd_bus *bus = NULL;
        char address[512];

        (void) snprintf(address, sizeof(address), "%s%s", b->is_socket ? "unix:path=" : "", b->address);
        check_bus(sd_bus_new(&bus), "A bus");
        check_bus(sd_bus_set_address(bus, address), "The address");
        check_bus(sd_bus_set_bus_client(bus, !b->is_socket), "The kind of bus");
        check_bus(sd_bus_start(bus), "Connecting");
        for (uint32_t i = 0; i < PINGS + WARM_UP; i++) {
                uint64_t usec = ping(b, bus);

                if (i >= WARM_UP)
                        (void) printf("ping %" PRIu64 "\n", usec);
        }
        for (uint32_t i = 0; i < RESTED_PINGS; i++) {
                (void) usleep(REST_USEC);
                (void) printf("rested-ping %" PRIu64 "\n", ping(b, bus));
        }
}

static void one_step(latent_session *s, const latent_step_options *o, Sample *ret) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        const void *data;
        latent_tensor t;
        latent_error e;
        uint64_t begin = clock_usec();

        check(latent_session_step(s, o, &job, &e), "Starting a step", &e);
        check(latent_job_wait(job, UINT64_MAX, NULL, NULL, &e), "The step", &e);
        check(latent_job_tensor(job, "video_velocity", &t, &data, &e), "The result", &e);
        ret->client = clock_usec() - begin;

        ret->compute = get_uint(latent_job_result(job), "compute-usec");
        ret->queued = get_uint(latent_job_result(job), "queued-usec");
        check_bus(ret->compute > 0 ? 0 : -EBADMSG, "The time computed");
}

static uint64_t relay(latent_session *s, const latent_step_options *o) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        uint64_t begin = clock_usec();
        latent_error e;
        int r;

        check(latent_session_step(s, o, &job, &e), "Starting a step", &e);
        r = latent_job_wait(job, UINT64_MAX, NULL, NULL, &e);
        check_bus(r < 0 && strcmp(e.name, LATENT_ERROR_INVALID_TENSOR) == 0 ? 0 : -EBADMSG, "A step with a NaN");
        return clock_usec() - begin;
}

static void bench_relay(latent_session *s, const latent_step_options *o) {
        float *value = (float *) (void *) ((char *) latent_session_input(s) + o->audio->offset), before = *value;

        *value = NAN;
        for (uint32_t i = 0; i < RELAYS; i++)
                (void) printf("relay %" PRIu64 "\n", relay(s, o));
        for (uint32_t i = 0; i < RELAYS; i++) {
                (void) usleep(REST_USEC);
                (void) printf("rested-relay %" PRIu64 "\n", relay(s, o));
        }
        *value = before;
}

static void *client_main(void *argument) {
        CLEANUP(latent_client_freep) latent_client *client = NULL;
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        CLEANUP(latent_session_freep) latent_session *session = NULL;
        CLEANUP(latent_job_freep) latent_job *load = NULL;
        CLEANUP(tensor_file_done) TensorFile file = {};
        latent_client_options co = {.struct_size = sizeof(co)};
        latent_session_options so = {.struct_size = sizeof(so), .compute = "f32"};
        latent_step_options step = {.struct_size = sizeof(step), .sigma_video = 0.7, .sigma_audio = 0.6};
        Client *c = argument;
        Bench *b = c->bench;
        Inputs in = {};
        latent_error e;

        if (b->is_socket)
                co.socket = b->address;
        else {
                co.bus = LATENT_BUS_ADDRESS;
                co.address = b->address;
        }
        check(tensor_file_open(b->input, &file, &e), "The inputs", &e);
        check(inputs_find(&file, false, &in, &e), "The inputs", &e);
        check(latent_client_new(&co, &client, &e), "Connecting", &e);
        check(latent_model_load_path(client, b->model, NULL, &load, &e), "Loading", &e);
        check(latent_job_wait(load, UINT64_MAX, NULL, NULL, &e), "Loading", &e);
        check(latent_job_model(load, &model, &e), "The model", &e);
        so.input_bytes = inputs_bytes(&in);
        so.output_bytes = latent_output_bytes(&in.tensor[INPUT_VIDEO], &in.tensor[INPUT_AUDIO], NULL, 1, 0);
        check(latent_session_open(client, model, &so, &session, &e), "The session", &e);
        check(inputs_place(&file, &in, session, &e), "The inputs", &e);
        step.text = inputs_get(&in, INPUT_TEXT);
        step.text_tags = inputs_get(&in, INPUT_TEXT_TAGS);
        step.video = inputs_get(&in, INPUT_VIDEO);
        step.audio = inputs_get(&in, INPUT_AUDIO);

        for (uint32_t i = 0; i < WARM_UP; i++) {
                Sample unused;

                one_step(session, &step, &unused);
        }
        (void) pthread_barrier_wait(&b->ready);
        if (c->is_first)
                bench_relay(session, &step);
        (void) pthread_barrier_wait(&b->ready);
        for (uint32_t i = 0; i < b->n_steps; i++)
                one_step(session, &step, &c->samples[i]);
        return NULL;
}

static void bench_steps(Bench *b) {
        Client clients[CLIENTS_MAX] = {};

        check_bus(-pthread_barrier_init(&b->ready, NULL, b->n_clients), "A barrier");
        for (uint32_t i = 0; i < b->n_clients; i++) {
                clients[i].bench = b;
                clients[i].is_first = i == 0;
                clients[i].samples = calloc(b->n_steps, sizeof(Sample));
                check_bus(clients[i].samples ? 0 : -ENOMEM, "Memory");
                check_bus(-pthread_create(&clients[i].thread, NULL, client_main, &clients[i]), "A thread");
        }
        for (uint32_t i = 0; i < b->n_clients; i++) {
                (void) pthread_join(clients[i].thread, NULL);
                for (uint32_t k = 0; k < b->n_steps; k++) {
                        const Sample *s = &clients[i].samples[k];

                        (void) printf("step %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", s->client, s->compute,
                                s->queued);
                }
                free(clients[i].samples);
        }
        (void) pthread_barrier_destroy(&b->ready);
}

int main(int argc, char *argv[]) {
        Bench b = {};

        if (argc == 7) {
                b.is_socket = strcmp(argv[1], "socket") == 0;
                b.address = argv[2];
                b.model = argv[3];
                b.input = argv[4];
                b.n_clients = (uint32_t) strtoul(argv[5], NULL, 10);
                b.n_steps = (uint32_t) strtoul(argv[6], NULL, 10);
        }
        if (b.n_clients < 1 || b.n_clients > CLIENTS_MAX || b.n_steps < 1 || b.n_steps > 1000000) {
                (void) fprintf(stderr,
                        "usage: bench-step-client bus|socket ADDRESS MODEL INPUT CLIENTS STEPS\n");
                return 2;
        }

        bench_ping(&b);
        bench_steps(&b);
        return 0;
}
