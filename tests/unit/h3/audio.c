/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/audio.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"

static const char *base_name(const char *path) {
        const char *slash = strrchr(path, '/');

        return slash ? slash + 1 : path;
}

AudioModel *audio_model_open(const char *folder, const char *file, const char *config) {
        const char *names[] = {file, config};
        AudioModel *m = calloc(1, sizeof(*m));
        H3File files[2];
        size_t n = 0;
        Fault f = {};

        assert_non_null(m);
        for (; n < 2 && names[n]; n++) {
                uint64_t size;

                m->bytes[n] = golden_read(folder, names[n], &size);
                files[n] = (H3File){.name = base_name(names[n]), .bytes = m->bytes[n], .size = size};
        }
        if (h3_audio_vae_open(files, n, &m->vae, &f) < 0)
                fail_msg("cannot open %s: %s", file, f.text);
        return m;
}

Golden *audio_golden_file(const char *folder, const char *file) {
        Golden *g = calloc(1, sizeof(*g));
        uint64_t size, header_size;
        Fault f = {};

        assert_non_null(g);
        g->bytes = golden_read(folder, file, &size);
        if (st_header_size(g->bytes, size, size, file, &header_size, &f) < 0 ||
                st_header_parse(g->bytes, header_size, size, file, &g->header, &f) < 0)
                fail_msg("%s: %s", file, f.text);
        return g;
}

bool audio_has(const char *file) {
        const char *data = getenv("LATENT_TEST_DATA");
        char path[4096];

        (void) snprintf(path, sizeof(path), "%s/%s", data ? data : "", file);
        return access(path, R_OK) == 0;
}

AudioModel *audio_golden(void) {
        const char *pairs = "vae/audio/model.weight_norm.safetensors";

        return audio_model_open(NULL, audio_has(pairs) ? pairs : "vae/audio/model.folded.safetensors",
                "vae/audio/config.json");
}

AudioModel *audio_model_free(AudioModel *m) {
        if (!m)
                return NULL;
        (void) h3_audio_vae_free(m->vae);
        free(m->bytes[0]);
        free(m->bytes[1]);
        free(m);
        return NULL;
}

void audio_model_freep(AudioModel **m) {
        (void) audio_model_free(*m);
}

/* Numbers that no result has. */
static float *array_new(uint64_t n) {
        float *p = malloc(n * sizeof(float));

        assert_non_null(p);
        memset(p, 0xff, n * sizeof(float));
        return p;
}

static void *rank_start(H3Rank *rank, const LkOps *ops, uint64_t memory) {
        void *work = NULL;

        rank->ops = ops ? ops : lk_cpu_ops(LK_CPU_AUTO);
        assert_int_equal(rank->ops->context_new(2, &rank->context), 0);
        assert_int_equal(rank->ops->memory_new(rank->context, memory, &work), 0);
        memset(work, 0xff, memory);
        return work;
}

static void rank_stop(H3Rank *rank, void *work) {
        rank->ops->memory_free(rank->context, work);
        (void) rank->ops->context_free(rank->context);
}

float *audio_decode(const H3AudioVae *v, const LkOps *ops, const float *latents, uint64_t n, uint64_t piece,
        const H3StepHooks *hooks) {
        H3Rank rank = {};
        H3AudioPlan p;
        Fault f = {};
        float *wave;
        void *work;

        if (h3_audio_decode_plan(v, n, piece, AUDIO_MEMORY, &p, &f) < 0)
                fail_msg("%s", f.text);
        wave = array_new(2 * p.samples);
        work = rank_start(&rank, ops, p.job_memory);
        for (uint64_t job = 0; job < p.jobs; job++)
                if (h3_audio_decode_job(&rank, v, &p, latents, job, work, hooks, wave, &f) < 0)
                        fail_msg("job %llu: %s", (unsigned long long) job, f.text);
        rank_stop(&rank, work);
        return wave;
}

void audio_encode(const H3AudioVae *v, const LkOps *ops, const float *wave, uint64_t samples, uint64_t piece,
        const H3StepHooks *hooks, float *ret[3]) {
        H3Rank rank = {};
        H3AudioPlan p;
        Fault f = {};
        float *hidden;
        void *work;

        if (h3_audio_encode_plan(v, samples, piece, AUDIO_MEMORY, &p, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(p.hidden_bytes, 2 * p.latents * v->config.latent_dim * sizeof(float));
        hidden = array_new(p.hidden_bytes / sizeof(float));
        for (unsigned i = 0; i < 3; i++)
                ret[i] = array_new(2 * p.latents * v->config.channels);
        work = rank_start(&rank, ops, p.job_memory > p.finish_memory ? p.job_memory : p.finish_memory);
        for (uint64_t job = 0; job < p.jobs; job++)
                if (h3_audio_encode_job(&rank, v, &p, wave, job, work, hooks, hidden, &f) < 0)
                        fail_msg("job %llu: %s", (unsigned long long) job, f.text);
        for (uint32_t channel = 0; channel < 2; channel++)
                if (h3_audio_encode_finish(
                            &rank, v, &p, hidden, channel, work, hooks, ret[0], ret[1], ret[2], &f) < 0)
                        fail_msg("channel %u: %s", channel, f.text);
        rank_stop(&rank, work);
        free(hidden);
}
