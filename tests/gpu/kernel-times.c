/* SPDX-License-Identifier: Apache-2.0 */

/* What a GPU does for a process, and when: every kernel and copy, by CUPTI. Nothing of the process knows of it: the driver loads this
 * library where it is named.
 *
 *     CUDA_INJECTION64_PATH=libkernel-times.so LATENT_KERNEL_TIMES=FILE LATENT_CUPTI=libcupti.so.13 PROGRAM...
 *
 * FILE.PID takes lines: "clock MONOTONIC CUPTI" (nanoseconds, of one moment), "name ID NAME", "kernel ID BEGIN END DEVICE STREAM",
 * "copy KIND BYTES BEGIN END DEVICE STREAM" (KIND: up, down, in, peer, other), "set BYTES BEGIN END"; "lost N": so many records. They are
 * there a moment after the work is done: the process may be killed then. Its calls of the driver take a microsecond longer. */

#include <dlfcn.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cupti.h>

#define FLUSH_MSEC 50
#define BUFFER_SIZE (256u << 10)
#define NAMES_MAX 4096u

static struct {
        CUptiResult (*enable)(CUpti_ActivityKind kind);
        CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete);
        CUptiResult (*next)(uint8_t *buffer, size_t size, CUpti_Activity **record);
        CUptiResult (*flush)(uint32_t flag);
        CUptiResult (*now)(uint64_t *ret);
        CUptiResult (*dropped)(CUcontext context, uint32_t stream, size_t *ret);
} cupti;

static FILE *out;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static const char *names[NAMES_MAX]; /* as CUPTI gives them: the same pointer for the same kernel */
static unsigned n_names;

static unsigned id_of(const char *name) {
        for (unsigned i = 0; i < n_names; i++)
                if (names[i] == name)
                        return i;
        if (n_names == NAMES_MAX)
                return NAMES_MAX;
        (void) fprintf(out, "name %u %.200s\n", n_names, name ? name : "?");
        names[n_names] = name;
        return n_names++;
}

static const char *kind_of(unsigned kind) {
        return kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "up"
                : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "down"
                : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? "in"
                                                          : "other";
}

static void print_record(const CUpti_Activity *record) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
                const CUpti_ActivityKernel10 *k = (const void *) record;

                (void) fprintf(out, "kernel %u %" PRIu64 " %" PRIu64 " %u %u\n", id_of(k->name), (uint64_t) k->start,
                        (uint64_t) k->end, (unsigned) k->deviceId, (unsigned) k->streamId);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
                const CUpti_ActivityMemcpy6 *c = (const void *) record;

                (void) fprintf(out, "copy %s %" PRIu64 " %" PRIu64 " %" PRIu64 " %u %u\n", kind_of(c->copyKind), (uint64_t) c->bytes,
                        (uint64_t) c->start, (uint64_t) c->end, (unsigned) c->deviceId, (unsigned) c->streamId);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
                const CUpti_ActivityMemcpyPtoP4 *c = (const void *) record;

                (void) fprintf(out, "copy peer %" PRIu64 " %" PRIu64 " %" PRIu64 " %u %u\n", (uint64_t) c->bytes, (uint64_t) c->start,
                        (uint64_t) c->end, (unsigned) c->deviceId, (unsigned) c->streamId);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
                const CUpti_ActivityMemset4 *s = (const void *) record;

                (void) fprintf(out, "set %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", (uint64_t) s->bytes, (uint64_t) s->start,
                        (uint64_t) s->end);
        }
}

static void print_clock(void) {
        struct timespec t;
        uint64_t now = 0;

        if (cupti.now(&now) == CUPTI_SUCCESS && clock_gettime(CLOCK_MONOTONIC, &t) == 0)
                (void) fprintf(out, "clock %" PRIu64 " %" PRIu64 "\n", (uint64_t) t.tv_sec * 1000000000 + (uint64_t) t.tv_nsec, now);
}

static void CUPTIAPI on_request(uint8_t **ret, size_t *ret_size, size_t *ret_records) {
        *ret = aligned_alloc(8, BUFFER_SIZE);
        *ret_size = *ret ? BUFFER_SIZE : 0;
        *ret_records = 0;
}

static void CUPTIAPI on_complete(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
        CUpti_Activity *record = NULL;
        size_t n = 0;

        (void) pthread_mutex_lock(&lock);
        while (valid > 0 && cupti.next(buffer, valid, &record) == CUPTI_SUCCESS)
                print_record(record);
        if (cupti.dropped(context, stream, &n) == CUPTI_SUCCESS && n > 0)
                (void) fprintf(out, "lost %zu\n", n);
        print_clock();
        (void) fflush(out);
        (void) pthread_mutex_unlock(&lock);
        free(buffer);
}

/* Ends where it may not wait. */
static void *flush_now_and_then(void *unused) {
        while (poll(NULL, 0, FLUSH_MSEC) == 0)
                (void) cupti.flush(0);
        return NULL;
}

static bool find(void *library, const char *name, void *ret) {
        void *p = dlsym(library, name);

        memcpy(ret, &p, sizeof(p));
        return p;
}

static bool open_library(void) {
        const char *path = getenv("LATENT_CUPTI");
        void *library = dlopen(path ? path : "libcupti.so.13", RTLD_NOW | RTLD_LOCAL);

        if (!library)
                (void) fprintf(stderr, "kernel-times: %s\n", dlerror());
        return library && find(library, "cuptiActivityEnable", &cupti.enable) &&
                find(library, "cuptiActivityRegisterCallbacks", &cupti.callbacks) &&
                find(library, "cuptiActivityGetNextRecord", &cupti.next) && find(library, "cuptiActivityFlushAll", &cupti.flush) &&
                find(library, "cuptiGetTimestamp", &cupti.now) &&
                find(library, "cuptiActivityGetNumDroppedRecords", &cupti.dropped);
}

/* Called by the driver when the process starts with it. 1: all is well. */
__attribute__((visibility("default"))) int InitializeInjection(void);

int InitializeInjection(void) {
        static const CUpti_ActivityKind kinds[] = {
                CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET};
        const char *path = getenv("LATENT_KERNEL_TIMES");
        char own[4096];
        pthread_t thread;
        CUptiResult r;

        if (!path || out || !open_library())
                return 0;
        (void) snprintf(own, sizeof(own), "%s.%ld", path, (long) getpid());
        out = fopen(own, "we");
        if (!out)
                return 0;

        r = cupti.callbacks(on_request, on_complete);
        for (size_t i = 0; r == CUPTI_SUCCESS && i < sizeof(kinds) / sizeof(kinds[0]); i++)
                r = cupti.enable(kinds[i]);
        if (r != CUPTI_SUCCESS) {
                (void) fprintf(stderr, "kernel-times: CUPTI says %d\n", (int) r);
                return 0;
        }
        print_clock();
        (void) fflush(out);
        return pthread_create(&thread, NULL, flush_now_and_then, NULL) == 0;
}
