/* SPDX-License-Identifier: Apache-2.0 */
/* The audio VAE against the published one, stage by stage, and against itself: pieces, ranks, orders. Takes
 * whatever cases vae/audio of the data has. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/audio.h"

#define LIMIT 2e-5 /* relative, of README of the golden data */

static void json_unref(json_t **j) {
        json_decref(*j);
}

static json_t *index_open(void) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = golden_read(NULL, "vae/audio/index.json", &size);
        json_t *root = json_loadb((const char *) bytes, size, 0, NULL);

        assert_non_null(root);
        return root;
}

/* Files of a kind: one that the index does not name would be tested by nobody. */
static unsigned count_files(const char *kind) {
        const char *data = getenv("LATENT_TEST_DATA");
        const struct dirent *entry;
        char path[4096];
        unsigned n = 0;
        DIR *dir;

        (void) snprintf(path, sizeof(path), "%s/vae/audio", data ? data : "");
        dir = opendir(path);
        assert_non_null(dir);
        while ((entry = readdir(dir)))
                n += strncmp(entry->d_name, kind, strlen(kind)) == 0;
        (void) closedir(dir);
        return n;
}

/* Calls fn with each case's file, and whether it has stages. */
static unsigned each_case(const char *kind, void (*fn)(const Golden *g, bool stages)) {
        CLEANUP(json_unref) json_t *root = index_open();
        const json_t *list = json_object_get(root, kind), *entry;
        size_t i;

        assert_int_equal(json_array_size(list), count_files(kind));
        json_array_foreach(list, i, entry) {
                CLEANUP(golden_freep) Golden *g = NULL;
                char file[256];

                (void) snprintf(file, sizeof(file), "vae/audio/%s_%s.safetensors", kind,
                        json_string_value(json_object_get(entry, "name")));
                g = golden_open_at(file);
                fn(g, json_is_true(json_object_get(entry, "taps")));
        }
        return (unsigned) json_array_size(list);
}

static void check_close(const float *got, const float *expected, uint64_t n, const char *what) {
        double distance = golden_distance(got, expected, n, NULL);

        print_message("# %s: %.2g\n", what, distance);
        if (!(distance <= LIMIT))
                fail_msg("%s: relative distance %.3g", what, distance);
}

/* A case's rows of the transformer as latents [channels, 2, A]. */
static float *latents_of(const Golden *g, const char *name, const H3AudioVae *v, uint64_t *ret_n) {
        const H3Config c = {.audio_channels = v->config.channels};
        uint64_t numbers;
        const float *rows = golden_data(g, name, ST_F32, &numbers);
        float *latents = malloc(numbers * sizeof(float));

        assert_non_null(latents);
        *ret_n = numbers / 2 / v->config.channels;
        h3_rows_to_audio(&c, *ret_n, rows, 0, 2 * *ret_n, latents);
        return latents;
}

/* A stage of both channels, first the one, then the other. */
typedef struct Taps {
        const Golden *golden;
        char seen[64][24];
        unsigned n, compared;
} Taps;

static void on_tap(void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns) {
        Taps *t = userdata;
        char tensor[40], what[64];
        bool across =
                strncmp(name, "pre_block", 9) == 0; /* [2, A, channels]; else [2, channels, positions] */
        unsigned channel = 0;
        const StTensor *entry;
        const float *expected;
        CLEANUP_FREE float *got = malloc(rows * columns * sizeof(float));

        (void) snprintf(tensor, sizeof(tensor), "tap.%s", name);
        entry = st_header_find(t->golden->header, tensor);
        if (!entry)
                return;
        for (unsigned i = 0; i < t->n; i++)
                channel += strcmp(t->seen[i], name) == 0;
        assert_true(channel < 2 && t->n < ELEMENTSOF(t->seen));
        (void) snprintf(t->seen[t->n++], sizeof(t->seen[0]), "%s", name);

        assert_non_null(got);
        assert_int_equal(entry->shape[1], across ? rows : columns);
        assert_int_equal(entry->shape[2], across ? columns : rows);
        for (uint64_t i = 0; i < rows; i++)
                for (uint64_t k = 0; k < columns; k++)
                        got[across ? i * columns + k : k * rows + i] = values[i * columns + k];
        expected = golden_data(t->golden, tensor, ST_F32, NULL);
        (void) snprintf(what, sizeof(what), "%s of channel %u", name, channel);
        check_close(got, expected + channel * rows * columns, rows * columns, what);
        t->compared++;
}

