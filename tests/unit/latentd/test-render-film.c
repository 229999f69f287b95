/* SPDX-License-Identifier: Apache-2.0 */
/* A Render to a file: the test plays the worker and latent-media. What each hears, a death of latent-media anywhere, and that no end is
 * told while the file may be written to. */
#include "service/shared/media-wire.h"
#include "tests/unit/latentd/fake-render.h"

#define FRAMES 56 /* more than the ring between the two */

typedef struct Film {
        Fake *f;
        char folder[32], path[64];
        int listener, media, file, arena;
        bool sheet; /* the file gets a contact sheet beside it */
        MediaWrite asked;
        uint64_t ready;
        bool sound;
        unsigned n_asked;
        Session *session;
        Job *job;
} Film;

static int setup(void **state) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };
        Film *x = calloc(1, sizeof(*x));
        void *fake = NULL;

        assert_non_null(x);
        assert_int_equal(fake_setup(&fake), 0);
        x->f = fake;
        x->media = x->arena = -EBADF;
        (void) snprintf(x->folder, sizeof(x->folder), "/tmp/film-XXXXXX");
        assert_non_null(mkdtemp(x->folder));
        (void) snprintf(x->path, sizeof(x->path), "%s/socket", x->folder);
        (void) snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", x->path);
        x->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_int_equal(bind(x->listener, (struct sockaddr *) &sa, sizeof(sa)), 0);
        assert_int_equal(listen(x->listener, 4), 0);
        free(x->f->m->config->media_socket);
        x->f->m->config->media_socket = strdup(x->path);
        x->file = memfd_create("film", MFD_CLOEXEC);
        assert_true(x->file >= 0);
        *state = x;
        return 0;
}

static int teardown(void **state) {
        Film *x = *state;
        void *fake = x->f;
        int r;

        cleanup_closep(&x->media);
        cleanup_closep(&x->arena);
        r = fake_teardown(&fake);
        (void) close(x->listener);
        (void) close(x->file);
        (void) unlink(x->path);
        (void) rmdir(x->folder);
        free(x);
        return r;
}

static Job *start(Film *x, uint32_t frames) {
        RenderOptions o = fake_film(frames);

        o.output_size = 0;
        o.file = fcntl(x->file, F_DUPFD_CLOEXEC, 3);
        o.sheet = x->sheet ? fcntl(x->file, F_DUPFD_CLOEXEC, 3) : -EBADF;
        o.sheet_columns = o.sheet_rows = 2;
        o.format = MEDIA_MKV;
        if (!x->session)
                x->session = fake_pipeline(x->f, ARENA_BYTES);
        x->job = fake_render(x->f, x->session, &o);
        return x->job;
}

/* ---- latent-media ---- */

static bool try_accept(Film *x) {
        x->media = accept4(x->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        return x->media >= 0;
}

static void say(Film *x, const MediaMessage *m) {
        assert_int_equal(media_send(x->media, m, NULL, 0), 0);
}

/* What has come: the request, and how many frames there are. */
static bool take_in(Film *x) {
        MediaMessage m;
        Fault f = {};
        int fds[MEDIA_FDS_MAX], r;

        while ((r = media_receive(x->media, &m, fds, &f)) > 0)
                if (m.header.type == MEDIA_WRITE) {
                        x->asked = m.write;
                        x->n_asked++;
                        (void) close(fds[0]);
                        cleanup_closep(&x->arena);
                        x->arena = fds[1];
                } else {
                        assert_int_equal(m.header.type, MEDIA_FRAMES);
                        assert_true(m.frames.ready >= x->ready);
                        x->ready = m.frames.ready;
                        x->sound = m.frames.sound;
                }
        return r == 0; /* end of file */
}

/* The next process is there and has its request. */
static void greet(Film *x) {
        unsigned n = x->n_asked;
        MediaMessage m;

        x->ready = 0;
        x->sound = false;
        RUN_UNTIL(x->f, try_accept(x));
        (void) media_init(&m, MEDIA_HELLO);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", LATENTD_VERSION);
        say(x, &m);
        RUN_UNTIL(x->f, (take_in(x), x->n_asked > n && x->ready > 0));
        assert_int_equal(x->asked.frames, x->job->render ? FRAMES : 0);
        assert_int_equal(x->asked.format, x->sheet ? MEDIA_PNG : MEDIA_MKV);
        assert_int_equal(x->asked.sheet_columns, x->sheet ? 2 : 0);
        assert_true(x->sheet || x->sound); /* it was made before */
}

/* Frames [from, to) are those of the film, then they are given back. */
static void take(Film *x, uint64_t from, uint64_t to) {
        MediaMessage m;

        assert_true(to <= x->ready);
        for (uint64_t i = from; i < to; i++) {
                uint8_t pixel;
                off_t at = (off_t) (x->asked.frames_offset + i % x->asked.ring_frames * FRAME);

                if (pread(x->arena, &pixel, 1, at) != 1)
                        fail_msg("fd %d at %lld: %s", x->arena, (long long) at, strerror(errno));
                assert_int_equal(pixel, i);
                assert_int_equal(pread(x->arena, &pixel, 1, at + FRAME - 1), 1);
                assert_int_equal(pixel, i);
        }
        (void) media_init(&m, MEDIA_TAKEN);
        m.taken.frames = to;
        say(x, &m);
}

static void say_done(Film *x) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_DONE);
        m.done.bytes = 4711;
        say(x, &m);
}

