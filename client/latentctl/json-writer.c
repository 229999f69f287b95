/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/json-writer.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "service/shared/utf8.h"

static void escape(FILE *f, uint32_t c) {
        if (c == '"' || c == '\\')
                (void) fprintf(f, "\\%c", (int) c);
        else if (c >= 0x20 && c < 0x7f)
                (void) fputc((int) c, f);
        else if (c < 0x10000)
                (void) fprintf(f, "\\u%04" PRIx32, c);
        else
                (void) fprintf(f, "\\u%04" PRIx32 "\\u%04" PRIx32, 0xd800 + ((c - 0x10000) >> 10),
                        0xdc00 + ((c - 0x10000) & 0x3ff));
}

static void quote(FILE *f, const char *s) {
        size_t n = strlen(s);

        (void) fputc('"', f);
        for (size_t i = 0; i < n;) {
                uint32_t c;
                size_t length = utf8_decode(s + i, n - i, &c);

                escape(f, length > 0 ? c : 0xfffd);
                i += length > 0 ? length : 1;
        }
        (void) fputc('"', f);
}

/* The comma and key in front of a value. */
static void lead(JsonWriter *w, const char *key) {
        if (w->depth > 0) {
                if (w->comma[w->depth - 1])
                        (void) fputc(',', w->file);
                w->comma[w->depth - 1] = true;
        }
        if (key) {
                quote(w->file, key);
                (void) fputc(':', w->file);
        }
}

static void begin(JsonWriter *w, const char *key, char open, char end) {
        lead(w, key);
        assert(w->depth < JSON_DEPTH_MAX);
        (void) fputc(open, w->file);
        w->comma[w->depth] = false;
        w->end[w->depth++] = end;
}

void json_writer_object(JsonWriter *w, const char *key) {
        begin(w, key, '{', '}');
}

void json_writer_list(JsonWriter *w, const char *key) {
        begin(w, key, '[', ']');
}

void json_writer_end(JsonWriter *w) {
        assert(w->depth > 0);
        (void) fputc(w->end[--w->depth], w->file);
}

void json_writer_string(JsonWriter *w, const char *key, const char *s) {
        lead(w, key);
        quote(w->file, s);
}

void json_writer_uint(JsonWriter *w, const char *key, uint64_t v) {
        lead(w, key);
        (void) fprintf(w->file, "%" PRIu64, v);
}

void json_writer_double(JsonWriter *w, const char *key, double v) {
        lead(w, key);
        if (isfinite(v))
                (void) fprintf(w->file, "%.17g", v);
        else
                (void) fputs("null", w->file);
}

static void write_number(JsonWriter *w, const char *key, const latent_value *v) {
        uint64_t u;
        int64_t i = 0;

        if (latent_value_as_uint(v, &u) >= 0) {
                json_writer_uint(w, key, u);
                return;
        }
        (void) latent_value_as_int(v, &i);
        lead(w, key);
        (void) fprintf(w->file, "%" PRId64, i);
}

void json_writer_value(JsonWriter *w, const char *key, const latent_value *v) {
        double d = 0;

        switch (latent_value_type(v)) {
        case LATENT_VALUE_BOOL:
                lead(w, key);
                (void) fputs(latent_value_as_bool(v) > 0 ? "true" : "false", w->file);
                break;
        case LATENT_VALUE_UINT:
        case LATENT_VALUE_INT:
                write_number(w, key, v);
                break;
        case LATENT_VALUE_DOUBLE:
                (void) latent_value_as_double(v, &d);
                json_writer_double(w, key, d);
                break;
        case LATENT_VALUE_STRING:
                json_writer_string(w, key, latent_value_as_string(v));
                break;
        case LATENT_VALUE_LIST:
        case LATENT_VALUE_DICT:
                if (latent_value_type(v) == LATENT_VALUE_DICT)
                        json_writer_object(w, key);
                else
                        json_writer_list(w, key);
                for (size_t i = 0; i < latent_value_count(v); i++)
                        json_writer_value(w, latent_value_key_at(v, i), latent_value_at(v, i));
                json_writer_end(w);
                break;
        default:
                lead(w, key);
                (void) fputs("null", w->file);
        }
}

void json_writer_line(JsonWriter *w) {
        while (w->depth > 0)
                json_writer_end(w);
        (void) fputc('\n', w->file);
        (void) fflush(w->file);
}
