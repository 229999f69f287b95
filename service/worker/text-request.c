/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/coder-text.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"

_Static_assert(WIRE_CONDITIONS_MAX <= H3_ITEMS_MAX, "each condition is an item");

/* Nothing in these has padding: they are compared as bytes. */
typedef struct KeyHead {
        uint32_t compute, output_type, picture_rule, reserved;
        uint64_t n, n_pictures;
} KeyHead;

typedef struct KeyPicture {
        uint64_t height, width, to_height, to_width, first_token, n_frames, is_video;
} KeyPicture;

int text_take(const Job *j, const WireJobOpen *w, char **ret, size_t *ret_size, Fault *f) {
        const TensorRule rule = {
                .name = "text", .type = ST_U8, .n_dims = 1, .elements_max = WIRE_TEXT_BYTES_MAX};

        if (tensor_is_absent(&w->text)) {
                *ret_size = 0;
                *ret = calloc(1, 1);
                return *ret ? 0 : -ENOMEM;
        }
        *ret_size = (size_t) w->text.size;
        return tensor_copy(&w->text, &rule, &j->arenas->input, (void **) ret, f);
}

/* All of a picture's or video's bytes must lie in the arena, also those that are not shown. */
static int check_place(const Job *j, uint32_t i, const WireCondition *k, Fault *f) {
        uint64_t size, end;

        if (__builtin_mul_overflow(k->height, k->width, &size) ||
                __builtin_mul_overflow(size, UINT64_C(3), &size) ||
                __builtin_mul_overflow(size, k->frames, &size) ||
                __builtin_add_overflow(k->video_offset, size, &end) || end > j->arenas->input.size)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Picture %" PRIu32 " lies outside its arena: U8 [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                        ", 3] at offset %" PRIu64 ", the arena has %" PRIu64 " bytes.",
                        i, k->frames, k->height, k->width, k->video_offset, j->arenas->input.size);
        return 0;
}

static int take_item(const Job *j, uint32_t i, const WireCondition *k, H3Item *ret, Fault *f) {
        static const H3ItemKind kinds[] = {
                [WIRE_CONDITION_KEYFRAME] = H3_ITEM_IMAGE,
                [WIRE_CONDITION_IMAGE] = H3_ITEM_IMAGE,
                [WIRE_CONDITION_VIDEO] = H3_ITEM_VIDEO,
                [WIRE_CONDITION_AUDIO] = H3_ITEM_AUDIO,
        };
        bool ok;

        if (k->kind >= ELEMENTSOF(kinds))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Picture %" PRIu32 " is of the unknown kind %" PRIu32
                        "; expected keyframe, image, video or audio.",
                        i, k->kind);
        ok = kinds[k->kind] == H3_ITEM_IMAGE   ? k->frames == 1 && k->audio == 0
             : kinds[k->kind] == H3_ITEM_VIDEO ? k->frames >= 1 && k->audio <= 1
                                               : k->frames == 0 && k->audio == 1;
        if (!ok)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Picture %" PRIu32 " has %" PRIu64 " frames and %" PRIu64
                        " sounds; expected one frame of a picture, frames and at most one sound of a video, "
                        "one sound of a sound.",
                        i, k->frames, k->audio);

        *ret = (H3Item){.kind = kinds[k->kind]};
        if (ret->kind == H3_ITEM_AUDIO)
                return 0;
        ret->height = k->height;
        ret->width = k->width;
        ret->frames = ret->kind == H3_ITEM_VIDEO ? k->frames : 0;
        ret->sound = k->audio > 0;
        return check_place(j, i, k, f);
}

static int take_items(const Job *j, const WireJobOpen *w, H3Item *ret, Fault *f) {
        uint32_t n_keyframes = 0;
        int r;

        if (w->n_conditions > WIRE_CONDITIONS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The request has %" PRIu32 " pictures; expected 0 to %d.", w->n_conditions,
                        WIRE_CONDITIONS_MAX);
        for (uint32_t i = 0; i < w->n_conditions; i++) {
                r = take_item(j, i, w->conditions + i, ret + i, f);
                if (r < 0)
                        return r;
                n_keyframes += w->conditions[i].kind == WIRE_CONDITION_KEYFRAME;
        }
        if (n_keyframes > 0 && n_keyframes < w->n_conditions)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The request has %" PRIu32 " keyframes and %" PRIu32
                        " references: a film has either of them.",
                        n_keyframes, w->n_conditions - n_keyframes);
        return 0;
}

