/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

#define SIZE (UINT64_C(1) << 20)

static void memfd_new_size_mode_and_seals_set(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        struct stat st;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(fstat(fd, &st), 0);
        assert_int_equal(st.st_size, SIZE);
        assert_int_equal(st.st_mode & 07777, 0600);
        assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
        assert_int_equal(fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
                F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
        assert_int_equal(fcntl(fd, F_GET_SEALS) & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE), 0);
        assert_int_equal(ftruncate(fd, 0), -1);
        assert_int_equal(errno, EPERM);
        assert_int_equal(memfd_check(fd, SIZE), 0);
}

static void memfd_new_bad_size_refused(void **state) {
        int fd = 77;

        assert_int_equal(memfd_new("test", 0, &fd), -EINVAL);
        assert_int_equal(memfd_new("test", UINT64_C(1) << 63, &fd), -EFBIG);
        assert_int_equal(fd, 77);
}

static void memfd_check_untrusted_refused(void **state) {
        CLEANUP_CLOSE int good = -EBADF, unsealed = -EBADF, file = -EBADF;
        int fds[2];

        assert_int_equal(memfd_new("test", SIZE, &good), 0);
        assert_int_equal(memfd_check(good, SIZE - 1), -EINVAL);
        assert_int_equal(memfd_check(good, SIZE + 1), -EINVAL);

        unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(unsealed, SIZE), 0);
        assert_int_equal(memfd_check(unsealed, SIZE), -EPERM);
        assert_int_equal(fcntl(unsealed, F_ADD_SEALS, F_SEAL_GROW), 0);
        assert_int_equal(memfd_check(unsealed, SIZE), -EPERM); /* it can still be shrunk under us */

        file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
        assert_true(file >= 0);
        assert_int_equal(memfd_check(file, SIZE), -EBADF);
        assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
        assert_int_equal(memfd_check(fds[0], SIZE), -EBADF);
        (void) close(fds[0]);
        (void) close(fds[1]);
        assert_int_equal(memfd_check(-1, SIZE), -EBADF);
}

/* It has seals as well, but a fault past its pool is SIGBUS. */
static void memfd_check_hugetlb_refused(void **state) {
        CLEANUP_CLOSE int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);

        if (fd < 0 || ftruncate(fd, 1 << 30) < 0)
                skip(); /* a kernel without */

        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
        assert_int_equal(memfd_check(fd, 1 << 30), -EBADF);
}

/* "VmFlags:" of the mapping that begins at map. */
static bool map_has_flag(const void *map, const char *flag) {
        FILE *f = fopen("/proc/self/smaps", "re");
        bool inside = false, found = false;
        unsigned long from, to;
        char line[512];

        assert_non_null(f);
        while (fgets(line, sizeof(line), f))
                if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
                        inside = from == (unsigned long) map;
                else if (inside && strncmp(line, "VmFlags:", 8) == 0)
                        found = strstr(line, flag) != NULL;
        (void) fclose(f);
        return found;
}

static void memfd_map_is_shared_and_not_dumped(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        void *a = NULL, *b = NULL;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &a), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ, &b), 0);
        strcpy(a, "hello");
        assert_string_equal(b, "hello");
        assert_true(map_has_flag(a, " dd"));
        assert_false(map_has_flag(b, " wr "));
        (void) munmap(a, SIZE);
        (void) munmap(b, SIZE);
}

static void memfd_map_impossible_refused(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        void *map = state;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, 0, PROT_READ, &map), -EINVAL);
        assert_int_equal(memfd_map(fd, UINT64_MAX, PROT_READ, &map), -EINVAL);
        assert_int_equal(memfd_map(-1, SIZE, PROT_READ, &map), -EBADF);
        assert_ptr_equal(map, state);
}

