/* SPDX-License-Identifier: Apache-2.0 */
/* Registering a weight region for copies, in the ways that a worker could: what it costs for each GiB, what
 * is refused, how fast copies are beside cudaMallocHost, what registering does to a device that works
 * meanwhile, under which limits it still succeeds, and how long a killed process takes to let go.
 *
 *     measure-register [GiB]        (4; every way needs that much memory, one after the other)
 */

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/gpu/device.h"

#ifndef PR_SET_MDWE /* Linux 6.3 */
#define PR_SET_MDWE 65
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define POPULATE_THREADS 8
#define COPIES 11
#define BEATS_MAX 100000

static uint64_t size = 4 * GIB;
static uint8_t *device;

static double gib(void) {
        return (double) size / (double) GIB;
}

typedef struct Slice {
        uint8_t *p;
        uint64_t size;
} Slice;

static void *populate_slice(void *arg) {
        const Slice *s = arg;

        return memory_populate(s->p, s->size) < 0 ? arg : NULL;
}

static void populate(uint8_t *p) {
        pthread_t threads[POPULATE_THREADS];
        Slice slices[POPULATE_THREADS];
        double begin = now();

        for (int i = 0; i < POPULATE_THREADS; i++) {
                slices[i] = (Slice){p + size / POPULATE_THREADS * (uint64_t) i, size / POPULATE_THREADS};
                must_be(pthread_create(threads + i, NULL, populate_slice, slices + i) == 0, "thread");
        }
        for (int i = 0; i < POPULATE_THREADS; i++) {
                void *bad;

                must_be(pthread_join(threads[i], &bad) == 0 && !bad, "populate");
        }
        printf("  populated by %d threads: %.0f ms/GiB\n", POPULATE_THREADS, 1e3 * (now() - begin) / gib());
}

/* The lines of /proc/self/FILE that begin with one of the names, in one line of output. */
static void proc_print(const char *file, const char *const *names) {
        char path[64], line[256];
        FILE *f;

        (void) snprintf(path, sizeof(path), "/proc/self/%s", file);
        f = fopen(path, "re");
        if (!f)
                return;
        while (fgets(line, sizeof(line), f))
                for (const char *const *n = names; *n; n++)
                        if (strncmp(line, *n, strlen(*n)) == 0) {
                                line[strcspn(line, "\n")] = 0;
                                printf(" [%s]", line);
                        }
        (void) fclose(f);
}

static void locked_print(void) {
        static const char *const names[] = {"VmLck", "VmPin", NULL};
        struct rlimit l;

        printf("  limit on locking: ");
        if (getrlimit(RLIMIT_MEMLOCK, &l) == 0 && l.rlim_cur == RLIM_INFINITY)
                printf("none;");
        else
                printf("%lu bytes;", (unsigned long) l.rlim_cur);
        proc_print("status", names);
        printf("\n");
}

/* False: refused, and says so. */
static bool registered(uint8_t *p, uint64_t piece, unsigned flags) {
        double begin = now();

        for (uint64_t at = 0; at < size; at += piece) {
                cudaError_t e = cudaHostRegister(p + at, piece < size - at ? piece : size - at, flags);

                if (e != cudaSuccess) {
                        (void) cudaGetLastError();
                        printf("  registering in pieces of %lu MiB, flags %u: refused at byte %lu, %s\n",
                                piece / MIB, flags, at, cudaGetErrorString(e));
                        for (uint64_t back = 0; back < at; back += piece)
                                must(cudaHostUnregister(p + back), "unregister");
                        return false;
                }
        }
        printf("  registered in pieces of %lu MiB, flags %u: %.1f ms/GiB\n", piece / MIB, flags,
                1e3 * (now() - begin) / gib());
        return true;
}

static void unregistered(uint8_t *p, uint64_t piece) {
        double begin = now();

        for (uint64_t at = 0; at < size; at += piece)
                must(cudaHostUnregister(p + at), "unregister");
        printf("  unregistered: %.1f ms/GiB\n", 1e3 * (now() - begin) / gib());
}

static int compare_doubles(const void *a, const void *b) {
        double x = *(const double *) a, y = *(const double *) b;

        return (x > y) - (x < y);
}

