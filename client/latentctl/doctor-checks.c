/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/doctor-checks.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/latentctl/report.h"

void finding_add(Findings *f, const char *name, Level level, const char *advice, const char *format, ...) {
        Finding *x;
        va_list ap;

        if (f->n >= FINDINGS_MAX)
                return;

        x = &f->list[f->n++];
        *x = (Finding){.name = name, .level = level};
        va_start(ap, format);
        (void) vsnprintf(x->text, sizeof(x->text), format, ap);
        va_end(ap);
        (void) snprintf(x->advice, sizeof(x->advice), "%s", advice);
}

/* The first line of a small file. -errno. */
static int read_line(const char *root, const char *path, char *buf, size_t size) {
        char full[4096];
        FILE *file;

        if ((size_t) snprintf(full, sizeof(full), "%s%s", root, path) >= sizeof(full))
                return -ENAMETOOLONG;
        file = fopen(full, "re");
        if (!file)
                return -errno;
        if (!fgets(buf, (int) size, file))
                buf[0] = '\0';
        buf[strcspn(buf, "\n")] = '\0';
        (void) fclose(file);
        return 0;
}

void check_io_uring(Findings *f, const char *root) {
        char line[64];

        if (read_line(root, "/proc/sys/kernel/io_uring_disabled", line, sizeof(line)) < 0) {
                finding_add(f, "io_uring", LEVEL_OK, "", "the kernel has no switch against it");
                return;
        }

        if (strcmp(line, "0") == 0)
                finding_add(f, "io_uring", LEVEL_OK, "", "allowed for everyone");
        else if (strcmp(line, "1") == 0)
                finding_add(f, "io_uring", LEVEL_WARNING,
                        "Make the group latentd the value of kernel.io_uring_group, or set "
                        "kernel.io_uring_disabled=0.",
                        "allowed for one group only (kernel.io_uring_disabled=1); others read with threads, "
                        "which is slower");
        else
                finding_add(f, "io_uring", LEVEL_WARNING,
                        "sysctl kernel.io_uring_disabled=0 (or 1 with kernel.io_uring_group).",
                        "switched off (kernel.io_uring_disabled=%s): files are read with threads, which is "
                        "slower",
                        line);
}

/* The word in brackets: "always [advise] never". */
static const char *chosen(char *line) {
        char *open = strchr(line, '['), *end = open ? strchr(open, ']') : NULL;

        if (!end)
                return "";
        *end = '\0';
        return open + 1;
}

