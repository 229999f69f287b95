/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/config.h"

#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "service/latentd/crash-budget.h"
#include "service/latentd/device.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/shared/text-file.h"
#include "service/shared/wire.h"

#ifndef LATENTD_LIBEXECDIR
#define LATENTD_LIBEXECDIR "/usr/local/libexec"
#endif

/* A configuration is written by hand: whatever is larger is some other file. */
#define CONFIG_FILE_MAX ((size_t) 1 << 20)

/* What a key's parser gets. `allowed` ends the sentence "... is wrong, expected ". */
typedef struct ConfigKey {
        const char *name;
        /* 0, -EINVAL, -ERANGE, -ENOENT (no such user), -EEXIST (a GPU is named twice), -ENOMEM */
        int (*parse)(const struct ConfigKey *key, const char *value, Config *c);
        size_t offset;
        uint64_t min, max; /* numbers */
        const char *allowed;
} ConfigKey;

DEFINE_CLEANUP(Config *, config_free)

int config_parse_boolean(const char *s) {
        static const char *const yes[] = {"1", "yes", "true", "on"};
        static const char *const no[] = {"0", "no", "false", "off"};

        for (size_t i = 0; i < ELEMENTSOF(yes); i++) {
                if (strcmp(s, yes[i]) == 0)
                        return 1;
                if (strcmp(s, no[i]) == 0)
                        return 0;
        }

        return -EINVAL;
}

/* Decimal digits only: no sign, no blanks, no other base. *end is the first character behind them. */
static int parse_digits(const char *s, const char **end, uint64_t *ret) {
        uint64_t v = 0;

        if (!isdigit((unsigned char) *s))
                return -EINVAL;

        for (; isdigit((unsigned char) *s); s++)
                if (__builtin_mul_overflow(v, 10, &v) ||
                        __builtin_add_overflow(v, (uint64_t) (*s - '0'), &v))
                        return -ERANGE;

        *end = s;
        *ret = v;
        return 0;
}

int config_parse_bytes(const char *s, uint64_t *ret) {
        static const char units[] = "KMGT";
        const char *end, *unit;
        uint64_t v;
        int r;

        r = parse_digits(s, &end, &v);
        if (r < 0)
                return r;

        if (*end != '\0') {
                unit = strchr(units, *end);
                if (!unit || end[1] != '\0')
                        return -EINVAL;
                if (__builtin_mul_overflow(v, UINT64_C(1) << (10 * (unit - units + 1)), &v))
                        return -ERANGE;
        }

        *ret = v;
        return 0;
}

static uint64_t memory_total(void) {
        long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);

        return pages > 0 && page > 0 ? (uint64_t) pages * (uint64_t) page : 0;
}

/* Without the overflow of total x percent. */
static uint64_t percent_of(uint64_t total, uint64_t percent) {
        return total / 100 * percent + total % 100 * percent / 100;
}

static void *field(const ConfigKey *key, Config *c) {
        return (char *) c + key->offset;
}

static int parse_bytes(const ConfigKey *key, const char *value, Config *c) {
        return config_parse_bytes(value, field(key, c));
}

static int parse_bytes_or_percent(const ConfigKey *key, const char *value, Config *c) {
        const char *end;
        uint64_t v;
        int r;

        r = parse_digits(value, &end, &v);
        if (r < 0)
                return r;
        if (strcmp(end, "%") != 0)
                return parse_bytes(key, value, c);
        if (v > 100)
                return -ERANGE;

        *(uint64_t *) field(key, c) = percent_of(memory_total(), v);
        return 0;
}

static int parse_u32(const ConfigKey *key, const char *value, Config *c) {
        const char *end;
        uint64_t v;
        int r;

        r = parse_digits(value, &end, &v);
        if (r < 0)
                return r;
        if (*end != '\0')
                return -EINVAL;
        if (v < key->min || v > key->max)
                return -ERANGE;

        *(uint32_t *) field(key, c) = (uint32_t) v;
        return 0;
}

