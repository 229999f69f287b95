/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/coder-text.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"
#include "service/worker/text-split.h"
#include "service/worker/tile-pool.h"

/* TOKENIZE and ENCODE: one step each. */

enum {
        OUTPUT_TEXT, /* of ENCODE */
        OUTPUT_TAGS,
        OUTPUT_IDS,
};

static void work_free(void *userdata) {
        TextWork *x = userdata;

        if (!x)
                return;
        free(x->ids);
        (void) h3_presentation_free(x->presentation);
        free(x->pictures);
        free(x->key);
        free(x);
}

static int work_new(Job *j, TextWork **ret, Fault *f) {
        if (!j->model->tokenizer)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The conditioner was loaded without a tokenizer: load it with the tokenizer's files "
                        "(tokenizer.json, or vocab.json and merges.txt) beside it, or name their directory "
                        "with "
                        "the option tokenizer.");
        *ret = calloc(1, sizeof(**ret));
        if (!*ret)
                return -ENOMEM;
        j->coder->work = *ret; /* freed with the job from now on */
        return 0;
}

static int tokenize_open(Job *j, const WireJobOpen *w, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        Coder *c = j->coder;
        size_t size, n;
        TextWork *x = NULL;
        int r;

        r = work_new(j, &x, f);
        if (r >= 0)
                r = text_take(j, w, &text, &size, f);
        if (r >= 0)
                r = h3_tokenizer_encode(j->model->tokenizer, text, size, &x->ids, &n, f);
        if (r < 0)
                return r;
        x->n = c->rows = n;
        c->blocks = 1;
        j->steps = 1;
        return coder_add_output(c, WIRE_OUTPUT_IDS, ST_I32, 1, &x->n);
}

static int tokenize_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        const TextWork *x = j->coder->work;
        int r;

        r = coder_hold(j);
        if (r < 0)
                return r;
        memcpy(coder_output(j, 0), x->ids, x->n * sizeof(*x->ids));
        coder_release(j, true);
        return 0;
}

/* patches: where those of the first picture go, the others behind them; NULL: sizes alone. */
static int list_vision(const TextWork *x, float *patches, H3VisionInput **ret) {
        const H3Presentation *p = x->presentation;

        *ret = calloc(p->n_blocks + 1, sizeof(**ret));
        if (!*ret)
                return -ENOMEM;
        for (size_t i = 0; i < p->n_blocks; i++) {
                H3VisionInput *v = *ret + i;

                *v = (H3VisionInput){
                        .grid_height = p->blocks[i].size.height / H3_PATCH,
                        .grid_width = p->blocks[i].size.width / H3_PATCH,
                        .first_token = p->blocks[i].first_token,
                        .patches = patches,
                };
                if (patches)
                        patches += v->grid_height * v->grid_width * H3_PATCH_NUMBERS;
        }
        return 0;
}

static H3TextInput text_input(const Job *j, const TextWork *x, const H3VisionInput *vision) {
        const H3Presentation *p = x->presentation;

        return (H3TextInput){
                .compute = j->compute,
                .n = p->n,
                .ids = p->ids,
                .positions = p->positions,
                .vision = vision,
                .n_vision = p->n_blocks,
        };
}

static uint64_t act_size(const Job *j) {
        return lk_type_size(j->compute == H3_COMPUTE_F32 ? LK_F32 : LK_BF16);
}

/* Ranks, what lies between them, patches, and the result twice: as it is made and as it is asked for. */
static int set_memory(Job *j, const TextWork *x, const H3VisionInput *vision) {
        const H3TextModel *m = j->model->conditioner;
        const H3TextInput in = text_input(j, x, vision);
        const H3TextSize size = h3_text_size(&in, j->coder->ranks);
        uint64_t bytes;
        int r;

        r = text_split_memory(m, &size, j->coder->exchange, &bytes, &j->coder->device_bytes);
        if (r < 0)
                return r;
        j->coder->memory_bytes =
                bytes + size.all_patches * H3_PATCH_NUMBERS * sizeof(float) +
                x->n * m->config.hidden * (act_size(j) + st_type_size(j->coder->output_type));
        return 0;
}

