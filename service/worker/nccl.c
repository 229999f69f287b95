/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/nccl.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/wire.h"
#include "service/worker/nccl-library.h"
#include "service/worker/trial.h"

#define POLL_USEC 20
#define LIBRARY "libnccl.so.2"

typedef struct Member {
        int device; /* as the library under LkOps counts */
        _Atomic(void *) comm; /* NULL: none, or over */
} Member;

/* Written by nccl_start(), on the main thread, but for what is atomic. */
static struct {
#define DECLARE(name, arguments) NcclResult(*name) arguments;
        NCCL_FUNCTIONS(DECLARE)
#undef DECLARE
        const char *(*ncclGetErrorString)(NcclResult);
        const char *(*ncclGetLastError)(void *);
        uint32_t n;
        Member members[WIRE_DEVICES_MAX];
        atomic_uint version;
} nccl;

bool nccl_is_wanted(void) {
        static const char *const fixed[][2] = {
                {"NCCL_NVLS_ENABLE", "0"},         /* no multicast */
                {"NCCL_NET", "Socket"},            /* devices of this machine alone: no network's library is loaded */
                {"NCCL_NET_PLUGIN", "none"},
                {"NCCL_TUNER_PLUGIN", "none"},
                {"NCCL_PROFILER_PLUGIN", "none"},
                {"NCCL_IB_DISABLE", "1"},
                {"NCCL_SOCKET_IFNAME", "=lo"},
                {"NCCL_RAS_ENABLE", "0"},          /* it would listen for questions */
                {"NCCL_COMM_BLOCKING", "0"},
        };
        const char *wish = getenv("LATENT_NCCL");

        if (!wish || strcmp(wish, "1") != 0)
                return false;
        for (size_t i = 0; i < ELEMENTSOF(fixed); i++)
                (void) setenv(fixed[i][0], fixed[i][1], 1);
        (void) unsetenv("NCCL_COMM_ID");
        return true;
}

static int load(Fault *f) {
        void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), *p;
        const char *missing = NULL;

        if (!library)
                return fault_set(f, -ELIBACC, FAULT_NOT_SUPPORTED, "NCCL cannot be loaded: %s.", dlerror());
#define FIND(name, arguments)                                                                          \
        p = dlsym(library, #name);                                                                     \
        memcpy(&nccl.name, &p, sizeof(p)); /* C has no cast from data to a function */                 \
        missing = p ? missing : #name;
        NCCL_FUNCTIONS(FIND)
        FIND(ncclGetErrorString, )
#undef FIND
        p = dlsym(library, "ncclGetLastError"); /* may be missing */
        memcpy(&nccl.ncclGetLastError, &p, sizeof(p));
        if (missing)
                return fault_set(f, -ELIBBAD, FAULT_NOT_SUPPORTED, LIBRARY " has no %s, expected NCCL 2.14 or newer.", missing);
        return 0;
}

static int failed(const char *call, NcclResult result, void *comm, Fault *f) {
        const char *more = nccl.ncclGetLastError ? nccl.ncclGetLastError(comm) : NULL;

        return fault_set(f, -EIO, FAULT_INTERNAL, "NCCL: %s failed: %s%s%.200s.", call, nccl.ncclGetErrorString(result),
                more && *more ? ": " : "", more ? more : "");
}

static bool is_bad(NcclResult r) {
        return r != NCCL_SUCCESS && r != NCCL_IN_PROGRESS;
}

/* What the communicator was told is done: its queue has it. */
static int settle(void *comm, const char *call, uint64_t until, const NcclGroup *g, Fault *f) {
        const struct timespec pause = {.tv_nsec = POLL_USEC * 1000};
        NcclResult state, r;

        for (;;) {
                r = nccl.ncclCommGetAsyncError(comm, &state);
                if (r != NCCL_SUCCESS || is_bad(state))
                        return failed(call, r != NCCL_SUCCESS ? r : state, comm, f);
                if (state == NCCL_SUCCESS)
                        return 0;
                if (g && g->stop && g->stop(g->userdata))
                        return -ECANCELED;
                if (clock_usec() >= until)
                        return fault_set(f, -EIO, FAULT_INTERNAL, "NCCL: %s did not end in time.", call);
                (void) nanosleep(&pause, NULL);
        }
}

static int settle_all(const char *call, const NcclDevices *d, Fault *f) {
        uint64_t until = clock_usec() + d->deadline_usec;
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < d->n; i++)
                r = settle(nccl.members[i].comm, call, until, NULL, f);
        return r;
}

