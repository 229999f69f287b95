/* SPDX-License-Identifier: Apache-2.0 */
/* One request to latent-media, which the test plays: what it may send and when, its death and silence in each state, and that an end is
 * told once, and not before the file is free again. */
#include "service/latentd/media-link.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "tests/unit/latentd/leaks.h"
#include "tests/unit/shared/cmocka-all.h"

#define FRAMES 3u
#define SHORT (UINT64_C(100) * 1000)

/* latentd's side, and the socket that latent-media would be started by. */
typedef struct Test {
        Manager m;
        char folder[32], path[64];
        int listener, file, arena;
        unsigned fds; /* of the process, before */

        MediaLink *link;
        int media; /* the test's end; -EBADF: not there or closed */
        int got[MEDIA_FDS_MAX];

        unsigned ends;
        bool is_done, free_in_end;
        MediaDone done;
        Fault fault;
        uint64_t taken;
        unsigned n_taken;
} Test;

static void on_taken(void *userdata, uint64_t frames) {
        Test *t = userdata;

        t->taken = frames;
        t->n_taken++;
}

static void on_end(void *userdata, const MediaDone *done, const Fault *f) {
        Test *t = userdata;

        t->ends++;
        t->is_done = done;
        if (t->free_in_end)
                t->link = media_link_free(t->link);
        if (done)
                t->done = *done;
        else
                t->fault = *f;
}

static void run_for(Test *t, uint64_t usec) {
        uint64_t end = clock_usec() + usec;

        do
                assert_true(sd_event_run(t->m.event, 1000) >= 0);
        while (clock_usec() < end);
}

#define UNTIL(t, condition)                                                                                                        \
        do {                                                                                                                       \
                uint64_t _end = clock_usec() + UINT64_C(120000000);                                                                \
                while (!(condition)) {                                                                                             \
                        assert_true(clock_usec() < _end);                                                                          \
                        assert_true(sd_event_run((t)->m.event, 1000) >= 0);                                                        \
                }                                                                                                                  \
        } while (false)

static int on_nothing(sd_event_source *source, uint64_t usec, void *userdata) {
        return 0;
}

static int setup(void **state) {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        sd_event_source *timer;
        Test *t = calloc(1, sizeof(*t));

        assert_non_null(t);
        t->media = t->got[0] = t->got[1] = -EBADF;
        assert_true(sd_event_new(&t->m.event) >= 0);
        assert_int_equal(config_new(&t->m.config), 0);
        (void) snprintf(t->folder, sizeof(t->folder), "/tmp/media-XXXXXX");
        assert_non_null(mkdtemp(t->folder));
        (void) snprintf(t->path, sizeof(t->path), "%s/socket", t->folder);
        free(t->m.config->media_socket);
        t->m.config->media_socket = strdup(t->path);
        t->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        (void) snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", t->path);
        assert_int_equal(bind(t->listener, (struct sockaddr *) &sa, sizeof(sa)), 0);
        assert_int_equal(listen(t->listener, 4), 0);
        t->file = memfd_create("film", MFD_CLOEXEC);
        t->arena = memfd_create("arena", MFD_CLOEXEC);
        /* Its first timer gives the loop a descriptor for good. */
        assert_true(sd_event_add_time(t->m.event, &timer, CLOCK_MONOTONIC, UINT64_MAX, 0, on_nothing, NULL) >= 0);
        (void) sd_event_source_disable_unref(timer);
        t->fds = count_fds();
        *state = t;
        return 0;
}

/* Nothing is left of any link. */
static int teardown(void **state) {
        Test *t = *state;

        t->link = media_link_free(t->link);
        cleanup_closep(&t->media);
        cleanup_closep(&t->got[0]);
        cleanup_closep(&t->got[1]);
        UNTIL(t, count_fds() == t->fds);
        (void) close(t->listener);
        (void) close(t->file);
        (void) close(t->arena);
        (void) unlink(t->path);
        (void) rmdir(t->folder);
        (void) config_free(t->m.config);
        (void) sd_event_unref(t->m.event);
        free(t);
        return 0;
}

