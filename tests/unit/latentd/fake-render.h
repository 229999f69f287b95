/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Renders over a worker that the test plays: a session with all parts of a pipeline, and a small film. */

#include "service/latentd/render.h"
#include "tests/unit/latentd/fake-bus.h"

#define SIDE 32
#define FRAME (SIDE * SIDE * 3)
#define FILM_ARENA (UINT64_C(1) << 20)
#define STEPS 3

static inline Session *fake_pipeline(Fake *f, uint64_t output_bytes) {
        const SessionOptions o = { .model = f->model,
                .conditioner = f->conditioner,
                .video_vae = f->vae,
                .audio_vae = f->audio_vae,
                .input_bytes = ARENA_BYTES,
                .output_bytes = output_bytes,
                .job_class = "normal" };

        return fake_session_with(f, &o, 1);
}

/* Of a prompt, into an output arena of FILM_ARENA. */
static inline RenderOptions fake_film(uint32_t frames) {
        return (RenderOptions){
                .prompt = { .offset = 1, .size = FAKE_TEXT, .dtype = ST_U8, .n_dims = 1, .shape = { FAKE_TEXT } },
                .width = SIDE,
                .height = SIDE,
                .frames = frames,
                .sample = { .kind = WIRE_JOB_SAMPLE, .steps = STEPS, .schedule = WIRE_SCHEDULE_SIMPLE, .noise = WIRE_NOISE_COMFY,
                        .seed = 7 },
                .frame_type = ST_U8,
                .output_size = FILM_ARENA,
                .file = -EBADF,
                .sheet = -EBADF,
                .format = _MEDIA_FORMAT_MAX,
        };
}

static inline Job *fake_render(Fake *f, Session *s, const RenderOptions *o) {
        Fault fault = {};
        Job *j;

        if (render_new(s, f->peer, o, &j, &fault) != 0)
                fail_msg("%s", fault.text);
        return j;
}
