/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/coder-bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/unit/h3/golden.h"

uint64_t bench_memory_available;

#define DEMO "tests/demo-model/"

const char *const bench_video_vae[] = {
        DEMO "vae/config.json", DEMO "vae/diffusion_pytorch_model.safetensors", NULL};
const char *const bench_audio_vae[] = {
        "tests/data/vae/audio/config.json", "tests/data/vae/audio/model.weight_norm.safetensors", NULL};
const char *const bench_conditioner[] = {DEMO "text_encoder/config.json",
        DEMO "text_encoder/model.safetensors", DEMO "tokenizer/vocab.json", DEMO "tokenizer/merges.txt",
        DEMO "tokenizer/tokenizer.json", DEMO "tokenizer/tokenizer_config.json", NULL};

static uint64_t memory_available(void) {
        return bench_memory_available;
}

/* Steps are run by the tests. */
static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static void add_region(CoderBench *b, uint64_t id, uint32_t index, const char *file) {
        const char *colon = strchr(file, ':'), *name = colon ? colon : strrchr(file, '/');
        CLEANUP_FREE uint8_t *bytes = NULL;
        char path[200];
        uint64_t size, region_size;
        Fault f = {};
        WireMessage m;
        void *map;
        int fd;

        (void) snprintf(path, sizeof(path), "%.*s", colon ? (int) (colon - file) : (int) strlen(file), file);
        bytes = golden_read(getenv("LATENT_SOURCE_DIR"), path, &size);
        region_size = (size + 4095) / 4096 * 4096;
        assert_int_equal(memfd_new("test-region", region_size, &fd), 0);
        assert_int_equal(memfd_map(fd, region_size, PROT_READ | PROT_WRITE, &map), 0);
        memcpy(map, bytes, size);
        assert_int_equal(munmap(map, region_size), 0);
        wire_init(&m, WIRE_REGION, 1, id, 0);
        m.region.index = index;
        m.region.size = size;
        m.region.region_size = region_size;
        (void) snprintf(m.region.name, sizeof(m.region.name), "%s", name + 1);
        assert_int_equal(model_table_add_region(&b->models, &m.region, &fd, &f), 0);
}

int bench_try_load(CoderBench *b, uint64_t id, const char *const *files, WireModelReady *ret, Fault *f) {
        WireMessage m;

        wire_init(&m, WIRE_MODEL_OPEN, 1, id, 0);
        m.model_open.identity = b->identity;
        while (files[m.model_open.n_files])
                m.model_open.n_files++;
        assert_int_equal(model_table_open(&b->models, &m.model_open, f), 0);
        for (uint32_t i = 0; files[i]; i++)
                add_region(b, id, i, files[i]);
        return model_table_commit(&b->models, id, &b->ops, ret, f);
}

void bench_load(CoderBench *b, uint64_t id, const char *const *files) {
        WireModelReady ready = {};
        Fault f = {};

        if (bench_try_load(b, id, files, &ready, &f) < 0)
                fail_msg("%s is refused: %s", files[0], f.text);
}

static void add_arenas(CoderBench *b) {
        WireMessage m;
        Fault f = {};

        assert_int_equal(arena_pair_new(BENCH_SESSION, &b->arenas), 0);
        wire_init(&m, WIRE_ARENA, 1, BENCH_SESSION, 0);
        m.arena.size = b->size;
        for (uint32_t kind = WIRE_ARENA_INPUT; kind <= WIRE_ARENA_OUTPUT; kind++) {
                CLEANUP_CLOSE int fd = -EBADF;

                assert_int_equal(memfd_new("test-arena", b->size, &fd), 0);
                if (kind == WIRE_ARENA_INPUT)
                        assert_int_equal(
                                memfd_map(fd, b->size, PROT_READ | PROT_WRITE, (void **) &b->input), 0);
                m.arena.kind = kind;
                assert_int_equal(arena_pair_add(b->arenas, &m.arena, fd, &f), 0);
        }
        b->output = b->arenas->output.map;
}