static void start(Test *t, MediaType type) {
        const MediaHandlers handlers = {.taken = on_taken, .end = on_end, .userdata = t};
        MediaMessage m;
        Fault f = {};

        (void) media_init(&m, type);
        if (type == MEDIA_WRITE) {
                m.write.frames = FRAMES;
                m.write.samples = 100;
        } else
                m.read.what = MEDIA_PICTURE;
        assert_int_equal(media_link_new(&t->m, &m, t->file, t->arena, &handlers, &t->link, &f), 0);
        t->media = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);
        assert_true(t->media >= 0);
}

static void say(Test *t, const MediaMessage *m) {
        assert_int_equal(media_send(t->media, m, NULL, 0), 0);
}

static void say_hello(Test *t, const char *version) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_HELLO);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", version);
        say(t, &m);
}

static void say_taken(Test *t, uint64_t frames) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_TAKEN);
        m.taken.frames = frames;
        say(t, &m);
}

static void say_done(Test *t) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_DONE);
        m.done.bytes = 77;
        say(t, &m);
}

/* What latentd says next. */
static MediaMessage hear(Test *t) {
        MediaMessage m;
        Fault f = {};
        int fds[MEDIA_FDS_MAX], r;

        UNTIL(t, (r = media_receive(t->media, &m, fds, &f)) != -EAGAIN);
        if (r < 0)
                fail_msg("%s", f.text);
        assert_int_equal(r, 1);
        for (unsigned i = 0; i < MEDIA_FDS_MAX; i++)
                if (fds[i] >= 0) {
                        cleanup_closep(&t->got[i]);
                        t->got[i] = fds[i];
                }
        return m;
}

/* Up to the request. */
static void greet(Test *t, MediaType type) {
        start(t, type);
        say_hello(t, LATENTD_VERSION);
        assert_int_equal(hear(t).header.type, type);
}

static void expect_end(Test *t, const char *name, const char *part) {
        UNTIL(t, t->ends > 0);
        assert_int_equal(t->ends, 1);
        assert_false(t->is_done);
        if (strcmp(t->fault.name, name) != 0 || !strstr(t->fault.text, part))
                fail_msg("%s: %s; expected %s with \"%s\"", t->fault.name, t->fault.text, name, part);
        run_for(t, 20000);
        assert_int_equal(t->ends, 1);
}

/* The end is not told before latent-media's side has closed: it may be at its last write. */
static void expect_end_after_close(Test *t, const char *name, const char *part) {
        char byte;

        UNTIL(t, recv(t->media, &byte, 1, MSG_DONTWAIT) == 0);
        run_for(t, 30000);
        assert_int_equal(t->ends, 0);
        cleanup_closep(&t->media);
        expect_end(t, name, part);
}

/* ---- as it should be ---- */

