/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "service/latentd/model-files.h"
#include "service/latentd/model.h"
#include "service/shared/cleanup.h"

typedef struct Test {
        char base[64];
        char a[80], b[80]; /* two ModelPath= directories */
        char *paths[3];
        Config config;
        ModelFiles files;
        Fault fault;
} Test;

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static int setup(void **state) {
        Test *t = calloc(1, sizeof(*t));

        (void) snprintf(t->base, sizeof(t->base), "/tmp/latentd-models-XXXXXX");
        if (!mkdtemp(t->base))
                return -1;
        (void) snprintf(t->a, sizeof(t->a), "%s/a", t->base);
        (void) snprintf(t->b, sizeof(t->b), "%s/b", t->base);
        t->paths[0] = t->a;
        t->paths[1] = t->b;
        t->config.model_path = t->paths;
        *state = t;
        return mkdir(t->a, 0755) < 0 || mkdir(t->b, 0755) < 0 ? -1 : 0;
}

static int teardown(void **state) {
        Test *t = *state;

        (void) nftw(t->base, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        free(t);
        return 0;
}

static void full_path(Test *t, const char *path, char *ret, size_t size) {
        (void) snprintf(ret, size, "%s/%s", t->base, path);
        for (char *p = strchr(ret + 1, '/'); p; p = strchr(p + 1, '/')) {
                *p = '\0';
                (void) mkdir(ret, 0755);
                *p = '/';
        }
}

static void put(Test *t, const char *path, const void *data, size_t n) {
        CLEANUP_CLOSE int fd = -EBADF;
        char full[256];

        full_path(t, path, full, sizeof(full));
        fd = open(full, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, data, n), n);
}

/* A .safetensors file with one tensor of one byte. */
static void put_weights(Test *t, const char *path, const char *tensor) {
        char data[256] = {};
        uint64_t n;

        n = (uint64_t) snprintf(data + 8, sizeof(data) - 8,
                "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", tensor);
        memcpy(data, &n, 8);
        put(t, path, data, 8 + n + 1);
}

static void put_link(Test *t, const char *path, const char *target) {
        char full[256];

        full_path(t, path, full, sizeof(full));
        assert_int_equal(symlink(target, full), 0);
}

static int try_with(Test *t, const char *name, const char *tokenizer) {
        t->fault = (Fault){};
        return model_files_open(&t->config, name, tokenizer, &t->files, &t->fault);
}

static int try(Test *t, const char *name) {
        return try_with(t, name, "");
}

/* Opens it and compares the base names, in order, separated by blanks. */
static void expect_with(Test *t, const char *name, const char *tokenizer, const char *names) {
        char got[1024] = "";

        if (try_with(t, name, tokenizer) < 0)
                fail_msg("%s: %s", name, t->fault.text);
        for (size_t i = 0; i < t->files.n_files; i++) {
                struct stat st;

                assert_int_equal(fstat(t->files.files[i].fd, &st), 0);
                assert_true(S_ISREG(st.st_mode));
                (void) snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s", i > 0 ? " " : "",
                        t->files.files[i].name);
        }
        model_files_done(&t->files);
        assert_string_equal(got, names);
}

static void expect(Test *t, const char *name, const char *names) {
        expect_with(t, name, "", names);
}

static void expect_error(Test *t, const char *name, int error, const char *fault, const char *text) {
        int r = try(t, name);

        if (r != error || strcmp(t->fault.name, fault) != 0 || !strstr(t->fault.text, text))
                fail_msg("%s: %d: %s: %s", name, r, t->fault.name, t->fault.text);
        assert_null(t->files.files);
}

static void model_files_open_single_file_is_that_file(void **state) {
        Test *t = *state;

        put_weights(t, "a/sub/one.safetensors", "x");
        put_weights(t, "a/sub/two.safetensors", "x");
        expect(t, "sub/one.safetensors", "one.safetensors");
}

