/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/conditions.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/report.h"
#include "service/shared/json-reader.h"

static const char *const kinds[] = {"keyframe", "image", "video", "audio"};

/* A list of objects; deeper is refused. */
#define DEPTH_MAX 2u

typedef struct Parser {
        const TensorFile *file;
        JsonReader json;
        char *string; /* room for any string of the text */
        latent_error *error;
} Parser;

bool condition_needs_video(const latent_condition *c) {
        return strcmp(c->kind, "audio") != 0;
}

bool condition_needs_audio(const latent_condition *c) {
        return strcmp(c->kind, "audio") == 0;
}

static int fail(const Parser *p, uint32_t i, const char *rule) {
        return ctl_error(p->error, -EBADMSG, LATENT_ERROR_INVALID_FILE, "%s: the metadata conds, entry %u: %s.",
                p->file->path, i, rule);
}

static int fail_json(const Parser *p) {
        return ctl_error(p->error, -EBADMSG, LATENT_ERROR_INVALID_FILE,
                "%s: the metadata conds is no JSON list of objects (byte %zu: %s); expected e.g. [{\"kind\": \"keyframe\", \"frame\": 0}].",
                p->file->path, p->json.at, p->json.rule);
}

static int read_kind(Parser *p, uint32_t i, latent_condition *c) {
        size_t n;

        if (reader_string(&p->json, p->string, &n) < 0)
                return fail_json(p);
        for (size_t k = 0; k < ELEMENTSOF(kinds); k++)
                if (strcmp(kinds[k], p->string) == 0) {
                        c->kind = kinds[k];
                        return 0;
                }

        return fail(p, i, "an unknown kind; expected keyframe, image, video or audio");
}

static int read_condition(Parser *p, uint32_t i, latent_condition *ret) {
        bool first = true, has_frame = false;
        latent_condition c = {};
        size_t n;
        int r;

        if (reader_take(&p->json, '{') < 0)
                return fail_json(p);
        while ((r = reader_next(&p->json, '}', &first)) > 0) {
                bool is_kind;

                if (reader_string(&p->json, p->string, &n) < 0)
                        return fail_json(p);
                is_kind = strcmp(p->string, "kind") == 0;
                if (!is_kind && strcmp(p->string, "frame") != 0)
                        return fail(p, i, "an unknown member; expected kind, and frame of a keyframe");
                if (is_kind ? c.kind != NULL : has_frame)
                        return fail(p, i, "the same member twice");
                if (reader_take(&p->json, ':') < 0)
                        return fail_json(p);
                r = is_kind ? read_kind(p, i, &c) : reader_integer(&p->json, &c.frame);
                if (r < 0)
                        return is_kind ? r : fail(p, i, "frame is no whole number");
                has_frame = has_frame || !is_kind;
        }
        if (r < 0)
                return fail_json(p);
        if (!c.kind)
                return fail(p, i, "the kind is missing");
        if (has_frame != (strcmp(c.kind, "keyframe") == 0))
                return fail(p, i, has_frame ? "only keyframes have a frame" : "a keyframe needs its frame");

        *ret = c;
        return 0;
}

static int read_list(Parser *p, latent_condition *ret, uint32_t *ret_n) {
        bool first = true;
        uint32_t n = 0;
        int r;

        if (reader_check(&p->json, DEPTH_MAX) < 0 || reader_take(&p->json, '[') < 0)
                return fail_json(p);
        while ((r = reader_next(&p->json, ']', &first)) > 0) {
                if (n == CONDITIONS_MAX)
                        return fail(p, n, "too many; the service takes at most 30");
                r = read_condition(p, n, &ret[n]);
                if (r < 0)
                        return r;
                n++;
        }
        if (r < 0 || reader_end(&p->json) < 0)
                return fail_json(p);

        *ret_n = n;
        return 0;
}

/* The task says nothing that the conditions do not, but one that says something else shows a mistake. */
static int check_task(const TensorFile *f, const latent_condition *c, uint32_t n, latent_error *e) {
        const char *task = st_header_meta(f->header, "task"), *rule = NULL;
        uint32_t n_keyframes = 0;

        for (uint32_t i = 0; i < n; i++)
                n_keyframes += strcmp(c[i].kind, "keyframe") == 0;

        if (!task)
                return 0;
        if (strcmp(task, "t2va") == 0)
                rule = n > 0 ? "lists conditions" : NULL;
        else if (strcmp(task, "fl2va") == 0)
                rule = n_keyframes == 0 ? "lists no keyframe" : n_keyframes < n ? "lists references" : NULL;
        else if (strcmp(task, "ref2va") == 0)
                rule = n_keyframes == n ? "lists no reference" : NULL;
        else
                return ctl_error(e, -EBADMSG, LATENT_ERROR_INVALID_FILE,
                        "%s: the task in the metadata is \"%s\"; expected t2va, fl2va or ref2va.", f->path, task);

        return rule ? ctl_error(e, -EBADMSG, LATENT_ERROR_INVALID_FILE,
                              "%s is for the task %s by its metadata, which %s (conds).", f->path, task, rule)
                    : 0;
}

int conditions_parse(const TensorFile *f, latent_condition ret[static CONDITIONS_MAX], uint32_t *ret_n, latent_error *e) {
        const char *text = st_header_meta(f->header, "conds");
        CLEANUP_FREE char *string = NULL;
        uint32_t n = 0;
        int r;

        if (text) {
                Parser p = {.file = f, .json = {.text = text, .n = strlen(text)}, .error = e};

                string = malloc(p.json.n + 1);
                if (!string)
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
                p.string = string;
                r = read_list(&p, ret, &n);
                if (r < 0)
                        return r;
        }

        r = check_task(f, ret, n, e);
        if (r < 0)
                return r;

        *ret_n = n;
        return 0;
}
