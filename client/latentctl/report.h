/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What latentctl says: errors, JSON, tables, numbers for people. */

#include "client/latentctl/ctl.h"
#include "client/latentctl/json-writer.h"

/* Fill e and return the code. Texts are cleaned as fault_set() does. */
int ctl_error(latent_error *e, int code, const char *name, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
int ctl_error_fault(latent_error *e, int code, const Fault *f);

/* Says it on stderr, and with --json on stdout as {"error": {...}}; returns the exit status. verb may be
 * NULL. */
int report_error(const Ctl *c, const Verb *verb, const latent_error *e);

/* The exit status that goes with an error's name. */
int status_of(const char *error_name);

void report_help(const Verb *verb);

#define FORMAT_MAX 32
/* "1.5 GiB", "0 B"; "1m05s", "0.12 s". Return buf. */
/* value, or two quotes where there is nothing to see. */
const char *format_value(const char *value);
const char *format_bytes(uint64_t bytes, char buf[static FORMAT_MAX]);
const char *format_usec(uint64_t usec, char buf[static FORMAT_MAX]);

/* Properties, with a default where absent. */
uint64_t get_uint(const latent_value *v, const char *key);
const char *get_string(const latent_value *v, const char *key);

/* The text at that place of a list, "" where there is none. */
const char *string_at(const latent_value *list, size_t index);

/* The last part of an object path, unescaped: "12" of /org/latentd/Latent1/job/_312. Returns buf. */
const char *format_id(const char *path, char buf[static FORMAT_MAX]);

/* Columns as wide as they need to be. The first row is the heading. */
typedef struct Table {
        size_t n_columns, n_cells, n_allocated;
        char **cells;
} Table;

void table_done(Table *t);
/* Adds a row of n_columns cells. */
void table_add(Table *t, const char *const *cells);
void table_print(const Table *t);
