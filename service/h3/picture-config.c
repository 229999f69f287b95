/* SPDX-License-Identifier: Apache-2.0 */
/* preprocessor_config.json and video_preprocessor_config.json: how large the conditioner sees pictures. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "service/h3/config-json.h"
#include "service/h3/picture.h"
#include "service/shared/cleanup.h"

typedef struct Reader {
        const char *file;
        const json_t *root;
        Fault *fault;
} Reader;

static int fail(const Reader *x, const char *what) {
        return fault_set(x->fault, -EBADMSG, FAULT_INVALID_FILE, "'%.100s': %s. Use the file of this model, or "
                "leave it out for the released model's numbers.", x->file, what);
}

/* What is absent or null is as it was released. */
static bool is_given(const json_t *v) {
        return v && !json_is_null(v);
}

static int differs(const Reader *x, const char *key, const char *is) {
        return fault_set(x->fault, -ENOTSUP, FAULT_NOT_SUPPORTED,
                "'%.100s': %s is not %s, the only one that this version makes pictures with.", x->file, key, is);
}

static int check_number(const Reader *x, const char *key, double is) {
        const json_t *v = json_object_get(x->root, key);
        char text[32];

        (void) snprintf(text, sizeof(text), "%.9g", is);
        return is_given(v) && (!json_is_number(v) || json_number_value(v) != is) ? differs(x, key, text) : 0;
}

static int check_true(const Reader *x, const char *key) {
        const json_t *v = json_object_get(x->root, key);

        return is_given(v) && !json_is_true(v) ? differs(x, key, "true") : 0;
}

/* Of the mean or the deviation, one for each colour. */
static int check_halves(const Reader *x, const char *key) {
        const json_t *v = json_object_get(x->root, key);
        bool same = json_is_array(v) && json_array_size(v) == 3;

        for (size_t i = 0; same && i < 3; i++)
                same = json_number_value(json_array_get(v, i)) == 0.5;
        return is_given(v) && !same ? differs(x, key, "[0.5, 0.5, 0.5]") : 0;
}

static int check_fixed(const Reader *x) {
        static const struct {
                const char *key;
                double is;
        } numbers[] = {
                {"patch_size", H3_PATCH},
                {"merge_size", H3_PATCH_MERGE},
                {"temporal_patch_size", 2},
                {"resample", 3}, /* bicubic */
                {"rescale_factor", 1.0 / 255.0},
        };
        static const char *const on[] = {"do_resize", "do_rescale", "do_normalize"};
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(numbers); i++)
                r = check_number(x, numbers[i].key, numbers[i].is);
        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(on); i++)
                r = check_true(x, on[i]);
        if (r >= 0)
                r = check_halves(x, "image_mean");
        return r < 0 ? r : check_halves(x, "image_std");
}

static int read_pixels(const Reader *x, const json_t *v, const char *key, uint64_t *ret) {
        char what[120];

        if (!is_given(v))
                return 0;
        if (!json_is_integer(v) || json_integer_value(v) < 1 ||
                (uint64_t) json_integer_value(v) > H3_PICTURE_PIXELS_MAX) {
                (void) snprintf(what, sizeof(what), "%s is not a number of pixels from 1 to %llu", key,
                        (unsigned long long) H3_PICTURE_PIXELS_MAX);
                return fail(x, what);
        }
        *ret = (uint64_t) json_integer_value(v);
        return 0;
}

/* "size", which despite its names counts pixels, and its older names, which go before it where both are. */
static int read_limits(const Reader *x, uint64_t *least, uint64_t *most) {
        const json_t *size = json_object_get(x->root, "size");
        uint64_t min = *least, max = *most;
        int r;

        if (is_given(size) && !json_is_object(size))
                return fail(x, "size is not an object");
        if (json_object_get(size, "height") || json_object_get(size, "width"))
                return differs(x, "size", "a shortest_edge and a longest_edge");
        r = read_pixels(x, json_object_get(size, "shortest_edge"), "size.shortest_edge", &min);
        if (r >= 0)
                r = read_pixels(x, json_object_get(size, "longest_edge"), "size.longest_edge", &max);
        if (r >= 0)
                r = read_pixels(x, json_object_get(x->root, "min_pixels"), "min_pixels", &min);
        if (r >= 0)
                r = read_pixels(x, json_object_get(x->root, "max_pixels"), "max_pixels", &max);
        if (r >= 0 && min > max)
                r = fail(x, "the least number of pixels (size.shortest_edge) is above the most "
                            "(size.longest_edge)");
        if (r < 0)
                return r;
        *least = min;
        *most = max;
        return 0;
}

static int read_file(const H3File *file, uint64_t *least, uint64_t *most, Fault *f) {
        Reader x = {.file = file->name, .fault = f};
        CLEANUP(config_json_unref) json_t *root = NULL;
        char what[300];
        int r;

        r = config_json_load(file, &root, what);
        if (r == -EBADMSG)
                return fail(&x, what);
        if (r < 0)
                return r;
        x.root = root;
        r = check_fixed(&x);
        return r < 0 ? r : read_limits(&x, least, most);
}

int h3_picture_rules_read(const H3File *files, size_t n_files, H3PictureRules *ret, Fault *f) {
        H3PictureRules rules = h3_picture_published;
        int r = 0;

        for (size_t i = 0; r >= 0 && i < n_files; i++)
                if (strcmp(files[i].name, "preprocessor_config.json") == 0)
                        r = read_file(files + i, &rules.image_min, &rules.image_max, f);
                else if (strcmp(files[i].name, "video_preprocessor_config.json") == 0)
                        r = read_file(files + i, &rules.video_min, &rules.video_max, f);
        if (r < 0)
                return r;
        *ret = rules;
        return 0;
}
