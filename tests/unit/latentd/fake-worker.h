/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A manager with a worker played by the test itself, in the same thread: it listens on the worker's socket,
 * speaks wire.h and samples with x := x / 2 + 1. Of an adapter it takes the module "applied" and refuses the
 * module "refused". A token is a byte of text, frame i of a film has the value i everywhere. Hooks let it die, lie or
 * keep silent at any message. */

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/queue.h"
#include "service/latentd/session.h"
#include "service/latentd/worker-link-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/memfd.h"
#include "service/shared/safetensors.h"

#define FAKE_BLOCKS 4
#define FAKE_ROWS 300
#define FAKE_HEADS 8
#define ARENA_BYTES 65536
#define VIDEO_FLOATS 24
#define AUDIO_FLOATS 64
#define AUDIO_PLACE 32                        /* in floats: behind the video, at a multiple of 64 bytes */
#define STRIDE ((AUDIO_PLACE + AUDIO_FLOATS) * 4) /* a multiple of 64; of euler */
#define FAKE_MERGED 12345
#define FAKE_TEXT_DIM 4
#define FAKE_TEXT 16                 /* bytes of text */
#define FAKE_FRAME (16 * 16 * 3)     /* bytes of a frame, U8 */
#define FAKE_FRAMES(steps) (17 * (steps) + 5)
#define FAKE_CODED 192               /* where the first result of a film of several chunks lies, behind commit word and slots */

typedef struct FakeJob {
        WireJobOpen open;
        uint32_t steps;
} FakeJob;

typedef struct FakeArena {
        uint64_t session;
        void *map[2];
        uint64_t size[2];
} FakeArena;

typedef struct Fake Fake;
struct Fake {
        char dir[64];
        int listen, conn;
        Manager *m;
        Peer *peer;
        Model *model, *lora; /* a denoiser and an adapter */
        Model *conditioner, *vae, *audio_vae;
        int region_fd;
        Region region;

        /* the worker */
        uint64_t epoch;
        unsigned unacked, unacked_max;
        bool hold_acks;
        FakeJob jobs[32];
        FakeArena arenas[16];
        uint64_t models[64];
        unsigned n_jobs, n_arenas, n_models, n_starts, n_steps;
        unsigned count[WIRE_TYPE_MAX]; /* received, since the test began */
        WirePlan plan;
        uint32_t ranks; /* of WELCOME */
        const char *build_id, *numerics_id;
        const char *no_device; /* why it has none; NULL: it has one */
        bool silent;             /* no HELLO */
        bool all_loras;          /* every model but the first is an adapter */
        uint64_t step_order[64]; /* job of each step that ran */

        /* Sees each message first. True: done with it (no ACK is sent). It may close the connection. */
        bool (*hook)(Fake *f, const WireMessage *m);
        unsigned hook_count; /* for hooks */
};

static inline void fake_send(Fake *f, const WireMessage *m) {
        assert_int_equal(wire_send(f->conn, m, -EBADF), 0);
}

static inline void fake_die(Fake *f) {
        (void) close(STEAL_FD(f->conn));
        f->n_jobs = f->n_models = f->unacked = 0;
        for (unsigned i = 0; i < f->n_arenas; i++)
                for (int k = 0; k < 2; k++)
                        if (f->arenas[i].map[k])
                                (void) munmap(f->arenas[i].map[k], f->arenas[i].size[k]);
        f->n_arenas = 0;
        memset(f->arenas, 0, sizeof(f->arenas));
}

static inline FakeJob *fake_find_job(Fake *f, uint64_t id) {
        for (unsigned i = 0; i < f->n_jobs; i++)
                if (f->jobs[i].open.header.job == id)
                        return &f->jobs[i];
        return NULL;
}

static inline FakeJob *fake_job(Fake *f, uint64_t id) {
        FakeJob *j = fake_find_job(f, id);

        if (j)
                return j;
        fail_msg("job %" PRIu64 " is not open in the worker", id);
        return NULL;
}

static inline char *fake_arena(Fake *f, uint64_t session, int kind) {
        for (unsigned i = 0; i < f->n_arenas; i++)
                if (f->arenas[i].session == session)
                        return f->arenas[i].map[kind];
        fail_msg("session %" PRIu64 " has no arenas in the worker", session);
        return NULL;
}

static inline uint64_t *fake_commit_word(Fake *f, const FakeJob *j) {
        return (uint64_t *) (void *) (fake_arena(f, j->open.session, 1) + j->open.output_offset);
}

/* Where the audio lies in a slot: behind the video, at a multiple of 64 bytes. */
static inline uint64_t fake_audio_place(const WireJobOpen *q) {
        return (q->video.size + 63) / 64 * 64;
}