static void model_files_open_first_directory_wins(void **state) {
        Test *t = *state;
        struct stat a, opened;
        char path[128];

        put_weights(t, "a/m.safetensors", "x");
        put_weights(t, "b/m.safetensors", "y");
        put_weights(t, "b/n.safetensors", "y");
        assert_int_equal(try(t, "m.safetensors"), 0);
        (void) snprintf(path, sizeof(path), "%s/m.safetensors", t->a);
        assert_int_equal(stat(path, &a), 0);
        assert_int_equal(fstat(t->files.files[0].fd, &opened), 0);
        assert_int_equal(a.st_ino, opened.st_ino);
        model_files_done(&t->files);
        expect(t, "n.safetensors", "n.safetensors");

        t->paths[0] = "/nonexistent/models"; /* an unplugged disk */
        expect(t, "m.safetensors", "m.safetensors");
}

static void model_files_open_absent_says_where_it_looked(void **state) {
        Test *t = *state;
        char *none[] = {NULL};

        expect_error(t, "nothing", -ENOENT, FAULT_NOT_FOUND, t->b);
        t->config.model_path = none;
        expect_error(t, "nothing", -ENOENT, FAULT_NOT_FOUND, "ModelPath=");
        t->config.model_path = NULL;
        expect_error(t, "nothing", -ENOENT, FAULT_NOT_FOUND, "ModelPath=");
}

static void model_files_open_names_that_leave_are_refused(void **state) {
        Test *t = *state;

        put_weights(t, "outside.safetensors", "x");
        put_weights(t, "a/d/x.safetensors", "x");
        expect_error(t, "../outside.safetensors", -EACCES, FAULT_ACCESS_DENIED, "..");
        expect_error(t, "d/../d/x.safetensors", -EACCES, FAULT_ACCESS_DENIED, "..");
        expect_error(t, "d/..", -EACCES, FAULT_ACCESS_DENIED, "..");
        expect_error(t, "..", -EACCES, FAULT_ACCESS_DENIED, "..");
        expect_error(t, "/etc/passwd", -EACCES, FAULT_ACCESS_DENIED, "absolute");
        expect_error(t, "", -EINVAL, FAULT_INVALID_ARGUMENT, "empty");
        expect_error(t, "d/..x", -ENOENT, FAULT_NOT_FOUND, "d/..x");
}

static void model_files_open_links_may_not_lead_out(void **state) {
        Test *t = *state;

        put_weights(t, "outside/x.safetensors", "x");
        put_weights(t, "a/blobs/1234", "x");
        put_link(t, "a/out.safetensors", "../outside/x.safetensors");
        put_link(t, "a/absolute.safetensors", "/etc/passwd");
        put_link(t, "a/folder", "../outside");
        put_link(t, "a/proc.safetensors", "/proc/self/root/etc/passwd");
        put_link(t, "a/snapshot/in.safetensors", "../blobs/1234");
        put_link(t, "a/loop.safetensors", "loop.safetensors");
        expect_error(t, "out.safetensors", -EACCES, FAULT_ACCESS_DENIED, "link");
        expect_error(t, "absolute.safetensors", -EACCES, FAULT_ACCESS_DENIED, "link");
        expect_error(t, "folder", -EACCES, FAULT_ACCESS_DENIED, "link");
        expect_error(t, "folder/x.safetensors", -EACCES, FAULT_ACCESS_DENIED, "link");
        expect_error(t, "proc.safetensors", -EACCES, FAULT_ACCESS_DENIED, "link");
        expect_error(t, "loop.safetensors", -EACCES, FAULT_ACCESS_DENIED, "link");
        /* As in a download cache: links inside are fine. */
        expect(t, "snapshot", "in.safetensors");
        expect(t, "snapshot/in.safetensors", "in.safetensors");
}

static void model_files_open_shard_link_out_is_refused(void **state) {
        Test *t = *state;
        static const char index[] = "{\"metadata\":{},\"weight_map\":{\"x\":\"s.safetensors\"}}";

        put_weights(t, "outside/x.safetensors", "x");
        put(t, "a/m/model.safetensors.index.json", index, sizeof(index) - 1);
        put_link(t, "a/m/s.safetensors", "../../outside/x.safetensors");
        expect_error(t, "m", -EACCES, FAULT_ACCESS_DENIED, "link");
}

