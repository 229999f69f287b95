/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenize, Encode, Decode and EncodeMedia as jobs: what a worker may answer, frames and their reader, deaths. */
#include "tests/unit/latentd/fake-bus.h"

static FakeBus bus;

/* ---- running ---- */

static void coding_job_runs_without_a_plan(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 65);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 1);
        Job *j = fake_submit_request(f, s, &q);
        const int32_t *ids;
        WireTensor t;
        char name[32];

        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_string_equal(job_kind_to_string(j->kind), "tokenize");
        assert_string_equal(j->phase, "tokenize");
        assert_int_equal(f->count[WIRE_PLAN], 0);
        assert_int_equal(f->count[WIRE_STEP], 1);
        assert_int_equal(job_result_tensor(j, 0, name, &t), 0);
        assert_string_equal(name, "ids");
        assert_int_equal(t.dtype, ST_I32);
        assert_int_equal(t.shape[0], FAKE_TEXT);
        assert_int_equal(job_result_tensor(j, 1, name, &t), -ENOENT);
        ids = (const int32_t *) (const void *) ((const char *) s->output_map + t.offset);
        assert_int_equal(ids[0], 0); /* the second byte of 65.0f */
        assert_int_equal(ids[1], (char) 0x82);
}

static bool say_cached(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type != WIRE_STEP)
                return false;
        fake_compute(f, fake_job(f, m->header.job), 0);
        wire_init(&reply, WIRE_STEP_DONE, f->epoch, m->header.job, 0);
        reply.step_done.cached = 1;
        fake_send(f, &reply);
        return true;
}

static void encode_has_its_results_by_name_and_says_that_they_were_there(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 1);
        WireJobOpen q = fake_coding(WIRE_JOB_ENCODE, 0);
        static const char *const names[] = { "text", "text_tags", "ids" };
        WireTensor t;
        char name[32];
        Job *j;

        f->hook = say_cached;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_true(j->cached);
        for (uint32_t i = 0; i < 3; i++) {
                assert_int_equal(job_result_tensor(j, i, name, &t), 0);
                assert_string_equal(name, names[i]);
        }
}

static void cached_of_another_kind_is_a_lie(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 1);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 0);
        Job *j;

        f->hook = say_cached;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_true(f->conn < 0); /* ended; what it had committed counts */
        assert_int_equal(j->state, JOB_DONE);
        assert_false(j->cached);
}

static void sound_and_media_run(void **state) {
        Fake *f = *state;
        Session *v = fake_session_on(f, f->vae, 0), *a = fake_session_on(f, f->audio_vae, 0);
        WireJobOpen decode = { .kind = WIRE_JOB_DECODE, .output_size = ARENA_BYTES,
                .audio = { .size = 256, .dtype = ST_F32, .n_dims = 3, .shape = { 32, 2, 1 } } };
        WireJobOpen sound = { .kind = WIRE_JOB_ENCODE_MEDIA, .output_offset = 32768, .output_size = 1024,
                .audio = { .size = 801 * 8, .dtype = ST_F32, .n_dims = 2, .shape = { 2, 801 } } };
        WireJobOpen frames = { .kind = WIRE_JOB_ENCODE_MEDIA, .output_size = ARENA_BYTES,
                .video = { .size = 40 * FAKE_FRAME, .dtype = ST_U8, .n_dims = 4, .shape = { 40, 16, 16, 3 } } };
        const char *want[] = { "sound", "audio", "video" };
        Job *jobs[3];

        sound.output_size = 2048; /* 192 + 2 x 256 */
        decode.output_size = 32768;
        jobs[0] = fake_submit_request(f, a, &decode);
        jobs[1] = fake_submit_request(f, a, &sound);
        jobs[2] = fake_submit_request(f, v, &frames);
        for (unsigned i = 0; i < 3; i++) {
                WireTensor t;
                char name[32];

                RUN_UNTIL(f, job_is_finished(jobs[i]));
                assert_int_equal(jobs[i]->state, JOB_DONE);
                assert_int_equal(job_result_tensor(jobs[i], 0, name, &t), 0);
                assert_string_equal(name, want[i]);
        }
        assert_int_equal(jobs[2]->steps, 3); /* clips */
        assert_int_equal(jobs[2]->frames_ready, 0);
}

