/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A directory for a test's files, emptied at the end. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* CMocka set-up and tear-down: *state is the directory's path; the working directory is in it. */
int temporary_setup(void **state);
int temporary_teardown(void **state);

/* Writes a file, making directories above it. */
void temporary_write(const char *name, const void *bytes, size_t n);

/* A safetensors file with this header and n zero bytes of data. */
void temporary_write_tensors(const char *name, const char *header, size_t n);
