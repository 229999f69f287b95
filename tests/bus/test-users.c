/* SPDX-License-Identifier: Apache-2.0 */

/* Two users on one bus, with real uids: neither sees, maps or cancels what is the other's; a third one is not served at all.
 * Run by with-latentd --system --conf AllowedUsers="daemon bin" --conf ModelPath=tests/data/dit, as root. */

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <systemd/sd-bus.h>

/* dbus-daemon serves only uids of the password file: daemon, bin, sys are on every system. */
#define ALICE 1
#define BOB 2
#define MALLORY 3
#define NAME "org.latentd.Latent1"
#define ROOT "/org/latentd/Latent1"

#define PATHS 4
enum { MODEL, PRIVATE_MODEL, SESSION, JOB };

/* What Alice has, told to the others by the test. */
typedef struct Alice {
        pid_t pid;
        int go; /* write end: closing it ends her */
        char paths[PATHS][128];
        int input_fd, output_fd; /* numbers in her process */
} Alice;

static Alice alice;

/* In a child: any failure ends it with the line number, which the parent reports. */
#define REQUIRE(x)                                                                     \
        do {                                                                           \
                if (!(x)) {                                                            \
                        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);        \
                        _exit(1);                                                      \
                }                                                                      \
        } while (0)

static sd_bus *connect_as(uid_t uid) {
        sd_bus *bus;

        REQUIRE(setgroups(0, NULL) == 0 && setresgid(uid, uid, uid) == 0 && setresuid(uid, uid, uid) == 0);
        REQUIRE(sd_bus_open_system(&bus) >= 0);
        return bus;
}

static void wait_done(sd_bus *bus, const char *job) {
        for (int i = 0; i < 2400; i++) {
                char *state;

                REQUIRE(sd_bus_get_property_string(bus, NAME, job, NAME ".Job", "State", NULL, &state) >= 0);
                if (strcmp(state, "done") == 0) {
                        free(state);
                        return;
                }
                REQUIRE(strcmp(state, "queued") == 0 || strcmp(state, "running") == 0);
                free(state);
                usleep(50 * 1000);
        }
        REQUIRE(!"the job did not end");
}

static void path_of(sd_bus_message *reply, char *ret) {
        const char *path;

        REQUIRE(sd_bus_message_read(reply, "o", &path) >= 0);
        REQUIRE(strlen(path) < 128);
        strcpy(ret, path);
}