/* The index of value in a NULL-terminated list: enums start at 0 in that order. */
static int parse_word(const char *value, const char *const *words) {
        for (int i = 0; words[i]; i++)
                if (strcmp(value, words[i]) == 0)
                        return i;

        return -EINVAL;
}

static int parse_worker(const ConfigKey *key, const char *value, Config *c) {
        int i = parse_word(value, (const char *const[]){"auto", "cpu", "cuda", NULL});

        if (i < 0)
                return i;

        c->worker = (WorkerBackend) i;
        return 0;
}

static int parse_worker_start(const ConfigKey *key, const char *value, Config *c) {
        int i = parse_word(value, (const char *const[]){"auto", "socket", "spawn", NULL});

        if (i < 0)
                return i;

        c->worker_start = (WorkerStart) i;
        return 0;
}

static int parse_tristate(const ConfigKey *key, const char *value, Config *c) {
        Tristate *t = field(key, c);
        int r;

        if (strcmp(value, "auto") == 0) {
                *t = TRISTATE_AUTO;
                return 0;
        }

        r = config_parse_boolean(value);
        if (r < 0)
                return r;

        *t = r ? TRISTATE_YES : TRISTATE_NO;
        return 0;
}

static int parse_numa_policy(const ConfigKey *key, const char *value, Config *c) {
        return numa_policy_parse(value, field(key, c));
}

/* "3/10min"; "0" switches it off. */
static int parse_crash_budget(const ConfigKey *key, const char *value, Config *c) {
        static const struct {
                const char *name;
                uint64_t usec;
        } units[] = {{"s", 1000000}, {"min", 60000000}, {"h", UINT64_C(3600000000)}};
        const char *end;
        uint64_t n, t;
        int r;

        r = parse_digits(value, &end, &n);
        if (r < 0)
                return r;
        if (n == 0 && *end == '\0') {
                c->crash_budget = 0;
                return 0;
        }
        if (*end != '/')
                return -EINVAL;

        r = parse_digits(end + 1, &end, &t);
        if (r < 0)
                return r;
        for (size_t i = 0; i < ELEMENTSOF(units); i++) {
                if (strcmp(end, units[i].name) != 0)
                        continue;
                if (n < key->min || n > key->max || t == 0 || t > key->max)
                        return -ERANGE;

                c->crash_budget = (uint32_t) n;
                c->crash_budget_usec = t * units[i].usec;
                return 0;
        }
        return -EINVAL;
}

static int parse_log_level(const ConfigKey *key, const char *value, Config *c) {
        return log_level_from_string(value, field(key, c));
}

/* Absolute and without "..", so that what the administrator reads is what is opened. */
static int check_path(const char *s) {
        if (s[0] != '/' || strlen(s) >= PATH_MAX)
                return -EINVAL;

        for (const char *p = s; p; p = strchr(p + 1, '/'))
                if (strncmp(p, "/..", 3) == 0 && (p[3] == '/' || p[3] == '\0'))
                        return -EINVAL;

        return 0;
}

static int parse_path(const ConfigKey *key, const char *value, Config *c) {
        char **p = field(key, c), *copy;
        int r;

        r = check_path(value);
        if (r < 0)
                return r;
        if (key->max > 0 && strlen(value) > key->max)
                return -ERANGE;

        copy = strdup(value);
        if (!copy)
                return -ENOMEM;

        free(*p);
        *p = copy;
        return 0;
}

/* Empty: switched off. */
static int parse_path_or_empty(const ConfigKey *key, const char *value, Config *c) {
        char **p = field(key, c), *copy;

        if (value[0] != '\0')
                return parse_path(key, value, c);

        copy = strdup("");
        if (!copy)
                return -ENOMEM;

        free(*p);
        *p = copy;
        return 0;
}

static size_t count_strings(char **l) {
        size_t n = 0;

        while (l && l[n])
                n++;

        return n;
}