static void memfd_reopen_read_only_cannot_write(void **state) {
        CLEANUP_CLOSE int fd = -EBADF, ro = -EBADF;
        void *map = NULL;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_reopen_read_only(fd, &ro), 0);
        assert_int_equal(fcntl(ro, F_GETFL) & O_ACCMODE, O_RDONLY);
        assert_int_equal(fcntl(ro, F_GETFD), FD_CLOEXEC);
        assert_int_equal(memfd_check(ro, SIZE), 0);
        assert_int_equal(pwrite(ro, "x", 1, 0), -1);
        assert_int_equal(memfd_map(ro, SIZE, PROT_READ | PROT_WRITE, &map), -EACCES);
        assert_int_equal(pwrite(fd, "x", 1, 0), 1);
        assert_int_equal(memfd_map(ro, SIZE, PROT_READ, &map), 0);
        assert_int_equal(*(char *) map, 'x');
        (void) munmap(map, SIZE);
        assert_int_equal(memfd_reopen_read_only(-1, &ro), -EBADF);
}

static void memfd_is_shared_by_descriptor_and_mapping(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        void *map;
        int other;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_is_shared(fd), 0);
        for (int i = 0; i < 2; i++) {
                assert_int_equal(i ? memfd_reopen_read_write(fd, &other) : memfd_reopen_read_only(fd, &other), 0);
                assert_int_equal(fcntl(other, F_GETFL) & O_ACCMODE, i ? O_RDWR : O_RDONLY);
                assert_int_equal(memfd_check(other, SIZE), 0);
                assert_int_equal(memfd_is_shared(fd), 1);
                assert_int_equal(memfd_map(other, SIZE, PROT_READ, &map), 0);
                (void) close(other);
                assert_int_equal(memfd_is_shared(fd), 1);
                (void) munmap(map, SIZE);
                assert_int_equal(memfd_is_shared(fd), 0);
        }
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ, &map), 0); /* our own does not count */
        assert_int_equal(memfd_is_shared(fd), 0);
        (void) munmap(map, SIZE);
        assert_int_equal(memfd_is_shared(-1), -EBADF);
}

static size_t resident_pages(void *map, uint64_t size) {
        size_t page = (size_t) sysconf(_SC_PAGESIZE), n = size / page, count = 0;
        CLEANUP_FREE unsigned char *v = malloc(n);

        assert_non_null(v);
        assert_int_equal(mincore(map, size, v), 0);
        for (size_t i = 0; i < n; i++)
                count += v[i] & 1;
        return count;
}

static void memory_populate_all_pages_there_and_kept(void **state) {
        size_t pages = SIZE / (size_t) sysconf(_SC_PAGESIZE);
        CLEANUP_CLOSE int fd = -EBADF;
        struct stat st;
        void *map;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map), 0);
        strcpy((char *) map + 5000, "kept");
        assert_true(resident_pages(map, SIZE) < pages);
        assert_int_equal(memory_populate(map, SIZE), 0);
        assert_int_equal(resident_pages(map, SIZE), pages);
        assert_int_equal(fstat(fd, &st), 0);
        assert_true((uint64_t) st.st_blocks * 512 >= SIZE);
        assert_string_equal((char *) map + 5000, "kept");
        (void) munmap(map, SIZE);
}

/* Also where it does not end with a page: neighbours stay as they are. */
static void memory_prefer_huge_changes_no_byte(void **state) {
        static const size_t sizes[] = {0, 1, 5000, (4u << 20) - 1, (4u << 20) + 1, 9000001};

        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                CLEANUP_FREE uint8_t *p = malloc(sizes[i] + 2);

                assert_non_null(p);
                memset(p, 7, sizes[i] + 2);
                memory_prefer_huge(p + 1, sizes[i]);
                for (size_t k = 0; k < sizes[i] + 2; k++)
                        if (p[k] != 7)
                                fail_msg("byte %zu of %zu", k, sizes[i]);
        }
}

