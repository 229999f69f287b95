/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/golden.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

uint8_t *golden_read(const char *folder, const char *name, uint64_t *ret_size) {
        const char *data = getenv("LATENT_TEST_DATA");
        char path[4096];
        uint8_t *bytes;
        long size;
        FILE *file;

        if (!folder && !data)
                fail_msg("LATENT_TEST_DATA is not set; run the test through meson");
        (void) snprintf(path, sizeof(path), "%s/%s", folder ? folder : data, name);
        file = fopen(path, "rbe");
        if (!file)
                fail_msg("cannot open %s", path);
        assert_int_equal(fseek(file, 0, SEEK_END), 0);
        size = ftell(file);
        assert_true(size >= 0);
        rewind(file);

        bytes = malloc((size_t) size + 1);
        assert_non_null(bytes);
        assert_int_equal(fread(bytes, 1, (size_t) size, file), (size_t) size);
        bytes[size] = 0;
        (void) fclose(file);
        *ret_size = (uint64_t) size;
        return bytes;
}

bool golden_is_there(const char *name) {
        const char *data = getenv("LATENT_TEST_DATA");
        char path[4096];

        if (!data)
                fail_msg("LATENT_TEST_DATA is not set; run the test through meson");
        (void) snprintf(path, sizeof(path), "%s/dit/%s.safetensors", data, name);
        return access(path, F_OK) == 0;
}

Golden *golden_open(const char *name) {
        char file[256];

        (void) snprintf(file, sizeof(file), "dit/%s.safetensors", name);
        return golden_open_at(file);
}

Golden *golden_open_at(const char *file) {
        Golden *g = calloc(1, sizeof(*g));
        uint64_t size, header_size;
        Fault f = {};

        assert_non_null(g);
        g->bytes = golden_read(NULL, file, &size);
        if (st_header_size(g->bytes, size, size, file, &header_size, &f) < 0 ||
                st_header_parse(g->bytes, header_size, size, file, &g->header, &f) < 0)
                fail_msg("%s: %s", file, f.text);
        return g;
}

Golden *golden_free(Golden *g) {
        if (!g)
                return NULL;
        (void) st_header_free(g->header);
        free(g->bytes);
        free(g);
        return NULL;
}

void golden_freep(Golden **g) {
        (void) golden_free(*g);
}

const StTensor *golden_tensor(const Golden *g, const char *name) {
        const StTensor *t = st_header_find(g->header, name);

        if (!t)
                fail_msg("no tensor %s", name);
        return t;
}

const void *golden_data(const Golden *g, const char *name, StType type, uint64_t *ret_n) {
        const StTensor *t = golden_tensor(g, name);

        assert_int_equal(t->type, type);
        assert_int_equal(t->offset % st_type_size(type), 0);
        if (ret_n)
                *ret_n = t->size / st_type_size(type);
        return g->bytes + t->offset;
}

float golden_meta_float(const Golden *g, const char *key) {
        const char *s = st_header_meta(g->header, key);

        if (!s)
                fail_msg("no metadata %s", key);
        return strtof(s, NULL);
}

double golden_distance(const float *a, const float *b, uint64_t n, double *ret_largest) {
        double square = 0, norm = 0, largest = 0;

        for (uint64_t i = 0; i < n; i++) {
                double d = (double) a[i] - (double) b[i];

                square += d * d;
                norm += (double) b[i] * (double) b[i];
                if (!(fabs(d) <= largest))
                        largest = fabs(d);
        }
        if (ret_largest)
                *ret_largest = largest;
        if (isnan(square))
                return INFINITY;
        return square == 0 ? 0 : sqrt(square / norm);
}

