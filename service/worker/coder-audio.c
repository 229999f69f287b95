/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/h3/audio-vae.h"
#include "service/shared/cleanup.h"
#include "service/worker/coder.h"
#include "service/worker/job-input.h"
#include "service/worker/tile-pool.h"

/* DECODE and ENCODE_MEDIA of sound: one step, whose (piece, channel) jobs are spread over the ranks. */

#define CHANNELS 2
#define JOB_BYTES                                                                                           \
        (UINT64_C(4) << 30) /* of memory for one piece, and between the encoder's parts: an hour of sound   \
                             */
#define ROW_FACTOR 8.0      /* most weights are used for several positions of a latent */

typedef struct AudioWork {
        const H3AudioVae *vae;
        H3AudioPlan plan;
        float *input;  /* [32, 2, A] or [2, samples] */
        float *hidden; /* encoding: [2, A, latent_dim] between the jobs and their finish */
        float *result; /* as the output; before it is known to be finite */
        uint64_t result_bytes;
        const LkOps *ops; /* of the step */
} AudioWork;

static void work_free(void *userdata) {
        AudioWork *x = userdata;

        if (!x)
                return;
        free(x->input);
        free(x->hidden);
        free(x->result);
        free(x);
}

static int work_new(Job *j, const H3WeightsKind *weights, AudioWork **ret) {
        AudioWork *x = calloc(1, sizeof(*x));

        if (!x)
                return -ENOMEM;
        x->vae = j->model->audio_vae;
        j->coder->weights = weights;
        j->coder->model = x->vae;
        j->coder->work = x; /* freed with the job from now on */
        *ret = x;
        return 0;
}

static int take_input(Job *j, const WireJobOpen *w, AudioWork *x, const TensorRule *rule, Fault *f) {
        int r;

        r = tensor_copy(&w->audio, rule, &j->arenas->input, (void **) &x->input, f);
        if (r < 0)
                return r;
        return tensor_check_finite(rule->name, ST_F32, x->input, rule->n_dims, w->audio.shape, f);
}

/* Pieces of both channels, beside `more` things to do. */
static int set_numbers(Job *j, AudioWork *x, uint32_t more, Fault *f) {
        Coder *c = j->coder;
        uint64_t finishers = j->model->ops->host_weights ? CHANNELS : c->ranks, bytes, finish;

        if (x->plan.jobs > UINT32_MAX - more)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "The sound is too long: %" PRIu64 " samples.", x->plan.samples);
        if (__builtin_mul_overflow(x->plan.job_memory, coder_takers(j, x->plan.jobs), &bytes) ||
                __builtin_mul_overflow(x->plan.finish_memory, finishers, &finish))
                return -EOVERFLOW;
        if (bytes < finish)
                bytes = finish;
        x->result_bytes = c->outputs[0].tensor.size;
        c->device_bytes = bytes;
        c->memory_bytes = bytes + x->plan.hidden_bytes + x->result_bytes;
        c->rows = x->plan.samples;
        c->blocks = (uint32_t) x->plan.jobs + more;
        j->steps = 1;
        return 0;
}

static int allocate(AudioWork *x) {
        if (!x->result)
                x->result = malloc(x->result_bytes);
        if (!x->hidden && x->plan.hidden_bytes > 0)
                x->hidden = malloc(x->plan.hidden_bytes);
        return x->result && (x->hidden || x->plan.hidden_bytes == 0) ? 0 : -ENOMEM;
}

/* What was made goes to its place if it is finite. */
static int publish(Job *j, const AudioWork *x, Fault *f) {
        const WireTensor *t = &j->coder->outputs[0].tensor;
        int r;

        r = tensor_check_finite(j->kind == WIRE_JOB_DECODE ? "sound of the VAE" : "latents of the VAE",
                ST_F32, x->result, t->n_dims, t->shape, f);
        if (r < 0)
                return r;
        r = coder_hold(j);
        if (r < 0)
                return r;
        memcpy(coder_output(j, 0), x->result, (size_t) x->result_bytes);
        coder_release(j, true);
        return 0;
}

typedef struct Pieces {
        TileFunc func;
        uint64_t n, memory; /* device bytes of each */
        uint32_t before;    /* things done before them */
} Pieces;

static int run(StepRunner *s, RankGroup *g, Job *j, const Pieces *p, Fault *f) {
        const AudioWork *x = j->coder->work;
        TilePool pool;
        int r;

        tile_pool_init(&pool, 1, (uint32_t) p->n, p->func, j->coder->work);
        pool.memory = p->memory;
        pool.row_bytes = ROW_FACTOR * (double) x->plan.piece * (double) x->vae->weight_bytes;
        pool.blocks_before = p->before;
        pool.blocks_after = j->coder->blocks - p->before - (uint32_t) p->n;
        r = tile_pool_run(&pool, s, g, j, 0, 1, j->ranks, f);
        tile_pool_done(&pool);
        return r;
}

