/* SPDX-License-Identifier: Apache-2.0 */
/* Coding jobs on the CUDA worker's parts: the CPU's bits where all of it is f32 (f32 operations have them), else as close to f32
 * as the CPU's bf16 or f16; and the same bits wherever the weights are. Needs a CUDA device; without one every test skips. What a backend
 * has no operations for is named. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cuda/cuda.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/worker/coder-kinds.h"

DEFINE_CLEANUP(Job *, job_unref)

#define BF16_FACTOR 1.25
#define PLENTY (UINT64_C(1) << 33)

static bool has_device;
static uint64_t room; /* that the device is said to have */

static int setup(void **state) {
        LkContext *c = NULL;
        int r = lk_cuda_ops()->context_new(0, &c);

        has_device = r >= 0;
        (void) lk_cuda_ops()->context_free(c);
        return r == -ENODEV || r >= 0 ? 0 : -1;
}

static int device_memory(uint32_t device, uint64_t *ret_free, uint64_t *ret_total) {
        *ret_free = *ret_total = room;
        return 0;
}

static CoderBench *bench_on_gpu(void) {
        CoderBench *b = bench_new(1, CODER_ARENA);

        encode_cache_set_limit(&b->runner.encodes, 0);
        bench_set_ops(b, lk_cuda_ops(), device_memory);
        return b;
}

/* Once, or NULL where the backend lacks an operation. *ret_blocks: parts that were on the device. */
static uint8_t *try_run(CoderBench *b, const CoderKind *k, uint64_t *ret_size, uint32_t *ret_blocks, int *ret_error) {
        uint8_t *copy = NULL;
        StepResult result = {};
        WireJobOpen w;
        Fault f = {};
        Job *j = NULL;

        b->used = 0;
        memset(b->output, 0, b->size);
        if (!model_table_find(&b->models, k->model))
                bench_load(b, k->model, coder_files(k->model));
        w = k->job(b);
        *ret_error = bench_try_open(b, &w, &j, &f);
        if (*ret_error == -EOPNOTSUPP)
                return NULL;
        if (*ret_error < 0)
                fail_msg("%s: %s", k->name, f.text);
        while (*ret_error >= 0 && j->committed < j->steps)
                *ret_error = bench_try_step(b, j, &result, &f);
        if (*ret_error < 0 && *ret_error != -ENOMEM)
                fail_msg("%s: %s", k->name, f.text);
        if (*ret_error >= 0) {
                *ret_size = j->coder->outputs[0].tensor.size;
                copy = bench_output(b, j, 0);
                *ret_blocks = b->runner.residency.figures[0].blocks;
        }
        (void) job_unref(j);
        return copy;
}

static uint8_t *run(CoderBench *b, const CoderKind *k, uint64_t *ret_size) {
        uint32_t blocks;
        int error;

        return try_run(b, k, ret_size, &blocks, &error);
}

static bool is_f32(const CoderKind *k) {
        return k->model != CODER_CONDITIONER ? !strstr(k->name, "in f16") : strstr(k->name, "f32") != NULL;
}

static void code_f32_same_bits_as_cpu(void **state) {
        CoderBench *gpu, *cpu;

        if (!has_device)
                skip();
        room = PLENTY;
        gpu = bench_on_gpu();
        cpu = bench_new(1, CODER_ARENA);
        for (size_t i = 0; i < CODER_KINDS; i++) {
                const CoderKind *k = coder_kinds + i;
                CLEANUP_FREE uint8_t *want = NULL, *have = NULL;
                uint64_t size, n, differ = 0;
                double worst = 0;

                if (!is_f32(k))
                        continue;
                have = run(gpu, k, &size);
                if (!have) {
                        print_message("# %s: not run, an operation is missing\n", k->name);
                        continue;
                }
                want = run(cpu, k, &n);
                assert_int_equal(n, size);
                for (uint64_t at = 0; at < size / 4; at++) {
                        double d = (double) h3_number(have, LK_F32, at) - (double) h3_number(want, LK_F32, at);

                        differ += memcmp(have + 4 * at, want + 4 * at, 4) != 0;
                        worst = fabs(d) > worst ? fabs(d) : worst;
                }
                if (differ > 0)
                        fail_msg("%s: %llu of %llu numbers differ, by %g at most", k->name, (unsigned long long) differ,
                                (unsigned long long) size / 4, worst);
                print_message("# %s: %llu numbers, the CPU's bits\n", k->name, (unsigned long long) size / 4);
        }
        (void) bench_free(gpu);
        (void) bench_free(cpu);
}

static float *widen(const uint8_t *bf16, uint64_t n) {
        float *x = malloc(n * sizeof(*x));

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++)
                x[i] = h3_number(bf16, LK_BF16, i);
        return x;
}

static void code_bf16_as_close_to_f32_as_cpu(void **state) {
        CoderBench *gpu, *cpu;
        CLEANUP_FREE uint8_t *exact = NULL, *own = NULL, *have = NULL;
        CLEANUP_FREE float *wide_own = NULL, *wide_have = NULL;
        uint64_t size, n;
        double d, limit;

        if (!has_device)
                skip();
        room = PLENTY;
        gpu = bench_on_gpu();
        cpu = bench_new(1, CODER_ARENA);
        exact = run(cpu, coder_kinds + 2, &size);
        own = run(cpu, coder_kinds + 1, &n);
        have = run(gpu, coder_kinds + 1, &n);
        assert_int_equal(n, size / 2);
        wide_own = widen(own, n / 2);
        wide_have = widen(have, n / 2);
        limit = golden_distance(wide_own, (const float *) exact, n / 2, NULL) * BF16_FACTOR;
        d = golden_distance(wide_have, (const float *) exact, n / 2, NULL);
        print_message("# words and pictures in bf16: %.3g from f32, at most %.3g\n", d, limit);
        assert_true(d <= limit);
        (void) bench_free(gpu);
        (void) bench_free(cpu);
}

