/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters as files: what is one, what is said of it, what merging it takes. */

#include "service/h3/lora.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/golden.h"

static bool recognised(const void *bytes, uint64_t size) {
        return h3_lora_recognises(&(H3File){"x.safetensors", bytes, size}, 1);
}

static bool checkpoint_recognised(const Checkpoint *c) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);

        return recognised(bytes, size);
}

static void recognises_names_of_adapters(void **state) {
        static const char *const files[] = {"dit/lora/lora_comfy.safetensors",
                "dit/lora/lora_diffusers.safetensors", "dit/lora/lora_peft.safetensors"};
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_empty(), *model = checkpoint_new();

        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                uint64_t size;
                CLEANUP_FREE uint8_t *bytes = golden_read(NULL, files[i], &size);

                assert_true(recognised(bytes, size));
                assert_false(recognised(bytes, 100)); /* cut off: not even a header */
        }
        assert_false(checkpoint_recognised(model));
        checkpoint_add(c, "blocks.0.mlp.fc1.alpha", ST_F32, 0, 0, 0, NULL);
        assert_false(checkpoint_recognised(c)); /* nothing without a matrix */
        checkpoint_add(c, "lora_unet_blocks_0_mlp_fc1.lora_down.weight", ST_F32, 2, 1, 64, NULL);
        assert_true(checkpoint_recognised(c));
        assert_false(h3_lora_recognises(NULL, 0));
}

typedef struct Adapter {
        uint8_t *bytes;
        H3Lora *lora;
} Adapter;

static Adapter adapter_open(const char *file) {
        Adapter a = {};
        uint64_t size;
        Fault f = {};

        a.bytes = golden_read(NULL, file, &size);
        if (h3_lora_open(&(H3File){"x.safetensors", a.bytes, size}, 1, NULL, &a.lora, &f) < 0)
                fail_msg("%s", f.text);
        return a;
}

static void adapter_done(Adapter *a) {
        (void) h3_lora_free(a->lora);
        free(a->bytes);
}

static void describe_counts(void **state) {
        CLEANUP(adapter_done) Adapter a = adapter_open("dit/lora/lora_comfy.safetensors");
        uint64_t qkv = 12 * 64 + 3072 * 12, out = 4 * 1024 + 64 * 4, fc1 = 4 * 64 + 192 * 4,
                 fc2 = 4 * 96 + 64 * 4;
        H3LoraInfo info;

        h3_lora_describe(a.lora, &info);
        assert_int_equal(info.n_tensors, 36);
        assert_int_equal(info.weight_bytes, 3 * 2 * (qkv + out + fc1 + fc2) + 12 * 4);
        assert_string_equal(info.types, "BF16, F32");
        assert_true(info.private_bytes > 36 * sizeof(void *));
}

/* What is said to stay is what stays, for every kind of base; the work comes on top. */
static void memory_is_what_the_merge_takes(void **state) {
        CLEANUP(adapter_done)
        Adapter a = adapter_open("dit/lora/lora_comfy.safetensors"),
                b = adapter_open("dit/lora/lora_peft.safetensors");
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        LkContext *context;

        assert_int_equal(ops->context_new(1, &context), 0);
        for (unsigned i = 0; i < 4; i++) {
                CLEANUP(golden_model_freep)
                GoldenModel *base =
                        i < 2 ? golden_comfy()
                              : golden_model_open(golden_derived(),
                                        (const char *const[]){"comfy_int8.safetensors", NULL}, H3_QKV_AUTO);
                H3Compute compute = i % 2 ? H3_COMPUTE_BF16 : H3_COMPUTE_F32;
                const H3LoraUse uses[] = {{a.lora, 1}, {b.lora, 0.5}, {a.lora, 0}};
                H3LoraReport *report;
                H3Model *m;
                uint64_t bytes, kept;
                Fault f = {};

                assert_int_equal(h3_lora_memory(base->model, uses, 3, compute, &bytes, &kept, &f), 0);
                assert_int_equal(
                        h3_model_with_loras(base->model, uses, 3, compute, ops, context, NULL, &m, &report, &f),
                        0);
                assert_int_equal(kept, m->private_bytes);
                /* the largest: q, k or v of 1024 x 64, in f32, five of them, and two factors of rank 12 */
                assert_int_equal(bytes - kept, 5 * 4 * 64 * 1024 + 2 * 4 * 12 * (64 + 1024));
                (void) h3_model_free(m);
                (void) h3_lora_report_free(report);

                /* nothing to merge */
                assert_int_equal(h3_lora_memory(base->model, uses + 2, 1, compute, &bytes, &kept, &f), 0);
                assert_int_equal(bytes + kept, 0);
        }
        (void) ops->context_free(context);
}

