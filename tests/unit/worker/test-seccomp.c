/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/seccomp.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "service/shared/slice.h"

#define FILTER_FAILED 99

/* Runs fn in a filtered child: waitpid()'s status. */
static int run_filtered(int (*fn)(void)) {
        int status;
        pid_t p;

        if (!seccomp_is_supported())
                skip();

        p = fork();
        assert_true(p >= 0);
        if (p == 0) {
                if (seccomp_apply(false) < 0)
                        _exit(FILTER_FAILED);
                _exit(fn());
        }
        assert_int_equal(waitpid(p, &status, 0), p);
        if (WIFEXITED(status) && WEXITSTATUS(status) == FILTER_FAILED)
                fail_msg("the filter cannot be set");
        return status;
}

static void assert_allowed(int (*fn)(void)) {
        int status = run_filtered(fn);

        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                fail_msg("refused: status 0x%x", status);
}

static void assert_refused(int (*fn)(void)) {
        int status = run_filtered(fn);

        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EPERM);
}

static void assert_deadly(int (*fn)(void)) {
        int status = run_filtered(fn);

        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), SIGSYS);
}

#define ERRNO_OF(call) ((call) < 0 ? errno : 0)

static int do_nothing(void) {
        return 0;
}
static int do_socket(void) {
        return ERRNO_OF(socket(AF_UNIX, SOCK_STREAM, 0));
}
static int do_connect(void) {
        return ERRNO_OF(connect(0, &(struct sockaddr){}, 0));
}
static int do_bind(void) {
        return ERRNO_OF(bind(0, &(struct sockaddr){}, 0));
}
static int do_open_read(void) {
        return ERRNO_OF(open("/proc/meminfo", O_RDONLY | O_CLOEXEC));
}
static int do_open_write(void) {
        return ERRNO_OF(open("/dev/null", O_WRONLY | O_CLOEXEC));
}
static int do_open_read_write(void) {
        return ERRNO_OF(open("/dev/null", O_RDWR | O_CLOEXEC));
}
static int do_open_create(void) {
        return ERRNO_OF(open("test-seccomp-file", O_RDONLY | O_CREAT | O_CLOEXEC, 0600));
}
static int do_open_truncate(void) {
        return ERRNO_OF(open("/dev/null", O_RDONLY | O_TRUNC | O_CLOEXEC));
}
static int do_open_directory(void) {
        return ERRNO_OF(open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}
static int do_unlink(void) {
        return ERRNO_OF(unlink("/nowhere/at-all"));
}
static int do_execve(void) {
        return ERRNO_OF(execve("/bin/true", (char *[]){NULL}, (char *[]){NULL}));
}
static int do_ptrace(void) {
        return ERRNO_OF(ptrace(PTRACE_TRACEME, 0, NULL, NULL));
}
static int do_process_vm(void) {
        return ERRNO_OF(syscall(SYS_process_vm_readv, getpid(), NULL, 0, NULL, 0, 0));
}
static int do_mount(void) {
        return ERRNO_OF(syscall(SYS_mount, NULL, "/", NULL, 0, NULL));
}
static int do_bpf(void) {
        return ERRNO_OF(syscall(SYS_bpf, 0, NULL, 0));
}
static int do_fork(void) {
        return ERRNO_OF(fork());
}
static int do_kill_parent(void) {
        return ERRNO_OF(kill(getppid(), 0));
}
static int do_kill_group(void) {
        return ERRNO_OF(kill(0, 0));
}
static int do_kill_self(void) {
        return ERRNO_OF(kill(getpid(), 0));
}
static int do_slice(void) {
        return -slice_make_long();
}
static int do_slice_of_parent(void) {
        return ERRNO_OF(syscall(SYS_sched_setattr, getppid(), NULL, 0));
}
static int do_unknown(void) {
        return ERRNO_OF(syscall(9999));
}
static int do_io_uring(void) {
        return ERRNO_OF(syscall(425, 1, NULL));
}

static int map_with(int prot) {
        void *p = mmap(NULL, 4096, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        return p == MAP_FAILED ? errno : 0;
}

static int do_map_code(void) {
        return map_with(PROT_READ | PROT_EXEC);
}
static int do_map_data(void) {
        return map_with(PROT_READ | PROT_WRITE);
}

static int do_protect_code(void) {
        void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        return p == MAP_FAILED ? -1 : ERRNO_OF(mprotect(p, 4096, PROT_READ | PROT_EXEC));
}

static void *thread_main(void *userdata) {
        CLEANUP_FREE char *p = malloc(64u << 20); /* an arena of its own */

        if (!p)
                return NULL;
        memset(p, 1, 64u << 20);
        return userdata;
}

static int do_thread(void) {
        pthread_t t;
        void *answer;
        int mark;

        if (pthread_create(&t, NULL, thread_main, &mark) != 0 || pthread_join(t, &answer) != 0)
                return 1;
        return answer == &mark ? 0 : 1;
}

static int do_abort(void) {
        abort();
}

static void seccomp_apply_needed_calls_allowed(void **state) {
        assert_allowed(do_nothing);
        assert_allowed(do_open_read);
        assert_allowed(do_open_directory);
        assert_allowed(do_map_data);
        assert_allowed(do_thread);
        assert_allowed(do_kill_self);
        assert_allowed(do_slice);
}

static void seccomp_apply_other_calls_refused(void **state) {
        assert_refused(do_socket);
        assert_refused(do_connect);
        assert_refused(do_bind);
        assert_refused(do_open_write);
        assert_refused(do_open_read_write);
        assert_refused(do_open_create);
        assert_refused(do_open_truncate);
        assert_refused(do_unlink);
        assert_refused(do_map_code);
        assert_refused(do_protect_code);
        assert_refused(do_fork);
        assert_refused(do_kill_parent);
        assert_refused(do_slice_of_parent);
        assert_refused(do_kill_group);
        assert_refused(do_io_uring);
        assert_refused(do_unknown);
}

static void seccomp_apply_hostile_calls_kill(void **state) {
        assert_deadly(do_execve);
        assert_deadly(do_ptrace);
        assert_deadly(do_process_vm);
        assert_deadly(do_mount);
        assert_deadly(do_bpf);
}

static void seccomp_apply_abort_is_abort(void **state) {
        int status = run_filtered(do_abort);

        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), SIGABRT);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(seccomp_apply_needed_calls_allowed),
                cmocka_unit_test(seccomp_apply_other_calls_refused),
                cmocka_unit_test(seccomp_apply_hostile_calls_kill),
                cmocka_unit_test(seccomp_apply_abort_is_abort),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
