/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/session.h"

#include <assert.h>
#include <fcntl.h>
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

static void release_models(Session *s) {
        Model *models[] = { s->model, s->conditioner, s->video_vae, s->audio_vae };

        for (size_t i = 0; i < ELEMENTSOF(models); i++)
                if (models[i])
                        model_user_remove(models[i]);
}

/* Its memory is that of others. */
static void alias_free(Session *s) {
        Session *from = s->from, *to = s->to;

        if (s->output_map)
                (void) munmap(s->output_map, s->output_bytes);
        cleanup_closep(&s->input_fd);
        cleanup_closep(&s->output_fd);
        free(s);
        session_job_finished(from);
        session_job_finished(to);
}

uint64_t session_bytes(const Session *s) {
        return s->form == SESSION_ALIAS ? 0 : s->form == SESSION_WORK ? s->output_bytes : s->input_bytes + s->output_bytes;
}

bool session_uses(const Session *s, const Model *m) {
        return s->model == m || s->conditioner == m || s->video_vae == m || s->audio_vae == m || lora_list_has(&s->loras, m);
}

Session *session_free(Session *s) {
        Manager *m;

        if (!s)
                return NULL;

        m = s->manager;
        TAILQ_REMOVE(&m->sessions, s, entry);
        if (m->worker)
                worker_link_forget_session(m->worker, s);
        release_models(s);
        lora_list_done(&s->loras);
        if (s->form == SESSION_ALIAS) {
                alias_free(s);
                return NULL;
        }

        *s->remains = (Remains){
                .uid = s->uid,
                .owner = s->owner,
                .input_fd = s->form == SESSION_WORK ? -EBADF : s->input_fd,
                .output_fd = s->output_fd,
                .map = s->output_map,
                .input_bytes = s->form == SESSION_WORK ? 0 : s->input_bytes,
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
                        return s->state == SESSION_OPEN && s->form == SESSION_CLIENT ? s : NULL;

        return NULL;
}

int session_path(const Session *s, char **ret) {
        char *p;

        if (asprintf(&p, BUS_ROOT "/session/%" PRIu64, s->id) < 0)
                return -ENOMEM;

        *ret = p;
        return 0;
}

/* So much at a time: a session that was closed meanwhile is gone within that, some tenths of a second. */
#define POPULATE_BYTES (UINT64_C(256) << 20)

static int populate_one(const Session *s, int fd, uint64_t size) {
        void *map;
        int r;

        r = memfd_map(fd, size, PROT_READ | PROT_WRITE, &map);
        if (r < 0)
                return r;

        for (uint64_t at = 0, n; r >= 0 && at < size; at += n) {
                n = size - at < POPULATE_BYTES ? size - at : POPULATE_BYTES;
                r = s->unwanted ? -ECANCELED : memory_populate((char *) map + at, n);
        }
        (void) munmap(map, size);
        return r;
}

/* On a pool thread. The loop does not touch the fields used here before populate_done(). */
static int populate(void *userdata) {
        Session *s = userdata;
        int r;

        if (s->form == SESSION_CLIENT) {
                r = populate_one(s, s->input_fd, s->input_bytes);
                if (r < 0)
                        return r;
        }

        r = s->bare ? 0 : populate_one(s, s->output_fd, s->output_bytes);
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

        if (result < 0 && result != -ECANCELED)
                (void) fault_set(&f, result, result == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "Arenas of %" PRIu64 " + %" PRIu64 " bytes could not be populated: %s.",
                        s->input_bytes, s->output_bytes, strerror(-result));
        else
                (void) fault_set(
                        &f, -ECANCELED, FAULT_CANCELLED, "The session was closed while it was opened.");

        fn(s->open_userdata, NULL, &f);
        (void) session_free(s);
}

/* Asks the machine for room. Regions that nobody uses give way, then weights that come back when they are needed. */
static int admit(Manager *m, uint64_t bytes, Fault *f) {
        MemoryHeadroom h;
        uint64_t freed;
        int r;

        r = manager_headroom(m, &h);
        if (r < 0)
                return r;

        freed = store_leaving(m->store);
        if (bytes > h.bytes && bytes - h.bytes > freed)
                freed += store_evict(m->store, bytes - h.bytes - freed);
        while (bytes > h.bytes && bytes - h.bytes > freed && model_deferred_gives_way(m, NULL))
                freed = store_leaving(m->store);
        if (bytes > h.bytes && bytes - h.bytes > freed)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "Arenas of %" PRIu64 " bytes do not fit: %" PRIu64
                        " bytes may be taken now (limit: %s). Ask for smaller arenas, "
                        "close sessions or unload models.",
                        bytes, h.bytes + freed, h.limit);

        return 0;
}

