/* SPDX-License-Identifier: Apache-2.0 */
/* Input: what a worker says. A manager with sessions and jobs runs against it in this process (socket, worker link, queue, jobs); whatever
 * the worker says, jobs keep to their states and results to their arenas. */
#include "tests/unit/latentd/fake-worker.h"

#include "service/shared/log.h"
#include "tests/fuzz/target.h"
#include "tests/fuzz/wire-input.h"

#define OPS_MAX 40
#define JOBS 5

enum {
        OP_GOOD,    /* the fake worker does what is asked, as long as it never lied to this broker */
        OP_MESSAGE, /* type, id, step, changes */
        OP_RAW,
        OP_ANSWER, /* a right answer to whatever was asked last, changed */
        OP_ACK,
        OP_DIE,
        OP_COMMIT, /* writes a commit word */
        OP_CANCEL, /* the client cancels its job, or releases frames of it */
        OP_CLOSE,  /* the client closes its session */
        OP_MAX,
};

typedef struct State {
        Fake *f;
        Session *session;
        uint64_t session_id;
        uint64_t jobs[JOBS];
        bool coding;  /* the jobs are Decode, Tokenize, Encode, EncodeMedia and a plan */
        Input *notes; /* where LORA_NOTES come from; NULL: the fake's own */
        bool lying;
        unsigned starts;
        WireMessage asked; /* the last message that wants an answer */
} State;

static State state;