static int make_comms(const NcclDevices *d, Fault *f) {
        NcclCommConfig config = {sizeof(config), NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0};
        void *comms[WIRE_DEVICES_MAX] = {};
        NcclResult bad = NCCL_SUCCESS, r;
        NcclUniqueId id;

        r = nccl.ncclGetUniqueId(&id);
        if (r != NCCL_SUCCESS)
                return failed("ncclGetUniqueId", r, NULL, f);
        (void) nccl.ncclGroupStart();
        for (uint32_t i = 0; i < d->n && !is_bad(bad); i++) {
                if (d->bind(i) < 0)
                        bad = NCCL_UNHANDLED_CUDA_ERROR;
                else
                        bad = nccl.ncclCommInitRankConfig(&comms[i], (int) d->n, id, (int) i, &config);
        }
        r = nccl.ncclGroupEnd();
        for (uint32_t i = 0; i < d->n; i++)
                nccl.members[i].comm = comms[i];
        if (is_bad(bad) || is_bad(r))
                return failed("ncclCommInitRankConfig", is_bad(bad) ? bad : r, NULL, f);
        for (uint32_t i = 0; i < d->n; i++)
                if (!comms[i])
                        return failed("ncclCommInitRankConfig", NCCL_INTERNAL_ERROR, NULL, f);
        return settle_all("ncclCommInitRankConfig", d, f);
}

static NcclResult add_message(const Member *own, void *stream, int peer, void *data, uint64_t size, bool is_sent) {
        return is_sent ? nccl.ncclSend(data, size, NCCL_INT8, peer, own->comm, stream)
                       : nccl.ncclRecv(data, size, NCCL_INT8, peer, own->comm, stream);
}

/* ---- the trial ---- */

/* Of each device: what it sends to each, then what it gets. */
typedef struct Trial {
        const NcclDevices *d;
        uint8_t *memory[WIRE_DEVICES_MAX];
        uint8_t *bytes; /* [size], host memory */
} Trial;

static int prepare(Trial *t, uint32_t i) {
        const NcclDevices *d = t->d;
        LkContext *c = d->contexts[i];
        void *memory;
        int r;

        r = d->bind(i);
        if (r >= 0)
                r = d->ops->memory_new(c, 2 * d->n * d->size, &memory);
        if (r < 0)
                return r;
        t->memory[i] = memory;
        for (uint32_t to = 0; r >= 0 && to < d->n; to++) {
                trial_fill(t->bytes, d->size, i, to);
                r = d->ops->upload(c, t->memory[i] + to * d->size, t->bytes, d->size);
        }
        if (r >= 0)
                r = d->ops->mark(c, LK_COMPUTE, TRIAL_READY);
        return r < 0 ? r : d->ops->wait(c, LK_PEER, TRIAL_READY);
}

static int exchange(const Trial *t, Fault *f) {
        const NcclDevices *d = t->d;
        NcclResult r = NCCL_SUCCESS, end;
        int device;

        (void) nccl.ncclGroupStart();
        for (uint32_t i = 0; i < d->n; i++)
                for (uint32_t k = 0; k < d->n; k++)
                        for (int is_sent = 0; is_sent < 2 && i != k && !is_bad(r); is_sent++)
                                r = add_message(nccl.members + i, d->ops->native(d->contexts[i], LK_PEER, &device), (int) k,
                                        t->memory[i] + (is_sent ? k : d->n + k) * d->size, d->size, is_sent);
        end = nccl.ncclGroupEnd();
        if (is_bad(r) || is_bad(end))
                return failed("ncclGroupEnd", is_bad(r) ? r : end, NULL, f);
        return settle_all("ncclGroupEnd", d, f);
}

static int join(const NcclDevices *d, uint32_t i, Fault *f) {
        int r;

        r = d->bind(i);
        if (r >= 0)
                r = d->ops->mark(d->contexts[i], LK_PEER, TRIAL_DONE);
        if (r >= 0)
                r = trial_wait(d->ops, d->contexts[i], d->deadline_usec);
        if (r == -ETIMEDOUT)
                return fault_set(f, -EIO, FAULT_INTERNAL, "NCCL: messages between GPUs did not arrive in time.");
        return r < 0 ? r : d->ops->wait(d->contexts[i], LK_COMPUTE, TRIAL_DONE);
}

static int verify(const Trial *t, uint32_t i, uint8_t *arrived, Fault *f) {
        const NcclDevices *d = t->d;
        int r;

        r = d->bind(i);
        for (uint32_t from = 0; r >= 0 && from < d->n; from++) {
                if (from == i)
                        continue;
                r = d->ops->download(d->contexts[i], arrived, t->memory[i] + (d->n + from) * d->size, d->size);
                trial_fill(t->bytes, d->size, from, i);
                if (r >= 0 && memcmp(arrived, t->bytes, d->size) != 0)
                        return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                                "NCCL: bytes from GPU %" PRIu32 " to GPU %" PRIu32 " arrive wrong.", from, i);
        }
        return r;
}

