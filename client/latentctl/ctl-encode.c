/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl encode: a prompt and pictures, as the denoiser reads them. */

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/coding-job.h"
#include "client/latentctl/pictures.h"
#include "client/latentctl/report.h"
#include "client/latentctl/results.h"
#include "client/latentctl/run.h"
#include "service/shared/canvas.h"

#define REFERENCE_AUDIO "audio"
/* Both more than canvas_from_picture() gives, at once. */
#define STAND_IN_WIDTH 1440u
#define STAND_IN_HEIGHT 832u
#define WITH_SOUND "+sound"

/* A picture: a tensor of a file. Of a sound only that it is there. */
typedef struct EncodePicture {
        char *path; /* FILE of FILE:TENSOR; NULL: a sound */
        TensorFile file;
        const StTensor *source;
        latent_tensor tensor;
        const char *kind;
        bool sound; /* of a clip */
} EncodePicture;

typedef struct Encode {
        CodingOptions coding;
        const char *prompt, *type, *picture_rule, *size;
        StringList keyframes, references;
        Pictures files;
        latent_tensor stand_ins[2]; /* of the files, for the plan */
        uint32_t width, height;
        char *text;
        size_t text_size;
        latent_tensor text_tensor;
        EncodePicture pictures[STRINGS_MAX];
        uint32_t n_pictures;
} Encode;

static void encode_done(Encode *x) {
        for (uint32_t i = 0; i < x->n_pictures; i++) {
                tensor_file_done(&x->pictures[i].file);
                free(x->pictures[i].path);
        }
        pictures_done(&x->files);
        free(x->text);
}

/* FILE.safetensors:TENSOR; what is behind the last colon is the tensor's name. */
static int open_picture(const char *argument, const char *option, EncodePicture *p, latent_error *e) {
        const char *colon = strrchr(argument, ':');
        int r;

        if (!colon || colon == argument || colon[1] == '\0')
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--%s %s: expected FILE.safetensors:TENSOR", option, argument);

        p->path = strndup(argument, (size_t) (colon - argument));
        if (!p->path)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        r = tensor_file_open(p->path, &p->file, e);
        if (r < 0)
                return r;

        p->source = st_header_find(p->file.header, colon + 1);
        if (!p->source)
                return ctl_error(e, -ENOENT, LATENT_ERROR_NOT_FOUND, "%s has no tensor %s.", p->path, colon + 1);
        return coding_tensor(&p->file, p->source, &p->tensor, e);
}

/* "audio", FILE.safetensors:TENSOR, or of a clip also FILE.safetensors:TENSOR+sound. A still picture has three
 * dimensions, a clip four; the service judges the rest. */
static int open_reference(const char *argument, EncodePicture *p, latent_error *e) {
        size_t n = strlen(argument), k = strlen(WITH_SOUND);
        CLEANUP_FREE char *name = NULL;
        int r;

        if (strcmp(argument, REFERENCE_AUDIO) == 0) {
                p->kind = "audio";
                return 0;
        }

        p->sound = n > k && strcmp(argument + n - k, WITH_SOUND) == 0;
        name = strndup(argument, p->sound ? n - k : n);
        if (!name)
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        r = open_picture(name, "reference", p, e);
        if (r < 0)
                return r;

        p->kind = p->tensor.n_dims == 4 ? "video" : "image";
        if (p->sound && p->tensor.n_dims != 4)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--reference %s: only a clip, [F, H, W, 3], has sound", argument);
        return 0;
}

static int open_pictures(Encode *x, latent_error *e) {
        const StringList *list = x->keyframes.n > 0 ? &x->keyframes : &x->references;
        int r;

        if ((x->files.image || x->files.last_image) && (x->keyframes.n > 0 || x->references.n > 0))
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--image and --last-image do not go together with tensors");
        if (x->size && !x->files.image && !x->files.last_image)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--size is for --image and --last-image");
        r = parse_size(x->size, &x->width, &x->height, e);
        if (r >= 0)
                r = pictures_open(&x->files, e);
        if (r < 0)
                return r;
        if (x->keyframes.n > 0 && x->references.n > 0)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--keyframe and --reference do not go together");

        for (uint32_t i = 0; i < list->n; i++) {
                EncodePicture *p = &x->pictures[x->n_pictures++];

                if (list == &x->references)
                        r = open_reference(list->items[i], p, e);
                else {
                        r = open_picture(list->items[i], "keyframe", p, e);
                        p->kind = "keyframe";
                }
                if (r < 0)
                        return r;
        }

        return 0;
}

/* How many tokens a picture has follows from its size alone; without one it is at most that of the largest film. */
static int place_stand_in(const Encode *x, latent_tensor *t, latent_session *s, latent_error *e) {
        void *unused;

        *t = (latent_tensor){.dtype = "U8", .n_dims = 3, .shape = {STAND_IN_HEIGHT, STAND_IN_WIDTH, 3}};
        if (x->width > 0) {
                t->shape[0] = x->height + CANVAS_STEP;
                t->shape[1] = x->width + CANVAS_STEP;
        }
        return latent_session_allocate(s, t, &unused, e);
}

static int encode_place(void *userdata, latent_session *s, latent_error *e) {
        Encode *x = userdata;
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < x->files.n; i++)
                r = place_stand_in(x, &x->stand_ins[i], s, e);
        if (r < 0)
                return r;

        if (x->text_size > 0)
                r = coding_place_text(x->text, x->text_size, &x->text_tensor, s, e);
        for (uint32_t i = 0; r >= 0 && i < x->n_pictures; i++)
                if (x->pictures[i].path)
                        r = coding_place(
                                &x->pictures[i].file, x->pictures[i].source, &x->pictures[i].tensor, s, e);
        return r;
}

