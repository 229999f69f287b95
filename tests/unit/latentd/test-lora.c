/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-bus.h"

#include <math.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/lora.h"

#define START 10.0f

static FakeBus bus;

/* ---- notes ---- */

static WireLoraNotes one_note(uint32_t refused, const char *name, const char *reason) {
        WireLoraNotes m = {.n = 1, .notes = {{.refused = refused}}};

        (void) snprintf(m.notes[0].name, sizeof(m.notes[0].name), "%s", name);
        (void) snprintf(m.notes[0].reason, sizeof(m.notes[0].reason), "%s", reason);
        return m;
}

/* Where a string that begins at `at` or later ends, as D-Bus marshals it. */
static size_t end_of_string(size_t at, const char *s) {
        return (at + 3) / 4 * 4 + 4 + strlen(s) + 1;
}

/* The dictionary in a message of its own: how many of each, how many left out, its size. */
static void read_notes(const LoraNotes *notes, unsigned *ret_applied, unsigned *ret_refused,
        uint32_t *ret_more, size_t *ret_size) {
        sd_bus_message *m = fake_bus_call(&bus, "/x", "x.y", "Z");
        const char *key, *s, *why;
        unsigned n[2] = {};
        uint32_t more = 0;
        size_t at = 0;

        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        assert_true(lora_notes_append(m, notes) >= 0);
        assert_true(sd_bus_message_close_container(m) >= 0);
        assert_true(sd_bus_message_seal(m, 1, 0) >= 0);
        assert_true(sd_bus_message_rewind(m, 1) >= 0);

        assert_true(sd_bus_message_enter_container(m, 'a', "{sv}") > 0);
        while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
                assert_true(sd_bus_message_read(m, "s", &key) > 0);
                if (strcmp(key, "more") == 0)
                        assert_true(sd_bus_message_read(m, "v", "u", &more) > 0);
                else {
                        bool refused = strcmp(key, "refused") == 0;
                        const char *inner = refused ? "(ss)" : "s", *type = refused ? "a(ss)" : "as";

                        assert_true(sd_bus_message_enter_container(m, 'v', type) > 0);
                        assert_true(sd_bus_message_enter_container(m, 'a', inner) > 0);
                        while ((refused ? sd_bus_message_read(m, inner, &s, &why)
                                        : sd_bus_message_read(m, inner, &s)) > 0) {
                                n[refused]++;
                                at = end_of_string(refused ? (at + 7) / 8 * 8 : at, s);
                                if (refused)
                                        at = end_of_string(at, why);
                        }
                        assert_true(sd_bus_message_exit_container(m) >= 0);
                        assert_true(sd_bus_message_exit_container(m) >= 0);
                }
                assert_true(sd_bus_message_exit_container(m) >= 0);
        }
        (void) sd_bus_message_unref(m);
        *ret_applied = n[0];
        *ret_refused = n[1];
        *ret_more = more;
        *ret_size = at;
}

static void notes_are_cut_and_counted(void **state) {
        char name[160], reason[160];
        unsigned applied, refused;
        LoraNotes notes = {};
        uint32_t more;
        size_t size;

        memset(name, 'n', sizeof(name) - 1);
        memset(reason, 'r', sizeof(reason) - 1);
        name[159] = reason[159] = '\0';
        for (unsigned i = 0; i < 10000; i++) {
                WireLoraNotes m = one_note(i % 2, name, reason);

                assert_int_equal(lora_notes_add(&notes, &m, 1), 0);
        }
        read_notes(&notes, &applied, &refused, &more, &size);
        assert_true(applied > 100 && refused > 50);
        assert_int_equal(applied + refused + more, 10000);
        assert_true(size < 62 * 1024 && size > 56 * 1024);
        lora_notes_done(&notes);

        /* Short ones: their number is the limit. */
        for (unsigned i = 0; i < 5000; i++) {
                WireLoraNotes m = one_note(i % 2, "", "");

                assert_int_equal(lora_notes_add(&notes, &m, 1), 0);
        }
        read_notes(&notes, &applied, &refused, &more, &size);
        assert_int_equal(applied + refused + more, 5000);
        assert_true(applied + refused <= 4096 && size < 62 * 1024);
        lora_notes_done(&notes);

        read_notes(&notes, &applied, &refused, &more, &size);
        assert_int_equal(applied + refused + more, 0);
}

