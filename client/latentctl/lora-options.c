/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/lora-options.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/report.h"
#include "client/latentctl/run.h"
#include "service/shared/wire.h"

/* So many refused modules are named to people. */
#define SHOWN_MAX 5u

void loras_forget(LoraOptions *l) {
        for (uint32_t i = 0; i < l->n; i++)
                latent_model_free(STEAL_PTR(l->items[i].model));
        latent_job_free(STEAL_PTR(l->merge));
}

void loras_done(LoraOptions *l) {
        loras_forget(l);
        for (uint32_t i = 0; i < l->n; i++)
                free(l->items[i].file);
        l->n = 0;
}

/* 1: s is a strength; 0: it is no number, so part of the name; -ERANGE: a number, but no strength. nan and inf are numbers too: who writes
 * them where a strength is means no file. */
static int read_strength(const char *s, double *ret) {
        char *end;
        double v;

        if (s[0] == '\0' || isspace((unsigned char) s[0]))
                return 0;
        v = strtod(s, &end);
        if (*end != '\0')
                return 0;
        if (!(fabs(v) <= WIRE_LORA_STRENGTH_MAX))
                return -ERANGE;

        *ret = v;
        return 1;
}

int loras_parse(const StringList *arguments, LoraOptions *ret, latent_error *e) {
        LoraOptions l = {};

        if (arguments->n > WIRE_LORAS_MAX)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--lora may be given at most %d times", WIRE_LORAS_MAX);
        for (uint32_t i = 0; i < arguments->n; i++) {
                const char *s = arguments->items[i], *colon = strrchr(s, ':');
                LoraOption *o = &l.items[i];
                size_t n = strlen(s);
                int r;

                o->strength = 1;
                r = colon ? read_strength(colon + 1, &o->strength) : 0;
                if (r < 0) {
                        loras_done(&l);
                        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--lora %s: the strength is \"%s\"; expected a number from -%g to %g",
                                s, colon + 1, WIRE_LORA_STRENGTH_MAX, WIRE_LORA_STRENGTH_MAX);
                }
                if (r > 0)
                        n = (size_t) (colon - s);
                if (n == 0) {
                        loras_done(&l);
                        return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--lora %s: the file is missing", s);
                }
                o->file = strndup(s, n);
                if (!o->file) {
                        loras_done(&l);
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
                }
                l.n++;
        }

        *ret = l;
        return 0;
}

size_t loras_name(const LoraOptions *l, NamedFile *ret) {
        for (uint32_t i = 0; i < l->n; i++)
                ret[i] = (NamedFile){"--lora", l->items[i].file, .model = true};
        return l->n;
}

static const latent_value *applied(const LoraOptions *l) {
        return latent_value_get(latent_job_result(l->merge), "applied");
}

static const latent_value *refused(const LoraOptions *l) {
        return latent_value_get(latent_job_result(l->merge), "refused");
}

static const char *part(const latent_value *pair, size_t i) {
        const char *s = latent_value_as_string(latent_value_at(pair, i));

        return s ? s : "";
}

static void warn(const LoraOptions *l) {
        size_t n = latent_value_count(refused(l));

        if (n == 0)
                return;

        (void) fprintf(stderr, "latentctl: warning: %zu of %zu modules of the adapters do not apply:\n", n,
                n + latent_value_count(applied(l)));
        for (size_t i = 0; i < n && i < SHOWN_MAX; i++) {
                const latent_value *pair = latent_value_at(refused(l), i);

                (void) fprintf(stderr, "  %s: %s\n", part(pair, 0), part(pair, 1));
        }
        if (n > SHOWN_MAX)
                (void) fprintf(stderr, "  and %zu more, which --json lists\n", n - SHOWN_MAX);
        (void) fflush(stderr);
}

int loras_set(LoraOptions *l, const Ctl *c, latent_client *client, latent_session *session, latent_error *e) {
        const latent_load_options load = {.struct_size = sizeof(load)};
        latent_lora loras[STRINGS_MAX];
        int r;

        if (l->n == 0)
                return 0;

        for (uint32_t i = 0; i < l->n; i++) {
                r = run_open_model(c, client, l->items[i].file, &load, &l->items[i].model, NULL, e);
                if (r < 0)
                        return r;
                loras[i] = (latent_lora){.model = l->items[i].model, .strength = l->items[i].strength};
        }

        r = latent_session_set_loras(session, loras, l->n, NULL, &l->merge, e);
        if (r < 0)
                return r;
        r = run_wait(c, l->merge, "merging", e);
        if (r < 0)
                return r;

        if (!l->warned)
                warn(l);
        l->warned = true;
        return 0;
}

void loras_report(const LoraOptions *l, JsonWriter *w) {
        if (l->n == 0)
                return;

        json_writer_list(w, "loras");
        for (uint32_t i = 0; i < l->n; i++) {
                json_writer_object(w, NULL);
                json_writer_string(w, "file", l->items[i].file);
                json_writer_double(w, "strength", l->items[i].strength);
                json_writer_end(w);
        }
        json_writer_end(w);

        json_writer_value(w, "lora_applied", applied(l));
        json_writer_list(w, "lora_refused");
        for (size_t i = 0; i < latent_value_count(refused(l)); i++) {
                const latent_value *pair = latent_value_at(refused(l), i);

                json_writer_object(w, NULL);
                json_writer_string(w, "name", part(pair, 0));
                json_writer_string(w, "reason", part(pair, 1));
                json_writer_end(w);
        }
        json_writer_end(w);
        json_writer_uint(w, "lora_bytes", get_uint(latent_job_result(l->merge), "bytes"));
}
