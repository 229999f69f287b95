/* SPDX-License-Identifier: Apache-2.0 */
/* The Job interface (dbus/org.latentd.Latent1.Job.xml). */
#include "service/latentd/job.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/peer.h"
#include "service/latentd/plan.h"
#include "service/latentd/queue.h"
#include "service/latentd/render.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"

static int append_tensor(sd_bus_message *m, const char *name, const WireTensor *t) {
        int r;

        r = sd_bus_message_open_container(m, 'r', "stsat");
        if (r < 0)
                return r;

        r = sd_bus_message_append(m, "sts", name, t->offset, st_type_name((StType) t->dtype));
        if (r < 0)
                return r;

        r = sd_bus_message_append_array(m, 't', t->shape, t->n_dims * sizeof(t->shape[0]));
        if (r < 0)
                return r;

        return sd_bus_message_close_container(m);
}

static int append_tensors(sd_bus_message *m, const Job *j) {
        int r;

        r = bus_open_list(m, "tensors", "(stsat)");
        if (r < 0)
                return r;

        for (uint32_t i = 0;; i++) {
                WireTensor t;
                char name[32];

                r = job_result_tensor(j, i, name, &t);
                if (r == -ENOENT)
                        break;

                r = append_tensor(m, name, &t);
                if (r < 0)
                        return r;
        }

        return bus_close_list(m);
}

/* Of a number of each rank: up to the last one that has any; if none has, nothing. */
static int append_ranks(sd_bus_message *m, const char *key, const uint64_t *numbers) {
        uint32_t n = WIRE_RANKS_MAX;

        while (n > 0 && numbers[n - 1] == 0)
                n--;

        return n > 0 ? bus_append_numbers(m, key, numbers, n) : 0;
}

static int append_sparse(sd_bus_message *m, const Job *j) {
        int r;

        r = sd_bus_message_append(m, "{sv}{sv}{sv}", "sparse-steps", "u", j->sparse_steps, "sparse-blocks", "t",
                job_sum_ranks(j->blocks_all), "sparse-seen", "t", job_sum_ranks(j->blocks_seen));
        if (r < 0)
                return r;
        r = append_ranks(m, "sparse-rank-blocks", j->blocks_all);
        return r < 0 ? r : append_ranks(m, "sparse-rank-seen", j->blocks_seen);
}

/* How its last step was split. A job that was taken up with all its steps done was not. */
static int append_plan(sd_bus_message *m, const Job *j) {
        int r;

        if (j->plan.ranks == 0)
                return 0;

        if (j->first_kernel_usec > 0) {
                r = sd_bus_message_append(m, "{sv}", "first-kernel-usec", "t", j->first_kernel_usec);
                if (r < 0)
                        return r;
        }

        if (j->exposed_usec > 0) { /* for benches alone */
                r = sd_bus_message_append(m, "{sv}", "exposed-usec", "t", j->exposed_usec);
                if (r < 0)
                        return r;
        }

        if (j->request.sparse.method != SPARSE_NONE) {
                r = append_sparse(m, j);
                if (r < 0)
                        return r;
        }

        return sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}",
                                     "plan", "s", plan_kind_to_string((WirePlanKind) j->plan.kind),
                                     "ranks", "u", plan_ranks_used(&j->plan),
                                     "chunks", "u", j->plan.chunks,
                                     "exchange", "s", plan_exchange_to_string((WireExchange) j->plan.exchange),
                                     "exchanged-bytes", "t", j->exchanged_bytes);
}

static int append_coding(sd_bus_message *m, const Job *j) {
        int r;

        if (j->kind == JOB_RENDER && j->state != JOB_FAILED)
                return render_append_result(m, j->render);
        r = append_ranks(m, "rank-tiles", j->tiles);
        if (r < 0)
                return r;
        if (j->kind == JOB_DECODE && j->ready.frames > 0)
                return sd_bus_message_append(m, "{sv}", "frames", "t", j->ready.frames);
        if (j->kind == JOB_ENCODE)
                return sd_bus_message_append(m, "{sv}", "cached", "b", (int) j->cached);
        return 0;
}

