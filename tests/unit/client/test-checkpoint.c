/* SPDX-License-Identifier: Apache-2.0 */

/* Which files of a path belong to the checkpoint. */

#include "client/liblatent/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/client/temporary.h"

#define INDEX "diffusion_pytorch_model.safetensors.index.json"

static void touch(const char *name) {
        temporary_write(name, name, strlen(name));
}

static void write_index(const char *name, const char *a, const char *b) {
        char text[512];
        int n = snprintf(text, sizeof(text),
                "{\"metadata\":{\"total_size\":4},\"weight_map\":{\"x\":\"%s\",\"y\":\"%s\"}}", a, b);

        temporary_write(name, text, (size_t) n);
}

/* Opens and compares with a list of names that ends in NULL. */
static void expect(const char *path, const char *title, ...) {
        Checkpoint c = {};
        Fault f = {};
        va_list ap;
        size_t n = 0;

        if (checkpoint_open(path, NULL, &c, &f) < 0)
                fail_msg("%s: %s", f.name, f.text);
        assert_string_equal(c.name, title);
        va_start(ap, title);
        for (const char *s; (s = va_arg(ap, const char *)); n++) {
                assert_true(n < c.n_files);
                assert_string_equal(c.files[n].name, s);
                assert_true(fcntl(c.files[n].fd, F_GETFD) & FD_CLOEXEC);
        }
        va_end(ap);
        assert_int_equal(c.n_files, n);
        checkpoint_done(&c);
        checkpoint_done(&c); /* twice is nothing */
}

static void refuse(const char *path, int code, const char *name, const char *says) {
        Checkpoint c = {};
        Fault f = {};

        assert_int_equal(checkpoint_open(path, NULL, &c, &f), code);
        assert_string_equal(f.name, name);
        if (!strstr(f.text, says))
                fail_msg("\"%s\" does not say \"%s\"", f.text, says);
        assert_int_equal(c.n_files, 0);
}

static void open_file_that_file(void **state) {
        touch("m/a.safetensors");
        expect("m/a.safetensors", "a.safetensors", "a.safetensors", NULL);
}

static void open_file_link_keeps_its_name(void **state) {
        touch("blobs/0123");
        assert_int_equal(symlink("blobs/0123", "model.safetensors"), 0);
        expect("model.safetensors", "model.safetensors", "model.safetensors", NULL);
}

static void open_directory_only_file(void **state) {
        touch("m/a.safetensors");
        touch("m/readme.md");
        touch("m/.b.safetensors");
        expect("m", "m", "a.safetensors", NULL);
        expect("m/", "m", "a.safetensors", NULL);
        assert_int_equal(chdir("m"), 0);
        expect(".", "m", "a.safetensors", NULL);
        assert_int_equal(chdir(".."), 0);
}

static void open_directory_config_and_shards(void **state) {
        touch("m/config.json");
        touch("m/s-1.safetensors");
        touch("m/s-2.safetensors");
        touch("m/other.safetensors"); /* not named by the index */
        write_index("m/" INDEX, "s-2.safetensors", "s-1.safetensors");
        expect("m", "m", "config.json", INDEX, "s-1.safetensors", "s-2.safetensors", NULL);
}

static void open_pipeline_transformer(void **state) {
        touch("p/model_index.json");
        touch("p/transformer/config.json");
        touch("p/transformer/w.safetensors");
        touch("p/vae/w.safetensors");
        expect("p", "p", "config.json", "w.safetensors", NULL);
}

static void open_absent_shards_listed(void **state) {
        write_index("m/" INDEX, "s-1.safetensors", "s-2.safetensors");
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, "s-1.safetensors, s-2.safetensors");
        touch("m/s-1.safetensors");
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, "1 of the 2 files");
}

static void open_index_leaving_directory_refused(void **state) {
        touch("s.safetensors");
        write_index("m/" INDEX, "../s.safetensors", "../s.safetensors");
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, INDEX);
}

static void open_two_indexes_refused(void **state) {
        write_index("m/a.safetensors.index.json", "a", "b");
        write_index("m/b.safetensors.index.json", "a", "b");
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, "one checkpoint");
}

static void open_nothing_there_refused(void **state) {
        refuse("absent", -ENOENT, FAULT_NOT_FOUND, "absent");
        touch("m/readme.md");
        refuse("m", -ENOENT, FAULT_NOT_FOUND, "no *.safetensors");
        refuse("m/readme.md", -EBADMSG, FAULT_INVALID_FILE, "safetensors file or a directory");
        refuse("m/readme.md/x.safetensors", -ENOENT, FAULT_NOT_FOUND, "does not exist");
}

/* The bus carries text only: what is not is written as text. */
static void open_names_that_are_no_text_are_escaped(void **state) {
        Checkpoint c = {};
        Fault f = {};

        touch("caf\xe9/a\xff.safetensors");
        assert_int_equal(checkpoint_open("caf\xe9", NULL, &c, &f), 0);
        assert_string_equal(c.name, "caf\\xe9");
        assert_int_equal(c.n_files, 1);
        assert_string_equal(c.files[0].name, "a\\xff.safetensors");
        checkpoint_done(&c);
        assert_int_equal(checkpoint_open("caf\xe9/a\xff.safetensors", NULL, &c, &f), 0);
        assert_string_equal(c.name, "a\\xff.safetensors");
        assert_string_equal(c.files[0].name, "a\\xff.safetensors");
        checkpoint_done(&c);
}