/* Twice the stages that the case has. */
static void check_all_compared(const Taps *t) {
        unsigned there = 0;

        for (size_t i = 0; i < t->golden->header->n_tensors; i++)
                there += strncmp(t->golden->header->tensors[i].name, "tap.", 4) == 0;
        assert_true(there > 5);
        assert_int_equal(t->compared, 2 * there);
}

static const char *const layouts[] = {
        "vae/audio/model.weight_norm.safetensors", "vae/audio/model.folded.safetensors"};

static void decode_case(const Golden *g, bool stages) {
        uint64_t samples = golden_tensor(g, "wave")->shape[1];

        for (size_t i = 0; i < ELEMENTSOF(layouts); i++) {
                CLEANUP(audio_model_freep) AudioModel *m = NULL;
                CLEANUP_FREE float *latents = NULL, *wave = NULL;
                uint64_t n;

                if (!audio_has(layouts[i]))
                        continue;
                m = audio_model_open(NULL, layouts[i], "vae/audio/config.json");
                latents = latents_of(g, "rows", m->vae, &n);
                assert_int_equal(samples, n * m->vae->config.hop);
                wave = audio_decode(m->vae, NULL, latents, n, 0, NULL);
                check_close(wave, golden_data(g, "wave", ST_F32, NULL), 2 * samples, "wave");
        }
}

static void decode_published_cases_match(void **state) {
        assert_true(audio_has(layouts[0]) || audio_has(layouts[1]));
        assert_true(each_case("decode", decode_case) > 0);
}

static unsigned staged;

static void decode_stages(const Golden *g, bool stages) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        CLEANUP_FREE float *latents = NULL, *wave = NULL;
        Taps taps = {.golden = g};
        const H3StepHooks hooks = {.on_tap = on_tap, .userdata = &taps};
        uint64_t n;

        if (!stages)
                return;
        staged++;
        latents = latents_of(g, "rows", m->vae, &n);
        wave = audio_decode(m->vae, NULL, latents, n, n, &hooks);
        check_all_compared(&taps);
}

static void decode_every_stage_matches(void **state) {
        staged = 0;
        (void) each_case("decode", decode_stages);
        assert_true(staged > 0);
}

static void encode_case(const Golden *g, bool stages) {
        static const char *const names[] = {"rows", "mean", "log_std"};
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        const H3Config c = {.audio_channels = m->vae->config.channels};
        const StTensor *wave = golden_tensor(g, "wave");
        uint64_t n = h3_audio_latents(m->vae, wave->shape[1]), size = 2 * n * m->vae->config.channels;
        CLEANUP_FREE float *rows = malloc(size * sizeof(float));
        Taps taps = {.golden = g};
        const H3StepHooks hooks = {.on_tap = on_tap, .userdata = &taps};
        float *ret[3];

        audio_encode(m->vae, NULL, golden_data(g, "wave", ST_F32, NULL), wave->shape[1], n,
                stages ? &hooks : NULL, ret);
        if (stages) {
                staged++;
                check_all_compared(&taps);
        }
        assert_non_null(rows);
        for (unsigned i = 0; i < 3; i++) {
                const float *expected = golden_data(g, names[i], ST_F32, NULL);

                if (i == 0)
                        h3_audio_to_rows(&c, n, ret[0], 0, 2 * n, rows);
                else /* [channels, 2, A] to [2, channels, A] */
                        for (uint64_t k = 0; k < size; k++)
                                rows[((k / n % 2) * c.audio_channels + k / n / 2) * n + k % n] = ret[i][k];
                check_close(rows, expected, size, names[i]);
                free(ret[i]);
        }
}

static void encode_published_cases_and_stages_match(void **state) {
        staged = 0;
        assert_true(each_case("encode", encode_case) > 0);
        assert_true(staged > 0);
}

static float *random_floats(uint64_t n, uint64_t seed) {
        float *p = malloc(n * sizeof(float));

        assert_non_null(p);
        for (uint64_t i = 0; i < n; i++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                p[i] = (float) (int32_t) (seed >> 32) * 0x1p-30f;
        }
        return p;
}

/* Sounds that are longer than what a piece sees on both sides, and short ones. */
typedef struct Cut {
        uint64_t latents, piece;
        LkCpuIsa isa;
} Cut;

