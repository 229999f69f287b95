/* SPDX-License-Identifier: Apache-2.0 */
/* Opening an audio VAE: layouts, halves, what is refused and how it is said; plans and their memory. Files
 * are made in memory from the one that the data has. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/audio.h"

#define TENSORS_MAX 1200

/* A checkpoint that can be changed. Names and data that were made here are kept in `made`. */
typedef struct File {
        Golden *golden;
        StTensor tensors[TENSORS_MAX];
        const void *data[TENSORS_MAX];
        size_t n;
        void *made[2 * TENSORS_MAX];
        size_t n_made;
        uint8_t *config;
        uint64_t config_size;
} File;

static File *file_new(void) {
        File *k = calloc(1, sizeof(*k));

        assert_non_null(k);
        k->golden = golden_open_at("vae/audio/model.weight_norm.safetensors");
        k->config = golden_read(NULL, "vae/audio/config.json", &k->config_size);
        k->n = k->golden->header->n_tensors;
        assert_true(k->n <= TENSORS_MAX);
        for (size_t i = 0; i < k->n; i++) {
                k->tensors[i] = k->golden->header->tensors[i];
                k->data[i] = k->golden->bytes + k->tensors[i].offset;
        }
        return k;
}

static void file_freep(File **k) {
        if (!*k)
                return;
        (void) golden_free((*k)->golden);
        for (size_t i = 0; i < (*k)->n_made; i++)
                free((*k)->made[i]);
        free((*k)->config);
        free(*k);
}

static void *keep(File *k, void *p) {
        assert_non_null(p);
        assert_true(k->n_made < ELEMENTSOF(k->made));
        return k->made[k->n_made++] = p;
}

static size_t file_find(const File *k, const char *name) {
        for (size_t i = 0; i < k->n; i++)
                if (strcmp(k->tensors[i].name, name) == 0)
                        return i;
        fail_msg("no tensor %s", name);
        return 0;
}

static void file_drop(File *k, size_t at) {
        k->n--;
        memmove(k->tensors + at, k->tensors + at + 1, (k->n - at) * sizeof(k->tensors[0]));
        memmove(k->data + at, k->data + at + 1, (k->n - at) * sizeof(k->data[0]));
}

static void file_drop_all(File *k, const char *prefix) {
        for (size_t i = k->n; i > 0; i--)
                if (strncmp(k->tensors[i - 1].name, prefix, strlen(prefix)) == 0)
                        file_drop(k, i - 1);
}

static bool ends(const char *s, const char *suffix) {
        return strlen(s) > strlen(suffix) && strcmp(s + strlen(s) - strlen(suffix), suffix) == 0;
}

/* Another ending of a name. */
static void file_rename(File *k, size_t at, const char *suffix, const char *to) {
        char *name = keep(k, malloc(strlen(k->tensors[at].name) + strlen(to) + 1));
        size_t n = strlen(k->tensors[at].name) - strlen(suffix);

        (void) sprintf(name, "%.*s%s", (int) n, k->tensors[at].name, to);
        k->tensors[at].name = name;
}

static void file_add(File *k, const char *name) {
        static const float zeros[4];

        k->tensors[k->n] = (StTensor){.name = name, .type = ST_F32, .n_dims = 1, .shape = {4}, .size = 16};
        k->data[k->n++] = zeros;
}

static uint8_t *file_write(const File *k, uint64_t *ret_size) {
        int fd = memfd_create("audio-vae", MFD_CLOEXEC);
        uint8_t *bytes;

        assert_true(fd >= 0);
        assert_int_equal(st_write(fd, k->tensors, k->data, k->n, NULL, 0), 0);
        *ret_size = (uint64_t) lseek(fd, 0, SEEK_END);
        bytes = malloc(*ret_size);
        assert_non_null(bytes);
        assert_int_equal(pread(fd, bytes, *ret_size, 0), *ret_size);
        (void) close(fd);
        return bytes;
}