void bench_set_ranks(CoderBench *b, uint32_t ranks) {
        Fault f = {};

        (void) rank_group_free(b->ranks);
        if (rank_group_new(&b->ops, ranks, ranks, NULL, no_step, NULL, &b->ranks, &f) < 0)
                fail_msg("%s", f.text);
}

void bench_set_ops(CoderBench *b, const LkOps *ops, int (*device_memory)(uint32_t device, uint64_t *ret_free, uint64_t *ret_total)) {
        (void) rank_group_end(b->ranks);
        residency_done(&b->runner.residency);
        b->ranks = rank_group_free(b->ranks);
        b->ops = *ops;
        b->backend.device_memory = device_memory;
        bench_set_ranks(b, 1);
}

static void on_stuck(void *userdata, const Job *j, uint32_t step, const Fault *f) {
        fprintf(stderr, "%s\n", f->text);
        abort();
}

CoderBench *bench_new(uint32_t ranks, uint64_t arena_size) {
        CoderBench *b = calloc(1, sizeof(*b));

        assert_non_null(b);
        b->size = arena_size;
        b->identity = 1;
        b->ops = *lk_cpu_ops(LK_CPU_AUTO);
        b->backend = (Backend){.program = "test", .ops = &b->ops, .memory_available = memory_available};
        bench_memory_available = 0;
        add_arenas(b);
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b->sockets), 0);
        assert_int_equal(link_new(b->sockets[0], &b->link), 0);
        b->runner = (StepRunner){
                .backend = &b->backend,
                .link = b->link,
                .merged = MERGED_CACHE_INIT,
                .tables = MOD_CACHE_INIT,
                .encodes = ENCODE_CACHE_INIT,
                .on_stuck = on_stuck,
                .deadline_usec = UINT64_C(120000000), /* a busy machine under a sanitizer */
        };
        bench_set_ranks(b, ranks);
        return b;
}

CoderBench *bench_free(CoderBench *b) {
        if (!b)
                return NULL;

        (void) rank_group_end(b->ranks); /* what goes on behind a step needs the rest */
        step_runner_done(&b->runner);
        (void) rank_group_free(b->ranks);
        for (size_t i = 0; i < MODELS_MAX; i++)
                if (b->models.models[i])
                        (void) model_table_close(&b->models, b->models.models[i]->id);
        (void) arena_pair_unref(b->arenas);
        (void) munmap(b->input, b->size);
        (void) link_free(b->link);
        (void) close(b->sockets[0]);
        (void) close(b->sockets[1]);
        free(b);
        return NULL;
}

void bench_freep(CoderBench **b) {
        (void) bench_free(*b);
}

WireTensor bench_put(CoderBench *b, StType type, uint32_t n_dims, const uint64_t *shape, const void *data) {
        WireTensor t = {.offset = b->used | 1,
                .size = st_type_size(type),
                .dtype = (uint32_t) type,
                .n_dims = n_dims};

        for (uint32_t i = 0; i < n_dims; i++) {
                t.shape[i] = shape[i];
                t.size *= shape[i];
        }
        assert_true(t.offset + t.size <= b->size);
        memcpy(b->input + t.offset, data, t.size);
        b->used = t.offset + t.size;
        return t;
}

static uint32_t next(uint32_t *state) {
        *state = *state * 1664525u + 1013904223u;
        return *state >> 8;
}

float *bench_numbers(uint64_t n, uint32_t seed) {
        float *x = malloc(n * sizeof(*x));

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++) {
                x[i] = -2;
                for (int k = 0; k < 4; k++)
                        x[i] += (float) next(&seed) / (float) (1 << 24);
                x[i] *= 1.7f;
        }
        return x;
}

uint8_t *bench_bytes(uint64_t n, uint32_t seed) {
        uint8_t *x = malloc(n);

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++)
                x[i] = (uint8_t) next(&seed);
        return x;
}

WireJobOpen bench_job(const CoderBench *b, WireJobKind kind, uint64_t model) {
        WireMessage m;

        wire_init(&m, WIRE_JOB_OPEN, 1, BENCH_JOB, 0);
        m.job_open.model = model;
        m.job_open.session = BENCH_SESSION;
        m.job_open.kind = kind;
        m.job_open.output_size = b->size;
        return m.job_open;
}