static void notes_that_cannot_be_are_refused(void **state) {
        LoraNotes notes = {};
        WireLoraNotes m = one_note(0, "x", "");

        m.notes[0].lora = 1;
        assert_int_equal(lora_notes_add(&notes, &m, 1), -EPROTO);
        m.notes[0].lora = 0;
        m.notes[0].refused = 2;
        assert_int_equal(lora_notes_add(&notes, &m, 1), -EPROTO);
        m.notes[0].refused = 0;
        m.n = WIRE_LORA_NOTES_MAX + 1;
        assert_int_equal(lora_notes_add(&notes, &m, 1), -EPROTO);
        assert_int_equal(notes.n, 0);
}

/* Names are cut on the wire, maybe inside of a character. */
static void notes_of_broken_text_go_over_the_bus(void **state) {
        LoraNotes notes = {};
        WireLoraNotes m = one_note(1, "gr\xc3\xbc\xc3", "\xff why");
        unsigned applied, refused;
        uint32_t more;
        size_t size;

        assert_int_equal(lora_notes_add(&notes, &m, 1), 0);
        read_notes(&notes, &applied, &refused, &more, &size);
        assert_int_equal(refused, 1);
        assert_memory_equal(notes.text[1], "gr\xc3\xbc?\0? why", 12);
        lora_notes_done(&notes);
}

/* ---- SetLoras ---- */

typedef struct Wanted {
        const Model *model;
        double strength;
} Wanted;

