/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: LoRA adapters as models, merged for jobs. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 18)
#define BASE 1
#define ADAPTER 3

static const char *const spellings[] = {"diffusers", "comfy", "peft"};
static const uint32_t n_modules[] = {18, 12, 18};

static void load_adapter(Broker *b, uint64_t id, const char *spelling, WireMessage *ret) {
        char file[64];

        (void) snprintf(file, sizeof(file), "dit/lora/lora_%s.safetensors", spelling);
        broker_load_file(b, id, "", file, ret);
}

static Broker *open_with(const Arenas *a) {
        Broker *b = broker_open(1);

        broker_load_model(b, BASE, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

static void use(WireMessage *open, uint32_t n, uint64_t model, double strength) {
        open->job_open.loras[n] = (WireLora){model, strength};
        open->job_open.n_loras = n + 1;
}

/* MERGE of these adapters: what applies and what not, and the last message. */
static void merge(Broker *b, uint64_t job, const WireMessage *like, uint32_t *ret_applied,
        uint32_t *ret_refused, WireMessage *ret_done) {
        WireMessage m;

        wire_init(&m, WIRE_JOB_OPEN, b->epoch, job, 0);
        m.job_open.kind = WIRE_JOB_MERGE;
        m.job_open.model = like->job_open.model;
        m.job_open.session = like->job_open.session;
        m.job_open.compute = like->job_open.compute;
        m.job_open.n_loras = like->job_open.n_loras;
        memcpy(m.job_open.loras, like->job_open.loras, sizeof(m.job_open.loras));
        broker_send(b, &m, -EBADF);
        broker_expect(b, WIRE_JOB_READY, job, &m);
        assert_int_equal(m.job_ready.steps, 1);
        assert_int_equal(m.job_ready.rows + m.job_ready.n_slots + m.job_ready.output_used, 0);
        broker_say(b, WIRE_STEP, job, 0);
        *ret_applied = *ret_refused = 0;
        for (;;) {
                assert_true(broker_receive(b, &m));
                assert_int_equal(m.header.job, job);
                if (m.header.type != WIRE_LORA_NOTES)
                        break;
                assert_in_range(m.lora_notes.n, 1, WIRE_LORA_NOTES_MAX);
                for (uint32_t i = 0; i < m.lora_notes.n; i++) {
                        const WireLoraNote *x = &m.lora_notes.notes[i];

                        assert_true(x->name[0] != '\0' && x->lora < like->job_open.n_loras);
                        assert_int_equal(x->refused, x->reason[0] != '\0');
                        assert_true(*ret_refused == 0 || x->refused); /* those that apply come first */
                        ++*(x->refused ? ret_refused : ret_applied);
                }
        }
        if (m.header.type == WIRE_STEP_DONE)
                broker_say(b, WIRE_JOB_CLOSE, job, 0);
        *ret_done = m;
}

static void model_lora_is_told_by_names(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage ready;

        for (size_t i = 0; i < ELEMENTSOF(spellings); i++) {
                load_adapter(b, ADAPTER + i, spellings[i], &ready);
                assert_int_equal(ready.model_ready.kind, WIRE_MODEL_LORA);
                assert_string_equal(ready.model_ready.layout, "lora");
                assert_int_equal(ready.model_ready.n_tensors, 36);
                assert_int_equal(ready.model_ready.layers, 0);
                assert_string_equal(ready.model_ready.types, i == 1 ? "BF16, F32" : "BF16");
                assert_true(ready.model_ready.weight_bytes > 100000 && ready.model_ready.private_bytes > 0);
        }
        broker_load_model(b, 9, &ready);
        assert_int_equal(ready.model_ready.kind, WIRE_MODEL_DENOISER);
        assert_true(ready.model_ready.support[0] != '\0'); /* what this backend does with it */
}

static void model_broken_lora_refused(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_empty();
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;

        checkpoint_add(c, "blocks.0.attn.out_proj.lora_A.weight", ST_BF16, 2, 4, 1024, NULL);
        bytes = checkpoint_write(c, &size);
        broker_offer_model(b, ADAPTER, "", bytes, size);
        broker_expect_error(b, ADAPTER, FAULT_INVALID_MODEL, "is no LoRA");
        load_adapter(b, ADAPTER, "comfy", NULL); /* the id is free again */
}

static void run_golden(Broker *b, Arenas *a, uint64_t job, const char *name, double strength) {
        CLEANUP(golden_freep) Golden *want = NULL;
        WireMessage open, ready;
        char file[64];

        (void) snprintf(file, sizeof(file), "case_%s", name);
        open = job_of_golden(b, job, a, file);
        use(&open, 0, ADAPTER, strength);
        broker_open_job(b, &open, &ready);
        broker_step(b, job, 0);
        (void) snprintf(file, sizeof(file), "expect_%s.lora%s.f32", name, strength == 0.5 ? "_s0.5" : "");
        want = golden_open(file);
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", open.job_open.video.size / 4, 5e-6);
        assert_near(slot_audio(a, &ready, 1), want, "audio_velocity", open.job_open.audio.size / 4, 5e-6);
        broker_say(b, WIRE_JOB_CLOSE, job, 0);
}

static void step_lora_matches_reference(void **state) {
        static const char *const cases[] = {"t2va_tiny", "ref2va_small", "fl2va_mid"};

        for (size_t i = 0; i < ELEMENTSOF(spellings); i++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA << 1, ARENA);
                CLEANUP(broker_freep) Broker *b = open_with(a);

                load_adapter(b, ADAPTER, spellings[i], NULL);
                for (size_t k = 0; k < ELEMENTSOF(cases); k++) {
                        run_golden(b, a, 10 + k, cases[k], 1);
                        run_golden(b, a, 20 + k, cases[k], 0.5);
                }
        }
}

/* Velocities of t2va_tiny with what `open` says, as one piece. */
typedef struct Velocities {
        float values[768 + 512];
} Velocities;

static void run_tiny(Broker *b, const Arenas *a, WireMessage *open, Velocities *ret) {
        WireMessage ready;

        broker_open_job(b, open, &ready);
        broker_step(b, open->header.job, 0);
        memcpy(ret->values, slot_video(a, &ready, 1), 768 * 4);
        memcpy(ret->values + 768, slot_audio(a, &ready, 1), 512 * 4);
        broker_say(b, WIRE_JOB_CLOSE, open->header.job, 0);
}

static bool same(const Velocities *x, const Velocities *y) {
        return memcmp(x, y, sizeof(*x)) == 0;
}

/* The base's bits without adapters, with strengths of 0, and after jobs that have some; each set has its
 * own, whatever was merged before. */
static void step_lora_leaves_the_base_alone(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        Velocities base, x, full, half, both;
        WireMessage open;

        load_adapter(b, ADAPTER, "comfy", NULL);
        load_adapter(b, 4, "diffusers", NULL);
        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        run_tiny(b, a, &open, &base);
        use(&open, 0, ADAPTER, 0);
        use(&open, 1, 4, -0.0);
        run_tiny(b, a, &open, &x);
        assert_true(same(&x, &base));

        use(&open, 0, ADAPTER, 1);
        run_tiny(b, a, &open, &full);
        assert_false(same(&full, &base));
        use(&open, 0, ADAPTER, 0.5);
        run_tiny(b, a, &open, &half);
        assert_false(same(&half, &base) || same(&half, &full));
        use(&open, 1, 4, -0.5);
        run_tiny(b, a, &open, &both); /* the other spelling takes it away again, but for rounding */
        assert_false(same(&both, &base) || same(&both, &half));

        for (unsigned round = 0; round < 2; round++) { /* three sets and a cache of two */
                open.job_open.n_loras = 0;
                run_tiny(b, a, &open, &x);
                assert_true(same(&x, &base));
                use(&open, 0, ADAPTER, 1);
                run_tiny(b, a, &open, &x);
                assert_true(same(&x, &full));
                use(&open, 0, ADAPTER, 0.5);
                run_tiny(b, a, &open, &x);
                assert_true(same(&x, &half));
                use(&open, 1, 4, -0.5);
                run_tiny(b, a, &open, &x);
                assert_true(same(&x, &both));
                use(&open, 1, 4, 0); /* a set of its own, and the same numbers */
                run_tiny(b, a, &open, &x);
                assert_true(same(&x, &half));
        }
}

/* The text is refined by the refiner of the job's own model: of base and adapters in turn. */
static void jobs_with_and_without_loras_interleaved_same_bits(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage open[2], ready[2];
        float alone[2][768];

        load_adapter(b, ADAPTER, "comfy", NULL);
        for (unsigned i = 0; i < 2; i++) {
                open[i] = job_of_golden(b, 5 + i, a, "traj_euler_4");
                open[i].job_open.output_offset = (uint64_t) i << 16;
                open[i].job_open.output_size = 1 << 16;
        }
        use(&open[1], 0, ADAPTER, 1);
        for (unsigned i = 0; i < 2; i++) {
                broker_open_job(b, &open[i], &ready[i]);
                for (uint32_t s = 0; s < 4; s++)
                        broker_step(b, 5 + i, s);
                memcpy(alone[i], slot_video(a, &ready[i], 4), sizeof(alone[i]));
                broker_say(b, WIRE_JOB_CLOSE, 5 + i, 0);
        }
        assert_memory_not_equal(alone[0], alone[1], sizeof(alone[0]));
        for (unsigned i = 0; i < 2; i++)
                broker_open_job(b, &open[i], &ready[i]);
        for (uint32_t s = 0; s < 4; s++)
                for (unsigned i = 0; i < 2; i++)
                        broker_step(b, 5 + i, s);
        for (unsigned i = 0; i < 2; i++)
                assert_memory_equal(slot_video(a, &ready[i], 4), alone[i], sizeof(alone[i]));
}

static void merge_says_what_applies(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        uint32_t applied, refused;
        WireMessage open, done;
        uint64_t bytes;

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        merge(b, 6, &open, &applied, &refused, &done); /* of nothing */
        assert_int_equal(done.header.type, WIRE_STEP_DONE);
        assert_int_equal(applied + refused + done.step_done.merged_bytes, 0);

        for (size_t i = 0; i < ELEMENTSOF(spellings); i++) {
                load_adapter(b, ADAPTER + i, spellings[i], NULL);
                use(&open, 0, ADAPTER + i, 1);
                for (unsigned again = 0; again < 2; again++) { /* by a merge, and of the kept one */
                        merge(b, 6, &open, &applied, &refused, &done);
                        assert_int_equal(done.header.type, WIRE_STEP_DONE);
                        assert_int_equal(applied, n_modules[i]);
                        assert_int_equal(refused, 0);
                        assert_true(again == 0 || bytes == done.step_done.merged_bytes);
                        bytes = done.step_done.merged_bytes;
                        assert_true(bytes > 0);
                }
        }

        /* all three */
        for (uint32_t i = 0; i < ELEMENTSOF(spellings); i++)
                use(&open, i, ADAPTER + i, 0.25);
        merge(b, 6, &open, &applied, &refused, &done);
        assert_int_equal(applied, 48);

        /* strengths of 0: asked all the same, and nothing to keep */
        open.job_open.n_loras = 0;
        use(&open, 0, ADAPTER, 0);
        merge(b, 6, &open, &applied, &refused, &done);
        assert_int_equal(applied, 18);
        assert_int_equal(done.step_done.merged_bytes, 0);
        for (uint64_t i = 0; i < a->output_size; i++)
                assert_int_equal(a->output[i], 0xa5);
}

/* A module that the model does not have is named; where none applies the merge and the jobs fail. */
static void merge_refused_modules_are_named(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_empty();
        CLEANUP_FREE uint8_t *bytes = NULL, *few = NULL;
        uint32_t applied, refused;
        WireMessage open, ready, done;
        uint64_t size;

        for (unsigned i = 1; i <= 40; i++) { /* more than three messages' worth */
                char name[64];

                (void) snprintf(name, sizeof(name), "blocks.%u.attn.out_proj.lora_A.weight", 2 + i);
                checkpoint_add(c, name, ST_BF16, 2, 4, 1024, NULL);
                (void) snprintf(name, sizeof(name), "blocks.%u.attn.out_proj.lora_B.weight", 2 + i);
                checkpoint_add(c, name, ST_BF16, 2, 64, 4, NULL);
        }
        few = checkpoint_write(c, &size);
        broker_offer_model(b, 4, "", few, size);
        broker_expect(b, WIRE_MODEL_READY, 4, NULL);
        checkpoint_add(c, "blocks.2.attn.out_proj.lora_A.weight", ST_BF16, 2, 4, 1024, NULL);
        checkpoint_add(c, "blocks.2.attn.out_proj.lora_B.weight", ST_BF16, 2, 64, 4, NULL);
        bytes = checkpoint_write(c, &size);
        broker_offer_model(b, ADAPTER, "", bytes, size);
        broker_expect(b, WIRE_MODEL_READY, ADAPTER, NULL);

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        use(&open, 0, ADAPTER, 1);
        merge(b, 6, &open, &applied, &refused, &done);
        assert_int_equal(applied, 1);
        assert_int_equal(refused, 40);

        use(&open, 0, 4, 1);
        merge(b, 6, &open, &applied, &refused, &done);
        assert_int_equal(done.header.type, WIRE_ERROR);
        assert_string_equal(done.error.fault.name, FAULT_INVALID_MODEL);
        assert_non_null(strstr(done.error.fault.text, "Nothing of adapter 0 applies"));
        assert_int_equal(applied + refused, 0);
        broker_open_job(b, &open, &ready);
        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_INVALID_MODEL, "Nothing of adapter 0 applies");
        assert_commit(a, &ready, 1, 0);
}

