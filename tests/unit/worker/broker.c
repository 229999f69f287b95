/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/broker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/unit/shared/child.h"

#define RECEIVE_TIMEOUT_MSEC 120000
#define TINY_HEADS 8

Broker *broker_spawn(int type) {
        Broker *b;

        b = calloc(1, sizeof(*b));
        assert_non_null(b);
        b->pid = child_spawn("service/worker/latent-worker-cpu", type, &b->socket);
        return b;
}

Broker *broker_open_ranks(uint64_t epoch, uint32_t ranks, uint64_t encode_cache_bytes) {
        Broker *b = broker_spawn(SOCK_SEQPACKET);
        WireMessage m;

        broker_expect(b, WIRE_HELLO, 0, &m);
        assert_int_equal(m.header.epoch, 0);

        b->epoch = epoch;
        wire_init(&m, WIRE_WELCOME, epoch, 0, 0);
        m.welcome.ranks = ranks;
        m.welcome.threads = 2;
        m.welcome.encode_cache_bytes = encode_cache_bytes;
        broker_send(b, &m, -EBADF);
        broker_expect_acks(b, 1);
        return b;
}

Broker *broker_open(uint64_t epoch) {
        return broker_open_ranks(epoch, 1, 0);
}

Broker *broker_free(Broker *b) {
        if (!b)
                return NULL;

        if (b->socket >= 0)
                (void) close(b->socket);
        if (b->pid > 0)
                child_end(&b->pid);
        free(b);
        return NULL;
}

void broker_freep(Broker **b) {
        (void) broker_free(*b);
}

int broker_wait(Broker *b) {
        return child_wait(&b->pid);
}

void broker_kill(Broker *b) {
        assert_int_equal(kill(b->pid, SIGKILL), 0);
        (void) broker_wait(b);
}

void broker_send(Broker *b, const WireMessage *m, int fd) {
        int r;

        for (;;) {
                struct pollfd p = {.fd = b->socket, .events = POLLOUT};

                r = wire_send(b->socket, m, fd);
                if (r != -EAGAIN)
                        break;
                assert_int_equal(poll(&p, 1, RECEIVE_TIMEOUT_MSEC), 1);
        }
        assert_int_equal(r, 0);
}

void broker_say(Broker *b, WireType type, uint64_t job, uint32_t step) {
        WireMessage m;

        wire_init(&m, type, b->epoch, job, step);
        broker_send(b, &m, -EBADF);
}

/* Any message. */
static bool receive_any(Broker *b, WireMessage *ret) {
        for (;;) {
                struct pollfd p = {.fd = b->socket, .events = POLLIN};
                Fault f = {};
                int fd, r;

                r = wire_receive(b->socket, ret, &fd, &f);
                if (r == -EAGAIN) {
                        if (poll(&p, 1, RECEIVE_TIMEOUT_MSEC) != 1)
                                fail_msg("no answer of the worker within %d ms", RECEIVE_TIMEOUT_MSEC);
                        continue;
                }
                if (r < 0)
                        fail_msg("a message of the worker is wrong: %s", f.text);
                if (r > 0)
                        assert_int_equal(fd, -EBADF);
                return r > 0;
        }
}

bool broker_receive(Broker *b, WireMessage *ret) {
        for (;;) {
                if (!receive_any(b, ret))
                        return false;
                b->n_acks += ret->header.acks;
                if (ret->header.type == WIRE_ACK)
                        continue;
                if (ret->header.type == WIRE_MEMORY)
                        b->merged_bytes = ret->memory.merged_bytes;
                else if (ret->header.type == WIRE_PROGRESS) {
                        b->n_progress++;
                        b->last_progress = ret->progress;
                } else
                        return true;
        }
}

void broker_expect(Broker *b, WireType type, uint64_t job, WireMessage *ret) {
        WireMessage m;

        if (!broker_receive(b, &m))
                fail_msg("end of file instead of %s", wire_type_name((uint16_t) type));
        if (m.header.type == WIRE_ERROR && type != WIRE_ERROR)
                fail_msg("ERROR instead of %s: %s: %s", wire_type_name((uint16_t) type), m.error.fault.name,
                        m.error.fault.text);
        assert_string_equal(wire_type_name(m.header.type), wire_type_name((uint16_t) type));
        assert_int_equal(m.header.job, job);
        assert_int_equal(m.header.epoch, b->epoch);
        if (ret)
                *ret = m;
}

void broker_expect_error(Broker *b, uint64_t job, const char *name, const char *part) {
        WireMessage m;

        broker_expect(b, WIRE_ERROR, job, &m);
        if (strcmp(m.error.fault.name, name) != 0 || !strstr(m.error.fault.text, part))
                fail_msg("expected %s with \"%s\", got %s: %s", name, part, m.error.fault.name,
                        m.error.fault.text);
}