static int append_result(sd_bus_message *m, const Job *j) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r < 0)
                return r;

        if (j->state == JOB_DONE && j->kind == JOB_LOAD) {
                if (j->result_model) {
                        r = sd_bus_message_append(m, "{sv}", "model", "o", j->result_model);
                        if (r < 0)
                                return r;
                }

                r = sd_bus_message_append(m, "{sv}", "bytes-read", "t", j->bytes_read);
                if (r < 0)
                        return r;
        } else if (j->state == JOB_DONE && j->kind == JOB_MERGE) {
                r = lora_notes_append(m, &j->notes);
                if (r < 0)
                        return r;

                r = sd_bus_message_append(m, "{sv}", "bytes", "t", j->merged_bytes);
                if (r < 0)
                        return r;
        } else if (job_has_result(j)) {
                r = append_tensors(m, j);
                if (r < 0)
                        return r;

                r = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}", "rows", "t", j->ready.rows, "numerics", "s", j->numerics_id,
                                          "compute-usec", "t", j->compute_usec, "queued-usec", "t", j->queued_usec);
                if (r < 0)
                        return r;

                r = append_plan(m, j);
                if (r >= 0)
                        r = append_coding(m, j);
                if (r < 0)
                        return r;
        }

        return sd_bus_message_close_container(m);
}

int job_bus_reply(Job *j, sd_bus_message *message, sd_bus_error *error) {
        CLEANUP_FREE char *path = NULL;
        int r;

        r = job_path(j, &path);
        if (r < 0) {
                job_cancel(j);
                return bus_error_fault(error, r, NULL);
        }

        return sd_bus_reply_method_return(message, "o", path);
}

static int new_signal(Job *j, const char *name, sd_bus_message **ret) {
        CLEANUP_FREE char *path = NULL;
        int r;

        r = job_path(j, &path);
        if (r < 0)
                return r;

        return sd_bus_message_new_signal(j->owner->bus, ret, path, BUS_INTERFACE("Job"), name);
}

int job_bus_send_progress(Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = new_signal(j, "Progress", &m);
        if (r < 0)
                return r;

        r = sd_bus_message_append(m, "suuuudt", j->phase, j->step, j->steps, j->block, j->blocks, j->fraction, j->eta_usec);
        if (r < 0)
                return r;

        return peer_send(j->owner, STEAL_PTR(m), true);
}

int job_bus_send_preview(Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = new_signal(j, "PreviewReady", &m);
        if (r < 0)
                return r;

        r = sd_bus_message_append(m, "u", j->preview_step);
        if (r < 0)
                return r;

        return peer_send(j->owner, STEAL_PTR(m), true);
}

int job_bus_send_frames(Job *j, bool droppable) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = new_signal(j, "FramesReady", &m);
        if (r < 0)
                return r;

        r = sd_bus_message_append(m, "tt", j->frames_told, j->frames_ready - j->frames_told);
        if (r < 0)
                return r;

        return peer_send(j->owner, STEAL_PTR(m), droppable);
}

int job_bus_send_finished(Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = new_signal(j, "Finished", &m);
        if (r < 0)
                return r;

        r = sd_bus_message_append(m, "sss", job_state_to_string(j->state), j->fault.name, j->fault.text);
        if (r < 0)
                return r;

        r = append_result(m, j);
        if (r < 0)
                return r;

        return peer_send(j->owner, STEAL_PTR(m), false);
}

static int method_cancel(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        job_cancel(userdata);
        return sd_bus_reply_method_return(message, NULL);
}

