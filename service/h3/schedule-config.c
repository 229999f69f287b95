/* SPDX-License-Identifier: Apache-2.0 */
/* scheduler_config.json and audio_scheduler_config.json: the shifts that a checkpoint was made for. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "service/h3/config-json.h"
#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"

static int fail(const H3File *file, const char *what, Fault *f) {
        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                "'%.100s': %s. Use the file of this model's folder %s, or leave it out for the released model's shift.", file->name, what,
                strcmp(file->name, H3_SCHEDULER_AUDIO) == 0 ? "audio_scheduler" : "scheduler");
}

/* What is absent or null is as it was released. */
static int read_shift(const H3File *file, float *ret, Fault *f) {
        CLEANUP(config_json_unref) json_t *root = NULL;
        const json_t *v;
        char what[300];
        float narrow;
        int r;

        r = config_json_load(file, &root, what);
        if (r == -EBADMSG)
                return fail(file, what, f);
        if (r < 0)
                return r;

        v = json_object_get(root, "shift");
        if (!v || json_is_null(v))
                return 0;
        narrow = (float) json_number_value(v);
        if (!json_is_number(v) || !isfinite(narrow) || !(narrow > 0.0f))
                return fail(file, "shift is not a number above 0", f);
        *ret = narrow;
        return 0;
}

int h3_shifts_read(const H3File *files, size_t n_files, float *ret_video, float *ret_audio, Fault *f) {
        float video = 0, audio = 0;
        int r = 0;

        for (size_t i = 0; r >= 0 && i < n_files; i++)
                if (strcmp(files[i].name, H3_SCHEDULER_VIDEO) == 0)
                        r = read_shift(files + i, &video, f);
                else if (strcmp(files[i].name, H3_SCHEDULER_AUDIO) == 0)
                        r = read_shift(files + i, &audio, f);
        if (r < 0)
                return r;
        *ret_video = video;
        *ret_audio = audio;
        return 0;
}
