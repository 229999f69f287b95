/* SPDX-License-Identifier: Apache-2.0 */
/* A Render over a worker that the test plays: its phases and where each reads and writes, failures, deaths and cancels in each, what
 * is left behind. */
#include <math.h>

#include "service/latentd/quota.h"
#include "service/latentd/model.h"
#include "service/latentd/render-internal.h"
#include "tests/unit/latentd/fake-render.h"

static const WireJobKind kinds[] = { WIRE_JOB_ENCODE, WIRE_JOB_SAMPLE, WIRE_JOB_DECODE, WIRE_JOB_DECODE };

/* All of it is gone but the session that the client has. */
static void assert_clean(Fake *f, const Session *s, const Job *j) {
        const Job *other;

        RUN_UNTIL(f, TAILQ_FIRST(&f->m->sessions) == s && !TAILQ_NEXT(s, entry) && TAILQ_EMPTY(&f->m->unfinished));
        RUN_UNTIL(f, f->m->arena_bytes == ARENA_BYTES + FILM_ARENA);
        TAILQ_FOREACH(other, &f->m->jobs, entry)
                assert_ptr_equal(other, j);
        assert_int_equal(s->n_busy, 0);
        assert_int_equal(f->model->n_users, 1);
        assert_int_equal(f->conditioner->n_users, 1);
        assert_int_equal(f->vae->n_users, 1);
        assert_int_equal(f->audio_vae->n_users, 1);
}

static const char *bytes_of(const Session *s, const Job *j, uint32_t i, const char *want, WireTensor *ret) {
        char name[32];

        assert_int_equal(job_result_tensor(j, i, name, ret), 0);
        assert_string_equal(name, want);
        assert_true(ret->offset + ret->size <= FILM_ARENA);
        return (const char *) s->output_map + ret->offset;
}

static void assert_film(const Session *s, const Job *j, uint32_t frames) {
        WireTensor t;
        const char *p = bytes_of(s, j, 0, "frames", &t);

        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(t.shape[0], frames);
        assert_int_equal(t.size, (uint64_t) frames * FRAME);
        for (uint32_t i = 0; i < frames; i++)
                for (uint32_t k = 0; k < FRAME; k += FRAME - 1)
                        assert_int_equal(p[(size_t) i * FRAME + k], (char) i);
        (void) bytes_of(s, j, 1, "sound", &t);
        assert_int_equal(t.shape[1], 800 * canvas_audio_tokens(frames));
}

/* ---- running ---- */

static WireJobOpen opened[16];
static unsigned n_opened;

static bool record(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_JOB_OPEN && n_opened < ELEMENTSOF(opened))
                opened[n_opened++] = m->job_open;
        return false;
}

static void phases_come_in_order_and_read_what_was_made(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(39);
        const uint64_t models[] = { f->conditioner->id, f->model->id, f->audio_vae->id, f->vae->id };
        Job *j;

        f->hook = record;
        n_opened = 0;
        j = fake_render(f, s, &o);
        assert_string_equal(job_kind_to_string(j->kind), "render");
        RUN_UNTIL(f, job_is_finished(j));
        assert_film(s, j, 39);
        assert_int_equal(j->fraction, 1);
        assert_int_equal(n_opened, 5);
        assert_true(opened[0].flags & WIRE_JOB_PLAN_ONLY);
        for (unsigned i = 0; i < 4; i++) {
                assert_int_equal(opened[i + 1].kind, kinds[i]);
                assert_int_equal(opened[i + 1].model, models[i]);
        }
        assert_int_equal(opened[1].text.offset, 1);
        assert_int_equal(opened[2].text.shape[0], FAKE_TEXT); /* tokens */
        assert_int_equal(opened[2].seed, 7);
        assert_int_equal(opened[2].video.shape[1], canvas_video_tokens(39));
        assert_int_equal(opened[3].audio.n_dims, 3);
        assert_int_equal(opened[4].video.size, opened[2].video.size);
        assert_int_equal(f->count[WIRE_STEP], 1 + STEPS + 1 + 2);
        assert_clean(f, s, j);
}

