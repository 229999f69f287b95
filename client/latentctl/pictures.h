/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Files that a film goes by: --image, --last-image, --reference, --reference-sound. */

#include "client/latentctl/arguments.h"

#define PICTURES_MAX 12u

typedef struct Pictures {
        const char *image, *last_image, *rule;
        StringList references; /* both options, told apart by the tag */
        latent_media items[PICTURES_MAX];
        char *names[PICTURES_MAX]; /* of the items, for messages: UTF-8, other bytes as \xNN */
        uint32_t n; /* opened */
} Pictures;

#define PICTURES_TAG_SOUND 1

/* For the table of a verb. p: its Pictures. */
#define PICTURES_OPTIONS(p)                                                                                 \
        {"image", OPTION_STRING, &(p).image, NULL, '\0', 0},                                                \
                {"last-image", OPTION_STRING, &(p).last_image, NULL, '\0', 0},                              \
                {"reference", OPTION_STRINGS, &(p).references, NULL, '\0', 0},                              \
                {"reference-sound", OPTION_STRINGS, &(p).references, NULL, '\0', PICTURES_TAG_SOUND},       \
        {                                                                                                   \
                "picture-rule", OPTION_STRING, &(p).rule, NULL, '\0', 0                                     \
        }

/* Opens them: p->items. CTL_ERROR_USAGE: keyframes and references, too many; NotFound, AccessDenied, IOError, InvalidFile. */
int pictures_open(Pictures *p, latent_error *e);
void pictures_done(Pictures *p);

/* --size WIDTHxHEIGHT; NULL: nothing is written. */
int parse_size(const char *size, uint32_t *ret_width, uint32_t *ret_height, latent_error *e);
