/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Writes JSON to a stream as it comes, one value per line. Keys are for members of an object, NULL in lists
 * and at the top. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/latent.h"

#define JSON_DEPTH_MAX 80u

typedef struct JsonWriter {
        FILE *file;
        unsigned depth;
        bool comma[JSON_DEPTH_MAX];
        char end[JSON_DEPTH_MAX];
} JsonWriter;

/* Closed by json_writer_end(). Deeper than JSON_DEPTH_MAX is the caller's bug. */
void json_writer_object(JsonWriter *w, const char *key);
void json_writer_list(JsonWriter *w, const char *key);
void json_writer_end(JsonWriter *w);

/* What is not UTF-8 becomes U+FFFD; what is not ASCII is escaped, so that any terminal and any reader can
 * take it. */
void json_writer_string(JsonWriter *w, const char *key, const char *s);
void json_writer_uint(JsonWriter *w, const char *key, uint64_t v);
void json_writer_double(JsonWriter *w, const char *key, double v); /* null for what JSON cannot say */
void json_writer_value(JsonWriter *w, const char *key, const latent_value *v);

/* Ends whatever is open and the line. */
void json_writer_line(JsonWriter *w);
