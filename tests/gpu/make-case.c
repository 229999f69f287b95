/* SPDX-License-Identifier: Apache-2.0 */

/* The inputs of one step of a film from text alone, as the golden cases have them, for `latentctl step` and bench-whole-step. Numbers
 * from counters (counter.h), normal.
 *
 *     make-case FILE FRAMES [--size WxH] [--text ROWS]
 *
 * FRAMES as people ask for them (1 to 362), rounded up as the model has it; pixels, multiples of 32 (1344x768); 300 rows of text.
 * Prints the number of rows. */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/h3/request-size.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "tests/gpu/counter.h"

#define TEXT_DIM 5120
#define VIDEO_CHANNELS 24
#define AUDIO_CHANNELS 32
#define SIGMA_VIDEO 0.65625 /* exact in f32, and not the same */
#define SIGMA_AUDIO 0.578125

typedef struct Case {
        const char *path;
        H3FilmSize film;
        unsigned width, height, text_rows;
        StTensor tensors[3];
        void *data[3];
} Case;

static void usage(void) {
        (void) fprintf(stderr, "usage: make-case FILE FRAMES [--size WxH] [--text ROWS]\n");
        exit(2);
}

static void die(const char *what, const char *why) {
        (void) fprintf(stderr, "make-case: %s: %s\n", what, why);
        exit(1);
}

static void parse(Case *c, int argc, char *argv[]) {
        static const struct option options[] = {
                {"size", required_argument, NULL, 's'}, {"text", required_argument, NULL, 't'}, {}};
        char rest;
        Fault f;
        int o;

        *c = (Case){.width = 1344, .height = 768, .text_rows = 300};
        while ((o = getopt_long(argc, argv, "", options, NULL)) != -1)
                if (o == 's' ? sscanf(optarg, "%ux%u%c", &c->width, &c->height, &rest) != 2
                             : o != 't' || sscanf(optarg, "%u%c", &c->text_rows, &rest) != 1)
                        usage();
        if (argc - optind != 2)
                usage();
        if (c->width % 32 != 0 || c->height % 32 != 0 || c->width < 32 || c->height < 32 || c->width > 8192 || c->height > 8192)
                die("--size", "expected multiples of 32, at most 8192x8192");
        if (c->text_rows < 1 || c->text_rows > 65536)
                die("--text", "expected 1 to 65536 rows");
        c->path = argv[optind];
        if (h3_request_frames(strtoull(argv[optind + 1], NULL, 10), &c->film, &f) < 0)
                die(argv[optind + 1], f.text);
}

static void make(Case *c, unsigned i, const char *name, StType type, uint32_t n_dims, const uint64_t *shape) {
        StTensor *t = c->tensors + i;
        uint64_t n = 1, seed = counter_seed(name);

        *t = (StTensor){.name = name, .type = type, .n_dims = n_dims};
        for (uint32_t d = 0; d < n_dims; d++) {
                t->shape[d] = shape[d];
                n *= shape[d];
        }
        t->size = n * st_type_size(type);
        c->data[i] = malloc(t->size);
        if (!c->data[i])
                die(name, "out of memory");
        for (uint64_t k = 0; k < n; k++)
                if (type == ST_F32)
                        ((float *) c->data[i])[k] = counter_normal(seed, k);
                else
                        ((uint16_t *) c->data[i])[k] = counter_bf16(counter_normal(seed, k));
}

int main(int argc, char *argv[]) {
        char frames[24], rows_text[24], video_sigma[24], audio_sigma[24];
        CLEANUP_CLOSE int fd = -EBADF;
        uint64_t rows;
        Case c;
        int r;

        parse(&c, argc, argv);
        make(&c, 0, "text", ST_BF16, 2, (uint64_t[]){c.text_rows, TEXT_DIM});
        make(&c, 1, "video", ST_F32, 4, (uint64_t[]){VIDEO_CHANNELS, c.film.latent_frames, c.height / 16, c.width / 16});
        make(&c, 2, "audio", ST_F32, 3, (uint64_t[]){AUDIO_CHANNELS, 2, c.film.audio_latents});
        rows = c.text_rows + 2 * c.film.audio_latents + c.film.latent_frames * (c.height / 32) * (c.width / 32);

        (void) snprintf(frames, sizeof(frames), "%" PRIu64, c.film.frames);
        (void) snprintf(rows_text, sizeof(rows_text), "%" PRIu64, rows);
        (void) snprintf(video_sigma, sizeof(video_sigma), "%.9g", SIGMA_VIDEO);
        (void) snprintf(audio_sigma, sizeof(audio_sigma), "%.9g", SIGMA_AUDIO);
        const StMeta meta[] = {{"task", "t2va"}, {"conds", "[]"}, {"frames", frames}, {"rows", rows_text},
                {"sigma_video", video_sigma}, {"sigma_audio", audio_sigma}};

        fd = open(c.path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0)
                die(c.path, strerror(errno));
        r = st_write(fd, c.tensors, (const void *const *) c.data, ELEMENTSOF(c.tensors), meta, ELEMENTSOF(meta));
        if (r < 0)
                die(c.path, strerror(-r));
        (void) printf("%" PRIu64 " frames, %" PRIu64 " rows\n", c.film.frames, rows);
        for (size_t i = 0; i < ELEMENTSOF(c.data); i++)
                free(c.data[i]);
        return 0;
}
