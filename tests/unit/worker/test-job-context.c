/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-context.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/worker/job-input.h"
#include "tests/unit/worker/fixture.h"

static uint64_t commit_word(const Fixture *x, const Job *j) {
        uint64_t word;

        memcpy(&word, (const uint8_t *) x->arenas->output.map + j->commit_offset, sizeof(word));
        return word;
}

static void job_new_refused_at_every_stage_leaks_nothing(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();

        /* One fault for each thing that is made on the way: what was made before it must go. */
        for (unsigned i = 0; i < 8; i++) {
                WireJobOpen open = x->sample;
                Job *j = NULL;
                Fault f = {};
                int r;

                switch (i) {
                case 0:
                        open.kind = 99;
                        break;
                case 1:
                        open.text.offset = FIXTURE_ARENA;
                        break;
                case 2:
                        open.text_tags.size++;
                        break;
                case 3:
                        open.video.dtype = ST_F16;
                        break;
                case 4:
                        open.audio.shape[0]++;
                        break;
                case 5:
                        open.sigmas_audio.shape[0]--;
                        open.sigmas_audio.size -= 4;
                        break;
                case 6:
                        open.output_size = 64;
                        break;
                case 7:
                        open.flags = WIRE_JOB_RESUME;
                        break;
                }
                r = fixture_open(x, &open, &j, &f);
                assert_true(r < 0);
                assert_null(j);
                assert_true(f.name[0] != '\0');
                assert_int_equal(fixture_model(x)->n_ref, 1);
                assert_int_equal(x->arenas->n_ref, 1);
        }
}

static void job_new_holds_model_and_arenas(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        ModelEntry *m = fixture_model(x);
        Job *j = fixture_job(x, 5);
        uint64_t header_size;

        assert_int_equal(m->n_ref, 2);
        assert_int_equal(x->arenas->n_ref, 2);
        assert_int_equal(model_table_close(&x->models, 1), m->serial);
        assert_int_equal(model_table_close(&x->models, 1), 0);
        assert_null(fixture_model(x));
        assert_int_equal(j->model->h3->config.heads, 8); /* still there */
        memcpy(&header_size, j->model->regions[0].map, sizeof(header_size));
        assert_in_range(header_size, 2, j->model->regions[0].size - 8);
        assert_null(job_unref(j));
        assert_int_equal(x->arenas->n_ref, 1);
        assert_null(job_unref(NULL));
}

static void job_new_step_has_its_own_copy_of_the_latents(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        WireJobOpen open = x->sample;
        CLEANUP_FREE uint8_t *video = malloc(open.video.size), *audio = malloc(open.audio.size);
        Fault f = {};
        Job *j;

        assert_non_null(video);
        assert_non_null(audio);
        memcpy(video, x->input + open.video.offset, open.video.size);
        memcpy(audio, x->input + open.audio.offset, open.audio.size);
        open.kind = WIRE_JOB_STEP;
        open.sigma_video = open.sigma_audio = 0.5f;
        open.sigmas_video = open.sigmas_audio = (WireTensor){};
        assert_int_equal(fixture_open(x, &open, &j, &f), 0);
        memset(x->input, 0, FIXTURE_ARENA);
        assert_memory_equal(j->state.video, video, open.video.size);
        assert_memory_equal(j->state.audio, audio, open.audio.size);
        (void) job_unref(j);
}

static void tensor_check_finite_finds_the_first_wherever_it_is(void **state) {
        enum { N = 5000 };
        const uint64_t shape[] = {N};
        static const uint64_t places[] = {0, 1, 1023, 1024, 1025, 2047, 3000, 4095, 4096, N - 1};
        static uint32_t f32[N];
        static uint16_t bf16[N];
        char text[32];

        for (size_t i = 0; i < N; i++) { /* the largest finite numbers and the smallest */
                f32[i] = i % 2 ? 0xff7fffffu : 1;
                bf16[i] = i % 2 ? 0xff7fu : 1;
        }
        for (size_t k = 0; k < ELEMENTSOF(places); k++) {
                uint64_t at = places[k];
                Fault f = {};

                assert_int_equal(tensor_check_finite("x", ST_F32, f32, 1, shape, &f), 0);
                assert_int_equal(tensor_check_finite("x", ST_BF16, bf16, 1, shape, &f), 0);
                f32[at] = 0xff800000u;
                bf16[at] = 0x7f81u;
                (void) snprintf(text, sizeof(text), "Inf at [%u]", (unsigned) at);
                assert_int_equal(tensor_check_finite("x", ST_F32, f32, 1, shape, &f), -EINVAL);
                assert_non_null(strstr(f.text, text));
                f = (Fault){};
                (void) snprintf(text, sizeof(text), "NaN at [%u]", (unsigned) at);
                assert_int_equal(tensor_check_finite("x", ST_BF16, bf16, 1, shape, &f), -EINVAL);
                assert_non_null(strstr(f.text, text));
                f32[at] = bf16[at] = 0;
        }
}