/* Jobs hold what they are made of, merged or not yet; an id may mean another adapter afterwards. */
static void lora_closed_under_jobs_lives_on(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(golden_freep) Golden *want = golden_open("expect_t2va_tiny.lora.f32");
        CLEANUP(broker_freep) Broker *b = open_with(a);
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_empty();
        CLEANUP_FREE uint8_t *bytes = NULL;
        WireMessage open, ready, other;
        Velocities base, x;
        uint64_t size;

        load_adapter(b, ADAPTER, "comfy", NULL);
        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        run_tiny(b, a, &open, &base);
        use(&open, 0, ADAPTER, 1);
        run_tiny(b, a, &open, &x); /* so that it is kept */
        broker_open_job(b, &open, &ready);
        broker_say(b, WIRE_MODEL_CLOSE, ADAPTER, 0);

        /* zeros: applies and changes nothing */
        checkpoint_add(c, "blocks.2.attn.out_proj.lora_A.weight", ST_BF16, 2, 4, 1024, NULL);
        checkpoint_add(c, "blocks.2.attn.out_proj.lora_B.weight", ST_BF16, 2, 64, 4, NULL);
        bytes = checkpoint_write(c, &size);
        broker_offer_model(b, ADAPTER, "", bytes, size);
        broker_expect(b, WIRE_MODEL_READY, ADAPTER, NULL);

        broker_say(b, WIRE_MODEL_CLOSE, BASE, 0);
        broker_step(b, 5, 0); /* merged anew: what was kept went with the adapter */
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", 768, 5e-6);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);

        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INTERNAL, "model 1, which the worker does not hold");
        broker_load_model(b, BASE, NULL);
        other = open;
        other.header.job = 8;
        run_tiny(b, a, &other, &x);
        assert_true(same(&x, &base));
}

