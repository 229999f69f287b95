/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/session.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "service/latentd/descriptors.h"
#include "service/latentd/job.h"
#include "service/latentd/memory.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/queue.h"
#include "service/latentd/quota.h"
#include "service/latentd/remains.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "service/shared/safetensors.h"

DEFINE_CLEANUP(Session *, session_free)

Session *session_free(Session *s) {
        Manager *m;

        if (!s)
                return NULL;

        m = s->manager;
        TAILQ_REMOVE(&m->sessions, s, entry);
        if (m->worker)
                worker_link_forget_session(m->worker, s);
        if (s->model)
                model_user_remove(s->model);
        lora_list_done(&s->loras);

        *s->remains = (Remains){
                .uid = s->uid,
                .owner = s->owner,
                .input_fd = s->input_fd,
                .output_fd = s->output_fd,
                .map = s->output_map,
                .input_bytes = s->input_bytes,
                .output_bytes = s->output_bytes,
        };
        remains_add(m, s->remains);
        free(s);
        return NULL;
}

Session *session_find(Manager *m, uint64_t id) {
        Session *s;

        TAILQ_FOREACH(s, &m->sessions, entry)
                if (s->id == id)
                        return s->state == SESSION_OPEN ? s : NULL;

        return NULL;
}

int session_path(const Session *s, char **ret) {
        char *p;

        if (asprintf(&p, BUS_ROOT "/session/%" PRIu64, s->id) < 0)
                return -ENOMEM;

        *ret = p;
        return 0;
}

static int populate_one(int fd, uint64_t size) {
        void *map;
        int r;

        r = memfd_map(fd, size, PROT_READ | PROT_WRITE, &map);
        if (r < 0)
                return r;

        r = memory_populate(map, size);
        (void) munmap(map, size);
        return r;
}

/* On a pool thread. The loop does not touch the fields used here before populate_done(). */
static int populate(void *userdata) {
        Session *s = userdata;
        int r;

        r = populate_one(s->input_fd, s->input_bytes);
        if (r < 0)
                return r;

        r = populate_one(s->output_fd, s->output_bytes);
        if (r < 0)
                return r;

        return memfd_map(s->output_fd, s->output_bytes, PROT_READ, &s->output_map);
}

static void populate_done(void *userdata, int result) {
        Session *s = userdata;
        SessionOpenFn fn = s->open_fn;
        Fault f = {};

        s->n_busy--;
        if (s->state == SESSION_OPENING && result >= 0) {
                s->state = SESSION_OPEN;
                fn(s->open_userdata, s, NULL);
                return;
        }

        if (result < 0)
                (void) fault_set(&f, result, result == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "Arenas of %" PRIu64 " + %" PRIu64 " bytes could not be populated: %s.",
                        s->input_bytes, s->output_bytes, strerror(-result));
        else
                (void) fault_set(
                        &f, -ECANCELED, FAULT_CANCELLED, "The session was closed while it was opened.");

        fn(s->open_userdata, NULL, &f);
        (void) session_free(s);
}

/* Asks the machine for room. Regions that nobody uses give way. */
static int admit(Manager *m, uint64_t bytes, Fault *f) {
        MemoryHeadroom h;
        uint64_t freed = 0;
        int r;

        r = manager_headroom(m, &h);
        if (r < 0)
                return r;

        if (bytes > h.bytes)
                freed = store_evict(m->store, bytes - h.bytes);
        if (bytes > h.bytes && bytes - h.bytes > freed)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "Arenas of %" PRIu64 " bytes do not fit: %" PRIu64
                        " bytes may be taken now (limit: %s). Ask for smaller arenas, "
                        "close sessions or unload models.",
                        bytes, h.bytes + freed, h.limit);

        return 0;
}