/* The place of a tensor in the input arena. */
static void append_tensor(sd_bus_message *m, const char *key, uint64_t offset, const char *type, const uint64_t *shape, size_t n) {
        REQUIRE(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        REQUIRE(sd_bus_message_append(m, "s", key) >= 0);
        REQUIRE(sd_bus_message_open_container(m, 'v', "(tsat)") >= 0);
        REQUIRE(sd_bus_message_open_container(m, 'r', "tsat") >= 0);
        REQUIRE(sd_bus_message_append(m, "ts", offset, type) >= 0);
        REQUIRE(sd_bus_message_append_array(m, 't', shape, n * sizeof(uint64_t)) >= 0);
        REQUIRE(sd_bus_message_close_container(m) >= 0);
        REQUIRE(sd_bus_message_close_container(m) >= 0);
        REQUIRE(sd_bus_message_close_container(m) >= 0);
}

/* A trajectory of 1000 steps on zeros: long enough to be there while the others look. */
static void start_sample(sd_bus *bus, const char *session, char *ret_job) {
        const uint64_t text[] = { 9, 160 }, video[] = { 24, 2, 4, 4 }, audio[] = { 32, 2, 8 };
        sd_bus_message *m, *reply;

        REQUIRE(sd_bus_message_new_method_call(bus, &m, NAME, session, NAME ".Session", "Sample") >= 0);
        REQUIRE(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        append_tensor(m, "text", 0, "BF16", text, 2);
        append_tensor(m, "video", 4096, "F32", video, 4);
        append_tensor(m, "audio", 8192, "F32", audio, 3);
        REQUIRE(sd_bus_message_append(m, "{sv}", "steps", "u", 1000) >= 0);
        REQUIRE(sd_bus_message_close_container(m) >= 0);
        REQUIRE(sd_bus_call(bus, m, 0, NULL, &reply) >= 0);
        path_of(reply, ret_job);
}

static void alice_main(int report, int go) {
        sd_bus *bus = connect_as(ALICE);
        sd_bus_message *reply;
        int in, out;
        Alice a = {};

        (void) prctl(PR_SET_DUMPABLE, 0); /* as a login session's programs are to other uids anyway */
        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "LoadModel", NULL, &reply, "sa{sv}",
                                "comfy.safetensors", 0) >= 0);
        path_of(reply, a.paths[JOB]);
        wait_done(bus, a.paths[JOB]);
        REQUIRE(sd_bus_get_property(bus, NAME, a.paths[JOB], NAME ".Job", "Result", NULL, &reply, "a{sv}") >= 0);
        REQUIRE(sd_bus_message_enter_container(reply, 'a', "{sv}") >= 0);
        for (;;) {
                const char *key;

                REQUIRE(sd_bus_message_enter_container(reply, 'e', "sv") > 0);
                REQUIRE(sd_bus_message_read(reply, "s", &key) >= 0);
                if (strcmp(key, "model") == 0) {
                        const char *path;

                        REQUIRE(sd_bus_message_read(reply, "v", "o", &path) >= 0);
                        strcpy(a.paths[MODEL], path);
                        break;
                }
                REQUIRE(sd_bus_message_skip(reply, "v") >= 0);
                REQUIRE(sd_bus_message_exit_container(reply) >= 0);
        }
        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "NewModel", NULL, &reply, "a{sv}", 1, "name", "s",
                                "hers") >= 0);
        path_of(reply, a.paths[PRIVATE_MODEL]);
        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "OpenSession", NULL, &reply, "a{sv}", 3, "model", "o",
                                a.paths[MODEL], "input-bytes", "t", (uint64_t) 65536, "output-bytes", "t",
                                (uint64_t) 65536) >= 0);
        path_of(reply, a.paths[SESSION]);
        REQUIRE(sd_bus_message_read(reply, "hh", &in, &out) >= 0);
        a.input_fd = fcntl(in, F_DUPFD_CLOEXEC, 100);
        a.output_fd = fcntl(out, F_DUPFD_CLOEXEC, 100);
        REQUIRE(a.input_fd >= 0 && a.output_fd >= 0);
        start_sample(bus, a.paths[SESSION], a.paths[JOB]);
        REQUIRE(write(report, &a, sizeof(a)) == sizeof(a));
        /* Her connection stays until the test closes the pipe. */
        char c;
        (void) !read(go, &c, 1);
        _exit(0);
}

static int setup(void **state) {
        int report[2], go[2];
        Alice a;

        if (geteuid() != 0)
                return 0;
        if (pipe(report) < 0 || pipe(go) < 0)
                return -1;
        pid_t pid = fork();
        if (pid == 0) {
                close(report[0]);
                close(go[1]);
                alice_main(report[1], go[0]);
        }
        close(report[1]);
        close(go[0]);
        if (read(report[0], &a, sizeof(a)) != sizeof(a))
                return -1;
        close(report[0]);
        alice = a;
        alice.pid = pid;
        alice.go = go[1];
        return 0;
}

static int teardown(void **state) {
        int status;

        if (alice.pid == 0)
                return 0;
        close(alice.go);
        return waitpid(alice.pid, &status, 0) == alice.pid && status == 0 ? 0 : -1;
}