/* With config.json, or without if it is NULL. */
static int file_open(const File *k, const char *config, AudioModel **ret, Fault *f) {
        AudioModel *m = calloc(1, sizeof(*m));
        H3File files[2];
        int r;

        assert_non_null(m);
        files[0].name = "model.safetensors";
        files[0].bytes = m->bytes[0] = file_write(k, &files[0].size);
        if (config)
                files[1] = (H3File){"config.json", config, strlen(config)};
        r = h3_audio_vae_open(files, config ? 2 : 1, &m->vae, f);
        if (r < 0) {
                assert_null(m->vae);
                m = audio_model_free(m);
        }
        *ret = m;
        return r;
}

static AudioModel *file_model(const File *k, const char *config) {
        AudioModel *m;
        Fault f = {};

        if (file_open(k, config, &m, &f) < 0)
                fail_msg("%s", f.text);
        return m;
}

#define LATENTS 5

static float *sound(const AudioModel *m) {
        float latents[2 * LATENTS * H3_AUDIO_CHANNELS_MAX];

        for (unsigned i = 0; i < ELEMENTSOF(latents); i++)
                latents[i] = (float) ((i * 2654435761u >> 8) % 2001) / 1000 - 1;
        return audio_decode(m->vae, NULL, latents, LATENTS, 0, NULL);
}

static void check_same_sound(const AudioModel *m, const AudioModel *expected) {
        CLEANUP_FREE float *a = sound(m), *b = sound(expected);

        assert_memory_equal(a, b, 2ull * LATENTS * expected->vae->config.hop * sizeof(float));
}

static void open_parametrized_pairs_are_the_same(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = NULL, *other = NULL;

        m = file_model(k, (char *) k->config);
        assert_string_equal(m->vae->layout, "weight norm");
        for (size_t i = 0; i < k->n; i++)
                if (ends(k->tensors[i].name, ".weight_g"))
                        file_rename(k, i, ".weight_g", ".parametrizations.weight.original0");
                else if (ends(k->tensors[i].name, ".weight_v"))
                        file_rename(k, i, ".weight_v", ".parametrizations.weight.original1");
        other = file_model(k, (char *) k->config);
        assert_int_equal(other->vae->private_bytes, m->vae->private_bytes);
        check_same_sound(other, m);
}

/* w = g v / |v|, the norm over all but the first dimension, which for a transposed convolution is the input.
 */
static void fold(File *k) {
        for (size_t i = k->n; i > 0; i--) {
                const StTensor *t = k->tensors + i - 1;
                const float *v = k->data[i - 1], *g;
                uint64_t row = t->shape[1] * t->shape[2];
                size_t norm = i - 2; /* names are sorted */
                float *w;

                if (!ends(t->name, ".weight_v"))
                        continue;
                assert_true(ends(k->tensors[norm].name, ".weight_g"));
                g = k->data[norm];
                w = keep(k, malloc(t->size));
                for (uint64_t n = 0; n < t->size / sizeof(float); n++) {
                        double sum = 0;

                        for (uint64_t j = 0; j < row; j++)
                                sum += (double) v[n / row * row + j] * (double) v[n / row * row + j];
                        w[n] = (float) ((double) g[n / row] / sqrt(sum) * (double) v[n]);
                }
                k->data[i - 1] = w;
                file_rename(k, i - 1, ".weight_v", ".weight");
                file_drop(k, norm);
                i--;
        }
}

static void open_folded_file_is_nearly_the_same(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = NULL, *folded = NULL;
        CLEANUP_FREE float *a = NULL, *b = NULL;

        m = file_model(k, (char *) k->config);
        fold(k);
        folded = file_model(k, (char *) k->config);
        assert_string_equal(folded->vae->layout, "folded");
        assert_true(folded->vae->private_bytes < m->vae->private_bytes / 2);
        a = sound(folded);
        b = sound(m);
        assert_true(golden_distance(a, b, 2ull * LATENTS * m->vae->config.hop, NULL) < 1e-6);
}

/* Both a pair and a folded weight of one name: which one counts nobody knows. */
static void open_pair_beside_folded_is_refused(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = NULL;
        Fault f = {};

        file_add(k, "decoder.conv_pre.weight");
        assert_int_equal(file_open(k, (char *) k->config, &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "Not of this model (1): decoder.conv_pre.weight."));
}