/* ---- lies ---- */

typedef struct Lie {
        void (*tell)(WireJobReady *y);
        const char *what; /* of the reason */
} Lie;

static void (*lie)(WireJobReady *y);

/* Lies once, then works. */
static bool lie_once(Fake *f, const WireMessage *m) {
        WireMessage reply;
        uint32_t committed;
        FakeJob *j;

        if (m->header.type != WIRE_JOB_OPEN || f->hook_count++ > 0)
                return false;
        j = fake_open(f, &m->job_open, &committed);
        fake_job_ready(f, j, committed, &reply);
        lie(&reply.job_ready);
        fake_send(f, &reply);
        return true;
}

#define LIE(name, ...)                                                                                                \
        static void name(WireJobReady *y) {                                                                          \
                __VA_ARGS__;                                                                                         \
        }

LIE(no_rows, y->rows = 0)
LIE(no_blocks, y->blocks = 0)
LIE(many_blocks, y->blocks = 5000)
LIE(two_steps, y->steps = 2)
LIE(no_steps, y->steps = 0)
LIE(million_steps, y->steps = (1u << 20) + 1)
LIE(committed, y->committed = 1)
LIE(no_output, y->n_outputs = 0)
LIE(many_outputs, y->n_outputs = UINT32_MAX)
LIE(other_name, y->outputs[0].name = WIRE_OUTPUT_SOUND)
LIE(no_name, y->outputs[0].name = 1000)
LIE(same_name, y->outputs[1] = y->outputs[2])
LIE(other_type, y->outputs[0].tensor.dtype = ST_F16)
LIE(other_size, y->outputs[0].tensor.size -= 4)
LIE(other_dims, y->outputs[0].tensor.n_dims = 5)
LIE(other_shape, y->outputs[0].tensor.shape[0]++)
LIE(other_columns, y->outputs[0].tensor.shape[1]++)
LIE(unaligned, y->outputs[0].tensor.offset++)
LIE(before_range, y->outputs[0].tensor.offset = 0)
LIE(behind_used, y->output_used -= 64)
LIE(behind_range, y->outputs[0].tensor.offset = 40000; y->output_used = 60000)
LIE(far_away, y->outputs[0].tensor.offset = UINT64_MAX - 63)
LIE(over_commit, y->outputs[0].tensor.offset = y->commit_offset)
LIE(over_slots, y->outputs[0].tensor.offset = y->slot_offset + 64)
LIE(over_other, y->outputs[1].tensor.offset = y->outputs[0].tensor.offset)
LIE(commit_unaligned, y->commit_offset += 4)
LIE(commit_outside, y->commit_offset -= 64)
LIE(commit_far, y->commit_offset = UINT64_MAX - 7)
LIE(slots_over_commit, y->slot_offset = y->commit_offset)
LIE(one_slot, y->n_slots = 1)
LIE(slots_here, y->n_slots = 2; y->slot_offset = y->commit_offset + 64; y->slot_stride = 64)
LIE(slots_huge, y->slot_stride = UINT64_C(1) << 63)
LIE(slots_unaligned, y->slot_offset += 8)
LIE(sampler_results, y->video.n_dims = 1; y->video.size = 4)
LIE(frames_here, y->frames = y->ring_frames = y->step_frames = 1)
LIE(frames_none, y->frames = 0)
LIE(frames_many, y->frames = 1000)
LIE(step_none, y->step_frames = 0)
LIE(step_huge, y->step_frames = UINT64_MAX)
LIE(ring_small, y->ring_frames--)
LIE(ring_tiny, y->ring_frames = 1; y->outputs[0].tensor.shape[0] = 1; y->outputs[0].tensor.size = FAKE_FRAME)
LIE(frames_done, y->frames_done = 17)
LIE(memory, y->memory_bytes = UINT64_MAX)