int session_new(
        Manager *m, Peer *owner, const SessionOptions *o, SessionOpenFn fn, void *userdata, Fault *f) {
        CLEANUP(session_freep) Session *s = NULL;
        CLEANUP_FREE Remains *remains = NULL;
        uint64_t bytes;
        int r;

        if (__builtin_add_overflow(o->input_bytes, o->output_bytes, &bytes))
                return fault_set(f, -EOVERFLOW, FAULT_INVALID_ARGUMENT, "The sizes of the arenas overflow.");

        remains_collect(m);
        r = quota_check_session(m, owner->uid, bytes, f);
        if (r < 0)
                return r;

        r = descriptors_check("A session", f);
        if (r < 0)
                return r;

        r = admit(m, bytes, f);
        if (r < 0)
                return r;

        remains = malloc(sizeof(*remains));
        if (!remains)
                return -ENOMEM;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        *s = (Session){
                .id = m->next_id++,
                .manager = m,
                .owner = owner,
                .uid = owner->uid,
                .compute = o->compute,
                .split = o->split,
                .input_bytes = o->input_bytes,
                .output_bytes = o->output_bytes,
                .input_fd = -EBADF,
                .output_fd = -EBADF,
                .remains = STEAL_PTR(remains),
                .open_fn = fn,
                .open_userdata = userdata,
        };
        (void) snprintf(s->job_class, sizeof(s->job_class), "%s", o->job_class);
        m->arena_bytes += bytes;
        manager_used_changed(m);
        TAILQ_INSERT_TAIL(&m->sessions, s, entry);
        s->model = o->model;
        model_user_add(s->model);

        r = memfd_new("latentd-input", s->input_bytes, &s->input_fd);
        if (r < 0)
                return r;

        r = memfd_new("latentd-output", s->output_bytes, &s->output_fd);
        if (r < 0)
                return r;

        r = pool_submit(m->pool, populate, populate_done, s);
        if (r < 0)
                return r;

        s->n_busy++;
        s = NULL; /* populate_done() has it now */
        return 0;
}

static int check_input(const Session *s, const char *name, const WireTensor *t, Fault *f) {
        uint64_t element = st_type_size((StType) t->dtype);

        if (t->n_dims == 0 && t->size == 0)
                return 0;

        if (t->size == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "\"%s\" has a dimension of 0.", name);

        if (element == 0 || t->offset % element != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"%s\" starts at %" PRIu64 ", which is no multiple of its element size of %" PRIu64
                        " bytes.",
                        name, t->offset, element);

        if (t->size > s->input_bytes || t->offset > s->input_bytes - t->size)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"%s\" takes %" PRIu64 " bytes from %" PRIu64
                        ", which is outside the input arena of %" PRIu64 " bytes.",
                        name, t->size, t->offset, s->input_bytes);

        return 0;
}

static int check_output(const Session *s, const WireJobOpen *q, Fault *f) {
        Job *j;

        if (q->output_offset % 64 != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"output-offset\" is %" PRIu64 ", expected a multiple of 64.", q->output_offset);

        if (q->output_size == 0 || q->output_size > s->output_bytes ||
                q->output_offset > s->output_bytes - q->output_size)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The output range of %" PRIu64 " bytes from %" PRIu64
                        " is empty or outside the output arena of %" PRIu64 " bytes.",
                        q->output_size, q->output_offset, s->output_bytes);

        if (q->flags & WIRE_JOB_PLAN_ONLY)
                return 0;

        TAILQ_FOREACH(j, &s->manager->unfinished, unfinished_entry) {
                const WireJobOpen *o = &j->request;

                if (j->session != s || !job_writes_output(j))
                        continue;

                if (q->output_offset < o->output_offset + o->output_size &&
                        o->output_offset < q->output_offset + q->output_size)
                        return fault_set(f, -EBUSY, FAULT_BUSY,
                                "The output range of %" PRIu64 " bytes from %" PRIu64
                                " overlaps that of the unfinished job %" PRIu64 " (%" PRIu64
                                " bytes from %" PRIu64
                                "): wait for it or use output-offset and output-bytes.",
                                q->output_size, q->output_offset, j->id, o->output_size, o->output_offset);
        }

        return 0;
}

static int check_condition(const Session *s, const WireCondition *c, Fault *f) {
        WireTensor video = { .offset = c->video_offset, .dtype = ST_F32, .n_dims = 4 };
        WireTensor audio = { .offset = c->audio_offset, .dtype = ST_F32, .n_dims = 3 };
        int r;

        if (c->frames > 0) {
                if (__builtin_mul_overflow(sizeof(float) * 24, c->frames, &video.size) ||
                        __builtin_mul_overflow(video.size, c->height, &video.size) ||
                        __builtin_mul_overflow(video.size, c->width, &video.size))
                        video.size = UINT64_MAX; /* larger than any arena */

                r = check_input(s, "video", &video, f);
                if (r < 0)
                        return r;
        }

        if (c->audio > 0) {
                if (__builtin_mul_overflow(sizeof(float) * 32 * 2, c->audio, &audio.size))
                        audio.size = UINT64_MAX;

                return check_input(s, "audio", &audio, f);
        }

        return 0;
}