static void free_strings(char **l) {
        for (char **p = l; p && *p; p++)
                free(*p);
        free(l);
}

static int parse_model_path(const ConfigKey *key, const char *value, Config *c) {
        size_t n = count_strings(c->model_path);
        char **l, *copy;
        int r;

        if (value[0] == '\0') {
                free_strings(STEAL_PTR(c->model_path));
                return 0;
        }

        r = check_path(value);
        if (r < 0)
                return r;

        l = reallocarray(c->model_path, n + 2, sizeof(char *));
        if (!l)
                return -ENOMEM;
        l[n] = l[n + 1] = NULL;
        c->model_path = l;

        copy = strdup(value);
        if (!copy)
                return -ENOMEM;
        l[n] = copy;
        return 0;
}

static int user_from_string(const char *s, uid_t *ret) {
        CLEANUP_FREE char *buffer = NULL;
        struct passwd pw, *found;
        size_t size = 1u << 16;
        const char *end;
        uint64_t v;
        int r;

        if (isdigit((unsigned char) s[0])) {
                r = parse_digits(s, &end, &v);
                if (r < 0)
                        return r;
                if (*end != '\0' || v >= (uid_t) -1) /* -1 means "no user" to the kernel */
                        return -EINVAL;
                *ret = (uid_t) v;
                return 0;
        }

        buffer = malloc(size);
        if (!buffer)
                return -ENOMEM;

        r = getpwnam_r(s, &pw, buffer, size, &found);
        if (!found)
                return r == ENOMEM ? -ENOMEM : -ENOENT;

        *ret = pw.pw_uid;
        return 0;
}

static int parse_allowed_users(const ConfigKey *key, const char *value, Config *c) {
        CLEANUP_FREE char *copy = strdup(value);
        char *save = NULL;
        uid_t *l, uid;
        int r;

        if (!copy)
                return -ENOMEM;

        if (value[0] == '\0') {
                free(STEAL_PTR(c->allowed_users));
                c->n_allowed_users = 0;
                return 0;
        }

        for (char *s = strtok_r(copy, " \t,", &save); s; s = strtok_r(NULL, " \t,", &save)) {
                r = user_from_string(s, &uid);
                if (r < 0)
                        return r;

                l = reallocarray(c->allowed_users, c->n_allowed_users + 1, sizeof(uid_t));
                if (!l)
                        return -ENOMEM;
                l[c->n_allowed_users++] = uid;
                c->allowed_users = l;
        }

        return 0;
}

/* The whole list at once; empty: none. */
static int parse_parts(const ConfigKey *key, const char *value, Config *c) {
        static const struct {
                const char *name;
                uint32_t bit;
        } parts[] = {
                {"denoiser", CONFIG_PART_DENOISER},
                {"conditioner", CONFIG_PART_CONDITIONER},
                {"video-vae", CONFIG_PART_VIDEO_VAE},
                {"audio-vae", CONFIG_PART_AUDIO_VAE},
        };
        CLEANUP_FREE char *copy = strdup(value);
        uint32_t *p = field(key, c), bits = 0;
        char *save = NULL;
        size_t i;

        if (!copy)
                return -ENOMEM;

        for (char *s = strtok_r(copy, " \t,", &save); s; s = strtok_r(NULL, " \t,", &save)) {
                for (i = 0; i < ELEMENTSOF(parts); i++)
                        if (strcmp(parts[i].name, s) == 0)
                                break;
                if (i == ELEMENTSOF(parts))
                        return -EINVAL;
                bits |= parts[i].bit;
        }

        *p = bits;
        return 0;
}

/* A number, "GPU-" and a UUID, or a PCI address: of what form it is, not whether there is one. */
static bool is_gpu_name(const char *s) {
        size_t n = strlen(s);

        if (n > 0 && n < 4 && strspn(s, "0123456789") == n)
                return true;
        if (strncasecmp(s, "GPU-", 4) == 0)
                return n == 40 && strspn(s + 4, "0123456789abcdefABCDEF-") == 36;
        return n == 12 && strspn(s, "0123456789abcdefABCDEF:.") == n && s[4] == ':' && s[7] == ':' && s[10] == '.';
}

