/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/worker-start.h"

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "service/shared/cleanup.h"
#include "service/shared/gpu-names.h"

#define SOCKET_FD 3
#define ENVIRONMENT_MAX 26

extern char **environ;

/* All that the child needs, made before fork(): the service has threads, so the child may only make system
 * calls. */
typedef struct Child {
        const char *path;
        char *argv[2];
        char *environment[ENVIRONMENT_MAX + 1];
        char listen_pid[32]; /* "LISTEN_PID=", the child adds its own pid */
        char log_level[32];
        int socket, null, error_pipe;
        pid_t parent;
} Child;

/* A user's own instance sees the system's sockets but may not connect to them. */
static bool is_our_socket(const char *path) {
        struct stat st;

        return path && stat(path, &st) >= 0 && S_ISSOCK(st.st_mode) && access(path, W_OK) >= 0;
}

static bool wants_cuda(const Config *c, bool no_cuda) {
        return c->worker == WORKER_CUDA || (c->worker == WORKER_AUTO && !no_cuda && is_our_socket(c->worker_cuda_socket));
}

static int connect_to(const char *path, int *ret_fd) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };
        CLEANUP_CLOSE int fd = -EBADF;
        size_t n = strlen(path);

        if (n >= sizeof(sa.sun_path))
                return -ENAMETOOLONG;
        memcpy(sa.sun_path, path, n + 1);

        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *) &sa, sizeof(sa)) < 0)
                return -errno;

        *ret_fd = STEAL_FD(fd);
        return 0;
}

static int start_by_socket(const Config *c, bool no_cuda, WorkerProcess *ret, Fault *f) {
        bool cuda = wants_cuda(c, no_cuda);
        const char *path = cuda ? c->worker_cuda_socket : c->worker_socket, *key = cuda ? "WorkerCudaSocket=" : "WorkerSocket=";
        CLEANUP_CLOSE int fd = -EBADF;
        int r;

        r = connect_to(path, &fd);
        if (r == -ENAMETOOLONG)
                return fault_set(f, -ENOENT, FAULT_NO_WORKER, "%s is too long for a socket address: \"%s\".", key, path);
        if (r < 0)
                return fault_set(f, r, FAULT_NO_WORKER,
                        "The worker's socket \"%s\" (%s) does not answer: %s. Is %s started?", path, key, strerror(-r),
                        cuda ? "latent-worker-cuda.socket" : "latent-worker.socket");

        *ret = (WorkerProcess){ .socket = STEAL_FD(fd), .pidfd = -EBADF, .cuda = cuda };
        return 0;
}

/* The path of the binary of a backend if it can be run. */
static int find_binary(const Config *c, const char *backend, char **ret) {
        CLEANUP_FREE char *path = NULL;

        if (asprintf(&path, "%s/latent-worker-%s", c->worker_directory, backend) < 0) {
                path = NULL;
                return -ENOMEM;
        }

        if (access(path, X_OK) < 0)
                return -errno;

        *ret = STEAL_PTR(path);
        return 0;
}

static int choose_binary(const Config *c, bool no_cuda, char **ret, bool *ret_cuda, Fault *f) {
        const char *backend;
        int r = -ENOENT;

        if (c->worker == WORKER_CUDA || (c->worker == WORKER_AUTO && !no_cuda)) {
                r = find_binary(c, "cuda", ret);
                if (r >= 0) {
                        *ret_cuda = true;
                        return 0;
                }
                if (r == -ENOMEM)
                        return r;
        }

        backend = c->worker == WORKER_CUDA ? "cuda" : "cpu";
        if (c->worker != WORKER_CUDA) {
                r = find_binary(c, "cpu", ret);
                if (r >= 0) {
                        *ret_cuda = false;
                        return 0;
                }
                if (r == -ENOMEM)
                        return r;
        }

        return fault_set(f, -ENOENT, FAULT_NO_WORKER,
                "No worker can be started: \"%s/latent-worker-%s\" (WorkerDirectory=, Worker=%s) cannot be "
                "run: %s.%s",
                c->worker_directory, backend, c->worker == WORKER_AUTO ? "auto" : backend, strerror(-r),
                c->worker == WORKER_CUDA ? " Install the CUDA worker or set Worker=cpu." : "");
}

/* A clean environment: what programs need to find libraries and devices, and the journal; nothing else of
 * ours. */