static void expect_lie(Fake *f, Session *s, WireJobOpen q, void (*tell)(WireJobReady *y)) {
        unsigned starts = f->n_starts;
        Job *j;

        f->hook = lie_once;
        f->hook_count = 0;
        lie = tell;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(f->hook_count, 2); /* the worker was ended, the next one asked again */
        assert_int_equal(f->n_starts, starts + (starts == 0 ? 2 : 1));
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(j->retries_total, 1);
        f->hook = NULL;
}

static void lying_worker_is_dropped(void **state) {
        Fake *f = *state;
        Session *c = fake_session_on(f, f->conditioner, 1), *v = fake_session_on(f, f->vae, 1);
        static void (*const tokenize[])(WireJobReady *y) = { no_blocks, many_blocks, two_steps, no_steps, committed, no_output,
                many_outputs, other_name, no_name, other_type, other_size, other_dims, other_shape, unaligned, before_range,
                behind_used, behind_range, far_away, over_commit, commit_unaligned, commit_outside, commit_far, one_slot,
                slots_here, sampler_results, frames_here, frames_done, memory };
        static void (*const encode[])(WireJobReady *y) = { no_rows, same_name, other_columns, over_other };
        static void (*const decode[])(WireJobReady *y) = { no_rows, no_steps, million_steps, over_slots, slots_over_commit, one_slot,
                slots_huge, slots_unaligned, frames_none, frames_many, step_none, step_huge, ring_small, ring_tiny, frames_done,
                other_shape, other_columns };

        for (size_t i = 0; i < ELEMENTSOF(tokenize); i++)
                expect_lie(f, c, fake_coding(WIRE_JOB_TOKENIZE, 1), tokenize[i]);
        for (size_t i = 0; i < ELEMENTSOF(encode); i++)
                expect_lie(f, c, fake_coding(WIRE_JOB_ENCODE, 1), encode[i]);
        for (size_t i = 0; i < ELEMENTSOF(decode); i++)
                expect_lie(f, v, fake_decode(2, 0), decode[i]);
}

/* frames of STEP_DONE of step 1 of 3; so far 17. */
static uint64_t said;

static bool say_frames(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 2, FAULT_CANCELLED);
                return true;
        }
        if (m->header.type == WIRE_STEP && m->header.step == 2 && said != 34)
                return true; /* what would come next depends on what was said */
        if (m->header.type != WIRE_STEP || m->header.step != 1 || f->hook_count++ > 0)
                return false;
        fake_compute(f, fake_job(f, m->header.job), 1);
        wire_init(&reply, WIRE_STEP_DONE, f->epoch, m->header.job, 1);
        reply.step_done.frames = said;
        fake_send(f, &reply);
        return true;
}

static void impossible_frames_drop_the_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        static const struct {
                uint64_t frames;
                bool good;
        } table[] = { { 16, false }, { 17, true }, { 34, true }, { 39, true }, { 40, false }, { 57, false }, { UINT64_MAX, false } };

        for (size_t i = 0; i < ELEMENTSOF(table); i++) {
                unsigned starts = f->n_starts;
                WireJobOpen q = fake_decode(3, 0);
                Job *j;

                f->hook = say_frames;
                f->hook_count = 0;
                said = table[i].frames;
                j = fake_submit_request(f, s, &q);
                RUN_UNTIL(f, j->step == 2);
                assert_int_equal(j->frames_done, table[i].good ? table[i].frames : 17);
                if (table[i].frames != 34)
                        job_cancel(j);
                RUN_UNTIL(f, job_is_finished(j));
                if (table[i].good) {
                        run_for(f, 1000);
                        assert_true(f->conn >= 0);
                } else
                        RUN_UNTIL(f, f->conn < 0);
                assert_int_equal(j->state, table[i].frames == 34 ? JOB_DONE : JOB_CANCELLED);
                assert_true(f->n_starts >= starts);
        }
}