/* Runs f as another user in a process of its own. */
static void as_user(uid_t uid, void (*f)(sd_bus *bus)) {
        int status;

        if (geteuid() != 0)
                skip(); /* real uids need root */
        pid_t pid = fork();
        if (pid == 0) {
                f(connect_as(uid));
                _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
}

/* Calls a method and returns the error's name, "" on success. */
static const char *error_of(sd_bus *bus, const char *path, const char *interface, const char *member, const char *types, ...) {
        static char name[256];
        sd_bus_error error = SD_BUS_ERROR_NULL;
        sd_bus_message *m;
        va_list ap;

        REQUIRE(sd_bus_message_new_method_call(bus, &m, NAME, path, interface, member) >= 0);
        va_start(ap, types);
        REQUIRE(sd_bus_message_appendv(m, types, ap) >= 0);
        va_end(ap);
        name[0] = 0;
        if (sd_bus_call(bus, m, 0, &error, NULL) < 0)
                snprintf(name, sizeof(name), "%s", error.name ? error.name : "?");
        sd_bus_error_free(&error);
        sd_bus_message_unref(m);
        return name;
}

static const char unknown[] = "org.freedesktop.DBus.Error.UnknownObject";

static void bob_cannot_see(sd_bus *bus) {
        const char *interfaces[PATHS] = { NAME ".Model", NAME ".Model", NAME ".Session", NAME ".Job" };

        for (int i = 0; i < PATHS; i++) {
                const char *e = error_of(bus, alice.paths[i], "org.freedesktop.DBus.Properties", "GetAll", "s", interfaces[i]);

                if (i == MODEL) /* of ModelPath=: for all who may use the service */
                        REQUIRE(strcmp(e, "") == 0);
                else
                        REQUIRE(strcmp(e, unknown) == 0);
        }
}

static void bob_cannot_act(sd_bus *bus) {
        REQUIRE(strcmp(error_of(bus, alice.paths[JOB], NAME ".Job", "Cancel", ""), unknown) == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[SESSION], NAME ".Session", "Close", ""), unknown) == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[SESSION], NAME ".Session", "Step", "a{sv}", 0), unknown) == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[PRIVATE_MODEL], NAME ".Model", "Commit", ""), unknown) == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[PRIVATE_MODEL], NAME ".Model", "Unload", ""), unknown) == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[MODEL], NAME ".Model", "Unload", ""), NAME ".Error.Busy") == 0);
        REQUIRE(strcmp(error_of(bus, ROOT, NAME ".Manager", "OpenSession", "a{sv}", 1, "model", "o",
                                       alice.paths[PRIVATE_MODEL]), NAME ".Error.NotFound") == 0);
}

static void bob_lists_nothing(sd_bus *bus) {
        sd_bus_message *reply;

        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "ListJobs", NULL, &reply, "") >= 0);
        REQUIRE(sd_bus_message_enter_container(reply, 'a', "(oss)") == 1);
        REQUIRE(sd_bus_message_at_end(reply, false) > 0);
        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "ListSessions", NULL, &reply, "") >= 0);
        REQUIRE(sd_bus_message_enter_container(reply, 'a', "(oo)") == 1);
        REQUIRE(sd_bus_message_at_end(reply, false) > 0);
        /* Nor by the tree: introspection and ObjectManager name no private object. */
        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", NULL, &reply, "") >= 0);
        REQUIRE(sd_bus_message_enter_container(reply, 'a', "{oa{sa{sv}}}") == 1);
        for (;;) {
                const char *path;
                int r = sd_bus_message_enter_container(reply, 'e', "oa{sa{sv}}");

                REQUIRE(r >= 0);
                if (r == 0)
                        break;
                REQUIRE(sd_bus_message_read(reply, "o", &path) > 0);
                for (int i = 1; i < PATHS; i++)
                        REQUIRE(strcmp(path, alice.paths[i]) != 0);
                REQUIRE(sd_bus_message_skip(reply, "a{sa{sv}}") >= 0);
                REQUIRE(sd_bus_message_exit_container(reply) >= 0);
        }
        const char *dirs[] = { ROOT "/job", ROOT "/session", ROOT "/model" };
        for (int d = 0; d < 3; d++) {
                sd_bus_error error = SD_BUS_ERROR_NULL;
                const char *xml;

                if (sd_bus_call_method(bus, NAME, dirs[d], "org.freedesktop.DBus.Introspectable", "Introspect", &error, &reply, "") < 0)
                        continue;
                REQUIRE(sd_bus_message_read(reply, "s", &xml) > 0);
                for (int i = 1; i < PATHS; i++) {
                        size_t n = strlen(dirs[d]);
                        char node[160];

                        if (strncmp(alice.paths[i], dirs[d], n) != 0)
                                continue;
                        snprintf(node, sizeof(node), "node name=\"%s\"", alice.paths[i] + n + 1);
                        REQUIRE(strstr(xml, node) == NULL);
                }
        }
}