/* What the worker's steps make of zeros. */
static void kept_latents_are_those_that_are_decoded(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        float want = 0;
        WireTensor t;
        const float *x;
        Job *j;

        o.keep_latents = true;
        o.output_offset = 4096;
        o.output_size -= 4096;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, job_is_finished(j));
        for (int i = 0; i < STEPS; i++)
                want = want / 2 + 1;
        for (uint32_t i = 2; i < 4; i++) {
                x = (const float *) (const void *) bytes_of(s, j, i, i == 2 ? "video" : "audio", &t);
                assert_true(t.offset >= 4096);
                for (uint64_t k = 0; k < t.size / 4; k++)
                        assert_true(fabsf(x[k] - want) < 1e-6f);
        }
        assert_film(s, j, 22);
        assert_clean(f, s, j);
}

static void ring_waits_for_its_reader(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(56);
        Fault fault = {};
        Job *j;

        o.ring_frames = 22;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, j->frames_ready == 17);
        RUN_UNTIL(f, strcmp(j->phase, "frames-wait") == 0);
        assert_true(job_has_result(j));
        assert_int_equal(job_release_frames(j, 18, &fault), -EINVAL);
        assert_int_equal(job_release_frames(j, 17, &fault), 0);
        RUN_UNTIL(f, j->frames_ready == 34);
        assert_int_equal(job_release_frames(j, 34, &fault), 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_clean(f, s, j);
}

static unsigned phase; /* the one that it happens in */
static unsigned seen, deaths;

static double fractions[256];
static unsigned n_fractions;
static Job *watched;

static bool watch(Fake *f, const WireMessage *m) {
        if (watched && n_fractions < ELEMENTSOF(fractions))
                fractions[n_fractions++] = watched->fraction;
        return false;
}

static unsigned n_measured(const Fake *f) {
        unsigned n = 0;

        for (size_t i = 0; i < PACE_ENTRIES; i++)
                n += f->m->paces.entries[i].usec > 0;
        return n;
}

/* Measured phases weigh what they took. */
static void fraction_never_falls(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(39);

        f->hook = watch;
        for (int i = 0; i < 2; i++) {
                n_fractions = 0;
                watched = fake_render(f, s, &o);
                RUN_UNTIL(f, job_is_finished(watched));
                for (unsigned k = 1; k < n_fractions; k++)
                        assert_true(fractions[k] >= fractions[k - 1] && fractions[k] <= 1);
                assert_true(n_fractions > 5);
                assert_int_equal(n_measured(f), 5); /* four phases, and a step of sampling by itself */
        }
        watched = NULL;
}

static Job *render_that_is_done(Fake *f, Session *s, const RenderOptions *o) {
        Job *j = fake_render(f, s, o);

        RUN_UNTIL(f, job_is_finished(j));
        return j;
}

/* What sampling is taken to last: with nothing measured by its work alone. */
static double units_of(Fake *f, Session *s, const RenderOptions *o) {
        PaceTable kept = f->m->paces;
        Job *j;

        f->m->paces = (PaceTable){};
        j = fake_render(f, s, o);
        RUN_UNTIL(f, j->render->stage >= RENDER_STAGE_MEMORY);
        job_cancel(j);
        f->m->paces = kept;
        return j->render->weights[RENDER_SAMPLE];
}

/* Rows meet each other: four times the rows are more than four times the work. Steps count once each, and for nothing else. */
static void weights_follow_the_shape(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions small = fake_film(22), wide = fake_film(22), longer = fake_film(22);
        const Render *a, *b, *c;
        double ratio;

        f->model->info.hidden = 1u << 20; /* attention is most of it */
        wide.width = wide.height = 2 * SIDE;
        longer.sample.steps = 2 * STEPS;
        a = render_that_is_done(f, s, &small)->render;
        b = render_that_is_done(f, s, &wide)->render;
        c = render_that_is_done(f, s, &longer)->render;
        assert_true(b->sizes.rows > a->sizes.rows && a->sizes.rows == c->sizes.rows);
        assert_true(c->weights[RENDER_SAMPLE] > 0);
        ratio = units_of(f, s, &wide) / units_of(f, s, &small) / (double) b->sizes.rows * (double) a->sizes.rows;
        assert_true(ratio > 0.9 * (double) b->sizes.rows / (double) a->sizes.rows);
        assert_true(fabs(units_of(f, s, &longer) / units_of(f, s, &small) - 2) < 1e-9);
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++)
                assert_true(c->measured[p]);
        assert_false(a->measured[RENDER_SAMPLE]);
}