/* Opening must not hang, and what is no file is no checkpoint. */
static void open_fifo_refused(void **state) {
        assert_int_equal(mkfifo("f.safetensors", 0600), 0);
        refuse("f.safetensors", -EBADMSG, FAULT_INVALID_FILE, "f.safetensors");
        assert_int_equal(mkdir("m", 0755), 0);
        assert_int_equal(mkfifo("m/f.safetensors", 0600), 0);
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, "not a regular file");
}

static void open_too_many_files_refused(void **state) {
        char name[64];

        for (unsigned i = 0; i <= CHECKPOINT_FILES_MAX; i++) {
                (void) snprintf(name, sizeof(name), "m/%03u.safetensors", i);
                touch(name);
        }
        refuse("m", -EBADMSG, FAULT_INVALID_FILE, "more than 256");
}

static void open_text_encoder_with_its_tokenizer(void **state) {
        Checkpoint c = {};
        Fault f = {};

        assert_int_equal(mkdir("p", 0755), 0);
        assert_int_equal(mkdir("p/text_encoder", 0755), 0);
        touch("p/text_encoder/e.safetensors");
        expect("p/text_encoder", "text_encoder", "e.safetensors", NULL);
        assert_int_equal(mkdir("p/tokenizer", 0755), 0);
        touch("p/tokenizer/vocab.json");
        touch("p/tokenizer/config.json"); /* not of the five */
        touch("p/tokenizer/merges.txt");
        expect("p/text_encoder", "text_encoder", "e.safetensors", "merges.txt", "vocab.json", NULL);
        expect("p/text_encoder/", "text_encoder", "e.safetensors", "merges.txt", "vocab.json", NULL);
        expect("p/text_encoder/e.safetensors", "e.safetensors", "e.safetensors", NULL);

        assert_int_equal(checkpoint_open("p/text_encoder/e.safetensors", "p/tokenizer", &c, &f), 0);
        assert_int_equal(c.n_files, 3);
        checkpoint_done(&c);
        assert_int_equal(checkpoint_open("p/text_encoder", "p/text_encoder", &c, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "holds no tokenizer"));
        f = (Fault){};
        assert_int_equal(checkpoint_open("p/text_encoder", "p/nothing", &c, &f), -ENOENT);
}

static void open_text_encoder_with_its_processor(void **state) {
        assert_int_equal(mkdir("p", 0755), 0);
        assert_int_equal(mkdir("p/text_encoder", 0755), 0);
        touch("p/text_encoder/e.safetensors");
        assert_int_equal(mkdir("p/processor", 0755), 0);
        touch("p/processor/tokenizer.json"); /* savers repeat the tokenizer there */
        expect("p/text_encoder", "text_encoder", "e.safetensors", NULL);
        assert_int_equal(mkdir("p/tokenizer", 0755), 0);
        touch("p/tokenizer/tokenizer.json");
        touch("p/tokenizer/video_preprocessor_config.json");
        expect("p/text_encoder", "text_encoder", "e.safetensors", "tokenizer.json", "video_preprocessor_config.json", NULL);
        touch("p/processor/preprocessor_config.json"); /* all of one directory */
        expect("p/text_encoder", "text_encoder", "e.safetensors", "preprocessor_config.json", "tokenizer.json", NULL);
}

static void open_transformer_with_its_schedulers(void **state) {
        Checkpoint c = {};
        Fault f = {};

        assert_int_equal(mkdir("p", 0755), 0);
        assert_int_equal(mkdir("p/transformer", 0755), 0);
        touch("p/transformer/t.safetensors");
        assert_int_equal(mkdir("p/audio_scheduler", 0755), 0);
        touch("p/audio_scheduler/scheduler_config.json");
        expect("p/transformer", "transformer", "audio_scheduler_config.json", "t.safetensors", NULL);
        touch("p/scheduler"); /* no folder */
        expect("p", "p", "audio_scheduler_config.json", "t.safetensors", NULL);
        assert_int_equal(unlink("p/scheduler"), 0);
        assert_int_equal(mkdir("p/scheduler", 0755), 0);
        touch("p/scheduler/scheduler_config.json");
        touch("p/scheduler/other.json");
        expect("p", "p", "audio_scheduler_config.json", "scheduler_config.json", "t.safetensors", NULL);
        expect("p/transformer/", "transformer", "audio_scheduler_config.json", "scheduler_config.json", "t.safetensors", NULL);
        expect("p/transformer/t.safetensors", "t.safetensors", "t.safetensors", NULL);
        assert_int_equal(unlink("p/scheduler/scheduler_config.json"), 0);
        assert_int_equal(mkdir("p/scheduler/scheduler_config.json", 0755), 0);
        assert_int_equal(checkpoint_open("p", NULL, &c, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "scheduler/scheduler_config.json"));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(open_file_that_file),
                TEST(open_file_link_keeps_its_name),
                TEST(open_directory_only_file),
                TEST(open_directory_config_and_shards),
                TEST(open_pipeline_transformer),
                TEST(open_transformer_with_its_schedulers),
                TEST(open_text_encoder_with_its_tokenizer),
                TEST(open_text_encoder_with_its_processor),
                TEST(open_absent_shards_listed),
                TEST(open_index_leaving_directory_refused),
                TEST(open_two_indexes_refused),
                TEST(open_nothing_there_refused),
                TEST(open_names_that_are_no_text_are_escaped),
                TEST(open_fifo_refused),
                TEST(open_too_many_files_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
