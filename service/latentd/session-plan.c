/* SPDX-License-Identifier: Apache-2.0 */
/* Session.Plan: a job that nobody sees; its end answers the call. */
#include "service/latentd/session.h"

#include <errno.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/plan.h"
#include "service/latentd/session-request.h"
#include "service/latentd/step-pace.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"

/* What each rank has: "rank-rows", 0 of one without a part. */
static int append_rows(sd_bus_message *m, const WirePlan *p) {
        uint64_t rows[WIRE_RANKS_MAX];

        for (uint32_t i = 0; i < p->ranks; i++)
                rows[i] = p->rows[i].end - p->rows[i].begin;

        return bus_append_numbers(m, "rank-rows", rows, p->ranks);
}

/* Whose memory it takes; nothing where there are no GPUs. */
static int append_gpus(sd_bus_message *m, const Job *j) {
        const WireHello *h = worker_link_hello(j->manager->worker);
        const char *gpus[WIRE_DEVICES_MAX];
        size_t n = h ? gpu_set_addresses(h, j->plan_ranks, gpus) : 0;

        return n > 0 ? bus_append_strings(m, "gpus", gpus, n) : 0;
}

/* Of a step: how it would be split, and what is known of its time and of the model's place. */
static int reply_split(sd_bus_message *message, const Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        const WireDeviceModel d = j->model ? worker_link_device_model(j->manager->worker, j->model->id) : (WireDeviceModel){};
        const WireJobReady *y = &j->ready;
        uint64_t usec = step_pace_usec(j);
        int r;

        r = sd_bus_message_new_method_return(message, &m);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}{sv}{sv}", "rows", "t", y->rows, "steps", "u", y->steps,
                        "output-bytes", "t", y->output_used, "ranks", "u", (uint32_t) __builtin_popcountll(j->plan_ranks),
                        "plan", "s", plan_kind_to_string((WirePlanKind) j->plan.kind),
                        "exchange", "s", plan_exchange_to_string((WireExchange) j->plan.exchange), "chunks", "u", j->plan.chunks);
        if (r >= 0)
                r = append_rows(m, &j->plan);
        if (r >= 0)
                r = append_gpus(m, j);
        if (r >= 0 && j->left_out[0] != '\0')
                r = sd_bus_message_append(m, "{sv}", "left-out", "s", j->left_out);
        if (r >= 0 && usec > 0)
                r = sd_bus_message_append(m, "{sv}", "step-usec", "t", usec);
        if (r >= 0 && d.bytes > 0)
                r = sd_bus_message_append(m, "{sv}", "device-blocks", "u", d.blocks);
        if (r >= 0)
                r = sd_bus_message_close_container(m);
        return r < 0 ? sd_bus_reply_method_errno(message, r, NULL) : sd_bus_send(NULL, m, NULL);
}

static int reply_plan(sd_bus_message *message, const Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        const WireJobReady *y = &j->ready;
        int r;

        if (!wire_job_is_coding(j->request.kind))
                return reply_split(message, j);

        r = sd_bus_message_new_method_return(message, &m);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}", "rows", "t", y->rows, "steps", "u", y->steps, "output-bytes", "t",
                        y->output_used, "ranks", "u", (uint32_t) __builtin_popcountll(j->plan_ranks), "memory-bytes", "t", y->memory_bytes);
        if (r >= 0)
                r = append_gpus(m, j);
        if (r >= 0)
                r = sd_bus_message_close_container(m);
        return r < 0 ? sd_bus_reply_method_errno(message, r, NULL) : sd_bus_send(NULL, m, NULL);
}

/* To a caller that left meanwhile the answer goes nowhere. */
static void on_planned(void *userdata, const Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *message = userdata;
        CLEANUP(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
        Fault f = j->fault;

        if (j->state == JOB_DONE) {
                (void) reply_plan(message, j);
                return;
        }

        (void) fault_set(&f, -ECANCELED, FAULT_CANCELLED,
                "The session was closed."); /* a fault that is there stays */
        (void) bus_error_fault(&error, -EIO, &f);
        (void) sd_bus_reply_method_error(message, &error);
}

static const struct {
        const char *kind;
        int (*read)(sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);
} readers[] = {
        { "step", session_request_step },
        { "sample", session_request_sample },
        { "tokenize", session_request_tokenize },
        { "encode", session_request_encode },
        { "encode-media", session_request_encode_media },
        { "decode", session_request_decode },
};

static int read_request(sd_bus_message *message, const Session *s, const char *kind, WireJobOpen *ret, Fault *f) {
        for (size_t i = 0; i < ELEMENTSOF(readers); i++)
                if (strcmp(kind, readers[i].kind) == 0)
                        return readers[i].read(message, s, WIRE_JOB_PLAN_ONLY, ret, f);

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "\"kind\" is \"%.32s\", expected step, sample, tokenize, encode, encode-media, decode or render.", kind);
}

static int plan_render(sd_bus_message *message, Session *s, Peer *p, Fault *f) {
        RenderOptions o = { .file = -EBADF, .sheet = -EBADF };
        int r;

        r = session_request_render(message, s, WIRE_JOB_PLAN_ONLY, &o, f);
        if (r >= 0)
                r = render_plan(s, p, &o, message, f);
        render_options_done(&o);
        return r;
}

int session_method_plan(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Session *s = userdata;
        WireJobOpen request;
        const char *kind;
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(s->manager, message, &p, &f);
        if (r >= 0)
                r = sd_bus_message_read(message, "s", &kind);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        if (strcmp(kind, "render") == 0) {
                r = plan_render(message, s, p, &f);
                return r < 0 ? bus_error_fault(error, r, &f) : 1;
        }

        r = read_request(message, s, kind, &request, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_submit(s, p, &request, &j, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        j->done_fn = on_planned;
        j->done_userdata = sd_bus_message_ref(message); /* on_planned()'s */
        return 1;
}