void broker_expect_eof(Broker *b) {
        WireMessage m;

        if (broker_receive(b, &m))
                fail_msg("%s instead of end of file", wire_type_name(m.header.type));
}

void broker_expect_acks(Broker *b, unsigned n) {
        while (b->n_acks < n) {
                WireMessage m;

                assert_true(receive_any(b, &m));
                assert_string_equal(wire_type_name(m.header.type), "ACK");
                assert_int_equal(m.header.epoch, b->epoch);
                b->n_acks += m.header.acks;
        }
}

int memfd_of(const void *bytes, uint64_t size, uint64_t region_size) {
        void *map;
        int fd;

        assert_int_equal(memfd_new("test-region", region_size, &fd), 0);
        assert_int_equal(memfd_map(fd, region_size, PROT_READ | PROT_WRITE, &map), 0);
        if (size > 0)
                memcpy(map, bytes, size);
        assert_int_equal(munmap(map, region_size), 0);
        return fd;
}

void broker_offer_model(Broker *b, uint64_t id, const char *partition, const void *bytes, uint64_t size) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint64_t region_size;
        WireMessage m;

        region_size = (size + 4095) / 4096 * 4096 + 4096;
        fd = memfd_of(bytes, size, region_size);

        wire_init(&m, WIRE_MODEL_OPEN, b->epoch, id, 0);
        m.model_open.n_files = 1;
        (void) snprintf(m.model_open.partition, sizeof(m.model_open.partition), "%s", partition);
        broker_send(b, &m, -EBADF);

        wire_init(&m, WIRE_REGION, b->epoch, id, 0);
        m.region.size = size;
        m.region.region_size = region_size;
        (void) snprintf(m.region.name, sizeof(m.region.name), "file.safetensors");
        broker_send(b, &m, fd);

        broker_say(b, WIRE_MODEL_COMMIT, id, 0);
}

void broker_load_file(Broker *b, uint64_t id, const char *partition, const char *file, WireMessage *ret) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;

        bytes = golden_read(NULL, file, &size);
        broker_offer_model(b, id, partition, bytes, size);
        broker_expect(b, WIRE_MODEL_READY, id, ret);
}

void broker_load_model(Broker *b, uint64_t id, WireMessage *ret) {
        broker_load_file(b, id, "", "dit/comfy.safetensors", ret);
}

static void offer_file(Broker *b, uint64_t id, uint32_t index, const char *file) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP_CLOSE int fd = -EBADF;
        WireMessage m;

        wire_init(&m, WIRE_REGION, b->epoch, id, 0);
        bytes = golden_read(getenv("LATENT_SOURCE_DIR"), file, &m.region.size);
        m.region.index = index;
        m.region.region_size = (m.region.size + 4095) / 4096 * 4096;
        (void) snprintf(m.region.name, sizeof(m.region.name), "%s", strrchr(file, '/') + 1);
        fd = memfd_of(bytes, m.region.size, m.region.region_size);
        broker_send(b, &m, fd);
}

void broker_load_sources(Broker *b, uint64_t id, const char *const *files, WireMessage *ret) {
        WireMessage m;

        wire_init(&m, WIRE_MODEL_OPEN, b->epoch, id, 0);
        m.model_open.identity = 1;
        while (files[m.model_open.n_files])
                m.model_open.n_files++;
        broker_send(b, &m, -EBADF);
        for (uint32_t i = 0; files[i]; i++)
                offer_file(b, id, i, files[i]);
        broker_say(b, WIRE_MODEL_COMMIT, id, 0);
        broker_expect(b, WIRE_MODEL_READY, id, ret);
}

Arenas *arenas_new(uint64_t input_size, uint64_t output_size) {
        Arenas *a;

        a = calloc(1, sizeof(*a));
        assert_non_null(a);
        a->input_size = input_size;
        a->output_size = output_size;
        assert_int_equal(memfd_new("test-input", input_size, &a->input_fd), 0);
        assert_int_equal(memfd_new("test-output", output_size, &a->output_fd), 0);
        assert_int_equal(memfd_map(a->input_fd, input_size, PROT_READ | PROT_WRITE, (void **) &a->input), 0);
        assert_int_equal(
                memfd_map(a->output_fd, output_size, PROT_READ | PROT_WRITE, (void **) &a->output), 0);
        memset(a->output, 0xa5, output_size); /* what nobody wrote is still there at the end */
        return a;
}

Arenas *arenas_free(Arenas *a) {
        if (!a)
                return NULL;

        (void) munmap(a->input, a->input_size);
        (void) munmap(a->output, a->output_size);
        (void) close(a->input_fd);
        (void) close(a->output_fd);
        free(a);
        return NULL;
}