/* As sampler.h has it. */
static inline uint64_t fake_stride(const WireJobOpen *q) {
        uint64_t audio = (q->audio.size + 63) / 64 * 64, video = fake_audio_place(q);

        if (q->kind != WIRE_JOB_SAMPLE || q->sampler == WIRE_SAMPLER_EULER)
                return video + audio;

        return q->sampler == WIRE_SAMPLER_RES_MULTISTEP ? 2 * video + 3 * audio : 2 * video + 2 * audio;
}

static inline float *fake_slot(Fake *f, const FakeJob *j, uint32_t state) {
        uint32_t n = j->open.kind == WIRE_JOB_STEP           ? 1
                     : (j->open.flags & WIRE_JOB_KEEP_STEPS) ? j->steps + 1
                                                             : 2;

        return (float *) (void *) (fake_arena(f, j->open.session, 1) + j->open.output_offset + 64 +
                                   (state % n) * fake_stride(&j->open));
}

static inline uint32_t fake_steps(const WireJobOpen *q) {
        if (q->kind == WIRE_JOB_DECODE && q->video.n_dims > 0)
                return (uint32_t) (q->video.shape[1] / 5);
        if (q->kind == WIRE_JOB_ENCODE_MEDIA && q->video.n_dims > 0)
                return (uint32_t) ((q->video.shape[0] + 16) / 17);

        return q->kind == WIRE_JOB_SAMPLE ? q->steps : 1;
}

static inline uint64_t fake_frames_done(const WireJobOpen *q, uint32_t steps_done) {
        if (q->kind != WIRE_JOB_DECODE || q->video.n_dims == 0 || steps_done == 0)
                return 0;

        return 17 * (uint64_t) steps_done + (steps_done == fake_steps(q) ? 5 : 0);
}

static inline void fake_add_output(WireJobReady *y, WireOutputName name, StType type, uint32_t n_dims, const uint64_t *shape) {
        WireOutput *o = &y->outputs[y->n_outputs++];

        o->name = name;
        o->tensor = (WireTensor){ .offset = y->commit_offset + y->output_used, .dtype = type, .n_dims = n_dims };
        o->tensor.size = st_type_size(type);
        for (uint32_t i = 0; i < n_dims; i++) {
                o->tensor.shape[i] = shape[i];
                o->tensor.size *= shape[i];
        }
        y->output_used += (o->tensor.size + 63) / 64 * 64;
}

#define FAKE_OUTPUT(y, name, type, ...)                                                                       \
        fake_add_output(y, name, type, sizeof((uint64_t[]){ __VA_ARGS__ }) / 8, (uint64_t[]){ __VA_ARGS__ })

static inline void fake_coding_ready(const WireJobOpen *q, uint32_t committed, WireJobReady *y) {
        uint64_t frames = FAKE_FRAMES((uint64_t) fake_steps(q)), tokens = q->text.size > 0 ? q->text.size : 1;

        y->rows = FAKE_ROWS;
        y->steps = fake_steps(q);
        y->blocks = FAKE_BLOCKS;
        y->committed = committed;
        y->commit_offset = q->output_offset;
        y->output_used = q->kind == WIRE_JOB_DECODE && y->steps > 1 ? FAKE_CODED : 64;
        y->memory_bytes = 4321;

        switch (q->kind) {

        case WIRE_JOB_TOKENIZE:
                y->rows = q->text.size;
                FAKE_OUTPUT(y, WIRE_OUTPUT_IDS, ST_I32, q->text.size);
                break;

        case WIRE_JOB_ENCODE:
                y->rows = tokens;
                FAKE_OUTPUT(y, WIRE_OUTPUT_TEXT, (StType) q->output_type, tokens, FAKE_TEXT_DIM);
                FAKE_OUTPUT(y, WIRE_OUTPUT_TEXT_TAGS, ST_U8, tokens);
                FAKE_OUTPUT(y, WIRE_OUTPUT_IDS, ST_I32, tokens);
                break;

        case WIRE_JOB_DECODE:
                if (q->audio.n_dims > 0) {
                        FAKE_OUTPUT(y, WIRE_OUTPUT_SOUND, ST_F32, 2, q->audio.shape[2] * 800);
                        break;
                }
                if (y->steps > 1) {
                        y->n_slots = 2;
                        y->slot_offset = q->output_offset + 64;
                        y->slot_stride = 64;
                }
                y->frames = frames;
                y->ring_frames = q->ring_frames > 0 && q->ring_frames < frames ? q->ring_frames : frames;
                y->step_frames = 22;
                y->frames_done = fake_frames_done(q, committed);
                FAKE_OUTPUT(y, WIRE_OUTPUT_FRAMES, (StType) q->output_type, y->ring_frames, q->video.shape[2] * 16,
                        q->video.shape[3] * 16, 3);
                break;

        default:
                if (q->audio.n_dims > 0)
                        FAKE_OUTPUT(y, WIRE_OUTPUT_AUDIO, ST_F32, 32, 2, (q->audio.shape[1] + 799) / 800);
                else
                        FAKE_OUTPUT(y, WIRE_OUTPUT_VIDEO, ST_F32, 24, q->video.shape[0] == 1 ? 1 : 5 * (uint64_t) y->steps - 3,
                                q->video.shape[1] / 16, q->video.shape[2] / 16);
                break;
        }
}