static uint64_t n_frames(const H3Item *item, const H3VisionBlock *b) {
        return item->kind == H3_ITEM_VIDEO && b->frames[0] != b->frames[1] ? 2 : 1;
}

static int count_key(const H3Presentation *p, const H3Item *items, uint64_t *ret) {
        uint64_t size = sizeof(KeyHead) + p->n * (sizeof(int32_t) * 4 + 1);

        for (size_t i = 0; i < p->n_blocks; i++) {
                const H3Item *item = items + p->blocks[i].item;
                uint64_t frame = item->height * item->width * 3; /* lies in the arena: no overflow */

                if (__builtin_add_overflow(
                            size, sizeof(KeyPicture) + n_frames(item, p->blocks + i) * frame, &size))
                        return -ENOMEM;
        }
        *ret = size;
        return 0;
}

static uint8_t *put(uint8_t *at, const void *bytes, uint64_t size) {
        memcpy(at, bytes, (size_t) size);
        return at + size;
}

/* A block's frames, out of the arena, once. */
static uint8_t *put_picture(const Job *j, const WireCondition *k, const H3Item *item, const H3VisionBlock *b,
        uint8_t *at, TextPicture *ret) {
        const uint8_t *source = (const uint8_t *) j->arenas->input.map + k->video_offset;
        uint64_t frame = item->height * item->width * 3, n = n_frames(item, b);
        bool video = item->kind == H3_ITEM_VIDEO;
        const KeyPicture head = {
                item->height, item->width, b->size.height, b->size.width, b->first_token, n, video};

        at = put(at, &head, sizeof(head));
        *ret = (TextPicture){.first = at, .height = item->height, .width = item->width};
        at = put(at, source + (video ? b->frames[0] : 0) * frame, frame);
        if (!video)
                return at;
        ret->second = n > 1 ? at : ret->first;
        return n > 1 ? put(at, source + b->frames[1] * frame, frame) : at;
}

static int make_key(const Job *j, const WireJobOpen *w, const H3Item *items, TextWork *x) {
        const H3Presentation *p = x->presentation;
        const KeyHead head = {
                .compute = j->compute,
                .output_type = w->output_type,
                .picture_rule = w->picture_rule,
                .n = p->n,
                .n_pictures = p->n_blocks,
        };
        uint8_t *at;
        int r;

        r = count_key(p, items, &x->key_size);
        if (r < 0)
                return r;
        x->key = malloc(x->key_size);
        x->pictures = calloc(p->n_blocks + 1, sizeof(*x->pictures));
        if (!x->key || !x->pictures)
                return -ENOMEM;

        at = put(x->key, &head, sizeof(head));
        at = put(at, p->ids, p->n * sizeof(*p->ids));
        at = put(at, p->positions, 3 * p->n * sizeof(*p->positions));
        at = put(at, p->tags, p->n);
        for (size_t i = 0; i < p->n_blocks; i++) {
                const H3VisionBlock *b = p->blocks + i;

                at = put_picture(j, w->conditions + b->item, items + b->item, b, at, x->pictures + i);
        }
        return 0;
}

int text_request_new(const Job *j, const WireJobOpen *w, TextWork *x, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        H3Item items[WIRE_CONDITIONS_MAX];
        H3PresentationInput in = {.items = items, .n_items = w->n_conditions};
        int r;

        if (w->picture_rule >= _WIRE_PICTURE_RULE_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown picture rule %" PRIu32 ".", w->picture_rule);
        in.comfy = w->picture_rule == WIRE_PICTURE_COMFY;
        in.rules = x->rules = in.comfy ? &h3_picture_comfy : &j->model->picture_rules;

        r = take_items(j, w, items, f);
        if (r >= 0)
                r = text_take(j, w, &text, &in.prompt_size, f);
        if (r < 0)
                return r;
        in.prompt = text;
        r = h3_presentation_new(j->model->tokenizer, &in, &x->presentation, f);
        if (r < 0)
                return r;
        x->n = x->presentation->n;
        return make_key(j, w, items, x);
}
