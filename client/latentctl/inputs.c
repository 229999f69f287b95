/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/inputs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"

static const char *const input_names[INPUT_CONDITIONS] = {
        [INPUT_TEXT] = "text",
        [INPUT_TEXT_TAGS] = "text_tags",
        [INPUT_VIDEO] = "video",
        [INPUT_AUDIO] = "audio",
        [INPUT_MASK_VIDEO] = "mask_video",
        [INPUT_MASK_AUDIO] = "mask_audio",
        [INPUT_CLEAN_VIDEO] = "clean_video",
        [INPUT_CLEAN_AUDIO] = "clean_audio",
        [INPUT_SIGMAS_VIDEO] = "sigmas_video",
        [INPUT_SIGMAS_AUDIO] = "sigmas_audio",
};

#define CONDITION_PREFIX "cond."

static int take(const TensorFile *f, const char *name, unsigned kind, Inputs *in, latent_error *e) {
        const StTensor *s = st_header_find(f->header, name);
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

static int take_condition(const TensorFile *f, uint32_t i, Inputs *in, latent_error *e) {
        const latent_condition *c = &in->conditions[i];
        unsigned video = INPUT_CONDITIONS + 2 * i, audio = video + 1;
        char name[2][32];
        int r;

        (void) snprintf(name[0], sizeof(name[0]), CONDITION_PREFIX "%u.video", i);
        (void) snprintf(name[1], sizeof(name[1]), CONDITION_PREFIX "%u.audio", i);
        r = take(f, name[0], video, in, e);
        if (r < 0)
                return r;
        r = take(f, name[1], audio, in, e);
        if (r < 0)
                return r;

        if ((condition_needs_video(c) && !in->source[video]) || (condition_needs_audio(c) && !in->source[audio]))
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_TENSOR,
                        "%s has no tensor \"%s\", which the %s needs that its metadata lists (conds, entry %u).",
                        f->path, name[condition_needs_video(c) ? 0 : 1], c->kind, i);
        return 0;
}

/* A condition that the metadata does not list would silently not count. */
static int check_unlisted(const TensorFile *f, const Inputs *in, latent_error *e) {
        for (size_t i = 0; i < f->header->n_tensors; i++) {
                const StTensor *t = &f->header->tensors[i];
                bool known = strncmp(t->name, CONDITION_PREFIX, strlen(CONDITION_PREFIX)) != 0;

                for (unsigned k = INPUT_CONDITIONS; k < INPUT_MAX && !known; k++)
                        known = in->source[k] == t;
                if (!known)
                        return ctl_error(e, -EBADMSG, LATENT_ERROR_INVALID_FILE,
                                "%s has the tensor %s, but its metadata lists %u conditions; expected cond.I.video and "
                                "cond.I.audio for the entries of conds, from 0.",
                                f->path, t->name, in->n_conditions);
        }

        return 0;
}

static int find_conditions(const TensorFile *f, Inputs *in, latent_error *e) {
        int r;

        r = conditions_parse(f, in->conditions, &in->n_conditions, e);
        for (uint32_t i = 0; r >= 0 && i < in->n_conditions; i++)
                r = take_condition(f, i, in, e);
        if (r < 0)
                return r;

        return check_unlisted(f, in, e);
}

int inputs_find(const TensorFile *f, bool is_sample, Inputs *ret, latent_error *e) {
        Inputs in = {};
        int r;

        for (unsigned k = 0; k < (is_sample ? INPUT_CONDITIONS : INPUT_CLEAN_VIDEO); k++) {
                r = take(f, input_names[k], k, &in, e);
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

        r = find_conditions(f, &in, e);
        if (r < 0)
                return r;

        *ret = in;
        return 0;
}

const latent_tensor *inputs_get(const Inputs *in, InputKind kind) {
        return in->source[kind] ? &in->tensor[kind] : NULL;
}

const latent_condition *inputs_conditions(Inputs *in) {
        for (uint32_t i = 0; i < in->n_conditions; i++) {
                in->conditions[i].video = inputs_get(in, INPUT_CONDITIONS + 2 * i);
                in->conditions[i].audio = inputs_get(in, INPUT_CONDITIONS + 2 * i + 1);
        }

        return in->n_conditions > 0 ? in->conditions : NULL;
}

uint64_t inputs_bytes(const Inputs *in) {
        uint64_t sum = 0;

        /* The tensors do not overlap in a file, whose size is a signed 64-bit number. */
        for (unsigned k = 0; k < INPUT_MAX; k++)
                if (in->source[k])
                        sum += in->source[k]->size + LATENT_ALIGNMENT;
        return sum < 4096 ? 4096 : sum;
}

int inputs_place(const TensorFile *f, Inputs *in, latent_session *s, latent_error *e) {
        void *data;
        int r;

        for (unsigned k = 0; k < INPUT_MAX; k++) {
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
        double v = 0;
        int r;

        (void) snprintf(bits_key, sizeof(bits_key), "%s_f32", key);
        bits = st_header_meta(f->header, bits_key);
        decimal = st_header_meta(f->header, key);
        if (!bits && !decimal)
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%s has no noise level in its metadata (%s or %s). Give it: --%.5s-%s S.", f->path,
                        bits_key, key, key, key + 6);

        r = bits ? parse_bits(bits, &v) : parse_double(decimal, &v);
        if (r >= 0 && !(v >= range_sigma.min && v <= range_sigma.max)) /* nor NaN */
                r = -EINVAL;
        if (r < 0)
                return ctl_error(e, r, LATENT_ERROR_INVALID_FILE,
                        "%s: the metadata %s is \"%s\"; expected %s.", f->path, bits ? bits_key : key,
                        bits ? bits : decimal,
                        bits ? "the 8 hexadecimal digits of an f32 from 0 to 1" : range_sigma.text);

        *ret = v;
        return 0;
}

int inputs_shift(const TensorFile *f, const char *key, double *ret, latent_error *e) {
        const char *s = st_header_meta(f->header, key);
        double v = 0;

        if (s && (parse_double(s, &v) < 0 || v < range_shift.min || v > range_shift.max))
                return ctl_error(e, -EBADMSG, LATENT_ERROR_INVALID_FILE, "%s: the metadata %s is \"%s\"; expected %s.", f->path, key, s,
                        range_shift.text);

        *ret = v;
        return 0;
}