static void open_private_bytes_are_counted(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = file_model(k, (char *) k->config);
        const H3AudioConfig *c = &m->vae->config;
        uint64_t bytes = (3ull + c->channels) * c->latent_dim * sizeof(float), weights = 0;

        for (size_t i = 0; i < k->n; i++) {
                if (ends(k->tensors[i].name, ".weight_v"))
                        bytes += k->tensors[i].size;
                weights += k->tensors[i].size;
        }
        for (uint32_t i = 0; i < c->decoder_stages; i++) {
                uint64_t in = c->decoder_dim >> i, rows = c->decoder_rates[i] * in / 2;

                bytes += rows * (in * 2 + 1) * sizeof(float); /* two taps reach a position */
        }
        assert_int_equal(m->vae->private_bytes, bytes);
        assert_int_equal(m->vae->weight_bytes, weights);
        assert_int_equal(m->vae->n_tensors, k->n);
}

static void open_one_half_is_enough(void **state) {
        CLEANUP(file_freep) File *k = file_new(), *e = file_new();
        CLEANUP(audio_model_freep)
        AudioModel *m = file_model(k, (char *) k->config),
                   *half = NULL, *encoder = NULL;
        H3AudioPlan p;
        Fault f = {};

        file_drop_all(k, "encoder.");
        file_drop_all(k, "pre_block.");
        file_drop_all(k, "mean_proj.");
        file_drop_all(k, "logs_proj.");
        half = file_model(k, (char *) k->config);
        assert_true(half->vae->has_decoder && !half->vae->has_encoder);
        check_same_sound(half, m);
        assert_int_equal(h3_audio_encode_plan(half->vae, 1000, 0, AUDIO_MEMORY, &p, &f), -EINVAL);
        assert_non_null(strstr(f.text, "no encoder"));

        file_drop_all(e, "decoder.");
        file_drop_all(e, "dec_in_proj.");
        encoder = file_model(e, (char *) e->config);
        assert_true(!encoder->vae->has_decoder && encoder->vae->has_encoder);
        assert_int_equal(encoder->vae->config.hop, m->vae->config.hop);
        assert_int_equal(h3_audio_encode_plan(encoder->vae, 1000, 0, AUDIO_MEMORY, &p, &f), 0);
        f = (Fault){};
        assert_int_equal(h3_audio_decode_plan(encoder->vae, 10, 0, AUDIO_MEMORY, &p, &f), -EINVAL);
        assert_non_null(strstr(f.text, "no decoder"));
}

/* The data has the released statistics, dilations and rate rule; only the heads need to be said. */
static void open_without_config_takes_the_released_numbers(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = file_model(k, (char *) k->config), *bare = NULL;
        Fault f = {};

        assert_int_equal(file_open(k, NULL, &bare, &f), -EINVAL);
        assert_non_null(strstr(f.text, "num_attention_heads"));
        bare = file_model(k, "{\"num_attention_heads\": 2}");
        assert_memory_equal(&bare->vae->config, &m->vae->config, sizeof(m->vae->config));
        check_same_sound(bare, m);
}

static void open_config_is_obeyed(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = NULL;

        m = file_model(k,
                "{\"num_attention_heads\": 1, \"sampling_rate\": 44100, \"resblock_dilation_sizes\": "
                "[[1,2,3],[1,3,5],[2,2,9]]}");
        assert_int_equal(m->vae->config.heads, 1);
        assert_int_equal(m->vae->config.sample_rate, 44100);
        assert_int_equal(m->vae->config.block_dilations[0][1], 2);
        assert_int_equal(m->vae->config.block_dilations[2][2], 9);
}

static void file_add_numbers(File *k, const char *name, const float *numbers, uint64_t n) {
        k->tensors[k->n] = (StTensor){.name = name, .type = ST_F32, .n_dims = 1, .shape = {n}, .size = n * sizeof(float)};
        k->data[k->n++] = numbers;
}

