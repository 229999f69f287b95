/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

#define ROPE_THETA 10000.0

static void json_unref(json_t **j) {
        json_decref(*j);
}

static int disagree(const char *key, double said, double is, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json says %s = %.9g, the tensors say %.6g. Use the config.json of this model, or "
                "leave it out.",
                key, said, is);
}

static int check_number(const json_t *root, const char *key, double is, Fault *f) {
        const json_t *v = json_object_get(root, key);
        double said;

        if (!v)
                return 0;
        if (!json_is_number(v))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "config.json: %s is not a number; expected %.9g.", key, is);
        said = json_number_value(v);
        /* eps and theta are written in decimal: equal as floats */
        return (float) said == (float) is ? 0 : disagree(key, said, is, f);
}

static int check_patch(const json_t *root, const H3Config *c, Fault *f) {
        const double is[] = {1, c->patch_h, c->patch_w};
        const json_t *v = json_object_get(root, "patch_size");

        if (!v)
                return 0;
        if (!json_is_array(v) || json_array_size(v) != 3)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "config.json: patch_size is not a list of three numbers; expected [1, 2, 2].");
        for (size_t i = 0; i < 3; i++) {
                const json_t *n = json_array_get(v, i);

                if (!json_is_number(n))
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "config.json: patch_size is not a list of three numbers; expected [1, 2, "
                                "2].");
                if (json_number_value(n) != is[i])
                        return disagree("patch_size", json_number_value(n), is[i], f);
        }
        return 0;
}

static int check_class(const json_t *root, const H3Config *c, Fault *f) {
        const char *expected =
                c->curve_points > 0 ? "MiniMaxH3PrunedTransformer3DModel" : "MiniMaxH3Transformer3DModel";
        const json_t *v = json_object_get(root, "_class_name");
        const char *said = json_string_value(v);

        if (!v || (said && strcmp(said, expected) == 0))
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json says _class_name = %.100s, the tensors say %s.", said ? said : "(not a string)",
                expected);
}

/* The theta that the frequencies follow: inv_freq[1] = theta^(-1 / n). */
static double rope_theta(const H3Config *c) {
        if (c->rope_freqs < 2)
                return ROPE_THETA;
        return fmath_exp(-(double) c->rope_freqs * fmath_log((double) c->rope_inv_freq[1]));
}

static int check_theta(const json_t *root, const H3Config *c, Fault *f) {
        const json_t *v = json_object_get(root, "rope_theta");
        double is = rope_theta(c);

        if (!v)
                return 0;
        /* one f32 rounding of inv_freq[1] is worth 1e-6 of theta */
        if (json_is_number(v) && fabs(json_number_value(v) - is) <= 1e-5 * is)
                return 0;
        return disagree("rope_theta", json_number_value(v), is, f);
}

int h3_config_check(const char *json, uint64_t size, const H3Config *c, Fault *f) {
        const struct {
                const char *key;
                double is;
        } numbers[] = {
                {"num_attention_heads", c->heads},
                {"attention_head_dim", c->head_dim},
                {"hidden_size", c->hidden},
                {"num_layers", c->layers},
                {"num_refiner_layers", c->refiner_layers},
                {"ffn_dim", c->ffn},
                {"in_channels", c->video_channels},
                {"audio_in_channels", c->audio_channels},
                {"text_dim", c->text_dim},
                {"rope_freq_dim", c->rope_freqs},
                {"norm_eps", c->eps},
                {"qk_norm_eps", c->eps},
                {"final_norm_eps", c->eps},
        };
        const struct {
                const char *key;
                double is;
        } time_numbers[] = {
                /* a curve does not have them any more */
                {"freq_dim", c->time_freq_dim},
                {"time_embed_hidden_dim", c->time_hidden},
                {"time_embed_dim", c->time_dim},
        };
        CLEANUP(json_unref) json_t *root = NULL;
        json_error_t error;
        int r;

        root = json_loadb(json, size, JSON_REJECT_DUPLICATES, &error);
        if (!root || !json_is_object(root))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "config.json is not a JSON object: %s (line %d).",
                        root ? "it is something else" : error.text, root ? 1 : error.line);

        r = check_class(root, c, f);
        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(numbers); i++)
                r = check_number(root, numbers[i].key, numbers[i].is, f);
        for (size_t i = 0; r >= 0 && c->curve_points == 0 && i < ELEMENTSOF(time_numbers); i++)
                r = check_number(root, time_numbers[i].key, time_numbers[i].is, f);
        if (r >= 0)
                r = check_patch(root, c, f);
        return r < 0 ? r : check_theta(root, c, f);
}
