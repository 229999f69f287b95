/* SPDX-License-Identifier: Apache-2.0 */
/* From sound to latents. The convolutions run piece by piece, as in decoding; the projection behind them
 * attends to all earlier latents and runs over the whole sound at once. */

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/audio-vae-private.h"
#include "service/shared/cleanup.h"

/* Positions behind each part of a stage. */
typedef struct Stage {
        uint64_t n_in, n;           /* positions of the whole sound before and behind the stage */
        H3Range in;                 /* what the stage needs */
        H3Range units[AUDIO_UNITS]; /* behind each residual unit */
        H3Range out;
} Stage;

typedef struct Encode {
        AudioRun run;
        const H3AudioVae *v;
        H3Range wave, hidden;
        uint64_t samples, latents; /* of the whole sound, with its zeros */
        Stage stages[H3_AUDIO_STAGES_MAX];
        float *x, *y, *a, *b; /* of `size` numbers each */
} Encode;

static uint64_t max_of(uint64_t a, uint64_t b) {
        return a > b ? a : b;
}

static void plan_stage(const AudioEncoderStage *w, Stage *s) {
        H3Range r = audio_reads(&w->down, s->out, s->n_in);

        for (uint32_t i = AUDIO_UNITS; i > 0; i--) {
                s->units[i - 1] = r;
                r = audio_reads(w->units[i - 1].conv, r, s->n_in);
        }
        s->in = r;
}

static void plan_job(Encode *e, const H3AudioPlan *p, uint64_t job) {
        const H3AudioWeights *w = e->v->weights;
        const H3AudioConfig *c = &e->v->config;
        H3Range next;
        uint64_t n, size;

        e->latents = p->latents;
        e->samples = n = p->latents * c->hop;
        for (uint32_t i = 0; i < c->encoder_stages; i++) {
                e->stages[i].n_in = n;
                e->stages[i].n = n = n / c->encoder_rates[i];
        }

        e->hidden = audio_job_latents(p, job);
        next = audio_reads(&w->enc_last, e->hidden, n);
        size = h3_range_size(next) * (c->encoder_dim << c->encoder_stages);
        size = max_of(size, h3_range_size(e->hidden) * c->latent_dim);
        for (uint32_t i = c->encoder_stages; i > 0; i--) {
                Stage *s = e->stages + i - 1;

                s->out = next;
                plan_stage(w->enc + i - 1, s);
                next = s->in;
                size = max_of(size, h3_range_size(next) * (c->encoder_dim << (i - 1)));
        }
        e->wave = audio_reads(&w->enc_first, next, e->samples);
        size = max_of(size, h3_range_size(e->wave));

        e->x = audio_carve(&e->run, size);
        e->y = audio_carve(&e->run, size);
        e->a = audio_carve(&e->run, size);
        e->b = audio_carve(&e->run, size);
}

static uint64_t job_memory(const H3AudioVae *v, const H3AudioPlan *p, uint64_t job) {
        Encode e = {.v = v};

        plan_job(&e, p, job);
        return e.run.at;
}

/* Arrays of the projection. */
typedef struct Finish {
        AudioRun run;
        const H3AudioVae *v;
        const H3AudioWeights *weights; /* where operations may read them */
        uint64_t n;
        float *h, *a, *qkv;           /* [n, latent_dim], the same, [n, 3 * latent_dim] */
        float *y, *add, *norm, *pool; /* [n, channels] */
        float *gate, *up;             /* [n, mlp] */
} Finish;

static void carve_finish(Finish *k) {
        const H3AudioConfig *c = &k->v->config;
        uint64_t mlp = k->v->weights->w0.w.rows;
        float **narrow[] = {&k->y, &k->add, &k->norm, &k->pool};

        k->h = audio_carve(&k->run, k->n * c->latent_dim);
        k->a = audio_carve(&k->run, k->n * c->latent_dim);
        k->qkv = audio_carve(&k->run, k->n * 3 * c->latent_dim);
        for (size_t i = 0; i < ELEMENTSOF(narrow); i++)
                *narrow[i] = audio_carve(&k->run, k->n * c->channels);
        k->gate = audio_carve(&k->run, k->n * mlp);
        k->up = audio_carve(&k->run, k->n * mlp);
}