static bool same_file(int a, int b) {
        struct stat x, y;

        return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

static void write_served_tells_frames_and_its_end(void **state) {
        Test *t = *state;
        MediaMessage m;

        start(t, MEDIA_WRITE);
        media_link_frames(t->link, 1, false); /* before the request is out */
        say_hello(t, LATENTD_VERSION);
        m = hear(t);
        assert_int_equal(m.header.type, MEDIA_WRITE);
        assert_int_equal(m.write.frames, FRAMES);
        assert_true(same_file(t->got[0], t->file) && same_file(t->got[1], t->arena));
        m = hear(t);
        assert_int_equal(m.header.type, MEDIA_FRAMES);
        assert_int_equal(m.frames.ready, 1);
        assert_int_equal(m.frames.sound, 0);
        say_taken(t, 1);
        UNTIL(t, t->n_taken == 1 && t->taken == 1);
        media_link_frames(t->link, 1, false); /* nothing new */
        media_link_frames(t->link, FRAMES, true);
        m = hear(t);
        assert_int_equal(m.frames.ready, FRAMES);
        assert_int_equal(m.frames.sound, 1);
        say_taken(t, FRAMES);
        say_done(t);
        UNTIL(t, t->ends > 0);
        assert_true(t->is_done && t->done.bytes == 77 && t->taken == FRAMES);
        assert_false(media_link_was_lost(t->link));
        assert_false(media_link_stop(t->link)); /* it is over */
        media_link_frames(t->link, FRAMES, true);
        run_for(t, 10000);
        assert_int_equal(t->ends, 1);
}

static void read_served_tells_its_end(void **state) {
        Test *t = *state;
        MediaMessage m;

        greet(t, MEDIA_READ);
        (void) media_init(&m, MEDIA_PROGRESS);
        say(t, &m);
        t->free_in_end = true;
        say_done(t);
        UNTIL(t, t->ends > 0);
        assert_true(t->is_done);
        assert_null(t->link);
}

static void error_is_told_as_it_is(void **state) {
        Test *t = *state;
        MediaMessage m;

        greet(t, MEDIA_READ);
        (void) media_init(&m, MEDIA_ERROR);
        (void) fault_set(&m.error.fault, -EINVAL, FAULT_INVALID_FILE, "It is a text.\xff");
        say(t, &m);
        expect_end(t, FAULT_INVALID_FILE, "It is a text.");
        assert_false(media_link_was_lost(t->link));
        assert_null(strchr(t->fault.text, '\xff')); /* D-Bus would refuse it */
}

/* A socket that is full costs nothing but time: the next message speaks of all frames. */
static void frames_wait_for_room(void **state) {
        Test *t = *state;
        MediaMessage m;
        uint64_t ready = 0;

        start(t, MEDIA_WRITE);
        say_hello(t, LATENTD_VERSION);
        assert_int_equal(hear(t).header.type, MEDIA_WRITE);
        for (uint64_t i = 1; i <= 100000; i++)
                media_link_frames(t->link, i, false);
        for (unsigned n = 0; ready < 100000; n++) {
                m = hear(t);
                assert_int_equal(m.header.type, MEDIA_FRAMES);
                assert_true(m.frames.ready > ready);
                ready = m.frames.ready;
                assert_true(n < 50000);
        }
}

/* ---- wrong answers ---- */

static void another_version_is_named(void **state) {
        Test *t = *state;

        start(t, MEDIA_WRITE);
        say_hello(t, "0.0.1");
        expect_end(t, FAULT_IO, "another version");
        assert_false(media_link_was_lost(t->link));
}

static void message_of(MediaType type, MediaMessage *ret) {
        (void) media_init(ret, type);
        if (type == MEDIA_HELLO)
                (void) snprintf(ret->hello.build_id, sizeof(ret->hello.build_id), "%s", LATENTD_VERSION);
}

static void answers_before_the_greeting_break_the_protocol(void **state) {
        static const MediaType types[] = {MEDIA_TAKEN, MEDIA_DONE, MEDIA_ERROR, MEDIA_PROGRESS, MEDIA_FRAMES};
        Test *t = *state;
        MediaMessage m;

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                start(t, MEDIA_WRITE);
                message_of(types[i], &m);
                say(t, &m);
                expect_end(t, FAULT_IO, "broke the protocol"); /* it has no file yet: at once */
                t->link = media_link_free(t->link);
                cleanup_closep(&t->media);
                t->ends = 0;
        }
}