/* As ComfyUI's file has them. */
static void open_stored_statistics_are_used(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        CLEANUP(audio_model_freep) AudioModel *m = NULL;
        float mean[32], std[32];
        Fault f = {};

        for (unsigned i = 0; i < ELEMENTSOF(mean); i++) {
                mean[i] = (float) i / 8 - 2;
                std[i] = (float) (i + 1) / 16;
        }
        file_add_numbers(k, "latents_mean", mean, ELEMENTSOF(mean));
        assert_int_equal(file_open(k, "{\"num_attention_heads\": 2}", &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "latents_mean but not latents_std"));

        file_add_numbers(k, "latents_std", std, ELEMENTSOF(std));
        m = file_model(k, "{\"num_attention_heads\": 2}");
        assert_memory_equal(m->vae->config.mean, mean, sizeof(mean));
        assert_memory_equal(m->vae->config.std, std, sizeof(std));
        m = audio_model_free(m);

        f = (Fault){};
        assert_int_equal(file_open(k, (char *) k->config, &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "the file's own"));

        f = (Fault){};
        std[3] = 0;
        assert_int_equal(file_open(k, "{\"num_attention_heads\": 2}", &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "Number 3 of latents_std"));
}

static void open_faults_are_listed_together(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        AudioModel *m;
        Fault f = {};

        file_drop(k, file_find(k, "decoder.ups.1.0.bias"));
        file_drop(k, file_find(k, "pre_block.norm2.weight"));
        k->tensors[file_find(k, "encoder.block.6.alpha")].shape[0] = 32; /* [32, 32, 1] */
        k->tensors[file_find(k, "encoder.block.6.alpha")].shape[1] = 1;
        file_add(k, "decoder.more");
        assert_int_equal(
                file_open(k, "{\"num_attention_heads\": 2, \"latent_dim\": 64, \"encoder_rates\": [2, 4]}",
                        &m, &f),
                -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_MODEL);
        assert_non_null(strstr(f.text, "Missing (2): decoder.ups.1.0.bias, pre_block.norm2.weight."));
        assert_non_null(strstr(f.text, "Wrong (3): config.json's latent_dim (the tensors say 128), "
                                       "config.json's encoder_rates"));
        assert_non_null(strstr(f.text, "encoder.block.6.alpha is F32 [32, 1, 1]"));
        assert_non_null(strstr(f.text, "Not of this model (1): decoder.more."));
}

static void open_every_tensor_is_needed(void **state) {
        CLEANUP(file_freep) File *k = file_new();

        for (size_t i = 0; i < k->n; i += 7) {
                StTensor t = k->tensors[i], last = k->tensors[k->n - 1];
                const void *data = k->data[i], *last_data = k->data[k->n - 1];
                AudioModel *m;
                Fault f = {};

                k->tensors[i] = last; /* order does not matter to the writer */
                k->data[i] = last_data;
                k->n--;
                assert_int_equal(file_open(k, (char *) k->config, &m, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_MODEL);
                if (!strstr(f.text, t.name) && !ends(t.name, ".weight_v"))
                        fail_msg("%s: %s", t.name, f.text);
                k->n++;
                k->tensors[i] = t;
                k->data[i] = data;
        }
}

static void open_wrong_type_is_refused(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        size_t at = file_find(k, "decoder.conv_post.weight_v");
        AudioModel *m;
        Fault f = {};

        k->tensors[at].type = ST_I32;
        assert_int_equal(file_open(k, (char *) k->config, &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "decoder.conv_post.weight_v is I32"));
}

static void open_bad_config_is_refused(void **state) {
        static const struct {
                const char *config, *text;
                int error;
        } cases[] = {
                {"[1]", "not a JSON object", -EBADMSG},
                {"{\"a\": ", "not a JSON object", -EBADMSG},
                {"{\"num_attention_heads\": 3}", "3 attention heads", -EINVAL},
                {"{\"num_attention_heads\": -2}", "attention heads", -EINVAL},
                {"{\"num_attention_heads\": 2, \"latents_std\": [1]}", "latents_std", -EINVAL},
                {"{\"num_attention_heads\": 2, \"decoder_rates\": [5, 5, 4, 4, 1]}", "decoder.ups.4",
                        -EINVAL},
                {"{\"num_attention_heads\": 2, \"decoder_rates\": [5, 5, 4, 4]}", "decoder_rates", -EINVAL},
                {"{\"num_attention_heads\": 2, \"decoder_rates\": [5, 5, 4, 4, 4]}", "the rates", -EINVAL},
                {"{\"num_attention_heads\": 2, \"resblock_kernel_sizes\": [3, 7, 9]}",
                        "resblock_kernel_sizes", -EINVAL},
                {"{\"num_attention_heads\": 2, \"resblock_dilation_sizes\": [[1, 3, 5]]}",
                        "resblock_dilation_sizes", -EINVAL},
                {"{\"num_attention_heads\": 2, \"sampling_rate\": \"32\"}", "sampling_rate", -EINVAL},
        };
        CLEANUP(file_freep) File *k = file_new();

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                AudioModel *m;
                Fault f = {};

                assert_int_equal(file_open(k, cases[i].config, &m, &f), cases[i].error);
                if (!strstr(f.text, cases[i].text))
                        fail_msg("%s: %s", cases[i].config, f.text);
        }
}

