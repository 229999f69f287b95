/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>

#include "service/latentd/config.h"
#include "service/shared/cleanup.h"

typedef struct State {
        char directory[64], file[96];
        Config *config;
        Fault fault;
} State;

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static int setup(void **state) {
        State *s = calloc(1, sizeof(*s));

        (void) snprintf(s->directory, sizeof(s->directory), "/tmp/latentd-config-XXXXXX");
        if (!mkdtemp(s->directory) || config_new(&s->config) < 0)
                return -1;
        (void) snprintf(s->file, sizeof(s->file), "%s/latentd.conf", s->directory);
        *state = s;
        return 0;
}

static int teardown(void **state) {
        State *s = *state;

        (void) nftw(s->directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        config_free(s->config);
        free(s);
        return 0;
}

static void write_file(const char *path, const void *data, size_t n) {
        CLEANUP_CLOSE int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);

        assert_true(fd >= 0);
        assert_int_equal(write(fd, data, n), n);
}

static int read_text(State *s, const char *text) {
        write_file(s->file, text, strlen(text));
        s->fault = (Fault){};
        return config_read(s->config, s->file, false, &s->fault);
}

static void config_new_gives_the_documented_defaults(void **state) {
        Config *c = ((State *) *state)->config;
        uint64_t total = (uint64_t) sysconf(_SC_PHYS_PAGES) * (uint64_t) sysconf(_SC_PAGESIZE);

        assert_null(c->model_path);
        assert_int_equal(c->n_allowed_users, 0);
        assert_int_equal(c->worker, WORKER_AUTO);
        assert_int_equal(c->worker_start, WORKER_START_AUTO);
        assert_string_equal(c->worker_socket, "/run/latentd/worker.sock");
        assert_non_null(c->worker_directory);
        assert_int_equal(c->worker_ranks, 0);
        assert_int_equal(c->cache_ram_max, 0);
        assert_in_range(c->cache_ram_reserve, total / 10 - 10, total / 10 + 10);
        assert_in_range(c->arena_bytes_per_user, total / 4 - 10, total / 4 + 10);
        assert_int_equal(c->lock_memory, TRISTATE_AUTO);
        assert_int_equal(c->encode_cache_max, UINT64_C(256) << 20);
        assert_int_equal(c->evict_after_use, 0);
        assert_int_equal(c->sessions_per_user, 64);
        assert_int_equal(c->jobs_per_user, 256);
        assert_int_equal(c->crash_budget, 3);
        assert_int_equal(c->crash_budget_usec, UINT64_C(600000000));
        assert_int_equal(c->log_level, LOG_INFO);
}

static void config_read_every_key_sets_its_field(void **state) {
        State *s = *state;
        Config *c = s->config;

        assert_int_equal(
                read_text(s,
                        "# comment\n; another\n\n  [latentd]  \r\n"
                        "ModelPath=/models/a b\n ModelPath = /models/c\n"
                        "AllowedUsers=root 1234\nAllowedUsers=77,78\n"
                        "Worker=cpu\nWorkerStart=spawn\nWorkerSocket=/run/w.sock\nWorkerDirectory=/opt/w\n"
                        "WorkerRanks=3\nWorkerThreads=7\nCacheRamMax=64G\nCacheRamReserve=512M\n"
                        "LockMemory=no\nNumaPolicy=bind:0\nSessionsPerUser=5\nJobsPerUser=6\n"
                        "ArenaBytesPerUser=1T\nCrashBudget=5/2h\nLogLevel=debug"),
                0);
        assert_string_equal(c->model_path[0], "/models/a b");
        assert_string_equal(c->model_path[1], "/models/c");
        assert_null(c->model_path[2]);
        assert_int_equal(c->n_allowed_users, 4);
        assert_int_equal(c->allowed_users[0], 0);
        assert_int_equal(c->allowed_users[1], 1234);
        assert_int_equal(c->allowed_users[3], 78);
        assert_int_equal(c->worker, WORKER_CPU);
        assert_int_equal(c->worker_start, WORKER_START_SPAWN);
        assert_string_equal(c->worker_socket, "/run/w.sock");
        assert_string_equal(c->worker_directory, "/opt/w");
        assert_int_equal(c->worker_ranks, 3);
        assert_int_equal(c->worker_threads, 7);
        assert_int_equal(c->cache_ram_max, UINT64_C(64) << 30);
        assert_int_equal(c->cache_ram_reserve, UINT64_C(512) << 20);
        assert_int_equal(c->lock_memory, TRISTATE_NO);
        assert_int_equal(c->numa_policy.kind, NUMA_BIND);
        assert_int_equal(c->numa_policy.node, 0);
        assert_int_equal(c->sessions_per_user, 5);
        assert_int_equal(c->jobs_per_user, 6);
        assert_int_equal(c->crash_budget, 5);
        assert_int_equal(c->crash_budget_usec, UINT64_C(7200000000));
        assert_int_equal(c->arena_bytes_per_user, UINT64_C(1) << 40);
        assert_int_equal(c->log_level, LOG_DEBUG);
}