static void model_files_open_what_is_no_file_is_refused(void **state) {
        Test *t = *state;
        char path[256];

        full_path(t, "a/fifo.safetensors", path, sizeof(path));
        assert_int_equal(mkfifo(path, 0644), 0);
        expect_error(t, "fifo.safetensors", -EBADMSG, FAULT_INVALID_FILE, "regular");

        full_path(t, "a/m/fifo.safetensors", path, sizeof(path));
        assert_int_equal(mkfifo(path, 0644), 0);
        expect_error(t, "m", -EBADMSG, FAULT_INVALID_FILE, "regular");

        full_path(t, "a/n/directory.safetensors/x", path, sizeof(path));
        expect_error(t, "n", -EBADMSG, FAULT_INVALID_FILE, "regular");

        put(t, "a/notes.txt", "hello", 5);
        expect_error(t, "notes.txt", -EBADMSG, FAULT_INVALID_FILE, ".safetensors");
}

static void model_files_open_directory_with_index(void **state) {
        Test *t = *state;
        static const char index[] = "{\"metadata\":{},\"weight_map\":{\"x\":\"m-00002-of-00002."
                                    "safetensors\",\"y\":\"m-00001-of-00002.safetensors\","
                                    "\"z\":\"m-00001-of-00002.safetensors\"}}";

        put(t, "a/m/m.safetensors.index.json", index, sizeof(index) - 1);
        put(t, "a/m/config.json", "{}", 2);
        put_weights(t, "a/m/m-00002-of-00002.safetensors", "x");
        put_weights(t, "a/m/m-00001-of-00002.safetensors", "y");
        put_weights(t, "a/m/other.safetensors", "x"); /* not named by the index */
        expect(t, "m",
                "config.json m.safetensors.index.json m-00001-of-00002.safetensors "
                "m-00002-of-00002.safetensors");
        expect(t, "m/",
                "config.json m.safetensors.index.json m-00001-of-00002.safetensors "
                "m-00002-of-00002.safetensors");
}

static void model_files_open_absent_shards_are_listed(void **state) {
        Test *t = *state;
        static const char index[] =
                "{\"weight_map\":{\"x\":\"1.safetensors\",\"y\":\"2.safetensors\",\"z\":\"3.safetensors\"}}";

        put(t, "a/m/m.safetensors.index.json", index, sizeof(index) - 1);
        put_weights(t, "a/m/2.safetensors", "y");
        expect_error(t, "m", -EBADMSG, FAULT_INVALID_FILE, "1.safetensors, 3.safetensors");
        assert_non_null(strstr(t->fault.text, "download"));
}

static void model_files_open_index_with_paths_is_refused(void **state) {
        Test *t = *state;
        static const char *const indexes[] = {
                "{\"weight_map\":{\"x\":\"../outside.safetensors\"}}",
                "{\"weight_map\":{\"x\":\"/etc/passwd\"}}",
                "{\"weight_map\":{\"x\":\"\"}}",
                "{\"weight_map\":5}",
                "garbage",
        };

        put_weights(t, "a/outside.safetensors", "x");
        for (size_t i = 0; i < ELEMENTSOF(indexes); i++) {
                put(t, "a/m/m.safetensors.index.json", indexes[i], strlen(indexes[i]));
                expect_error(t, "m", -EBADMSG, FAULT_INVALID_FILE, "m.safetensors.index.json");
        }
}

static void model_files_open_directory_without_index(void **state) {
        Test *t = *state;

        put_weights(t, "a/one/w.safetensors", "x");
        put(t, "a/one/readme.md", "x", 1);
        put_weights(t, "a/one/.hidden.safetensors", "x");
        expect(t, "one", "w.safetensors");

        put_weights(t, "a/many/2.safetensors", "y");
        put_weights(t, "a/many/1.safetensors", "x");
        put(t, "a/many/config.json", "{}", 2);
        expect(t, "many", "config.json 1.safetensors 2.safetensors");

        put(t, "a/none/readme.md", "x", 1);
        expect_error(t, "none", -EBADMSG, FAULT_INVALID_FILE, "no checkpoint");
}