/* The answer to a JOB_OPEN, before it is sent: hooks change it into lies. */
static inline void fake_job_ready(Fake *f, const FakeJob *j, uint32_t committed, WireMessage *ret) {
        const WireJobOpen *q = &j->open;
        WireJobReady *y = &ret->job_ready;

        wire_init(ret, WIRE_JOB_READY, f->epoch, q->header.job, 0);
        if (q->kind == WIRE_JOB_MERGE) {
                y->steps = 1;
                return;
        }
        if (wire_job_is_coding(q->kind)) {
                fake_coding_ready(q, committed, y);
                return;
        }

        y->rows = FAKE_ROWS;
        y->steps = j->steps;
        y->blocks = FAKE_BLOCKS;
        y->committed = committed;
        y->n_slots = q->kind == WIRE_JOB_STEP ? 1 : (q->flags & WIRE_JOB_KEEP_STEPS) ? j->steps + 1 : 2;
        y->commit_offset = q->output_offset;
        y->slot_offset = q->output_offset + 64;
        y->slot_stride = fake_stride(q);
        y->output_used = 64 + y->n_slots * y->slot_stride;
        y->video = q->video;
        y->video.offset = 0;
        y->audio = q->audio;
        y->audio.offset = fake_audio_place(q);
        if (q->kind == WIRE_JOB_SAMPLE && q->sampler == WIRE_SAMPLER_RES_MULTISTEP) {
                y->carried = q->audio;
                y->carried.offset = STRIDE;
        }
        if (q->preview_steps > 0) {
                uint64_t size = q->video.size / 96 * 3;

                y->n_outputs = 1;
                y->outputs[0] = (WireOutput){ .name = WIRE_OUTPUT_PREVIEW,
                        .tensor = { .offset = q->output_offset + y->output_used, .size = size, .dtype = ST_U8, .n_dims = 4,
                                .shape = { q->video.shape[1], q->video.shape[2], q->video.shape[3], 3 } } };
                y->output_used += size;
        }
}

static inline bool fake_has_model(const Fake *f, uint64_t id) {
        for (unsigned i = 0; i < f->n_models; i++)
                if (f->models[i] == id)
                        return true;

        return false;
}

/* The latents of the request to a slot. */
static inline void fake_scatter(Fake *f, const WireJobOpen *q, float *slot) {
        const char *input = fake_arena(f, q->session, 0);

        memcpy(slot, input + q->video.offset, q->video.size);
        memcpy((char *) slot + fake_audio_place(q), input + q->audio.offset, q->audio.size);
}

static inline FakeJob *fake_open(Fake *f, const WireJobOpen *q, uint32_t *ret_committed) {
        FakeJob *j = &f->jobs[f->n_jobs++];
        uint32_t epoch, done = q->start_step;

        assert_true(f->n_jobs <= ELEMENTSOF(f->jobs));
        *j = (FakeJob){ .open = *q };
        j->steps = fake_steps(q);
        *ret_committed = done;
        for (uint32_t i = 0; i < q->n_loras; i++)
                assert_true(fake_has_model(f, q->loras[i].model));
        assert_true(fake_has_model(f, q->model));
        assert_non_null(fake_arena(f, q->session, 0));
        if (q->kind == WIRE_JOB_MERGE || (q->flags & WIRE_JOB_PLAN_ONLY))
                return j;

        if (q->flags & WIRE_JOB_RESUME)
                assert_int_equal(wire_commit_unpack(*fake_commit_word(f, j), &epoch, &done), 0);
        else {
                *fake_commit_word(f, j) = 0;
                if (q->kind == WIRE_JOB_SAMPLE)
                        fake_scatter(f, q, fake_slot(f, j, done));
        }
        *fake_commit_word(f, j) = wire_commit_pack((uint32_t) f->epoch, done);
        *ret_committed = done;
        return j;
}