static void config_read_empty_value_clears_lists(void **state) {
        State *s = *state;

        assert_int_equal(read_text(s, "[latentd]\nModelPath=/a\nModelPath=\nModelPath=/"
                                      "b\nAllowedUsers=1\nAllowedUsers=\n"),
                0);
        assert_string_equal(s->config->model_path[0], "/b");
        assert_null(s->config->model_path[1]);
        assert_int_equal(s->config->n_allowed_users, 0);
}

static void config_read_parts_and_cache_of_encode(void **state) {
        State *s = *state;

        assert_int_equal(read_text(s, "[latentd]\nEncodeCacheMax=0\nEvictAfterUse=denoiser\n"
                                      "EvictAfterUse=conditioner, video-vae\taudio-vae\n"),
                0);
        assert_int_equal(s->config->encode_cache_max, 0);
        assert_int_equal(s->config->evict_after_use, CONFIG_PART_CONDITIONER | CONFIG_PART_VIDEO_VAE | CONFIG_PART_AUDIO_VAE);
        assert_int_equal(read_text(s, "[latentd]\nEncodeCacheMax=3M\nEvictAfterUse=\n"), 0);
        assert_int_equal(s->config->encode_cache_max, UINT64_C(3) << 20);
        assert_int_equal(s->config->evict_after_use, 0);
}

static void config_read_device_memory(void **state) {
        State *s = *state;

        assert_int_equal(s->config->vram_reserve, UINT64_C(1) << 30);
        assert_int_equal(s->config->vram_limit, 0);
        assert_int_equal(s->config->vram_idle_sec, 300);
        assert_int_equal(read_text(s, "[latentd]\nVramReserve=0\nVramLimit=15G\nVramIdleSec=0\n"), 0);
        assert_int_equal(s->config->vram_reserve, 0);
        assert_int_equal(s->config->vram_limit, UINT64_C(15) << 30);
        assert_int_equal(s->config->vram_idle_sec, 0);
}