static void job_commit_writes_slots_in_turn(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        Job *j = fixture_job(x, 5);
        const uint8_t *slots = (const uint8_t *) x->arenas->output.map + j->slot_offset;

        assert_int_equal(commit_word(x, j), wire_commit_pack(1, 0));
        assert_memory_equal(slots, j->state.video, j->video.size);
        assert_memory_equal(slots + j->audio.offset, j->state.audio, j->audio.size);

        for (uint32_t k = 1; k <= 3; k++) {
                const uint8_t *slot = slots + k % 2 * j->slot_stride;

                memset(j->next.video, (int) k, j->video.size);
                memset(j->next.audio, (int) k + 100, j->audio.size);
                assert_int_equal(job_commit(j, &j->next), 0);
                assert_int_equal(j->committed, k);
                assert_int_equal(commit_word(x, j), wire_commit_pack(1, k));
                assert_memory_equal(slot, j->next.video, j->video.size);
                assert_memory_equal(slot + j->audio.offset, j->next.audio, j->audio.size);
        }
        (void) job_unref(j);
}

static void job_commit_closed_writes_nothing(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP_FREE uint8_t *before = malloc(FIXTURE_ARENA);
        Job *j = fixture_job(x, 5);

        assert_non_null(before);
        memset(j->next.video, 1, j->video.size);
        memset(j->next.audio, 1, j->audio.size);
        memcpy(before, x->arenas->output.map, FIXTURE_ARENA);
        job_close(j);
        assert_true(j->cancelled);
        assert_int_equal(job_commit(j, &j->next), -ECANCELED);
        assert_int_equal(j->committed, 0);
        assert_memory_equal(before, x->arenas->output.map, FIXTURE_ARENA);
        (void) job_unref(j);
}

/* sigmas 1, .973, .923, .8 */
static void job_new_sparse_by_model_rows_and_sigma(void **state) {
        static const struct {
                const char *text, *error;
                float shift;
                uint32_t steps; /* bits of those that are sparse */
        } list[] = {
                {"sol-attn:min_tokens=0", NULL, 12, 0xe},
                {"sol-attn:min_tokens=33,start=0,end=0.4", NULL, 12, 0x3},
                {"sol-attn:min_tokens=34,start=0", NULL, 12, 0},
                {"sla:min_tokens=0,sigma_start=0.95,sigma_end=0.9", NULL, 1, 0x4},
                {"off", NULL, 0, 0},
                {"vsa", FAULT_NOT_SUPPORTED, 12, 0},
                {"sla", FAULT_INVALID_ARGUMENT, 0, 0},
                {"sla:dense_blocks=3", FAULT_INVALID_ARGUMENT, 12, 0},
        };
        CLEANUP(fixture_freep) Fixture *x = fixture_new();

        for (size_t i = 0; i < ELEMENTSOF(list); i++) {
                WireJobOpen open = x->sample;
                Job *j = NULL;
                Fault f = {};
                int r;

                assert_int_equal(sparse_parse(list[i].text, &open.sparse, &f), 0);
                open.sparse.shift = list[i].shift;
                open.header.job = 10 + i;
                r = fixture_open(x, &open, &j, &f);
                assert_int_equal(r < 0, list[i].error != NULL);
                if (r < 0) {
                        assert_string_equal(f.name, list[i].error);
                        continue;
                }
                for (uint32_t step = 0; step < j->steps; step++)
                        assert_int_equal(job_sparse(j, step) != NULL, list[i].steps >> step & 1);
                (void) job_unref(j);
        }
}

static void refused(Fixture *x, uint32_t start_step, const char *part) {
        WireJobOpen open = x->sample;
        Job *j = NULL;
        Fault f = {};

        open.start_step = start_step;
        assert_int_equal(fixture_open(x, &open, &j, &f), -EINVAL);
        if (!strstr(f.text, part))
                fail_msg("no '%s' in: %s", part, f.text);
}

/* A trajectory goes on where another run of the service left it: the slots before come out as they went in.
 */
