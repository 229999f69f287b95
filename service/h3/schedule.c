/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/schedule.h"

#include <errno.h>
#include <math.h>

/* Both published schedules are f32 tensor arithmetic: every operation below is one rounding, there and here.
 * With shifts below 1 these roundings can end above 1, or at infinity; no sigma lies there. */

static float shifted(float shift, float b) {
        float above = (float) ((double) shift - 1.0);

        return fminf((shift * b) / (1.0f + above * b), 1.0f);
}

/* ComfyUI's table: entry i of 1000 is the shifted base value (i / 1000 * 1000) / 1000, in f32. */
static float simple_entry(float shift, uint32_t i) {
        float b = (float) i / 1000.0f * 1000.0f / 1000.0f;

        return shifted(shift, b);
}

/* linspace(1, 0, n + 1) as torch computes it in f32: from either end towards the middle, multiply and add
 * fused. */
static float reference_base(uint32_t n, uint32_t i) {
        float step = -1.0f / (float) n;

        if (i < (n + 1) / 2)
                return fmaf(step, (float) i, 1.0f);
        return 0.0f - step * (float) (n - i);
}

static uint32_t schedule_simple(uint32_t n, float shift, float *ret) {
        double stride = 1000.0 / (double) n;

        for (uint32_t i = 0; i < n; i++)
                ret[i] = simple_entry(shift, 1000 - (uint32_t) ((double) i * stride));
        ret[n] = 0.0f;
        return n;
}

static uint32_t schedule_reference(uint32_t n, float shift, float *ret) {
        uint32_t points = 0;

        for (uint32_t i = 0; i <= n; i++) {
                float sigma = shifted(shift, reference_base(n, i));

                if (points == 0 || sigma != ret[points - 1])
                        ret[points++] = sigma;
        }
        return points - 1;
}

int h3_schedule(H3ScheduleKind kind, uint32_t evaluations, float shift, float *ret_sigmas, uint32_t *ret_n,
        Fault *f) {
        if (evaluations < 1 || evaluations > H3_STEPS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%u steps were asked for; give 1 to %u.", evaluations, H3_STEPS_MAX);
        if (!isfinite(shift) || shift <= 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The schedule shift is %g; give a finite number above 0, such as 12.",
                        (double) shift);

        switch (kind) {
        case H3_SCHEDULE_SIMPLE:
                *ret_n = schedule_simple(evaluations, shift, ret_sigmas);
                return 0;
        case H3_SCHEDULE_REFERENCE:
                *ret_n = schedule_reference(evaluations, shift, ret_sigmas);
                return 0;
        }
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "There is no schedule number %d; give simple or reference.", (int) kind);
}

void h3_schedule_audio(float shift_video, float shift_audio, const float *sigmas_video, uint64_t n,
        float *ret_sigmas_audio) {
        double video = (double) shift_video, audio = (double) shift_audio;

        for (uint64_t i = 0; i < n; i++) {
                double sigma = (double) sigmas_video[i], base = sigma / (video + sigma * (1.0 - video));

                ret_sigmas_audio[i] = (float) (audio * base / (1.0 + (audio - 1.0) * base));
        }
}

int h3_schedule_check(const char *what, const float *sigmas, uint64_t n, Fault *f) {
        if (n < 2 || n > H3_STEPS_MAX + 1)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%s has %llu values; give 2 to %u (one more than steps).", what,
                        (unsigned long long) n, H3_STEPS_MAX + 1);

        for (uint64_t i = 0; i < n; i++) {
                if (!isfinite(sigmas[i]) || sigmas[i] < 0 || sigmas[i] > 1)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "%s[%llu] is %g; every sigma lies in 0 to 1.", what, (unsigned long long) i,
                                (double) sigmas[i]);
                if (i > 0 && !(sigmas[i] < sigmas[i - 1]))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "%s[%llu] is %g after %g; sigmas must get smaller with every step.", what,
                                (unsigned long long) i, (double) sigmas[i], (double) sigmas[i - 1]);
        }
        return 0;
}
