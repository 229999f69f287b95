/* SPDX-License-Identifier: Apache-2.0 */

/* Input and output files of latentctl. */

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/latentctl/inputs.h"
#include "client/latentctl/output.h"
#include "tests/unit/client/temporary.h"

static const char *data_file(const char *name) {
        static char path[512];

        (void) snprintf(path, sizeof(path), "%s/dit/%s", getenv("LATENT_TEST_DATA"), name);
        return path;
}

static void refuse_open(const char *path, const char *name) {
        TensorFile t = {};
        latent_error e = {};

        assert_true(tensor_file_open(path, &t, &e) < 0);
        assert_string_equal(e.name, name);
        assert_null(t.header);
        tensor_file_done(&t);
}

static void open_what_is_no_tensor_file_refused(void **state) {
        refuse_open("absent", "NotFound");
        refuse_open(".", "InvalidFile");
        temporary_write("empty", "", 0);
        refuse_open("empty", "InvalidFile");
        temporary_write("short", "abcd", 4);
        refuse_open("short", "InvalidFile");
        temporary_write_tensors(
                "outside", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4);
        refuse_open("outside", "InvalidFile");
        temporary_write_tensors(
                "behind", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9);
        refuse_open("behind", "InvalidFile");
        assert_int_equal(mkfifo("fifo", 0600), 0);
        refuse_open("fifo", "InvalidFile");
}

static void read_file_cut_meanwhile_refused(void **state) {
        TensorFile t = {};
        latent_error e = {};
        char data[8];

        temporary_write_tensors("x", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8);
        assert_int_equal(tensor_file_open("x", &t, &e), 0);
        assert_int_equal(tensor_file_read(&t, &t.header->tensors[0], data, &e), 0);
        assert_int_equal(truncate("x", 60), 0);
        assert_int_equal(tensor_file_read(&t, &t.header->tensors[0], data, &e), -ESTALE);
        assert_string_equal(e.name, "FileChanged");
        tensor_file_done(&t);
}

static void find_step_case_inputs(void **state) {
        TensorFile t = {};
        latent_error e = {};
        double sigma;
        Inputs in;

        assert_int_equal(tensor_file_open(data_file("case_t2va_tiny.safetensors"), &t, &e), 0);
        assert_int_equal(inputs_find(&t, false, &in, &e), 0);
        assert_int_equal(inputs_get(&in, INPUT_VIDEO)->n_dims, 4);
        assert_int_equal(inputs_get(&in, INPUT_VIDEO)->shape[1], 2);
        assert_string_equal(inputs_get(&in, INPUT_TEXT)->dtype, "BF16");
        assert_non_null(inputs_get(&in, INPUT_TEXT_TAGS));
        assert_null(inputs_get(&in, INPUT_SIGMAS_VIDEO));
        assert_true(inputs_bytes(&in) >= 24 * 2 * 4 * 4 * 4 + 32 * 2 * 8 * 4 + 9 * 160 * 2 + 9);
        assert_int_equal(inputs_sigma(&t, "sigma_video", &sigma, &e), 0);
        assert_true(sigma == (double) 0.9230769276618958f);
        tensor_file_done(&t);
}

static void find_trajectory_sigmas(void **state) {
        TensorFile t = {};
        latent_error e = {};
        Inputs in;

        assert_int_equal(tensor_file_open(data_file("traj_euler_4.safetensors"), &t, &e), 0);
        assert_int_equal(inputs_find(&t, true, &in, &e), 0);
        assert_int_equal(inputs_get(&in, INPUT_SIGMAS_VIDEO)->shape[0], 5);
        assert_int_equal(inputs_find(&t, false, &in, &e), 0);
        assert_null(inputs_get(&in, INPUT_SIGMAS_VIDEO));
        tensor_file_done(&t);
}

#define T(name, at) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" at "]}"
#define META(text) "\"__metadata__\":{" text "}"