int h3_audio_encode_plan(
        const H3AudioVae *v, uint64_t samples, uint64_t piece, uint64_t memory, H3AudioPlan *ret, Fault *f) {
        H3AudioPlan p = {.samples = samples, .latents = h3_audio_latents(v, samples)};
        Finish k = {.v = v, .n = p.latents};
        int r;

        if (!v->has_encoder)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "This audio VAE has no encoder; give the whole model, or its encoder's file.");
        r = audio_plan_pieces(v, piece, memory, job_memory, &p, f);
        if (r < 0)
                return r;

        carve_finish(&k);
        p.finish_memory = k.run.at;
        p.hidden_bytes = 2 * p.latents * v->config.latent_dim * sizeof(float);
        if (max_of(p.finish_memory, p.hidden_bytes) > memory)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "A sound of %" PRIu64 " samples takes %" PRIu64 " bytes to encode, and %" PRIu64
                        " are given; give a shorter sound.",
                        samples, max_of(p.finish_memory, p.hidden_bytes), memory);
        *ret = p;
        return 0;
}

static int read_wave(const Encode *e, const float *wave, uint64_t samples) {
        uint64_t n = h3_range_size(e->wave), there;
        CLEANUP_FREE float *window = calloc(n, sizeof(float));

        if (!window)
                return -ENOMEM;
        there = e->wave.begin < samples ? samples - e->wave.begin : 0;
        memcpy(window, wave + (there > 0 ? e->wave.begin : 0), (there < n ? there : n) * sizeof(float));
        return e->run.rank->ops->upload(e->run.rank->context, e->a, window, n * sizeof(float));
}

/* x += conv(snake(conv(snake(x)))); x is in e->x before and after. */
static int run_unit(Encode *e, const AudioUnit *u, H3Range in, H3Range out, uint64_t n) {
        uint64_t rows = h3_range_size(out), channels = u->conv[0].out;
        float *y = e->y;
        int r;

        r = audio_snake(&e->run, u->alpha, e->x, h3_range_size(in), e->a);
        if (r >= 0)
                r = audio_conv(&e->run, u->conv, e->a, in, n, out, e->b);
        if (r >= 0)
                r = audio_snake(&e->run, u->alpha + 1, e->b, rows, e->b);
        if (r >= 0)
                r = audio_conv(&e->run, u->conv + 1, e->b, out, n, out, y);
        if (r >= 0)
                r = audio_add(&e->run, y, e->x + (out.begin - in.begin) * channels, rows * channels);
        e->y = e->x;
        e->x = y;
        return r;
}

static int tap_block(const Encode *e, uint32_t index, const float *x, uint64_t rows, uint64_t columns) {
        char name[24];

        (void) snprintf(name, sizeof(name), "block.%u", index);
        return audio_tap(&e->run, name, x, rows, columns);
}

static int run_weights(Encode *e, const AudioEncoderStage *w, uint32_t index) {
        const Stage *s = e->stages + index;
        H3Range in = s->in;
        int r = 0;

        for (uint32_t i = 0; i < AUDIO_UNITS && r >= 0; i++) {
                r = run_unit(e, w->units + i, in, s->units[i], s->n_in);
                in = s->units[i];
        }
        if (r >= 0)
                r = audio_snake(&e->run, &w->alpha, e->x, h3_range_size(in), e->a);
        if (r >= 0)
                r = audio_conv(&e->run, &w->down, e->a, in, s->n_in, s->out, e->x);
        return r < 0 ? r : tap_block(e, index + 1, e->x, h3_range_size(s->out), w->down.out);
}

static int run_stage(Encode *e, uint32_t index) {
        const H3AudioWeights *w;
        int r;

        r = audio_part(&e->run, e->v, H3_PART_STAGE, index, &w);
        if (r < 0)
                return r;
        r = run_weights(e, w->enc + index, index);
        audio_give(&e->run, H3_PART_STAGE, index);
        return r < 0 ? r : h3_part_pace(e->run.rank, index);
}

static int run_start(Encode *e) {
        const H3AudioWeights *w;
        int r;

        r = audio_part(&e->run, e->v, H3_PART_IN, 0, &w);
        if (r < 0)
                return r;
        r = audio_conv(&e->run, &w->enc_first, e->a, e->wave, e->samples, e->stages[0].in, e->x);
        audio_give(&e->run, H3_PART_IN, 0);
        return r;
}

