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

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(check_new_files_by_directory_and_name),
                TEST(check_old_files_by_inode),
                TEST(check_inputs_against_outputs),
                TEST(check_pictures_of_steps),
        };

        return cmocka_run_group_tests_name("same-file", tests, NULL, NULL);
}