static int try_all(const NcclDevices *d, Fault *f) {
        CLEANUP_FREE uint8_t *bytes = malloc(d->size), *arrived = malloc(d->size);
        Trial t = {.d = d, .bytes = bytes};
        int r = bytes && arrived ? 0 : -ENOMEM;

        for (uint32_t i = 0; r >= 0 && i < d->n; i++)
                r = prepare(&t, i);
        if (r >= 0)
                r = exchange(&t, f);
        for (uint32_t i = 0; r >= 0 && i < d->n; i++)
                r = join(d, i, f);
        for (uint32_t i = 0; r >= 0 && i < d->n; i++)
                r = verify(&t, i, arrived, f);
        if (r < 0 && r != -EBADMSG) /* it may still be written: kept */
                return fault_set(f, r, FAULT_INTERNAL, "NCCL: the trial failed: %s.", strerrordesc_np(-r));
        for (uint32_t i = 0; i < d->n; i++)
                if (t.memory[i] && d->bind(i) >= 0) {
                        d->ops->memory_free(d->contexts[i], t.memory[i]);
                        d->ops->memory_trim(d->contexts[i]);
                }
        return r;
}

int nccl_start(const NcclDevices *d, Fault *f) {
        int version = 0, r;

        if (d->n < 2 || d->n > WIRE_DEVICES_MAX || !d->ops->native)
                return fault_set(f, -EINVAL, FAULT_NOT_SUPPORTED, "NCCL is for two GPUs at least.");
        r = load(f);
        if (r < 0)
                return r;
        if (nccl.ncclGetVersion(&version) != NCCL_SUCCESS || version < (int) NCCL_CONFIG_VERSION)
                return fault_set(f, -ELIBBAD, FAULT_NOT_SUPPORTED, LIBRARY " is of version %d, expected 2.14 or newer.", version);
        nccl.n = d->n;
        for (uint32_t i = 0; i < d->n; i++)
                (void) d->ops->native(d->contexts[i], LK_PEER, &nccl.members[i].device);
        r = make_comms(d, f);
        if (r >= 0)
                r = try_all(d, f);
        if (r < 0) {
                nccl_end();
                return r;
        }
        nccl.version = (unsigned) version;
        return 0;
}

uint32_t nccl_version(void) {
        return nccl.version;
}

static int member_of(const LkOps *ops, LkContext *c, LkQueue queue, void **ret_stream) {
        int device;

        *ret_stream = ops->native(c, queue, &device);
        for (uint32_t i = 0; i < nccl.n; i++)
                if (nccl.members[i].device == device)
                        return (int) i;
        return -ENODEV;
}

static int over(Fault *f) {
        return fault_set(f, -EIO, FAULT_INTERNAL, "NCCL: it is over in this worker, after an error.");
}

int nccl_settle(const LkOps *ops, LkContext *c, uint64_t deadline_usec, Fault *f) {
        void *stream;
        int own = member_of(ops, c, LK_PEER, &stream);

        if (own < 0 || nccl_version() == 0)
                return over(f);
        return settle(nccl.members[own].comm, "ncclGroupEnd", clock_usec() + deadline_usec, NULL, f);
}

int nccl_send(const LkOps *ops, LkContext *c, LkQueue queue, const NcclGroup *g, Fault *f) {
        uint64_t until = clock_usec() + g->deadline_usec;
        void *stream, *unused;
        int own = member_of(ops, c, queue, &stream), peer = 0;
        NcclResult r = NCCL_SUCCESS, end;

        if (own < 0 || nccl_version() == 0)
                return over(f);
        (void) nccl.ncclGroupStart();
        for (size_t i = 0; peer >= 0 && !is_bad(r) && i < g->n; i++) {
                const NcclMessage *m = g->messages + i;

                peer = member_of(ops, m->peer, queue, &unused);
                if (peer == own)
                        peer = fault_set(f, -EINVAL, FAULT_INTERNAL, "NCCL: two ranks have the same GPU.");
                if (peer >= 0)
                        r = add_message(nccl.members + own, stream, peer, m->data, m->size, m->is_sent);
        }
        end = nccl.ncclGroupEnd();
        if (peer < 0 || is_bad(r))
                return peer < 0 ? peer : failed(g->messages[0].is_sent ? "ncclSend" : "ncclRecv", r, nccl.members[own].comm, f);
        if (is_bad(end))
                return failed("ncclGroupEnd", end, nccl.members[own].comm, f);
        return settle(nccl.members[own].comm, "ncclGroupEnd", until, g, f);
}

static void abort_member(uint32_t i) {
        void *comm = atomic_exchange(&nccl.members[i].comm, NULL);

        if (comm)
                (void) nccl.ncclCommAbort(comm);
}

void nccl_abort(const LkOps *ops, LkContext *c) {
        void *stream;
        int own = member_of(ops, c, LK_PEER, &stream);

        nccl.version = 0;
        if (own >= 0)
                abort_member((uint32_t) own);
}

void nccl_end(void) {
        nccl.version = 0;
        for (uint32_t i = 0; i < nccl.n; i++)
                abort_member(i);
}