/* The last step leaves one out. */
static bool forget_a_frame(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type != WIRE_STEP || m->header.step != 1)
                return false;
        fake_compute(f, fake_job(f, m->header.job), 1);
        wire_init(&reply, WIRE_STEP_DONE, f->epoch, m->header.job, 1);
        reply.step_done.frames = FAKE_FRAMES(2) - 1;
        fake_send(f, &reply);
        return true;
}

static void film_that_is_not_complete_drops_the_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(2, 0);
        Job *j;

        f->hook = forget_a_frame;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        RUN_UNTIL(f, f->conn < 0);
        assert_int_equal(j->frames_ready, FAKE_FRAMES(2)); /* it had committed them all */
}

/* ---- frames and their reader ---- */

typedef struct Heard {
        uint64_t frames; /* told of, in order */
        unsigned n, finished;
        bool results; /* Finished came with the film */
} Heard;

static int on_signal(sd_bus_message *m, void *userdata, sd_bus_error *error) {
        Heard *h = userdata;
        uint64_t first, count;

        if (sd_bus_message_is_signal(m, BUS_INTERFACE("Job"), "FramesReady") > 0) {
                assert_true(sd_bus_message_read(m, "tt", &first, &count) > 0);
                assert_int_equal(first, h->frames);
                assert_true(count > 0);
                assert_int_equal(h->finished, 0);
                h->frames += count;
                h->n++;
        } else if (sd_bus_message_is_signal(m, BUS_INTERFACE("Job"), "Finished") > 0)
                h->finished++;
        return 0;
}

static void listen_to(Heard *h) {
        *h = (Heard){};
        assert_true(sd_bus_add_filter(bus.client, NULL, on_signal, h) >= 0);
}

static sd_bus_message *release(Fake *f, const Job *j, uint64_t up_to) {
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m;

        assert_int_equal(job_path(j, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Job"), "ReleaseFrames");
        assert_true(sd_bus_message_append(m, "t", up_to) >= 0);
        return fake_bus_wait(f, &bus, m);
}

#define RELEASE(f, j, up_to) fake_bus_expect(release(f, j, up_to), NULL, NULL)

/* Frame i as it lies in the ring now. */
static void assert_frame(const Session *s, const Job *j, uint64_t i) {
        const uint8_t *p;
        WireTensor t;
        char name[32];

        assert_int_equal(job_result_tensor(j, 0, name, &t), 0);
        assert_string_equal(name, "frames");
        p = (const uint8_t *) s->output_map + t.offset + i % t.shape[0] * FAKE_FRAME;
        for (unsigned k = 0; k < FAKE_FRAME; k++)
                assert_int_equal(p[k], i & 0xff);
}

static void decode_tells_of_frames_in_order(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(3, 0);
        Heard h;
        Job *j;

        listen_to(&h);
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(h.frames, FAKE_FRAMES(3));
        assert_int_equal(h.n, 3);
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(f->count[WIRE_PLAN], 0);
        for (uint64_t i = 0; i < FAKE_FRAMES(3); i++)
                assert_frame(s, j, i);

        /* Nothing is to be released, and saying so is fine. */
        RELEASE(f, j, FAKE_FRAMES(3));
        fake_bus_expect(release(f, j, FAKE_FRAMES(3) + 1), FAULT_INVALID_ARGUMENT, "only 56 were ready");
}

static void ring_waits_for_its_reader(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1), *other = fake_session(f, 100);
        WireJobOpen q = fake_decode(4, 39);
        Job *j = NULL, *next;
        Heard h;

        listen_to(&h);
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, h.frames == 17);
        RUN_UNTIL(f, h.frames == 34); /* 17 + 22 fit beside 17 */
        run_for(f, 30000);
        assert_int_equal(j->step, 2);
        assert_int_equal(j->state, JOB_RUNNING);
        assert_string_equal(j->phase, "frames-wait");
        assert_int_equal(f->count[WIRE_STEP], 2);

        /* Others are not kept by it. */
        next = fake_submit(f, other, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, h.finished);
        assert_result(other, next, 100, 3);
        h.finished = 0;

        RELEASE(f, j, 16); /* 34 + 22 - 39 = 17 */
        run_for(f, 30000);
        assert_int_equal(j->step, 2);
        RELEASE(f, j, 5); /* changes nothing */
        fake_bus_expect(release(f, j, 35), FAULT_INVALID_ARGUMENT, "only 34 were ready");
        RELEASE(f, j, 17);
        RUN_UNTIL(f, h.frames == 51);
        for (uint64_t i = 17; i < 51; i++)
                assert_frame(s, j, i);
        assert_int_equal(j->step, 3);
        RELEASE(f, j, 33); /* 22 are left, 51 + 22 - 39 = 34 */
        run_for(f, 30000);
        assert_int_equal(j->step, 3);
        RELEASE(f, j, 34);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(h.frames, 73);
        for (uint64_t i = 34; i < 73; i++)
                assert_frame(s, j, i);
}