GoldenModel *golden_model_open(const char *folder, const char *const *names, H3QkvOrder order) {
        GoldenModel *g = calloc(1, sizeof(*g));
        H3File files[ELEMENTSOF(g->bytes)];
        Fault f = {};
        int r;

        assert_non_null(g);
        for (; names[g->n_bytes]; g->n_bytes++) {
                size_t i = g->n_bytes;
                const char *base = strrchr(names[i], '/');
                uint64_t size;

                assert_true(i < ELEMENTSOF(g->bytes));
                g->bytes[i] = golden_read(folder, names[i], &size);
                files[i] = (H3File){.name = base ? base + 1 : names[i], .bytes = g->bytes[i], .size = size};
        }
        r = h3_model_open(files, g->n_bytes, &(H3ModelOptions){.qkv_order = order}, &g->model, &f);
        if (r < 0)
                fail_msg("cannot open the model %s: %s", names[0], f.text);
        return g;
}

GoldenModel *golden_comfy(void) {
        return golden_model_open(NULL, (const char *const[]){"dit/comfy.safetensors", NULL}, H3_QKV_AUTO);
}

GoldenModel *golden_model_free(GoldenModel *g) {
        if (!g)
                return NULL;
        (void) h3_model_free(g->model);
        for (size_t i = 0; i < g->n_bytes; i++)
                free(g->bytes[i]);
        free(g);
        return NULL;
}

void golden_model_freep(GoldenModel **g) {
        (void) golden_model_free(*g);
}

const char *golden_derived(void) {
        const char *folder = getenv("LATENT_TEST_DERIVED");

        if (!folder)
                fail_msg("LATENT_TEST_DERIVED is not set; run the test through meson");
        return folder;
}

static const StTensor *condition_tensor(const Golden *g, size_t i, const char *stream) {
        char name[64];

        (void) snprintf(name, sizeof(name), "cond.%zu.%s", i, stream);
        return st_header_find(g->header, name);
}

static const float *condition_data(const Golden *g, const StTensor *t) {
        return t ? golden_data(g, t->name, ST_F32, NULL) : NULL;
}

static H3Condition condition_of(
        const Golden *g, size_t i, const json_t *entry, H3ConditionLatents *latents) {
        static const char *const kinds[] = {"keyframe", "image", "video", "audio"};
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        const StTensor *video = condition_tensor(g, i, "video"), *audio = condition_tensor(g, i, "audio");
        H3Condition k = {.frame = (uint64_t) json_integer_value(json_object_get(entry, "frame"))};

        assert_non_null(kind);
        while (strcmp(kinds[k.kind], kind) != 0)
                assert_true(++k.kind < ELEMENTSOF(kinds));
        if (video)
                k.grid = (H3Grid){video->shape[1], video->shape[2], video->shape[3]};
        k.audio = audio ? audio->shape[2] : 0;
        *latents = (H3ConditionLatents){condition_data(g, video), condition_data(g, audio)};
        return k;
}

static uint32_t conditions_of(const Golden *g, H3Condition *ret, H3ConditionLatents *ret_latents) {
        const char *text = st_header_meta(g->header, "conds");
        json_t *list = json_loads(text ? text : "[]", 0, NULL), *entry;
        size_t i;

        assert_true(json_is_array(list) && json_array_size(list) <= H3_CONDITIONS_MAX);
        json_array_foreach(list, i, entry) ret[i] = condition_of(g, i, entry, ret_latents + i);
        json_decref(list);
        return (uint32_t) i;
}

GoldenCase *golden_case_open(const char *name, const H3Config *c) {
        GoldenCase *k = calloc(1, sizeof(*k));
        const StTensor *video, *audio, *text;
        H3Condition conditions[H3_CONDITIONS_MAX];
        H3Shape shape;
        Fault f = {};

        assert_non_null(k);
        k->file = golden_open(name);
        text = golden_tensor(k->file, "text");
        video = golden_tensor(k->file, "video");
        audio = golden_tensor(k->file, "audio");
        assert_int_equal(text->shape[1], c->text_dim);
        shape = (H3Shape){
                .text_rows = text->shape[0],
                .frames = video->shape[1],
                .height = video->shape[2],
                .width = video->shape[3],
                .audio = audio->shape[2],
                .n_conditions = conditions_of(k->file, conditions, k->conditions),
                .conditions = conditions,
        };
        if (h3_layout_new(c, &shape, golden_data(k->file, "text_tags", ST_U8, NULL), &k->layout, &f) < 0)
                fail_msg("%s: %s", name, f.text);
        assert_int_equal(k->layout->rows, (uint64_t) golden_meta_float(k->file, "rows"));

        k->text = golden_data(k->file, "text", ST_BF16, NULL);
        k->video = golden_data(k->file, "video", ST_F32, &k->n_video);
        k->audio = golden_data(k->file, "audio", ST_F32, &k->n_audio);
        k->sigma_video = golden_meta_float(k->file, "sigma_video");
        k->sigma_audio = golden_meta_float(k->file, "sigma_audio");
        return k;
}

