/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of Session.Sample. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/job-ready.h"
#include "service/latentd/model.h"
#include "service/shared/cleanup.h"

/* The released model's. */
#define SHIFT_VIDEO 12.0f
#define SHIFT_AUDIO 3.0f

typedef struct Sample {
        Request c;
        Trajectory t;
        const char *numerics;
        int keep_steps;
        bool clean_video, clean_audio, slot, kept;
} Sample;

int request_trajectory_names(const Trajectory *x, WireJobOpen *q, Fault *f) {
        static const char *const noises[] = {
                [WIRE_NOISE_GIVEN] = "given",
                [WIRE_NOISE_COMFY] = "comfy",
                [WIRE_NOISE_DIFFUSERS] = "diffusers",
        };
        static const char *const samplers[] = {
                [WIRE_SAMPLER_EULER] = "euler",
                [WIRE_SAMPLER_RES_MULTISTEP] = "res_multistep",
                [WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM] = "res_multistep_perstream",
        };
        static const char *const schedules[] = {"simple", "reference"};
        uint32_t schedule;
        int r;

        r = request_choice("noise", x->noise, noises, ELEMENTSOF(noises), &q->noise, f);
        if (r < 0)
                return r;

        r = request_choice("sampler", x->sampler, samplers, ELEMENTSOF(samplers), &q->sampler, f);
        if (r < 0)
                return r;

        r = request_choice("schedule", x->schedule, schedules, ELEMENTSOF(schedules), &schedule, f);
        if (r < 0)
                return r;

        q->schedule = schedule == 0 ? WIRE_SCHEDULE_SIMPLE : WIRE_SCHEDULE_REFERENCE;
        return 0;
}

static int given_sigmas(const Trajectory *x, WireJobOpen *q, Fault *f) {
        int r;

        r = request_check_sigmas(q, x->sigmas_video, x->sigmas_audio, f);
        if (r < 0)
                return r;

        q->schedule = WIRE_SCHEDULE_GIVEN;
        return 0;
}

static int made_sigmas(const Trajectory *x, WireJobOpen *q, Fault *f) {
        if (!x->steps_seen)
                return request_missing("steps", "1 to 1000, or else sigmas-video and sigmas-audio", f);

        if (x->steps < 1 || x->steps > JOB_STEPS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"steps\" is %" PRIu32 ", expected 1 to %d.", x->steps, JOB_STEPS_MAX);

        q->steps = x->steps;
        return 0;
}

static int shift(const char *key, double value, bool seen, float *ret, Fault *f) {
        float narrow = (float) value;

        if (!seen)
                return 0;

        if (!isfinite(value) || !isfinite(narrow) || !(narrow > 0.0f))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is %g, expected a number above 0 and at most %.2g, such as 12.", key, value, (double) FLT_MAX);

        *ret = narrow;
        return 0;
}

int request_trajectory_schedule(const Trajectory *x, WireJobOpen *q, Fault *f) {
        int r;

        r = x->sigmas_video || x->sigmas_audio ? given_sigmas(x, q, f) : made_sigmas(x, q, f);
        if (r < 0)
                return r;

        /* Sigmas that are given win over the shifts, but for the sampler that knows the streams' relation by
         * them. */
        if (q->schedule == WIRE_SCHEDULE_GIVEN && q->sampler != WIRE_SAMPLER_RES_MULTISTEP)
                return 0;

        r = shift("shift-video", x->shift_video, x->shift_video_seen, &q->shift_video, f);
        if (r < 0)
                return r;

        return shift("shift-audio", x->shift_audio, x->shift_audio_seen, &q->shift_audio, f);
}

static float shift_video_of(const Model *m) {
        return m->info.shift_video > 0 ? m->info.shift_video : SHIFT_VIDEO;
}

void session_request_shifts(const Model *m, WireJobOpen *q) {
        if (q->schedule == WIRE_SCHEDULE_GIVEN && q->sampler != WIRE_SAMPLER_RES_MULTISTEP)
                return;

        if (q->shift_video == 0)
                q->shift_video = shift_video_of(m);
        if (q->shift_audio == 0)
                q->shift_audio = m->info.shift_audio > 0 ? m->info.shift_audio : SHIFT_AUDIO;
}

void session_request_sparse(const SparseOptions *o, const Model *m, WireJobOpen *q) {
        q->sparse = *o;
        if (o->method == SPARSE_NONE)
                return;
        q->sparse.shift = q->shift_video > 0 ? q->shift_video : shift_video_of(m);
}

/* What a mask keeps. */
static int check_clean(const char *key, const WireTensor *clean, bool seen, const char *mask, bool masked,
        const Sample *x, const WireTensor *like, const char *what, Fault *f) {
        const TensorRule rule = RULE_LIKE(like, what);

        if (seen && !masked)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" is what \"%s\" keeps: give that too, or leave it out.", key, mask);

        if (!seen && masked && x->c.q.noise == WIRE_NOISE_GIVEN)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"%s\" needs \"%s\", what it keeps, unless \"noise\" is made.", mask, key);

        return request_check_tensor(key, clean, seen, false, &rule, f);
}