static int method_release_frames(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        uint64_t up_to;
        Fault f = {};
        int r;

        r = sd_bus_message_read(message, "t", &up_to);
        if (r >= 0)
                r = job_release_frames(userdata, up_to, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return sd_bus_reply_method_return(message, NULL);
}

static int property_get_kind(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Job *j = userdata;

        return sd_bus_message_append(reply, "s", job_kind_to_string(j->kind));
}

static int property_get_state(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        const Job *j = userdata;

        return sd_bus_message_append(reply, "s", job_state_to_string(j->state));
}

static int property_get_queue_position(sd_bus *bus, const char *path, const char *interface, const char *property,
                                       sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        const Job *j = userdata;

        return sd_bus_message_append(reply, "u", queue_position(j->manager->queue, j));
}

static int property_get_queued_usec(sd_bus *bus, const char *path, const char *interface, const char *property,
                                    sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        return sd_bus_message_append(reply, "t", job_queued_usec(userdata));
}

static int property_get_error(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        const Job *j = userdata;

        return sd_bus_message_append(reply, "(ss)", j->fault.name, j->fault.text);
}

static int property_get_result(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                               void *userdata, sd_bus_error *error) {
        return append_result(reply, userdata);
}

/* No property is announced: PropertiesChanged would reach every user of the system bus. */
static const sd_bus_vtable job_vtable[] = {
        SD_BUS_VTABLE_START(0),
        SD_BUS_PROPERTY("Kind", "s", property_get_kind, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("State", "s", property_get_state, 0, 0),
        SD_BUS_PROPERTY("Phase", "s", NULL, offsetof(Job, phase), 0),
        SD_BUS_PROPERTY("Step", "u", NULL, offsetof(Job, step), 0),
        SD_BUS_PROPERTY("Steps", "u", NULL, offsetof(Job, steps), 0),
        SD_BUS_PROPERTY("Block", "u", NULL, offsetof(Job, block), 0),
        SD_BUS_PROPERTY("Blocks", "u", NULL, offsetof(Job, blocks), 0),
        SD_BUS_PROPERTY("Fraction", "d", NULL, offsetof(Job, fraction), 0),
        SD_BUS_PROPERTY("EtaUsec", "t", NULL, offsetof(Job, eta_usec), 0),
        SD_BUS_PROPERTY("QueuePosition", "u", property_get_queue_position, 0, 0),
        SD_BUS_PROPERTY("QueuedUsec", "t", property_get_queued_usec, 0, 0),
        SD_BUS_PROPERTY("ComputeUsec", "t", NULL, offsetof(Job, compute_usec), 0),
        SD_BUS_PROPERTY("Retries", "u", NULL, offsetof(Job, retries_total), 0),
        SD_BUS_PROPERTY("Error", "(ss)", property_get_error, 0, 0),
        SD_BUS_PROPERTY("Result", "a{sv}", property_get_result, 0, 0),
        SD_BUS_METHOD("Cancel", NULL, NULL, method_cancel, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("ReleaseFrames", SD_BUS_ARGS("t", up_to), SD_BUS_NO_RESULT, method_release_frames,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_SIGNAL_WITH_ARGS("Progress",
                                SD_BUS_ARGS("s", phase, "u", step, "u", steps, "u", block, "u", blocks, "d", fraction, "t", eta_usec),
                                0),
        SD_BUS_SIGNAL_WITH_ARGS("PreviewReady", SD_BUS_ARGS("u", step), 0),
        SD_BUS_SIGNAL_WITH_ARGS("FramesReady", SD_BUS_ARGS("t", first, "t", count), 0),
        SD_BUS_SIGNAL_WITH_ARGS("Finished", SD_BUS_ARGS("s", state, "s", error_name, "s", error_text, "a{sv}", result), 0),
        SD_BUS_VTABLE_END
};

/* Objects of other users do not exist for the caller. */
static int find_job(sd_bus *bus, const char *path, const char *interface, void *userdata, void **ret_found, sd_bus_error *error) {
        Manager *m = userdata;
        uint64_t id;
        Peer *p;
        Job *j;

        if (bus_path_id(path, BUS_ROOT "/job/", &id) < 0)
                return 0;

        p = peer_of_call(m, bus);
        j = p ? job_find(m, id) : NULL;
        if (!j || j->uid != p->uid || j->hidden)
                return 0;

        *ret_found = j;
        return 1;
}

int job_bus_register(Manager *m, sd_bus *bus) {
        return sd_bus_add_fallback_vtable(bus, NULL, BUS_ROOT "/job", BUS_INTERFACE("Job"), job_vtable, find_job, m);
}