/* ---- previews ---- */

static void previews_are_told_of_and_have_a_place(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        WireTensor t, sound;
        uint32_t i = 0;
        char name[32];
        Job *j;

        o.sample.preview_steps = 2;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, j->preview_step == 2);
        assert_true(job_has_result(j));
        (void) bytes_of(s, j, 0, "preview", &t); /* frames are not known yet */
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->preview_step, 2);
        assert_film(s, j, 22);
        (void) bytes_of(s, j, 1, "sound", &sound);
        (void) bytes_of(s, j, 2, "preview", &t);
        assert_int_equal(job_result_tensor(j, 3, name, &t), -ENOENT);
        while (job_result_tensor(j, i++, name, &t) == 0)
                assert_true(t.size > 0);
        assert_clean(f, s, j);
}

/* The film has the room, and is the same. */
static void previews_without_room_are_left_out(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        uint64_t bytes;
        Fault fault = {};
        char name[32];
        WireTensor t;
        Job *j;

        assert_int_equal(render_check_output(&o, &bytes, &fault), 0);
        o.output_size = bytes;
        o.sample.preview_steps = 1;
        j = render_that_is_done(f, s, &o);
        assert_film(s, j, 22);
        assert_int_equal(job_result_tensor(j, 2, name, &t), -ENOENT);
        assert_int_equal(j->preview_step, 0);
        assert_clean(f, s, j);
}

static unsigned lie;

/* The first answer for a SAMPLE has a preview that cannot be. */
static bool misplace(Fake *f, const WireMessage *m) {
        WireMessage ready;
        uint32_t committed;
        WireTensor *t = &ready.job_ready.outputs[0].tensor;
        FakeJob *j;

        if (m->header.type != WIRE_JOB_OPEN || m->job_open.kind != WIRE_JOB_SAMPLE || seen++ > 0)
                return false;

        j = fake_open(f, &m->job_open, &committed);
        fake_job_ready(f, j, committed, &ready);
        switch (lie) {
        case 0:
                t->offset = ready.job_ready.slot_offset + 64;
                break;
        case 1:
                t->offset = m->job_open.output_offset + m->job_open.output_size - t->size + 8;
                break;
        case 2:
                t->shape[1]++;
                break;
        case 3:
                t->dtype = ST_F32;
                break;
        default:
                ready.job_ready.outputs[0].name = WIRE_OUTPUT_SOUND;
        }
        fake_send(f, &ready);
        return true;
}

static void previews_elsewhere_drop_the_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);

        o.sample.preview_steps = 1;
        (void) render_that_is_done(f, s, &o); /* the first worker is there */
        f->hook = misplace;
        for (lie = 0; lie < 5; lie++) {
                unsigned starts = f->n_starts;
                Job *j;

                seen = 0;
                j = render_that_is_done(f, s, &o);
                assert_int_equal(f->n_starts, starts + 1);
                assert_film(s, j, 22);
        }
}

/* ---- deferred models ---- */

/* A step of the phase. */
static bool is_phase(Fake *f, const WireMessage *m) {
        const FakeJob *j;

        if (m->header.type != WIRE_STEP)
                return false;
        j = fake_job(f, m->header.job);
        if (j->open.kind != kinds[phase])
                return false;

        return phase < 2 || (j->open.video.n_dims > 0) == (phase == 3);
}

/* Silent at the phase's step until it is cancelled. */
static bool hold(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
                return true;
        }
        if (!is_phase(f, m))
                return false;
        seen++;
        return true;
}