static void write_all(Film *x) {
        uint64_t taken = 0;

        while (taken < FRAMES) {
                RUN_UNTIL(x->f, (take_in(x), x->ready > taken));
                if (x->ready - taken > x->asked.ring_frames)
                        fail_msg("%llu frames are ready, %llu taken, in a ring of %llu", (unsigned long long) x->ready,
                                (unsigned long long) taken, (unsigned long long) x->asked.ring_frames);
                take(x, taken, x->ready);
                taken = x->ready;
        }
        say_done(x);
}

static void assert_done(Film *x) {
        RUN_UNTIL(x->f, job_is_finished(x->job));
        if (x->job->state != JOB_DONE)
                fail_msg("%s: %s", x->job->fault.name, x->job->fault.text);
}

static void assert_failed(Film *x, const char *name, const char *part) {
        RUN_UNTIL(x->f, job_is_finished(x->job));
        assert_int_equal(x->job->state, JOB_FAILED);
        assert_string_equal(x->job->fault.name, name);
        if (!strstr(x->job->fault.text, part))
                fail_msg("\"%s\" is not in \"%s\"", part, x->job->fault.text);
}

/* Only the client's session and its arenas are left. */
static void assert_clean(Film *x) {
        RUN_UNTIL(x->f, TAILQ_EMPTY(&x->f->m->unfinished) && x->f->m->arena_bytes == 2 * ARENA_BYTES);
        assert_int_equal(x->session->n_busy, 0);
}

/* ---- */

static void film_is_done_when_it_is_written(void **state) {
        Film *x = *state;
        MediaMessage m;

        (void) start(x, FRAMES);
        greet(x);
        assert_int_equal(x->asked.again, 0);
        assert_true(x->asked.ring_frames < FRAMES);
        for (uint64_t taken = 0; taken < FRAMES; taken = x->ready) {
                RUN_UNTIL(x->f, (take_in(x), x->ready > taken));
                take(x, taken, x->ready);
        }
        run_for(x->f, 30000); /* all frames are made: it is not over for that */
        assert_false(job_is_finished(x->job));
        (void) media_init(&m, MEDIA_DONE);
        say(x, &m);
        assert_done(x);
        assert_int_equal(x->n_asked, 1);
        assert_clean(x);
}

/* The decoder waits for latent-media, not longer than the ring. */
static void frames_that_are_not_taken_hold_up_the_worker(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        RUN_UNTIL(x->f, strcmp(x->job->phase, "frames-wait") == 0);
        (void) take_in(x);
        assert_true(x->ready < FRAMES && x->ready <= x->asked.ring_frames);
        write_all(x);
        assert_done(x);
}

/* At any frame: another one gets all of them. */
static void lost_once_all_frames_come_again(void **state) {
        static const uint64_t taken[] = { 0, 1, 17, 30, FRAMES };
        Film *x = *state;

        for (size_t i = 0; i < ELEMENTSOF(taken); i++) {
                unsigned jobs = x->f->count[WIRE_JOB_OPEN];

                x->n_asked = 0;
                (void) start(x, FRAMES);
                greet(x);
                for (uint64_t n = 0; n < taken[i]; n = x->ready < taken[i] ? x->ready : taken[i]) {
                        RUN_UNTIL(x->f, (take_in(x), x->ready > n));
                        take(x, n, x->ready < taken[i] ? x->ready : taken[i]);
                }
                if (taken[i] == FRAMES) /* the decoder has ended, too */
                        RUN_UNTIL(x->f, !TAILQ_NEXT(TAILQ_FIRST(&x->f->m->unfinished), unfinished_entry));
                cleanup_closep(&x->media);
                greet(x);
                assert_int_equal(x->asked.again, 1);
                write_all(x);
                assert_done(x);
                assert_int_equal(x->n_asked, 2);
                assert_int_equal(x->f->count[WIRE_JOB_OPEN] - jobs, 1 + 4 + 1); /* a plan, the phases, the last once more */
                cleanup_closep(&x->media);
                assert_clean(x);
        }
}

