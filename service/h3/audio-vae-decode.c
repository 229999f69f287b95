/* SPDX-License-Identifier: Apache-2.0 */
/* From latents to sound. A job works out backwards which positions every stage must have, so that the
 * surroundings of its piece are made as often as needed and no more; then the stages run forwards. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "service/h3/audio-vae-private.h"
#include "service/shared/cleanup.h"

typedef struct Stage {
        uint64_t n;     /* positions of the whole sound behind the stage */
        H3Range in;     /* positions of the stage before */
        H3Range rows;   /* of the upsampling, `rate` positions each */
        H3Range x, out; /* behind the upsampling, and behind the blocks */
} Stage;

typedef struct Decode {
        AudioRun run;
        const H3AudioVae *v;
        H3Range latents, pre, post, wave;
        uint64_t n; /* latents of the whole sound */
        Stage stages[H3_AUDIO_STAGES_MAX];
        float *x, *a, *b;               /* of `size` numbers each */
        float *blocks[H3_AUDIO_BLOCKS]; /* likewise */
} Decode;

static uint64_t max_of(uint64_t a, uint64_t b) {
        return a > b ? a : b;
}

/* Positions beside its own that half a block's step, an activation and a convolution, looks at. */
static uint64_t step_reach(const AudioConv *c) {
        return LK_ALIAS_FREE_REACH + c->pad;
}

static uint64_t block_reach(const AudioBlock *b) {
        uint64_t reach = 0;

        for (uint32_t i = 0; i < AUDIO_CONVS; i++)
                reach += step_reach(b->conv + i);
        return reach;
}

static void plan_stage(const AudioStage *s, uint64_t n_in, Stage *ret) {
        uint64_t reach = 0;

        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++)
                reach = max_of(reach, block_reach(s->blocks + i));
        ret->x = audio_widen(ret->out, reach, ret->n);
        ret->rows.begin = (ret->x.begin + s->crop) / s->rate;
        ret->rows.end = (ret->x.end - 1 + s->crop) / s->rate + 1;
        ret->in = audio_reads(&s->up, ret->rows, n_in);
}

/* Which positions, and memory for the largest array of them. */
static void plan_job(Decode *d, const H3AudioPlan *p, uint64_t job) {
        const H3AudioWeights *w = d->v->weights;
        const H3AudioConfig *c = &d->v->config;
        H3Range piece = audio_job_latents(p, job);
        uint64_t size = 0, samples = p->latents * c->hop;

        d->n = p->latents;
        for (uint32_t i = 0; i < c->decoder_stages; i++)
                d->stages[i].n = (i > 0 ? d->stages[i - 1].n : d->n) * w->stages[i].rate;

        d->wave = (H3Range){piece.begin * c->hop, piece.end * c->hop};
        d->post = audio_reads(&w->dec_post, d->wave, samples);
        for (uint32_t i = c->decoder_stages; i > 0; i--) {
                Stage *s = d->stages + i - 1;

                s->out = i < c->decoder_stages ? d->stages[i].in
                                               : audio_widen(d->post, LK_ALIAS_FREE_REACH, samples);
                plan_stage(w->stages + i - 1, i > 1 ? d->stages[i - 2].n : d->n, s);
                size = max_of(size, h3_range_size(s->rows) * w->stages[i - 1].up.out);
        }
        d->pre = d->stages[0].in;
        d->latents = audio_reads(&w->dec_pre, d->pre, d->n);
        size = max_of(size, h3_range_size(d->latents) * max_of(c->latent_dim, c->channels));
        size = max_of(size, h3_range_size(d->pre) * c->decoder_dim);

        d->x = audio_carve(&d->run, size);
        d->a = audio_carve(&d->run, size);
        d->b = audio_carve(&d->run, size);
        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++)
                d->blocks[i] = audio_carve(&d->run, size);
}

static uint64_t job_memory(const H3AudioVae *v, const H3AudioPlan *p, uint64_t job) {
        Decode d = {.v = v};

        plan_job(&d, p, job);
        return d.run.at;
}