int bench_try_open(CoderBench *b, const WireJobOpen *w, Job **ret, Fault *f) {
        const JobParts parts = {
                .model = model_table_find(&b->models, w->model),
                .arenas = b->arenas,
                .ranks = rank_group_size(b->ranks),
        };

        assert_non_null(parts.model);
        return job_new(w, &parts, 1, ret, f);
}

Job *bench_open(CoderBench *b, const WireJobOpen *w) {
        Fault f = {};
        Job *j = NULL;

        if (bench_try_open(b, w, &j, &f) < 0)
                fail_msg("the job is refused: %s", f.text);
        return j;
}

void bench_refuse(CoderBench *b, const WireJobOpen *w, const char *name, const char *part) {
        uint64_t before[8], after[8];
        Fault f = {};
        Job *j = NULL;

        memcpy(before, b->output, sizeof(before));
        if (bench_try_open(b, w, &j, &f) >= 0)
                fail_msg("a job is accepted that should not be (%s)", part);
        if (strcmp(f.name, name) != 0 || !strstr(f.text, part))
                fail_msg("\"%s\" (%s), expected \"%s\" (%s)", f.text, f.name, part, name);
        memcpy(after, b->output, sizeof(after));
        assert_memory_equal(before, after, sizeof(before));
}

int bench_try_step(CoderBench *b, Job *j, StepResult *ret, Fault *f) {
        return step_run(&b->runner, b->ranks, j, j->committed, ret, f);
}

void bench_step(CoderBench *b, Job *j) {
        StepResult result;
        Fault f = {};

        if (bench_try_step(b, j, &result, &f) < 0)
                fail_msg("step %u: %s", j->committed, f.text);
}

void bench_finish(CoderBench *b, Job *j) {
        while (j->committed < j->steps)
                bench_step(b, j);
}

void *bench_output(const CoderBench *b, const Job *j, uint32_t i) {
        const WireTensor *t = &j->coder->outputs[i].tensor;
        void *copy = malloc(t->size + 1);

        assert_non_null(copy);
        assert_true(t->offset % WIRE_SLOT_ALIGN == 0 && t->offset + t->size <= b->size);
        memcpy(copy, b->output + t->offset, t->size);
        return copy;
}

uint8_t *bench_run(CoderBench *b, const WireJobOpen *w, uint64_t *ret_size) {
        Job *j = bench_open(b, w);
        uint64_t begin = j->commit_offset + WIRE_SLOT_ALIGN;
        uint8_t *copy;

        bench_finish(b, j);
        *ret_size = j->commit_offset + j->output_used - begin;
        if (j->n_slots > 0)
                *ret_size = j->slot_offset - begin;
        copy = malloc(*ret_size);
        assert_non_null(copy);
        memcpy(copy, b->output + begin, *ret_size);
        job_close(j);
        (void) job_unref(j);
        return copy;
}

void assert_committed(const CoderBench *b, const Job *j, uint32_t steps) {
        uint32_t epoch, done;
        uint64_t word;

        memcpy(&word, b->output + j->commit_offset, sizeof(word));
        assert_int_equal(wire_commit_unpack(word, &epoch, &done), 0);
        assert_int_equal(epoch, 1);
        assert_int_equal(done, steps);
}

static uint32_t delay_seed, delay_usec;

static void wait_a_while(uint32_t x) {
        x ^= delay_seed;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        if (x % 3 == 0)
                (void) usleep(x / 4 % (delay_usec + 1));
}

static void late_tile(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile) {
        wait_a_while(rank * 977u + chunk * 31u + tile);
}

static int late_message(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        wait_a_while(rank * 977u + m->from * 31u + m->sequence);
        return 0;
}

void bench_delay(CoderBench *b, uint32_t seed, uint32_t usec) {
        delay_seed = seed;
        delay_usec = usec;
        b->runner.tile_hook = usec > 0 ? late_tile : NULL;
        b->runner.hook = (ExchangeHook){usec > 0 ? late_message : NULL, NULL};
}