static void job_new_start_step_takes_up_the_slots(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        uint64_t at = FIXTURE_ARENA - 65536 + 7; /* bytes lie anywhere */
        WireJobOpen *o = &x->sample;
        const uint8_t *slots;
        uint64_t stride;
        Job *j;

        o->sampler = WIRE_SAMPLER_RES_MULTISTEP;
        o->shift_video = 12;
        o->shift_audio = 3;
        o->flags = WIRE_JOB_KEEP_STEPS;
        j = fixture_job(x, 4);
        stride = j->slot_stride;
        assert_int_equal(stride, 3072 + 2048 + 2048 + 3072 + 2048);
        (void) job_unref(j);

        o->start_step = 2;
        o->slot = (WireTensor){.offset = at, .size = stride, .dtype = ST_U8, .n_dims = 1, .shape = {stride}};
        at += stride;
        o->kept = (WireTensor){
                .offset = at, .size = 2 * stride, .dtype = ST_U8, .n_dims = 2, .shape = {2, stride}};
        for (uint64_t i = 0; i < stride; i++)
                x->input[o->slot.offset + i] = (uint8_t) (i % 100);
        memset(x->input + o->kept.offset, 1, stride);
        memset(x->input + o->kept.offset + stride, 2, stride);

        j = fixture_job(x, 5);
        slots = (const uint8_t *) x->arenas->output.map + j->slot_offset;
        assert_int_equal(j->committed, 2);
        assert_int_equal(j->n_slots, j->steps + 1);
        assert_int_equal(commit_word(x, j), wire_commit_pack(1, 2));
        assert_memory_equal(slots + 2 * stride, x->input + o->slot.offset, stride);
        assert_memory_equal(slots, x->input + o->kept.offset, 2 * stride);
        assert_memory_equal(j->state.denoised_audio, x->input + o->slot.offset + stride - 2048, 2048);
        assert_null(job_unref(j));

        /* At most one step less than all, and with all that was kept. */
        refused(x, 4, "cannot go on after step 4");
        refused(x, 3, "Tensor kept has the shape");
        refused(x, 0, "cannot use them");
        o->kept.offset = FIXTURE_ARENA - 2 * stride + 1;
        refused(x, 2, "Tensor kept lies outside");
        o->kept.offset = at;
        o->slot.offset = UINT64_MAX;
        refused(x, 2, "Tensor slot lies outside");
        o->slot.offset = at - stride;
        o->slot.size--;
        o->slot.shape[0]--;
        refused(x, 2, "Tensor slot has the shape");
        o->slot.size++;
        o->slot.shape[0]++;
        o->flags = 0;
        refused(x, 2, "keeps none");
        o->kept = (WireTensor){};
        memset(x->input + o->slot.offset + stride - 4, 0xff, 4);
        refused(x, 2, "denoised audio of slot has NaN at [31, 1, 7]");
        o->slot = (WireTensor){};
        refused(x, 2, "Tensor slot has the type");
}

/* What /proc says of the mapping at p: "r--s". */
static void assert_mapped(const void *p, const char *mode) {
        FILE *maps = fopen("/proc/self/maps", "re");
        char line[512], have[8] = "none";

        assert_non_null(maps);
        while (fgets(line, sizeof(line), maps)) {
                unsigned long begin, end;
                char m[8];

                if (sscanf(line, "%lx-%lx %7s", &begin, &end, m) == 3 && (uintptr_t) p >= begin &&
                        (uintptr_t) p < end)
                        memcpy(have, m, sizeof(have));
        }
        (void) fclose(maps);
        assert_string_equal(have, mode);
}

static void maps_are_writable_only_where_results_go(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();

        assert_mapped(fixture_model(x)->regions[0].map, "r--s");
        assert_mapped(x->arenas->input.map, "r--s");
        assert_mapped(x->arenas->output.map, "rw-s");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(job_new_refused_at_every_stage_leaks_nothing),
                cmocka_unit_test(job_new_holds_model_and_arenas),
                cmocka_unit_test(job_new_step_has_its_own_copy_of_the_latents),
                cmocka_unit_test(tensor_check_finite_finds_the_first_wherever_it_is),
                cmocka_unit_test(job_commit_writes_slots_in_turn),
                cmocka_unit_test(job_commit_closed_writes_nothing),
                cmocka_unit_test(job_new_sparse_by_model_rows_and_sigma),
                cmocka_unit_test(job_new_start_step_takes_up_the_slots),
                cmocka_unit_test(maps_are_writable_only_where_results_go),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