static void lost_twice_is_told(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        cleanup_closep(&x->media);
        greet(x);
        take(x, 0, 1);
        cleanup_closep(&x->media);
        assert_failed(x, FAULT_IO, "The film could not be written: latent-media died");
        assert_clean(x);
}

/* It would only come again. */
static void error_is_not_tried_again(void **state) {
        Film *x = *state;
        MediaMessage m;

        (void) start(x, FRAMES);
        greet(x);
        (void) media_init(&m, MEDIA_ERROR);
        (void) fault_set(&m.error.fault, -ENOSPC, FAULT_IO, "The disk is full.");
        say(x, &m);
        assert_failed(x, FAULT_IO, "The film could not be written: The disk is full.");
        assert_int_equal(x->n_asked, 1);
        assert_clean(x);
}

static void wait_for_stop(Film *x, JobState state) {
        RUN_UNTIL(x->f, take_in(x)); /* latentd has shut its side */
        run_for(x->f, 30000);
        assert_int_equal(x->job->state, state);
        cleanup_closep(&x->media);
}

static void cancel_is_over_when_the_file_is_free(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        job_cancel(x->job);
        job_cancel(x->job);
        wait_for_stop(x, JOB_CANCELLING);
        RUN_UNTIL(x->f, job_is_finished(x->job));
        assert_int_equal(x->job->state, JOB_CANCELLED);
        assert_int_equal(x->n_asked, 1);
        assert_clean(x);
}

static void cancel_while_it_begins_again(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        cleanup_closep(&x->media);
        RUN_UNTIL(x->f, try_accept(x));
        job_cancel(x->job); /* that one has nothing of ours yet */
        assert_int_equal(x->job->state, JOB_CANCELLED);
        assert_clean(x);
}

/* ---- contact sheets: another process beside it ---- */

static void start_both(Film *x, Film *ret_sheet) {
        x->sheet = true;
        (void) start(x, FRAMES);
        x->sheet = false;
        *ret_sheet = *x;
        ret_sheet->sheet = true;
        ret_sheet->media = ret_sheet->arena = -EBADF;
        ret_sheet->n_asked = 0;
        greet(x);
        greet(ret_sheet);
}

static void sheet_begins_again_with_the_film(void **state) {
        Film *x = *state, sheet;
        uint64_t film = 0, cells = 0;

        start_both(x, &sheet);
        take(x, 0, 1);
        take(&sheet, 0, 5);
        cleanup_closep(&x->media);
        RUN_UNTIL(x->f, take_in(&sheet)); /* the ring is the decoder's again when it is over */
        run_for(x->f, 30000);
        assert_false(try_accept(x));
        cleanup_closep(&sheet.media);
        greet(x);
        greet(&sheet);
        assert_int_equal(x->asked.again, 1);
        assert_int_equal(sheet.asked.again, 1);
        while (film < FRAMES || cells < FRAMES) {
                RUN_UNTIL(x->f, (take_in(x), take_in(&sheet), x->ready > film || sheet.ready > cells));
                assert_true(x->ready - cells <= x->asked.ring_frames && sheet.ready - film <= x->asked.ring_frames);
                take(x, film, x->ready);
                take(&sheet, cells, sheet.ready);
                film = x->ready;
                cells = sheet.ready;
        }
        say_done(x);
        run_for(x->f, 30000);
        assert_false(job_is_finished(x->job));
        say_done(&sheet);
        assert_done(x);
        assert_int_equal(x->n_asked, 2);
        cleanup_closep(&sheet.media);
        cleanup_closep(&sheet.arena);
        assert_clean(x);
}