static int run_end(Encode *e, float *ret_hidden) {
        const H3AudioWeights *w;
        uint32_t stages = e->v->config.encoder_stages;
        H3Range in = e->stages[stages - 1].out;
        uint64_t rows = h3_range_size(e->hidden), width = e->v->config.latent_dim;
        int r;

        r = audio_part(&e->run, e->v, H3_PART_OUT, 0, &w);
        if (r < 0)
                return r;
        r = audio_snake(&e->run, &w->enc_alpha, e->x, h3_range_size(in), e->a);
        if (r >= 0)
                r = tap_block(e, stages + 1, e->a, h3_range_size(in), w->enc_last.in);
        if (r >= 0)
                r = audio_conv(&e->run, &w->enc_last, e->a, in, e->latents, e->hidden, e->x);
        audio_give(&e->run, H3_PART_OUT, 0);
        if (r >= 0)
                r = tap_block(e, stages + 2, e->x, rows, width);
        return r < 0 ? r
                     : e->run.rank->ops->download(
                               e->run.rank->context, ret_hidden, e->x, rows * width * sizeof(float));
}

int h3_audio_encode_job(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p, const float *wave,
        uint64_t job, void *work, const H3StepHooks *hooks, float *ret_hidden, Fault *f) {
        Encode e = {.run = {.rank = rank, .hooks = hooks, .work = work}, .v = v};
        uint64_t channel = job % 2;
        int r;

        r = audio_check_job(p, job, work, f);
        if (r < 0)
                return r;
        plan_job(&e, p, job);
        r = read_wave(&e, wave + channel * p->samples, p->samples);
        if (r >= 0)
                r = run_start(&e);
        for (uint32_t i = 0; i < v->config.encoder_stages && r >= 0; i++)
                r = run_stage(&e, i);
        if (r >= 0)
                r = run_end(&e, ret_hidden + (channel * p->latents + e.hidden.begin) * v->config.latent_dim);
        return audio_failed(r, "Encoding", f);
}

static int layer_norm(const Finish *k, const AudioNorm *norm, const float *x, float *y) {
        return k->run.rank->ops->layer_norm(k->run.rank->context, &(LkLayerNorm){.type = LK_F32,
                                                                          .m = k->n,
                                                                          .n = norm->weight.n,
                                                                          .x = x,
                                                                          .x_ld = norm->weight.n,
                                                                          .weight = norm->weight,
                                                                          .bias = norm->bias,
                                                                          .eps = AUDIO_LAYER_EPS,
                                                                          .y = y,
                                                                          .y_ld = norm->weight.n});
}

/* add = proj(pool(causal attention(norm1(h)))) */
static int attend(const Finish *k) {
        const H3AudioConfig *c = &k->v->config;
        const H3AudioWeights *w = k->weights;
        uint64_t n = c->latent_dim;
        const LkAttention attention = {
                .type = LK_F32,
                .n_q = k->n,
                .n_k = k->n,
                .heads = c->heads,
                .head_dim = c->latent_dim / c->heads,
                .causal = true,
                .scale = 1 / sqrtf((float) c->latent_dim / (float) c->heads),
                .q = k->qkv,
                .k = k->qkv + n,
                .v = k->qkv + 2 * n,
                .o = k->a,
                .q_ld = 3 * n,
                .k_ld = 3 * n,
                .v_ld = 3 * n,
                .o_ld = n,
        };
        const AudioLinear pool = {.w = w->pool};
        int r;

        r = layer_norm(k, &w->norm1, k->h, k->a);
        if (r >= 0)
                r = audio_linear(&k->run, &w->qkv, k->a, k->n, k->qkv);
        if (r >= 0)
                r = k->run.rank->ops->attention(k->run.rank->context, &attention);
        if (r >= 0)
                r = audio_linear(&k->run, &pool, k->a, k->n, k->pool);
        if (r >= 0)
                r = audio_linear(&k->run, &w->attn_proj, k->pool, k->n, k->add);
        return r < 0 ? r : audio_tap(&k->run, "pre_block.attn", k->add, k->n, c->channels);
}

/* gate *= up; a few thousand numbers, on the host */
static int multiply(const Finish *k, uint64_t n) {
        const H3Rank *rank = k->run.rank;
        CLEANUP_FREE float *gate = malloc(2 * n * sizeof(float));
        int r;

        if (!gate)
                return -ENOMEM;
        r = rank->ops->download(rank->context, gate, k->gate, n * sizeof(float));
        if (r >= 0)
                r = rank->ops->download(rank->context, gate + n, k->up, n * sizeof(float));
        for (uint64_t i = 0; i < n && r >= 0; i++)
                gate[i] = gate[i] * gate[n + i];
        return r < 0 ? r : rank->ops->upload(rank->context, k->gate, gate, n * sizeof(float));
}

