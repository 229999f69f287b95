/* SPDX-License-Identifier: Apache-2.0 */
/* JOB_READY of Tokenize, Encode, Decode and EncodeMedia. */
#include "service/latentd/job-ready.h"

#include <string.h>

#include "service/latentd/model.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"

#define SIDE 16u        /* pixels of a latent */
#define SAMPLES 800u    /* of a latent of sound */
#define MEMORY_MAX (UINT64_C(1) << 62)

/* The results of a kind; shape: 0 for any number above 0. */
typedef struct Expected {
        WireOutputName name;
        StType type;
        uint32_t n_dims;
        uint64_t shape[WIRE_DIMS_MAX];
} Expected;

static bool makes_frames(const WireJobOpen *q) {
        return q->kind == WIRE_JOB_DECODE && q->video.n_dims > 0;
}

static uint32_t expect_outputs(const Job *j, const WireJobReady *m, Expected ret[static WIRE_OUTPUTS_MAX]) {
        const WireJobOpen *q = &j->request;
        const uint64_t *v = q->video.shape;

        switch ((WireJobKind) q->kind) {

        case WIRE_JOB_TOKENIZE:
                ret[0] = (Expected){WIRE_OUTPUT_IDS, ST_I32, 1, {m->rows}};
                return 1;

        case WIRE_JOB_ENCODE:
                ret[0] = (Expected){WIRE_OUTPUT_TEXT, (StType) q->output_type, 2, {m->rows, j->model->info.text_dim}};
                ret[1] = (Expected){WIRE_OUTPUT_TEXT_TAGS, ST_U8, 1, {m->rows}};
                ret[2] = (Expected){WIRE_OUTPUT_IDS, ST_I32, 1, {m->rows}};
                return 3;

        case WIRE_JOB_DECODE:
                ret[0] = makes_frames(q) ? (Expected){WIRE_OUTPUT_FRAMES, (StType) q->output_type, 4,
                                                   {m->ring_frames, v[2] * SIDE, v[3] * SIDE, 3}}
                                         : (Expected){WIRE_OUTPUT_SOUND, ST_F32, 2, {2, q->audio.shape[2] * SAMPLES}};
                return 1;

        default:
                ret[0] = q->video.n_dims > 0
                                 ? (Expected){WIRE_OUTPUT_VIDEO, ST_F32, 4, {24, 0, v[1] / SIDE, v[2] / SIDE}}
                                 : (Expected){WIRE_OUTPUT_AUDIO, ST_F32, 3,
                                           {32, 2, q->audio.shape[1] / SAMPLES + (q->audio.shape[1] % SAMPLES > 0)}};
                return 1;
        }
}

static bool is_expected(const WireOutput *o, const Expected *x) {
        const WireTensor *t = &o->tensor;
        uint64_t size = st_type_size(x->type);

        if (o->name != (uint32_t) x->name || t->dtype != (uint32_t) x->type || t->n_dims != x->n_dims)
                return false;

        for (uint32_t i = 0; i < x->n_dims; i++) {
                bool any = x->shape[i] == 0 && x->name != WIRE_OUTPUT_IDS; /* no tokens: of an empty text */

                if ((any ? t->shape[i] == 0 : t->shape[i] != x->shape[i]) ||
                        __builtin_mul_overflow(size, t->shape[i], &size))
                        return false;
        }

        return t->size == size && t->offset % st_type_size(x->type) == 0;
}

/* What lies in the output range: no two of them may share a byte. */
typedef struct Places {
        WireRange ranges[WIRE_OUTPUTS_MAX + 2];
        unsigned n;
} Places;

/* False: outside of what the job uses, or over another. */
static bool take_place(Places *p, const WireJobOpen *q, const WireJobReady *m, uint64_t offset, uint64_t size) {
        WireRange x = {.begin = offset};

        if (__builtin_add_overflow(offset, size, &x.end) || x.begin < q->output_offset ||
                x.end - q->output_offset > m->output_used)
                return false;

        for (unsigned i = 0; i < p->n; i++)
                if (x.begin < p->ranges[i].end && p->ranges[i].begin < x.end)
                        return false;

        p->ranges[p->n++] = x;
        return true;
}

static const char *check_places(const WireJobOpen *q, const WireJobReady *m) {
        bool plan = q->flags & WIRE_JOB_PLAN_ONLY; /* says how much there has to be */
        Places p = {};
        uint64_t slots;

        if (m->output_used > (plan ? MEMORY_MAX : q->output_size))
                return "JOB_READY uses more than the output range";

        if (m->commit_offset % sizeof(uint64_t) != 0 || !take_place(&p, q, m, m->commit_offset, sizeof(uint64_t)))
                return "JOB_READY with a commit word outside the output range";

        if (m->n_slots != 0 && (m->n_slots != 2 || !makes_frames(q)))
                return "JOB_READY with a number of slots that its kind does not have";
        if (m->n_slots == 0 && (m->slot_offset != 0 || m->slot_stride != 0))
                return "JOB_READY with a place for slots that it does not have";
        if (m->n_slots > 0 && (m->slot_offset % WIRE_SLOT_ALIGN != 0 || m->slot_stride % WIRE_SLOT_ALIGN != 0 ||
                                      __builtin_mul_overflow(m->slot_stride, (uint64_t) m->n_slots, &slots) ||
                                      !take_place(&p, q, m, m->slot_offset, slots)))
                return "JOB_READY with slots outside the output range or over its commit word";

        for (uint32_t i = 0; i < m->n_outputs; i++)
                if (!take_place(&p, q, m, m->outputs[i].tensor.offset, m->outputs[i].tensor.size))
                        return "JOB_READY with results outside the output range or over each other";

        return NULL;
}