static bool is_same_name(const char *a, const char *b) {
        if (isdigit((unsigned char) a[0]) && isdigit((unsigned char) b[0]) && strlen(a) < 4 && strlen(b) < 4)
                return atoi(a) == atoi(b);
        return strcasecmp(a, b) == 0;
}

/* max 1: each with a share behind its '='. An empty list is none at all. That two names are of one GPU turns out when a worker says
 * which there are (gpu-set.c). */
static int parse_gpus(const ConfigKey *key, const char *value, Config *c) {
        CLEANUP_FREE char *copy = strdup(value), *list = strdup(value);
        CLEANUP_FREE const char **names = calloc(strlen(value) / 2 + 1, sizeof(*names));
        char **p = field(key, c), *save = NULL;
        size_t n = 0;
        double share;
        int r;

        if (!copy || !list || !names)
                return -ENOMEM;
        for (char *s = strtok_r(copy, " \t,", &save); s; s = strtok_r(NULL, " \t,", &save)) {
                char *number = key->max > 0 ? strchr(s, '=') : NULL;

                if (key->max > 0) {
                        if (!number)
                                return -EINVAL;
                        *number++ = '\0';
                        r = device_parse_share(number, &share);
                        if (r < 0)
                                return r;
                }
                if (!is_gpu_name(s))
                        return -EINVAL;
                for (size_t i = 0; i < n; i++)
                        if (is_same_name(names[i], s))
                                return -EEXIST;
                names[n++] = s;
        }
        free(*p);
        *p = strspn(value, " \t,") == strlen(value) ? NULL : STEAL_PTR(list);
        return 0;
}

#define GPUS "numbers, UUIDs (GPU-...) or PCI addresses (0000:41:00.0), each GPU once, or nothing for all"
#define BYTES "bytes, with K, M, G or T for powers of 1024"