static void decode_any_piece_same_bits(void **state) {
        static const Cut cuts[] = {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* ten times slower */
                {20, 1000, LK_CPU_SCALAR}, {61, 13, LK_CPU_V4}, {61, 32, LK_CPU_V3},
#endif
                {9, 1, LK_CPU_V4}, {9, 2, LK_CPU_V3}, {9, 5, LK_CPU_SCALAR}, {1, 1, LK_CPU_V3}};
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();

        CLEANUP_FREE float *latents = NULL, *whole = NULL;

        for (size_t i = 0; i < ELEMENTSOF(cuts); i++) {
                const uint64_t n = cuts[i].latents;
                CLEANUP_FREE float *wave = NULL;

                if (i == 0 || n != cuts[i - 1].latents) {
                        free(latents);
                        free(whole);
                        latents = random_floats(2 * n * m->vae->config.channels, 1);
                        whole = audio_decode(m->vae, NULL, latents, n, n, NULL);
                }
                wave = audio_decode(m->vae, lk_cpu_ops(cuts[i].isa), latents, n, cuts[i].piece, NULL);
                assert_memory_equal(wave, whole, 2 * n * m->vae->config.hop * sizeof(float));
        }
}

static void encode_any_piece_same_bits(void **state) {
        static const Cut cuts[] = {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* ten times slower */
                {15, 1000, LK_CPU_SCALAR}, {33, 5, LK_CPU_V4}, {33, 13, LK_CPU_V3},
#endif
                {5, 1, LK_CPU_V4}, {5, 2, LK_CPU_SCALAR}, {1, 1, LK_CPU_V3}};
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();

        for (size_t i = 0; i < ELEMENTSOF(cuts); i++) {
                const uint64_t samples = cuts[i].latents * m->vae->config.hop - 250;
                CLEANUP_FREE float *wave = random_floats(2 * samples, 2);
                float *whole[3], *ret[3];

                audio_encode(m->vae, NULL, wave, samples, cuts[i].latents, NULL, whole);
                audio_encode(m->vae, lk_cpu_ops(cuts[i].isa), wave, samples, cuts[i].piece, NULL, ret);
                for (unsigned k = 0; k < 3; k++) {
                        assert_memory_equal(ret[k], whole[k],
                                2 * cuts[i].latents * m->vae->config.channels * sizeof(float));
                        free(ret[k]);
                        free(whole[k]);
                }
        }
}

/* What comes late is not heard long before: the convolutions are local and attention looks back only. */
static void encode_later_sound_changes_nothing_far_before(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        const uint64_t hop = m->vae->config.hop, n = 40, c = m->vae->config.channels;
        CLEANUP_FREE float *wave = random_floats(2 * n * hop, 3), *other = random_floats(2 * n * hop, 3);
        float *a[3], *b[3];

        for (uint64_t i = 0; i < 2 * n * hop; i++)
                if (i % (n * hop) > (n - 2) * hop)
                        other[i] = -other[i];
        audio_encode(m->vae, NULL, wave, n * hop, 0, NULL, a);
        audio_encode(m->vae, NULL, other, n * hop, 0, NULL, b);
        for (uint64_t i = 0; i < 2 * c; i++) { /* attention is causal: 20 latents before, nothing */
                assert_memory_equal(a[1] + i * n, b[1] + i * n, (n - 20) * sizeof(float));
                assert_memory_not_equal(a[1] + i * n + n - 2, b[1] + i * n + n - 2, 2 * sizeof(float));
        }
        for (unsigned k = 0; k < 3; k++) {
                free(a[k]);
                free(b[k]);
        }
}

/* Ranks that take jobs in a random order. */
static const unsigned rank_counts[] = {1, 2,
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* ten times slower */
        3, 8,
#endif
};

typedef struct Pool {
        const H3AudioVae *vae;
        const H3AudioPlan *plan;
        const float *in;
        float *out;
        bool encode;
        const uint64_t *order;
        uint64_t next;
        int error;
} Pool;

static void *pool_rank(void *userdata) {
        Pool *pool = userdata;
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        void *work = NULL;
        int r;

        r = rank.ops->context_new(1, &rank.context);
        if (r >= 0)
                r = rank.ops->memory_new(rank.context, pool->plan->job_memory, &work);
        while (r >= 0) {
                uint64_t i = __atomic_fetch_add(&pool->next, 1, __ATOMIC_RELAXED);

                if (i >= pool->plan->jobs)
                        break;
                r = (pool->encode ? h3_audio_encode_job : h3_audio_decode_job)(
                        &rank, pool->vae, pool->plan, pool->in, pool->order[i], work, NULL, pool->out, NULL);
        }
        if (r < 0)
                __atomic_store_n(&pool->error, r, __ATOMIC_RELAXED);
        rank.ops->memory_free(rank.context, work);
        (void) rank.ops->context_free(rank.context);
        return NULL;
}

