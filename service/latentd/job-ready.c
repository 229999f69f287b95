/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/job-ready.h"

#include <string.h>

static uint32_t steps_of(const WireJobOpen *q) {
        if (q->kind == WIRE_JOB_STEP)
                return 1;
        if (q->schedule == WIRE_SCHEDULE_GIVEN)
                return (uint32_t) (q->sigmas_video.shape[0] - 1);
        return q->steps;
}

/* A result has the type and shape of its input. offset is relative to the slot. */
static bool tensor_fits(const WireTensor *t, const WireTensor *input, uint64_t stride) {
        if (t->dtype != input->dtype || t->n_dims != input->n_dims || t->size != input->size)
                return false;
        for (uint32_t i = 0; i < input->n_dims; i++)
                if (t->shape[i] != input->shape[i])
                        return false;

        return t->offset % sizeof(float) == 0 && t->size <= stride && t->offset <= stride - t->size;
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
                m->slot_stride % 8 != 0 || !in_range(q, m->slot_offset, slots) ||
                !in_range(q, m->commit_offset, sizeof(uint64_t)) ||
                overlap(m->commit_offset, sizeof(uint64_t), m->slot_offset, slots))
                return "JOB_READY with slots or a commit word outside the output range";

        if (m->output_used > q->output_size)
                return "JOB_READY uses more than the output range";

        return NULL;
}

const char *job_ready_check(const Job *j, const WireJobReady *m) {
        const WireJobOpen *q = &j->request;
        const char *why;

        if (m->rows == 0 || m->rows > JOB_ROWS_MAX || m->blocks == 0 || m->blocks > JOB_BLOCKS_MAX)
                return "JOB_READY with impossible rows or blocks";

        /* A made schedule may be shorter than asked for: equal neighbours are merged (h3/schedule.h). */
        bool made = q->kind == WIRE_JOB_SAMPLE && q->schedule != WIRE_SCHEDULE_GIVEN;
        if (made ? m->steps == 0 || m->steps > steps_of(q) : m->steps != steps_of(q))
                return "JOB_READY with another number of steps than asked for";

        if (m->committed != (j->resume ? j->step : q->start_step))
                return "JOB_READY with another number of committed steps than the commit word";

        why = check_slots(q, m);
        if (why)
                return why;

        if (!tensor_fits(&m->video, &q->video, m->slot_stride) ||
                !tensor_fits(&m->audio, &q->audio, m->slot_stride) ||
                overlap(m->video.offset, m->video.size, m->audio.offset, m->audio.size))
                return "JOB_READY with results of another shape or place";

        return NULL;
}