/* The frames of this chunk, or a token for every byte of text. */
static inline void fake_code(Fake *f, FakeJob *j, uint32_t step) {
        char *input = fake_arena(f, j->open.session, 0), *output = fake_arena(f, j->open.session, 1);
        const WireJobOpen *q = &j->open;
        size_t frame = q->video.n_dims > 0 ? q->video.shape[2] * q->video.shape[3] * FAKE_FRAME : 0;
        WireMessage m;

        fake_job_ready(f, j, 0, &m);
        for (uint64_t i = fake_frames_done(q, step); i < fake_frames_done(q, step + 1); i++)
                memset(output + m.job_ready.outputs[0].tensor.offset + i % m.job_ready.ring_frames * frame, (int) i, frame);
        for (uint64_t i = 0; q->kind == WIRE_JOB_TOKENIZE && i < q->text.size; i++)
                ((int32_t *) (void *) (output + m.job_ready.outputs[0].tensor.offset))[i] = input[q->text.offset + i];
}

/* Computes and commits step k without saying so. */
static inline void fake_compute(Fake *f, FakeJob *j, uint32_t step) {
        bool coding = wire_job_is_coding(j->open.kind);
        float *from = coding ? NULL : fake_slot(f, j, step), *to = coding ? NULL : fake_slot(f, j, step + 1);

        if (coding)
                fake_code(f, j, step);
        if (j->open.kind == WIRE_JOB_STEP)
                fake_scatter(f, &j->open, from);
        for (uint64_t i = 0; !coding && i < (fake_audio_place(&j->open) + j->open.audio.size) / 4; i++)
                to[i] = from[i] / 2 + 1;
        __atomic_store_n(
                fake_commit_word(f, j), wire_commit_pack((uint32_t) f->epoch, step + 1), __ATOMIC_RELEASE);
        f->step_order[f->n_steps++ % ELEMENTSOF(f->step_order)] = j->open.header.job;
}

static inline void fake_step_done(Fake *f, uint64_t job, uint32_t step) {
        WireMessage m;

        wire_init(&m, WIRE_STEP_DONE, f->epoch, job, step);
        m.step_done.compute_usec = 1;
        if (fake_find_job(f, job)) {
                const WireJobOpen *q = &fake_find_job(f, job)->open;

                m.step_done.frames = fake_frames_done(q, step + 1);
                m.step_done.preview = q->preview_steps > 0 && (step + 1) % q->preview_steps == 0;
        }
        fake_send(f, &m);
}

/* One of each kind for every adapter. */
static inline void fake_notes(Fake *f, const WireJobOpen *q) {
        WireMessage m;

        wire_init(&m, WIRE_LORA_NOTES, f->epoch, q->header.job, 0);
        for (uint32_t i = 0; i < q->n_loras; i++) {
                m.lora_notes.n = 2;
                for (uint32_t k = 0; k < 2; k++) {
                        WireLoraNote *x = &m.lora_notes.notes[k];

                        x->lora = i;
                        x->refused = k;
                        (void) snprintf(x->name, sizeof(x->name), "%s", k == 0 ? "applied" : "refused");
                        (void) snprintf(x->reason, sizeof(x->reason), "%s", k == 0 ? "" : "The fake worker says no.");
                }
                fake_send(f, &m);
        }
}

static inline void fake_merge_done(Fake *f, const WireJobOpen *q) {
        WireMessage m;

        fake_notes(f, q);
        wire_init(&m, WIRE_STEP_DONE, f->epoch, q->header.job, 0);
        m.step_done.compute_usec = 1;
        m.step_done.merged_bytes = FAKE_MERGED;
        fake_send(f, &m);
}

static inline void fake_progress(Fake *f, uint64_t job, uint32_t step, uint32_t block) {
        WireMessage m;

        wire_init(&m, WIRE_PROGRESS, f->epoch, job, step);
        m.progress.block = block;
        m.progress.blocks = FAKE_BLOCKS;
        fake_send(f, &m);
}

static inline void fake_error(Fake *f, uint64_t id, uint32_t step, const char *name) {
        WireMessage m;

        wire_init(&m, WIRE_ERROR, f->epoch, id, step);
        (void) fault_set(&m.error.fault, -EIO, name, "The fake worker says no.");
        fake_send(f, &m);
}

static inline void fake_describe(const Fake *f, uint64_t id, WireModelReady *ret) {
        const Model *coders[] = { f->conditioner, f->vae, f->audio_vae };

        if (f->all_loras ? id != f->model->id : id == f->lora->id)
                ret->kind = WIRE_MODEL_LORA;
        for (size_t i = 0; i < ELEMENTSOF(coders); i++)
                if (coders[i]->id == id)
                        ret->kind = coders[i]->info.kind;
        if (ret->kind == WIRE_MODEL_CONDITIONER)
                ret->text_dim = FAKE_TEXT_DIM;
        if (ret->kind == WIRE_MODEL_DENOISER) {
                ret->heads = FAKE_HEADS;
                ret->layers = FAKE_BLOCKS;
        }
}