static void merge_cancelled_before_it_begins(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 23, 1 << 23);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage longer, open, ready, merging;

        load_adapter(b, ADAPTER, "comfy", NULL);
        longer = job_long(b, 5, a, 4);
        longer.job_open.output_size = 1 << 22;
        broker_open_job(b, &longer, &ready);
        open = job_of_golden(b, 6, a, "case_t2va_tiny");
        open.job_open.output_offset = 1 << 22;
        open.job_open.output_size = 1 << 22;
        use(&open, 0, ADAPTER, 1);
        merging = open;
        merging.header.job = 7;
        merging.job_open.kind = WIRE_JOB_MERGE;
        broker_open_job(b, &open, &ready);
        broker_send(b, &merging, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 7, NULL);
        broker_plan(b, 7, 33); /* ignored */

        broker_say(b, WIRE_STEP, 5, 0);
        broker_say(b, WIRE_STEP, 6, 0);
        broker_say(b, WIRE_STEP, 7, 0);
        broker_say(b, WIRE_CANCEL, 6, 0);
        broker_say(b, WIRE_CANCEL, 7, 0);
        broker_expect(b, WIRE_STEP_DONE, 5, NULL);
        broker_expect_error(b, 6, FAULT_CANCELLED, "cancelled");
        broker_expect_error(b, 7, FAULT_CANCELLED, "cancelled");
        assert_commit(a, &ready, 1, 0);
}

