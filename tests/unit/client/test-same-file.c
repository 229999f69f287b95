/* SPDX-License-Identifier: Apache-2.0 */

/* Whether the files of a command line are different ones. */

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/latentctl/same-file.h"
#include "tests/unit/client/temporary.h"

/* says: of the message, "A and B"; NULL: nothing is wrong. */
static void check(const NamedFile *files, size_t n, const char *says) {
        latent_error e = {};
        int r;

        r = same_file_check(files, n, &e);
        if (!says) {
                assert_int_equal(r, 0);
                return;
        }
        assert_int_equal(r, -EINVAL);
        assert_string_equal(e.name, CTL_ERROR_USAGE);
        assert_non_null(strstr(e.text, says));
}

static void check_pair(const char *a, const char *b, bool same) {
        const NamedFile files[] = {{"-o", a, .output = true}, {"--nothing", NULL, .output = true}, {"--other", b, .output = true}};

        check(files, 3, same ? "-o and --other name the same file" : NULL);
}

static void check_new_files_by_directory_and_name(void **state) {
        assert_int_equal(mkdir("d", 0700), 0);
        assert_int_equal(symlink("d", "link"), 0);
        check_pair("x", "x", true);
        check_pair("x", "./x", true);
        check_pair("d/x", "link/x", true);
        check_pair("d/../x", "x", true);
        check_pair("x", "d/x", false);
        check_pair("x", "X", false);
        check_pair("absent/x", "absent/x", false); /* opening says what is wrong there */
        check_pair("x", "", false);
}

static void check_old_files_by_inode(void **state) {
        temporary_write("old", "x", 1);
        temporary_write("other", "x", 1);
        assert_int_equal(symlink("old", "link"), 0);
        check_pair("old", "link", true);
        check_pair("old", "other", false);
        check_pair("old", "new", false);
}

static void check_inputs_against_outputs(void **state) {
        const NamedFile read_twice[] = {{"--image", "in"}, {"--last-image", "in"}, {"-o", "out", .output = true}};
        const NamedFile overwritten[] = {{"-o", "out", .output = true}, {"--sheet", "in", .output = true}, {"--image", "in"}};

        temporary_write("in", "x", 1);
        check(read_twice, 3, NULL);
        check(overwritten, 3, "--sheet and --image name the same file, in");
}

static void check_step(const char *path, bool same) {
        const NamedFile files[] = {{"--preview", "film", .output = true, .stem = true}, {"--image", path}};

        check(files, 2, same ? "--preview and --image name the same file" : NULL);
}

static void check_pictures_of_steps(void **state) {
        check_step("film.step-0001.ppm", true);
        check_step("./film.step-1000.ppm", true);
        check_step("film.step-001.ppm", false);
        check_step("film.step-0001.png", false);
        check_step("film2.step-0001.ppm", false);
        check_step("film", false);
        check_step("absent/film.step-0001.ppm", false);
}

#define TENSORS(meta) "{\"__metadata__\":{" meta "},\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}"
#define RESULT TENSORS("\"numerics\":\"a\",\"rows\":\"1\"")

static void check_model(const char *output, const char *model, const char *says) {
        const NamedFile files[] = {{"--x", output, .output = true}, {"MODEL", model, .model = true}};

        check(files, 2, says);
}

static void check_files_of_a_model(void **state) {
        temporary_write_tensors("m/transformer/a.safetensors", TENSORS(""), 8);
        temporary_write_tensors("blob", TENSORS(""), 8);
        temporary_write("m/tokenizer/merges.txt", "x", 1);
        temporary_write("m/film.mp4", "x", 1);
        temporary_write("m/vae/config.json", "x", 1);
        temporary_write_tensors("m/vae/result.safetensors", RESULT, 8);
        temporary_write_tensors("m/other/a.safetensors", TENSORS(""), 8);
        assert_int_equal(symlink("../../blob", "m/vae/b.safetensors"), 0);
        assert_int_equal(symlink("m", "link"), 0);
        assert_int_equal(link("m/transformer/a.safetensors", "hard"), 0);

        check_model("m/transformer/a.safetensors", "m", "--x m/transformer/a.safetensors is a file of MODEL m");
        check_model("hard", "link/", "--x hard is a file of MODEL link/");
        check_model("blob", "m", "is a file of MODEL");
        check_model("m/vae/b.safetensors", "m/vae", "is a file of MODEL");
        check_model("m/vae/config.json", "m", "is a file of MODEL");
        check_model("m/tokenizer/merges.txt", "m/transformer", "is a file of MODEL");
        check_model("blob", "blob", "is a file of MODEL");
        check_model("m/vae/result.safetensors", "m/vae/result.safetensors", "is a file of MODEL");

        check_model("m/vae/result.safetensors", "m", NULL);
        check_model("m/vae/new.safetensors", "m", NULL);
        check_model("m/film.mp4", "m", NULL);
        check_model("m/other/a.safetensors", "m", NULL);
        check_model("m/vae", "m", NULL); /* opening says that it is a directory */
}

static void check_files_of_a_name(void **state) {
        temporary_write_tensors("weights", TENSORS(""), 8);
        temporary_write_tensors("result", RESULT, 8);
        temporary_write("x.json", "x", 1);
        temporary_write("x.mp4", "x", 1);
        check_model("weights", "name", "--x weights is there, and latentctl did not write it: it may be a file of MODEL name");
        check_model("x.json", "name", "may be a file of MODEL");
        check_model("result", "name", NULL);
        check_model("x.mp4", "name", NULL);
        check_model("new", "name", NULL);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(check_new_files_by_directory_and_name),
                TEST(check_old_files_by_inode),
                TEST(check_inputs_against_outputs),
                TEST(check_pictures_of_steps),
                TEST(check_files_of_a_model),
                TEST(check_files_of_a_name),
        };

        return cmocka_run_group_tests_name("same-file", tests, NULL, NULL);
}