static inline void fake_model_ready(Fake *f, uint64_t id) {
        WireMessage m;

        wire_init(&m, WIRE_MODEL_READY, f->epoch, id, 0);
        fake_describe(f, id, &m.model_ready);
        m.model_ready.weight_bytes = 4096;
        fake_send(f, &m);
        assert_true(f->n_models < ELEMENTSOF(f->models));
        f->models[f->n_models++] = id;
}

static inline void fake_hello(Fake *f) {
        WireMessage m;

        wire_init(&m, WIRE_HELLO, 0, 0, 0);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", f->build_id);
        (void) snprintf(m.hello.backend, sizeof(m.hello.backend), "cpu");
        (void) snprintf(m.hello.numerics_id, sizeof(m.hello.numerics_id), "%s", f->numerics_id);
        m.hello.n_devices = f->no_device ? 0 : 1;
        (void) snprintf(m.hello.reason, sizeof(m.hello.reason), "%s", f->no_device ? f->no_device : "");
        (void) snprintf(m.hello.devices[0].name, sizeof(m.hello.devices[0].name), "fake");
        fake_send(f, &m);
}

static inline void fake_ack(Fake *f, const WireHeader *h) {
        WireMessage m;

        if (f->hold_acks || f->conn < 0)
                return;
        wire_init(&m, WIRE_ACK, f->epoch, h->job, h->step);
        fake_send(f, &m);
        f->unacked--;
}

static inline void fake_ack_all(Fake *f) {
        WireHeader h = {};

        f->hold_acks = false;
        while (f->unacked > 0)
                fake_ack(f, &h);
}

static inline void fake_take_arena(Fake *f, const WireArena *a, int fd) {
        unsigned i;

        for (i = 0; i < f->n_arenas; i++)
                if (f->arenas[i].session == a->header.job)
                        break;
        if (i == f->n_arenas)
                f->n_arenas++;
        f->arenas[i].session = a->header.job;
        f->arenas[i].size[a->kind] = a->size;
        assert_int_equal(memfd_map(fd, a->size, PROT_READ | PROT_WRITE, &f->arenas[i].map[a->kind]), 0);
}

static inline void fake_close_arena(Fake *f, uint64_t session) {
        for (unsigned i = 0; i < f->n_arenas; i++)
                if (f->arenas[i].session == session) {
                        for (int k = 0; k < 2; k++)
                                assert_int_equal(munmap(f->arenas[i].map[k], f->arenas[i].size[k]), 0);
                        f->arenas[i] = f->arenas[--f->n_arenas];
                        return;
                }
        fail_msg("ARENA_CLOSE for a session without arenas");
}

static inline void fake_close_job(Fake *f, uint64_t id) {
        FakeJob *j = fake_job(f, id);

        *j = f->jobs[--f->n_jobs];
}

/* What a good worker does. */
static inline void fake_handle(Fake *f, const WireMessage *m, int fd) {
        const WireHeader *h = &m->header;
        WireMessage reply;
        uint32_t committed;
        FakeJob *j;

        switch ((WireType) h->type) {

        case WIRE_WELCOME:
                f->epoch = h->epoch;
                f->ranks = m->welcome.ranks;
                break;

        case WIRE_MODEL_COMMIT:
                fake_model_ready(f, h->job);
                break;

        case WIRE_MODEL_CLOSE:
                for (unsigned i = 0; i < f->n_models; i++)
                        if (f->models[i] == h->job)
                                f->models[i] = f->models[--f->n_models];
                break;

        case WIRE_ARENA:
                fake_take_arena(f, &m->arena, fd);
                break;

        case WIRE_ARENA_CLOSE:
                fake_close_arena(f, h->job);
                break;

        case WIRE_JOB_OPEN:
                j = fake_open(f, &m->job_open, &committed);
                fake_job_ready(f, j, committed, &reply);
                fake_send(f, &reply);
                break;

        case WIRE_PLAN:
                f->plan = m->plan;
                break;

        case WIRE_STEP:
                j = fake_job(f, h->job);
                assert_false(j->open.flags & WIRE_JOB_PLAN_ONLY);
                if (j->open.kind == WIRE_JOB_MERGE) {
                        fake_merge_done(f, &j->open);
                        break;
                }
                for (uint32_t b = 1; b <= FAKE_BLOCKS; b++)
                        fake_progress(f, h->job, h->step, b);
                fake_compute(f, j, h->step);
                fake_step_done(f, h->job, h->step);
                break;

        case WIRE_JOB_CLOSE:
                fake_close_job(f, h->job);
                break;

        case WIRE_DIE:
                fake_die(f);
                break;

        default:
                break;
        }
}