static void config_read_gpus(void **state) {
        static const char *const wrong[] = {"Gpus=first", "Gpus=0000", "GpusExclude=GPU-0", "GpusExclude=0000:41:00", "GpusMax=9",
                "GpusMax=-1", "GpuMinFree=much", "GpuShares=0", "GpuShares=0=0", "GpuShares=0=2000", "GpuShares=x=1", "GpuShares=0=1=2"};
        State *s = *state;

        assert_null(s->config->gpus);
        assert_int_equal(read_text(s, "[latentd]\nGpus=0, 0000:41:00.0\tGPU-01234567-89ab-cdef-0123-456789ABCDEF\n"
                                      "GpusExclude=7\nGpusMax=8\nGpuMinFree=8G\nGpuShares=0=1.5 0000:42:00.0=1000\n"),
                0);
        assert_string_equal(s->config->gpus, "0, 0000:41:00.0\tGPU-01234567-89ab-cdef-0123-456789ABCDEF");
        assert_string_equal(s->config->gpus_exclude, "7");
        assert_int_equal(s->config->gpus_max, 8);
        assert_int_equal(s->config->gpu_min_free, UINT64_C(8) << 30);
        assert_string_equal(s->config->gpu_shares, "0=1.5 0000:42:00.0=1000");
        assert_int_equal(read_text(s, "[latentd]\nGpus=\nGpuShares=\n"), 0);
        assert_null(s->config->gpus);
        assert_null(s->config->gpu_shares);
        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                char text[64];

                (void) snprintf(text, sizeof(text), "[latentd]\n%s\n", wrong[i]);
                if (read_text(s, text) != -EBADMSG)
                        fail_msg("%s was taken", wrong[i]);
        }
}

static void config_read_gpu_named_twice_is_refused(void **state) {
        static const char *const wrong[] = {"GpuShares=0=1 0=2", "GpuShares=0=1 1=1 00=1", "Gpus=1,2,1",
                "GpusExclude=0000:4a:00.0 0000:4A:00.0",
                "Gpus=GPU-01234567-89ab-cdef-0123-456789ABCDEF gpu-01234567-89ab-cdef-0123-456789abcdef"};
        State *s = *state;

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                char text[128];
                size_t n = strcspn(wrong[i], "=");
                Fault *f = &s->fault;

                (void) snprintf(text, sizeof(text), "[latentd]\n%s\n", wrong[i]);
                assert_int_equal(read_text(s, text), -EBADMSG);
                if (strncmp(strstr(f->text, " of ") + 4, wrong[i], n) != 0 || !strstr(f->text, "names a GPU more than once"))
                        fail_msg("%s: %s", wrong[i], f->text);
        }
        assert_int_equal(read_text(s, "[latentd]\nGpus=1 10 100 0000:41:00.0 0000:41:00.1\n"), 0);
}

static void config_read_percent_is_of_all_memory(void **state) {
        State *s = *state;
        uint64_t total = (uint64_t) sysconf(_SC_PHYS_PAGES) * (uint64_t) sysconf(_SC_PAGESIZE);

        assert_int_equal(read_text(s, "[latentd]\nCacheRamReserve=50%\nArenaBytesPerUser=100%\n"), 0);
        assert_in_range(s->config->cache_ram_reserve, total / 2 - 10, total / 2 + 10);
        assert_int_equal(s->config->arena_bytes_per_user, total);
}