/* Those that load take their turns; those that do not wait for nobody. */
static void renders_that_load_wait_for_each_other(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22), behind = fake_film(22);
        Job *a, *b, *c;

        o.output_size = behind.output_size = behind.output_offset = FILM_ARENA / 2;
        f->vae->defer = true;
        a = fake_render(f, s, &o);
        b = fake_render(f, s, &behind);
        assert_false(a->render->waiting);
        assert_true(b->render->waiting);
        job_cancel(b);
        c = fake_render(f, s, &behind);
        assert_true(c->render->waiting);
        RUN_UNTIL(f, a->frames_ready == 22);
        assert_true(c->render->waiting);
        RUN_UNTIL(f, job_is_finished(c));
        assert_int_equal(a->state, JOB_DONE);
        assert_int_equal(b->state, JOB_CANCELLED);
        assert_int_equal(c->state, JOB_DONE);
        assert_int_equal(f->vae->n_wanted, 0);
        f->vae->defer = false;
        a = fake_render(f, s, &o);
        b = fake_render(f, s, &behind);
        assert_false(a->render->waiting || b->render->waiting);
        RUN_UNTIL(f, job_is_finished(a) && job_is_finished(b));
}

static void weights_rest_only_when_nobody_wants_them(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Model *m = f->vae;
        Job *j;

        m->keep = false;
        assert_false(model_can_rest(m)); /* it would not come back */
        m->defer = true;
        assert_true(model_can_rest(m)); /* even with a session */
        m->keep = true;
        assert_false(model_can_rest(m));
        m->keep = false;
        model_wanted_add(m);
        assert_false(model_can_rest(m));
        model_wanted_remove(m);
        assert_true(model_can_rest(m));

        f->hook = hold;
        phase = 3;
        seen = 0;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0);
        assert_false(model_can_rest(m));
        job_cancel(j);
        assert_int_equal(m->n_wanted, 0);
        assert_false(model_can_rest(m)); /* the worker has not let go of it yet */
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->unfinished));
        assert_true(model_can_rest(m));
        m->defer = false;
        m->keep = true;
}

/* A worker's death takes its phase a step back, and not the bar. */
static void fraction_stays_when_a_phase_goes_back(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        double before;
        Job *j;

        f->hook = hold;
        phase = 1;
        seen = 0;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0);
        j->render->child->fraction = 0.9;
        render_on_progress(j->render, j->render->child);
        before = j->fraction;
        assert_true(before > 0 && before < 1);
        j->render->child->fraction = 0.2;
        render_on_progress(j->render, j->render->child);
        assert_true(j->fraction == before);
        j->render->child->fraction = 0.95;
        render_on_progress(j->render, j->render->child);
        assert_true(j->fraction > before);
        job_cancel(j);
}

/* ---- failures ---- */


static bool refuse(Fake *f, const WireMessage *m) {
        if (!is_phase(f, m))
                return false;
        fake_error(f, m->header.job, m->header.step, FAULT_INVALID_TENSOR);
        return true;
}

static void failure_of_a_phase_is_the_job_s(void **state) {
        static const char *const names[] = { "\"encode\"", "\"sample\"", "\"decode-sound\"", "\"decode\"" };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);

        f->hook = refuse;
        o.keep_latents = true;
        for (phase = 0; phase < 4; phase++) {
                Job *j = fake_render(f, s, &o);
                WireTensor t;
                char name[32];

                RUN_UNTIL(f, job_is_finished(j));
                assert_int_equal(j->state, JOB_FAILED);
                assert_string_equal(j->fault.name, FAULT_INVALID_TENSOR);
                assert_non_null(strstr(j->fault.text, names[phase]));
                assert_non_null(strstr(j->fault.text, "The fake worker says no."));
                assert_int_equal(job_has_result(j), phase > 1); /* what took longest is not lost */
                if (job_has_result(j)) {
                        assert_int_equal(job_result_tensor(j, 0, name, &t), 0);
                        assert_string_equal(name, "video");
                        assert_int_equal(job_result_tensor(j, 1, name, &t), 0);
                        assert_string_equal(name, "audio");
                        assert_int_equal(job_result_tensor(j, 2, name, &t), -ENOENT);
                }
                f->peer->n_finished--; /* as if it was forgotten */
                j->owner = NULL;
                f->hook = NULL;
                (void) job_free(j);
                assert_clean(f, s, NULL);
                f->hook = refuse;
        }
}