static void fill_environment(Child *child, int log_level, char *const *more) {
        static const char *const kept[] = {
                "PATH=",
                "LANG=",
                "LC_ALL=",
                "TMPDIR=",
                "LD_LIBRARY_PATH=",
                "JOURNAL_STREAM=",
                "CUDA_VISIBLE_DEVICES=",
                "CUDA_DEVICE_ORDER=",
                "NVIDIA_VISIBLE_DEVICES=",
                "NVIDIA_DRIVER_CAPABILITIES=",
                "ASAN_OPTIONS=",
                "UBSAN_OPTIONS=",
                "LSAN_OPTIONS=",
        };
        static char listen_fds[] = "LISTEN_FDS=1";
        size_t n = 0;

        (void) snprintf(child->listen_pid, sizeof(child->listen_pid), "LISTEN_PID=");
        (void) snprintf(child->log_level, sizeof(child->log_level), "LATENT_LOG_LEVEL=%d", log_level);
        child->environment[n++] = listen_fds;
        child->environment[n++] = child->listen_pid;
        child->environment[n++] = child->log_level;
        for (; *more; more++)
                child->environment[n++] = *more;

        for (char **e = environ; *e && n < ENVIRONMENT_MAX; e++) {
                /* Switches of the worker itself; its log level and its GPUs are ours. */
                bool keep = strncmp(*e, "LATENT_", strlen("LATENT_")) == 0 &&
                            strncmp(*e, "LATENT_LOG_LEVEL=", strlen("LATENT_LOG_LEVEL=")) != 0 &&
                            strncmp(*e, GPU_NAMES_VARIABLE, strlen(GPU_NAMES_VARIABLE)) != 0;

                for (size_t i = 0; i < ELEMENTSOF(kept) && !keep; i++)
                        keep = strncmp(*e, kept[i], strlen(kept[i])) == 0;
                if (keep)
                        child->environment[n++] = *e;
        }
        child->environment[n] = NULL;
}

/* Async-signal-safe. */
static void append_number(char *s, uint64_t number) {
        char digits[20];
        size_t n = 0;

        while (*s)
                s++;
        do
                digits[n++] = (char) ('0' + number % 10);
        while ((number /= 10) > 0);
        while (n > 0)
                *s++ = digits[--n];
        *s = '\0';
}

/* Descriptors 0 to 3 of the child, everything else closed but the pipe, which closes itself at exec. */
static int child_descriptors(Child *c) {
        int pipe, socket;

        /* Out of the way of the numbers to be filled. */
        socket = fcntl(c->socket, F_DUPFD_CLOEXEC, SOCKET_FD + 1);
        if (socket < 0)
                return -errno;

        pipe = fcntl(c->error_pipe, F_DUPFD_CLOEXEC, SOCKET_FD + 1);
        if (pipe < 0)
                return -errno;
        c->error_pipe = pipe;

        if (dup2(c->null, STDIN_FILENO) < 0 || dup2(socket, SOCKET_FD) < 0)
                return -errno;

        if (pipe > SOCKET_FD + 1)
                (void) close_range(SOCKET_FD + 1, (unsigned) pipe - 1, 0);
        (void) close_range((unsigned) pipe + 1, ~0u, 0);
        return 0;
}

