/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <jansson.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

static void json_unref(json_t **j) {
        json_decref(*j);
}

static int load(const char *json, uint64_t size, json_t **ret, Fault *f) {
        json_error_t error;
        json_t *root = json_loadb(json, size, JSON_REJECT_DUPLICATES, &error);

        if (!root)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "config.json is not JSON: %s (line %d).",
                        error.text, error.line);
        if (!json_is_object(root)) {
                json_decref(root);
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "config.json is not a JSON object.");
        }
        *ret = root;
        return 0;
}

/* "a.b.c" below root; NULL: not there. */
static const json_t *at(const json_t *root, const char *path) {
        char part[64];

        while (root && *path) {
                size_t n = strcspn(path, ".");

                (void) snprintf(part, sizeof(part), "%.*s", (int) n, path);
                root = json_object_get(root, part);
                path += n + (path[n] == '.');
        }
        return root;
}

static int not_a(const char *path, const char *what, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json: %s is not %s. Use the config.json of this model.", path, what);
}

static int read_real(const json_t *root, const char *path, double *ret, Fault *f) {
        const json_t *v = at(root, path);

        if (!v)
                return 0;
        if (!json_is_number(v) || !(json_number_value(v) > 0) || json_number_value(v) > 1e12)
                return not_a(path, "a number above 0", f);
        *ret = json_number_value(v);
        return 0;
}

static int read_count(const json_t *root, const char *path, uint32_t max, uint32_t *ret, Fault *f) {
        const json_t *v = at(root, path);

        if (!v)
                return 0;
        if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > max)
                return not_a(path, "a whole number of a model's size", f);
        *ret = (uint32_t) json_integer_value(v);
        return 0;
}

/* n: in the most there may be, out how many there are. */
static int read_list(const json_t *root, const char *path, uint32_t *n, uint32_t *ret, Fault *f) {
        const json_t *v = at(root, path);
        size_t count = json_array_size(v);

        if (!v || json_is_null(v)) {
                *n = 0;
                return 0;
        }
        if (!json_is_array(v) || count > *n)
                return not_a(path, "a list of a few whole numbers", f);
        for (size_t i = 0; i < count; i++) {
                const json_t *x = json_array_get(v, i);

                if (!json_is_integer(x) || json_integer_value(x) < 0 || json_integer_value(x) > 65536)
                        return not_a(path, "a list of a few whole numbers", f);
                ret[i] = (uint32_t) json_integer_value(x);
        }
        *n = (uint32_t) count;
        return 0;
}

static int read_sections(const json_t *root, TextSaid *said, Fault *f) {
        static const char *const paths[] = {
                "text_config.rope_parameters.mrope_section", "text_config.rope_scaling.mrope_section"};
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(paths); i++) {
                uint32_t n = 3, sections[3] = {};

                r = read_list(root, paths[i], &n, sections, f);
                if (r >= 0 && n > 0 && n != 3)
                        return not_a(paths[i], "a list of three numbers", f);
                if (r >= 0 && n == 3)
                        memcpy(said->sections, sections, sizeof(sections));
        }
        return r;
}

int text_config_read(const char *json, uint64_t size, TextSaid *ret, Fault *f) {
        CLEANUP(json_unref) json_t *root = NULL;
        TextSaid said = {.n_deepstack = H3_DEEPSTACK_MAX};
        int r;

        r = load(json, size, &root, f);
        if (r >= 0)
                r = read_count(root, "latentd_run_layers", 1024, &said.run_layers, f);
        if (r >= 0)
                r = read_count(root, "text_config.max_position_embeddings", 1u << 30, &said.positions, f);
        if (r >= 0)
                r = read_count(root, "vision_config.num_heads", 4096, &said.heads, f);
        if (r >= 0)
                r = read_list(root, "vision_config.deepstack_visual_indexes", &said.n_deepstack,
                        said.deepstack, f);
        if (r >= 0)
                r = read_sections(root, &said, f);
        if (r >= 0)
                r = read_real(root, "text_config.rms_norm_eps", &said.eps, f);
        if (r >= 0)
                r = read_real(root, "text_config.rope_theta", &said.theta, f);
        if (r >= 0)
                r = read_real(root, "text_config.rope_parameters.rope_theta", &said.theta, f);
        if (r >= 0)
                r = read_real(root, "vision_config.rope_parameters.rope_theta", &said.vision_theta, f);
        if (r < 0)
                return r;
        *ret = said;
        return 0;
}

static int check_number(const json_t *root, const char *path, double is, Fault *f) {
        const json_t *v = at(root, path);

        if (!v || json_is_null(v))
                return 0;
        if (!json_is_number(v))
                return not_a(path, "a number", f);
        if (json_number_value(v) == is)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json says %s = %.9g, the tensors say %.9g. Use the config.json of this model, or "
                "leave it out.",
                path, json_number_value(v), is);
}

static int check_text(const json_t *root, const char *path, const char *expected, Fault *f) {
        const json_t *v = at(root, path);
        const char *said = json_string_value(v);

        if (!v || (said && strcmp(said, expected) == 0))
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "config.json says %s = %.60s; this version runs %s only.", path,
                said ? said : "(not a string)", expected);
}

/* Interleaved M-RoPE is the only kind there is here; files that do not say are of that kind. */
static int check_interleaved(const json_t *root, const char *path, Fault *f) {
        const json_t *v = at(root, path);

        if (!v || json_is_true(v))
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "config.json says %s is not true; this version runs interleaved M-RoPE only.", path);
}

/* num_hidden_layers counts those of the published folder; a single file may have only those that run. */
static int check_layers(const json_t *root, const H3TextConfig *c, Fault *f) {
        const char *path = "text_config.num_hidden_layers";
        const json_t *v = at(root, path);

        if (json_is_integer(v) && json_integer_value(v) >= c->layers && c->file_layers == c->layers)
                return 0;
        return check_number(root, path, c->file_layers, f);
}

int text_config_check(const char *json, uint64_t size, const H3TextConfig *c, Fault *f) {
        const H3VisionConfig *v = &c->vision;
        const struct {
                const char *path;
                double is;
        } numbers[] = {
                {"text_config.hidden_size", c->hidden},
                {"text_config.num_attention_heads", c->heads},
                {"text_config.num_key_value_heads", c->kv_heads},
                {"text_config.head_dim", c->head_dim},
                {"text_config.intermediate_size", c->ffn},
                {"text_config.vocab_size", c->vocab},
                {"vision_config.depth", v->depth},
                {"vision_config.hidden_size", v->hidden},
                {"vision_config.intermediate_size", v->ffn},
                {"vision_config.out_hidden_size", c->hidden},
                {"vision_config.num_position_embeddings", (double) v->grid * v->grid},
                {"vision_config.patch_size", 16},
                {"vision_config.temporal_patch_size", 2},
                {"vision_config.spatial_merge_size", 2},
                {"vision_config.in_channels", 3},
        };
        CLEANUP(json_unref) json_t *root = NULL;
        int r;

        r = load(json, size, &root, f);
        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(numbers); i++)
                r = check_number(root, numbers[i].path, numbers[i].is, f);
        if (r >= 0)
                r = check_layers(root, c, f);
        if (r >= 0)
                r = check_text(root, "text_config.hidden_act", "silu", f);
        if (r >= 0)
                r = check_text(root, "vision_config.hidden_act", "gelu_pytorch_tanh", f);
        if (r >= 0)
                r = check_interleaved(root, "text_config.rope_parameters.mrope_interleaved", f);
        return r < 0 ? r : check_interleaved(root, "text_config.rope_scaling.mrope_interleaved", f);
}