void check_huge_pages(Findings *f, const char *root) {
        const char *value;
        char line[128];

        if (read_line(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled", line, sizeof(line)) < 0) {
                finding_add(f, "huge pages", LEVEL_WARNING, "Use a kernel with CONFIG_TRANSPARENT_HUGEPAGE.",
                        "this kernel has none for shared memory: loading takes more processor time");
                return;
        }

        value = chosen(line);
        if (strcmp(value, "never") == 0 || strcmp(value, "deny") == 0)
                finding_add(f, "huge pages", LEVEL_WARNING,
                        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or boot with "
                        "transparent_hugepage_shmem=advise.",
                        "not used for shared memory (shmem_enabled is %s): loading takes more processor "
                        "time",
                        value);
        else
                finding_add(f, "huge pages", LEVEL_OK, "", "used for shared memory (shmem_enabled is %s)",
                        value);
}

/* A field of meminfo in bytes. */
static uint64_t meminfo(const char *root, const char *field) {
        unsigned long long kib = 0;
        char full[4096], line[256];
        FILE *file;

        if ((size_t) snprintf(full, sizeof(full), "%s/proc/meminfo", root) >= sizeof(full))
                return 0;
        file = fopen(full, "re");
        if (!file)
                return 0;
        while (fgets(line, sizeof(line), file))
                if (strncmp(line, field, strlen(field)) == 0 && line[strlen(field)] == ':') {
                        (void) sscanf(line + strlen(field) + 1, "%llu", &kib);
                        break;
                }
        (void) fclose(file);
        return kib * 1024;
}

void check_memory(Findings *f, const char *root) {
        uint64_t total = meminfo(root, "MemTotal"), available = meminfo(root, "MemAvailable");
        char a[FORMAT_MAX], b[FORMAT_MAX];

        if (total == 0) {
                finding_add(f, "memory", LEVEL_WARNING, "Is /proc mounted?", "cannot be read");
                return;
        }

        if (available < total / 20)
                finding_add(f, "memory", LEVEL_WARNING,
                        "End what needs it, or free weights: latentctl cache drop.",
                        "%s of %s are available", format_bytes(available, a), format_bytes(total, b));
        else
                finding_add(f, "memory", LEVEL_OK, "", "%s of %s are available", format_bytes(available, a),
                        format_bytes(total, b));
}

void check_numa(Findings *f, const char *root) {
        char line[256];

        if (read_line(root, "/sys/devices/system/node/has_memory", line, sizeof(line)) < 0 ||
                line[0] == '\0')
                finding_add(f, "NUMA", LEVEL_OK, "", "one node");
        else if (strpbrk(line, ",-"))
                finding_add(f, "NUMA", LEVEL_OK, "",
                        "nodes %s; weights are spread over them unless NumaPolicy= or --numa says otherwise",
                        line);
        else
                finding_add(f, "NUMA", LEVEL_OK, "", "one node");
}

void check_version(Findings *f, const latent_value *status) {
        const char *service = get_string(status, "Version");

        if (get_uint(status, "ApiVersion") != LATENT_API_VERSION)
                finding_add(f, "version", LEVEL_PROBLEM, "Install latentd and latentctl of one version.",
                        "the service has interface %" PRIu64 ", this program %d",
                        get_uint(status, "ApiVersion"), LATENT_API_VERSION);
        else if (strcmp(service, latent_version()) != 0)
                finding_add(f, "version", LEVEL_WARNING, "After an update: systemctl restart latentd.",
                        "the service is %s, this program %s", service, latent_version());
        else
                finding_add(f, "version", LEVEL_OK, "", "%s", service);
}

void check_state(Findings *f, const latent_value *status) {
        const char *state = get_string(status, "State");

        if (strcmp(state, "ready") != 0)
                finding_add(f, "worker", LEVEL_PROBLEM,
                        "journalctl -u latentd -u 'latent-worker*' says more; then systemctl restart "
                        "latentd.",
                        "the service is %s: %s", state, get_string(status, "StateReason"));
        else if (get_uint(status, "Workers") == 0)
                finding_add(f, "worker", LEVEL_OK, "", "none runs; one starts with the first model");
        else if (get_uint(status, "WorkerStarts") > get_uint(status, "Workers") + 3)
                finding_add(f, "worker", LEVEL_WARNING, "journalctl -u latentd says why they ended.",
                        "runs, but %" PRIu64 " were started so far", get_uint(status, "WorkerStarts"));
        else
                finding_add(f, "worker", LEVEL_OK, "", "runs (%s)", get_string(status, "NumericsId"));
}

void check_sandbox(Findings *f, const latent_value *status) {
        const char *how = get_string(status, "WorkerStart");

        if (strcmp(how, "socket") == 0)
                finding_add(f, "sandbox", LEVEL_OK, "", "the service manager starts the worker in a sandbox of its own");
        else if (strcmp(how, "spawn") == 0)
                finding_add(f, "sandbox", LEVEL_WARNING,
                        "With a service of the system: systemctl enable --now latent-worker.socket, and WorkerStart= not spawn. A "
                        "user's own service and containers have no other way.",
                        "the service starts the worker itself, in a weaker sandbox: it has the service's user and files");
}

void check_stuck(Findings *f, uint64_t n) {
        if (n > 0)
                finding_add(f, "files", LEVEL_PROBLEM,
                        "See what is mounted where the models are (a server, a disk); restart latentd to get the memory back at once.",
                        "%" PRIu64 " reads of model files were given up and have not come back: a file system does not answer", n);
}

void check_headroom(Findings *f, const latent_value *status) {
        uint64_t headroom = get_uint(status, "MemoryHeadroom"), limit = get_uint(status, "CacheRamMax");
        char a[FORMAT_MAX], b[FORMAT_MAX], c[FORMAT_MAX];

        if (headroom == 0)
                finding_add(f, "memory limits", LEVEL_WARNING,
                        "Free weights (latentctl cache drop), lower CacheRamReserve=, or raise MemoryMax= "
                        "of latentd.slice and CacheRamMax=.",
                        "nothing more can be loaded; %s are kept free for others",
                        format_bytes(get_uint(status, "CacheRamReserve"), a));
        else
                finding_add(f, "memory limits", LEVEL_OK, "",
                        "%s can be loaded; %s are kept free for others%s%s", format_bytes(headroom, a),
                        format_bytes(get_uint(status, "CacheRamReserve"), b),
                        limit > 0 ? "; CacheRamMax is " : "", limit > 0 ? format_bytes(limit, c) : "");
}

/* No worker drives it. */
static bool is_away(const latent_value *d) {
        const char *state = get_string(d, "State");

        return strcmp(state, "gone") == 0 || strcmp(state, "quarantined") == 0;
}

void check_devices(Findings *f, const latent_value *devices) {
        size_t n = latent_value_count(devices), n_gone = 0;

        for (size_t i = 0; i < n; i++) {
                const latent_value *d = latent_value_at(devices, i);

                n_gone += is_away(d);
                if (strcmp(get_string(d, "State"), "quarantined") == 0)
                        finding_add(f, "GPU", LEVEL_WARNING, "Reset it (nvidia-smi --gpu-reset), or start the machine anew.",
                                "%s (%s) is in quarantine: it has fallen off the bus", get_string(d, "Name"), get_string(d, "PciAddress"));
        }

        if (n == 0)
                finding_add(f, "devices", LEVEL_OK, "", "not known until a worker has started");
        else
                finding_add(f, "devices", LEVEL_OK, "", "%zu, the first is %s%s", n,
                        get_string(latent_value_at(devices, 0), "Name"),
                        n_gone == n ? " (no worker drives it now)" : "");
}

void check_device_reason(Findings *f, const latent_value *status) {
        const char *reason = get_string(status, "DeviceReason");

        if (reason[0] != '\0')
                finding_add(f, "GPU", LEVEL_WARNING,
                        "See to what it says, then systemctl restart latentd; or set Worker=cpu in latentd.conf.", "%s", reason);
}

static bool has_part(const latent_value *d, const char *part) {
        const latent_value *parts = latent_value_get(d, "Parts");

        for (size_t i = 0; i < latent_value_count(parts); i++)
                if (strcmp(string_at(parts, i), part) == 0)
                        return true;
        return false;
}

void check_parts(Findings *f, const latent_value *devices) {
        static const struct {
                const char *part, *key;
        } parts[] = {{"denoiser", "DenoiserGpus"}, {"conditioner", "ConditionerGpus"}, {"vae", "VaeGpus"}};

        for (size_t i = 0; i < ELEMENTSOF(parts); i++) {
                bool any = false, has = false;

                for (size_t k = 0; k < latent_value_count(devices); k++) {
                        const latent_value *d = latent_value_at(devices, k);

                        any = any || !is_away(d);
                        has = has || (!is_away(d) && has_part(d, parts[i].part));
                }
                if (any && !has)
                        finding_add(f, "GPUs", LEVEL_PROBLEM,
                                "Name GPUs that take part there (latentctl devices has their addresses), then restart latentd.",
                                "none is for the %s: of those that %s= of latentd.conf names none takes part", parts[i].part, parts[i].key);
        }
}

void check_device_notes(Findings *f, const latent_value *status) {
        const char *line = get_string(status, "DeviceNotes");

        while (*line != '\0') {
                int n = (int) strcspn(line, "\n");

                finding_add(f, "GPUs", LEVEL_WARNING,
                        "Steps run all the same; with a restart of latentd it is looked at anew (latentd(8), \"Several GPUs\").",
                        "%.*s", n, line);
                line += n;
                line += *line == '\n';
        }
}

/* The bytes a second of the way that is taken. */
static double rate_of(const latent_value *way) {
        uint64_t peer = 0, host = 0;

        (void) latent_value_as_uint(latent_value_at(way, 2), &peer);
        (void) latent_value_as_uint(latent_value_at(way, 3), &host);
        return (double) (peer > host ? peer : host);
}

/* One setting of a GPU's slot below what it could be; false: it is not. */
static bool slot_is_less(const char *root, const char *address, const char *what, char *ret, size_t size) {
        char path[128], now[64], most[64];

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.16s/current_link_%s", address, what);
        if (read_line(root, path, now, sizeof(now)) < 0)
                return false;
        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.16s/max_link_%s", address, what);
        if (read_line(root, path, most, sizeof(most)) < 0 || strcmp(now, most) == 0)
                return false;
        (void) snprintf(ret, size, "%s has a link %s of %s, it could have %s", address, what, now, most);
        return true;
}

static void explain_link(const char *root, const latent_value *from, const latent_value *to, char *ret, size_t size) {
        const latent_value *ends[] = {from, to};
        int64_t a = -1, b = -1;

        for (size_t i = 0; i < ELEMENTSOF(ends); i++)
                if (slot_is_less(root, get_string(ends[i], "PciAddress"), "width", ret, size) ||
                        slot_is_less(root, get_string(ends[i], "PciAddress"), "speed", ret, size))
                        return;
        (void) latent_value_as_int(latent_value_get(from, "NumaNode"), &a);
        (void) latent_value_as_int(latent_value_get(to, "NumaNode"), &b);
        if (a >= 0 && b >= 0 && a != b)
                (void) snprintf(ret, size, "they are at the NUMA nodes %" PRId64 " and %" PRId64, a, b);
        else
                (void) snprintf(ret, size,
                        "their slots are as wide and fast as the GPUs: look at what is between them (nvidia-smi topo -m)");
}

static const latent_value *device_at(const latent_value *devices, const char *path) {
        for (size_t i = 0; i < latent_value_count(devices); i++)
                if (strcmp(get_string(latent_value_at(devices, i), "path"), path) == 0)
                        return latent_value_at(devices, i);
        return NULL;
}

static const latent_value *way_at(const latent_value *devices, size_t device, size_t way) {
        return latent_value_at(latent_value_get(latent_value_at(devices, device), "Transports"), way);
}

/* A step waits for the slowest link. */
void check_links(Findings *f, const char *root, const latent_value *devices) {
        char a[FORMAT_MAX], b[FORMAT_MAX], why[256];
        double best = 0, slowest = 0;
        size_t n_slow = 0;

        for (size_t i = 0; i < latent_value_count(devices); i++)
                for (size_t k = 0; way_at(devices, i, k); k++) {
                        double rate = rate_of(way_at(devices, i, k));

                        best = rate > best ? rate : best;
                        slowest = slowest == 0 || rate < slowest ? rate : slowest;
                }
        for (size_t i = 0; i < latent_value_count(devices); i++)
                for (size_t k = 0; way_at(devices, i, k); k++) {
                        const latent_value *from = latent_value_at(devices, i), *way = way_at(devices, i, k);
                        const latent_value *to = device_at(devices, string_at(way, 0));

                        if (!to || rate_of(way) * 2 >= best)
                                continue;
                        explain_link(root, from, to, why, sizeof(why));
                        finding_add(f, "links", LEVEL_WARNING,
                                "Steps on both wait for it: leave one out (GpusExclude=), or see to the slot.",
                                "%s to %s: %s a second, the best link here has %s: %s", get_string(from, "PciAddress"),
                                get_string(to, "PciAddress"), format_bytes((uint64_t) rate_of(way), a),
                                format_bytes((uint64_t) best, b), why);
                        n_slow++;
                }
        if (best > 0 && n_slow == 0)
                finding_add(f, "links", LEVEL_OK, "", "%s a second at least between GPUs", format_bytes((uint64_t) slowest, a));
        if (get_string(latent_value_at(devices, 0), "Nccl")[0] != '\0')
                finding_add(f, "links", LEVEL_OK, "", "NCCL %s connects all GPUs (exchange nccl)",
                        get_string(latent_value_at(devices, 0), "Nccl"));
}

/* A line of the table each. */
void check_kernels(Findings *f, const latent_value *devices) {
        for (size_t i = 0; i < latent_value_count(devices); i++) {
                const latent_value *d = latent_value_at(devices, i);
                const char *line = get_string(d, "Kernels");

                if (is_away(d))
                        continue;
                while (*line != '\0') {
                        int n = (int) strcspn(line, "\n");

                        finding_add(f, "kernels", LEVEL_OK, "", "%.*s", n, line);
                        line += n;
                        line += *line == '\n';
                }
        }
}

void check_cache(Findings *f, const latent_value *regions) {
        uint64_t bytes = 0, huge = 0;
        char a[FORMAT_MAX], b[FORMAT_MAX];

        for (size_t i = 0; i < latent_value_count(regions); i++) {
                bytes += get_uint(latent_value_at(regions, i), "bytes");
                huge += get_uint(latent_value_at(regions, i), "huge-bytes");
        }

        finding_add(f, "cache", LEVEL_OK, "", "%s in %zu files, %s of it in huge pages",
                format_bytes(bytes, a), latent_value_count(regions), format_bytes(huge, b));
}

/* The first region with a value for this key. */
static const char *first_error(const latent_value *regions, const char *key) {
        for (size_t i = 0; i < latent_value_count(regions); i++) {
                const char *s = get_string(latent_value_at(regions, i), key);

                if (s[0] != '\0')
                        return s;
        }

        return NULL;
}

void check_locked(Findings *f, const latent_value *regions) {
        const char *error = first_error(regions, "lock-error");
        uint64_t locked = 0;
        char a[FORMAT_MAX];

        for (size_t i = 0; i < latent_value_count(regions); i++)
                locked += get_uint(latent_value_at(regions, i), "locked-bytes");

        if (latent_value_count(regions) == 0)
                finding_add(f, "locked memory", LEVEL_OK, "", "nothing is loaded");
        else if (error)
                finding_add(f, "locked memory", LEVEL_WARNING,
                        "Raise LimitMEMLOCK= of the service (systemctl edit latentd), or set LockMemory=no "
                        "if swapping is fine.",
                        "weights may be swapped out: %s", error);
        else
                finding_add(f, "locked memory", LEVEL_OK, "", "%s of weights cannot be swapped out",
                        format_bytes(locked, a));
}

void check_numa_applied(Findings *f, const latent_value *regions) {
        const char *error = first_error(regions, "numa-error");

        if (error)
                finding_add(f, "NUMA policy", LEVEL_WARNING,
                        "Allow mbind to the service (SystemCallFilter=, the container's seccomp profile).",
                        "not applied: %s", error);
        else
                finding_add(f, "NUMA policy", LEVEL_OK, "", "%s",
                        latent_value_count(regions) > 0 ? "applied" : "nothing is loaded");
}