static void memory_populate_impossible_refused(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        void *map;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ, &map), 0);
        assert_int_equal(memory_populate((char *) map + 1, SIZE - 1), -EINVAL);
        assert_int_equal(memory_populate(map, UINT64_MAX), -EINVAL);
        assert_int_equal(memory_populate(map, 0), 0);
        assert_true(memory_populate(map, SIZE) < 0); /* read-only: an error, not a signal */
        (void) munmap(map, SIZE);
        assert_int_equal(memory_populate(map, SIZE), -ENOMEM);
}

/* From here on this process runs on an older kernel: the system call answers EINVAL if its argument has any
 * of `bits` (or, with exact, is equal). */
static int make_older(long call, unsigned arg, uint32_t bits, bool exact) {
        uint32_t at = (uint32_t) (offsetof(struct seccomp_data, args) + arg * sizeof(uint64_t));
        struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) call, 0, 3),
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at),
                BPF_JUMP(BPF_JMP | (exact ? BPF_JEQ : BPF_JSET) | BPF_K, bits, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {ELEMENTSOF(code), code};

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
                prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
                return -errno;

        return 0;
}

/* Runs f in a child; its result, or 77 where the system has no seccomp. */
static int in_child(int (*f)(void)) {
        int status;
        pid_t pid;

        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
                _exit(f());

        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        return WEXITSTATUS(status);
}

static int new_on_older_kernel(void) {
        struct stat st;
        int fd;

        if (make_older(SYS_memfd_create, 1, 8, false) < 0)
                return 77;
        if (memfd_create("x", 8) >= 0 || errno != EINVAL)
                return 1;
        if (memfd_new("test", SIZE, &fd) < 0 || memfd_check(fd, SIZE) < 0)
                return 2;
        if (fstat(fd, &st) < 0 || (st.st_mode & 07777) != 0600)
                return 3;
        return 0;
}

static void memfd_new_kernel_without_noexec_seal_works(void **state) {
        int r = in_child(new_on_older_kernel);

        if (r == 77)
                skip();
        assert_int_equal(r, 0);
}

static int populate_on_older_kernel(void) {
        size_t pages = SIZE / (size_t) sysconf(_SC_PAGESIZE);
        void *map;
        int fd;

        if (make_older(SYS_madvise, 2, 23, true) < 0)
                return 77;
        if (memfd_new("test", SIZE, &fd) < 0 || memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map) < 0)
                return 1;
        memset((char *) map + 8192, 0x5a, 4096);
        if (memory_populate(map, SIZE) < 0)
                return 2;
        if (resident_pages(map, SIZE) != pages)
                return 3;
        for (size_t i = 0; i < SIZE; i++)
                if (((unsigned char *) map)[i] != (i >= 8192 && i < 12288 ? 0x5a : 0))
                        return 4;
        return 0;
}

static void memory_populate_kernel_without_advice_touches(void **state) {
        int r = in_child(populate_on_older_kernel);

        if (r == 77)
                skip();
        assert_int_equal(r, 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(memfd_new_size_mode_and_seals_set),
                cmocka_unit_test(memfd_new_bad_size_refused),
                cmocka_unit_test(memfd_check_untrusted_refused),
                cmocka_unit_test(memfd_check_hugetlb_refused),
                cmocka_unit_test(memfd_map_is_shared_and_not_dumped),
                cmocka_unit_test(memfd_map_impossible_refused),
                cmocka_unit_test(memfd_reopen_read_only_cannot_write),
                cmocka_unit_test(memfd_is_shared_by_descriptor_and_mapping),
                cmocka_unit_test(memory_populate_all_pages_there_and_kept),
                cmocka_unit_test(memory_prefer_huge_changes_no_byte),
                cmocka_unit_test(memory_populate_impossible_refused),
                cmocka_unit_test(memfd_new_kernel_without_noexec_seal_works),
                cmocka_unit_test(memory_populate_kernel_without_advice_touches),
        };

        return cmocka_run_group_tests_name("memfd", tests, NULL, NULL);
}