/* The film and its ring. */
static const char *check_frames(const WireJobOpen *q, const WireJobReady *m, uint64_t asked) {
        uint64_t least, all;

        if (!makes_frames(q))
                return m->frames == 0 && m->ring_frames == 0 && m->step_frames == 0 && m->frames_done == 0
                               ? NULL
                               : "JOB_READY with frames of a job that makes none";

        if (m->frames == 0 || m->step_frames == 0 || __builtin_mul_overflow(m->step_frames, (uint64_t) m->steps, &all) ||
                m->frames > all)
                return "JOB_READY with a number of frames that its steps cannot make";

        if (asked == 0 ? m->ring_frames != m->frames
                       : m->ring_frames != asked && (m->ring_frames != m->frames || asked < m->frames))
                return "JOB_READY with another ring than asked for";

        least = m->step_frames < m->frames ? m->step_frames : m->frames;
        if (m->ring_frames < least)
                return "JOB_READY with a ring that cannot hold what a step makes";

        if (m->frames_done > m->frames || (m->committed == 0 && m->frames_done > 0) ||
                (m->committed == m->steps && m->frames_done != m->frames))
                return "JOB_READY with frames done that its committed steps cannot have made";

        return NULL;
}

/* Whoever reads or resumes it must find everything where it was. */
static const char *check_same(const Job *j, const WireJobReady *m) {
        const WireJobReady *old = &j->ready;

        if (m->rows != old->rows || m->steps != old->steps || m->commit_offset != old->commit_offset ||
                m->n_slots != old->n_slots || m->slot_offset != old->slot_offset ||
                m->slot_stride != old->slot_stride || m->n_outputs != old->n_outputs ||
                memcmp(m->outputs, old->outputs, sizeof(m->outputs)) != 0 || m->frames != old->frames ||
                m->ring_frames != old->ring_frames || m->step_frames != old->step_frames)
                return "JOB_READY of a job that goes on with another layout than before";

        if (j->resume && m->frames_done < j->frames_done)
                return "JOB_READY with less frames than were done before";
        if (j->resume && m->frames_done > j->frames_done && m->frames_done - j->frames_done > m->step_frames)
                return "JOB_READY with more frames than the step before the worker's death can have made";

        return NULL;
}

static const char *check_outputs(const Job *j, const WireJobReady *m) {
        Expected expected[WIRE_OUTPUTS_MAX];
        uint32_t n = expect_outputs(j, m, expected);

        if (m->n_outputs != n)
                return "JOB_READY with another number of results than its kind has";

        for (uint32_t i = 0; i < n; i++) {
                bool found = false;

                for (uint32_t k = 0; k < n && !found; k++)
                        found = is_expected(&m->outputs[k], &expected[i]);
                if (!found)
                        return "JOB_READY with results of another name, type or shape than its kind has";
        }

        return NULL;
}

const char *job_ready_check_coding(const Job *j, const WireJobReady *m) {
        const WireJobOpen *q = &j->request;
        bool chunks = q->kind == WIRE_JOB_DECODE || q->kind == WIRE_JOB_ENCODE_MEDIA;
        const char *why;

        if ((m->rows == 0 && q->kind != WIRE_JOB_TOKENIZE) || m->rows > JOB_ROWS_MAX || m->blocks == 0 ||
                m->blocks > JOB_BLOCKS_MAX)
                return "JOB_READY with impossible rows or blocks";

        if (chunks ? m->steps == 0 || m->steps > JOB_CHUNKS_MAX : m->steps != 1)
                return "JOB_READY with another number of steps than its kind can have";

        if (m->committed != (j->resume ? j->step : 0))
                return "JOB_READY with another number of committed steps than the commit word";

        if (m->video.n_dims != 0 || m->video.size != 0 || m->audio.n_dims != 0 || m->audio.size != 0 ||
                m->carried.n_dims != 0 || m->carried.size != 0)
                return "JOB_READY of a coding job with the results of a sampler";

        if (m->memory_bytes > MEMORY_MAX)
                return "JOB_READY with more memory than there can be";

        why = check_frames(q, m, q->ring_frames);
        if (!why)
                why = check_outputs(j, m);
        if (!why)
                why = check_places(q, m);
        if (!why && (j->resume || j->frames_ready > 0))
                why = check_same(j, m);
        return why;
}