/* As many bytes as the user and the machine have. */
static int check_room(Manager *m, uid_t uid, SessionForm form, uint64_t bytes, Fault *f) {
        int r;

        remains_collect(m);
        r = form == SESSION_CLIENT ? quota_check_session(m, uid, bytes, f) : quota_check_arena(m, uid, bytes, f);
        if (r >= 0)
                r = descriptors_check("A session", f);
        if (r >= 0)
                r = admit(m, bytes, f);
        return r;
}

/* In the list, counted, without memory yet. */
static int make(Manager *m, Peer *owner, uid_t uid, SessionForm form, const SessionOptions *o, Session **ret) {
        CLEANUP_FREE Remains *remains = NULL;
        Session *s;

        remains = malloc(sizeof(*remains));
        if (!remains)
                return -ENOMEM;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        *s = (Session){
                .id = m->next_id++,
                .manager = m,
                .form = form,
                .owner = owner,
                .uid = uid,
                .compute = o->compute,
                .split = o->split,
                .sparse = o->sparse,
                .input_bytes = o->input_bytes,
                .output_bytes = o->output_bytes,
                .input_fd = -EBADF,
                .output_fd = -EBADF,
                .remains = STEAL_PTR(remains),
        };
        (void) snprintf(s->job_class, sizeof(s->job_class), "%s", o->job_class);
        m->arena_bytes += session_bytes(s);
        manager_used_changed(m);
        TAILQ_INSERT_TAIL(&m->sessions, s, entry);
        *ret = s;
        return 0;
}

/* Has the arenas populated; s is populate_done()'s then. */
static int start_populating(Session *s, SessionOpenFn fn, void *userdata) {
        int r;

        s->open_fn = fn;
        s->open_userdata = userdata;
        r = pool_submit(s->manager->pool, populate, populate_done, s);
        if (r < 0)
                return r;

        s->n_busy++;
        return 0;
}

static void hold_models(Session *s, const SessionOptions *o) {
        Model *models[] = { o->model, o->conditioner, o->video_vae, o->audio_vae };

        for (size_t i = 0; i < ELEMENTSOF(models); i++)
                if (models[i])
                        model_user_add(models[i]);
        s->model = o->model;
        s->conditioner = o->conditioner;
        s->video_vae = o->video_vae;
        s->audio_vae = o->audio_vae;
}

int session_new(
        Manager *m, Peer *owner, const SessionOptions *o, SessionOpenFn fn, void *userdata, Fault *f) {
        CLEANUP(session_freep) Session *s = NULL;
        uint64_t bytes;
        int r;

        if (__builtin_add_overflow(o->input_bytes, o->output_bytes, &bytes))
                return fault_set(f, -EOVERFLOW, FAULT_INVALID_ARGUMENT, "The sizes of the arenas overflow.");

        r = check_room(m, owner->uid, SESSION_CLIENT, bytes, f);
        if (r >= 0)
                r = make(m, owner, owner->uid, SESSION_CLIENT, o, &s);
        if (r < 0)
                return r;
        hold_models(s, o);

        r = memfd_new("latentd-input", s->input_bytes, &s->input_fd);
        if (r < 0)
                return r;

        r = memfd_new("latentd-output", s->output_bytes, &s->output_fd);
        if (r < 0)
                return r;

        r = start_populating(s, fn, userdata);
        if (r < 0)
                return r;

        s = NULL; /* populate_done() has it now */
        return 0;
}

int session_new_work(Manager *m, uid_t uid, uint64_t bytes, bool bare, SessionOpenFn fn, void *userdata, Session **ret, Fault *f) {
        const SessionOptions o = { .input_bytes = bytes, .output_bytes = bytes, .job_class = "normal" };
        CLEANUP(session_freep) Session *s = NULL;
        int r;

        r = check_room(m, uid, SESSION_WORK, bytes, f);
        if (r >= 0)
                r = make(m, NULL, uid, SESSION_WORK, &o, &s);
        if (r < 0)
                return r;

        r = memfd_new("latentd-work", bytes, &s->output_fd);
        if (r < 0)
                return r;
        s->input_fd = s->output_fd;
        s->bare = bare;

        r = start_populating(s, fn, userdata);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(s);
        return 0;
}