/* U8, at any byte; a sound is not sent. */
static int check_picture(const Session *s, const WireCondition *c, Fault *f) {
        WireTensor t = { .offset = c->video_offset, .size = 3, .dtype = ST_U8, .n_dims = 4 };

        if (c->frames == 0)
                return 0;

        if (__builtin_mul_overflow(t.size, c->frames, &t.size) || __builtin_mul_overflow(t.size, c->height, &t.size) ||
                __builtin_mul_overflow(t.size, c->width, &t.size))
                t.size = UINT64_MAX; /* larger than any arena */

        return check_input(s, "picture", &t, f);
}

int session_check_request(const Session *s, const WireJobOpen *q, Fault *f) {
        const struct {
                const char *name;
                const WireTensor *tensor;
        } inputs[] = {
                { "text", &q->text },
                { "text-tags", &q->text_tags },
                { "video", &q->video },
                { "audio", &q->audio },
                { "sigmas-video", &q->sigmas_video },
                { "sigmas-audio", &q->sigmas_audio },
                { "mask-video", &q->mask_video },
                { "mask-audio", &q->mask_audio },
                { "clean-video", &q->clean_video },
                { "clean-audio", &q->clean_audio },
                { "resume-slot", &q->slot },
                { "kept-slots", &q->kept },
        };
        int r;

        for (size_t i = 0; i < ELEMENTSOF(inputs); i++) {
                r = check_input(s, inputs[i].name, inputs[i].tensor, f);
                if (r < 0)
                        return r;
        }

        for (uint32_t i = 0; i < q->n_conditions; i++) {
                bool pictures = q->kind == WIRE_JOB_ENCODE;
                Fault inner = {};

                r = pictures ? check_picture(s, &q->conditions[i], &inner) : check_condition(s, &q->conditions[i], &inner);
                if (r < 0)
                        return fault_set(f, r, inner.name, "\"%s\"[%" PRIu32 "]: %s", pictures ? "pictures" : "conditions",
                                i, inner.text);
        }

        return check_output(s, q, f);
}

static JobKind kind_of(const WireJobOpen *q) {
        if (q->flags & WIRE_JOB_PLAN_ONLY)
                return JOB_PLAN;

        switch ((WireJobKind) q->kind) {

        case WIRE_JOB_STEP:
                return JOB_STEP;
        case WIRE_JOB_MERGE:
                return JOB_MERGE;
        case WIRE_JOB_TOKENIZE:
                return JOB_TOKENIZE;
        case WIRE_JOB_ENCODE:
                return JOB_ENCODE;
        case WIRE_JOB_DECODE:
                return JOB_DECODE;
        case WIRE_JOB_ENCODE_MEDIA:
                return JOB_ENCODE_MEDIA;
        default:
                return JOB_SAMPLE;
        }
}

/* Which kinds of model a kind of job is for. */
static const struct {
        const char *method, *needs;
        WireModelKind kinds[2];
} job_rules[] = {
        [WIRE_JOB_STEP] = { "Step", "a denoiser", { WIRE_MODEL_DENOISER, WIRE_MODEL_DENOISER } },
        [WIRE_JOB_SAMPLE] = { "Sample", "a denoiser", { WIRE_MODEL_DENOISER, WIRE_MODEL_DENOISER } },
        [WIRE_JOB_MERGE] = { "SetLoras", "a denoiser", { WIRE_MODEL_DENOISER, WIRE_MODEL_DENOISER } },
        [WIRE_JOB_TOKENIZE] = { "Tokenize", "a conditioner", { WIRE_MODEL_CONDITIONER, WIRE_MODEL_CONDITIONER } },
        [WIRE_JOB_ENCODE] = { "Encode", "a conditioner", { WIRE_MODEL_CONDITIONER, WIRE_MODEL_CONDITIONER } },
        [WIRE_JOB_DECODE] = { "Decode", "a video-vae or audio-vae", { WIRE_MODEL_VIDEO_VAE, WIRE_MODEL_AUDIO_VAE } },
        [WIRE_JOB_ENCODE_MEDIA] = { "EncodeMedia", "a video-vae or audio-vae",
                { WIRE_MODEL_VIDEO_VAE, WIRE_MODEL_AUDIO_VAE } },
};