static int encode_open(Job *j, const WireJobOpen *w, Fault *f) {
        const H3TextModel *m = j->model->conditioner;
        CLEANUP_FREE H3VisionInput *vision = NULL;
        Coder *c = j->coder;
        TextWork *x = NULL;
        int r;

        if (w->output_type != ST_BF16 && w->output_type != ST_F32)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The text is to be of the type %" PRIu32 ", expected bf16 or f32.", w->output_type);
        if (w->owner == 0)
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "ENCODE has no owner.");
        r = work_new(j, &x, f);
        if (r >= 0)
                r = text_request_new(j, w, x, f);
        if (r >= 0)
                r = h3_text_check_length(m, x->presentation->n, f); /* a plan is refused where the work would be */
        if (r >= 0)
                r = list_vision(x, NULL, &vision);
        if (r >= 0)
                r = set_memory(j, x, vision);
        if (r < 0)
                return r;

        c->weights = &h3_weights_text;
        c->model = m;
        c->owner = w->owner;
        c->rows = x->n;
        c->blocks = m->config.layers + (uint32_t) x->presentation->n_blocks * m->config.vision.depth;
        j->steps = 1;
        r = coder_add_output(c, WIRE_OUTPUT_TEXT, c->output_type, 2, (uint64_t[]){x->n, m->config.hidden});
        if (r >= 0)
                r = coder_add_output(c, WIRE_OUTPUT_TEXT_TAGS, ST_U8, 1, &x->n);
        if (r >= 0)
                r = coder_add_output(c, WIRE_OUTPUT_IDS, ST_I32, 1, &x->n);
        return r;
}

static int publish(Job *j, const TextWork *x, const void *text) {
        const H3Presentation *p = x->presentation;
        int r;

        r = coder_hold(j);
        if (r < 0)
                return r;
        memcpy(coder_output(j, OUTPUT_TEXT), text, (size_t) j->coder->outputs[OUTPUT_TEXT].tensor.size);
        memcpy(coder_output(j, OUTPUT_TAGS), p->tags, p->n);
        memcpy(coder_output(j, OUTPUT_IDS), p->ids, p->n * sizeof(*p->ids));
        coder_release(j, true);
        return 0;
}

static EncodeKey key_of(const Job *j) {
        const TextWork *x = j->coder->work;

        return (EncodeKey){
                .owner = j->coder->owner, .model = j->model->identity, .bytes = x->key, .size = x->key_size};
}

static int encode_recall(StepRunner *s, Job *j, StepResult *ret) {
        const EncodeKey key = key_of(j);
        CLEANUP(encoded_unrefp) Encoded *e = encode_cache_find(&s->encodes, &key);
        int r;

        if (!e)
                return 0;
        r = publish(j, j->coder->work, e->text);
        if (r < 0)
                return r;
        ret->cached = true;
        return 1;
}

typedef struct Patches {
        const TextWork *work;
        const H3VisionInput *vision; /* patches are written here */
} Patches;

static int make_patches(void *userdata, const TilePlace *at, Fault *f) {
        const Patches *x = userdata;
        const TextPicture *k = x->work->pictures + at->tile;

        return h3_picture_patches(x->work->rules, k->first, k->second, k->height, k->width,
                x->work->presentation->blocks[at->tile].size, (float *) x->vision[at->tile].patches);
}

/* Host arithmetic, a picture to a rank. */
static int prepare(StepRunner *s, RankGroup *g, Job *j, const H3VisionInput *vision, Fault *f) {
        Patches patches = {j->coder->work, vision};
        TilePool pool;
        int r;

        tile_pool_init(&pool, 1, (uint32_t) patches.work->presentation->n_blocks, make_patches, &patches);
        pool.quiet = true;
        r = tile_pool_run(&pool, s, g, j, 0, 1, j->ranks, f);
        tile_pool_done(&pool);
        return r;
}

typedef struct Run {
        StepRunner *runner;
        Job *job;
} Run;

static int on_begin(void *userdata, uint32_t rank, H3Rank *to) {
        Run *x = userdata;

        return residency_begin(&x->runner->residency, rank, H3_PASS_CODE, to);
}

