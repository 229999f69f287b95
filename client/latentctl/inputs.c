/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/inputs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"

static const char *const input_names[INPUT_MAX] = {
        [INPUT_TEXT] = "text",
        [INPUT_TEXT_TAGS] = "text_tags",
        [INPUT_VIDEO] = "video",
        [INPUT_AUDIO] = "audio",
        [INPUT_SIGMAS_VIDEO] = "sigmas_video",
        [INPUT_SIGMAS_AUDIO] = "sigmas_audio",
};

/* Text to video and audio is what this version does. */
static int check_task(const TensorFile *f, latent_error *e) {
        const char *task = st_header_meta(f->header, "task");

        for (size_t i = 0; i < f->header->n_tensors; i++)
                if (strncmp(f->header->tensors[i].name, "cond.", 5) == 0)
                        return ctl_error(e, -EOPNOTSUPP, LATENT_ERROR_NOT_SUPPORTED,
                                "%s has conditions (%s%s%s): keyframes and references are of a later "
                                "version; this one does t2va.",
                                f->path, f->header->tensors[i].name, task ? ", task " : "",
                                task ? task : "");
        if (task && strcmp(task, "t2va") != 0)
                return ctl_error(e, -EOPNOTSUPP, LATENT_ERROR_NOT_SUPPORTED,
                        "%s is for the task %s, which is of a later version; this one does t2va.", f->path,
                        task);

        return 0;
}

static int take(const TensorFile *f, InputKind kind, Inputs *in, latent_error *e) {
        const StTensor *s = st_header_find(f->header, input_names[kind]);
        latent_tensor *t = &in->tensor[kind];

        if (!s)
                return 0;
        if (s->n_dims > LATENT_DIMS_MAX)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s: %s has %u dimensions; expected at most %d.", f->path, s->name, s->n_dims,
                        LATENT_DIMS_MAX);

        t->n_dims = s->n_dims;
        memcpy(t->shape, s->shape, s->n_dims * sizeof(t->shape[0]));
        (void) snprintf(t->dtype, sizeof(t->dtype), "%s", st_type_name(s->type));
        in->source[kind] = s;
        return 0;
}

int inputs_find(const TensorFile *f, bool with_sigmas, Inputs *ret, latent_error *e) {
        Inputs in = {};
        int r;

        r = check_task(f, e);
        if (r < 0)
                return r;

        for (InputKind k = 0; k < INPUT_MAX; k++) {
                if (k >= INPUT_SIGMAS_VIDEO && !with_sigmas)
                        break;
                r = take(f, k, &in, e);
                if (r < 0)
                        return r;
                if (!in.source[k] && (k == INPUT_TEXT || k == INPUT_VIDEO || k == INPUT_AUDIO))
                        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                                "%s has no tensor \"%s\"; expected text, video and audio, and text_tags if "
                                "it has rows of images.",
                                f->path, input_names[k]);
        }
        if (!in.source[INPUT_SIGMAS_VIDEO] != !in.source[INPUT_SIGMAS_AUDIO])
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s has only one of sigmas_video and sigmas_audio; expected both or none.", f->path);

        *ret = in;
        return 0;
}

const latent_tensor *inputs_get(const Inputs *in, InputKind kind) {
        return in->source[kind] ? &in->tensor[kind] : NULL;
}

uint64_t inputs_bytes(const Inputs *in) {
        uint64_t sum = 0;

        /* The tensors do not overlap in a file, whose size is a signed 64-bit number. */
        for (InputKind k = 0; k < INPUT_MAX; k++)
                if (in->source[k])
                        sum += in->source[k]->size + LATENT_ALIGNMENT;
        return sum < 4096 ? 4096 : sum;
}

int inputs_place(const TensorFile *f, Inputs *in, latent_session *s, latent_error *e) {
        void *data;
        int r;

        for (InputKind k = 0; k < INPUT_MAX; k++) {
                if (!in->source[k])
                        continue;
                r = latent_session_allocate(s, &in->tensor[k], &data, e);
                if (r < 0)
                        return r;
                r = tensor_file_read(f, in->source[k], data, e);
                if (r < 0)
                        return r;
        }

        return 0;
}

/* "3f6c4ec5": the bits of an f32, most significant first. */
static int parse_bits(const char *s, double *ret) {
        uint32_t bits = 0;
        float v;

        if (strlen(s) != 8 || strspn(s, "0123456789abcdefABCDEF") != 8)
                return -EINVAL;
        bits = (uint32_t) strtoul(s, NULL, 16);
        memcpy(&v, &bits, sizeof(v));
        *ret = v;
        return 0;
}

int inputs_sigma(const TensorFile *f, const char *key, double *ret, latent_error *e) {
        const char *decimal, *bits;
        char bits_key[64];
        int r;

        (void) snprintf(bits_key, sizeof(bits_key), "%s_f32", key);
        bits = st_header_meta(f->header, bits_key);
        decimal = st_header_meta(f->header, key);
        if (!bits && !decimal)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%s has no noise level in its metadata (%s or %s). Give it: --%.5s-%s S.", f->path,
                        bits_key, key, key, key + 6);

        r = bits ? parse_bits(bits, ret) : parse_double(decimal, ret);
        if (r < 0)
                return ctl_error(e, r, LATENT_ERROR_INVALID_FILE,
                        "%s: the metadata %s is \"%s\"; expected %s.", f->path, bits ? bits_key : key,
                        bits ? bits : decimal,
                        bits ? "the 8 hexadecimal digits of an f32" : "a number from 0 to 1");
        return 0;
}