static void refuse_find(const char *header, size_t n, const char *name, const char *says) {
        TensorFile t = {};
        latent_error e = {};
        Inputs in;

        temporary_write_tensors("x", header, n);
        if (tensor_file_open("x", &t, &e) < 0)
                fail_msg("%s", e.text);
        assert_true(inputs_find(&t, true, &in, &e) < 0);
        assert_string_equal(e.name, name);
        if (!strstr(e.text, says))
                fail_msg("\"%s\" does not say \"%s\"", e.text, says);
        tensor_file_done(&t);
}

static void find_missing_or_deep_refused(void **state) {
        refuse_find("{" T("text", "0,1") "," T("video", "1,2") "}", 2, "InvalidTensor", "audio");
        refuse_find("{" T("text", "0,1") "," T("video", "1,2") "," T("audio", "2,3") "," T(
                            "sigmas_video", "3,4") "}",
                4, "InvalidTensor", "both or none");
        refuse_find("{" T("audio", "2,3") "," T("video", "1,2") ",\"text\":{\"dtype\":\"U8\",\"shape\":[1,1,"
                                                                "1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}",
                3, "InvalidTensor", "dimensions");
}

static int sigma_of(const char *meta, double *ret) {
        char header[256];
        TensorFile t = {};
        latent_error e = {};
        int r;

        (void) snprintf(header, sizeof(header), "{\"__metadata__\":{%s}}", meta);
        temporary_write_tensors("x", header, 0);
        assert_int_equal(tensor_file_open("x", &t, &e), 0);
        r = inputs_sigma(&t, "sigma_audio", ret, &e);
        if (r < 0 && strstr(meta, "sigma_audio"))
                assert_string_equal(e.name, "InvalidFile");
        else if (r < 0)
                assert_non_null(strstr(e.text, "--sigma-audio"));
        tensor_file_done(&t);
        return r;
}

static void sigma_bits_win_over_decimals(void **state) {
        double v;

        assert_int_equal(sigma_of("\"sigma_audio\":\"0.5\"", &v), 0);
        assert_true(v == 0.5);
        assert_int_equal(sigma_of("\"sigma_audio\":\"0.5\",\"sigma_audio_f32\":\"3f400000\"", &v), 0);
        assert_true(v == 0.75);
        assert_int_equal(sigma_of("\"sigma_audio_f32\":\"3f40000\"", &v), -EINVAL);
        assert_int_equal(sigma_of("\"sigma_audio_f32\":\"0x400000\"", &v), -EINVAL);
        assert_int_equal(sigma_of("\"sigma_audio\":\"half\"", &v), -EINVAL);
        assert_int_equal(sigma_of("\"sigma\":\"0.5\"", &v), -EINVAL);
}

static int shift_of(const char *meta, double *ret) {
        char header[256];
        TensorFile t = {};
        latent_error e = {};
        int r;

        (void) snprintf(header, sizeof(header), "{" META("%s") "}", meta);
        temporary_write_tensors("x", header, 0);
        assert_int_equal(tensor_file_open("x", &t, &e), 0);
        r = inputs_shift(&t, "shift_video", ret, &e);
        if (r < 0)
                assert_string_equal(e.name, "InvalidFile");
        tensor_file_done(&t);
        return r;
}

static void shift_from_metadata(void **state) {
        double v = 9;

        assert_int_equal(shift_of("\"shift_video\":\"6.5\"", &v), 0);
        assert_true(v == 6.5);
        assert_int_equal(shift_of("\"shift_audio\":\"3.0\"", &v), 0);
        assert_true(v == 0);
        v = 9;
        assert_int_equal(shift_of("\"shift_video\":\"0\"", &v), -EBADMSG);
        assert_int_equal(shift_of("\"shift_video\":\"-1\"", &v), -EBADMSG);
        assert_int_equal(shift_of("\"shift_video\":\"twelve\"", &v), -EBADMSG);
        assert_true(v == 9);
}