static void wrong_answers_break_the_protocol(void **state) {
        static const struct {
                MediaType request, type;
                uint64_t ready, number;
                bool sound;
        } wrong[] = {
                {MEDIA_WRITE, MEDIA_HELLO, 0, 0, false},
                {MEDIA_WRITE, MEDIA_FRAMES, 0, 0, false},
                {MEDIA_WRITE, MEDIA_TAKEN, 1, 2, false},           /* more than there are */
                {MEDIA_WRITE, MEDIA_TAKEN, 0, UINT64_MAX, false},
                {MEDIA_WRITE, MEDIA_DONE, FRAMES - 1, 0, true},    /* a frame too early */
                {MEDIA_WRITE, MEDIA_DONE, FRAMES, 0, false},       /* without the sound */
                {MEDIA_READ, MEDIA_TAKEN, 0, 0, false},
                {MEDIA_READ, MEDIA_HELLO, 0, 0, false},
        };
        Test *t = *state;
        MediaMessage m;

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                greet(t, wrong[i].request);
                media_link_frames(t->link, wrong[i].ready, wrong[i].sound);
                message_of(wrong[i].type, &m);
                if (wrong[i].type == MEDIA_TAKEN)
                        m.taken.frames = wrong[i].number;
                say(t, &m);
                expect_end_after_close(t, FAULT_IO, "broke the protocol");
                assert_false(media_link_was_lost(t->link));
                assert_int_equal(t->n_taken, 0);
                t->link = media_link_free(t->link);
                t->ends = 0;
        }
}

static void taken_must_not_fall(void **state) {
        Test *t = *state;

        greet(t, MEDIA_WRITE);
        media_link_frames(t->link, 3, false);
        say_taken(t, 2);
        say_taken(t, 1);
        expect_end_after_close(t, FAULT_IO, "broke the protocol");
        assert_int_equal(t->taken, 2);
}