static void open_another_model_is_refused(void **state) {
        CLEANUP(file_freep) File *k = file_new();
        AudioModel *m;
        Fault f = {};

        k->n = 0;
        file_add(k, "blocks.0.norm1.weight");
        assert_int_equal(file_open(k, NULL, &m, &f), -EINVAL);
        assert_non_null(strstr(f.text, "Not an H3 audio VAE"));
}

/* Hostile sizes: nothing overflows, and the error names the tensor. */
static void open_absurd_sizes_are_refused(void **state) {
        static const char *const names[] = {"decoder.conv_pre.weight_v", "dec_in_proj.weight",
                "decoder.ups.0.0.weight_v", "encoder.block.0.weight_v", "encoder.block.3.block.4.weight_v",
                "decoder.resblocks.1.convs1.0.weight_v", "mean_proj.weight"};
        static const uint64_t shapes[][3] = {
                {0, 5, 5}, {1ull << 40, 0, 3}, {3, 1ull << 50, 0}, {1, 1, 1}, {2, 2, 2}};

        for (size_t i = 0; i < ELEMENTSOF(names) * ELEMENTSOF(shapes); i++) {
                CLEANUP(file_freep) File *k = file_new();
                const uint64_t *shape = shapes[i % ELEMENTSOF(shapes)];
                StTensor *t;
                AudioModel *m;
                Fault f = {};

                if (ends(names[i / ELEMENTSOF(shapes)], "proj.weight") && shape[0] == 1)
                        continue;
                t = k->tensors + file_find(k, names[i / ELEMENTSOF(shapes)]);
                memcpy(t->shape, shape, sizeof(shapes[0]));
                t->size = shape[0] * shape[1] * shape[2] * sizeof(float);
                assert_int_equal(file_open(k, (char *) k->config, &m, &f), -EINVAL);
        }
}