static sd_bus_message *set_loras(
        Session *s, size_t n, const Wanted *list, const char *key, const char *value) {
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m;

        assert_int_equal(session_path(s, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Session"), "SetLoras");
        assert_true(sd_bus_message_open_container(m, 'a', "(od)") >= 0);
        for (size_t i = 0; i < n; i++) {
                CLEANUP_FREE char *model = NULL;

                if (list[i].model)
                        assert_int_equal(model_path(list[i].model, &model), 0);
                assert_true(sd_bus_message_append(m, "(od)", model ? model : BUS_ROOT "/model/999",
                                    list[i].strength) >= 0);
        }
        assert_true(sd_bus_message_close_container(m) >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        if (key)
                assert_true(sd_bus_message_append(m, "{sv}", key, "s", value) >= 0);
        assert_true(sd_bus_message_close_container(m) >= 0);
        return m;
}

/* The job of a SetLoras that is taken. */
static Job *merge(Fake *f, Session *s, size_t n, const Wanted *list) {
        sd_bus_message *reply = fake_bus_wait(f, &bus, set_loras(s, n, list, NULL, NULL));
        const char *path;
        uint64_t id;
        Job *j;

        if (sd_bus_message_is_method_error(reply, NULL) > 0)
                fail_msg("%s", sd_bus_message_get_error(reply)->message);
        assert_true(sd_bus_message_read(reply, "o", &path) > 0);
        assert_int_equal(bus_path_id(path, BUS_ROOT "/job/", &id), 0);
        j = job_find(f->m, id);
        assert_non_null(j);
        assert_int_equal(j->kind, JOB_MERGE);
        (void) sd_bus_message_unref(reply);
        return j;
}

#define TWICE(f) ((Wanted[]){{(f)->lora, 0.5}, {(f)->lora, -1}})

static WireJobOpen last_open;
static unsigned n_models_at_open;

static bool watch_opens(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_JOB_OPEN) {
                last_open = m->job_open;
                n_models_at_open = f->n_models;
        }
        return false;
}

static void assert_loras(Fake *f, Session *s, const char *expected) {
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m, *reply;
        char text[128] = "";
        const char *model;
        double strength;

        assert_int_equal(session_path(s, &path), 0);
        m = fake_bus_call(&bus, path, "org.freedesktop.DBus.Properties", "Get");
        assert_true(sd_bus_message_append(m, "ss", BUS_INTERFACE("Session"), "Loras") >= 0);
        reply = fake_bus_wait(f, &bus, m);
        assert_true(sd_bus_message_enter_container(reply, 'v', "a(od)") > 0);
        assert_true(sd_bus_message_enter_container(reply, 'a', "(od)") > 0);
        while (sd_bus_message_read(reply, "(od)", &model, &strength) > 0)
                (void) snprintf(text + strlen(text), sizeof(text) - strlen(text), "%g ", strength);
        assert_string_equal(text, expected);
        (void) sd_bus_message_unref(reply);
}

static void set_loras_merges_and_later_jobs_carry_them(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Region own = f->region;
        Job *j, *merged;

        f->lora->parts[0].region = &own;
        f->hook = watch_opens;
        merged = merge(f, s, 2, TWICE(f));
        assert_int_equal(f->lora->n_users, 4); /* the session's and the job's */
        assert_loras(f, s, "0.5 -1 ");
        RUN_UNTIL(f, job_is_finished(merged));
        assert_int_equal(merged->state, JOB_DONE);
        assert_int_equal(last_open.kind, WIRE_JOB_MERGE);
        assert_int_equal(last_open.n_loras, 2);
        assert_int_equal(n_models_at_open, 2); /* the model and the adapter, once */
        assert_int_equal(f->count[WIRE_PLAN], 0);
        assert_int_equal(merged->merged_bytes, FAKE_MERGED);
        assert_int_equal(merged->notes.n, 4);
        assert_int_equal(f->lora->n_users, 2);
        assert_int_equal(f->m->steps_done, 0);
        assert_int_equal(own.worker_epoch, f->epoch); /* verified if this worker crashes */
        f->lora->parts[0].region = &f->region;

        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 2);
        assert_int_equal(last_open.kind, WIRE_JOB_SAMPLE);
        assert_int_equal(last_open.n_loras, 2);
        assert_int_equal(last_open.loras[1].model, f->lora->id);
        assert_true(last_open.loras[0].strength == 0.5 && last_open.loras[1].strength == -1);

        /* Another session has none, and then this one neither. */
        j = fake_submit(f, fake_session(f, 0), WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(last_open.n_loras, 0);
        j = merge(f, s, 0, NULL);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(f->lora->n_users, 0);
        assert_loras(f, s, "");
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(last_open.n_loras, 0);
}

static void set_loras_result_on_the_bus(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = merge(f, s, 1, &(Wanted){f->lora, 1});
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m, *reply;
        const char *key, *a, *b;
        uint64_t bytes;

        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(job_path(j, &path), 0);
        m = fake_bus_call(&bus, path, "org.freedesktop.DBus.Properties", "Get");
        assert_true(sd_bus_message_append(m, "ss", BUS_INTERFACE("Job"), "Result") >= 0);
        reply = fake_bus_wait(f, &bus, m);
        assert_true(sd_bus_message_enter_container(reply, 'v', "a{sv}") > 0);
        assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
        assert_true(sd_bus_message_read(reply, "{sv}", &key, "as", 1, &a) > 0);
        assert_string_equal(key, "applied");
        assert_string_equal(a, "applied");
        assert_true(sd_bus_message_read(reply, "{sv}", &key, "a(ss)", 1, &a, &b) > 0);
        assert_string_equal(key, "refused");
        assert_string_equal(a, "refused");
        assert_string_equal(b, "The fake worker says no.");
        assert_true(sd_bus_message_read(reply, "{sv}", &key, "t", &bytes) > 0);
        assert_string_equal(key, "bytes");
        assert_int_equal(bytes, FAKE_MERGED);
        assert_int_equal(sd_bus_message_at_end(reply, false), 1); /* no "more" */
        (void) sd_bus_message_unref(reply);
}

static void set_loras_bad_input_is_named_and_changes_nothing(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        static const double strengths[] = {NAN, INFINITY, -INFINITY};
        Wanted many[17];
        Job *j = merge(f, s, 2, TWICE(f));
        uint64_t next;

        RUN_UNTIL(f, job_is_finished(j));
        next = f->m->next_id;
#define REFUSED(n, list, key, value, name, word)                                                            \
        fake_bus_expect(fake_bus_wait(f, &bus, set_loras(s, n, list, key, value)), name, word)
        REFUSED(2, ((Wanted[]){{f->lora, 1}, {f->model, 1}}), NULL, NULL, FAULT_INVALID_ARGUMENT,
                "\"loras\"[1]");
        REFUSED(1, (&(Wanted){NULL, 1}), NULL, NULL, FAULT_NOT_FOUND, "\"loras\"[0]");
        for (size_t i = 0; i < ELEMENTSOF(strengths); i++)
                REFUSED(1, (&(Wanted){f->lora, strengths[i]}), NULL, NULL, FAULT_INVALID_ARGUMENT,
                        "strength");
        for (size_t i = 0; i < ELEMENTSOF(many); i++)
                many[i] = (Wanted){f->lora, 1};
        REFUSED(17, many, NULL, NULL, FAULT_INVALID_ARGUMENT, "16");
        REFUSED(1, (&(Wanted){f->lora, 1}), "compute", "fp64", FAULT_INVALID_ARGUMENT, "auto, f32 or bf16");
        REFUSED(1, (&(Wanted){f->lora, 1}), "scale", "1", FAULT_INVALID_ARGUMENT, "Unknown key \"scale\"");

        f->lora->state = MODEL_LOADING;
        REFUSED(1, (&(Wanted){f->lora, 1}), NULL, NULL, FAULT_BUSY, "loading");
        f->lora->state = MODEL_READY;
        f->lora->is_private = true;
        f->lora->uid = getuid() + 1;
        REFUSED(1, (&(Wanted){f->lora, 1}), NULL, NULL, FAULT_NOT_FOUND, "\"loras\"[0]");
        f->lora->is_private = false;
        f->m->config->jobs_per_user = 0;
        REFUSED(0, NULL, NULL, NULL, FAULT_LIMIT, "JobsPerUser");
        f->m->config->jobs_per_user = 256;
#undef REFUSED
        assert_loras(f, s, "0.5 -1 ");
        assert_int_equal(f->lora->n_users, 2);
        assert_int_equal(f->m->next_id, next);
        f->hook = watch_opens;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(last_open.n_loras, 2);
        fake_bus_expect(
                fake_bus_wait(f, &bus, set_loras(s, 16, many, NULL, NULL)), NULL, NULL); /* just allowed */
        RUN_UNTIL(f, queue_is_empty(f->m->queue));
}

static void adapters_in_use_stay(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = merge(f, s, 1, &(Wanted){f->lora, 1});
        Fault fault = {};

        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(model_unload(f->lora, &fault), -EBUSY);
        assert_string_equal(fault.name, FAULT_BUSY);
        assert_false(model_idle_gives_way(f->m, NULL));
        session_close(s);
        assert_int_equal(f->lora->n_users, 0);
        assert_int_equal(f->model->n_users, 0);
}

static bool refuse_merge_step(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP)
                return false;
        fake_error(f, m->header.job, 0, FAULT_INVALID_MODEL);
        return true;
}

static void failed_merge_fails_later_requests_until_set_again(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WireJobOpen q = fake_request(WIRE_JOB_STEP, 1, 0);
        Fault fault = {};
        Job *j;

        f->hook = refuse_merge_step;
        j = merge(f, s, 1, &(Wanted){f->lora, 1});
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_INVALID_MODEL);
        f->hook = NULL;
        assert_true(session_submit(s, f->peer, &q, &j, &fault) < 0);
        assert_string_equal(fault.name, FAULT_INVALID_MODEL);
        assert_string_equal(fault.text, "The fake worker says no.");
        assert_int_equal(s->n_busy, 0);

        j = merge(f, s, 0, NULL);
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
}