/* Files in the working directory. */
static unsigned count_files(void) {
        FILE *p = popen("ls -A | wc -l", "re");
        unsigned n = 0;

        assert_non_null(p);
        assert_int_equal(fscanf(p, "%u", &n), 1);
        assert_int_equal(pclose(p), 0);
        return n;
}

static void write_one(Output *o) {
        const StTensor t = {.name = "a", .type = ST_U8, .n_dims = 1, .shape = {3}, .size = 3};
        const void *data[] = {"xyz"};
        latent_error e = {};

        assert_int_equal(output_write(o, &t, data, 1, NULL, 0, &e), 0);
}

static void output_appears_when_complete(void **state) {
        TensorFile t = {};
        latent_error e = {};
        Output o = {.fd = -EBADF};
        struct stat st;

        assert_int_equal(umask(027), 022);
        assert_int_equal(output_open("out", &o, &e), 0);
        (void) umask(022);
        assert_int_equal(count_files(), o.unnamed ? 0 : 1); /* a name only where the file system wants it */
        write_one(&o);
        assert_int_equal(access("out", F_OK), -1);
        assert_int_equal(output_commit(&o, &e), 0);
        output_done(&o);

        assert_int_equal(count_files(), 1);
        assert_int_equal(stat("out", &st), 0);
        assert_int_equal(st.st_mode & 0777, 0640);
        assert_int_equal(tensor_file_open("out", &t, &e), 0);
        tensor_file_done(&t);
}

static void output_not_committed_old_file_stays(void **state) {
        latent_error e = {};
        Output o = {.fd = -EBADF};
        struct stat st;

        temporary_write("out", "old", 3);
        assert_int_equal(output_open("out", &o, &e), 0);
        write_one(&o);
        output_done(&o);
        output_done(&o);
        assert_int_equal(count_files(), 1);
        assert_int_equal(stat("out", &st), 0);
        assert_int_equal(st.st_size, 3);
}

static void check_written(const char *path, mode_t mode) {
        TensorFile t = {};
        latent_error e = {};
        struct stat st;
        char data[3];

        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, mode);
        assert_int_equal(tensor_file_open(path, &t, &e), 0);
        assert_int_equal(tensor_file_read(&t, &t.header->tensors[0], data, &e), 0);
        assert_memory_equal(data, "xyz", 3);
        tensor_file_done(&t);
}

static void write_over(void) {
        latent_error e = {};
        Output o = {.fd = -EBADF};

        temporary_write("out", "old", 3);
        assert_int_equal(chmod("out", 0604), 0);
        assert_int_equal(output_open("out", &o, &e), 0);
        write_one(&o);
        assert_int_equal(output_commit(&o, &e), 0);
        output_done(&o);
        check_written("out", 0604);
        assert_int_equal(count_files(), 1);
        assert_int_equal(unlink("out"), 0);

        assert_int_equal(output_open("out", &o, &e), 0);
        write_one(&o);
        assert_int_equal(output_commit(&o, &e), 0);
        output_done(&o);
        check_written("out", 0644);
        assert_int_equal(count_files(), 1);
        assert_int_equal(unlink("out"), 0);
}

static void output_old_file_replaced(void **state) {
        write_over();
}

/* A system call that this kernel or file system does not have. flag: only with it in the third argument; 0: always. */
static int refuse_call(unsigned number, unsigned flag, int error) {
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
                BPF_JUMP(flag ? BPF_JMP | BPF_JSET | BPF_K : BPF_JMP | BPF_JGE | BPF_K, flag, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned) error),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {.len = ELEMENTSOF(filter), .filter = filter};

        return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0 ? -errno : 0;
}