/* Not whole messages: cut off, longer, empty, of another size, type or version, with descriptors. */
static void raw_bytes_break_the_protocol(void **state) {
        Test *t = *state;

        for (unsigned i = 0; i < 8; i++) {
                MediaMessage m;
                int fds[2] = {t->file, t->arena};
                size_t size, n_fds = 0;
                char large[MEDIA_MESSAGE_MAX + 100] = "";
                const void *bytes = &m;

                greet(t, MEDIA_WRITE);
                size = media_init(&m, MEDIA_TAKEN);
                switch (i) {
                case 0:
                        size = 3;
                        break;
                case 1:
                        size--;
                        break;
                case 2:
                        size++;
                        break;
                case 3:
                        m.header.version++;
                        break;
                case 4:
                        m.header.type = 999;
                        break;
                case 5:
                        n_fds = 2;
                        break;
                case 6:
                        bytes = large;
                        size = sizeof(large);
                        break;
                default:
                        size = 0;
                }
                {
                        union {
                                char bytes[CMSG_SPACE(sizeof(fds))];
                                struct cmsghdr align;
                        } control = {};
                        struct iovec iov = {.iov_base = (void *) bytes, .iov_len = size};
                        struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};

                        if (n_fds > 0) {
                                h.msg_control = control.bytes;
                                h.msg_controllen = sizeof(control.bytes);
                                *CMSG_FIRSTHDR(&h) = (struct cmsghdr){
                                        .cmsg_len = CMSG_LEN(sizeof(fds)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
                                memcpy(CMSG_DATA(CMSG_FIRSTHDR(&h)), fds, sizeof(fds));
                        }
                        assert_int_equal(sendmsg(t->media, &h, MSG_NOSIGNAL), size);
                }
                expect_end_after_close(t, FAULT_IO, "broke the protocol");
                t->link = media_link_free(t->link);
                t->ends = 0;
        }
}

/* ---- deaths ---- */

static void death_is_told_in_each_state(void **state) {
        Test *t = *state;

        for (unsigned i = 0; i < 6; i++) {
                if (i == 0 || i == 5)
                        start(t, MEDIA_WRITE);
                else
                        greet(t, i == 1 ? MEDIA_READ : MEDIA_WRITE);
                if (i == 5)
                        say_hello(t, LATENTD_VERSION); /* and dies before the request */
                if (i == 3 || i == 4)
                        media_link_frames(t->link, i == 3 ? 1 : FRAMES, i == 4);
                if (i == 3)
                        assert_int_equal(hear(t).header.type, MEDIA_FRAMES);
                /* i == 4: with an unread message, which is a reset */
                cleanup_closep(&t->media);
                t->free_in_end = i == 2;
                expect_end(t, FAULT_IO, "died: it closed its connection");
                if (t->link)
                        assert_true(media_link_was_lost(t->link));
                t->link = media_link_free(t->link);
                t->free_in_end = false;
                t->ends = 0;
        }
}

/* What it said last still counts. */
static void answer_before_the_death_counts(void **state) {
        Test *t = *state;

        greet(t, MEDIA_WRITE);
        media_link_frames(t->link, FRAMES, true);
        say_done(t); /* FRAMES is unread: the kernel speaks of a reset first */
        cleanup_closep(&t->media);
        UNTIL(t, t->ends > 0);
        assert_true(t->is_done);
}

/* ---- silence ---- */

static void silence_before_the_greeting_ends_it(void **state) {
        Test *t = *state;

        start(t, MEDIA_READ);
        media_link_set_patience(t->link, SHORT);
        expect_end(t, FAULT_IO, "did not answer for");
}

static void silence_while_it_has_work_ends_it(void **state) {
        Test *t = *state;

        greet(t, MEDIA_WRITE);
        media_link_frames(t->link, 1, false);
        media_link_set_patience(t->link, SHORT);
        expect_end_after_close(t, FAULT_IO, "did not answer for");
        assert_false(media_link_was_lost(t->link)); /* it would only hang again */
}

/* The sampler may take hours for the next frame. */
static void waiting_for_frames_is_no_silence(void **state) {
        Test *t = *state;

        greet(t, MEDIA_WRITE);
        media_link_frames(t->link, 1, false);
        say_taken(t, 1);
        UNTIL(t, t->taken == 1);
        media_link_set_patience(t->link, SHORT);
        run_for(t, 5 * SHORT);
        assert_int_equal(t->ends, 0);
        media_link_set_patience(t->link, 20 * SHORT);
        media_link_frames(t->link, 2, false); /* from now on it is its turn, for as long as that */
        run_for(t, SHORT / 2);
        assert_int_equal(t->ends, 0);
        expect_end_after_close(t, FAULT_IO, "did not answer for");
}

/* Slow, and alive: progress every now and then. */
static void slow_is_no_silence(void **state) {
        Test *t = *state;
        MediaMessage m;

        greet(t, MEDIA_READ);
        media_link_set_patience(t->link, 20 * SHORT);
        (void) media_init(&m, MEDIA_PROGRESS);
        for (unsigned i = 0; i < 6; i++) { /* longer in all than its patience */
                run_for(t, 4 * SHORT);
                say(t, &m);
        }
        run_for(t, SHORT);
        assert_int_equal(t->ends, 0);
        say_done(t);
        UNTIL(t, t->ends > 0);
        assert_true(t->is_done);
}

/* ---- to stop it ---- */

static void stop_is_told_when_the_file_is_free(void **state) {
        Test *t = *state;

        for (unsigned i = 0; i < 2; i++) {
                greet(t, i == 0 ? MEDIA_WRITE : MEDIA_READ);
                assert_true(media_link_stop(t->link));
                assert_true(media_link_stop(t->link)); /* likewise */
                say_done(t);                           /* too late */
                media_link_frames(t->link, 2, false);
                t->free_in_end = i == 1;
                expect_end_after_close(t, FAULT_CANCELLED, "cancelled");
                if (t->link)
                        assert_false(media_link_was_lost(t->link));
                t->link = media_link_free(t->link);
                t->ends = 0;
        }
}

static void stop_before_the_request_is_at_once(void **state) {
        Test *t = *state;

        start(t, MEDIA_WRITE);
        assert_false(media_link_stop(t->link));
        t->link = media_link_free(t->link);
        assert_int_equal(t->ends, 0);
}

static void free_tells_nothing(void **state) {
        Test *t = *state;
        char byte;

        greet(t, MEDIA_WRITE);
        t->link = media_link_free(t->link);
        assert_int_equal(recv(t->media, &byte, 1, 0), 0);
        run_for(t, 10000);
        assert_int_equal(t->ends, 0);
}

/* Numbers of descriptors that are closed already are others' by then. */
static void closes_each_descriptor_once(void **state) {
        Test *t = *state;
        int others[8];

        for (unsigned i = 0; i < 3; i++) {
                greet(t, MEDIA_WRITE);
                if (i == 1)
                        cleanup_closep(&t->media);
                UNTIL(t, i != 1 || t->ends > 0);
                for (size_t k = 0; k < ELEMENTSOF(others); k++)
                        others[k] = open("/dev/null", O_RDONLY | O_CLOEXEC);
                t->link = media_link_free(t->link);
                for (size_t k = 0; k < ELEMENTSOF(others); k++)
                        assert_int_equal(close(others[k]), 0);
                cleanup_closep(&t->media);
                t->ends = 0;
        }
}

/* ---- our own child ---- */

static void spawned_child_is_reaped_and_its_end_named(void **state) {
        Test *t = *state;
        char script[96];
        FILE *s;

        free(t->m.config->media_directory);
        t->m.config->media_directory = strdup(t->folder);
        t->m.config->worker_start = WORKER_START_SPAWN;
        (void) snprintf(script, sizeof(script), "%s/latent-media", t->folder);
        for (unsigned i = 0; i < 2; i++) {
                const MediaHandlers handlers = {.end = on_end, .userdata = t};
                MediaMessage m;
                Fault f = {};

                s = fopen(script, "we");
                assert_non_null(s);
                fprintf(s, "#!/bin/sh\n%s\n", i == 0 ? "exit 3" : "kill -9 $$");
                (void) fclose(s);
                assert_int_equal(chmod(script, 0700), 0);
                (void) media_init(&m, MEDIA_READ);
                m.read.what = MEDIA_PROBE;
                if (media_link_new(&t->m, &m, t->file, -EBADF, &handlers, &t->link, &f) < 0)
                        fail_msg("%s", f.text);
                UNTIL(t, t->ends > 0);
                /* The end of its connection may come a moment before its end. */
                assert_non_null(strstr(t->fault.text, "died: it "));
                if (!strstr(t->fault.text, "closed its connection"))
                        assert_non_null(strstr(t->fault.text, i == 0 ? "exited with status 3" : "was killed by signal 9"));
                t->link = media_link_free(t->link);
                t->ends = 0;
        }
        (void) unlink(script);
}

static void missing_program_is_named(void **state) {
        const MediaHandlers handlers = {.end = on_end};
        Test *t = *state;
        MediaMessage m;
        Fault f = {};

        free(t->m.config->media_directory);
        t->m.config->media_directory = strdup("/nowhere");
        t->m.config->worker_start = WORKER_START_SPAWN;
        (void) media_init(&m, MEDIA_READ);
        assert_int_equal(media_link_new(&t->m, &m, t->file, t->arena, &handlers, &t->link, &f), -ENOENT);
        assert_string_equal(f.name, FAULT_NOT_SUPPORTED);
        assert_non_null(strstr(f.text, "/nowhere/latent-media"));
        assert_null(t->link);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(write_served_tells_frames_and_its_end),
                TEST(read_served_tells_its_end),
                TEST(error_is_told_as_it_is),
                TEST(frames_wait_for_room),
                TEST(another_version_is_named),
                TEST(answers_before_the_greeting_break_the_protocol),
                TEST(wrong_answers_break_the_protocol),
                TEST(taken_must_not_fall),
                TEST(raw_bytes_break_the_protocol),
                TEST(death_is_told_in_each_state),
                TEST(answer_before_the_death_counts),
                TEST(silence_before_the_greeting_ends_it),
                TEST(silence_while_it_has_work_ends_it),
                TEST(waiting_for_frames_is_no_silence),
                TEST(slow_is_no_silence),
                TEST(stop_is_told_when_the_file_is_free),
                TEST(stop_before_the_request_is_at_once),
                TEST(free_tells_nothing),
                TEST(closes_each_descriptor_once),
                TEST(spawned_child_is_reaped_and_its_end_named),
                TEST(missing_program_is_named),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