static double copy_rate(const uint8_t *p, uint64_t piece) {
        double took[COPIES];

        for (int i = 0; i < COPIES; i++) {
                double begin = now();

                for (uint64_t at = 0; at < size; at += piece)
                        must(cudaMemcpyAsync(device + at, p + at, piece, cudaMemcpyHostToDevice, NULL),
                                "copy");
                must(cudaDeviceSynchronize(), "copy");
                took[i] = now() - begin;
        }
        qsort(took, COPIES, sizeof(*took), compare_doubles);
        return (double) size / took[COPIES / 2] / 1e9;
}

/* Copy rates in GB/s against those of cudaMallocHost, which the first call sets. No copy is longer than a
 * registered piece. */
static void copies(const char *what, const uint8_t *p, uint64_t piece) {
        static double limit[2];
        double whole = copy_rate(p, piece), pieces = copy_rate(p, 16 * MIB);

        if (limit[0] == 0) {
                limit[0] = whole;
                limit[1] = pieces;
        }
        printf("  copied to the device, %s: %.1f GB/s, in 16 MiB %.1f GB/s; of cudaMallocHost %.3f, %.3f\n",
                what, whole, pieces, whole / limit[0], pieces / limit[1]);
}

static uint8_t *mapped(int fd, int prot) {
        void *p;

        must_be(memfd_map(fd, size, prot, &p) == 0, "map");
        return p;
}

