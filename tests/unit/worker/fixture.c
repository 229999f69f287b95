/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/unit/h3/golden.h"

void fixture_add_model(Fixture *x, uint64_t id, const char *file) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size, region_size;
        WireMessage m, ready;
        Fault f = {};
        void *map;
        int fd;

        bytes = golden_read(NULL, file, &size);
        region_size = (size + 4095) / 4096 * 4096;
        assert_int_equal(memfd_new("test-region", region_size, &fd), 0);
        assert_int_equal(memfd_map(fd, region_size, PROT_READ | PROT_WRITE, &map), 0);
        memcpy(map, bytes, size);
        assert_int_equal(munmap(map, region_size), 0);

        wire_init(&m, WIRE_MODEL_OPEN, 1, id, 0);
        m.model_open.n_files = 1;
        assert_int_equal(model_table_open(&x->models, &m.model_open, &f), 0);
        wire_init(&m, WIRE_REGION, 1, id, 0);
        m.region.size = size;
        m.region.region_size = region_size;
        (void) snprintf(m.region.name, sizeof(m.region.name), "comfy.safetensors");
        assert_int_equal(model_table_add_region(&x->models, &m.region, &fd, &f), 0);
        assert_int_equal(fd, -EBADF);                  /* taken over */
        assert_null(model_table_find(&x->models, id)); /* not before the commit */
        wire_init(&ready, WIRE_MODEL_READY, 1, id, 0);
        if (model_table_commit(&x->models, id, lk_cpu_ops(LK_CPU_AUTO), &ready.model_ready, &f) < 0)
                fail_msg("%s is refused: %s", file, f.text);
        assert_non_null(model_table_find(&x->models, id));
}

static void add_arenas(Fixture *x) {
        WireMessage m;
        Fault f = {};

        assert_int_equal(arena_pair_new(2, &x->arenas), 0);
        wire_init(&m, WIRE_ARENA, 1, 2, 0);
        m.arena.size = FIXTURE_ARENA;
        for (uint32_t kind = WIRE_ARENA_INPUT; kind <= WIRE_ARENA_OUTPUT; kind++) {
                CLEANUP_CLOSE int fd = -EBADF;

                assert_int_equal(memfd_new("test-arena", FIXTURE_ARENA, &fd), 0);
                if (kind == WIRE_ARENA_INPUT)
                        assert_int_equal(
                                memfd_map(fd, FIXTURE_ARENA, PROT_READ | PROT_WRITE, (void **) &x->input),
                                0);
                m.arena.kind = kind;
                assert_int_equal(arena_pair_add(x->arenas, &m.arena, fd, &f), 0);
        }
        assert_string_equal(x->arenas->fault.name, "");
}

static WireTensor put(Fixture *x, const Golden *g, const char *name, uint64_t *at) {
        const StTensor *t = golden_tensor(g, name);
        WireTensor w = {.offset = *at, .size = t->size, .dtype = (uint32_t) t->type, .n_dims = t->n_dims};

        memcpy(w.shape, t->shape, sizeof(w.shape));
        assert_true(*at + t->size <= FIXTURE_ARENA);
        memcpy(x->input + *at, g->bytes + t->offset, t->size);
        *at += t->size;
        return w;
}

Fixture *fixture_new(void) {
        CLEANUP(golden_freep) Golden *g = golden_open("traj_euler_4");
        Fixture *x = calloc(1, sizeof(*x));
        uint64_t at = 0;
        WireMessage m;

        assert_non_null(x);
        fixture_add_model(x, 1, "dit/comfy.safetensors");
        add_arenas(x);

        wire_init(&m, WIRE_JOB_OPEN, 1, 5, 0);
        x->sample = m.job_open;
        x->sample.model = 1;
        x->sample.session = 2;
        x->sample.kind = WIRE_JOB_SAMPLE;
        x->sample.compute = WIRE_COMPUTE_F32;
        x->sample.output_size = FIXTURE_ARENA;
        x->sample.text = put(x, g, "text", &at);
        x->sample.text_tags = put(x, g, "text_tags", &at);
        x->sample.video = put(x, g, "video", &at);
        x->sample.audio = put(x, g, "audio", &at);
        x->sample.sigmas_video = put(x, g, "sigmas_video", &at);
        x->sample.sigmas_audio = put(x, g, "sigmas_audio", &at);
        return x;
}

Fixture *fixture_free(Fixture *x) {
        if (!x)
                return NULL;

        for (uint64_t id = 1; id <= FIXTURE_MODELS; id++)
                (void) model_table_close(&x->models, id);
        (void) arena_pair_unref(x->arenas);
        (void) munmap(x->input, FIXTURE_ARENA);
        free(x);
        return NULL;
}

void fixture_freep(Fixture **x) {
        (void) fixture_free(*x);
}

ModelEntry *fixture_model(const Fixture *x) {
        return model_table_find(&x->models, 1);
}

int fixture_open(Fixture *x, const WireJobOpen *open, Job **ret, Fault *f) {
        JobParts parts = {.model = model_table_find(&x->models, open->model), .arenas = x->arenas};

        for (uint32_t i = 0; i < open->n_loras; i++)
                parts.loras[i] = model_table_find(&x->models, open->loras[i].model);
        return job_new(open, &parts, 1, ret, f);
}

Job *fixture_job(Fixture *x, uint64_t id) {
        WireJobOpen open = x->sample;
        Fault f = {};
        Job *j;

        open.header.job = id;
        if (fixture_open(x, &open, &j, &f) < 0)
                fail_msg("the job is refused: %s", f.text);
        return j;
}