void arenas_freep(Arenas **a) {
        (void) arenas_free(*a);
}

void broker_give_arenas(Broker *b, uint64_t session, const Arenas *a) {
        WireMessage m;

        wire_init(&m, WIRE_ARENA, b->epoch, session, 0);
        m.arena.kind = WIRE_ARENA_INPUT;
        m.arena.size = a->input_size;
        broker_send(b, &m, a->input_fd);
        m.arena.kind = WIRE_ARENA_OUTPUT;
        m.arena.size = a->output_size;
        broker_send(b, &m, a->output_fd);
}

WireTensor arenas_put(Arenas *a, StType type, uint32_t n_dims, const uint64_t *shape, const void *data) {
        WireTensor t = {.dtype = (uint32_t) type, .n_dims = n_dims, .size = st_type_size(type)};

        for (uint32_t i = 0; i < n_dims; i++) {
                t.shape[i] = shape[i];
                t.size *= shape[i];
        }
        t.offset = a->used | 1;
        assert_true(t.offset + t.size <= a->input_size);
        memcpy(a->input + t.offset, data, t.size);
        a->used = t.offset + t.size;
        return t;
}

uint64_t arenas_put_floats(Arenas *a, uint64_t n, const float *data) {
        uint64_t at = (a->used + 3) / 4 * 4;

        assert_true(at + n * sizeof(float) <= a->input_size);
        memcpy(a->input + at, data, n * sizeof(float));
        a->used = at + n * sizeof(float);
        return at;
}

WireTensor arenas_put_like(Arenas *a, const WireTensor *t, const void *data) {
        return arenas_put(a, (StType) t->dtype, t->n_dims, t->shape, data);
}

const H3Config tiny_config = {
        .video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2, .text_dim = 160};

static bool golden_has(const Golden *g, const char *name) {
        return st_header_find(g->header, name) != NULL;
}

static WireTensor put_golden(Arenas *a, const Golden *g, const char *name) {
        const StTensor *t = golden_tensor(g, name);

        return arenas_put(a, t->type, t->n_dims, t->shape, g->bytes + t->offset);
}

static WireMessage job_init(Broker *b, uint64_t job, const Arenas *a) {
        WireMessage m;

        wire_init(&m, WIRE_JOB_OPEN, b->epoch, job, 0);
        m.job_open.model = 1;
        m.job_open.session = 2;
        m.job_open.compute = WIRE_COMPUTE_F32;
        m.job_open.output_size = a->output_size;
        return m;
}

static void put_conditions(Arenas *a, const char *name, WireJobOpen *j) {
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(name, &tiny_config);

        j->n_conditions = k->layout->shape.n_conditions;
        for (uint32_t i = 0; i < j->n_conditions; i++) {
                const H3Condition *c = &k->layout->conditions[i];
                WireCondition *w = &j->conditions[i];

                *w = (WireCondition){
                        .kind = (uint32_t) c->kind,
                        .frame = c->frame,
                        .frames = c->grid.frames,
                        .height = c->grid.height,
                        .width = c->grid.width,
                        .audio = c->audio,
                };
                if (c->grid.frames > 0)
                        w->video_offset =
                                arenas_put_floats(a, 24 * c->grid.frames * c->grid.height * c->grid.width,
                                        k->conditions[i].video);
                if (c->audio > 0)
                        w->audio_offset = arenas_put_floats(a, 64 * c->audio, k->conditions[i].audio);
        }
}

static uint32_t sampler_of(const Golden *g) {
        static const char *const names[] = {"euler", "res_multistep", "res_multistep_perstream"};
        const char *name = st_header_meta(g->header, "sampler");

        assert_non_null(name);
        for (uint32_t i = 0; i < ELEMENTSOF(names); i++)
                if (strcmp(names[i], name) == 0)
                        return i;
        fail_msg("sampler %s", name);
        return 0;
}

WireMessage job_of_golden(Broker *b, uint64_t job, Arenas *a, const char *name) {
        CLEANUP(golden_freep) Golden *g = golden_open(name);
        WireMessage m = job_init(b, job, a);
        WireJobOpen *j = &m.job_open;

        j->text = put_golden(a, g, "text");
        j->text_tags = put_golden(a, g, "text_tags");
        j->video = put_golden(a, g, "video");
        j->audio = put_golden(a, g, "audio");
        put_conditions(a, name, j);
        if (golden_has(g, "sigmas_video")) {
                j->kind = WIRE_JOB_SAMPLE;
                j->sampler = sampler_of(g);
                j->shift_video = golden_meta_float(g, "shift_video");
                j->shift_audio = golden_meta_float(g, "shift_audio");
                j->schedule = WIRE_SCHEDULE_GIVEN;
                j->sigmas_video = put_golden(a, g, "sigmas_video");
                j->sigmas_audio = put_golden(a, g, "sigmas_audio");
        } else {
                j->kind = WIRE_JOB_STEP;
                j->sigma_video = golden_meta_float(g, "sigma_video");
                j->sigma_audio = golden_meta_float(g, "sigma_audio");
        }
        return m;
}

