/* SPDX-License-Identifier: Apache-2.0 */
/* The key "conditions" of Step and Sample: keyframes and references. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "service/shared/cleanup.h"

static const char *const kind_names[] = {
        [WIRE_CONDITION_KEYFRAME] = "keyframe",
        [WIRE_CONDITION_IMAGE] = "image",
        [WIRE_CONDITION_VIDEO] = "video",
        [WIRE_CONDITION_AUDIO] = "audio",
};

int request_condition_kind(const char *name, uint32_t *ret, Fault *f) {
        return request_choice("kind", name, kind_names, ELEMENTSOF(kind_names), ret, f);
}

typedef struct Condition {
        const char *kind;
        uint32_t frame;
        WireTensor video, audio;
        bool has_frame, has_video, has_audio;
} Condition;

static int contradicts(const char *kind, const char *key, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "A condition of kind \"%s\" has no \"%s\": leave it out.", kind, key);
}

/* Which keys go with which kind. */
static int check_keys(const Condition *c, WireConditionKind kind, Fault *f) {
        if (c->has_frame && kind != WIRE_CONDITION_KEYFRAME)
                return contradicts(c->kind, "frame", f);

        switch (kind) {

        case WIRE_CONDITION_KEYFRAME:
                if (!c->has_video && !c->has_audio)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "A condition of kind \"keyframe\" needs \"video\", \"audio\" or both.");
                return 0;

        case WIRE_CONDITION_IMAGE:
                return c->has_audio ? contradicts(c->kind, "audio", f) : 0;

        case WIRE_CONDITION_AUDIO:
                return c->has_video ? contradicts(c->kind, "video", f) : 0;

        default:
                return 0;
        }
}

static int check_condition(const Condition *c, WireCondition *ret, Fault *f) {
        const TensorRule image = {ST_F32, 4, "F32 [24, 1, H, W]", {VIDEO_CHANNELS, 1}};
        const TensorRule video = RULE_VIDEO, audio = RULE_AUDIO;
        uint32_t kind;
        int r;

        if (!c->kind)
                return request_missing("kind", "keyframe, image, video or audio", f);

        r = request_condition_kind(c->kind, &kind, f);
        if (r < 0)
                return r;

        r = check_keys(c, (WireConditionKind) kind, f);
        if (r < 0)
                return r;

        r = request_check_tensor("video", &c->video, c->has_video,
                kind == WIRE_CONDITION_IMAGE || kind == WIRE_CONDITION_VIDEO,
                kind == WIRE_CONDITION_IMAGE ? &image : &video, f);
        if (r < 0)
                return r;

        r = request_check_tensor("audio", &c->audio, c->has_audio, kind == WIRE_CONDITION_AUDIO, &audio, f);
        if (r < 0)
                return r;

        *ret = (WireCondition){.kind = kind, .frame = c->frame};
        if (c->has_video) {
                ret->video_offset = c->video.offset;
                ret->frames = c->video.shape[1];
                ret->height = c->video.shape[2];
                ret->width = c->video.shape[3];
        }
        if (c->has_audio) {
                ret->audio_offset = c->audio.offset;
                ret->audio = c->audio.shape[2];
        }
        return 0;
}

static int read_condition(sd_bus_message *m, void *ret, Fault *f) {
        Condition c = {};
        const BusKey keys[] = {
                {"kind", "s", &c.kind},
                {"frame", "u", &c.frame, &c.has_frame},
                {"video", "(tsat)", &c.video, &c.has_video},
                {"audio", "(tsat)", &c.audio, &c.has_audio},
        };
        int r;

        r = bus_read_dictionary(m, keys, ELEMENTSOF(keys), f);
        return r < 0 ? r : check_condition(&c, ret, f);
}

int request_read_wire_conditions(sd_bus_message *m, const char *key, WireJobOpen *q, RequestReadEntry read, Fault *f) {
        const RequestEntries e = {
                .key = key,
                .limit = "that a request may have",
                .entries = q->conditions,
                .size = sizeof(q->conditions[0]),
                .max = WIRE_CONDITIONS_MAX,
                .n = &q->n_conditions,
                .read = read,
        };

        return request_read_entries(m, &e, f);
}

int request_read_conditions(sd_bus_message *m, const BusKey *k, Fault *f) {
        return request_read_wire_conditions(m, "conditions", k->value, read_condition, f);
}

int request_check_conditions(const WireJobOpen *q, Fault *f) {
        for (uint32_t i = 0; i < q->n_conditions; i++) {
                const WireCondition *c = &q->conditions[i];

                if (c->kind != WIRE_CONDITION_KEYFRAME || c->frames == 0)
                        continue;

                if (c->height != q->video.shape[2] || c->width != q->video.shape[3])
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "\"conditions\"[%" PRIu32 "]: the keyframe's \"video\" has height %" PRIu64
                                " and width %" PRIu64 ", expected those of the film, %" PRIu64
                                " and %" PRIu64 ".",
                                i, c->height, c->width, q->video.shape[2], q->video.shape[3]);
        }

        return 0;
}