static void result_can_be_read_while_it_runs(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 22);
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m, *reply;
        const char *key;
        Heard h;
        Job *j;

        listen_to(&h);
        j = fake_submit_request(f, s, &q);
        assert_false(job_has_result(j));
        RUN_UNTIL(f, h.frames == 17);
        assert_int_equal(j->state, JOB_RUNNING);
        assert_int_equal(job_path(j, &path), 0);
        m = fake_bus_call(&bus, path, "org.freedesktop.DBus.Properties", "Get");
        assert_true(sd_bus_message_append(m, "ss", BUS_INTERFACE("Job"), "Result") >= 0);
        reply = fake_bus_wait(f, &bus, m);
        assert_false(sd_bus_message_is_method_error(reply, NULL));
        assert_true(sd_bus_message_enter_container(reply, 'v', "a{sv}") > 0);
        assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
        assert_true(sd_bus_message_enter_container(reply, 'e', "sv") > 0);
        assert_true(sd_bus_message_read(reply, "s", &key) > 0);
        assert_string_equal(key, "tensors");
        (void) sd_bus_message_unref(reply);
        for (uint64_t i = 0; i < 17; i++)
                assert_frame(s, j, i);

        job_cancel(j); /* it waits for its reader: at once */
        assert_int_equal(j->state, JOB_CANCELLED);
        assert_false(job_has_result(j));
        RUN_UNTIL(f, f->n_jobs == 0);
}

static void reader_that_goes_away_ends_it(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 22);
        Job *j = fake_submit_request(f, s, &q);

        RUN_UNTIL(f, strcmp(j->phase, "frames-wait") == 0);
        peer_gone(STEAL_PTR(f->peer));
        RUN_UNTIL(f, f->n_jobs == 0 && f->n_arenas == 0);
        assert_true(TAILQ_EMPTY(&f->m->jobs));
}

static void release_is_for_decode(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 1);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 0);
        Job *j = fake_submit_request(f, s, &q);

        fake_bus_expect(release(f, j, 0), FAULT_INVALID_ARGUMENT, "kind \"tokenize\"");
}

static void rings_are_limited_per_user(void **state) {
        Fake *f = *state;
        Session *sessions[RING_JOBS_MAX + 1];
        WireJobOpen q = fake_decode(4, 22);
        Fault fault = {};
        Job *jobs[RING_JOBS_MAX + 1];

        for (unsigned i = 0; i <= RING_JOBS_MAX; i++)
                sessions[i] = fake_session_on(f, f->vae, 1);
        for (unsigned i = 0; i < RING_JOBS_MAX; i++)
                jobs[i] = fake_submit_request(f, sessions[i], &q);
        assert_int_equal(session_submit(sessions[RING_JOBS_MAX], f->peer, &q, &jobs[RING_JOBS_MAX], &fault), -EDQUOT);
        assert_string_equal(fault.name, FAULT_LIMIT);

        /* All of them wait: others run. */
        for (unsigned i = 0; i < RING_JOBS_MAX; i++)
                RUN_UNTIL(f, strcmp(jobs[i]->phase, "frames-wait") == 0);
        q.ring_frames = 0;
        jobs[RING_JOBS_MAX] = fake_submit_request(f, sessions[RING_JOBS_MAX], &q);
        RUN_UNTIL(f, job_is_finished(jobs[RING_JOBS_MAX]));
        assert_int_equal(jobs[RING_JOBS_MAX]->state, JOB_DONE);
}