static inline void fake_take(Fake *f, const WireMessage *m, int fd) {
        if (!f->hook || !f->hook(f, m))
                fake_handle(f, m, fd);
}

/* For hooks it is what it stands for: JOB_OPEN, PLAN and STEP, the latter two if the job is open then. */
static inline void fake_run(Fake *f, const WireMessage *m) {
        static const WireType types[] = { WIRE_JOB_OPEN, WIRE_PLAN, WIRE_STEP };

        for (unsigned i = 0; i < ELEMENTSOF(types); i++) {
                WireMessage part;

                if (f->conn < 0 || (i > 0 && !fake_find_job(f, m->header.job)))
                        return;
                wire_init(&part, types[i], f->epoch, m->header.job, i < 2 ? 0 : m->job_open.start_step);
                if (i == 0)
                        memcpy(part.bytes + sizeof(WireHeader), m->bytes + sizeof(WireHeader),
                                sizeof(WireJobOpen) - sizeof(WireHeader));
                else if (i == 1)
                        memcpy(part.bytes + sizeof(WireHeader), (const uint8_t *) &m->job_run.plan + sizeof(WireHeader),
                                sizeof(WirePlan) - sizeof(WireHeader));
                f->count[types[i]]++;
                fake_take(f, &part, -EBADF);
        }
}

static inline void fake_pump(Fake *f) {
        if (f->conn < 0) {
                f->conn = accept4(f->listen, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
                if (f->conn < 0)
                        return;
                f->n_starts++;
                f->epoch = 0;
                f->unacked = 0;
                if (!f->silent)
                        fake_hello(f);
        }

        while (f->conn >= 0) {
                CLEANUP_CLOSE int fd = -EBADF;
                bool credit;
                WireMessage m;
                Fault fault = {};
                int r;

                r = wire_receive(f->conn, &m, &fd, &fault);
                if (r == -EAGAIN)
                        return;
                if (r <= 0) {
                        assert_int_not_equal(r, -EBADMSG);
                        fake_die(f);
                        return;
                }

                f->count[m.header.type]++;
                credit = m.header.type != WIRE_CANCEL && m.header.type != WIRE_DIE;
                if (credit) {
                        if (++f->unacked > f->unacked_max)
                                f->unacked_max = f->unacked;
                        assert_true(f->unacked <= WIRE_CREDITS);
                }
                if (m.header.type == WIRE_WELCOME)
                        f->epoch = m.header.epoch;
                else
                        assert_int_equal(m.header.epoch,
                                m.header.type == WIRE_DIE && f->epoch == 0 ? m.header.epoch : f->epoch);

                if (m.header.type == WIRE_JOB_RUN)
                        fake_run(f, &m);
                else
                        fake_take(f, &m, fd);
                if (credit)
                        fake_ack(f, &m.header);
        }
}

/* Runs loop and worker until the condition holds. */
#define RUN_UNTIL(f, condition)                                                                             \
        do {                                                                                                \
                uint64_t _end = clock_usec() + 120 * UINT64_C(1000000);                                 \
                while (!(condition)) {                                                                      \
                        assert_true(clock_usec() < _end);                                               \
                        assert_true(sd_event_run((f)->m->event, 2000) >= 0);                                \
                        fake_pump(f);                                                                       \
                }                                                                                           \
        } while (false)

static inline void run_for(Fake *f, uint64_t usec) {
        uint64_t end = clock_usec() + usec;

        while (clock_usec() < end) {
                assert_true(sd_event_run(f->m->event, 1000) >= 0);
                fake_pump(f);
        }
}

static inline Model *fake_model_new(Fake *f, WireModelKind kind) {
        Model *model = calloc(1, sizeof(*model));

        assert_non_null(model);
        *model = (Model){ .id = f->m->next_id++, .manager = f->m, .state = MODEL_READY, .n_parts = 1 };
        model->name = strdup("fake");
        model->tokenizer = strdup("");
        model->parts = calloc(1, sizeof(*model->parts));
        assert_non_null(model->parts);
        model->parts[0] = (ModelPart){ .model = model,
                .name = strdup("fake.safetensors"),
                .fd = -EBADF,
                .size = 4000,
                .region = &f->region };
        model->info.kind = kind;
        model->info.heads = kind == WIRE_MODEL_DENOISER ? FAKE_HEADS : 0;
        model->info.layers = kind == WIRE_MODEL_DENOISER ? FAKE_BLOCKS : 0;
        model->info.text_dim = kind == WIRE_MODEL_CONDITIONER ? FAKE_TEXT_DIM : 0;
        model->info.weight_bytes = 4096;
        TAILQ_INSERT_TAIL(&f->m->models, model, entry);
        return model;
}

/* Not model_free(): its region belongs to the test and not to the store. */
static inline void fake_model_free(Fake *f, Model *model) {
        TAILQ_REMOVE(&f->m->models, model, entry);
        free(model->parts[0].name);
        free(model->parts);
        free(model->name);
        free(model->tokenizer);
        free(model);
}

static inline Peer *fake_peer_new(Fake *f) {
        Peer *p = calloc(1, sizeof(*p));

        assert_non_null(p);
        p->manager = f->m;
        p->uid = getuid();
        p->name = strdup(":test");
        TAILQ_INSERT_TAIL(&f->m->peers, p, entry);
        return p;
}

static inline int fake_setup(void **state) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };
        Fake *f = calloc(1, sizeof(*f));
        Config *c;

        assert_non_null(f);
        f->conn = -EBADF;
        f->build_id = LATENTD_VERSION;
        f->numerics_id = "fake-1";
        (void) snprintf(f->dir, sizeof(f->dir), "/tmp/latentd-test.XXXXXX");
        assert_non_null(mkdtemp(f->dir));
        (void) snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/worker.sock", f->dir);
        f->listen = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_int_equal(bind(f->listen, (struct sockaddr *) &sa, sizeof(sa)), 0);
        assert_int_equal(listen(f->listen, 8), 0);

        assert_int_equal(config_new(&c), 0);
        c->worker_start = WORKER_START_SOCKET;
        c->crash_budget = 0; /* workers die all the time here */
        free(c->worker_socket);
        c->worker_socket = strdup(sa.sun_path);
        assert_int_equal(manager_new(c, true, NULL, &f->m), 0);
        f->peer = fake_peer_new(f);

        assert_int_equal(memfd_new("test-region", 8192, &f->region_fd), 0);
        f->region = (Region){ .n_ref = 1, .state = REGION_COMPLETE, .fd = f->region_fd, .size = 8192 };
        f->model = fake_model_new(f, WIRE_MODEL_DENOISER);
        f->lora = fake_model_new(f, WIRE_MODEL_LORA);
        f->conditioner = fake_model_new(f, WIRE_MODEL_CONDITIONER);
        f->vae = fake_model_new(f, WIRE_MODEL_VIDEO_VAE);
        f->audio_vae = fake_model_new(f, WIRE_MODEL_AUDIO_VAE);
        f->conditioner->keep = f->vae->keep = f->audio_vae->keep = true; /* none of them gives way to another model */
        *state = f;
        return 0;
}