/* The connection may be gone, or full: then nothing is said. */
static void send_bytes(const void *bytes, size_t n, int passed) {
        union {
                char bytes[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control = {};
        struct iovec iov = { .iov_base = (void *) bytes, .iov_len = n };
        struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };

        if (state.f->conn < 0 || n == 0)
                return;

        if (passed >= 0) {
                struct cmsghdr *c;

                h.msg_control = control.bytes;
                h.msg_controllen = sizeof(control.bytes);
                c = CMSG_FIRSTHDR(&h);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(sizeof(int));
                memcpy(CMSG_DATA(c), &passed, sizeof(passed));
        }
        (void) sendmsg(state.f->conn, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void say(const void *bytes, size_t n, int passed) {
        state.lying = true;
        send_bytes(bytes, n, passed);
}

/* Of text without an end in places. */
static void fill_notes(Input *x, WireLoraNotes *m) {
        m->n = input_u8(x) % (WIRE_LORA_NOTES_MAX + 2);
        for (uint32_t i = 0; i < m->n && i < WIRE_LORA_NOTES_MAX; i++) {
                uint8_t b = input_u8(x);

                m->notes[i].lora = b & 1;
                m->notes[i].refused = b >> 1 & 1;
                memset(m->notes[i].name, b, (size_t) b % (sizeof(m->notes[i].name) + 1));
                memset(m->notes[i].reason, b, (size_t) input_u8(x) % (sizeof(m->notes[i].reason) + 1));
        }
}

/* What a worker that is good else says of the adapters that it merges. */
static void say_notes(Fake *f, const WireMessage *step) {
        for (unsigned n = input_u8(state.notes) % 8; n > 0; n--) {
                WireMessage m;

                wire_init(&m, WIRE_LORA_NOTES, f->epoch, step->header.job, step->header.step);
                fill_notes(state.notes, &m.lora_notes);
                send_bytes(&m, m.header.size, -EBADF);
        }
}

static bool hook(Fake *f, const WireMessage *m) {
        if (state.starts != f->n_starts) {
                state.starts = f->n_starts;
                state.lying = false;
        }
        if (m->header.type == WIRE_MODEL_COMMIT || m->header.type == WIRE_JOB_OPEN ||
            m->header.type == WIRE_STEP || m->header.type == WIRE_WELCOME)
                state.asked = *m;
        if (m->header.type == WIRE_DIE) {
                fake_die(f);
                return true;
        }
        if (m->header.type == WIRE_STEP && m->header.job == state.jobs[3] && state.notes && !state.lying)
                say_notes(f, m);
        return state.lying;
}

static uint64_t pick_id(uint8_t b) {
        const uint64_t model = state.coding ? state.f->vae->id : state.f->model->id;
        const uint64_t other = state.coding ? state.f->conditioner->id : state.f->lora->id;
        const uint64_t ids[] = {
                state.jobs[0],    state.jobs[1], state.jobs[2], model,
                state.session_id, 0,             UINT64_MAX,    state.asked.header.job,
                state.jobs[3],    state.jobs[4], other,
        };

        return ids[b % ELEMENTSOF(ids)];
}

/* The lists of a worker that lied are not the fake's: only the arenas count. */
static const WireJobOpen *asked_job(void) {
        return state.asked.header.type == WIRE_JOB_OPEN ? &state.asked.job_open : NULL;
}

static void fill_answer(Input *x, WireMessage *m) {
        Fake *f = state.f;

        switch ((WireType) state.asked.header.type) {

        case WIRE_MODEL_COMMIT:
                wire_init(m, WIRE_MODEL_READY, f->epoch, state.asked.header.job, 0);
                fake_describe(f, state.asked.header.job, &m->model_ready);
                break;

        case WIRE_JOB_OPEN: {
                FakeJob j = { .open = *asked_job() };

                j.steps = fake_steps(&j.open);
                fake_job_ready(f, &j, input_u8(x) % 4, m);
                break;
        }

        case WIRE_STEP:
                wire_init(m, WIRE_STEP_DONE, f->epoch, state.asked.header.job, state.asked.header.step);
                if (state.asked.header.job == state.jobs[0] && state.coding)
                        m->step_done.frames = 17 * ((uint64_t) state.asked.header.step + 1) + (state.asked.header.step == 3 ? 5 : 0);
                break;

        default:
                wire_init(m, WIRE_ACK, f->epoch, 0, 0);
                break;
        }
}

static void send_message(Input *x) {
        WireMessage m;
        uint16_t type = input_u8(x) % WIRE_TYPE_MAX;

        if (wire_size_of(type) == 0)
                return;

        wire_init(&m, (WireType) type, state.f->epoch, pick_id(input_u8(x)), input_u8(x) % 5);
        if (type == WIRE_ERROR)
                (void) snprintf(m.error.fault.name, sizeof(m.error.fault.name), "%s",
                                (input_u8(x) & 1) ? FAULT_CANCELLED : FAULT_INVALID_TENSOR);
        if (type == WIRE_LORA_NOTES)
                fill_notes(x, &m.lora_notes);
        input_change(x, &m);
        say(&m, m.header.size, (type == WIRE_REGION || type == WIRE_ARENA) ? state.f->region_fd : -EBADF);
}

static void write_commit(Input *x) {
        uint32_t place = input_u8(x) % 4, epoch = input_u8(x), step = input_u8(x);
        uint64_t word = wire_commit_pack(epoch, step);
        void *map;

        if (!state.session || memfd_map(state.session->output_fd, ARENA_BYTES, PROT_READ | PROT_WRITE, &map) < 0)
                return;

        memcpy((char *) map + place * 16384, &word, sizeof(word));
        (void) munmap(map, ARENA_BYTES);
}

static Job *submit_merge(void) {
        const LoraList loras = { .n = 1, .models = { state.f->lora }, .strengths = { 0.5 } };
        Job *j = NULL;

        CHECK(session_set_loras(state.session, state.f->peer, &loras, WIRE_COMPUTE_BF16, &j, NULL) == 0);
        return j;
}

static Job *submit_plan(void) {
        WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 2, 3);
        Job *j = NULL;

        q.flags = WIRE_JOB_PLAN_ONLY;
        CHECK(session_submit(state.session, state.f->peer, &q, &j, NULL) == 0);
        return j;
}

static void check_jobs(void) {
        for (unsigned i = 0; i < JOBS; i++) {
                const Job *j = job_find(state.f->m, state.jobs[i]);
                char name[32];
                WireTensor t;

                if (!j)
                        continue;
                CHECK(j->steps == 0 || j->step <= j->steps);
                CHECK(j->fraction >= 0 && j->fraction <= 1);
                CHECK(j->notes.n <= 4096 && j->notes.cost[0] + j->notes.cost[1] < 61000);
                CHECK(!job_is_finished(j) || (j->state == JOB_DONE) == (j->fault.name[0] == '\0'));
                CHECK(j->frames_done <= j->ready.frames && j->frames_told <= j->frames_ready && j->frames_ready <= j->ready.frames);
                CHECK(j->frames_released <= j->frames_ready);
                for (uint32_t k = 0; job_has_result(j) && job_result_tensor(j, k, name, &t) == 0; k++)
                        CHECK(t.size <= ARENA_BYTES && t.offset <= ARENA_BYTES - t.size);
        }
}

/* Lets the loop take in what there is; no step of it waits. */
static void run_loop(void) {
        for (int i = 0; i < 12; i++) {
                if (sd_event_run(state.f->m->event, 0) == 0)
                        break;
                fake_pump(state.f);
        }
        fake_pump(state.f);
        check_jobs();
}

static void run_op(Input *x) {
        uint8_t raw[WIRE_MESSAGE_MAX + 1];
        WireMessage m;
        uint8_t which;
        Job *j;

        switch (input_u8(x) % OP_MAX) {

        case OP_GOOD:
                break;

        case OP_MESSAGE:
                send_message(x);
                break;

        case OP_RAW: {
                int passed = (input_u8(x) & 1) ? state.f->region_fd : -EBADF;

                say(raw, input_raw(x, raw), passed);
                break;
        }

        case OP_ANSWER:
                fill_answer(x, &m);
                input_change(x, &m);
                say(&m, m.header.size, -EBADF);
                break;

        case OP_ACK:
                wire_init(&m, WIRE_ACK, state.f->epoch, 0, 0);
                say(&m, m.header.size, -EBADF);
                break;

        case OP_DIE:
                if (state.f->conn >= 0)
                        fake_die(state.f);
                break;

        case OP_COMMIT:
                write_commit(x);
                break;

        case OP_CANCEL:
                which = input_u8(x);
                j = job_find(state.f->m, state.jobs[which % JOBS]);
                if (j && state.coding && (which & 0x80))
                        (void) job_release_frames(j, input_u8(x), NULL);
                else if (j && !job_is_finished(j))
                        job_cancel(j);
                break;

        default:
                if (state.session)
                        session_close(STEAL_PTR(state.session));
                break;
        }
}

static void submit_sampling(Fake *f) {
        state.session = fake_session(f, 1);
        state.jobs[0] = fake_submit(f, state.session, WIRE_JOB_SAMPLE, 3, 0)->id;
        state.jobs[1] = fake_submit(f, state.session, WIRE_JOB_STEP, 1, 1)->id;
        state.jobs[2] = fake_submit(f, state.session, WIRE_JOB_SAMPLE, 2, 2)->id;
        state.jobs[3] = submit_merge()->id;
        state.jobs[4] = submit_plan()->id;
}

/* A film in a ring of the first half of the arena, clips in the other. */
static void submit_coding(Fake *f) {
        Session *text = fake_session_on(f, f->conditioner, 1);
        WireJobOpen decode = fake_decode(4, 22), tokenize = fake_coding(WIRE_JOB_TOKENIZE, 0), encode = fake_coding(WIRE_JOB_ENCODE, 1);
        WireJobOpen media = { .kind = WIRE_JOB_ENCODE_MEDIA, .output_offset = ARENA_BYTES / 2, .output_size = ARENA_BYTES / 2,
                .video = { .size = 40 * FAKE_FRAME, .dtype = ST_U8, .n_dims = 4, .shape = { 40, 16, 16, 3 } } };
        WireJobOpen plan = fake_decode(3, 0);

        state.session = fake_session_on(f, f->vae, 1);
        decode.output_size = ARENA_BYTES / 2;
        plan.flags = WIRE_JOB_PLAN_ONLY;
        state.jobs[0] = fake_submit_request(f, state.session, &decode)->id;
        state.jobs[1] = fake_submit_request(f, text, &tokenize)->id;
        state.jobs[2] = fake_submit_request(f, text, &encode)->id;
        state.jobs[3] = fake_submit_request(f, state.session, &media)->id;
        state.jobs[4] = fake_submit_request(f, state.session, &plan)->id;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        Input x = { data, n };
        uint8_t how;
        void *fake;
        Fake *f;

        log_set_max_level(-1);
        CHECK(fake_setup(&fake) == 0);
        f = fake;
        state = (State){ .f = f };
        f->hook = hook;
        f->m->worker->hello_usec = f->m->worker->end_usec = 20000;

        how = input_u8(&x);
        state.coding = how & 4;
        if (state.coding)
                submit_coding(f);
        else
                submit_sampling(f);
        state.session_id = state.session->id;
        if ((how & 2) && !state.coding)
                state.notes = &x;
        if (how & 1) /* else it does not even say HELLO as it should */
                run_loop();
        else
                f->silent = true;

        for (unsigned i = 0; x.n > 0 && i < OPS_MAX; i++) {
                run_op(&x);
                run_loop();
        }

        f->silent = false;
        CHECK(fake_teardown(&fake) == 0);
        return 0;
}