/* Nothing is lost for a reader that does not read for a while: one message speaks of all. */
static void slow_reader_is_told_of_all_at_once(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 0);
        static char text[65536];
        uint64_t queued = 0;
        Heard h;
        Job *j;

        listen_to(&h);
        assert_true(sd_bus_detach_event(bus.client) >= 0);
        memset(text, 'x', sizeof(text) - 1);
        while (queued <= 64) {
                assert_true(sd_bus_emit_signal(bus.service, "/x", "x.y", "Z", "s", text) >= 0);
                assert_true(sd_bus_get_n_queued_write(bus.service, &queued) >= 0);
        }

        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, j->frames_ready >= 34);
        assert_int_equal(j->frames_told, 0);
        RUN_UNTIL(f, job_is_finished(j)); /* that is said whatever waits */
        assert_int_equal(j->frames_told, 73);
        assert_true(sd_bus_attach_event(bus.client, f->m->event, 0) >= 0);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(h.frames, 73);
        assert_int_equal(h.n, 1);
}

static void slow_reader_of_a_ring_is_told_when_it_reads(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 22);
        static char text[65536];
        uint64_t queued = 0;
        Heard h;
        Job *j;

        listen_to(&h);
        assert_true(sd_bus_detach_event(bus.client) >= 0);
        memset(text, 'x', sizeof(text) - 1);
        while (queued <= 64) {
                assert_true(sd_bus_emit_signal(bus.service, "/x", "x.y", "Z", "s", text) >= 0);
                assert_true(sd_bus_get_n_queued_write(bus.service, &queued) >= 0);
        }

        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, strcmp(j->phase, "frames-wait") == 0);
        assert_int_equal(j->frames_told, 0);
        assert_true(sd_bus_attach_event(bus.client, f->m->event, 0) >= 0);
        RUN_UNTIL(f, h.frames == 17);
        assert_int_equal(h.n, 1);
}

/* ---- deaths ---- */

static bool die_once_in_each_step(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step < f->hook_count)
                return false;
        f->hook_count = m->header.step + 1;
        fake_die(f);
        return true;
}

static void death_in_each_chunk_makes_the_same_film(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 0);
        Heard h;
        Job *j;

        listen_to(&h);
        f->hook = die_once_in_each_step;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(j->retries_total, 4);
        assert_int_equal(f->count[WIRE_STEP], 8); /* each twice */
        assert_int_equal(f->n_starts, 5);
        assert_int_equal(h.frames, 73);
        for (uint64_t i = 0; i < 73; i++)
                assert_frame(s, j, i);
}

static bool die_after_commit(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step < f->hook_count)
                return false;
        f->hook_count = m->header.step + 1;
        fake_compute(f, fake_job(f, m->header.job), m->header.step);
        fake_die(f);
        return true;
}

/* The step counts, and its frames are told of by the next worker's JOB_READY: a ring goes on. */
static void death_between_commit_and_answer_keeps_the_frames(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 22);
        Heard h;
        Job *j;

        listen_to(&h);
        f->hook = die_after_commit;
        j = fake_submit_request(f, s, &q);
        for (unsigned k = 1; k < 4; k++) {
                RUN_UNTIL(f, h.frames == 17 * k);
                for (uint64_t i = 17 * (k - 1); i < 17 * k; i++)
                        assert_frame(s, j, i);
                RELEASE(f, j, 17 * k);
        }
        RUN_UNTIL(f, h.finished);
        assert_int_equal(h.frames, 73);
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(f->count[WIRE_STEP], 4);
        assert_int_equal(j->retries_total, 0);
}