static inline int fake_teardown(void **state) {
        Fake *f = *state;
        char path[128];

        f->hook = NULL;
        f->silent = false;
        if (f->conn >= 0)
                fake_die(f);
        (void) close(f->listen);
        while (f->peer && !TAILQ_EMPTY(&f->m->peers))
                peer_gone(TAILQ_FIRST(&f->m->peers));
        while (!TAILQ_EMPTY(&f->m->sessions) || !TAILQ_EMPTY(&f->m->jobs))
                (void) sd_event_run(f->m->event, 2000);
        for (size_t i = 0; i < 5; i++) {
                Model *models[] = { f->model, f->lora, f->conditioner, f->vae, f->audio_vae };

                assert_int_equal(models[i]->n_users, 0);
                fake_model_free(f, models[i]);
        }
        f->m = manager_free(f->m);
        (void) close(f->region_fd);
        (void) snprintf(path, sizeof(path), "%s/worker.sock", f->dir);
        (void) unlink(path);
        assert_int_equal(rmdir(f->dir), 0);
        free(f);
        return 0;
}

typedef struct Opened {
        Session *session;
        Fault fault;
        unsigned calls;
} Opened;

static inline void fake_on_opened(void *userdata, Session *s, const Fault *fault) {
        Opened *o = userdata;

        o->session = s;
        if (fault)
                o->fault = *fault;
        o->calls++;
}