static const ConfigKey keys[] = {
        {"ModelPath", parse_model_path, 0, 0, 0, "an absolute directory without \"..\", one a line"},
        {"AllowedUsers", parse_allowed_users, 0, 0, 0, "names of existing users or numbers"},
        {"PrivateSocket", parse_path_or_empty, offsetof(Config, private_socket), 0,
                sizeof(((struct sockaddr_un *) NULL)->sun_path) - 1,
                "an absolute path of at most 107 bytes, or nothing"},
        {"Worker", parse_worker, 0, 0, 0, "auto, cpu or cuda"},
        {"WorkerStart", parse_worker_start, 0, 0, 0, "auto, socket or spawn"},
        {"WorkerSocket", parse_path, offsetof(Config, worker_socket), 0,
                sizeof(((struct sockaddr_un *) NULL)->sun_path) - 1,
                "an absolute path of at most 107 bytes"},
        {"WorkerCudaSocket", parse_path, offsetof(Config, worker_cuda_socket), 0,
                sizeof(((struct sockaddr_un *) NULL)->sun_path) - 1,
                "an absolute path of at most 107 bytes"},
        {"WorkerDirectory", parse_path, offsetof(Config, worker_directory), 0, 0,
                "an absolute directory without \"..\""},
        {"MediaSocket", parse_path, offsetof(Config, media_socket), 0, sizeof(((struct sockaddr_un *) NULL)->sun_path) - 1,
                "an absolute path of at most 107 bytes"},
        {"MediaDirectory", parse_path, offsetof(Config, media_directory), 0, 0, "an absolute directory without \"..\""},
        {"WorkerRanks", parse_u32, offsetof(Config, worker_ranks), 0, 64,
                "a number from 0 (one per device) to 64"},
        {"WorkerThreads", parse_u32, offsetof(Config, worker_threads), 0, 1024, /* kernels/cpu/threads.h */
                "a number from 0 (all) to 1024"},
        {"Gpus", parse_gpus, offsetof(Config, gpus), 0, 0, GPUS},
        {"GpusExclude", parse_gpus, offsetof(Config, gpus_exclude), 0, 0,
                "numbers, UUIDs (GPU-...) or PCI addresses (0000:41:00.0), each GPU once"},
        {"GpusMax", parse_u32, offsetof(Config, gpus_max), 0, WIRE_DEVICES_MAX, "a number from 0 (all) to 8"},
        {"GpuMinFree", parse_bytes, offsetof(Config, gpu_min_free), 0, 0, BYTES},
        {"DenoiserGpus", parse_gpus, offsetof(Config, part_gpus[GPU_PART_DENOISER]), 0, 0, GPUS},
        {"ConditionerGpus", parse_gpus, offsetof(Config, part_gpus[GPU_PART_CONDITIONER]), 0, 0, GPUS},
        {"VaeGpus", parse_gpus, offsetof(Config, part_gpus[GPU_PART_VAE]), 0, 0, GPUS},
        {"GpuShares", parse_gpus, offsetof(Config, gpu_shares), 0, 1,
                "GPU=SHARE words, a number, UUID or PCI address and a number greater than 0 and at most 1000 each, for each GPU once"},
        {"CacheRamMax", parse_bytes, offsetof(Config, cache_ram_max), 0, 0, BYTES},
        {"CacheRamReserve", parse_bytes_or_percent, offsetof(Config, cache_ram_reserve), 0, 0,
                BYTES ", or 0% to 100%"},
        {"LockMemory", parse_tristate, offsetof(Config, lock_memory), 0, 0, "yes, no or auto"},
        {"NumaPolicy", parse_numa_policy, offsetof(Config, numa_policy), 0, 0,
                "auto, default, interleave or bind:NODE"},
        {"VramReserve", parse_bytes, offsetof(Config, vram_reserve), 0, 0, BYTES},
        {"VramLimit", parse_bytes, offsetof(Config, vram_limit), 0, 0, BYTES},
        {"VramIdleSec", parse_u32, offsetof(Config, vram_idle_sec), 0, 31536000, "a number of seconds, 0 (never) to 31536000"},
        {"EncodeCacheMax", parse_bytes, offsetof(Config, encode_cache_max), 0, 0, BYTES},
        {"EvictAfterUse", parse_parts, offsetof(Config, evict_after_use), 0, 0,
                "a list of conditioner, video-vae, audio-vae, denoiser, or nothing"},
        {"SessionsPerUser", parse_u32, offsetof(Config, sessions_per_user), 1, 65536,
                "a number from 1 to 65536"},
        {"JobsPerUser", parse_u32, offsetof(Config, jobs_per_user), 1, 65536, "a number from 1 to 65536"},
        {"ArenaBytesPerUser", parse_bytes_or_percent, offsetof(Config, arena_bytes_per_user), 0, 0,
                BYTES ", or 0% to 100%"},
        {"CrashBudget", parse_crash_budget, 0, 1, CRASH_BUDGET_MAX,
                "0 (off), or N/TIME with N from 1 to 100 and TIME from 1 to 100 s, min or h, as in 3/10min"},
        {"LogLevel", parse_log_level, offsetof(Config, log_level), 0, 0,
                "error, warning, notice, info, debug or 0 to 7"},
};

