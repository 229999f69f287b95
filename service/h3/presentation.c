/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/presentation.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* The conditioner sees two of a video's 24 frames a second, in pairs. */
#define SAMPLE_EVERY 12u
#define SAMPLES_MIN 2u

#define TAG_VISION 0
#define TAG_TEXT 1

DEFINE_CLEANUP(H3Presentation *, h3_presentation_free)

H3Presentation *h3_presentation_free(H3Presentation *p) {
        if (!p)
                return NULL;
        free(p->ids);
        free(p->tags);
        free(p->positions);
        free(p->blocks);
        free(p);
        return NULL;
}

int h3_special_ids(const H3Tokenizer *t, H3SpecialIds *ret, Fault *f) {
        H3SpecialIds ids;
        const struct {
                const char *content;
                int32_t *id;
        } tokens[] = {{"<|endoftext|>", &ids.pad}, {"<|vision_start|>", &ids.vision_start},
                {"<|vision_end|>", &ids.vision_end}, {"<|image_pad|>", &ids.image_pad},
                {"<|video_pad|>", &ids.video_pad}};

        for (size_t i = 0; i < ELEMENTSOF(tokens); i++)
                if (h3_tokenizer_added(t, tokens[i].content, tokens[i].id) < 0)
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "The tokenizer has no added token '%s'. Use the tokenizer of a Qwen3-VL "
                                "model, "
                                "with its tokenizer_config.json.",
                                tokens[i].content);
        *ret = ids;
        return 0;
}

/* A presentation being written. */
typedef struct Writer {
        const H3Tokenizer *t;
        const H3PresentationInput *in;
        H3SpecialIds special;
        H3Presentation *p;
        size_t tokens_cap, blocks_cap;
        uint32_t pictures, videos, sounds; /* so far */
        Fault *fault;
} Writer;

static int no_memory(const Writer *w) {
        return fault_set(w->fault, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for %llu tokens.",
                (unsigned long long) w->p->n);
}

/* Room for n more tokens. */
static int reserve(Writer *w, uint64_t n) {
        H3Presentation *p = w->p;
        size_t cap;
        int32_t *ids;
        uint8_t *tags;

        if (n > H3_PRESENTATION_TOKENS_MAX - p->n)
                return fault_set(w->fault, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Prompt and references have over %llu tokens; shorten them or shrink the pictures.",
                        (unsigned long long) H3_PRESENTATION_TOKENS_MAX);
        if (p->n + n <= w->tokens_cap)
                return 0;
        cap = (p->n + n) * 2 + 64;
        ids = realloc(p->ids, cap * sizeof(*ids));
        if (!ids)
                return no_memory(w);
        p->ids = ids;
        tags = realloc(p->tags, cap * sizeof(*tags));
        if (!tags)
                return no_memory(w);
        p->tags = tags;
        w->tokens_cap = cap;
        return 0;
}

static int add_repeated(Writer *w, int32_t id, uint8_t tag, uint64_t n) {
        int r = reserve(w, n);

        if (r < 0)
                return r;
        for (uint64_t i = 0; i < n; i++) {
                w->p->ids[w->p->n] = id;
                w->p->tags[w->p->n++] = tag;
        }
        return 0;
}

/* Each text is encoded by itself: no token goes across. */
static int add_text(Writer *w, const char *text, size_t size) {
        CLEANUP_FREE int32_t *ids = NULL;
        size_t n;
        int r;

        r = h3_tokenizer_encode(w->t, text, size, &ids, &n, w->fault);
        if (r < 0)
                return r;
        r = reserve(w, n);
        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                w->p->ids[w->p->n] = ids[i];
                w->p->tags[w->p->n++] = TAG_TEXT;
        }
        return 0;
}

static int add_label(Writer *w, const char *kind, uint32_t number) {
        char label[64];
        int n = snprintf(label, sizeof(label), "<%s %u>: ", kind, number);

        return add_text(w, label, (size_t) n);
}

static int add_block(Writer *w, H3VisionBlock block, int32_t pad) {
        H3Presentation *p = w->p;
        H3VisionBlock *blocks;
        size_t cap;
        int r;

        if (p->n_blocks == w->blocks_cap) {
                cap = w->blocks_cap * 2 + 8;
                blocks = realloc(p->blocks, cap * sizeof(*blocks));
                if (!blocks)
                        return no_memory(w);
                p->blocks = blocks;
                w->blocks_cap = cap;
        }
        block.merged_height = block.size.height / H3_PATCH_PIXELS;
        block.merged_width = block.size.width / H3_PATCH_PIXELS;
        r = add_repeated(w, w->special.vision_start, TAG_VISION, 1);
        if (r < 0)
                return r;
        block.first_token = p->n;
        r = add_repeated(w, pad, TAG_VISION, block.merged_height * block.merged_width);
        if (r < 0)
                return r;
        r = add_repeated(w, w->special.vision_end, TAG_VISION, 1);
        if (r < 0)
                return r;
        p->blocks[p->n_blocks++] = block;
        return 0;
}

static int add_image(Writer *w, uint32_t item) {
        const H3Item *k = &w->in->items[item];
        H3VisionBlock block = {.item = item};
        int r;

        r = h3_picture_size(w->in->rules, 0, k->height, k->width, &block.size, w->fault);
        if (r < 0)
                return r;
        r = add_label(w, "Picture", ++w->pictures);
        return r < 0 ? r : add_block(w, block, w->special.image_pad);
}

/* The mean time of two samples in seconds, one decimal, of ties the even one: quarters are .0, .2, .5, .8.
 */