static inline Session *fake_session_with(Fake *f, const SessionOptions *options, float start) {
        SessionOptions o = *options;
        Fault fault = {};
        Opened opened = {};
        float *map;

        assert_int_equal(session_new(f->m, f->peer, &o, fake_on_opened, &opened, &fault), 0);
        assert_int_equal(opened.calls, 0);
        while (opened.calls == 0)
                assert_true(sd_event_run(f->m->event, 2000) >= 0);
        assert_non_null(opened.session);
        assert_int_equal(
                memfd_map(opened.session->input_fd, ARENA_BYTES, PROT_READ | PROT_WRITE, (void **) &map), 0);
        for (int i = 0; i < VIDEO_FLOATS + AUDIO_FLOATS; i++)
                map[i] = start + (float) i;
        (void) munmap(map, ARENA_BYTES);
        return opened.session;
}

/* A session with recognisable input: element i of video and audio is start + i. */
static inline Session *fake_session_on(Fake *f, Model *model, float start) {
        const SessionOptions o = { .model = model, .input_bytes = ARENA_BYTES, .output_bytes = ARENA_BYTES, .job_class = "normal" };

        return fake_session_with(f, &o, start);
}

static inline Session *fake_session(Fake *f, float start) {
        return fake_session_on(f, f->model, start);
}

/* place: which part of the output arena it uses, 0 to 3. */
static inline WireJobOpen fake_request(WireJobKind kind, uint32_t steps, unsigned place) {
        WireJobOpen q = {
                .kind = kind,
                .steps = kind == WIRE_JOB_SAMPLE ? steps : 0,
                .schedule = kind == WIRE_JOB_SAMPLE ? WIRE_SCHEDULE_SIMPLE : WIRE_SCHEDULE_GIVEN,
                .output_offset = place * UINT64_C(16384),
                .output_size = 16384,
                .video = { .offset = 0,
                        .size = VIDEO_FLOATS * 4,
                        .dtype = ST_F32,
                        .n_dims = 4,
                        .shape = { VIDEO_FLOATS, 1, 1, 1 } },
                .audio = { .offset = VIDEO_FLOATS * 4,
                        .size = AUDIO_FLOATS * 4,
                        .dtype = ST_F32,
                        .n_dims = 3,
                        .shape = { 32, 2, 1 } },
                .text = { .offset = 4096, .size = 16, .dtype = ST_BF16, .n_dims = 2, .shape = { 2, 4 } },
        };

        return q;
}

static inline Job *fake_submit(Fake *f, Session *s, WireJobKind kind, uint32_t steps, unsigned place) {
        WireJobOpen q = fake_request(kind, steps, place);
        Fault fault = {};
        Job *j;

        assert_int_equal(session_check_request(s, &q, &fault), 0);
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        return j;
}

/* A film of so many chunks: FAKE_FRAMES of them, which take the arena; ring: frames, 0: all. */
static inline WireJobOpen fake_decode(uint32_t steps, uint64_t ring) {
        uint64_t t = 5 * (uint64_t) steps + 2;

        return (WireJobOpen){
                .kind = WIRE_JOB_DECODE,
                .output_size = ARENA_BYTES,
                .output_type = ST_U8,
                .ring_frames = ring,
                .video = { .size = 96 * t, .dtype = ST_F32, .n_dims = 4, .shape = { 24, t, 1, 1 } },
        };
}

static inline WireJobOpen fake_coding(WireJobKind kind, unsigned place) {
        return (WireJobOpen){
                .kind = kind,
                .output_offset = place * UINT64_C(16384),
                .output_size = 16384,
                .output_type = kind == WIRE_JOB_ENCODE ? ST_BF16 : 0,
                .text = { .offset = 1, .size = FAKE_TEXT, .dtype = ST_U8, .n_dims = 1, .shape = { FAKE_TEXT } },
        };
}

static inline Job *fake_submit_request(Fake *f, Session *s, const WireJobOpen *q) {
        Fault fault = {};
        Job *j;

        assert_int_equal(session_check_request(s, q, &fault), 0);
        assert_int_equal(session_submit(s, f->peer, q, &j, &fault), 0);
        return j;
}

/* The result lies where the job says and is what `steps` steps make of the input. */
static inline void assert_result(Session *s, const Job *j, float start, unsigned steps) {
        const char *output = s->output_map;

        assert_int_equal(j->state, JOB_DONE);
        for (uint32_t k = 0; k < 2; k++) {
                WireTensor t;
                char name[32];
                const float *x;

                assert_int_equal(job_result_tensor(j, k, name, &t), 0);
                assert_true(t.offset + t.size <= ARENA_BYTES);
                x = (const float *) (const void *) (output + t.offset);
                for (unsigned i = 0; i < t.size / 4; i++) {
                        float want = start + (float) (i + k * VIDEO_FLOATS);

                        for (unsigned n = 0; n < steps; n++)
                                want = want / 2 + 1;
                        assert_memory_equal(&x[i], &want, sizeof(want));
                }
        }
}