int session_check_kind(const Session *s, WireJobKind kind, Fault *f) {
        uint32_t has = s->model->info.kind;

        if (has == job_rules[kind].kinds[0] || has == job_rules[kind].kinds[1])
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "The session's model is of kind \"%s\", %s needs %s: use such a model.", model_kind_to_string(has),
                job_rules[kind].method, job_rules[kind].needs);
}

/* A job that waits for its reader stays open in the worker, outside of the queue's window: not any number of them. */
static int check_waiting(const Session *s, const WireJobOpen *q, Fault *f) {
        const Job *j;
        unsigned n = 0;

        if (q->ring_frames == 0 || (q->flags & WIRE_JOB_PLAN_ONLY))
                return 0;

        TAILQ_FOREACH(j, &s->manager->unfinished, unfinished_entry)
                n += j->uid == s->uid && j->kind == JOB_DECODE && j->request.ring_frames > 0;
        if (n < RING_JOBS_MAX)
                return 0;

        return fault_set(f, -EDQUOT, FAULT_LIMIT,
                "You have %u unfinished Decode jobs with a ring (\"frames\"), the most that one user may have: let one end first.", n);
}

static int submit(
        Session *s, Peer *owner, const WireJobOpen *request, const LoraList *loras, Job **ret, Fault *f) {
        Job *j;
        int r;

        r = job_new(s->manager, owner, kind_of(request), &j, f);
        if (r < 0)
                return r;

        j->request = *request;
        j->request.model = s->model->id;
        j->request.session = s->id;
        j->request.n_loras = loras->n;
        for (uint32_t i = 0; i < loras->n; i++)
                j->request.loras[i] = (WireLora){ loras->models[i]->id, loras->strengths[i] };
        j->loras = *loras;
        lora_list_hold(&j->loras);
        if (wire_job_is_coding(request->kind))
                j->request.ranks = s->split.ranks;
        if (request->kind == WIRE_JOB_ENCODE)
                j->request.owner = (uint64_t) s->uid + 1;
        j->step = j->request.start_step;
        j->session = s;
        j->session_id = s->id;
        s->n_busy++;
        j->model = s->model;
        model_user_add(j->model);
        queue_add(s->manager->queue, j);
        *ret = j;
        return 0;
}

int session_submit(Session *s, Peer *owner, const WireJobOpen *request, Job **ret, Fault *f) {
        int r;

        if (s->lora_fault.name[0] != '\0')
                return fault_set(f, -EIO, s->lora_fault.name, "%s", s->lora_fault.text);

        r = check_waiting(s, request, f);
        if (r < 0)
                return r;

        return submit(s, owner, request, &s->loras, ret, f);
}

int session_set_loras(
        Session *s, Peer *owner, const LoraList *loras, WireCompute compute, Job **ret, Fault *f) {
        const WireJobOpen request = { .kind = WIRE_JOB_MERGE, .compute = compute };
        LoraList old = s->loras;
        Job *j;
        int r;

        r = submit(s, owner, &request, loras, &j, f);
        if (r < 0)
                return r;

        s->loras = *loras;
        lora_list_hold(&s->loras);
        lora_list_done(&old);
        s->merge_job = j->id;
        s->lora_fault = (Fault){};
        *ret = j;
        return 0;
}

void session_merge_finished(Session *s, const Job *j) {
        if (s->merge_job == j->id && j->state == JOB_FAILED)
                s->lora_fault = j->fault;
}

static Job *first_uncancelled(const Session *s) {
        Job *j;

        TAILQ_FOREACH(j, &s->manager->unfinished, unfinished_entry)
                if (j->session == s && j->state != JOB_CANCELLING)
                        return j;

        return NULL;
}

void session_close(Session *s) {
        Job *j;

        if (s->state == SESSION_CLOSED)
                return;

        s->state = SESSION_CLOSED;
        s->n_busy++; /* stays whatever the jobs do below */
        while ((j = first_uncancelled(s)))
                job_cancel(j);
        session_job_finished(s);
}

void session_job_finished(Session *s) {
        assert(s->n_busy > 0);

        s->n_busy--;
        if (s->state == SESSION_CLOSED && s->n_busy == 0)
                (void) session_free(s);
}

void session_peer_gone(Peer *p) {
        Session *s, *next;

        for (s = TAILQ_FIRST(&p->manager->sessions); s; s = next) {
                next = TAILQ_NEXT(s, entry);
                if (s->owner != p)
                        continue;

                s->owner = NULL;
                session_close(s); /* frees no other session */
        }
        remains_peer_gone(p);
}