/* A trajectory with adapters that a worker's death interrupts: merged again, the same bits. */
static void sample_lora_killed_same_bits(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        WireMessage open = {}, ready;
        float video[768];

        for (uint32_t round = 0; round < 3; round++) {
                CLEANUP(broker_freep) Broker *b = broker_open(round + 1);
                uint32_t begin = round == 2 ? 2 : 0, end = round == 1 ? 2 : 4;

                broker_load_model(b, BASE, NULL);
                load_adapter(b, ADAPTER, "peft", NULL);
                broker_give_arenas(b, 2, a);
                if (round == 0) {
                        open = job_of_golden(b, 5, a, "traj_res_multistep_4");
                        use(&open, 0, ADAPTER, 0.75);
                }
                open.job_open.compute = WIRE_COMPUTE_BF16;
                open.header.epoch = round + 1;
                open.job_open.flags = round == 2 ? WIRE_JOB_RESUME : 0;
                broker_open_job(b, &open, &ready);
                for (uint32_t i = begin; i < end; i++)
                        broker_step(b, 5, i);
                if (round == 0)
                        memcpy(video, slot_video(a, &ready, 4), sizeof(video));
                broker_kill(b);
        }
        assert_memory_equal(slot_video(a, &ready, 4), video, sizeof(video));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(model_lora_is_told_by_names),
                cmocka_unit_test(model_broken_lora_refused),
                cmocka_unit_test(step_lora_matches_reference),
                cmocka_unit_test(step_lora_leaves_the_base_alone),
                cmocka_unit_test(jobs_with_and_without_loras_interleaved_same_bits),
                cmocka_unit_test(merge_says_what_applies),
                cmocka_unit_test(merge_refused_modules_are_named),
                cmocka_unit_test(lora_closed_under_jobs_lives_on),
                cmocka_unit_test(merge_cancelled_before_it_begins),
                cmocka_unit_test(sample_lora_killed_same_bits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