static latent_encode_options encode_options(const Encode *x, latent_picture pictures[static STRINGS_MAX]) {
        latent_encode_options o = {
                .struct_size = sizeof(o),
                .text = x->text_size > 0 ? &x->text_tensor : NULL,
                .n_pictures = x->n_pictures,
                .pictures = x->n_pictures > 0 ? pictures : NULL,
                .picture_rule = x->picture_rule,
                .type = x->type,
        };

        for (uint32_t i = 0; i < x->n_pictures; i++)
                pictures[i] = (latent_picture){.kind = x->pictures[i].kind,
                        .picture = x->pictures[i].path ? &x->pictures[i].tensor : NULL,
                        .sound = x->pictures[i].sound};
        return o;
}

static int encode_plan(void *userdata, latent_session *s, latent_value **ret, latent_error *e) {
        latent_picture pictures[STRINGS_MAX];
        latent_encode_options o = encode_options(userdata, pictures);
        const Encode *x = userdata;

        for (uint32_t i = 0; i < x->files.n; i++)
                pictures[i] = (latent_picture){.kind = "keyframe", .picture = &x->stand_ins[i]};
        if (x->files.n > 0) {
                o.pictures = pictures;
                o.n_pictures = x->files.n;
        }

        return latent_session_plan_encode(s, &o, ret, e);
}

static int encode_start(void *userdata, latent_session *s, latent_job **ret, latent_error *e) {
        latent_picture pictures[STRINGS_MAX];
        latent_encode_options o = encode_options(userdata, pictures);
        const Encode *x = userdata;

        o.files = x->files.items;
        o.n_files = x->files.n;
        o.width = x->width;
        o.height = x->height;

        return latent_session_encode(s, &o, ret, e);
}

static int open_output(const Encode *x, Output *ret, latent_error *e) {
        NamedFile inputs[CODING_INPUTS_MAX] = {{"--image", x->files.image}, {"--last-image", x->files.last_image}};

        for (uint32_t i = 0; i < x->n_pictures; i++)
                inputs[2 + i] = (NamedFile){x->keyframes.n > 0 ? "--keyframe" : "--reference", x->pictures[i].path};
        return coding_open_output(&x->coding, inputs, 2 + x->n_pictures, ret, e);
}

static int run(CodingJob *j, Encode *x, latent_error *e) {
        CLEANUP(output_done) Output output = {.fd = -EBADF};
        CodingWork w = {.part = "text_encoder", .place = encode_place, .plan = encode_plan, .start = encode_start, .userdata = x};
        const char *compute = x->coding.compute;
        int r;

        r = coding_check_options(&x->coding, e);
        if (r >= 0 && !x->prompt)
                r = ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--prompt TEXT is missing");
        if (r >= 0)
                r = open_pictures(x, e);
        if (r >= 0)
                r = coding_text(x->prompt, &x->text, &x->text_size, e);
        if (r >= 0)
                r = open_output(x, &output, e);
        if (r < 0)
                return r;

        w.input_bytes = x->text_size + LATENT_ALIGNMENT;
        for (uint32_t i = 0; i < x->n_pictures; i++)
                w.input_bytes += x->pictures[i].tensor.size + LATENT_ALIGNMENT;
        w.input_bytes += x->files.n * (UINT64_C(3) * ((x->width > 0 ? x->width : STAND_IN_WIDTH) + CANVAS_STEP) *
                                                      ((x->width > 0 ? x->height : STAND_IN_HEIGHT) + CANVAS_STEP) + LATENT_ALIGNMENT);
        r = coding_start(j, &w, e);
        if (r >= 0)
                r = run_wait(j->ctl, j->job, "encoding", e);
        if (r >= 0)
                r = results_write(&output, j->job, compute && strcmp(compute, "auto") != 0 ? compute : "bf16", e);
        return r < 0 ? r : output_commit(&output, e);
}

int verb_encode(Ctl *c, const Verb *verb, int argc, char *argv[]) {
        CLEANUP(encode_done) Encode x = {};
        const Option options[] = {
                CODING_OPTIONS(x.coding),
                {"prompt", OPTION_STRING, &x.prompt, NULL, 'p'},
                {"image", OPTION_STRING, &x.files.image, NULL, '\0'},
                {"last-image", OPTION_STRING, &x.files.last_image, NULL, '\0'},
                {"size", OPTION_STRING, &x.size, NULL, '\0'},
                {"keyframe", OPTION_STRINGS, &x.keyframes, NULL, '\0'},
                {"reference", OPTION_STRINGS, &x.references, NULL, '\0'},
                {"picture-rule", OPTION_STRING, &x.picture_rule, NULL, '\0'},
                {"type", OPTION_STRING, &x.type, NULL, '\0'},
                {"compute", OPTION_STRING, &x.coding.compute, NULL, '\0'},
                {"tokenizer", OPTION_STRING, &x.coding.tokenizer, NULL, '\0'},
        };
        CLEANUP(coding_done) CodingJob j = {.ctl = c, .options = &x.coding};
        const char *operands[1];
        latent_error e;
        int r;

        r = arguments_parse(c, argc, argv, options, ELEMENTSOF(options), 1, 1, operands, &e);
        if (r < 0)
                return report_error(c, verb, &e);
        if (c->help) {
                report_help(verb);
                return STATUS_OK;
        }

        x.coding.model = operands[0];
        r = run_outcome(run(&j, &x, &e), &e);
        if (r < 0)
                return report_error(c, verb, &e);

        coding_report(&j, j.job);
        return STATUS_OK;
}