static int add_timestamp(Writer *w, uint64_t first, uint64_t second) {
        uint64_t quarters = (first + second) / SAMPLE_EVERY, tenths = 5 * quarters / 2;
        char text[64];
        int n;

        if (quarters % 2 == 1 && tenths % 2 == 1)
                tenths++;
        n = snprintf(text, sizeof(text), "<%llu.%llu seconds>", (unsigned long long) (tenths / 10),
                (unsigned long long) (tenths % 10));
        return add_text(w, text, (size_t) n);
}

static int add_video(Writer *w, uint32_t item) {
        const H3Item *k = &w->in->items[item];
        uint64_t samples = (k->frames + SAMPLE_EVERY - 1) / SAMPLE_EVERY;
        H3VisionBlock block = {.item = item};
        int r;

        if (k->frames < 1 || k->frames > H3_ITEM_FRAMES_MAX || (samples < SAMPLES_MIN && !w->in->comfy))
                return fault_set(w->fault, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A reference video has %llu frames; it is read twice a second in pairs, so it must "
                        "have "
                        "%u to %llu at 24 a second.",
                        (unsigned long long) k->frames, SAMPLE_EVERY * (SAMPLES_MIN - 1) + 1,
                        (unsigned long long) H3_ITEM_FRAMES_MAX);
        r = h3_picture_size(w->in->rules, samples, k->height, k->width, &block.size, w->fault);
        if (r == 0 && k->sound)
                r = add_label(w, "Audio", ++w->sounds);
        if (r == 0)
                r = add_label(w, "Video", ++w->videos);
        for (uint64_t i = 0; r == 0 && i < samples; i += 2) {
                uint64_t last = i + 1 < samples ? i + 1 : i;

                block.frames[0] = i * SAMPLE_EVERY;
                block.frames[1] = last * SAMPLE_EVERY;
                r = add_timestamp(w, block.frames[0], block.frames[1]);
                if (r == 0)
                        r = add_block(w, block, w->special.video_pad);
        }
        return r;
}

static int add_item(Writer *w, uint32_t item) {
        switch (w->in->items[item].kind) {
        case H3_ITEM_IMAGE:
                return add_image(w, item);
        case H3_ITEM_VIDEO:
                return add_video(w, item);
        default:
                return add_label(w, "Audio", ++w->sounds);
        }
}

static int add_items(Writer *w) {
        static const H3ItemKind comfy_order[] = {H3_ITEM_IMAGE, H3_ITEM_VIDEO, H3_ITEM_AUDIO};
        int r = 0;

        for (uint32_t i = 0; r == 0 && !w->in->comfy && i < w->in->n_items; i++)
                r = add_item(w, i);
        for (size_t k = 0; w->in->comfy && k < ELEMENTSOF(comfy_order); k++)
                for (uint32_t i = 0; r == 0 && i < w->in->n_items; i++)
                        if (w->in->items[i].kind == comfy_order[k])
                                r = add_item(w, i);
        return r;
}

int h3_presentation_positions(const H3VisionBlock *blocks, size_t n_blocks, uint64_t n, int32_t *ret) {
        int32_t *t = ret, *h = ret + n, *v = ret + 2 * n, next = 0;
        uint64_t at = 0;

        if (n > INT32_MAX)
                return -EINVAL;
        for (size_t b = 0; b <= n_blocks; b++) {
                uint64_t begin = b < n_blocks ? blocks[b].first_token : n, rows, columns, count;

                if (begin < at || begin > n)
                        return -EINVAL;
                for (; at < begin; at++)
                        t[at] = h[at] = v[at] = next++;
                if (b == n_blocks)
                        break;
                rows = blocks[b].merged_height;
                columns = blocks[b].merged_width;
                if (rows < 1 || columns < 1 || __builtin_mul_overflow(rows, columns, &count) ||
                        count > n - at)
                        return -EINVAL;
                for (uint64_t i = 0; i < count; i++, at++) {
                        t[at] = next;
                        h[at] = next + (int32_t) (i / columns);
                        v[at] = next + (int32_t) (i % columns);
                }
                next += (int32_t) (rows > columns ? rows : columns);
        }
        return 0;
}

/* With nothing to say there is still one token, or the conditioner would have nothing to run on. */
static int finish(Writer *w) {
        H3Presentation *p = w->p;
        int r;

        if (p->n == 0) {
                r = add_repeated(w, w->special.pad, TAG_TEXT, 1);
                if (r < 0)
                        return r;
                p->padded = true;
        }
        p->positions = calloc(3 * p->n, sizeof(*p->positions));
        if (!p->positions)
                return no_memory(w);
        r = h3_presentation_positions(p->blocks, p->n_blocks, p->n, p->positions);
        return r < 0 ? fault_set(w->fault, r, FAULT_INTERNAL, "The vision blocks overlap.") : 0;
}

int h3_presentation_new(
        const H3Tokenizer *t, const H3PresentationInput *in, H3Presentation **ret, Fault *f) {
        CLEANUP(h3_presentation_freep) H3Presentation *p = NULL;
        Writer w = {.t = t, .in = in, .fault = f};
        int r;

        if (in->n_items > H3_ITEMS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%u pictures, videos and sounds; at most %u are presented.", in->n_items,
                        H3_ITEMS_MAX);
        for (uint32_t i = 0; i < in->n_items; i++)
                if ((unsigned) in->items[i].kind > H3_ITEM_AUDIO)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "Item %u is neither a picture nor a video nor a sound.", i);
        r = h3_special_ids(t, &w.special, f);
        if (r < 0)
                return r;
        p = calloc(1, sizeof(*p));
        if (!p)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for a presentation.");
        w.p = p;
        r = add_items(&w);
        if (r == 0)
                r = add_text(&w, in->prompt, in->prompt_size);
        if (r == 0)
                r = finish(&w);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(p);
        return 0;
}