static bool die(Fake *f, const WireMessage *m) {
        if (!is_phase(f, m) || seen++ >= deaths)
                return false;
        fake_die(f);
        return true;
}

static void death_in_a_phase_costs_a_step(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(39);

        f->hook = die;
        deaths = 1;
        for (phase = 0; phase < 4; phase++) {
                Job *j;

                seen = 0;
                j = fake_render(f, s, &o);
                RUN_UNTIL(f, job_is_finished(j));
                assert_true(seen >= 2);
                assert_film(s, j, 39);
        }
}

static void two_deaths_in_a_step_end_it(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Job *j;

        f->hook = die;
        deaths = 2;
        seen = 0;
        phase = 1;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
        assert_clean(f, s, j);
}

static void cancel_is_answered_at_once_in_each_phase(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);

        for (phase = 0; phase < 4; phase++) {
                Job *j;

                f->hook = hold;
                seen = 0;
                j = fake_render(f, s, &o);
                RUN_UNTIL(f, seen > 0);
                job_cancel(j);
                assert_int_equal(j->state, JOB_CANCELLED);
                RUN_UNTIL(f, TAILQ_EMPTY(&f->m->unfinished));
                RUN_UNTIL(f, f->m->arena_bytes == ARENA_BYTES + FILM_ARENA);
                assert_int_equal(s->n_busy, 0);
        }
        assert_int_equal(f->n_starts, 1); /* no worker had to go for it */
}

static Session *others;
static Job *other;

/* When the render's prompt is encoded, somebody else asks for a step, which takes its time. */
static bool let_other_in(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
                return true;
        }
        if (other && m->header.type == WIRE_STEP && m->header.job == other->id) {
                seen++;
                return true;
        }
        if (!other && is_phase(f, m))
                other = fake_submit(f, others, WIRE_JOB_STEP, 1, 0);
        return false;
}

/* Also behind a job that was cancelled and that the worker is still at. */
static void phase_that_waits_says_so_and_counts(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        uint64_t before;
        Job *j;

        others = fake_session(f, 0);
        other = NULL;
        f->hook = let_other_in;
        phase = 0;
        seen = 0;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0 && j->render->child && j->render->child->kind == JOB_SAMPLE);
        assert_int_equal(j->state, JOB_RUNNING);
        assert_int_equal(j->render->child->state, JOB_QUEUED);
        assert_string_equal(j->phase, "queue");
        before = job_queued_usec(j);
        assert_true(before < clock_usec() - j->created_usec);
        run_for(f, 20000);
        assert_true(job_queued_usec(j) >= before + 20000);

        job_cancel(other);
        RUN_UNTIL(f, job_is_finished(j));
        assert_film(s, j, 22);
        assert_true(j->queued_usec >= before + 20000);
        assert_true(j->queued_usec < clock_usec() - j->created_usec);
        assert_int_equal(job_queued_usec(j), j->queued_usec);
}

static void cancel_before_anything_runs(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Job *j = fake_render(f, s, &o);

        job_cancel(j); /* its plan is queued */
        assert_int_equal(j->state, JOB_CANCELLED);
        assert_clean(f, s, j);
}

static void cancel_while_memory_is_made(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Job *j = fake_render(f, s, &o);

        RUN_UNTIL(f, TAILQ_NEXT(s, entry)); /* its work arena */
        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLED);
        assert_clean(f, s, j);
}

static void closing_the_session_ends_its_renders(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Job *j;

        f->hook = hold;
        phase = 1;
        seen = 0;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0);
        session_close(s);
        assert_int_equal(j->state, JOB_CANCELLED);
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions) && f->m->arena_bytes == 0);
}

static void client_that_leaves_takes_its_renders_along(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);

        f->hook = hold;
        phase = 3;
        seen = 0;
        (void) fake_render(f, s, &o);
        (void) fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0);
        peer_gone(STEAL_PTR(f->peer));
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions) && TAILQ_EMPTY(&f->m->jobs) && f->m->arena_bytes == 0);
}

/* ---- limits ---- */