/* Two chunks of six tiles, as f32 pixels. */
static uint8_t *run_film(CoderBench *b, WireCompute compute, uint64_t *ret_size) {
        CLEANUP_FREE float *z = bench_numbers(24 * 8 * 18 * 34, 1);
        WireJobOpen w;

        b->used = 0;
        if (!model_table_find(&b->models, CODER_VIDEO_ORIGINAL))
                bench_load(b, CODER_VIDEO_ORIGINAL, coder_files(CODER_VIDEO_ORIGINAL));
        w = bench_job(b, WIRE_JOB_DECODE, CODER_VIDEO_ORIGINAL);
        w.video = bench_put(b, ST_F32, 4, (uint64_t[]){24, 8, 18, 34}, z);
        w.output_type = ST_F32;
        w.compute = compute;
        return bench_run(b, &w, ret_size);
}

#define HALF_LIMIT 3e-3
#define FILM_ARENA (UINT64_C(80) << 20)

/* As near as the published f16 decoder has to be, and as the CPU is; no bit depends on how many tiles there are in a launch, or on who
 * blends them. */
static void decode_f16_near_f32_whatever_the_batch(void **state) {
        static const uint32_t batches[] = {8, 1, 4};
        CLEANUP_FREE uint8_t *exact = NULL, *own = NULL, *first = NULL;
        CoderBench *cpu;
        uint64_t size, n;
        double limit, d;

        if (!has_device)
                skip();
        room = PLENTY;
        cpu = bench_new(1, FILM_ARENA);
        exact = run_film(cpu, WIRE_COMPUTE_F32, &size);
        cpu->ops.half = true;
        own = run_film(cpu, WIRE_COMPUTE_AUTO, &n);
        (void) bench_free(cpu);
        limit = golden_distance((const float *) own, (const float *) exact, size / 4, NULL) * BF16_FACTOR;
        assert_true(limit > 0 && limit <= HALF_LIMIT);
        for (size_t i = 0; i < ELEMENTSOF(batches); i++) {
                CoderBench *gpu = bench_new(1, FILM_ARENA);
                CLEANUP_FREE uint8_t *have = NULL;

                bench_set_ops(gpu, lk_cuda_ops(), device_memory);
                gpu->ops.batch = batches[i];
                have = run_film(gpu, WIRE_COMPUTE_AUTO, &n);
                assert_int_equal(n, size);
                d = golden_distance((const float *) have, (const float *) exact, size / 4, NULL);
                print_message("# video in f16, %u tiles a launch: %.3g from f32, at most %.3g\n", batches[i], d, limit);
                assert_true(d > 0 && d <= limit);
                if (first && memcmp(first, have, size) != 0)
                        fail_msg("%u tiles a launch: the bits differ", batches[i]);
                if (!first)
                        first = STEAL_PTR(have);
                (void) bench_free(gpu);
        }
}

/* With less and less memory until there is none for the step: what stays and what passes changes no bit. */
static void code_any_memory_same_bits(void **state) {
        unsigned passed = 0, runs = 0;

        if (!has_device)
                skip();
        for (size_t i = 0; i < CODER_KINDS; i++) {
                const CoderKind *k = coder_kinds + i;
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size, all;
                uint32_t most;
                CoderBench *b;
                int error = 0;

                room = PLENTY;
                b = bench_on_gpu();
                want = try_run(b, k, &size, &most, &error);
                all = b->runner.residency.figures[0].bytes;
                (void) bench_free(b);
                runs += want != NULL;
                for (unsigned part = 15; want && part > 2 && error == 0; part -= 3) {
                        CLEANUP_FREE uint8_t *have = NULL;
                        uint32_t blocks = most;
                        uint64_t n;

                        b = bench_on_gpu();
                        bench_load(b, k->model, coder_files(k->model));
                        b->used = 0;
                        {
                                const WireJobOpen w = k->job(b);
                                CLEANUP(job_unrefp) Job *j = bench_open(b, &w);

                                room = (j->coder->device_bytes + all * part / 16) / 63 * 64;
                        }
                        have = try_run(b, k, &n, &blocks, &error);
                        if (have && (n != size || memcmp(have, want, size) != 0))
                                fail_msg("%s: the bits differ with %u of %u parts on the device", k->name, blocks, most);
                        passed += have && blocks < most;
                        (void) bench_free(b);
                }
        }
        print_message("# %u kinds of jobs, %u runs with weights that pass\n", runs, passed);
        assert_true(runs >= 5 && passed >= runs);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(code_f32_same_bits_as_cpu),
                cmocka_unit_test(code_bf16_as_close_to_f32_as_cpu),
                cmocka_unit_test(decode_f16_near_f32_whatever_the_batch),
                cmocka_unit_test(code_any_memory_same_bits),
        };

        return cmocka_run_group_tests(tests, setup, NULL);
}