static void model_files_open_two_checkpoints_are_ambiguous(void **state) {
        Test *t = *state;
        static const char index[] = "{\"weight_map\":{\"x\":\"1.safetensors\"}}";

        put_weights(t, "a/same/bf16.safetensors", "x");
        put_weights(t, "a/same/int8.safetensors", "x");
        expect_error(t, "same", -EBADMSG, FAULT_INVALID_FILE, "bf16.safetensors and int8.safetensors");

        put(t, "a/two/a.safetensors.index.json", index, sizeof(index) - 1);
        put(t, "a/two/b.safetensors.index.json", index, sizeof(index) - 1);
        put_weights(t, "a/two/1.safetensors", "x");
        expect_error(t, "two", -EBADMSG, FAULT_INVALID_FILE,
                "a.safetensors.index.json, b.safetensors.index.json");
}

static void model_files_open_pipeline_means_its_transformer(void **state) {
        Test *t = *state;

        put(t, "a/p/model_index.json", "{}", 2);
        put_weights(t, "a/p/vae/v.safetensors", "v");
        put_weights(t, "a/p/transformer/t.safetensors", "t");
        put(t, "a/p/transformer/config.json", "{}", 2);
        expect(t, "p", "config.json t.safetensors");
}

/* The shifts of its schedules, of two files of one name. */
static void model_files_open_transformer_brings_its_schedulers(void **state) {
        static const char both[] = "t.safetensors scheduler_config.json audio_scheduler_config.json";
        Test *t = *state;

        put_weights(t, "a/p/transformer/t.safetensors", "t");
        put(t, "a/p/scheduler/scheduler_config.json", "{}", 2);
        put(t, "a/p/scheduler/other.json", "{}", 2);
        expect(t, "p", "t.safetensors scheduler_config.json");
        put(t, "a/p/audio_scheduler/scheduler_config.json", "{}", 2);
        expect(t, "p", both);
        expect(t, "p/transformer", both);
        expect(t, "p/transformer//", both);
        expect(t, "p/transformer/t.safetensors", "t.safetensors"); /* a file is that file */
        put_weights(t, "a/p/my_transformer/t.safetensors", "t");
        expect(t, "p/my_transformer", "t.safetensors");
        put_weights(t, "a/p/vae/t.safetensors", "t");
        expect(t, "p/vae", "t.safetensors");
        put_weights(t, "a/o/transformer/t.safetensors", "t");
        put(t, "a/o/scheduler", "a file", 6);
        expect(t, "o", "t.safetensors");
        put_weights(t, "a/q/transformer/t.safetensors", "t");
        put_link(t, "a/q/audio_scheduler/scheduler_config.json", "../../../out/x");
        put(t, "out/x", "{}", 2);
        expect_error(t, "q", -EACCES, FAULT_ACCESS_DENIED, "q/audio_scheduler/scheduler_config.json");
}

static void put_pipeline(Test *t) {
        static const char *const files[] = {"a/p/text_encoder/config.json", "a/p/text_encoder/vocab.json", "a/p/tokenizer/config.json",
                "a/p/tokenizer/vocab.json", "a/p/tokenizer/merges.txt", "a/p/tokenizer/tokenizer_config.json",
                "a/p/tokenizer/special_tokens_map.json", "a/words/tokenizer.json", "b/words/merges.txt", "a/empty/readme"};

        put_weights(t, "a/p/transformer/t.safetensors", "t");
        put_weights(t, "a/p/text_encoder/e.safetensors", "e");
        for (size_t i = 0; i < ELEMENTSOF(files); i++)
                put(t, files[i], "{}", 2);
}

static void model_files_open_text_encoder_brings_the_tokenizer_beside_it(void **state) {
        static const char all[] = "config.json e.safetensors vocab.json merges.txt tokenizer_config.json";
        Test *t = *state;

        put_pipeline(t);
        expect(t, "p/text_encoder", all);
        expect(t, "p/text_encoder//", all);
        expect(t, "p", "t.safetensors");
        put_weights(t, "a/text_encoder/x.safetensors", "x");
        expect(t, "text_encoder", "x.safetensors"); /* without one beside it */
        put_weights(t, "a/my_text_encoder/x.safetensors", "x");
        put(t, "a/tokenizer/vocab.json", "{}", 2);
        expect(t, "text_encoder", "x.safetensors vocab.json");
        expect(t, "my_text_encoder", "x.safetensors");
        expect(t, "text_encoder/x.safetensors", "x.safetensors"); /* a file is that file */
}

