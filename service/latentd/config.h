/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* latentd.conf: one [latentd] section of Key=Value lines, '#' and ';' comments, drop-ins in name order.
 * Later values win; ModelPath= and AllowedUsers= add up, an empty value clears them. A wrong line is an
 * error naming file, line, what is allowed; the service then does not start. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "service/shared/fault.h"
#include "service/shared/numa-policy.h"

typedef enum WorkerBackend {
        WORKER_AUTO,
        WORKER_CPU,
        WORKER_CUDA,
} WorkerBackend;

typedef enum WorkerStart {
        WORKER_START_AUTO, /* socket if WorkerSocket= exists, else spawn */
        WORKER_START_SOCKET,
        WORKER_START_SPAWN,
} WorkerStart;

typedef enum Tristate {
        TRISTATE_NO,
        TRISTATE_YES,
        TRISTATE_AUTO,
} Tristate;

/* What a GPU can be left to alone. */
typedef enum GpuPart {
        GPU_PART_DENOISER,
        GPU_PART_CONDITIONER,
        GPU_PART_VAE, /* both */
        _GPU_PART_MAX,
} GpuPart;

/* Parts of a model that EvictAfterUse= names: bits. */
enum {
        CONFIG_PART_DENOISER = 1u << 0,
        CONFIG_PART_CONDITIONER = 1u << 1,
        CONFIG_PART_VIDEO_VAE = 1u << 2,
        CONFIG_PART_AUDIO_VAE = 1u << 3,
};

typedef struct Config {
        char **model_path;    /* ModelPath=, absolute directories; NULL-terminated */
        uid_t *allowed_users; /* AllowedUsers=: names or numbers; --system serves only these and root until
                                 polkit is there */
        size_t n_allowed_users;
        char *private_socket; /* PrivateSocket=; NULL: the usual place of the mode; "": none */
        WorkerBackend worker;       /* Worker=auto|cpu|cuda */
        WorkerStart worker_start;   /* WorkerStart=auto|socket|spawn */
        char *media_socket;         /* MediaSocket=, default /run/latentd/media.sock */
        char *media_directory;      /* MediaDirectory=: where latent-media is */
        char *worker_socket;        /* WorkerSocket=, default /run/latentd/worker.sock */
        char *worker_cuda_socket;   /* WorkerCudaSocket=, default /run/latentd/worker-cuda.sock */
        char *worker_directory;     /* WorkerDirectory=: where latent-worker-* are; default: libexecdir */
        uint32_t worker_ranks;      /* WorkerRanks=0..64: logical ranks per worker; 0: one per device */
        char *gpus, *gpus_exclude;  /* Gpus=, GpusExclude=: numbers, UUIDs, PCI addresses; gpus NULL: all */
        char *part_gpus[_GPU_PART_MAX]; /* DenoiserGpus=, ConditionerGpus=, VaeGpus=: of those the ones that run it; NULL: all */
        char *gpu_shares;           /* GpuShares=: the same with "=SHARE" each */
        uint32_t gpus_max;          /* GpusMax=: 0: all */
        uint64_t gpu_min_free;      /* GpuMinFree=: bytes that a GPU must have free when a worker starts; 0: any */
        uint32_t worker_threads;    /* WorkerThreads=: CPU threads of a CPU worker; 0: all */
        uint64_t cache_ram_max;     /* CacheRamMax= bytes with K, M, G, T; 0: not set */
        uint64_t cache_ram_reserve; /* CacheRamReserve=, bytes or percent of MemTotal; default 10% */
        uint64_t vram_reserve;      /* VramReserve=: bytes of each device that others shall find free; default 1G */
        uint64_t vram_limit;        /* VramLimit=: bytes of each device that a worker may take; 0: all */
        uint32_t vram_idle_sec;     /* VramIdleSec=: a worker with devices and without steps ends; default 300, 0: never */
        uint64_t encode_cache_max;  /* EncodeCacheMax=: bytes of Encode's results that a worker keeps; default 256M, 0: none */
        uint32_t evict_after_use;   /* EvictAfterUse=: CONFIG_PART_*, default: none */
        Tristate lock_memory;       /* LockMemory=yes|no|auto */
        NumaPolicy numa_policy;     /* NumaPolicy= */
        uint32_t sessions_per_user, jobs_per_user; /* SessionsPerUser=64, JobsPerUser=256 */
        uint64_t arena_bytes_per_user;             /* ArenaBytesPerUser=, default 25% of MemTotal */
        uint32_t crash_budget;                     /* CrashBudget=N/TIME; 0: off */
        uint64_t crash_budget_usec;
        int log_level;                             /* LogLevel= */
} Config;

int config_new(Config **ret); /* defaults */
Config *config_free(Config *c);

/* Reads main_file (a missing one is fine if optional) and then `main_file`.d/(*).conf. -EBADMSG with f. */
int config_read(Config *c, const char *main_file, bool optional, Fault *f);

/* The files of a mode in order: /usr/lib/latentd, /etc/latentd, /run/latentd (system) or the XDG
 * configuration directory (user). */
int config_read_default(Config *c, bool user, Fault *f);

/* Booleans: 1/yes/true/on, 0/no/false/off; anything else, "" included, is -EINVAL. */
int config_parse_boolean(const char *s);
/* "4096", "64M", "1.5G" is refused; overflow is -ERANGE. Powers of 1024. */
int config_parse_bytes(const char *s, uint64_t *ret);