static bool change_numerics_at_2(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 1 || f->hook_count++ > 0)
                return false;
        f->numerics_id = "fake-2";
        fake_die(f);
        return true;
}

/* Frames that were told of are final: another kind of worker cannot go on, and must not begin again. */
static void other_numerics_after_frames_fail(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 0);
        Job *j;

        f->hook = change_numerics_at_2;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
        assert_int_equal(f->count[WIRE_STEP], 2);
}

static bool spoil_commit_at_2(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 2 || f->hook_count++ > 0)
                return false;
        *fake_commit_word(f, fake_job(f, m->header.job)) = wire_commit_pack((uint32_t) f->epoch, 9);
        fake_die(f);
        return true;
}

static void spoilt_commit_begins_again_only_without_a_ring(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 0);
        Heard h;
        Job *j;

        listen_to(&h);
        f->hook = spoil_commit_at_2;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(f->count[WIRE_STEP], 3 + 4);
        assert_int_equal(h.frames, 73); /* none twice */

        q = fake_decode(4, 56);
        h = (Heard){};
        f->hook_count = 0;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, h.finished);
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
}

static bool move_after_death(Fake *f, const WireMessage *m) {
        WireMessage reply;
        uint32_t committed;
        FakeJob *j;

        if (m->header.type == WIRE_STEP && m->header.step == 2 && f->hook_count == 0) {
                f->hook_count = 1;
                fake_die(f);
                return true;
        }
        if (m->header.type != WIRE_JOB_OPEN || f->hook_count != 1)
                return false;
        f->hook_count = 2;
        j = fake_open(f, &m->job_open, &committed);
        fake_job_ready(f, j, committed, &reply);
        reply.job_ready.outputs[0].tensor.offset += 64;
        reply.job_ready.output_used += 64;
        fake_send(f, &reply);
        return true;
}

static void resumed_job_must_stay_where_it_was(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->vae, 1);
        WireJobOpen q = fake_decode(4, 0);
        Job *j;

        f->hook = move_after_death;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED); /* the second death in this step */
        assert_int_equal(f->n_starts, 2);
}

/* Of a worker that died after the only step's commit the result counts. */
static void one_step_job_is_not_run_again_after_its_commit(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 1);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 0);
        Job *j;

        f->hook = die_after_commit;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(f->n_starts, 1);
}

/* ---- planning ---- */