WireMessage job_long(Broker *b, uint64_t job, Arenas *a, uint64_t frames) {
        const uint64_t video[] = {24, frames, 32, 32}, audio[] = {32, 2, 8}, text[] = {9, 160};
        CLEANUP_FREE float *values = NULL;
        WireMessage m = job_init(b, job, a);
        uint64_t n = 24 * frames * 32 * 32;
        uint16_t zeros[9 * 160] = {};

        values = malloc(n * sizeof(float));
        assert_non_null(values);
        for (uint64_t i = 0; i < n; i++)
                values[i] = (float) (i % 251) / 125.0f - 1.0f;

        m.job_open.kind = WIRE_JOB_STEP;
        m.job_open.text = arenas_put(a, ST_BF16, 2, text, zeros);
        m.job_open.video = arenas_put(a, ST_F32, 4, video, values);
        m.job_open.audio = arenas_put(a, ST_F32, 3, audio, values);
        m.job_open.sigma_video = 0.75f;
        m.job_open.sigma_audio = 0.5f;
        return m;
}

void broker_plan(Broker *b, uint64_t job, uint64_t rows) {
        WireMessage m;

        wire_init(&m, WIRE_PLAN, b->epoch, job, 0);
        m.plan.ranks = 1;
        m.plan.row_tile = 128;
        m.plan.chunks = 1;
        m.plan.kind = WIRE_PLAN_HIDDEN_GATHER;
        m.plan.exchange = WIRE_EXCHANGE_HOST;
        m.plan.rows[0].end = rows;
        m.plan.heads[0].end = TINY_HEADS;
        broker_send(b, &m, -EBADF);
}

void broker_open_job(Broker *b, const WireMessage *open, WireMessage *ret) {
        broker_send(b, open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, open->header.job, ret);
        broker_plan(b, open->header.job, ret->job_ready.rows);
}

void broker_step(Broker *b, uint64_t job, uint32_t step) {
        WireMessage m;

        broker_say(b, WIRE_STEP, job, step);
        broker_expect(b, WIRE_STEP_DONE, job, &m);
        assert_int_equal(m.header.step, step);
}

static const float *slot_at(const Arenas *a, const WireMessage *ready, uint32_t k, const WireTensor *t) {
        const WireJobReady *r = &ready->job_ready;
        uint64_t at = r->slot_offset + k % r->n_slots * r->slot_stride + t->offset;

        assert_int_equal(t->dtype, ST_F32);
        assert_true(at + t->size <= a->output_size);
        assert_int_equal(at % 64, 0);
        return (const float *) (const void *) (a->output + at);
}

const float *slot_video(const Arenas *a, const WireMessage *ready, uint32_t k) {
        return slot_at(a, ready, k, &ready->job_ready.video);
}

const float *slot_audio(const Arenas *a, const WireMessage *ready, uint32_t k) {
        return slot_at(a, ready, k, &ready->job_ready.audio);
}

const float *slot_carried(const Arenas *a, const WireMessage *ready, uint32_t k) {
        return slot_at(a, ready, k, &ready->job_ready.carried);
}

void assert_near(const float *have, const Golden *g, const char *name, uint64_t n, double limit) {
        const float *want;
        double d, largest;
        uint64_t m;

        want = golden_data(g, name, ST_F32, &m);
        assert_int_equal(m, n);
        d = golden_distance(have, want, n, &largest);
        if (!(d <= limit))
                fail_msg("%s is %g away, at most %g is allowed", name, d, limit);
}

void assert_commit(const Arenas *a, const WireMessage *ready, uint32_t epoch, uint32_t steps_done) {
        uint32_t e, s;
        uint64_t word;

        memcpy(&word, a->output + ready->job_ready.commit_offset, sizeof(word));
        assert_int_equal(wire_commit_unpack(word, &e, &s), 0);
        assert_int_equal(e, epoch);
        assert_int_equal(s, steps_done);
}

void assert_no_commit(const Arenas *a, const WireMessage *ready) {
        uint32_t e, s;
        uint64_t word;

        memcpy(&word, a->output + ready->job_ready.commit_offset, sizeof(word));
        assert_true(wire_commit_unpack(word, &e, &s) < 0);
}
