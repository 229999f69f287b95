/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/render-preview.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/output.h"
#include "client/latentctl/report.h"
#include "service/shared/text-file.h"

#define MAP_NUMBERS 75u
#define MAP_FILE_MAX (64u << 10)

static int read_map(Preview *p, const char *path, latent_error *e) {
        CLEANUP_FREE char *text = NULL;
        char *save = NULL, *end;
        size_t n = 0, size;
        int r;

        r = text_file_read(path, MAP_FILE_MAX, &text, &size);
        if (r < 0)
                return ctl_error(e, r, r == -ENOENT ? LATENT_ERROR_NOT_FOUND : LATENT_ERROR_IO,
                        "%s cannot be read: %s. --preview needs numbers that say how this model's latents "
                        "look: make them with "
                        "fit-latent-rgb, or name them with --preview-map.",
                        path, text_file_strerror(r));
        if (strlen(text) != size)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_FILE, "%s is no text: there is no number in it.", path);

        for (const char *word = strtok_r(text, " \t\r\n", &save); word; word = strtok_r(NULL, " \t\r\n", &save)) {
                if (n == MAP_NUMBERS)
                        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_FILE, "%s: more than %u numbers.",
                                path, MAP_NUMBERS);
                p->map[n] = strtod(word, &end);
                if (*end != '\0' || !isfinite(p->map[n]))
                        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_FILE, "%s: \"%.64s\" is no number.",
                                path, word);
                n++;
        }
        if (n != MAP_NUMBERS)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_FILE,
                        "%s: %zu numbers, expected %u: 25 rows of red, green and blue.", path, n,
                        MAP_NUMBERS);
        return 0;
}

int preview_open(Preview *p, const char *model, const char *output, latent_error *e) {
        CLEANUP_FREE char *beside = NULL;
        const char *dot;

        if (!p->has_steps && !p->map_path)
                return 0;
        if (!p->has_steps)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--preview-map is for --preview K, which is missing");

        if (asprintf(&beside, "%s/vae/latent_rgb.txt", model) < 0) {
                beside = NULL;
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }
        if (output) {
                dot = strrchr(output, '.');
                p->stem = strndup(output, dot ? (size_t) (dot - output) : strlen(output));
                if (!p->stem)
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }

        return read_map(p, p->map_path ? p->map_path : beside, e);
}

void preview_done(Preview *p) {
        free(p->stem);
}

/* Latent frames one after the other, in rows, about as wide as four of them are high. */
static int write_picture(const char *path, const latent_tensor *t, const uint8_t *from, latent_error *e) {
        uint64_t n = t->shape[0], height = t->shape[1], width = t->shape[2], columns = 1, rows, line;
        CLEANUP(output_done) Output file = {.fd = -EBADF};
        CLEANUP_FREE uint8_t *picture = NULL;
        char header[64];
        int r;

        while (columns < n && (columns + 1) * width <= 4 * ((n + columns) / (columns + 1)) * height)
                columns++;
        rows = (n + columns - 1) / columns;
        line = width * columns * 3;
        picture = calloc(rows * height, line);
        if (!picture)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");

        for (uint64_t i = 0; i < n; i++)
                for (uint64_t y = 0; y < height; y++)
                        memcpy(picture + (i / columns * height + y) * line + i % columns * width * 3,
                                from + (i * height + y) * width * 3, width * 3);

        (void) snprintf(header, sizeof(header), "P6\n%" PRIu64 " %" PRIu64 "\n255\n", width * columns,
                rows * height);
        r = output_check_regular(path, e);
        if (r >= 0)
                r = output_open(path, &file, e);
        if (r >= 0)
                r = output_append(&file, header, strlen(header), e);
        if (r >= 0)
                r = output_append(&file, picture, rows * height * line, e);
        return r < 0 ? r : output_commit(&file, e);
}

static int write_preview(Preview *p, uint32_t step, latent_error *e) {
        CLEANUP_FREE char *path = NULL;
        const void *data;
        latent_tensor t;
        int r;

        r = latent_job_preview(p->job, &t, &data, e);
        if (r < 0)
                return r;
        if (t.n_dims != 4 || t.shape[3] != 3 || strcmp(t.dtype, "U8") != 0 || t.size == 0)
                return ctl_error(
                        e, -EPROTO, LATENT_ERROR_INTERNAL, "The service gave a preview of an unknown form.");
        if (asprintf(&path, "%s.step-%04" PRIu32 ".ppm", p->stem, step) < 0) {
                path = NULL;
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }

        return write_picture(path, &t, data, e);
}

void preview_on_news(const latent_progress *news, void *userdata) {
        Preview *p = userdata;
        latent_error e;

        if (!p->stem || p->steps == 0 || news->preview == 0 || news->preview == p->last)
                return;

        p->last = news->preview;
        if (news->preview < ELEMENTSOF(p->seen))
                p->seen[news->preview] = true;
        if (write_preview(p, news->preview, &e) >= 0) {
                p->n_written++;
                return;
        }
        if (p->failed)
                return;

        p->failed = true;
        (void) fprintf(stderr, "latentctl: no preview: %s\n", e.text);
}

void preview_finish(Preview *p) {
        uint32_t asked = 0, skipped = 0;

        if (!p->stem || p->steps == 0 || p->failed)
                return;

        for (uint32_t step = 1; step <= p->all && step < ELEMENTSOF(p->seen); step++)
                if (step % p->steps == 0 || step == p->all) {
                        asked++;
                        skipped += !p->seen[step];
                }
        if (skipped > 0)
                (void) fprintf(stderr, "latentctl: %" PRIu32 " of %" PRIu32 " previews were skipped: the next one was there already.\n",
                        skipped, asked);
}

void preview_say_left(const Preview *p, latent_error *e) {
        if (p->n_written > 0)
                (void) ctl_error(e, -EINTR, CTL_ERROR_INTERRUPTED, "interrupted; no film was written. Of its previews there are %" PRIu32
                        ": %s.step-*.ppm.", p->n_written, p->stem);
}