static bool hold_steps(Fake *f, const WireMessage *m) {
        return m->header.type == WIRE_STEP;
}

/* An older merge's end says nothing of a newer list. */
static void failed_merge_of_an_older_list_is_its_own(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *old, *next;

        f->hook = hold_steps;
        old = merge(f, s, 1, &(Wanted){f->lora, 1});
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        next = merge(f, s, 1, &(Wanted){f->lora, 2});
        assert_int_equal(old->loras.n, 1); /* keeps what it has */
        f->hook = NULL;
        fake_error(f, old->id, 0, FAULT_INVALID_MODEL);
        RUN_UNTIL(f, job_is_finished(next));
        assert_int_equal(old->state, JOB_FAILED);
        assert_int_equal(next->state, JOB_DONE);
        old = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(old));
        assert_result(s, old, START, 1);
}

/* Says half of it, hook_count times. */
static bool die_in_merge(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || f->hook_count == 0)
                return false;
        f->hook_count--;
        fake_notes(f, &fake_job(f, m->header.job)->open);
        fake_die(f);
        return true;
}

static void merge_survives_one_death(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_in_merge;
        f->hook_count = 1;
        j = merge(f, s, 2, TWICE(f));
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_DONE);
        assert_int_equal(j->notes.n, 4); /* not eight */
        assert_int_equal(j->retries_total, 1);
        assert_int_equal(f->count[WIRE_MODEL_COMMIT], 4); /* both models, in both workers */

        f->hook_count = 2;
        j = merge(f, s, 2, TWICE(f));
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
        assert_non_null(strstr(j->fault.text, "merge"));
        assert_string_equal(s->lora_fault.name, FAULT_WORKER_CRASHED);
}

