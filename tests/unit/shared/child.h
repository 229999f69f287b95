/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A program of ours as a test's child, started as systemd starts it: with one end of a socket pair as descriptor 3. */

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "service/shared/clock.h"
#include "tests/unit/shared/cmocka-all.h"

#define CHILD_SANITIZER_EXIT 66

static inline void child_exec(const char *program, int socket) {
        char path[4096];

        (void) prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nothing behind */
        (void) snprintf(path, sizeof(path), "%s/%s", getenv("LATENT_BUILD_DIR"), program);
        (void) setenv("LISTEN_FDS", "1", 1);
        (void) setenv("TSAN_OPTIONS", "exitcode=66:halt_on_error=1:atexit_sleep_ms=20", 1); /* 1000: what each waits at its end */
        (void) setenv("ASAN_OPTIONS", "exitcode=66:detect_leaks=0", 1); /* leaks are looked for where the code runs in the test */
        (void) setenv("UBSAN_OPTIONS", "exitcode=66:halt_on_error=1:print_stacktrace=1", 1);
        if (socket == 3)
                (void) fcntl(3, F_SETFD, 0);
        else if (dup2(socket, 3) < 0)
                _exit(126);
        execl(path, path, (char *) NULL);
        _exit(127);
}

/* program: its path in the build; type: of the pair, of which the other end is *ret_socket. */
static inline pid_t child_spawn(const char *program, int type, int *ret_socket) {
        int pair[2];
        pid_t pid;

        assert_int_equal(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, pair), 0);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
                child_exec(program, pair[1]);
        assert_int_equal(close(pair[1]), 0);
        *ret_socket = pair[0];
        return pid;
}

#define CHILD_WAIT_SEC 120u /* only one that hangs takes as long */

/* Its status; *pid is 0 then. */
static inline int child_wait(pid_t *pid) {
        uint64_t end = clock_usec() + CHILD_WAIT_SEC * UINT64_C(1000000);

        for (;;) {
                const struct timespec pause = {.tv_nsec = 2000000};
                int status;
                pid_t p = waitpid(*pid, &status, WNOHANG);

                assert_true(p >= 0);
                if (p > 0) {
                        *pid = 0;
                        return status;
                }
                if (clock_usec() >= end)
                        fail_msg("the program lives on after %u s", CHILD_WAIT_SEC);
                (void) nanosleep(&pause, NULL);
        }
}

/* Of one that has nothing to live for any more: also it may not have been stopped by a sanitizer. */
static inline void child_end(pid_t *pid) {
        int status = child_wait(pid);

        if (WIFEXITED(status) && WEXITSTATUS(status) == CHILD_SANITIZER_EXIT)
                fail_msg("a sanitizer stopped the program");
}