static void missing_models_are_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 1);
        RenderOptions o = fake_film(22);
        Fault fault = {};
        Job *j;

        assert_int_equal(render_new(s, f->peer, &o, &j, &fault), -EINVAL);
        assert_non_null(strstr(fault.text, "conditioner"));
        assert_true(TAILQ_EMPTY(&f->m->jobs));
}

static void small_output_is_refused_with_the_numbers(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        uint64_t bytes;
        Fault fault = {};
        Job *j;

        assert_int_equal(render_check_output(&o, &bytes, &fault), 0);
        assert_true(bytes > 22 * FRAME && bytes < 22 * FRAME + (UINT64_C(300) << 10));
        o.output_size = bytes - 1;
        assert_int_equal(render_new(s, f->peer, &o, &j, &fault), -ENOSPC);
        assert_string_equal(fault.name, FAULT_DOES_NOT_FIT);
        o.output_size = bytes; /* and so much is enough */
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, job_is_finished(j));
        assert_film(s, j, 22);
}

/* Before anything is begun, with the numbers. */
static void what_does_not_fit_is_refused_at_once(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Fault fault = {};
        char need[32], have[32];
        Job *j;

        f->m->config->cache_ram_reserve = 0;
        f->m->config->cache_ram_max = manager_used_bytes(f->m) + 4096; /* what lies between phases is more */
        assert_int_equal(render_new(s, f->peer, &o, &j, &fault), -ENOMEM);
        assert_string_equal(fault.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(fault.text, "can be had (limit: CacheRamMax)"));
        assert_int_equal(sscanf(strstr(fault.text, " needs "), " needs %31s bytes", need), 1);
        assert_int_equal(sscanf(strstr(fault.text, " phases), "), " phases), %31s can", have), 1);
        assert_true(strtoull(need, NULL, 10) > strtoull(have, NULL, 10) && strtoull(have, NULL, 10) >= 4096);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 0);
        assert_clean(f, s, NULL);
        f->m->config->cache_ram_max = 0;
}

static void memory_between_phases_counts(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Job *j;

        f->m->config->arena_bytes_per_user = ARENA_BYTES + FILM_ARENA + 100; /* not a page more */
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_LIMIT);
        assert_non_null(strstr(j->fault.text, "ArenaBytesPerUser="));
        assert_clean(f, s, j);
}

static void hidden_jobs_count_for_no_limit(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = fake_film(22);
        Fault fault = {};
        Job *j, *unused;

        f->m->config->jobs_per_user = 1;
        f->m->config->sessions_per_user = 1;
        f->hook = hold;
        phase = 2;
        seen = 0;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, seen > 0);
        assert_int_equal(render_new(s, f->peer, &o, &unused, &fault), -EDQUOT);
        job_cancel(j);
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->unfinished));
        f->hook = NULL;
        j = fake_render(f, s, &o);
        RUN_UNTIL(f, job_is_finished(j));
        assert_film(s, j, 22);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(phases_come_in_order_and_read_what_was_made, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(kept_latents_are_those_that_are_decoded, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(ring_waits_for_its_reader, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(fraction_never_falls, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(weights_follow_the_shape, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(previews_are_told_of_and_have_a_place, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(previews_without_room_are_left_out, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(previews_elsewhere_drop_the_worker, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(renders_that_load_wait_for_each_other, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(weights_rest_only_when_nobody_wants_them, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(fraction_stays_when_a_phase_goes_back, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(what_does_not_fit_is_refused_at_once, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(failure_of_a_phase_is_the_job_s, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(death_in_a_phase_costs_a_step, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(two_deaths_in_a_step_end_it, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(cancel_is_answered_at_once_in_each_phase, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(phase_that_waits_says_so_and_counts, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(cancel_before_anything_runs, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(cancel_while_memory_is_made, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(closing_the_session_ends_its_renders, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(client_that_leaves_takes_its_renders_along, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(missing_models_are_named, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(small_output_is_refused_with_the_numbers, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(memory_between_phases_counts, fake_setup, fake_teardown),
                cmocka_unit_test_setup_teardown(hidden_jobs_count_for_no_limit, fake_setup, fake_teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