static void run_pool(Pool *pool, unsigned ranks, uint64_t seed) {
        CLEANUP_FREE uint64_t *order = malloc(pool->plan->jobs * sizeof(*order));
        pthread_t threads[8];

        assert_non_null(order);
        for (uint64_t i = 0; i < pool->plan->jobs; i++) {
                uint64_t k;

                seed = seed * 6364136223846793005u + 1442695040888963407u;
                k = (seed >> 33) % (i + 1);
                order[i] = order[k];
                order[k] = i;
        }
        pool->order = order;
        pool->next = 0;
        for (unsigned i = 0; i < ranks; i++)
                assert_int_equal(pthread_create(threads + i, NULL, pool_rank, pool), 0);
        for (unsigned i = 0; i < ranks; i++)
                assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(pool->error, 0);
}

static void decode_jobs_of_any_rank_in_any_order_same_bits(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        const uint64_t n = 23, bytes = 2 * n * m->vae->config.hop * sizeof(float);
        CLEANUP_FREE float *latents = random_floats(2 * n * m->vae->config.channels, 4);
        CLEANUP_FREE float *whole = audio_decode(m->vae, NULL, latents, n, n, NULL), *wave = malloc(bytes);
        H3AudioPlan plan;
        Pool pool = {.vae = m->vae, .plan = &plan, .in = latents, .out = wave};

        assert_non_null(wave);
        assert_int_equal(h3_audio_decode_plan(m->vae, n, 4, AUDIO_MEMORY, &plan, NULL), 0);
        assert_int_equal(plan.jobs, 12);
        for (size_t i = 0; i < ELEMENTSOF(rank_counts); i++) {
                memset(wave, 0xff, bytes);
                run_pool(&pool, rank_counts[i], rank_counts[i]);
                assert_memory_equal(wave, whole, bytes);
        }
}

static void encode_jobs_of_any_rank_in_any_order_same_bits(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        const uint64_t n = 17, samples = n * m->vae->config.hop - 1;
        CLEANUP_FREE float *wave = random_floats(2 * samples, 5), *first = NULL, *hidden = NULL;
        H3AudioPlan plan;
        Pool pool = {.vae = m->vae, .plan = &plan, .in = wave, .encode = true};

        assert_int_equal(h3_audio_encode_plan(m->vae, samples, 3, AUDIO_MEMORY, &plan, NULL), 0);
        first = malloc(plan.hidden_bytes);
        hidden = malloc(plan.hidden_bytes);
        assert_true(first && hidden);
        for (size_t i = 0; i < ELEMENTSOF(rank_counts); i++) {
                pool.out = i == 0 ? first : hidden;
                memset(pool.out, 0xff, plan.hidden_bytes);
                run_pool(&pool, rank_counts[i], 10 + rank_counts[i]);
                assert_memory_equal(pool.out, first, plan.hidden_bytes);
        }
}

/* The checkpoint of the demo, in bf16 and with the seven stages of the released model, says its sample's
 * sound, of which the sample has the start. */
static void decode_demo_model_says_its_sample(void **state) {
        const char *source = getenv("LATENT_SOURCE_DIR");
        CLEANUP(audio_model_freep) AudioModel *m = NULL;
        CLEANUP(golden_freep) Golden *g = NULL;
        CLEANUP_FREE float *latents = NULL, *wave = NULL;
        const float *expected;
        uint64_t n, part;
        char folder[4096];

        if (!source) {
                print_message("# LATENT_SOURCE_DIR is not set: it says where the demo is\n");
                skip();
        }
        (void) snprintf(folder, sizeof(folder), "%s/tests/demo-model", source);
        m = audio_model_open(
                folder, "audio_vae/diffusion_pytorch_model.safetensors", "audio_vae/config.json");
        assert_int_equal(m->vae->config.decoder_stages, 7);
        g = audio_golden_file(folder, "samples/ref_3.safetensors");
        latents = latents_of(g, "audio_rows_8", m->vae, &n);
        wave = audio_decode(m->vae, NULL, latents, n, 0, NULL);
        expected = golden_data(g, "wave_8", ST_F32, &part);
        part /= 2;
        check_close(wave, expected, part, "left");
        check_close(wave + n * m->vae->config.hop, expected + part, part, "right");
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(decode_published_cases_match),
                cmocka_unit_test(decode_every_stage_matches),
                cmocka_unit_test(encode_published_cases_and_stages_match),
                cmocka_unit_test(decode_any_piece_same_bits),
                cmocka_unit_test(encode_any_piece_same_bits),
                cmocka_unit_test(encode_later_sound_changes_nothing_far_before),
                cmocka_unit_test(decode_jobs_of_any_rank_in_any_order_same_bits),
                cmocka_unit_test(encode_jobs_of_any_rank_in_any_order_same_bits),
                cmocka_unit_test(decode_demo_model_says_its_sample),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