/* add = w2(gelu(w0 m) * w1 m), m = norm(norm2(y)) */
static int run_mlp(const Finish *k) {
        const H3AudioWeights *w = k->weights;
        uint64_t width = w->w0.w.rows;
        const LkActivate gelu = {.type = LK_F32,
                .function = LK_GELU_TANH,
                .m = k->n,
                .n = width,
                .x = k->gate,
                .x_ld = width,
                .y = k->gate,
                .y_ld = width};
        int r;

        r = layer_norm(k, &w->norm2, k->y, k->norm);
        if (r >= 0)
                r = layer_norm(k, &w->mlp_norm, k->norm, k->pool);
        if (r >= 0)
                r = audio_linear(&k->run, &w->w0, k->pool, k->n, k->gate);
        if (r >= 0)
                r = audio_linear(&k->run, &w->w1, k->pool, k->n, k->up);
        if (r >= 0)
                r = k->run.rank->ops->activate(k->run.rank->context, &gelu);
        if (r >= 0)
                r = multiply(k, k->n * width);
        return r < 0 ? r : audio_linear(&k->run, &w->w2, k->gate, k->n, k->add);
}

/* y = proj(norm3(h)) + attention; y += mlp(y) */
static int project(const Finish *k) {
        const H3AudioWeights *w = k->weights;
        uint64_t n = k->n * k->v->config.channels;
        int r;

        r = attend(k);
        if (r >= 0)
                r = layer_norm(k, &w->norm3, k->h, k->a);
        if (r >= 0)
                r = audio_linear(&k->run, &w->proj, k->a, k->n, k->y);
        if (r >= 0)
                r = audio_add(&k->run, k->y, k->add, n);
        if (r >= 0)
                r = run_mlp(k);
        if (r >= 0)
                r = audio_add(&k->run, k->y, k->add, n);
        return r < 0 ? r : audio_tap(&k->run, "pre_block", k->y, k->n, k->v->config.channels);
}

/* One head of the posterior to rows on the host. */
static int run_head(const Finish *k, const AudioLinear *head, float *ret_rows) {
        int r = audio_linear(&k->run, head, k->y, k->n, k->norm);

        return r < 0 ? r
                     : k->run.rank->ops->download(
                               k->run.rank->context, ret_rows, k->norm, k->n * head->w.rows * sizeof(float));
}

/* Rows [n, channels] to the channel's part of [channels, 2, n]. */
static void write_rows(const Finish *k, const float *rows, uint32_t channel, bool normalise, float *ret) {
        const H3AudioConfig *c = &k->v->config;

        for (uint64_t i = 0; i < k->n; i++)
                for (uint32_t j = 0; j < c->channels; j++) {
                        float v = rows[i * c->channels + j];

                        ret[(2ull * j + channel) * k->n + i] = normalise ? (v - c->mean[j]) / c->std[j] : v;
                }
}

int h3_audio_encode_finish(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p,
        const float *hidden, uint32_t channel, void *work, const H3StepHooks *hooks, float *ret_latents,
        float *ret_mean, float *ret_log_std, Fault *f) {
        Finish k = {.run = {.rank = rank, .hooks = hooks, .work = work}, .v = v, .n = p->latents};
        uint64_t width = v->config.latent_dim;
        CLEANUP_FREE float *rows = malloc(p->latents * v->config.channels * sizeof(float));
        int r;

        r = audio_check_job(p, channel < 2 ? channel : UINT64_MAX, work, f);
        if (r < 0)
                return r;
        if (!rows)
                return audio_failed(-ENOMEM, "Encoding", f);

        carve_finish(&k);
        r = rank->ops->upload(
                rank->context, k.h, hidden + channel * k.n * width, k.n * width * sizeof(float));
        if (r >= 0)
                r = audio_part(&k.run, v, H3_PART_LATENT, 0, &k.weights);
        if (r < 0)
                return audio_failed(r, "Encoding", f);
        r = project(&k);
        if (r >= 0)
                r = run_head(&k, &k.weights->mean, rows);
        if (r >= 0) {
                write_rows(&k, rows, channel, true, ret_latents);
                if (ret_mean)
                        write_rows(&k, rows, channel, false, ret_mean);
        }
        if (r >= 0 && ret_log_std) {
                r = run_head(&k, &k.weights->logs, rows);
                if (r >= 0)
                        write_rows(&k, rows, channel, false, ret_log_std);
        }
        audio_give(&k.run, H3_PART_LATENT, 0);
        return audio_failed(r, "Encoding", f);
}