static void way_usual(uint8_t *p, uint64_t piece) {
        if (!registered(p, piece, cudaHostRegisterPortable))
                return;
        locked_print();
        copies("read-write", p, piece);
        must_be(mprotect(p, size, PROT_READ) == 0, "mprotect");
        copies("after mprotect(PROT_READ)", p, piece);
        if (size > piece)
                printf("  one copy over the edge of two pieces: %s\n",
                        cudaGetErrorString(
                                cudaMemcpy(device, p + piece - MIB, 2 * MIB, cudaMemcpyHostToDevice)));
        (void) cudaGetLastError();
        unregistered(p, piece);
        must_be(mprotect(p, size, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

/* What a small piece of work on the device takes, one after the other, while another thread registers. */
typedef struct Beat {
        _Atomic bool stop;
        double took[BEATS_MAX];
        unsigned n;
} Beat;

static void *beat(void *arg) {
        Beat *b = arg;
        cudaStream_t stream;
        void *p = device_new(MIB);

        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        while (!atomic_load(&b->stop) && b->n < BEATS_MAX) {
                double begin = now();

                must(cudaMemsetAsync(p, 1, MIB, stream), "memset");
                must(cudaStreamSynchronize(stream), "memset");
                b->took[b->n++] = now() - begin;
        }
        must(cudaStreamDestroy(stream), "stream");
        return NULL;
}

static void disturbance(uint8_t *p) {
        static const uint64_t pieces[] = {0, GIB, 16 * MIB};
        static Beat b;

        for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++) {
                pthread_t thread;

                b.n = 0;
                atomic_store(&b.stop, false);
                must_be(pthread_create(&thread, NULL, beat, &b) == 0, "thread");
                (void) usleep(50000);
                if (pieces[i] == 0)
                        (void) usleep(300000);
                else if (registered(p, pieces[i], cudaHostRegisterPortable))
                        unregistered(p, pieces[i]);
                atomic_store(&b.stop, true);
                must_be(pthread_join(thread, NULL) == 0, "thread");
                qsort(b.took, b.n, sizeof(*b.took), compare_doubles);
                printf("  launch and wait meanwhile (registering in %lu MiB): median %.1f us, p99 %.1f us, "
                       "longest %.1f us, %u launches\n",
                        pieces[i] / MIB, 1e6 * b.took[b.n / 2], 1e6 * b.took[b.n * 99 / 100],
                        1e6 * b.took[b.n - 1], b.n);
        }
}

static void way_read_only(int fd) {
        CLEANUP_CLOSE int ro = -EBADF, rw = -EBADF;
        uint8_t *p = mapped(fd, PROT_READ);

        puts("read-only mapping of the descriptor");
        if (registered(p, GIB, cudaHostRegisterPortable))
                unregistered(p, GIB);
        if (registered(p, GIB, cudaHostRegisterPortable | cudaHostRegisterReadOnly)) {
                copies("read-only", p, GIB);
                unregistered(p, GIB);
        }
        must_be(munmap(p, size) == 0, "munmap");

        puts("read-only re-opened descriptor");
        must_be(memfd_reopen_read_only(fd, &ro) == 0, "re-open");
        p = mapped(ro, PROT_READ);
        if (registered(p, GIB, cudaHostRegisterPortable | cudaHostRegisterReadOnly)) {
                copies("read-only", p, GIB);
                unregistered(p, GIB);
        }
        must_be(munmap(p, size) == 0, "munmap");

        puts("read-write re-opened descriptor, as a worker gets it");
        must_be(memfd_reopen_read_write(fd, &rw) == 0, "re-open");
        p = mapped(rw, PROT_READ | PROT_WRITE);
        way_usual(p, GIB);
        must_be(munmap(p, size) == 0, "munmap");
}

/* Pages of 2 MiB: reserved ones, if the machine has any. */
static void way_huge(void) {
        int fd = memfd_create("measure-register", MFD_CLOEXEC | MFD_HUGETLB | MFD_HUGE_2MB);
        uint8_t *p;

        puts("memfd of reserved pages of 2 MiB");
        if (fd < 0 || ftruncate(fd, (off_t) size) < 0) {
                printf("  refused: %s\n", strerror(errno));
                return;
        }
        p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED)
                printf("  refused: %s\n", strerror(errno));
        else {
                populate(p);
                way_usual(p, GIB);
                must_be(munmap(p, size) == 0, "munmap");
        }
        (void) close(fd);
}

static void ways(void) {
        static const char *const huge[] = {"ShmemPmdMapped", NULL};
        CLEANUP_CLOSE int fd = -EBADF;
        double begin = now();
        uint8_t *p;
        int yes = -1;

        device_open();
        device = device_new(size);
        printf("CUDA started and %.0f GiB of the device taken in %.0f ms\n", gib(), 1e3 * (now() - begin));
        must(cudaDeviceGetAttribute(&yes, cudaDevAttrHostRegisterReadOnlySupported, 0), "attribute");
        printf("read-only registering supported: %d\n", yes);

        begin = now();
        must(cudaMallocHost((void **) &p, size), "cudaMallocHost");
        printf("cudaMallocHost: %.0f ms/GiB\n", 1e3 * (now() - begin) / gib());
        copies("cudaMallocHost", p, GIB);
        copies("cudaMallocHost again", p, GIB);
        begin = now();
        must(cudaFreeHost(p), "cudaFreeHost");
        printf("  freed: %.0f ms/GiB\n", 1e3 * (now() - begin) / gib());

        must_be(memfd_new("measure-register", size, &fd) == 0, "memfd");
        p = mapped(fd, PROT_READ | PROT_WRITE);
        puts("memfd as the service makes it: 0600, seals SHRINK|GROW|SEAL, read-write mapping");
        populate(p);
        printf(" ");
        proc_print("smaps_rollup", huge);
        printf("\n");
        copies("unregistered", p, GIB);
        way_usual(p, GIB);
        way_usual(p, 16 * MIB);
        disturbance(p);
        must_be(munmap(p, size) == 0, "munmap");
        way_read_only(fd);
        way_huge();
}

static void limited(void) {
        const struct rlimit l = {65536, 65536};
        CLEANUP_CLOSE int fd = -EBADF;
        uint8_t *p;

        must_be(setrlimit(RLIMIT_MEMLOCK, &l) == 0 && setgroups(0, NULL) == 0 && setgid(65534) == 0 &&
                        setuid(65534) == 0,
                "cannot become nobody");
        must_be(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
        puts("as nobody, no new privileges, 64 KiB of locked memory allowed");
        device_open();
        device = device_new(size);
        must_be(memfd_new("measure-register", size, &fd) == 0, "memfd");
        p = mapped(fd, PROT_READ | PROT_WRITE);
        populate(p);
        way_usual(p, GIB);
}

static void no_exec(void) {
        void *p;

        puts("no memory both writable and executable (PR_SET_MDWE)");
        if (prctl(PR_SET_MDWE, 1, 0, 0, 0) < 0) {
                printf("  not offered by this kernel: %s\n", strerror(errno));
                return;
        }
        device_open();
        p = device_new(MIB);
        fill_s8(p, MIB, 32, 1);
        printf("  kernels run: %s\n", differing(p, 1024, p, 1024, 1024, 1024) == 0 ? "yes" : "no");
}

/* Child: maps the region that is descriptor 3, registers it, says so on 4 and waits. */
static void hold(void) {
        uint8_t *p;

        device_open();
        p = mapped(3, PROT_READ | PROT_WRITE);
        must_be(registered(p, GIB, cudaHostRegisterPortable), "refused");
        must_be(mprotect(p, size, PROT_READ) == 0 && write(4, "r", 1) == 1, "cannot say so");
        (void) pause();
}

static pid_t start(char *what, int fd3, int fd4) {
        char number[32];
        char *const argv[] = {(char *) "measure-register", number, what, NULL};
        pid_t pid;

        (void) snprintf(number, sizeof(number), "%lu", size / GIB);
        (void) fflush(stdout);
        pid = fork();
        must_be(pid >= 0, "fork");
        if (pid == 0) {
                if ((fd3 < 0 || (dup2(fd3, 3) == 3 && dup2(fd4, 4) == 4)))
                        (void) execv("/proc/self/exe", argv);
                _exit(127);
        }
        return pid;
}

static void killed(void) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint8_t *p;

        puts("a process that holds a registered region is killed; another takes over");
        must_be(memfd_new("measure-register", size, &fd) == 0, "memfd");
        p = mapped(fd, PROT_READ | PROT_WRITE);
        populate(p);
        for (int i = 0; i < 3; i++) {
                int ends[2], other, said, status;
                double begin = now(), gone;
                char c;
                pid_t pid;

                must_be(pipe2(ends, O_CLOEXEC) == 0, "pipe");
                /* Out of the way of 3 and 4. */
                other = fcntl(fd, F_DUPFD_CLOEXEC, 10);
                said = fcntl(ends[1], F_DUPFD_CLOEXEC, 10);
                must_be(other >= 0 && said >= 0, "descriptor");
                (void) close(ends[1]);
                pid = start((char *) "hold", other, said);
                (void) close(said);
                must_be(read(ends[0], &c, 1) == 1, "the child did not register");
                printf("  from its start until it holds the region: %.0f ms", 1e3 * (now() - begin));
                begin = now();
                must_be(kill(pid, SIGKILL) == 0, "kill");
                (void) poll(&(struct pollfd){.fd = ends[0], .events = POLLIN}, 1, 30000);
                gone = now() - begin;
                must_be(waitpid(pid, &status, 0) == pid, "wait");
                printf("; from SIGKILL to the end of its pipe %.0f ms, to its end %.0f ms\n", 1e3 * gone,
                        1e3 * (now() - begin));
                (void) close(ends[0]);
                (void) close(other);
        }
}

int main(int argc, char **argv) {
        static char *const parts[] = {(char *) "ways", (char *) "limited", (char *) "no-exec"};
        int bad = 0;

        setvbuf(stdout, NULL, _IOLBF, 0);
        if (argc > 1)
                size = strtoull(argv[1], NULL, 10) * GIB;
        must_be(size > 0, "measure-register [GiB]");
        if (argc > 2) {
                if (strcmp(argv[2], "ways") == 0)
                        ways();
                else if (strcmp(argv[2], "limited") == 0)
                        limited();
                else if (strcmp(argv[2], "no-exec") == 0)
                        no_exec();
                else if (strcmp(argv[2], "hold") == 0)
                        hold();
                return 0;
        }
        for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
                int status;
                pid_t pid = start(parts[i], -1, -1);

                must_be(waitpid(pid, &status, 0) == pid, "wait");
                if (WIFEXITED(status) && WEXITSTATUS(status) == 77) /* no device: the child said so */
                        return 77;
                if (status != 0) {
                        printf("  %s ended with %d\n", parts[i], status);
                        bad = 1;
                }
        }
        killed();
        return bad;
}
