/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/report.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int ctl_error_fault(latent_error *e, int code, const Fault *f) {
        if (e) {
                *e = (latent_error){.code = code};
                (void) snprintf(
                        e->name, sizeof(e->name), "%s", f->name[0] != '\0' ? f->name : FAULT_INTERNAL);
                (void) snprintf(
                        e->text, sizeof(e->text), "%s", f->text[0] != '\0' ? f->text : strerror(-code));
        }

        return code;
}

int ctl_error(latent_error *e, int code, const char *name, const char *format, ...) {
        char text[sizeof(((Fault *) NULL)->text)];
        Fault f = {};
        va_list ap;

        va_start(ap, format);
        (void) vsnprintf(text, sizeof(text), format, ap);
        va_end(ap);

        (void) fault_set(&f, code, name, "%s", text);
        return ctl_error_fault(e, code, &f);
}

int status_of(const char *name) {
        static const struct {
                const char *name;
                int status;
        } table[] = {
                {CTL_ERROR_USAGE, STATUS_USAGE},
                {CTL_ERROR_INTERRUPTED, STATUS_INTERRUPTED},
                {LATENT_ERROR_NO_SERVICE, STATUS_UNREACHABLE},
                {LATENT_ERROR_INVALID_ARGUMENT, STATUS_REFUSED},
                {LATENT_ERROR_INVALID_FILE, STATUS_REFUSED},
                {LATENT_ERROR_INVALID_MODEL, STATUS_REFUSED},
                {LATENT_ERROR_INVALID_TENSOR, STATUS_REFUSED},
                {LATENT_ERROR_NOT_FOUND, STATUS_REFUSED},
                {LATENT_ERROR_ACCESS_DENIED, STATUS_REFUSED},
                {LATENT_ERROR_NOT_SUPPORTED, STATUS_REFUSED},
                {LATENT_ERROR_DOES_NOT_FIT, STATUS_REFUSED},
                {LATENT_ERROR_LIMIT_EXCEEDED, STATUS_REFUSED},
                {LATENT_ERROR_BUSY, STATUS_REFUSED},
        };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].name, name) == 0)
                        return table[i].status;

        return STATUS_FAILED;
}

int report_error(const Ctl *c, const Verb *verb, const latent_error *e) {
        int status = status_of(e->name);

        if (c->json) {
                JsonWriter w = {.file = stdout};

                json_writer_object(&w, NULL);
                json_writer_object(&w, "error");
                json_writer_string(&w, "name", e->name);
                json_writer_string(&w, "text", e->text);
                json_writer_line(&w);
        }

        if (status == STATUS_USAGE && verb)
                (void) fprintf(stderr,
                        "latentctl: %s\nusage: latentctl %s %s\nlatentctl %s --help says more.\n", e->text,
                        verb->name, verb->arguments, verb->name);
        else if (status == STATUS_USAGE)
                (void) fprintf(stderr, "latentctl: %s\nlatentctl --help lists the verbs.\n", e->text);
        else if (status == STATUS_INTERRUPTED)
                (void) fprintf(stderr, "latentctl: %s\n", e->text);
        else
                (void) fprintf(stderr, "latentctl: %s: %s\n", e->name, e->text);
        return status;
}

void report_help(const Verb *verb) {
        (void) printf("usage: latentctl %s %s\n\n%s\n%s%s\nOptions of all verbs: --json, --system, --user, "
                      "--bus-address=ADDRESS, --socket=PATH, --help. See latentctl(1).\n",
                verb->name, verb->arguments, verb->summary, verb->options[0] != '\0' ? "\n" : "",
                verb->options);
}

const char *format_value(const char *value) {
        return value[0] != '\0' ? value : "\"\"";
}

const char *format_bytes(uint64_t bytes, char buf[static FORMAT_MAX]) {
        static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
        double v = (double) bytes;
        size_t i = 0;

        while (v >= 1024 && i + 1 < ELEMENTSOF(units)) {
                v /= 1024;
                i++;
        }
        (void) snprintf(buf, FORMAT_MAX, i == 0 ? "%.0f %s" : "%.1f %s", v, units[i]);
        return buf;
}

const char *format_usec(uint64_t usec, char buf[static FORMAT_MAX]) {
        uint64_t s = usec / 1000000;

        if (s >= 3600)
                (void) snprintf(buf, FORMAT_MAX, "%" PRIu64 "h%02" PRIu64 "m", s / 3600, s / 60 % 60);
        else if (s >= 60)
                (void) snprintf(buf, FORMAT_MAX, "%" PRIu64 "m%02" PRIu64 "s", s / 60, s % 60);
        else
                (void) snprintf(buf, FORMAT_MAX, s >= 10 ? "%.0f s" : "%.2f s", (double) usec / 1e6);
        return buf;
}

uint64_t get_uint(const latent_value *v, const char *key) {
        uint64_t u = 0;

        (void) latent_value_as_uint(latent_value_get(v, key), &u);
        return u;
}

const char *get_string(const latent_value *v, const char *key) {
        const char *s = latent_value_as_string(latent_value_get(v, key));

        return s ? s : "";
}

const char *string_at(const latent_value *list, size_t index) {
        const char *s = latent_value_as_string(latent_value_at(list, index));

        return s ? s : "";
}

const char *format_id(const char *path, char buf[static FORMAT_MAX]) {
        const char *slash = strrchr(path, '/'), *p = slash ? slash + 1 : path;

        /* The bus escapes a leading digit: _3 and the digit. */
        if (p[0] == '_' && p[1] == '3' && p[2] >= '0' && p[2] <= '9')
                p += 2;
        (void) snprintf(buf, FORMAT_MAX, "%s", p);
        return buf;
}

void table_done(Table *t) {
        for (size_t i = 0; i < t->n_cells; i++)
                free(t->cells[i]);
        free(t->cells);
}

static void table_add_cell(Table *t, const char *s) {
        if (t->n_cells == t->n_allocated) {
                t->n_allocated = t->n_allocated > 0 ? 2 * t->n_allocated : 64;
                t->cells = reallocarray(t->cells, t->n_allocated, sizeof(*t->cells));
        }
        if (t->cells)
                t->cells[t->n_cells] = strdup(s);
        if (!t->cells || !t->cells[t->n_cells]) {
                (void) fprintf(stderr, "latentctl: out of memory\n");
                exit(STATUS_FAILED);
        }
        t->n_cells++;
}

void table_add(Table *t, const char *const *cells) {
        for (size_t i = 0; i < t->n_columns; i++)
                table_add_cell(t, cells[i]);
}

/* Characters, not bytes. */
static size_t width_of(const char *s) {
        size_t n = 0;

        for (; *s != '\0'; s++)
                n += ((unsigned char) *s & 0xc0) != 0x80;
        return n;
}

void table_print(const Table *t) {
        for (size_t i = 0; i < t->n_cells; i++) {
                size_t column = i % t->n_columns, width = 0;

                for (size_t k = column; k < t->n_cells; k += t->n_columns)
                        if (width_of(t->cells[k]) > width)
                                width = width_of(t->cells[k]);

                if (column + 1 == t->n_columns)
                        (void) printf("%s\n", t->cells[i]);
                else
                        (void) printf("%s%*s", t->cells[i], (int) (width - width_of(t->cells[i]) + 2), "");
        }
}
