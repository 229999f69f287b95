/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>

#include "service/shared/cleanup.h"

/* Written by log_open() at the start of a program, before it has threads. */
static char log_program[64];
static bool log_stderr_is_journal;
static bool log_journal_socket; /* sd_journal_send() drops messages in silence where there is no socket */

static atomic_int log_max_level = LOG_INFO;

/* systemd sets $JOURNAL_STREAM to device:inode of the stream; a child whose stderr was redirected inherits
 * the variable, hence the comparison. */
static bool stderr_is_journal(void) {
        const char *e = getenv("JOURNAL_STREAM");
        unsigned long long device, inode;
        struct stat st;
        int n = 0;

        if (!e || sscanf(e, "%llu:%llu%n", &device, &inode, &n) != 2 || e[n] != '\0')
                return false;

        return fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

void log_open(const char *program) {
        (void) snprintf(log_program, sizeof(log_program), "%s", program);
        log_stderr_is_journal = stderr_is_journal();
        log_journal_socket = log_stderr_is_journal && access("/run/systemd/journal/socket", W_OK) == 0;
}

void log_set_max_level(int level) {
        atomic_store_explicit(&log_max_level, level, memory_order_relaxed);
}

int log_level_from_string(const char *s, int *ret_level) {
        static const struct {
                const char *name;
                int level;
        } names[] = {
                {"error", LOG_ERR},
                {"warning", LOG_WARNING},
                {"notice", LOG_NOTICE},
                {"info", LOG_INFO},
                {"debug", LOG_DEBUG},
        };

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                if (strcmp(s, names[i].name) == 0) {
                        *ret_level = names[i].level;
                        return 0;
                }

        if (s[0] >= '0' && s[0] <= '7' && s[1] == '\0') {
                *ret_level = s[0] - '0';
                return 0;
        }

        return -EINVAL;
}

void log_set_level_from_environment(void) {
        const char *name = getenv("LATENT_LOG_LEVEL");
        int level;

        if (name && log_level_from_string(name, &level) >= 0)
                log_set_max_level(level);
}

static const char *log_name(void) {
        return log_program[0] != '\0' ? log_program : program_invocation_short_name;
}

/* One write per line, so that lines of several threads and processes do not mix. */
static void write_line(int level, const char *text) {
        char line[2304];
        size_t n, done = 0;
        int r;

        /* The journal reads the "<3>" in front of a line as its priority. */
        if (log_stderr_is_journal)
                r = snprintf(line, sizeof(line), "<%d>%s\n", level, text);
        else
                r = snprintf(line, sizeof(line), "%s: %s\n", log_name(), text);
        if (r < 0)
                return;

        n = (size_t) r < sizeof(line) ? (size_t) r : sizeof(line) - 1;
        while (done < n) {
                ssize_t k = write(STDERR_FILENO, line + done, n - done);

                if (k < 0 && errno == EINTR)
                        continue;
                if (k <= 0)
                        return;
                done += (size_t) k;
        }
}

static int send_journal(int level, int error, const char *text) {
        if (error < 0)
                return sd_journal_send("MESSAGE=%s", text, "PRIORITY=%i", level, "SYSLOG_IDENTIFIER=%s",
                        log_name(), "ERRNO=%i", -error, NULL);

        return sd_journal_send(
                "MESSAGE=%s", text, "PRIORITY=%i", level, "SYSLOG_IDENTIFIER=%s", log_name(), NULL);
}

int log_full(int level, int error, const char *format, ...) {
        int saved = errno;
        char text[2048];
        va_list ap;
        int n;

        if (level > atomic_load_explicit(&log_max_level, memory_order_relaxed))
                return error;

        va_start(ap, format);
        n = vsnprintf(text, sizeof(text), format, ap);
        va_end(ap);
        if (n < 0)
                (void) snprintf(text, sizeof(text), "(a log text that cannot be formatted)");

        if (error < 0) {
                size_t used = strlen(text);
                char buf[128];

                (void) snprintf(
                        text + used, sizeof(text) - used, ": %s", strerror_r(-error, buf, sizeof(buf)));
        }

        /* A line break in a text must not look like a second message. */
        for (char *p = text; *p != '\0'; p++)
                if ((unsigned char) *p < 0x20 || *p == 0x7f)
                        *p = ' ';

        if (!log_journal_socket || send_journal(level, error, text) < 0)
                write_line(level, text);

        errno = saved;
        return error;
}
