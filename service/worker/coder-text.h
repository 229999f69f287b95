/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What coder-text.c (jobs) and text-request.c (what they are asked) share; nobody else includes it. */

#include "service/h3/presentation.h"
#include "service/worker/coder.h"

typedef struct TextPicture {
        const uint8_t *first,
                *second; /* u8 [height, width, 3], into the key; second: as h3_picture_patches() */
        uint64_t height, width;
} TextPicture;

typedef struct TextWork {
        int32_t *ids; /* TOKENIZE: [n] */
        uint64_t n;   /* tokens */

        /* ENCODE */
        const H3PictureRules *rules;
        H3Presentation *presentation;
        TextPicture *pictures; /* [presentation->n_blocks] */
        uint8_t *key;          /* all that the result depends on, the pictures included (encode-cache.h) */
        uint64_t key_size;
} TextWork;

/* The job's text, copied: *ret is not terminated, and freed by the caller. */
int text_take(const Job *j, const WireJobOpen *w, char **ret, size_t *ret_size, Fault *f);

/* From text and conditions to presentation, pictures and key. */
int text_request_new(const Job *j, const WireJobOpen *w, TextWork *x, Fault *f);