/* The sizes of pictures: of the directory processor, or else of the tokenizer's. */
static void model_files_open_text_encoder_brings_its_processor(void **state) {
        static const char with[] = "config.json e.safetensors preprocessor_config.json vocab.json merges.txt tokenizer_config.json";
        Test *t = *state;

        put_pipeline(t);
        put(t, "a/p/processor/tokenizer.json", "{}", 2); /* savers repeat the tokenizer there */
        expect(t, "p/text_encoder", "config.json e.safetensors vocab.json merges.txt tokenizer_config.json");
        put(t, "a/p/tokenizer/preprocessor_config.json", "{}", 2);
        expect(t, "p/text_encoder",
                "config.json e.safetensors vocab.json merges.txt tokenizer_config.json preprocessor_config.json");
        put(t, "a/p/processor/preprocessor_config.json", "{}", 2);
        expect(t, "p/text_encoder", with);
        put(t, "a/p/tokenizer/video_preprocessor_config.json", "{}", 2); /* all of one directory */
        expect(t, "p/text_encoder", with);
        put(t, "a/p/processor/video_preprocessor_config.json", "{}", 2);
        expect_with(t, "p/text_encoder", "words",
                "config.json e.safetensors preprocessor_config.json video_preprocessor_config.json tokenizer.json");
        put_weights(t, "b/single.safetensors", "x");
        expect_with(t, "single.safetensors", "p/tokenizer",
                "single.safetensors vocab.json merges.txt tokenizer_config.json preprocessor_config.json "
                "video_preprocessor_config.json");
        put(t, "a/empty/preprocessor_config.json", "{}", 2);
        assert_int_equal(try_with(t, "single.safetensors", "empty"), -EBADMSG);
        put_link(t, "a/q/processor/preprocessor_config.json", "../../../out/x");
        put(t, "out/x", "{}", 2);
        put_weights(t, "a/q/text_encoder/e.safetensors", "e");
        expect_error(t, "q/text_encoder", -EACCES, FAULT_ACCESS_DENIED, "q/processor/preprocessor_config.json");
}

static void model_files_open_tokenizer_by_name(void **state) {
        Test *t = *state;

        put_pipeline(t);
        put_weights(t, "b/single.safetensors", "x");
        expect_with(t, "single.safetensors", "words", "single.safetensors tokenizer.json");
        expect_with(t, "p/text_encoder", "words", "config.json e.safetensors tokenizer.json");
        assert_int_equal(try_with(t, "single.safetensors", "empty"), -EBADMSG);
        assert_string_equal(t->fault.name, FAULT_INVALID_FILE);
        assert_int_equal(try_with(t, "single.safetensors", "nowhere"), -ENOENT);
        assert_string_equal(t->fault.name, FAULT_NOT_FOUND);
        assert_int_equal(try_with(t, "single.safetensors", "../b"), -EACCES);
        assert_int_equal(try_with(t, "single.safetensors", "/etc"), -EACCES);
        assert_string_equal(t->fault.name, FAULT_ACCESS_DENIED);
        assert_null(t->files.files);
}

/* Neither the directory nor a file of it leads out of the root. */
static void model_files_open_tokenizer_stays_below_the_root(void **state) {
        Test *t = *state;

        put(t, "out/vocab.json", "{}", 2);
        put_weights(t, "a/p/text_encoder/e.safetensors", "e");
        put_link(t, "a/p/tokenizer", "../../out");
        expect_error(t, "p/text_encoder", -EACCES, FAULT_ACCESS_DENIED, "p/tokenizer");
        put_weights(t, "a/q/text_encoder/e.safetensors", "e");
        put_link(t, "a/q/tokenizer/vocab.json", "../../../out/vocab.json");
        expect_error(t, "q/text_encoder", -EACCES, FAULT_ACCESS_DENIED, "q/tokenizer/vocab.json");
        put_weights(t, "a/r/text_encoder/e.safetensors", "e");
        put(t, "a/r/blobs/1", "{}", 2);
        put_link(t, "a/r/tokenizer/vocab.json", "../blobs/1");
        expect(t, "r/text_encoder", "e.safetensors vocab.json");
}