int h3_audio_decode_plan(
        const H3AudioVae *v, uint64_t latents, uint64_t piece, uint64_t memory, H3AudioPlan *ret, Fault *f) {
        H3AudioPlan p = {.latents = latents};
        int r;

        if (!v->has_decoder)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "This audio VAE has no decoder; give the whole model, or its decoder's file.");
        r = audio_plan_pieces(v, piece, memory, job_memory, &p, f);
        if (r < 0)
                return r;
        p.samples = latents * v->config.hop;
        *ret = p;
        return 0;
}

/* Latents of the job as rows, not normalised any more. */
static int read_latents(const Decode *d, const float *latents, uint32_t channel) {
        const H3AudioConfig *c = &d->v->config;
        uint64_t n = h3_range_size(d->latents);
        CLEANUP_FREE float *rows = malloc(n * c->channels * sizeof(float));

        if (!rows)
                return -ENOMEM;
        for (uint64_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < c->channels; k++) {
                        uint64_t at = (2ull * k + channel) * d->n + d->latents.begin + i;

                        rows[i * c->channels + k] = latents[at] * c->std[k] + c->mean[k];
                }
        return d->run.rank->ops->upload(d->run.rank->context, d->x, rows, n * c->channels * sizeof(float));
}

/* y: positions `out` of n, from x, which holds positions `in`. */
static int activate(
        const Decode *d, const AudioActivation *act, const float *x, H3Range in, H3Range out, float *y) {
        LkAliasFree a = {
                .rows = h3_range_size(in),
                .channels = act->alpha.n,
                .first = out.begin - in.begin,
                .m = h3_range_size(out),
                .x = x,
                .alpha = act->alpha,
                .beta = act->beta,
                .up = act->up,
                .down = act->down,
                .y = y,
        };

        return d->run.rank->ops->alias_free(d->run.rank->context, &a);
}

/* y = conv(act(x)): positions `out` of n, from x, which holds positions `in`. tap: of act(x), or NULL. */
static int step(const Decode *d, const AudioActivation *act, const AudioConv *c, const float *x, H3Range in,
        H3Range out, uint64_t n, const char *tap, float *y) {
        H3Range reads = audio_reads(c, out, n);
        int r;

        r = activate(d, act, x, in, reads, d->a);
        if (r >= 0 && tap)
                r = audio_tap(&d->run, tap, d->a, h3_range_size(reads), c->in);
        return r < 0 ? r : audio_conv(&d->run, c, d->a, reads, n, out, y);
}

/* x += convs2(act(convs1(act(x)))) for each dilation, x being d->x at first, which stays as it is. The
 * result, positions s->out, is in d->blocks[index]. */
static int run_block(const Decode *d, const Stage *s, const AudioBlock *block, uint32_t index) {
        const char *tap = s == d->stages && index == 0 ? "act.0.0" : NULL;
        uint64_t channels = block->conv[0].out, reach = block_reach(block);
        const AudioConv *c = block->conv;
        const float *x = d->x;
        H3Range in = s->x;
        int r = 0;

        for (uint32_t i = 0; i < AUDIO_CONVS && r >= 0; i += 2) {
                float *y = x == d->blocks[index] ? d->b : d->blocks[index];
                H3Range mid, out;

                reach -= step_reach(c + i);
                mid = audio_widen(s->out, reach, s->n);
                reach -= step_reach(c + i + 1);
                out = audio_widen(s->out, reach, s->n);

                r = step(d, block->act + i, c + i, x, in, mid, s->n, i == 0 ? tap : NULL, y);
                if (r >= 0)
                        r = step(d, block->act + i + 1, c + i + 1, y, mid, out, s->n, NULL, y);
                if (r >= 0)
                        r = audio_add(&d->run, y, x + (out.begin - in.begin) * channels,
                                h3_range_size(out) * channels);
                x = y;
                in = out;
        }
        return r;
}

static int tap_stage(const Decode *d, const char *kind, uint32_t index, const float *x, H3Range range) {
        char name[24];

        (void) snprintf(name, sizeof(name), "%s.%u", kind, index);
        return audio_tap(&d->run, name, x, h3_range_size(range), d->v->weights->stages[index].channels);
}

