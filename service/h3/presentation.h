/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the conditioner reads (h3.md 3.2): the tokens of a prompt behind those of its pictures, videos and
 * sounds, whether each is text or vision, where each stands (M-RoPE), and which pictures belong at which
 * tokens. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "service/h3/picture.h"
#include "service/h3/tokenizer.h"
#include "service/shared/fault.h"

typedef enum H3ItemKind {
        H3_ITEM_IMAGE, /* a keyframe or a reference picture: "<Picture i>: " and its tokens */
        H3_ITEM_VIDEO, /* "<Video k>: " and two frames at a time; "<Audio j>: " first if it has sound */
        H3_ITEM_AUDIO, /* "<Audio j>: ": sound itself never reaches the conditioner */
} H3ItemKind;

typedef struct H3Item {
        H3ItemKind kind;
        uint64_t height, width; /* IMAGE, VIDEO: pixels, before the resize */
        uint64_t frames;        /* VIDEO: at 24 a second */
        bool sound;             /* VIDEO: has a soundtrack */
} H3Item;

#define H3_ITEMS_MAX 30
#define H3_ITEM_FRAMES_MAX UINT64_C(86400) /* an hour */
#define H3_PRESENTATION_TOKENS_MAX (UINT64_C(1) << 20)

/* Ids of the tokens that hold no text. They differ between vocabularies: see h3_special_ids(). */
typedef struct H3SpecialIds {
        int32_t pad;                      /* "<|endoftext|>" */
        int32_t vision_start, vision_end; /* "<|vision_start|>", "<|vision_end|>" */
        int32_t image_pad, video_pad;     /* "<|image_pad|>", "<|video_pad|>" */
} H3SpecialIds;

/* Looks them up by name. -EINVAL (InvalidModel) names one that the tokenizer lacks. */
int h3_special_ids(const H3Tokenizer *t, H3SpecialIds *ret, Fault *f);

typedef struct H3PresentationInput {
        const H3Item *items; /* keyframes first to last, or references in the order of the request */
        uint32_t n_items;
        const char *prompt;
        size_t prompt_size;
        const H3PictureRules *rules;
        /* ComfyUI's presentation: images, then videos, then sounds, each in the order of the request; a
         * video that is too short for two samples shows its one sample twice instead of being refused. */
        bool comfy;
} H3PresentationInput;

/* Pictures that the vision tower sees as one: a picture, or two frames of a video. Attention stays inside.
 */
typedef struct H3VisionBlock {
        uint32_t item;      /* of the input's items */
        uint64_t frames[2]; /* VIDEO: which of the item's frames; equal where an odd sample is shown twice */
        H3PictureSize size; /* pixels after the resize; height / 16 * width / 16 patches */
        uint64_t merged_height, merged_width; /* tokens: half the patches, both ways */
        uint64_t first_token; /* the first of merged_height * merged_width placeholders; the start is before
                                 it, the end behind them */
} H3VisionBlock;

typedef struct H3Presentation {
        uint64_t n;            /* tokens, L >= 1 */
        int32_t *ids;          /* [n] */
        uint8_t *tags;         /* [n] 1: text, 0: vision, start and end included */
        int32_t *positions;    /* [3, n]: t, h, w */
        H3VisionBlock *blocks; /* in the order of the tokens */
        size_t n_blocks;
        bool padded; /* nothing was there to say: ids is one pad token, as ComfyUI has it (the published code
                        has no token and fails) */
} H3Presentation;

/* -EINVAL (InvalidArgument): an item's size, a video with under 13 frames, too many items or tokens, the
 * prompt is not UTF-8; (InvalidModel): a special token is missing. -ENOMEM. */
int h3_presentation_new(const H3Tokenizer *t, const H3PresentationInput *in, H3Presentation **ret, Fault *f);
H3Presentation *h3_presentation_free(H3Presentation *p);

/* Positions of n tokens with blocks at their places: text counts one by one, a block's rows and columns
 * count from its first placeholder on, and the token behind them counts on by the longer edge. ret: [3, n].
 * -EINVAL if blocks overlap, are out of order or out of range. */
int h3_presentation_positions(const H3VisionBlock *blocks, size_t n_blocks, uint64_t n, int32_t *ret);