static int on_block(void *userdata, uint32_t rank, uint32_t done, uint32_t total) {
        Run *x = userdata;

        if (x->job->cancelled)
                return -ECANCELED;
        if (rank == job_first_rank(x->job))
                step_tell(x->runner, x->job, 0, done, total);
        return 0;
}

static void on_stuck(void *userdata, const Fault *f) {
        Run *x = userdata;

        x->runner->on_stuck(x->runner->userdata, x->job, 0, f);
}

static int compute(StepRunner *s, RankGroup *g, Job *j, void *hidden, uint64_t *ret_bytes, Fault *f) {
        TextWork *x = j->coder->work;
        CLEANUP_FREE H3VisionInput *vision = NULL;
        CLEANUP_FREE float *patches = NULL;
        Run run = {s, j};
        TextSplit split = {
                .ops = s->backend->ops,
                .model = j->model->conditioner,
                .ranks = j->ranks,
                .exchange = j->coder->exchange,
                .on_begin = on_begin,
                .on_block = on_block,
                .on_stuck = on_stuck,
                .userdata = &run,
                .hook = s->hook,
                .deadline_usec = s->deadline_usec,
        };
        uint64_t n = 0;
        H3TextInput in;
        int r;

        for (size_t i = 0; i < x->presentation->n_blocks; i++) {
                const H3PictureSize *size = &x->presentation->blocks[i].size;

                n += size->height / H3_PATCH * (size->width / H3_PATCH) * H3_PATCH_NUMBERS;
        }
        patches = malloc((n + 1) * sizeof(*patches));
        if (!patches)
                return -ENOMEM;
        r = list_vision(x, patches, &vision);
        if (r >= 0)
                r = prepare(s, g, j, vision, f);
        if (r < 0)
                return r;

        in = text_input(j, x, vision);
        split.in = &in;
        return text_split_run(g, &split, hidden, ret_bytes, f);
}

static float bf16_to_f32(uint16_t v) {
        uint32_t bits = (uint32_t) v << 16;
        float x;

        memcpy(&x, &bits, sizeof(x));
        return x;
}

/* To nearest even; what is not finite stays so. */
static uint16_t f32_to_bf16(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof(bits));
        if ((bits & 0x7fffffffu) > 0x7f800000u)
                return (uint16_t) (bits >> 16 | 0x40);
        return (uint16_t) ((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* From the activations' type to the one that was asked for: *ret is hidden itself where they are the same,
 * else *ret_own. */
static int convert(const Job *j, const void *hidden, uint64_t n, void **ret_own, const void **ret) {
        bool wide = j->compute == H3_COMPUTE_F32;

        *ret = hidden;
        if (wide == (j->coder->output_type == ST_F32))
                return 0;
        *ret = *ret_own = malloc(n * st_type_size(j->coder->output_type));
        if (!*ret_own)
                return -ENOMEM;
        for (uint64_t i = 0; i < n; i++)
                if (wide)
                        ((uint16_t *) *ret_own)[i] = f32_to_bf16(((const float *) hidden)[i]);
                else
                        ((float *) *ret_own)[i] = bf16_to_f32(((const uint16_t *) hidden)[i]);
        return 0;
}

static int encode_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        const WireTensor *t = &j->coder->outputs[OUTPUT_TEXT].tensor;
        const EncodeKey key = key_of(j);
        uint64_t n = t->shape[0] * t->shape[1];
        CLEANUP_FREE void *hidden = malloc(n * act_size(j)), *own = NULL;
        const void *text;
        int r;

        if (!hidden)
                return -ENOMEM;
        r = compute(s, g, j, hidden, &ret->exchanged_bytes, f);
        if (r >= 0)
                r = convert(j, hidden, n, &own, &text);
        if (r >= 0)
                r = tensor_check_finite(
                        "text of the conditioner", j->coder->output_type, text, 2, t->shape, f);
        if (r >= 0)
                r = publish(j, j->coder->work, text);
        if (r < 0)
                return r;

        encode_cache_add(&s->encodes, &key, text, t->size);
        return 0;
}

const CoderClass coder_tokenize = {.open = tokenize_open, .step = tokenize_step, .free = work_free};
const CoderClass coder_encode = {
        .open = encode_open, .recall = encode_recall, .step = encode_step, .free = work_free};