static int decode_open(Job *j, const WireJobOpen *w, Fault *f) {
        TensorRule rule = {.name = "audio", .type = ST_F32, .n_dims = 3, .shape = {0, CHANNELS}};
        AudioWork *x = NULL;
        int r;

        r = work_new(j, &h3_weights_audio_decoder, &x);
        if (r < 0)
                return r;
        rule.shape[0] = x->vae->config.channels;
        r = take_input(j, w, x, &rule, f);
        if (r >= 0)
                r = h3_audio_decode_plan(x->vae, w->audio.shape[2], 0, JOB_BYTES, &x->plan, f);
        if (r >= 0)
                r = coder_add_output(
                        j->coder, WIRE_OUTPUT_SOUND, ST_F32, 2, (uint64_t[]){CHANNELS, x->plan.samples});
        if (r >= 0)
                r = set_numbers(j, x, 0, f);
        return r;
}

static int decode_piece(void *userdata, const TilePlace *at, Fault *f) {
        AudioWork *x = userdata;
        const H3Rank rank = {.index = at->rank, .ops = x->ops, .context = at->context, .weights = at->weights};

        return h3_audio_decode_job(
                &rank, x->vae, &x->plan, x->input, at->tile, at->memory, NULL, x->result, f);
}

static int decode_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        AudioWork *x = j->coder->work;
        int r;

        x->ops = s->backend->ops;
        r = allocate(x);
        if (r >= 0)
                r = run(s, g, j, &(Pieces){decode_piece, x->plan.jobs, x->plan.job_memory, 0}, f);
        return r < 0 ? r : publish(j, x, f);
}

static int encode_open(Job *j, const WireJobOpen *w, Fault *f) {
        const TensorRule rule = {.name = "audio", .type = ST_F32, .n_dims = 2, .shape = {CHANNELS}};
        AudioWork *x = NULL;
        int r;

        r = work_new(j, &h3_weights_audio_encoder, &x);
        if (r >= 0)
                r = take_input(j, w, x, &rule, f);
        if (r >= 0)
                r = h3_audio_encode_plan(x->vae, w->audio.shape[1], 0, JOB_BYTES, &x->plan, f);
        if (r >= 0)
                r = coder_add_output(j->coder, WIRE_OUTPUT_AUDIO, ST_F32, 3,
                        (uint64_t[]){x->vae->config.channels, CHANNELS, x->plan.latents});
        if (r >= 0)
                r = set_numbers(j, x, CHANNELS, f);
        return r;
}

static int encode_piece(void *userdata, const TilePlace *at, Fault *f) {
        AudioWork *x = userdata;
        const H3Rank rank = {.index = at->rank, .ops = x->ops, .context = at->context, .weights = at->weights};

        return h3_audio_encode_job(
                &rank, x->vae, &x->plan, x->input, at->tile, at->memory, NULL, x->hidden, f);
}

static int encode_channel(void *userdata, const TilePlace *at, Fault *f) {
        AudioWork *x = userdata;
        const H3Rank rank = {.index = at->rank, .ops = x->ops, .context = at->context, .weights = at->weights};

        return h3_audio_encode_finish(
                &rank, x->vae, &x->plan, x->hidden, at->tile, at->memory, NULL, x->result, NULL, NULL, f);
}

static int encode_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        AudioWork *x = j->coder->work;
        int r;

        x->ops = s->backend->ops;
        r = allocate(x);
        if (r >= 0)
                r = run(s, g, j, &(Pieces){encode_piece, x->plan.jobs, x->plan.job_memory, 0}, f);
        if (r >= 0)
                r = run(s, g, j,
                        &(Pieces){encode_channel, CHANNELS, x->plan.finish_memory, (uint32_t) x->plan.jobs},
                        f);
        return r < 0 ? r : publish(j, x, f);
}

static bool decode_runs(const LkOps *ops) {
        return ops->conv && ops->alias_free && ops->average;
}

static bool encode_runs(const LkOps *ops) {
        return ops->conv && ops->snake;
}

const CoderClass coder_decode_audio = {.runs = decode_runs, .open = decode_open, .step = decode_step, .free = work_free};
const CoderClass coder_encode_audio = {.runs = encode_runs, .open = encode_open, .step = encode_step, .free = work_free};