static void bob_cannot_map(sd_bus *bus) {
        const int numbers[] = { alice.input_fd, alice.output_fd };

        for (int i = 0; i < 2; i++) {
                char path[64];

                snprintf(path, sizeof(path), "/proc/%d/fd/%d", alice.pid, numbers[i]);
                REQUIRE(open(path, O_RDONLY | O_CLOEXEC) < 0);
        }
}

static void bob_works_for_himself(sd_bus *bus) {
        sd_bus_message *reply;
        char session[128];
        int in, out;
        void *p;

        REQUIRE(sd_bus_call_method(bus, NAME, ROOT, NAME ".Manager", "OpenSession", NULL, &reply, "a{sv}", 3, "model", "o",
                                alice.paths[MODEL], "input-bytes", "t", (uint64_t) 4096, "output-bytes", "t",
                                (uint64_t) 4096) >= 0);
        path_of(reply, session);
        REQUIRE(sd_bus_message_read(reply, "hh", &in, &out) >= 0);
        /* His own output arena: read-only, however he tries. */
        REQUIRE(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, out, 0) == MAP_FAILED);
        p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, out, 0);
        REQUIRE(p != MAP_FAILED);
        REQUIRE(mprotect(p, 4096, PROT_READ | PROT_WRITE) < 0);
        REQUIRE(ftruncate(out, 0) < 0 && ftruncate(in, 0) < 0 && ftruncate(in, 8192) < 0);
        REQUIRE(fchmod(out, 0666) < 0 && fchmod(in, 0666) < 0);
        char path[64];
        snprintf(path, sizeof(path), "/proc/self/fd/%d", out);
        REQUIRE(open(path, O_RDWR | O_CLOEXEC) < 0);
        REQUIRE(sd_bus_call_method(bus, NAME, session, NAME ".Session", "Close", NULL, NULL, "") >= 0);
}

static void mallory_is_refused(sd_bus *bus) {
        const char *e;

        e = error_of(bus, ROOT, NAME ".Manager", "ListJobs", "");
        REQUIRE(strcmp(e, NAME ".Error.AccessDenied") == 0);
        e = error_of(bus, ROOT, NAME ".Manager", "LoadModel", "sa{sv}", "comfy.safetensors", 0);
        REQUIRE(strcmp(e, NAME ".Error.AccessDenied") == 0);
        e = error_of(bus, ROOT, NAME ".Manager", "NewModel", "a{sv}", 0);
        REQUIRE(strcmp(e, NAME ".Error.AccessDenied") == 0);
        e = error_of(bus, ROOT, NAME ".Manager", "OpenSession", "a{sv}", 1, "model", "o", alice.paths[MODEL]);
        REQUIRE(strcmp(e, NAME ".Error.AccessDenied") == 0);
        e = error_of(bus, ROOT, NAME ".Manager", "DropCache", "");
        REQUIRE(strcmp(e, NAME ".Error.AccessDenied") == 0);
        REQUIRE(strcmp(error_of(bus, alice.paths[JOB], NAME ".Job", "Cancel", ""), "") != 0);
}

static void users_other_session_is_unknown(void **state) {
        as_user(BOB, bob_cannot_see);
}

static void users_other_job_cannot_be_cancelled(void **state) {
        as_user(BOB, bob_cannot_act);
}

static void users_lists_show_own_only(void **state) {
        as_user(BOB, bob_lists_nothing);
}

static void users_other_arena_cannot_be_opened(void **state) {
        as_user(BOB, bob_cannot_map);
}

static void users_own_output_is_read_only(void **state) {
        as_user(BOB, bob_works_for_himself);
}

static void users_not_allowed_is_refused(void **state) {
        as_user(MALLORY, mallory_is_refused);
}

static void users_first_is_undisturbed(void **state) {
        if (geteuid() != 0)
                skip();
        /* Her connection and job are still there after all of this. */
        int status;
        assert_int_equal(waitpid(alice.pid, &status, WNOHANG), 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(users_other_session_is_unknown),
                cmocka_unit_test(users_other_job_cannot_be_cancelled),
                cmocka_unit_test(users_lists_show_own_only),
                cmocka_unit_test(users_other_arena_cannot_be_opened),
                cmocka_unit_test(users_own_output_is_read_only),
                cmocka_unit_test(users_not_allowed_is_refused),
                cmocka_unit_test(users_first_is_undisturbed),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