/* Without unnamed files, and with ones that cannot be given a name: the same files in the end. In children, since a filter stays. */
static void output_other_file_systems_the_same(void **state) {
        const struct {
                unsigned number, flag;
                int error;
                bool unnamed;
        } calls[] = {
                {SYS_openat, O_TMPFILE & ~O_DIRECTORY, EOPNOTSUPP, false},
                {SYS_linkat, 0, EPERM, true},
        };

        for (size_t i = 0; i < ELEMENTSOF(calls); i++) {
                pid_t pid = fork();
                int status;

                assert_true(pid >= 0);
                if (pid == 0) {
                        Output o = {.fd = -EBADF};
                        latent_error e = {};
                        bool unnamed;

                        if (refuse_call(calls[i].number, calls[i].flag, calls[i].error) < 0)
                                _exit(77);
                        if (output_open("out", &o, &e) < 0)
                                _exit(2);
                        unnamed = o.unnamed;
                        output_done(&o);
                        if (unnamed != calls[i].unnamed)
                                _exit(3);
                        write_over();
                        _exit(0);
                }
                assert_int_equal(waitpid(pid, &status, 0), pid);
                if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
                        skip();
                assert_true(WIFEXITED(status));
                assert_int_equal(WEXITSTATUS(status), 0);
        }
}

static void output_link_target_replaced(void **state) {
        latent_error e = {};
        Output o = {.fd = -EBADF};
        struct stat st;

        temporary_write("d/out", "old", 3);
        assert_int_equal(symlink("d/out", "link"), 0);
        assert_int_equal(output_open("link", &o, &e), 0);
        write_one(&o);
        assert_int_equal(output_commit(&o, &e), 0);
        output_done(&o);
        assert_int_equal(lstat("link", &st), 0);
        assert_true(S_ISLNK(st.st_mode));
        assert_int_equal(stat("d/out", &st), 0);
        assert_true(st.st_size > 3);
}

static void output_impossible_refused(void **state) {
        latent_error e = {};
        Output o = {.fd = -EBADF};

        assert_true(output_open("absent/out", &o, &e) < 0);
        assert_string_equal(e.name, "IOError");
        assert_true(output_open(".", &o, &e) < 0);
        assert_true(output_open("", &o, &e) < 0);
        assert_true(output_open("new/", &o, &e) < 0);
        assert_null(o.path);
        assert_int_equal(count_files(), 0);
}

static void output_device_written_directly(void **state) {
        latent_error e = {};
        Output o = {.fd = -EBADF};
        struct stat st;

        assert_int_equal(output_open("/dev/null", &o, &e), 0);
        write_one(&o);
        assert_int_equal(output_commit(&o, &e), 0);
        output_done(&o);
        assert_int_equal(stat("/dev/null", &st), 0);
        assert_true(S_ISCHR(st.st_mode));
}

/* A fifo's open() would wait for its reader. */
static void output_regular_checked(void **state) {
        latent_error e = {};

        assert_int_equal(output_check_regular("new", &e), 0);
        temporary_write("old", "x", 1);
        assert_int_equal(output_check_regular("old", &e), 0);
        assert_int_equal(mkfifo("fifo", 0600), 0);
        assert_int_equal(symlink("fifo", "link"), 0);
        for (const char *const *path = (const char *const[]){"fifo", "link", "/dev/null", ".", NULL}; *path; path++) {
                e = (latent_error){};
                assert_true(output_check_regular(*path, &e) < 0);
                assert_string_equal(e.name, "IOError");
                assert_int_equal(strncmp(e.text, *path, strlen(*path)), 0);
        }
        assert_string_equal(e.text, ". cannot be written: Is a directory.");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(open_what_is_no_tensor_file_refused),
                TEST(read_file_cut_meanwhile_refused),
                TEST(find_step_case_inputs),
                TEST(find_trajectory_sigmas),
                TEST(find_missing_or_deep_refused),
                TEST(sigma_bits_win_over_decimals),
                TEST(shift_from_metadata),
                TEST(output_appears_when_complete),
                TEST(output_not_committed_old_file_stays),
                TEST(output_link_target_replaced),
                TEST(output_impossible_refused),
                TEST(output_old_file_replaced),
                TEST(output_other_file_systems_the_same),
                TEST(output_device_written_directly),
                TEST(output_regular_checked),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
