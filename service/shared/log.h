/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Logging for programs. Libraries of ours log nothing above LOG_DEBUG; whoever handles an error logs it once.
 * To the journal by structured fields when stderr is the journal ($JOURNAL_STREAM matches), else to stderr as
 * "program: text". Never log user data (prompts, file names a client chose). Thread-safe. */

#include <errno.h>
#include <syslog.h>

void log_open(const char *program);
void log_set_max_level(int level);                     /* LOG_ERR ... LOG_DEBUG; default LOG_INFO */
void log_set_level_from_environment(void);             /* LATENT_LOG_LEVEL; what is no level is ignored */
int log_level_from_string(const char *s, int *ret_level); /* "debug", "info", "notice", "warning", "error" or 0..7; -EINVAL */

/* Logs "text: strerror(-error)" if error < 0, and returns error, so that `return log_error(r, "...")` is one line. */
int log_full(int level, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define log_debug(...) ((void) log_full(LOG_DEBUG, 0, __VA_ARGS__))
#define log_info(...) ((void) log_full(LOG_INFO, 0, __VA_ARGS__))
#define log_notice(...) ((void) log_full(LOG_NOTICE, 0, __VA_ARGS__))
#define log_warning(...) ((void) log_full(LOG_WARNING, 0, __VA_ARGS__))
#define log_warning_errno(error, ...) log_full(LOG_WARNING, (error), __VA_ARGS__)
#define log_error(error, ...) log_full(LOG_ERR, (error), __VA_ARGS__)