GoldenCase *golden_case_free(GoldenCase *k) {
        if (!k)
                return NULL;
        (void) h3_layout_free(k->layout);
        (void) golden_free(k->file);
        free(k);
        return NULL;
}

void golden_case_freep(GoldenCase **k) {
        (void) golden_case_free(*k);
}

GoldenStep golden_step_new(const GoldenCase *k) {
        GoldenStep s = {.n_video = k->n_video, .n_audio = k->n_audio};

        s.video = calloc(s.n_video, sizeof(float));
        s.audio = calloc(s.n_audio, sizeof(float));
        assert_true(s.video && s.audio);
        return s;
}

void golden_step_done(GoldenStep *s) {
        free(s->video);
        free(s->audio);
}

void golden_step_run(const H3Model *m, const char *name, H3Compute compute, GoldenStep *ret) {
        char file[100];
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;

        (void) snprintf(file, sizeof(file), "case_%s", name);
        k = golden_case_open(file, &m->config);

        golden_step(m, k, compute, k->video, k->audio, k->sigma_video, k->sigma_audio, NULL, &ret->video,
                &ret->audio);
        ret->n_video = k->n_video;
        ret->n_audio = k->n_audio;
}

H3StepInput golden_input(const GoldenCase *k, H3Compute compute, const void *refined) {
        return (H3StepInput){
                .compute = compute,
                .layout = k->layout,
                .refined_text = refined,
                .video = k->video,
                .audio = k->audio,
                .conditions = k->conditions,
                .sigma_video = k->sigma_video,
                .sigma_audio = k->sigma_audio,
        };
}

void *golden_refine(const H3Model *m, const GoldenCase *k, H3Compute compute) {
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        void *refined = NULL;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(2, &rank.context), 0);
        if (h3_refine_text(&rank, m, compute, k->text, k->layout->shape.text_rows, &refined, &f) < 0)
                fail_msg("refiner: %s", f.text);
        (void) rank.ops->context_free(rank.context);
        return refined;
}

void golden_run(const H3Model *m, const H3StepInput *in, const H3Sparse *sparse, const H3StepHooks *hooks, uint64_t n_video,
        uint64_t n_audio, float **ret_video, float **ret_audio) {
        const H3Range rows = {0, in->layout->rows}, heads = {0, m->config.heads};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads, .sparse = sparse};
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        Fault f = {};

        *ret_video = malloc(n_video * sizeof(float));
        *ret_audio = malloc(n_audio * sizeof(float));
        assert_true(*ret_video && *ret_audio);
        memset(*ret_video, 0xff, n_video * sizeof(float)); /* NaN where nobody writes */
        memset(*ret_audio, 0xff, n_audio * sizeof(float));
        assert_int_equal(rank.ops->context_new(2, &rank.context), 0);
        if (h3_step(&rank, m, in, hooks, *ret_video, *ret_audio, &f) < 0)
                fail_msg("step: %s", f.text);
        (void) rank.ops->context_free(rank.context);
}

void golden_step(const H3Model *m, const GoldenCase *k, H3Compute compute, const float *video,
        const float *audio, float sigma_video, float sigma_audio, const H3StepHooks *hooks,
        float **ret_video, float **ret_audio) {
        CLEANUP_FREE void *refined = golden_refine(m, k, compute);
        H3StepInput in = golden_input(k, compute, refined);

        in.video = video;
        in.audio = audio;
        in.sigma_video = sigma_video;
        in.sigma_audio = sigma_audio;
        golden_run(m, &in, NULL, hooks, k->n_video, k->n_audio, ret_video, ret_audio);
}