/* It does not lead out of anything. */
static void model_files_open_loop_of_links_is_named(void **state) {
        Test *t = *state;

        put_link(t, "a/x.safetensors", "y.safetensors");
        put_link(t, "a/y.safetensors", "x.safetensors");
        expect_error(t, "x.safetensors", -EACCES, FAULT_ACCESS_DENIED, "too many links");
}

static void model_files_open_closes_what_it_opened(void **state) {
        Test *t = *state;
        int before = open("/dev/null", O_RDONLY | O_CLOEXEC), after;

        (void) close(before);
        model_files_open_pipeline_means_its_transformer(state);
        model_files_open_two_checkpoints_are_ambiguous(state);
        model_files_open_absent_shards_are_listed(state);
        model_files_open_tokenizer_by_name(state);
        expect_error(t, "nothing", -ENOENT, FAULT_NOT_FOUND, "nothing");
        after = open("/dev/null", O_RDONLY | O_CLOEXEC);
        (void) close(after);
        assert_int_equal(before, after);
}

static int refuse_openat2(void) {
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {.len = ELEMENTSOF(filter), .filter = filter};

        return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
                               prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0
                       ? -errno
                       : 0;
}

static void model_files_open_without_openat2_follows_no_link(void **state) {
        Test *t = *state;
        int status;
        pid_t pid;

        put_weights(t, "outside.safetensors", "x");
        put_weights(t, "a/d/e/x.safetensors", "x");
        put_link(t, "a/l", "d");
        put_link(t, "a/out.safetensors", "../outside.safetensors");
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
                if (refuse_openat2() < 0)
                        _exit(77);
                if (try(t, "d/e/x.safetensors") < 0 || t->files.n_files != 1)
                        _exit(2);
                model_files_done(&t->files);
                if (try(t, "d/e") < 0 || t->files.n_files != 1)
                        _exit(3);
                model_files_done(&t->files);
                _exit(try(t, "out.safetensors") != -EACCES ? 4
                        : try(t, "l/e/x.safetensors") >= 0 ? 5
                        : try(t, "nothing") != -ENOENT     ? 6
                                                           : 0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77)
                skip();
        assert_int_equal(WEXITSTATUS(status), 0);
}

/* Nothing in a file says which requests it is for; the published names do. */
static void model_partition_of_name_is_the_published_one(void **state) {
        assert_string_equal(model_partition_of_name("minimax_h3_fl2va_pruned_int8_convrot.safetensors"), "fl2va");
        assert_string_equal(model_partition_of_name("diffusion_models/minimax_h3_ref2va_bf16.safetensors"), "ref2va");
        assert_string_equal(model_partition_of_name("FL2VA/transformer"), "fl2va");
        assert_string_equal(model_partition_of_name("Ref2VA/transformer"), "ref2va");
        assert_string_equal(model_partition_of_name("model.safetensors"), "");
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                TEST(model_files_open_single_file_is_that_file),
                TEST(model_files_open_first_directory_wins),
                TEST(model_files_open_absent_says_where_it_looked),
                TEST(model_files_open_names_that_leave_are_refused),
                TEST(model_files_open_links_may_not_lead_out),
                TEST(model_files_open_shard_link_out_is_refused),
                TEST(model_files_open_what_is_no_file_is_refused),
                TEST(model_files_open_directory_with_index),
                TEST(model_files_open_absent_shards_are_listed),
                TEST(model_files_open_index_with_paths_is_refused),
                TEST(model_files_open_directory_without_index),
                TEST(model_files_open_two_checkpoints_are_ambiguous),
                TEST(model_files_open_pipeline_means_its_transformer),
                TEST(model_files_open_transformer_brings_its_schedulers),
                TEST(model_files_open_closes_what_it_opened),
                TEST(model_files_open_text_encoder_brings_the_tokenizer_beside_it),
                TEST(model_files_open_text_encoder_brings_its_processor),
                TEST(model_files_open_tokenizer_by_name),
                TEST(model_files_open_tokenizer_stays_below_the_root),
                TEST(model_files_open_loop_of_links_is_named),
                TEST(model_files_open_without_openat2_follows_no_link),
                cmocka_unit_test(model_partition_of_name_is_the_published_one),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