static int check_cleans(const Sample *x, Fault *f) {
        const WireJobOpen *q = &x->c.q;
        int r;

        r = check_clean("clean-video", &q->clean_video, x->clean_video, "mask-video", x->c.mask_video, x,
                &q->video, "F32 of the shape of \"video\"", f);
        if (r < 0)
                return r;

        return check_clean("clean-audio", &q->clean_audio, x->clean_audio, "mask-audio", x->c.mask_audio, x,
                &q->audio, "F32 of the shape of \"audio\"", f);
}

static int check_slots(const Sample *x, bool kept, Fault *f) {
        const WireJobOpen *q = &x->c.q;
        char slot_text[96], slots_text[96];
        TensorRule slot = {ST_U8, 1, slot_text, {}};
        TensorRule slots = {ST_U8, 2, slots_text, {}};
        WireSlot place;
        int r;

        r = job_slot_place(q, &place);
        if (r < 0)
                return fault_set(f, r, FAULT_INVALID_TENSOR,
                        "\"video\" and \"audio\" have more bytes than 64 bits can count.");

        slot.shape[0] = slots.shape[1] = place.stride;
        slots.shape[0] = q->start_step;
        (void) snprintf(slot_text, sizeof(slot_text), "U8 [%" PRIu64 "], the bytes of a slot", place.stride);
        (void) snprintf(slots_text, sizeof(slots_text), "U8 [%" PRIu32 ", %" PRIu64 "], the slots before it",
                q->start_step, place.stride);

        r = request_check_tensor("resume-slot", &q->slot, x->slot, q->start_step > 0, &slot, f);
        if (r < 0)
                return r;

        return request_check_tensor("kept-slots", &q->kept, x->kept, kept, &slots, f);
}

/* A trajectory that another run of the service began. */
static int check_resumed(Sample *x, Fault *f) {
        WireJobOpen *q = &x->c.q;
        uint64_t steps = q->schedule == WIRE_SCHEDULE_GIVEN ? q->sigmas_video.shape[0] - 1 : q->steps;
        bool kept = q->start_step > 0 && (q->flags & WIRE_JOB_KEEP_STEPS);

        if (q->start_step >= steps)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"resume-step\" is %" PRIu32 ", expected less than the %" PRIu64 " steps.",
                        q->start_step, steps);

        if (x->numerics && (q->start_step == 0 || strlen(x->numerics) >= sizeof(q->numerics)))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"numerics\" is for a trajectory with \"resume-step\" and has less than %zu bytes.",
                        sizeof(q->numerics));
        if (x->numerics)
                memcpy(q->numerics, x->numerics, strlen(x->numerics) + 1);

        if (x->slot && q->start_step == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"resume-slot\" is the state after \"resume-step\" steps: give that too, above 0.");

        if (x->kept && !kept)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"kept-slots\" is for \"keep-steps\" with \"resume-step\".");

        return check_slots(x, kept, f);
}

static int finish(Sample *x, const Session *s, Fault *f) {
        int r;

        r = request_trajectory_names(&x->t, &x->c.q, f);
        if (r < 0)
                return r;

        r = request_finish(&x->c, s, f);
        if (r < 0)
                return r;

        r = request_trajectory_schedule(&x->t, &x->c.q, f);
        if (r < 0)
                return r;

        r = check_cleans(x, f);
        if (r < 0)
                return r;

        r = check_resumed(x, f);
        if (r < 0)
                return r;

        return session_check_request(s, &x->c.q, f);
}

int session_request_sample(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        Sample x = {
                .c.q = {.kind = WIRE_JOB_SAMPLE, .flags = flags},
                .t = TRAJECTORY_DEFAULT,
        };
        const BusKey keys[] = {
                REQUEST_KEYS(&x.c),
                TRAJECTORY_KEYS(&x.t, &x.c.q),
                {"clean-video", "(tsat)", &x.c.q.clean_video, &x.clean_video},
                {"clean-audio", "(tsat)", &x.c.q.clean_audio, &x.clean_audio},
                {"keep-steps", "b", &x.keep_steps},
                {"resume-step", "u", &x.c.q.start_step},
                {"numerics", "s", &x.numerics},
                {"resume-slot", "(tsat)", &x.c.q.slot, &x.slot},
                {"kept-slots", "(tsat)", &x.c.q.kept, &x.kept},
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        r = session_check_kind(s, WIRE_JOB_SAMPLE, f);
        if (r < 0)
                return r;

        if (x.keep_steps)
                x.c.q.flags |= WIRE_JOB_KEEP_STEPS;
        r = finish(&x, s, f);
        if (r < 0)
                return r;

        session_request_shifts(s->model, &x.c.q);
        session_request_sparse(&s->sparse, s->model, &x.c.q);
        *ret = x.c.q;
        return 0;
}