/* From d->a, positions s->in, to d->a, positions s->out. */
static int run_weights(Decode *d, const AudioStage *w, uint32_t index) {
        const Stage *s = d->stages + index;
        uint64_t n_in = index > 0 ? d->stages[index - 1].n : d->n;
        float *up = d->x;
        int r;

        r = audio_conv(&d->run, &w->up, d->a, s->in, n_in, s->rows, up);
        if (r < 0)
                return r;
        d->x += (s->x.begin + w->crop - s->rows.begin * w->rate) * w->channels;
        r = tap_stage(d, "ups", index, d->x, s->x);
        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS && r >= 0; i++)
                r = run_block(d, s, w->blocks + i, i);
        d->x = up;
        if (r < 0)
                return r;

        r = d->run.rank->ops->average(
                d->run.rank->context, &(LkAverage){.n = h3_range_size(s->out) * w->channels,
                                              .count = H3_AUDIO_BLOCKS,
                                              .x = {d->blocks[0], d->blocks[1], d->blocks[2]},
                                              .y = d->a});
        return r < 0 ? r : tap_stage(d, "stage", index, d->a, s->out);
}

static int run_stage(Decode *d, uint32_t index) {
        const H3AudioWeights *w;
        int r;

        r = audio_part(&d->run, d->v, H3_PART_STAGE, index, &w);
        if (r < 0)
                return r;
        r = run_weights(d, w->stages + index, index);
        audio_give(&d->run, H3_PART_STAGE, index);
        return r < 0 ? r : h3_part_pace(d->run.rank, index);
}

static int run_start(const Decode *d) {
        uint64_t n = h3_range_size(d->latents);
        const H3AudioWeights *w;
        int r;

        r = audio_part(&d->run, d->v, H3_PART_IN, 0, &w);
        if (r < 0)
                return r;
        r = audio_conv(&d->run, &w->dec_in, d->x, d->latents, d->n, d->latents, d->b);
        if (r >= 0)
                r = audio_tap(&d->run, "dec_in_proj", d->b, n, w->dec_in.out);
        if (r >= 0)
                r = audio_conv(&d->run, &w->dec_pre, d->b, d->latents, d->n, d->pre, d->a);
        audio_give(&d->run, H3_PART_IN, 0);
        return r < 0 ? r : audio_tap(&d->run, "conv_pre", d->a, h3_range_size(d->pre), d->v->config.decoder_dim);
}

static float clamped(float x) {
        return x < -1 ? -1 : x > 1 ? 1 : x;
}

static int run_end(const Decode *d, float *ret_wave) {
        const H3AudioConfig *c = &d->v->config;
        uint64_t samples = d->n * c->hop, n = h3_range_size(d->wave);
        H3Range in = d->stages[c->decoder_stages - 1].out;
        const H3AudioWeights *w;
        int r;

        r = audio_part(&d->run, d->v, H3_PART_OUT, 0, &w);
        if (r < 0)
                return r;
        r = activate(d, &w->post, d->a, in, d->post, d->b);
        if (r >= 0)
                r = audio_tap(&d->run, "activation_post", d->b, h3_range_size(d->post), w->dec_post.in);
        if (r >= 0)
                r = audio_conv(&d->run, &w->dec_post, d->b, d->post, samples, d->wave, d->x);
        audio_give(&d->run, H3_PART_OUT, 0);
        if (r >= 0)
                r = d->run.rank->ops->download(d->run.rank->context, ret_wave, d->x, n * sizeof(float));
        for (uint64_t i = 0; i < n && r >= 0; i++)
                ret_wave[i] = clamped(ret_wave[i]);
        return r;
}

int h3_audio_decode_job(const H3Rank *rank, const H3AudioVae *v, const H3AudioPlan *p, const float *latents,
        uint64_t job, void *work, const H3StepHooks *hooks, float *ret_wave, Fault *f) {
        Decode d = {.run = {.rank = rank, .hooks = hooks, .work = work}, .v = v};
        uint32_t channel = job % 2;
        int r;

        r = audio_check_job(p, job, work, f);
        if (r < 0)
                return r;
        plan_job(&d, p, job);
        r = read_latents(&d, latents, channel);
        if (r >= 0)
                r = run_start(&d);
        for (uint32_t i = 0; i < v->config.decoder_stages && r >= 0; i++)
                r = run_stage(&d, i);
        if (r >= 0)
                r = run_end(&d, ret_wave + channel * p->samples + d.wave.begin);
        return audio_failed(r, "Decoding", f);
}