/* Refused as the merge would be. */
static void memory_refuses_what_does_not_apply(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_empty();
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size, x, y;
        H3Lora *l = NULL;
        Fault f = {};

        checkpoint_add(c, "blocks.7.mlp.fc1.lora_A.weight", ST_F32, 2, 1, 64, NULL);
        checkpoint_add(c, "blocks.7.mlp.fc1.lora_B.weight", ST_F32, 2, 192, 1, NULL);
        bytes = checkpoint_write(c, &size);
        assert_int_equal(h3_lora_open(&(H3File){"x.safetensors", bytes, size}, 1, NULL, &l, &f), 0);
        assert_int_equal(
                h3_lora_memory(base->model, &(H3LoraUse){l, 1}, 1, H3_COMPUTE_F32, &x, &y, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_MODEL);
        f = (Fault){};
        assert_int_equal(
                h3_lora_memory(base->model, &(H3LoraUse){l, 1001}, 1, H3_COMPUTE_F32, &x, &y, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        (void) h3_lora_free(l);
}

/* Modules are looked for among all before them: a file of a million would stop a worker for hours. */
static void far_too_many_tensors_are_refused(void **state) {
        enum { N = 16385 };
        CLEANUP_CLOSE int fd = memfd_create("adapter", MFD_CLOEXEC);
        CLEANUP_FREE StTensor *tensors = calloc(N, sizeof(*tensors));
        CLEANUP_FREE const void **data = calloc(N, sizeof(*data));
        char(*names)[40] = calloc(N, sizeof(*names));
        H3Lora *l = NULL;
        Fault f = {};
        off_t size;
        void *map;

        assert_true(fd >= 0 && tensors && data && names);
        for (unsigned i = 0; i < N; i++) {
                (void) snprintf(
                        names[i], sizeof(names[i]), "blocks.%u.lora_%c.weight", i / 2, i % 2 ? 'B' : 'A');
                tensors[i] =
                        (StTensor){.name = names[i], .type = ST_F32, .n_dims = 1, .shape = {1}, .size = 4};
                data[i] = "\0\0\0";
        }
        assert_int_equal(st_write(fd, tensors, data, N, NULL, 0), 0);
        size = lseek(fd, 0, SEEK_END);
        map = mmap(NULL, (size_t) size, PROT_READ, MAP_SHARED, fd, 0);
        assert_true(map != MAP_FAILED);
        assert_true(recognised(map, (uint64_t) size));
        assert_int_equal(
                h3_lora_open(&(H3File){"x.safetensors", map, (uint64_t) size}, 1, NULL, &l, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_MODEL);
        assert_non_null(strstr(f.text, "has 16385 tensors; expected at most 16384"));
        assert_int_equal(munmap(map, (size_t) size), 0);
        free(names);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(recognises_names_of_adapters),
                cmocka_unit_test(describe_counts),
                cmocka_unit_test(memory_is_what_the_merge_takes),
                cmocka_unit_test(memory_refuses_what_does_not_apply),
                cmocka_unit_test(far_too_many_tensors_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