static bool answer_cancel(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
                return true;
        }
        return m->header.type == WIRE_STEP;
}

/* The list stays; whoever runs next merges it. */
static void cancelled_merge_leaves_the_list(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = merge(f, s, 1, &(Wanted){f->lora, 1});

        f->hook = answer_cancel;
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        assert_string_equal(j->phase, "merge");
        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLING);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_CANCELLED);
        f->hook = watch_opens;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(last_open.n_loras, 1);
}

/* ---- a worker that lies ---- */

static bool notes_in_a_sample(Fake *f, const WireMessage *m) {
        WireMessage notes;

        if (m->header.type != WIRE_STEP)
                return false;
        f->hook = NULL;
        wire_init(&notes, WIRE_LORA_NOTES, f->epoch, m->header.job, 0);
        notes.lora_notes.n = 1;
        fake_send(f, &notes);
        return true;
}

static bool notes_of_another_adapter(Fake *f, const WireMessage *m) {
        WireMessage notes;

        if (m->header.type != WIRE_STEP)
                return false;
        f->hook = NULL;
        wire_init(&notes, WIRE_LORA_NOTES, f->epoch, m->header.job, 0);
        notes.lora_notes.n = 1;
        notes.lora_notes.notes[0].lora = 1;
        fake_send(f, &notes);
        return true;
}

static bool memory_that_no_machine_has(Fake *f, const WireMessage *m) {
        WireMessage memory;

        if (m->header.type != WIRE_STEP)
                return false;
        f->hook = NULL;
        wire_init(&memory, WIRE_MEMORY, f->epoch, 0, 0);
        memory.memory.merged_bytes = UINT64_MAX - 1;
        fake_send(f, &memory);
        return true;
}