static void cancel_is_over_when_both_files_are_free(void **state) {
        Film *x = *state, sheet;

        start_both(x, &sheet);
        job_cancel(x->job);
        wait_for_stop(x, JOB_CANCELLING);
        run_for(x->f, 30000);
        wait_for_stop(&sheet, JOB_CANCELLING);
        RUN_UNTIL(x->f, job_is_finished(x->job));
        assert_int_equal(x->job->state, JOB_CANCELLED);
        cleanup_closep(&sheet.arena);
        assert_clean(x);
}

static void sheet_that_is_lost_costs_no_film(void **state) {
        Film *x = *state, sheet;

        start_both(x, &sheet);
        take(&sheet, 0, 1);
        cleanup_closep(&sheet.media);
        write_all(x);
        assert_done(x);
        assert_int_equal(x->n_asked, 1);
        cleanup_closep(&sheet.arena);
        assert_clean(x);
}

static uint64_t held; /* its job */

/* Silent at the second chunk. */
static bool hold_second_chunk(Fake *f, const WireMessage *m) {
        const FakeJob *j;

        if (m->header.type != WIRE_STEP || m->header.step != 1)
                return false;
        j = fake_job(f, m->header.job);
        if (j->open.kind != WIRE_JOB_DECODE || j->open.video.n_dims == 0)
                return false;

        held = m->header.job;
        return true;
}

/* The decoder fails while latent-media writes. */
static void failure_is_told_when_the_file_is_free(void **state) {
        Film *x = *state;

        x->f->hook = hold_second_chunk;
        held = 0;
        (void) start(x, FRAMES);
        greet(x);
        RUN_UNTIL(x->f, held != 0);
        fake_error(x->f, held, 1, FAULT_INVALID_TENSOR);
        wait_for_stop(x, JOB_RUNNING);
        assert_failed(x, FAULT_INVALID_TENSOR, "Phase \"decode\"");
        assert_clean(x);
}

static void closed_session_waits_for_the_file(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        session_close(x->session);
        wait_for_stop(x, JOB_CANCELLING);
        RUN_UNTIL(x->f, job_is_finished(x->job) && TAILQ_EMPTY(&x->f->m->sessions) && x->f->m->arena_bytes == 0);
}

/* The job goes with its last write, and nobody is told. */
static void client_that_leaves_takes_its_film_along(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        peer_gone(STEAL_PTR(x->f->peer));
        RUN_UNTIL(x->f, take_in(x));
        cleanup_closep(&x->media);
        RUN_UNTIL(x->f, TAILQ_EMPTY(&x->f->m->jobs) && TAILQ_EMPTY(&x->f->m->sessions) && x->f->m->arena_bytes == 0);
}

static void service_that_ends_waits_for_nobody(void **state) {
        Film *x = *state;

        (void) start(x, FRAMES);
        greet(x);
        job_cancel(x->job);
        assert_int_equal(x->job->state, JOB_CANCELLING); /* teardown frees it as it is */
}

static void no_latent_media_is_refused_before_anything(void **state) {
        Film *x = *state;
        RenderOptions o = { .width = SIDE, .height = SIDE, .frames = 22, .file = x->file, .sheet = -EBADF, .format = MEDIA_MP4 };
        Fault fault = {};
        Job *j;

        (void) start(x, FRAMES);
        greet(x);
        write_all(x);
        assert_done(x);
        free(x->f->m->config->media_socket);
        free(x->f->m->config->media_directory);
        x->f->m->config->media_socket = strdup("/nowhere/socket");
        x->f->m->config->media_directory = strdup("/nowhere");
        assert_int_equal(render_new(x->session, x->f->peer, &o, &j, &fault), -ENOENT);
        assert_string_equal(fault.name, FAULT_NOT_SUPPORTED);
        assert_non_null(strstr(fault.text, "no program that reads and writes media: \"/nowhere/latent-media\""));
        assert_clean(x);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(film_is_done_when_it_is_written),
                TEST(frames_that_are_not_taken_hold_up_the_worker),
                TEST(lost_once_all_frames_come_again),
                TEST(lost_twice_is_told),
                TEST(error_is_not_tried_again),
                TEST(cancel_is_over_when_the_file_is_free),
                TEST(cancel_while_it_begins_again),
                TEST(failure_is_told_when_the_file_is_free),
                TEST(closed_session_waits_for_the_file),
                TEST(client_that_leaves_takes_its_film_along),
                TEST(service_that_ends_waits_for_nobody),
                TEST(no_latent_media_is_refused_before_anything),
                TEST(sheet_begins_again_with_the_film),
                TEST(cancel_is_over_when_both_files_are_free),
                TEST(sheet_that_is_lost_costs_no_film),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