static void config_read_wrong_line_names_file_line_and_what_is_allowed(void **state) {
        State *s = *state;
        static const struct {
                const char *line, *expect;
        } cases[] = {
                {"Worker=gpu", "auto, cpu or cuda"},
                {"Worker=", "auto, cpu or cuda"},
                {"WorkerStart=now", "socket"},
                {"WorkerSocket=run/x", "absolute"},
                {"WorkerDirectory=/opt/../etc", "\"..\""},
                {"WorkerRanks=65", "out of range"},
                {"WorkerRanks=-1", "wrong"},
                {"WorkerRanks=0x10", "wrong"},
                {"WorkerRanks=99999999999999999999", "out of range"},
                {"WorkerThreads=1025", "1024"},
                {"CacheRamMax=1.5G", "powers of 1024"},
                {"CacheRamMax=10%", "powers of 1024"},
                {"CacheRamMax=20000000T", "out of range"},
                {"CacheRamMax=5g", "powers of 1024"},
                {"CacheRamMax=", "powers of 1024"},
                {"CacheRamReserve=101%", "100%"},
                {"CacheRamReserve=5 %", "100%"},
                {"LockMemory=", "yes, no or auto"},
                {"LockMemory=garbage", "yes, no or auto"},
                {"LockMemory=2", "yes, no or auto"},
                {"EncodeCacheMax=", "powers of 1024"},
                {"VramReserve=10%", "powers of 1024"},
                {"VramLimit=x", "powers of 1024"},
                {"VramIdleSec=31536001", "0 (never) to 31536000"},
                {"EncodeCacheMax=10%", "powers of 1024"},
                {"EvictAfterUse=vae", "conditioner, video-vae, audio-vae, denoiser"},
                {"EvictAfterUse=conditioner lora", "conditioner, video-vae, audio-vae, denoiser"},
                {"NumaPolicy=bind:", "bind:NODE"},
                {"NumaPolicy=bind:1023", "NumaPolicy=bind:1023: this machine has no NUMA node 1023"},
                {"SessionsPerUser=0", "from 1"},
                {"JobsPerUser=many", "from 1"},
                {"ArenaBytesPerUser=-1", "100%"},
                {"LogLevel=loud", "debug"},
                {"ModelPath=models", "absolute directory"},
                {"ModelPath=/models/..", "\"..\""},
                {"AllowedUsers=no-such-user-here", "unknown"},
                {"AllowedUsers=4294967295", "existing users"},
                {"AllowedUsers=12x", "existing users"},
                {"Modelpath=/x", "Known keys: ModelPath"},
                {"Colour=red", "Known keys: ModelPath"},
                {"CrashBudget=3", "as in 3/10min"},
                {"CrashBudget=3/10", "as in 3/10min"},
                {"CrashBudget=3/10d", "as in 3/10min"},
                {"CrashBudget=3/0s", "out of range"},
                {"CrashBudget=0/5s", "out of range"},
                {"CrashBudget=101/5s", "out of range"},
                {"CrashBudget=3/101s", "out of range"},
                {"CrashBudget=", "as in 3/10min"},
                {"just words", "Key=Value"},
                {"=value", "Key=Value"},
                {"[other]", "[latentd]"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                char text[256], where[128];

                (void) snprintf(text, sizeof(text), "[latentd]\n#\n%s\n", cases[i].line);
                (void) snprintf(where, sizeof(where), "%s:3: ", s->file);
                if (read_text(s, text) != -EBADMSG)
                        fail_msg("\"%s\" was accepted", cases[i].line);
                if (strncmp(s->fault.text, where, strlen(where)) != 0 ||
                        !strstr(s->fault.text, cases[i].expect))
                        fail_msg("\"%s\": %s", cases[i].line, s->fault.text);
        }
}

static void config_read_key_before_section_is_refused(void **state) {
        State *s = *state;

        assert_int_equal(read_text(s, "Worker=cpu\n[latentd]\n"), -EBADMSG);
        assert_non_null(strstr(s->fault.text, ":1: "));
        assert_int_equal(s->config->worker, WORKER_AUTO);
}

static void config_read_hostile_files_are_refused(void **state) {
        State *s = *state;
        CLEANUP_FREE char *big = malloc((1u << 20) + 100);

        write_file(s->file, "[latentd]\nWorker=cpu\0x\n", 23);
        assert_int_equal(config_read(s->config, s->file, false, &s->fault), -EBADMSG);
        assert_non_null(strstr(s->fault.text, "NUL"));

        memset(big, '#', (1u << 20) + 100);
        write_file(s->file, big, (1u << 20) + 100);
        s->fault = (Fault){};
        assert_int_equal(config_read(s->config, s->file, false, &s->fault), -EBADMSG);

        s->fault = (Fault){};
        assert_int_equal(config_read(s->config, s->directory, false, &s->fault), -EISDIR);
        assert_string_equal(s->fault.name, FAULT_IO);
}

/* Without an end, or without a writer. */
static void config_read_devices_and_pipes_are_refused(void **state) {
        State *s = *state;
        char path[192];

        assert_int_equal(config_read(s->config, "/dev/zero", true, &s->fault), -ENODEV);
        assert_string_equal(s->fault.name, FAULT_IO);
        assert_non_null(strstr(s->fault.text, "/dev/zero cannot be read: it is no regular file"));

        (void) snprintf(path, sizeof(path), "%s.d", s->file);
        assert_int_equal(mkdir(path, 0755), 0);
        (void) snprintf(path, sizeof(path), "%s.d/x.conf", s->file);
        assert_int_equal(mkfifo(path, 0600), 0);
        s->fault = (Fault){};
        assert_int_equal(config_read(s->config, s->file, true, &s->fault), -ENODEV);
        assert_non_null(strstr(s->fault.text, "x.conf"));
}

static void config_read_drop_in_that_is_the_null_device_is_empty(void **state) {
        State *s = *state;
        char path[192];

        (void) snprintf(path, sizeof(path), "%s.d", s->file);
        assert_int_equal(mkdir(path, 0755), 0);
        (void) snprintf(path, sizeof(path), "%s.d/x.conf", s->file);
        assert_int_equal(symlink("/dev/null", path), 0);
        assert_int_equal(config_read(s->config, s->file, true, &s->fault), 0);
}

static void config_read_missing_file_is_fine_only_if_optional(void **state) {
        State *s = *state;

        assert_int_equal(config_read(s->config, s->file, true, &s->fault), 0);
        assert_int_equal(config_read(s->config, s->file, false, &s->fault), -ENOENT);
        assert_non_null(strstr(s->fault.text, s->file));
}

static void add_drop_in(State *s, const char *name, const char *text) {
        char path[192];

        (void) snprintf(path, sizeof(path), "%s.d", s->file);
        (void) mkdir(path, 0755);
        (void) snprintf(path, sizeof(path), "%s.d/%s", s->file, name);
        write_file(path, text, strlen(text));
}

static void config_read_drop_ins_win_in_name_order(void **state) {
        State *s = *state;

        add_drop_in(s, "90-last.conf", "[latentd]\nWorkerRanks=9\nModelPath=/last\n");
        add_drop_in(s, "10-first.conf", "[latentd]\nWorkerRanks=1\nWorkerThreads=1\nModelPath=/first\n");
        add_drop_in(s, "B.conf", "[latentd]\nJobsPerUser=2\n");
        add_drop_in(s, "a.conf", "[latentd]\nJobsPerUser=3\n");
        add_drop_in(s, ".hidden.conf", "garbage");
        add_drop_in(s, "50-x.conf.bak", "garbage");
        add_drop_in(s, ".conf", "garbage");
        assert_int_equal(
                read_text(s,
                        "[latentd]\nWorkerRanks=5\nWorkerThreads=5\nSessionsPerUser=5\nModelPath=/main\n"),
                0);

        assert_int_equal(s->config->worker_ranks, 9);
        assert_int_equal(s->config->worker_threads, 1);
        assert_int_equal(s->config->sessions_per_user, 5);
        assert_int_equal(s->config->jobs_per_user, 3);
        assert_string_equal(s->config->model_path[0], "/main");
        assert_string_equal(s->config->model_path[1], "/first");
        assert_string_equal(s->config->model_path[2], "/last");
}

static void config_read_wrong_drop_in_is_named(void **state) {
        State *s = *state;

        add_drop_in(s, "10.conf", "[latentd]\n\nWorker=x\n");
        assert_int_equal(read_text(s, "[latentd]\n"), -EBADMSG);
        assert_non_null(strstr(s->fault.text, "latentd.conf.d/10.conf:3: "));
}

static void config_read_default_user_mode_follows_xdg(void **state) {
        State *s = *state;
        char path[160];

        (void) snprintf(path, sizeof(path), "%s/latentd", s->directory);
        assert_int_equal(mkdir(path, 0755), 0);
        (void) snprintf(path, sizeof(path), "%s/latentd/latentd.conf", s->directory);
        write_file(path, "[latentd]\nWorkerRanks=4\n", 24);

        assert_int_equal(setenv("XDG_CONFIG_HOME", s->directory, 1), 0);
        assert_int_equal(config_read_default(s->config, true, &s->fault), 0);
        assert_int_equal(s->config->worker_ranks, 4);

        s->config->worker_ranks = 0;
        assert_int_equal(setenv("XDG_CONFIG_HOME", "relative", 1), 0);
        assert_int_equal(setenv("HOME", s->directory, 1), 0);
        assert_int_equal(config_read_default(s->config, true, &s->fault), 0);
        assert_int_equal(s->config->worker_ranks, 0);
}

static void config_parse_boolean_takes_eight_words_and_nothing_else(void **state) {
        static const char *const garbage[] = {
                "", " ", "2", "01", "10", "y", "n", "Yes", "yes ", " no", "garbage", "auto", "-1"};

        assert_int_equal(config_parse_boolean("1"), 1);
        assert_int_equal(config_parse_boolean("yes"), 1);
        assert_int_equal(config_parse_boolean("true"), 1);
        assert_int_equal(config_parse_boolean("on"), 1);
        assert_int_equal(config_parse_boolean("0"), 0);
        assert_int_equal(config_parse_boolean("no"), 0);
        assert_int_equal(config_parse_boolean("false"), 0);
        assert_int_equal(config_parse_boolean("off"), 0);
        for (size_t i = 0; i < ELEMENTSOF(garbage); i++)
                assert_int_equal(config_parse_boolean(garbage[i]), -EINVAL);
}

static void config_parse_bytes_checks_units_and_overflow(void **state) {
        uint64_t v = 42;

        assert_int_equal(config_parse_bytes("1.5G", &v), -EINVAL);
        assert_int_equal(config_parse_bytes("K", &v), -EINVAL);
        assert_int_equal(config_parse_bytes("+1", &v), -EINVAL);
        assert_int_equal(config_parse_bytes("1KB", &v), -EINVAL);
        assert_int_equal(config_parse_bytes("18446744073709551616", &v), -ERANGE);
        assert_int_equal(config_parse_bytes("16777216T", &v), -ERANGE);
        assert_int_equal(v, 42);
        assert_int_equal(config_parse_bytes("4096", &v), 0);
        assert_int_equal(v, 4096);
        assert_int_equal(config_parse_bytes("18446744073709551615", &v), 0);
        assert_true(v == UINT64_MAX);
        assert_int_equal(config_parse_bytes("64M", &v), 0);
        assert_int_equal(v, 64u << 20);
        assert_int_equal(config_parse_bytes("3K", &v), 0);
        assert_int_equal(v, 3072);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                TEST(config_new_gives_the_documented_defaults),
                TEST(config_read_every_key_sets_its_field),
                TEST(config_read_empty_value_clears_lists),
                TEST(config_read_parts_and_cache_of_encode),
                TEST(config_read_device_memory),
                TEST(config_read_gpus),
                TEST(config_read_gpu_named_twice_is_refused),
                TEST(config_read_percent_is_of_all_memory),
                TEST(config_read_wrong_line_names_file_line_and_what_is_allowed),
                TEST(config_read_key_before_section_is_refused),
                TEST(config_read_hostile_files_are_refused),
                TEST(config_read_devices_and_pipes_are_refused),
                TEST(config_read_drop_in_that_is_the_null_device_is_empty),
                TEST(config_read_missing_file_is_fine_only_if_optional),
                TEST(config_read_drop_ins_win_in_name_order),
                TEST(config_read_wrong_drop_in_is_named),
                TEST(config_read_default_user_mode_follows_xdg),
                cmocka_unit_test(config_parse_boolean_takes_eight_words_and_nothing_else),
                cmocka_unit_test(config_parse_bytes_checks_units_and_overflow),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
