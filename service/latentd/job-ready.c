/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/job-ready.h"

#include <errno.h>

#include "service/shared/safetensors.h"

static uint32_t steps_of(const WireJobOpen *q) {
        if (q->kind == WIRE_JOB_STEP)
                return 1;
        if (q->schedule == WIRE_SCHEDULE_GIVEN)
                return (uint32_t) (q->sigmas_video.shape[0] - 1);
        return q->steps;
}

int job_slot_place(const WireJobOpen *q, WireSlot *ret) {
        WireSampler sampler = q->kind == WIRE_JOB_SAMPLE ? (WireSampler) q->sampler : WIRE_SAMPLER_EULER;

        return wire_slot_place(sampler, q->video.size, q->audio.size, ret);
}

/* A result has the type and shape of its input and lies where it belongs in its slot. */
static bool tensor_fits(const WireTensor *t, const WireTensor *input, uint64_t offset) {
        if (t->dtype != input->dtype || t->n_dims != input->n_dims || t->size != input->size)
                return false;
        for (uint32_t i = 0; i < input->n_dims; i++)
                if (t->shape[i] != input->shape[i])
                        return false;

        return t->offset == offset;
}

static const char *check_slot(const WireJobOpen *q, const WireJobReady *m) {
        WireSlot place;

        if (job_slot_place(q, &place) < 0 || m->slot_stride != place.stride)
                return "JOB_READY with slots of another size";

        if (!tensor_fits(&m->video, &q->video, 0) || !tensor_fits(&m->audio, &q->audio, place.audio))
                return "JOB_READY with results of another shape or place";

        if (place.carried > 0 ? !tensor_fits(&m->carried, &q->audio, place.carried) :
                                m->carried.size != 0 || m->carried.n_dims != 0)
                return "JOB_READY with another carried audio than its sampler has";

        return NULL;
}

static bool overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
        return a < b + b_size && b < a + a_size;
}

/* [offset, offset + size) inside the output range; offset a multiple of 8. */
static bool in_range(const WireJobOpen *q, uint64_t offset, uint64_t size) {
        return offset % 8 == 0 && offset >= q->output_offset && size <= q->output_size &&
               offset - q->output_offset <= q->output_size - size;
}

static const char *check_slots(const WireJobOpen *q, const WireJobReady *m) {
        uint64_t slots;
        uint32_t least = q->kind == WIRE_JOB_STEP ? 1 : (q->flags & WIRE_JOB_KEEP_STEPS) ? m->steps + 1 : 2;

        /* More slots than states would be no harm but cannot be meant. */
        if (m->n_slots < least || m->n_slots > m->steps + 1)
                return "JOB_READY with a number of slots that cannot hold its states";

        if (__builtin_mul_overflow(m->slot_stride, (uint64_t) m->n_slots, &slots) ||
                !in_range(q, m->slot_offset, slots) ||
                !in_range(q, m->commit_offset, sizeof(uint64_t)) ||
                overlap(m->commit_offset, sizeof(uint64_t), m->slot_offset, slots))
                return "JOB_READY with slots or a commit word outside the output range";

        if (m->output_used > q->output_size)
                return "JOB_READY uses more than the output range";

        return NULL;
}

/* Of the slots it is known that they are inside of the range. */
static const char *check_preview(const WireJobOpen *q, const WireJobReady *m) {
        const WireTensor *t = &m->outputs[0].tensor, *v = &q->video;
        uint64_t size = v->size / sizeof(float) / v->shape[0] * 3;

        if (m->outputs[0].name != WIRE_OUTPUT_PREVIEW || t->dtype != ST_U8 || t->n_dims != 4 || t->shape[0] != v->shape[1] ||
                t->shape[1] != v->shape[2] || t->shape[2] != v->shape[3] || t->shape[3] != 3 || t->size != size)
                return "JOB_READY with a preview of another shape";
        if (!in_range(q, t->offset, size) || overlap(t->offset, size, m->slot_offset, m->slot_stride * m->n_slots) ||
                overlap(t->offset, size, m->commit_offset, sizeof(uint64_t)))
                return "JOB_READY with a preview outside the output range or over its slots";

        return NULL;
}

const char *job_ready_check(const Job *j, const WireJobReady *m) {
        const WireJobOpen *q = &j->request;
        const char *why;

        if (q->kind == WIRE_JOB_MERGE) /* everything else is of no use to it */
                return m->steps == 1 && m->committed == 0 && m->blocks <= JOB_BLOCKS_MAX ?
                               NULL :
                               "JOB_READY for a MERGE with more than one step";

        if (wire_job_is_coding(q->kind))
                return job_ready_check_coding(j, m);

        if (m->n_outputs > (q->preview_steps > 0) || m->frames != 0)
                return "JOB_READY of a sampler with results of coding";

        if (m->memory_bytes > JOB_MEMORY_MAX)
                return "JOB_READY with more memory than there can be";

        if (m->rows == 0 || m->rows > JOB_ROWS_MAX || m->blocks == 0 || m->blocks > JOB_BLOCKS_MAX)
                return "JOB_READY with impossible rows or blocks";

        /* A made schedule may be shorter than asked for: equal neighbours are merged (h3/schedule.h). */
        bool made = q->kind == WIRE_JOB_SAMPLE && q->schedule != WIRE_SCHEDULE_GIVEN;
        if (made ? m->steps == 0 || m->steps > steps_of(q) : m->steps != steps_of(q))
                return "JOB_READY with another number of steps than asked for";

        if (m->committed != (j->resume ? j->step : q->start_step))
                return "JOB_READY with another number of committed steps than the commit word";

        why = check_slots(q, m);
        if (!why)
                why = check_slot(q, m);
        if (!why && m->n_outputs > 0)
                why = check_preview(q, m);
        return why;
}