static bool merge_of_two_steps(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type != WIRE_JOB_OPEN)
                return false;
        f->hook = NULL;
        wire_init(&reply, WIRE_JOB_READY, f->epoch, m->header.job, 0);
        reply.job_ready.steps = 2;
        fake_send(f, &reply);
        return true;
}

/* A denoiser that is an adapter in the next worker. */
static bool model_of_another_kind(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type != WIRE_MODEL_COMMIT || m->header.job != f->model->id)
                return false;
        f->hook = NULL;
        wire_init(&reply, WIRE_MODEL_READY, f->epoch, m->header.job, 0);
        reply.model_ready.kind = WIRE_MODEL_LORA;
        fake_send(f, &reply);
        return true;
}

static void lying_worker_is_dropped(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        bool (*const lies[])(Fake * f, const WireMessage *m) = {
                model_of_another_kind,
                notes_in_a_sample,
                notes_of_another_adapter,
                merge_of_two_steps,
                memory_that_no_machine_has,
        };

        for (size_t i = 0; i < ELEMENTSOF(lies); i++) {
                unsigned starts;
                Job *j;

                f->hook = lies[i];
                starts = f->n_starts;
                if (lies[i] == notes_in_a_sample)
                        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0);
                else
                        j = merge(f, s, 1, &(Wanted){f->lora, 1});
                RUN_UNTIL(f, job_is_finished(j));
                assert_int_equal(j->state, JOB_DONE);
                if (f->n_starts - starts != (i == 0 ? 2 : 1))
                        fail_msg("lie %zu went through", i);
        }
}

/* ---- many adapters ---- */

/* More models than a worker keeps at a time: none of a job's own gives way. */
static void job_with_many_adapters_has_them_all(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Model *models[40];
        Wanted list[16];
        Job *j;

        for (unsigned i = 0; i < ELEMENTSOF(models); i++) {
                models[i] = fake_model_new(f, WIRE_MODEL_LORA);
                models[i]->announced = true;
        }
        f->all_loras = true;
        for (unsigned begin = 0; begin + 16 <= ELEMENTSOF(models); begin += 8) {
                for (unsigned i = 0; i < 16; i++)
                        list[i] = (Wanted){models[begin + i], 1};
                j = merge(f, s, 16, list);
                RUN_UNTIL(f, job_is_finished(j)); /* fake_open() looks for them */
                assert_int_equal(j->state, JOB_DONE);
                assert_true(f->n_models <= 32);
        }
        assert_true(f->count[WIRE_MODEL_CLOSE] > 0);
        assert_int_equal(f->n_starts, 1);
        j = merge(f, s, 0, NULL);
        RUN_UNTIL(f, job_is_finished(j));
        for (unsigned i = 0; i < ELEMENTSOF(models); i++) {
                assert_int_equal(models[i]->n_users, 0);
                worker_link_forget_model(f->m->worker, models[i]);
                fake_model_free(f, models[i]);
        }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

static int setup(void **state) {
        int r = fake_setup(state);

        fake_bus_serve(*state, &bus);
        return r;
}

static int teardown(void **state) {
        Fake *f = *state;

        peer_gone(f->peer); /* while its bus is there */
        f->peer = fake_peer_new(f);
        fake_bus_stop(&bus);
        return fake_teardown(state);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(notes_are_cut_and_counted),
                TEST(notes_that_cannot_be_are_refused),
                TEST(notes_of_broken_text_go_over_the_bus),
                TEST(set_loras_merges_and_later_jobs_carry_them),
                TEST(set_loras_result_on_the_bus),
                TEST(set_loras_bad_input_is_named_and_changes_nothing),
                TEST(adapters_in_use_stay),
                TEST(failed_merge_fails_later_requests_until_set_again),
                TEST(failed_merge_of_an_older_list_is_its_own),
                TEST(merge_survives_one_death),
                TEST(cancelled_merge_leaves_the_list),
                TEST(lying_worker_is_dropped),
                TEST(job_with_many_adapters_has_them_all),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