int session_new_alias(Session *from, Session *to, bool from_output, Session **ret) {
        Session *s;
        int r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        *s = (Session){
                .id = from->manager->next_id++,
                .manager = from->manager,
                .state = SESSION_OPEN,
                .form = SESSION_ALIAS,
                .uid = from->uid,
                .from = from,
                .to = to,
                .input_bytes = from_output ? from->output_bytes : from->input_bytes,
                .output_bytes = to->output_bytes,
                .input_fd = fcntl(from_output ? from->output_fd : from->input_fd, F_DUPFD_CLOEXEC, 3),
                .output_fd = fcntl(to->output_fd, F_DUPFD_CLOEXEC, 3),
        };
        r = s->input_fd < 0 || s->output_fd < 0 ? -errno : memfd_map(s->output_fd, s->output_bytes, PROT_READ, &s->output_map);
        TAILQ_INSERT_TAIL(&s->manager->sessions, s, entry);
        from->n_busy++;
        to->n_busy++;
        if (r < 0) {
                (void) session_free(s);
                return r;
        }

        *ret = s;
        return 0;
}

static void nobody_waits(void *userdata, Session *s, const Fault *f) {
}

void session_forget(Session *s) {
        s->open_fn = nobody_waits;
        session_close(s);
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

int session_check_inputs(const Session *s, const WireJobOpen *q, Fault *f) {
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

        return 0;
}

int session_check_request(const Session *s, const WireJobOpen *q, Fault *f) {
        int r;

        r = session_check_inputs(s, q, f);
        return r < 0 ? r : check_output(s, q, f);
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

        if (s->model->state != MODEL_READY)
                return fault_set(f, -EBUSY, FAULT_BUSY,
                        "The session's model is %s: only Render loads a deferred model, when it needs it. For %s load it with LoadModel, "
                        "or Commit, without \"defer\".",
                        model_state_to_string(s->model->state), job_rules[kind].method);

        if (has == job_rules[kind].kinds[0] || has == job_rules[kind].kinds[1])
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "The session's model is of kind \"%s\", %s needs %s: use such a model.", model_kind_to_string(has),
                job_rules[kind].method, job_rules[kind].needs);
}

/* A job that waits for its reader stays open in the worker, outside of the queue's window: not any number of them. */
int session_check_rings(const Session *s, Fault *f) {
        const Job *j;
        unsigned n = 0;

        TAILQ_FOREACH(j, &s->manager->unfinished, unfinished_entry)
                n += j->uid == s->uid && (j->kind == JOB_DECODE || j->kind == JOB_RENDER) && !j->hidden && j->request.ring_frames > 0;
        if (n < RING_JOBS_MAX)
                return 0;

        return fault_set(f, -EDQUOT, FAULT_LIMIT,
                "You have %u unfinished Decode and Render jobs with a ring, the most that one user may have: let one end first.", n);
}

/* Queues a new job. */
static void queue_job(Session *s, Model *model, const WireJobOpen *request, const LoraList *loras, Job *j) {
        j->request = *request;
        j->request.model = model->id;
        j->request.session = s->id;
        j->request.n_loras = loras->n;
        for (uint32_t i = 0; i < loras->n; i++)
                j->request.loras[i] = (WireLora){ loras->models[i]->id, loras->strengths[i] };
        j->loras = *loras;
        lora_list_hold(&j->loras);
        if (request->kind == WIRE_JOB_ENCODE)
                j->request.owner = (uint64_t) s->uid + 1;
        j->step = j->request.start_step;
        j->session = s;
        j->session_id = s->id;
        s->n_busy++;
        j->model = model;
        model_user_add(j->model);
        queue_add(s->manager->queue, j);
}

static int submit(
        Session *s, Peer *owner, const WireJobOpen *request, const LoraList *loras, Job **ret, Fault *f) {
        int r;

        r = job_new(s->manager, owner, kind_of(request), ret, f);
        if (r < 0)
                return r;

        queue_job(s, s->model, request, loras, *ret);
        return 0;
}

int session_submit_hidden(Session *s, Model *model, const WireJobOpen *request, const LoraList *loras, Render *render, Job **ret) {
        static const LoraList none;
        int r;

        r = job_new_hidden(s->manager, s->uid, kind_of(request), ret);
        if (r < 0)
                return r;

        (*ret)->render = render;
        queue_job(s, model, request, loras ? loras : &none, *ret);
        return 0;
}

int session_submit(Session *s, Peer *owner, const WireJobOpen *request, Job **ret, Fault *f) {
        int r;

        if (s->lora_fault.name[0] != '\0')
                return fault_set(f, -EIO, s->lora_fault.name, "%s", s->lora_fault.text);

        r = request->ring_frames > 0 && !(request->flags & WIRE_JOB_PLAN_ONLY) ? session_check_rings(s, f) : 0;
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
        s->unwanted = true;
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
                session_close(s); /* frees no other session but those of its Renders */
                next = TAILQ_FIRST(&p->manager->sessions);
        }
        remains_peer_gone(p);
}