int config_new(Config **ret) {
        CLEANUP(config_freep) Config *c = NULL;
        int r;

        c = calloc(1, sizeof(*c));
        if (!c)
                return -ENOMEM;

        c->worker_socket = strdup("/run/latentd/worker.sock");
        c->worker_cuda_socket = strdup("/run/latentd/worker-cuda.sock");
        c->worker_directory = strdup(LATENTD_LIBEXECDIR);
        c->media_socket = strdup("/run/latentd/media.sock");
        c->media_directory = strdup(LATENTD_LIBEXECDIR);
        if (!c->worker_socket || !c->worker_cuda_socket || !c->worker_directory || !c->media_socket || !c->media_directory)
                return -ENOMEM;

        c->cache_ram_reserve = percent_of(memory_total(), 10);
        c->arena_bytes_per_user = percent_of(memory_total(), 25);
        c->encode_cache_max = UINT64_C(256) << 20;
        c->vram_reserve = UINT64_C(1) << 30;
        c->vram_idle_sec = 300;
        c->lock_memory = TRISTATE_AUTO;
        c->sessions_per_user = 64;
        c->jobs_per_user = 256;
        c->crash_budget = 3;
        c->crash_budget_usec = UINT64_C(600000000);
        c->log_level = LOG_INFO;

        r = numa_policy_parse("auto", &c->numa_policy);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(c);
        return 0;
}

Config *config_free(Config *c) {
        if (!c)
                return NULL;

        free_strings(c->model_path);
        free(c->allowed_users);
        free(c->private_socket);
        free(c->gpus);
        free(c->gpus_exclude);
        for (size_t i = 0; i < _GPU_PART_MAX; i++)
                free(c->part_gpus[i]);
        free(c->gpu_shares);
        free(c->worker_socket);
        free(c->worker_cuda_socket);
        free(c->worker_directory);
        free(c->media_socket);
        free(c->media_directory);
        free(c);
        return NULL;
}

static int unknown_key(const char *file, unsigned line, const char *name, Fault *f) {
        char list[1024] = "";
        size_t n = 0;

        for (size_t i = 0; i < ELEMENTSOF(keys) && n < sizeof(list); i++)
                n += (size_t) snprintf(list + n, sizeof(list) - n, "%s%s", i > 0 ? ", " : "", keys[i].name);

        return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                "%s:%u: there is no key \"%s\". Known keys: %s", file, line, name, list);
}

static const char *what_is_wrong(int error) {
        if (error == -EEXIST)
                return "wrong, it names a GPU more than once";
        return error == -ERANGE ? "out of range" : error == -ENOENT ? "unknown" : "wrong";
}

static int set_value(
        Config *c, const char *file, unsigned line, const char *name, const char *value, Fault *f) {
        const ConfigKey *key = NULL;
        Fault numa = {};
        int r;

        for (size_t i = 0; i < ELEMENTSOF(keys) && !key; i++)
                if (strcmp(keys[i].name, name) == 0)
                        key = &keys[i];
        if (!key)
                return unknown_key(file, line, name, f);

        r = key->parse(key, value, c);
        if (r >= 0 && key->parse == parse_numa_policy && numa_policy_check(&c->numa_policy, &numa) < 0)
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT, "%s:%u: %s=%s", file, line, name, numa.text);
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_INTERNAL, "%s:%u: out of memory", file, line);
        if (r < 0)
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                        "%s:%u: the value \"%s\" of %s is %s, expected %s", file, line, value, name,
                        what_is_wrong(r), key->allowed);

        return 0;
}

/* Cuts blanks off both ends, in place. */
static char *trim(char *s) {
        size_t n;

        s += strspn(s, " \t\r");
        n = strlen(s);
        while (n > 0 && strchr(" \t\r", s[n - 1]))
                n--;
        s[n] = '\0';
        return s;
}

static int read_line(Config *c, const char *file, unsigned line, char *text, bool *in_section, Fault *f) {
        char *s = trim(text), *equals;

        if (s[0] == '\0' || s[0] == '#' || s[0] == ';')
                return 0;

        if (s[0] == '[') {
                *in_section = strcmp(s, "[latentd]") == 0;
                if (*in_section)
                        return 0;
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                        "%s:%u: unknown section %s, the only one is [latentd]", file, line, s);
        }

        equals = strchr(s, '=');
        if (!equals || equals == s)
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                        "%s:%u: \"%s\" is not a Key=Value line", file, line, s);
        if (!*in_section)
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                        "%s:%u: \"%s\" stands before the section line [latentd]", file, line, s);

        *equals = '\0';
        return set_value(c, file, line, trim(s), trim(equals + 1), f);
}

