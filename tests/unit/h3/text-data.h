/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The conditioner's reference data: of the folder in LATENT_TEST_DATA if it has it, else what derive-text.py
 * unpacked. Everything fails the test that asks for something that is not there. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "service/h3/tokenizer.h"
#include "tests/unit/h3/golden.h"

bool text_exists(const char *name);
/* "text/cases.json"; freed by the caller, with a NUL behind it. */
char *text_read(const char *name, uint64_t *ret_size);
json_t *text_json(const char *name);   /* freed by the caller */
Golden *text_golden(const char *name); /* a safetensors file */

/* A folder's tokenizer files, to be opened or changed first. */
#define TEXT_FILES_MAX 5
typedef struct TextFiles {
        H3File files[TEXT_FILES_MAX];
        char *bytes[TEXT_FILES_MAX]; /* owned */
        size_t n;
} TextFiles;

/* Published vocabulary, merges and configuration. */
TextFiles *text_files_published(void);
/* Those of the demonstration model in the source tree (LATENT_SOURCE_DIR, else the test is skipped). */
TextFiles *text_files_demo(void);
TextFiles *text_files_free(TextFiles *t);
void text_files_freep(TextFiles **t);
/* NULL content: the file goes away; else content is owned from here on. */
void text_files_set(TextFiles *t, const char *name, char *content);
const char *text_files_get(const TextFiles *t, const char *name);

H3Tokenizer *text_open(const TextFiles *t); /* fails the test with the fault's text */