static void plan_pieces_fit_the_memory(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        uint64_t latents = 1440000; /* ten hours */
        H3AudioPlan p, small, whole;
        Fault f = {};

        assert_int_equal(h3_audio_decode_plan(m->vae, latents, 0, AUDIO_MEMORY, &p, &f), 0);
        assert_int_equal(p.piece, H3_AUDIO_PIECE);
        assert_int_equal(p.jobs, 2 * (latents / H3_AUDIO_PIECE));
        assert_int_equal(p.samples, latents * 800);
        assert_int_equal(p.finish_memory, 0);
        assert_true(p.job_memory < 32u << 20);

        assert_int_equal(h3_audio_decode_plan(m->vae, latents, 0, p.job_memory - 1, &small, &f), 0);
        assert_true(small.piece < p.piece && small.job_memory < p.job_memory);
        assert_int_equal(small.jobs, 2 * ((latents + small.piece - 1) / small.piece));
        assert_int_equal(
                h3_audio_decode_plan(m->vae, latents, p.piece, p.job_memory - 1, &small, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        f = (Fault){};
        assert_int_equal(h3_audio_decode_plan(m->vae, latents, 0, 1000, &small, &f), -ENOMEM);
        assert_non_null(strstr(f.text, "A piece of 1 audio latents takes "));

        /* in one piece it grows with the sound */
        assert_int_equal(h3_audio_decode_plan(m->vae, 1000, 1000, AUDIO_MEMORY, &p, &f), 0);
        assert_int_equal(h3_audio_decode_plan(m->vae, 2000, 3000, AUDIO_MEMORY, &whole, &f), 0);
        assert_int_equal(whole.piece, 2000);
        assert_int_equal(whole.jobs, 2);
        assert_true(whole.job_memory > p.job_memory * 19 / 10);
}

static void plan_too_long_a_sound_is_refused_by_name(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        H3AudioPlan p = {.jobs = 77};
        Fault f = {};

        assert_int_equal(h3_audio_encode_plan(m->vae, 1152000000, 0, 1u << 30, &p, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "1152000000 samples takes "));
        f = (Fault){};
        assert_int_equal(h3_audio_encode_plan(m->vae, UINT64_MAX, 0, UINT64_MAX, &p, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        f = (Fault){};
        assert_int_equal(h3_audio_decode_plan(m->vae, UINT64_MAX, 1, UINT64_MAX, &p, &f), -EINVAL);
        assert_int_equal(h3_audio_decode_plan(m->vae, 0, 0, UINT64_MAX, &p, &f), -EINVAL);
        assert_int_equal(h3_audio_encode_plan(m->vae, 0, 0, UINT64_MAX, &p, &f), -EINVAL);
        assert_int_equal(p.jobs, 77);
        assert_int_equal(h3_audio_encode_plan(m->vae, 480001, 0, 1u << 30, &p, &f), 0);
        assert_int_equal(p.latents, 601);
        assert_int_equal(p.samples, 480001);
}

static void job_that_is_not_there_is_refused(void **state) {
        CLEANUP(audio_model_freep) AudioModel *m = audio_golden();
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        float dummy = 0;
        H3AudioPlan p;
        Fault f = {};

        assert_int_equal(h3_audio_decode_plan(m->vae, 3, 2, AUDIO_MEMORY, &p, &f), 0);
        assert_int_equal(p.jobs, 4);
        assert_int_equal(
                h3_audio_decode_job(&rank, m->vae, &p, &dummy, 4, &dummy, NULL, &dummy, &f), -EINVAL);
        assert_int_equal(h3_audio_decode_job(&rank, m->vae, &p, &dummy, 0, NULL, NULL, &dummy, &f), -EINVAL);
        assert_int_equal(
                h3_audio_encode_job(&rank, m->vae, &p, &dummy, 4, &dummy, NULL, &dummy, &f), -EINVAL);
        assert_int_equal(
                h3_audio_encode_finish(&rank, m->vae, &p, &dummy, 2, &dummy, NULL, &dummy, NULL, NULL, &f),
                -EINVAL);
        assert_string_equal(f.name, FAULT_INTERNAL);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(open_parametrized_pairs_are_the_same),
                cmocka_unit_test(open_folded_file_is_nearly_the_same),
                cmocka_unit_test(open_pair_beside_folded_is_refused),
                cmocka_unit_test(open_private_bytes_are_counted),
                cmocka_unit_test(open_one_half_is_enough),
                cmocka_unit_test(open_without_config_takes_the_released_numbers),
                cmocka_unit_test(open_config_is_obeyed),
                cmocka_unit_test(open_stored_statistics_are_used),
                cmocka_unit_test(open_faults_are_listed_together),
                cmocka_unit_test(open_every_tensor_is_needed),
                cmocka_unit_test(open_wrong_type_is_refused),
                cmocka_unit_test(open_bad_config_is_refused),
                cmocka_unit_test(open_another_model_is_refused),
                cmocka_unit_test(open_absurd_sizes_are_refused),
                cmocka_unit_test(plan_pieces_fit_the_memory),
                cmocka_unit_test(plan_too_long_a_sound_is_refused_by_name),
                cmocka_unit_test(job_that_is_not_there_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