static int read_lines(Config *c, char *text, size_t size, const char *file, Fault *f) {
        char *end, *limit = text + size; /* a NUL is there */
        bool in_section = false;
        unsigned line = 1;
        int r;

        for (char *at = text; at < limit; at = end + 1, line++) {
                end = memchr(at, '\n', (size_t) (limit - at));
                if (!end)
                        end = limit;
                *end = '\0';
                if (at + strlen(at) != end)
                        return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                                "%s:%u: the line holds a NUL byte", file, line);

                r = read_line(c, file, line, at, &in_section, f);
                if (r < 0)
                        return r;
        }

        return 0;
}

static int read_file(Config *c, const char *file, bool optional, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        size_t size;
        int r;

        r = text_file_read(file, CONFIG_FILE_MAX, &text, &size);
        if (r == -ENOENT && optional)
                return 0;
        if (r == -EFBIG)
                return fault_set(f, -EBADMSG, FAULT_INVALID_ARGUMENT,
                        "%s is larger than 1 MiB: not a configuration file", file);
        if (r < 0)
                return fault_set(f, r, FAULT_IO, "%s cannot be read: %s", file, text_file_strerror(r));

        return read_lines(c, text, size, file, f);
}

static int is_drop_in(const struct dirent *d) {
        size_t n = strlen(d->d_name);

        return d->d_name[0] != '.' && n > 5 && strcmp(d->d_name + n - 5, ".conf") == 0;
}

static int by_name(const struct dirent **a, const struct dirent **b) {
        return strcmp((*a)->d_name, (*b)->d_name); /* not the locale's order: the same on every machine */
}

static int read_drop_ins(Config *c, const char *directory, Fault *f) {
        struct dirent **entries = NULL;
        int n, r = 0;

        n = scandir(directory, &entries, is_drop_in, by_name);
        if (n < 0) {
                r = -errno;
                if (r == -ENOENT)
                        return 0;
                return fault_set(f, r, FAULT_IO, "%s cannot be read: %s", directory, strerror(-r));
        }

        for (int i = 0; i < n; i++) {
                CLEANUP_FREE char *file = NULL;

                if (r >= 0) {
                        if (asprintf(&file, "%s/%s", directory, entries[i]->d_name) < 0) {
                                file = NULL;
                                r = -ENOMEM;
                        } else
                                r = read_file(c, file, true, f);
                }
                free(entries[i]);
        }

        free(entries);
        return r;
}

int config_read(Config *c, const char *main_file, bool optional, Fault *f) {
        CLEANUP_FREE char *directory = NULL;
        int r;

        r = read_file(c, main_file, optional, f);
        if (r < 0)
                return r;

        if (asprintf(&directory, "%s.d", main_file) < 0) {
                directory = NULL;
                return -ENOMEM;
        }

        return read_drop_ins(c, directory, f);
}

static int read_user(Config *c, Fault *f) {
        const char *base = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
        CLEANUP_FREE char *file = NULL;
        int n;

        if (base && base[0] == '/') /* a relative one is to be ignored by the base directory specification */
                n = asprintf(&file, "%s/latentd/latentd.conf", base);
        else if (home && home[0] == '/')
                n = asprintf(&file, "%s/.config/latentd/latentd.conf", home);
        else
                return 0;
        if (n < 0) {
                file = NULL;
                return -ENOMEM;
        }

        return config_read(c, file, true, f);
}

int config_read_default(Config *c, bool user, Fault *f) {
        static const char *const files[] = {
                "/usr/lib/latentd/latentd.conf",
                "/etc/latentd/latentd.conf",
                "/run/latentd/latentd.conf",
        };
        int r;

        if (user)
                return read_user(c, f);

        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                r = config_read(c, files[i], true, f);
                if (r < 0)
                        return r;
        }

        return 0;
}