static void plan_of_coding_has_memory(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 1);
        CLEANUP_FREE char *path = NULL;
        uint64_t rows, bytes, memory;
        uint32_t steps, ranks;
        const char *key;
        sd_bus_message *m, *reply;

        f->m->config->worker_ranks = 5;
        s->split.ranks = 3;
        assert_int_equal(session_path(s, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Session"), "Plan");
        assert_true(sd_bus_message_append(m, "sa{sv}", "encode", 1, "type", "s", "f32") >= 0);
        reply = fake_bus_wait(f, &bus, m);
        if (sd_bus_message_is_method_error(reply, NULL))
                fail_msg("%s", sd_bus_message_get_error(reply)->message);
        assert_true(sd_bus_message_read(reply, "a{sv}", 5, &key, "t", &rows, &key, "u", &steps, &key, "t", &bytes, &key, "u",
                            &ranks, &key, "t", &memory) > 0);
        assert_string_equal(key, "memory-bytes");
        assert_int_equal(rows, 1);
        assert_int_equal(steps, 1);
        assert_int_equal(ranks, 3);
        assert_int_equal(memory, 4321);
        assert_int_equal(f->count[WIRE_STEP], 0);
        (void) sd_bus_message_unref(reply);
}

/* ---- memory ---- */

/* Which model gives way first; and one that goes with its last session. */
static void models_give_way_by_kind_and_after_use(void **state) {
        static const WireModelKind kinds[] = { WIRE_MODEL_DENOISER, WIRE_MODEL_VIDEO_VAE, WIRE_MODEL_CONDITIONER };
        Fake *f = *state;
        uint64_t ids[3];
        Session *s;
        Model *last;

        f->model->keep = f->lora->keep = true;
        for (size_t i = 0; i < ELEMENTSOF(kinds); i++) {
                Model *m = fake_model_new(f, kinds[i]);

                m->last_used_usec = i; /* the denoiser longest ago */
                ids[i] = m->id;
                f->region.n_ref++;
        }
        for (size_t i = ELEMENTSOF(kinds); i-- > 0;) {
                assert_non_null(model_find(f->m, ids[i]));
                assert_true(model_idle_gives_way(f->m, NULL));
                assert_null(model_find(f->m, ids[i]));
        }
        assert_false(model_idle_gives_way(f->m, NULL));

        for (size_t i = 0; i < 2; i++) {
                Model *m = fake_model_new(f, WIRE_MODEL_CONDITIONER);

                f->region.n_ref++;
                f->m->config->evict_after_use = i == 0 ? CONFIG_PART_VIDEO_VAE : CONFIG_PART_CONDITIONER | CONFIG_PART_DENOISER;
                ids[0] = m->id;
                s = fake_session_on(f, m, 0);
                session_close(s);
                RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions));
                assert_true((model_find(f->m, ids[0]) != NULL) == (i == 0));
                if (i == 0)
                        assert_int_equal(model_unload(m, NULL), 0);
        }

        /* The service stops: what it has is for the next one. */
        f->region.n_ref++;
        last = fake_model_new(f, WIRE_MODEL_CONDITIONER);
        s = fake_session_on(f, last, 0);
        f->m->stopping = true;
        session_close(s);
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions));
        f->m->stopping = false;
        assert_int_equal(model_unload(last, NULL), 0);

        /* A pinned one stays. */
        session_close(fake_session_on(f, f->conditioner, 0));
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions));
        assert_non_null(model_find(f->m, f->conditioner->id));
}

static bool note_welcome(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_WELCOME)
                f->hook_count = (unsigned) m->welcome.encode_cache_bytes;
        return false;
}

static void worker_hears_how_much_encode_may_keep(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 0);
        Job *j;

        f->m->config->encode_cache_max = 12345;
        f->hook = note_welcome;
        j = fake_submit_request(f, s, &q);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(f->hook_count, 12345);
}

static int setup(void **state) {
        if (fake_setup(state) < 0)
                return -1;
        fake_bus_serve(*state, &bus);
        return 0;
}

static int teardown(void **state) {
        fake_bus_stop(&bus);
        return fake_teardown(state);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(coding_job_runs_without_a_plan),
                TEST(encode_has_its_results_by_name_and_says_that_they_were_there),
                TEST(cached_of_another_kind_is_a_lie),
                TEST(sound_and_media_run),
                TEST(lying_worker_is_dropped),
                TEST(impossible_frames_drop_the_worker),
                TEST(film_that_is_not_complete_drops_the_worker),
                TEST(decode_tells_of_frames_in_order),
                TEST(ring_waits_for_its_reader),
                TEST(result_can_be_read_while_it_runs),
                TEST(reader_that_goes_away_ends_it),
                TEST(release_is_for_decode),
                TEST(rings_are_limited_per_user),
                TEST(slow_reader_is_told_of_all_at_once),
                TEST(slow_reader_of_a_ring_is_told_when_it_reads),
                TEST(death_in_each_chunk_makes_the_same_film),
                TEST(death_between_commit_and_answer_keeps_the_frames),
                TEST(other_numerics_after_frames_fail),
                TEST(spoilt_commit_begins_again_only_without_a_ring),
                TEST(resumed_job_must_stay_where_it_was),
                TEST(one_step_job_is_not_run_again_after_its_commit),
                TEST(plan_of_coding_has_memory),
                TEST(models_give_way_by_kind_and_after_use),
                TEST(worker_hears_how_much_encode_may_keep),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