static void child_main(Child *c) {
        const struct rlimit none = {};
        struct sigaction by_default = { .sa_handler = SIG_DFL };
        sigset_t signals;
        int r;

        (void) sigaction(SIGPIPE, &by_default, NULL);
        (void) sigemptyset(&signals);
        (void) sigprocmask(SIG_SETMASK, &signals, NULL);
        append_number(c->listen_pid, (uint64_t) getpid());

        /* The worker's own watch on the socket does not run while it is stopped. */
        (void) prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        if (getppid() != c->parent)
                _exit(127);

        r = child_descriptors(c);
        if (r >= 0 && setrlimit(RLIMIT_CORE, &none) < 0) /* a core would hold weights and users' data */
                r = -errno;
        if (r >= 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                r = -errno;
        if (r >= 0) {
                (void) execve(c->path, c->argv, c->environment);
                r = -errno;
        }

        (void) !write(c->error_pipe, &r, sizeof(r));
        _exit(127);
}

static void kill_and_reap(pid_t pid) {
        (void) kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
                ;
}

/* Forks; returns when the child has reached its exec, or its error. */
static int child_run(Child *child, int pipe_read, pid_t *ret_pid) {
        int r = 0;
        ssize_t n;
        pid_t pid;

        pid = fork();
        if (pid < 0)
                return -errno;
        if (pid == 0)
                child_main(child);

        (void) close(STEAL_FD(child->error_pipe));
        do
                n = read(pipe_read, &r, sizeof(r));
        while (n < 0 && errno == EINTR);

        if (n != 0) {
                kill_and_reap(pid);
                return n == (ssize_t) sizeof(r) && r < 0 ? r : -EIO;
        }

        *ret_pid = pid;
        return 0;
}

/* more: variables of the program's own, up to a NULL. */
static int spawn(const char *path, int log_level, char *const *more, WorkerProcess *ret) {
        CLEANUP_CLOSE int ours = -EBADF, theirs = -EBADF, null = -EBADF, pipe_read = -EBADF,
                          pipe_write = -EBADF;
        int pair[2], pidfd, r;
        Child child = { .path = path, .argv = { (char *) path, NULL } };
        pid_t pid = 0;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
                return -errno;
        ours = pair[0];
        theirs = pair[1];

        if (pipe2(pair, O_CLOEXEC) < 0)
                return -errno;
        pipe_read = pair[0];
        pipe_write = pair[1];

        null = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (null < 0)
                return -errno;

        child.parent = getpid();
        child.socket = theirs;
        child.null = null;
        child.error_pipe = STEAL_FD(pipe_write);
        fill_environment(&child, log_level, more);
        r = child_run(&child, pipe_read, &pid);
        if (child.error_pipe >= 0)
                (void) close(child.error_pipe);
        if (r < 0)
                return r;

        pidfd = pidfd_open(pid, 0);
        if (pidfd < 0) {
                r = -errno;
                kill_and_reap(pid);
                return r;
        }

        *ret = (WorkerProcess){ .socket = STEAL_FD(ours), .pidfd = pidfd, .pid = pid };
        return 0;
}

static int start_by_spawn(const Config *c, bool no_cuda, WorkerProcess *ret, Fault *f) {
        CLEANUP_FREE char *path = NULL, *gpus = NULL, *exclude = NULL;
        bool cuda = false;
        int r;

        r = choose_binary(c, no_cuda, &path, &cuda, f);
        if (r < 0)
                return r;
        if (asprintf(&gpus, GPU_NAMES_VARIABLE "=%s", c->gpus ? c->gpus : "") < 0) {
                gpus = NULL;
                return -ENOMEM;
        }
        if (asprintf(&exclude, GPU_NAMES_EXCLUDE_VARIABLE "=%s", c->gpus_exclude ? c->gpus_exclude : "") < 0) {
                exclude = NULL;
                return -ENOMEM;
        }

        r = spawn(path, c->log_level, (char *[]){gpus, exclude, NULL}, ret);
        if (r < 0) /* never -ENOENT: the file was there, so another try is not useless */
                return fault_set(f, r == -ENOENT ? -EIO : r, FAULT_NO_WORKER,
                        "The worker \"%s\" could not be started: %s.", path, strerror(-r));

        ret->cuda = cuda;
        return 0;
}

bool worker_start_by_socket(const Config *c) {
        if (c->worker_start != WORKER_START_AUTO)
                return c->worker_start == WORKER_START_SOCKET;

        return is_our_socket(c->worker_socket) || (c->worker != WORKER_CPU && is_our_socket(c->worker_cuda_socket));
}

int worker_start(const Config *c, bool no_cuda, WorkerProcess *ret, Fault *f) {
        return worker_start_by_socket(c) ? start_by_socket(c, no_cuda, ret, f) : start_by_spawn(c, no_cuda, ret, f);
}

static bool media_by_socket(const Config *c) {
        return c->worker_start != WORKER_START_SPAWN && is_our_socket(c->media_socket);
}

static int find_media(const Config *c, char **ret, Fault *f) {
        CLEANUP_FREE char *path = NULL;

        if (asprintf(&path, "%s/latent-media", c->media_directory) < 0) {
                path = NULL;
                return -ENOMEM;
        }
        if (access(path, X_OK) < 0)
                return fault_set(f, -errno, FAULT_NOT_SUPPORTED,
                        "This installation has no program that reads and writes media: \"%s\" (MediaDirectory=) cannot be run: %s. Install "
                        "latent-media, or build with -Dmedia=enabled.", path, strerror(errno));

        *ret = STEAL_PTR(path);
        return 0;
}

int media_check(const Config *c, Fault *f) {
        CLEANUP_FREE char *path = NULL;

        return media_by_socket(c) ? 0 : find_media(c, &path, f);
}

int media_start(const Config *c, WorkerProcess *ret, Fault *f) {
        CLEANUP_FREE char *path = NULL;
        int r, fd;

        if (media_by_socket(c)) {
                r = connect_to(c->media_socket, &fd);
                if (r < 0)
                        return fault_set(f, r, FAULT_IO, "\"%s\" (MediaSocket=) does not answer: %s. Is latent-media.socket started?",
                                c->media_socket, strerror(-r));
                *ret = (WorkerProcess){ .socket = fd, .pidfd = -EBADF };
                return 0;
        }

        r = find_media(c, &path, f);
        if (r < 0)
                return r;

        r = spawn(path, c->log_level, (char *[]){NULL}, ret);
        if (r < 0)
                return fault_set(f, r, FAULT_IO, "\"%s\" could not be started: %s.", path, strerror(-r));
        return 0;
}

int worker_process_reap(int pidfd, char *ret_text, size_t size) {
        siginfo_t si = {};

        if (waitid(P_PIDFD, (id_t) pidfd, &si, WEXITED | WNOHANG) < 0) {
                if (errno == EINTR)
                        return 0;
                (void) snprintf(ret_text, size, "ended (%s)", strerror(errno));
                return 1;
        }
        if (si.si_pid == 0)
                return 0;

        if (si.si_code == CLD_EXITED)
                (void) snprintf(ret_text, size, "exited with status %d", si.si_status);
        else
                (void) snprintf(ret_text, size, "was killed by signal %d (%s)", si.si_status,
                        strsignal(si.si_status));
        return 1;
}
