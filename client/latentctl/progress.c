/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "client/latentctl/report.h"

#define COLUMNS_DEFAULT 80u
#define COLUMNS_MAX 160u
#define BAR_MIN 8u
#define ETA_WIDTH 13u /* kept free so that the bar does not jump */

void progress_init(Progress *p, const Ctl *c, const char *label) {
        *p = (Progress){.label = label, .bar = isatty(STDERR_FILENO) == 1};
        p->json = c->json && (!p->bar || isatty(STDOUT_FILENO) == 0);
}

static size_t terminal_columns(void) {
        struct winsize w;

        if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) < 0 || w.ws_col == 0)
                return COLUMNS_DEFAULT;
        return w.ws_col < COLUMNS_MAX ? w.ws_col : COLUMNS_MAX;
}

/* "step 3/8  block 12/50", "read 120/4000 MiB", "waiting". */
static void format_where(const latent_progress *n, char *buf, size_t size) {
        bool is_load = strcmp(n->phase, "read") == 0 || strcmp(n->phase, "check") == 0;

        if (n->state == LATENT_JOB_CANCELLING)
                (void) snprintf(buf, size, "cancelling");
        else if (strcmp(n->phase, "restart") == 0)
                (void) snprintf(buf, size, "waiting for the service");
        else if (strcmp(n->phase, "crash-wait") == 0)
                (void) snprintf(buf, size, "waiting after crashes");
        else if (n->state == LATENT_JOB_QUEUED || strcmp(n->phase, "queue") == 0)
                (void) snprintf(buf, size, "waiting");
        else if (is_load && n->blocks > 0)
                (void) snprintf(buf, size, "%s %u/%u MiB", n->phase, n->block, n->blocks);
        else if (strcmp(n->phase, "write") == 0)
                (void) snprintf(buf, size, "frame %u/%u", n->step, n->steps);
        else if (is_load)
                (void) snprintf(buf, size, "%s", n->phase);
        else if (n->steps > 0)
                (void) snprintf(buf, size, "step %u/%u  block %u/%u",
                        n->step < n->steps ? n->step + 1 : n->steps, n->steps, n->block, n->blocks);
        else
                buf[0] = '\0';
}

void progress_format(const Progress *p, const latent_progress *n, size_t columns, char *buf, size_t size) {
        char where[64], eta[FORMAT_MAX], time[FORMAT_MAX + 8] = "", bar[COLUMNS_MAX];
        const char *label = p->label;
        size_t room, width, full;

        format_where(n, where, sizeof(where));
        if (strcmp(label, PROGRESS_PHASES) == 0 && n->phase[0] != '\0' && strncmp(where, n->phase, strlen(n->phase)) != 0)
                label = n->phase;
        if (n->eta_usec > 0)
                (void) snprintf(time, sizeof(time), "  ETA %s", format_usec(n->eta_usec, eta));

        /* The bar takes what the words leave; a narrow terminal gets none, and then the words are cut. */
        room = strlen(label) + strlen(where) + ETA_WIDTH + 14;
        width = columns > room ? columns - room : 0;
        if (width > 40)
                width = 40;
        if (width < BAR_MIN) {
                (void) snprintf(buf, size < columns ? size : columns, "%s  %s  %3.0f%%%s", label, where,
                        n->fraction * 100, time);
                return;
        }

        full = (size_t) (n->fraction * (double) width);
        memset(bar, '#', full);
        memset(bar + full, '.', width - full);
        bar[width] = '\0';
        (void) snprintf(buf, size < columns ? size : columns, "%s  %s  [%s] %3.0f%%%s", label, where, bar,
                n->fraction * 100, time);
}

static void write_json(const Progress *p, const latent_progress *n) {
        JsonWriter w = {.file = stdout};

        json_writer_object(&w, NULL);
        json_writer_object(&w, "progress");
        json_writer_string(&w, "job", p->label);
        json_writer_string(&w, "phase", n->phase);
        json_writer_uint(&w, "step", n->step);
        json_writer_uint(&w, "steps", n->steps);
        json_writer_uint(&w, "block", n->block);
        json_writer_uint(&w, "blocks", n->blocks);
        json_writer_double(&w, "fraction", n->fraction);
        json_writer_uint(&w, "eta_usec", n->eta_usec);
        json_writer_line(&w);
}

void progress_restart(bool was_there) {
        (void) fputs(was_there ? "latentctl: the service went away; waiting for it to come back\n"
                               : "latentctl: the service is not there; waiting for it\n",
                stderr);
        (void) fflush(stderr);
}

/* Once for each time. */
static void show_restart(Progress *p, bool restart) {
        if (restart && !p->restart) {
                progress_done(p);
                progress_restart(true);
        }
        p->restart = restart;
}

void progress_show(const latent_progress *news, void *userdata) {
        char line[COLUMNS_MAX + 1];
        Progress *p = userdata;

        /* The end has its own message. */
        if (news->state >= LATENT_JOB_DONE)
                return;

        show_restart(p, strcmp(news->phase, "restart") == 0);

        if (p->bar) {
                progress_format(p, news, terminal_columns(), line, sizeof(line));
                (void) fprintf(stderr, "\r%s\033[K", line);
                (void) fflush(stderr);
                p->drawn = true;
        }
        if (p->json)
                write_json(p, news);
}

void progress_done(Progress *p) {
        if (p->drawn) {
                (void) fputs("\r\033[K", stderr);
                (void) fflush(stderr);
        }
        p->drawn = false;
}
