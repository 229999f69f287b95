/* SPDX-License-Identifier: Apache-2.0 */
/* Input: what a broker sends. The worker's message handling (link, models, arenas, jobs, steps) runs on it in this process until the end of
 * the messages; what it answers must be valid messages of a worker. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "service/worker/worker.c" /* its state, to begin each input with an empty worker */

#include "service/shared/memfd.h"
#include "service/shared/safetensors.h"
#include "tests/fuzz/target.h"
#include "tests/fuzz/wire-input.h"

#define MESSAGES_MAX 24 /* as many as a socket takes */
#define STEPS_MAX 3     /* each computes */
#define ARENA_BYTES 65536
#define EPOCH 7

enum {
        OP_MESSAGE,  /* type, id, step, changes */
        OP_RAW,      /* bytes, with or without a descriptor */
        OP_LIFE,     /* a whole model, session and job as it should be, from where the input goes on */
        OP_SCRIBBLE, /* the client writes into the input arena */
        OP_MAX,
        OP_CODING = 0xf0, /* this and above: a conditioner or VAE, session, coding job with changes, one STEP */
};

/* What a REGION holds: the tiny model, or with this variant an adapter for it. */
#define VARIANT_ADAPTER 0x4c

/* What a JOB_OPEN asks for beside a step or a sample: the upper bits of its variant. */
enum {
        TASK_PLAIN,
        TASK_CONDITIONS,
        TASK_MASKS,
        TASK_CARRIED,
        TASK_NOISE,
        TASK_SLOTS,
        TASK_LORA,
        TASK_MERGE,
};

typedef struct ModelFile {
        int fd;
        uint64_t size;
} ModelFile;

#define PARTS_MAX 6

/* The files of the models for coding, below the demo model; made once each. */
typedef struct Part {
        const char *names[PARTS_MAX];
        ModelFile files[PARTS_MAX];
} Part;

static Part parts[] = {
        {.names = {"text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/vocab.json", "tokenizer/merges.txt",
                   "tokenizer/tokenizer_config.json"}},
        {.names = {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}},
        {.names = {"audio_vae/config.json", "audio_vae/diffusion_pytorch_model.safetensors"}},
};

/* Which job of OP_CODING: the lower bits of its variant. */
enum {
        CODING_TOKENIZE,
        CODING_ENCODE,
        CODING_PICTURES,
        CODING_DECODE_VIDEO,
        CODING_DECODE_AUDIO,
        CODING_ENCODE_VIDEO,
        CODING_ENCODE_AUDIO,
        CODING_MAX,
};

static ModelFile model = { .fd = -EBADF }, adapter = { .fd = -EBADF };
static int arena_fds[2] = { -EBADF, -EBADF };
static uint8_t *input_arena, *output_arena;
static bool planned; /* a coding job of this input is only planned: it says how much there had to be */

static ModelFile read_file(const char *name) {
        const char *folder = getenv("LATENT_TEST_DATA");
        ModelFile x = {};
        char path[4096];
        struct stat st;
        uint64_t region_size;
        void *map;
        FILE *file;

        (void) snprintf(path, sizeof(path), "%s/%s", folder ? folder : "tests/data", name);
        file = fopen(path, "re");
        CHECK(file && fstat(fileno(file), &st) == 0);
        x.size = (uint64_t) st.st_size;
        region_size = (x.size + 4095) / 4096 * 4096;
        CHECK(memfd_new("fuzz-model", region_size, &x.fd) == 0);
        CHECK(memfd_map(x.fd, region_size, PROT_READ | PROT_WRITE, &map) == 0);
        CHECK(fread(map, 1, x.size, file) == x.size);
        CHECK(munmap(map, region_size) == 0);
        (void) fclose(file);
        return x;
}

static void make_memory(void) {
        model = read_file("dit/comfy.safetensors");
        adapter = read_file("dit/lora/lora_comfy.safetensors");
        for (int i = 0; i < 2; i++)
                CHECK(memfd_new("fuzz-arena", ARENA_BYTES, &arena_fds[i]) == 0);
        CHECK(memfd_map(arena_fds[0], ARENA_BYTES, PROT_READ | PROT_WRITE, (void **) &input_arena) == 0);
        CHECK(memfd_map(arena_fds[1], ARENA_BYTES, PROT_READ | PROT_WRITE, (void **) &output_arena) == 0);
}

static void make_part(Part *p) {
        char name[256];

        for (unsigned i = 0; i < PARTS_MAX && p->names[i]; i++) {
                (void) snprintf(name, sizeof(name), "../demo-model/%s", p->names[i]);
                if (p->files[i].size == 0)
                        p->files[i] = read_file(name);
        }
}

static WireTensor tensor(StType type, uint32_t n_dims, uint64_t offset, const uint64_t *shape) {
        WireTensor t = { .offset = offset, .size = st_type_size(type), .dtype = (uint32_t) type, .n_dims = n_dims };

        for (uint32_t i = 0; i < n_dims; i++) {
                t.shape[i] = shape[i];
                t.size *= shape[i];
        }
        return t;
}

static WireTensor bytes(uint32_t n_dims, uint64_t offset, uint64_t a, uint64_t b) {
        return tensor(ST_U8, n_dims, offset, (uint64_t[]){ a, b });
}

static void fill_task(WireJobOpen *j, unsigned task) {
        bool sample = j->kind == WIRE_JOB_SAMPLE;

        switch (task) {

        case TASK_CONDITIONS:
                j->condition_noise = WIRE_NOISE_DIFFUSERS;
                j->seed = 42;
                j->n_conditions = 2;
                j->conditions[0] = (WireCondition){
                        .kind = WIRE_CONDITION_KEYFRAME, .frame = 4, .video_offset = 20480, .frames = 1, .height = 4, .width = 4 };
                j->conditions[1] = (WireCondition){ .kind = WIRE_CONDITION_AUDIO, .audio_offset = 20480, .audio = 3 };
                break;

        case TASK_MASKS:
                j->mask_video = tensor(ST_F32, 3, 24576, (uint64_t[]){ 2, 4, 4 });
                j->mask_audio = tensor(ST_F32, 3, 26624, (uint64_t[]){ 32, 2, 8 });
                if (sample) {
                        j->clean_video = j->video;
                        j->clean_audio = j->audio;
                }
                break;

        case TASK_CARRIED:
                j->sampler = sample ? WIRE_SAMPLER_RES_MULTISTEP : 0;
                break;

        case TASK_NOISE:
                j->sampler = sample ? WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM : 0;
                j->noise = sample ? WIRE_NOISE_COMFY : 0;
                j->seed = 7;
                break;

        case TASK_SLOTS:
                j->start_step = sample ? 1 : 0;
                j->slot = sample ? bytes(1, 32768, 5120, 0) : (WireTensor){};
                if (j->flags & WIRE_JOB_KEEP_STEPS)
                        j->kept = bytes(2, 40960, 1, 5120);
                break;

        case TASK_MERGE:
                j->kind = WIRE_JOB_MERGE;
                j->flags = 0;
                /* fall through */
        case TASK_LORA:
                j->n_loras = 2;
                j->loras[0] = (WireLora){ 4, 1 };
                j->loras[1] = (WireLora){ 4, -0.5 };
                break;

        default:
                break;
        }
}

/* A message as a good broker sends it, of model, session or job `id`; changes come later. */
static void fill(WireMessage *m, WireType type, uint64_t id, uint32_t step, uint8_t variant) {
        wire_init(m, type, EPOCH, id, step);

        switch (type) {

        case WIRE_WELCOME:
                m->welcome.ranks = m->welcome.threads = 1;
                break;

        case WIRE_MODEL_OPEN:
                m->model_open.n_files = 1;
                break;

        case WIRE_REGION:
                m->region.size = variant == VARIANT_ADAPTER ? adapter.size : model.size;
                m->region.region_size = (m->region.size + 4095) / 4096 * 4096;
                (void) snprintf(m->region.name, sizeof(m->region.name), "comfy.safetensors");
                break;

        case WIRE_ARENA:
                m->arena.size = ARENA_BYTES;
                m->arena.kind = variant & 1;
                break;

        case WIRE_JOB_OPEN:
        case WIRE_JOB_RUN:
                m->job_open.model = 1;
                m->job_open.session = 2;
                m->job_open.kind = variant & 1;
                m->job_open.compute = (variant >> 1) % 3;
                m->job_open.schedule = (variant & 1) ? WIRE_SCHEDULE_SIMPLE : WIRE_SCHEDULE_GIVEN;
                m->job_open.steps = (variant & 1) ? 2 : 0;
                m->job_open.flags = (variant >> 3) & 3;
                m->job_open.shift_video = 12;
                m->job_open.shift_audio = 3;
                m->job_open.sigma_video = m->job_open.sigma_audio = 0.5f;
                m->job_open.output_size = ARENA_BYTES;
                m->job_open.text = tensor(ST_BF16, 2, 0, (uint64_t[]){ 9, 160 });
                m->job_open.video = tensor(ST_F32, 4, 4096, (uint64_t[]){ 24, 2, 4, 4 });
                m->job_open.audio = tensor(ST_F32, 3, 16384, (uint64_t[]){ 32, 2, 8 });
                fill_task(&m->job_open, variant >> 5);
                if (type == WIRE_JOB_RUN) {
                        m->job_run.plan.ranks = m->job_run.plan.chunks = 1;
                        m->job_run.plan.row_tile = 128;
                        m->job_run.plan.kind = WIRE_PLAN_HIDDEN_GATHER;
                        m->job_run.plan.exchange = WIRE_EXCHANGE_HOST;
                        m->job_run.plan.rows[0].end = 33;
                        m->job_run.plan.heads[0].end = 8;
                }
                break;

        case WIRE_PLAN:
                m->plan.ranks = m->plan.chunks = 1;
                m->plan.row_tile = 128;
                m->plan.kind = WIRE_PLAN_HIDDEN_GATHER;
                m->plan.exchange = WIRE_EXCHANGE_HOST;
                m->plan.rows[0].end = variant; /* what JOB_READY says is 9 + 8 + 16 rows and the like */
                m->plan.heads[0].end = 8;
                break;

        default:
                break;
        }
}

static int fd_for(WireType type, const WireMessage *m, uint8_t variant) {
        if (type == WIRE_REGION)
                return variant == VARIANT_ADAPTER ? adapter.fd : model.fd;
        return type == WIRE_ARENA ? arena_fds[m->arena.kind & 1] : -EBADF;
}

static bool put(int fd, const void *bytes, size_t n, int passed) {
        union {
                char bytes[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control = {};
        struct iovec iov = { .iov_base = (void *) bytes, .iov_len = n };
        struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };

        if (passed >= 0) {
                struct cmsghdr *c;

                h.msg_control = control.bytes;
                h.msg_controllen = sizeof(control.bytes);
                c = CMSG_FIRSTHDR(&h);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(sizeof(int));
                memcpy(CMSG_DATA(c), &passed, sizeof(passed));
        }

        return sendmsg(fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

static bool say(int fd, WireType type, uint64_t id, uint32_t step, uint8_t variant) {
        WireMessage m;

        fill(&m, type, id, step, variant);
        return put(fd, &m, m.header.size, fd_for(type, &m, variant));
}

static bool put_life(int fd, uint8_t variant) {
        if (variant >> 5 >= TASK_LORA &&
            !(say(fd, WIRE_MODEL_OPEN, 4, 0, 0) && say(fd, WIRE_REGION, 4, 0, VARIANT_ADAPTER) && say(fd, WIRE_MODEL_COMMIT, 4, 0, 0)))
                return false;
        return say(fd, WIRE_MODEL_OPEN, 1, 0, 0) && say(fd, WIRE_REGION, 1, 0, 0) && say(fd, WIRE_MODEL_COMMIT, 1, 0, 0) &&
               say(fd, WIRE_ARENA, 2, 0, 0) && say(fd, WIRE_ARENA, 2, 0, 1) && say(fd, WIRE_JOB_OPEN, 3, 0, variant);
}

static bool put_part(int fd, Part *p) {
        WireMessage m;

        make_part(p);
        wire_init(&m, WIRE_MODEL_OPEN, EPOCH, 1, 0);
        while (m.model_open.n_files < PARTS_MAX && p->names[m.model_open.n_files])
                m.model_open.n_files++;
        if (!put(fd, &m, m.header.size, -EBADF))
                return false;

        for (unsigned i = 0; i < PARTS_MAX && p->names[i]; i++) {
                wire_init(&m, WIRE_REGION, EPOCH, 1, 0);
                m.region.index = i;
                m.region.size = p->files[i].size;
                m.region.region_size = (m.region.size + 4095) / 4096 * 4096;
                (void) snprintf(m.region.name, sizeof(m.region.name), "%s", strrchr(p->names[i], '/') + 1);
                if (!put(fd, &m, m.header.size, p->files[i].fd))
                        return false;
        }
        return say(fd, WIRE_MODEL_COMMIT, 1, 0, 0) && say(fd, WIRE_ARENA, 2, 0, 0) && say(fd, WIRE_ARENA, 2, 0, 1);
}

static void fill_coding(WireJobOpen *j, unsigned what) {
        static const uint32_t kinds[] = {
                WIRE_JOB_TOKENIZE, WIRE_JOB_ENCODE, WIRE_JOB_ENCODE, WIRE_JOB_DECODE, WIRE_JOB_DECODE,
                WIRE_JOB_ENCODE_MEDIA, WIRE_JOB_ENCODE_MEDIA,
        };

        j->model = 1;
        j->session = 2;
        j->kind = kinds[what];
        j->output_size = ARENA_BYTES;
        if (what <= CODING_PICTURES)
                j->text = bytes(1, 7, 40, 0);
        if (what == CODING_ENCODE || what == CODING_PICTURES) {
                j->output_type = what == CODING_ENCODE ? ST_F32 : ST_BF16;
                j->owner = 5;
        }
        if (what == CODING_PICTURES) {
                j->n_conditions = 2;
                j->conditions[0] = (WireCondition){
                        .kind = WIRE_CONDITION_IMAGE, .video_offset = 4097, .frames = 1, .height = 64, .width = 64 };
                j->conditions[1] = (WireCondition){
                        .kind = WIRE_CONDITION_VIDEO, .video_offset = 1, .frames = 13, .height = 32, .width = 32, .audio = 1 };
        }
        if (what == CODING_DECODE_VIDEO)
                j->video = tensor(ST_F32, 4, 4096, (uint64_t[]){ 24, 3, 2, 2 });
        if (what == CODING_DECODE_AUDIO)
                j->audio = tensor(ST_F32, 3, 4096, (uint64_t[]){ 32, 2, 3 });
        if (what == CODING_ENCODE_VIDEO)
                j->video = tensor(ST_U8, 4, 4095, (uint64_t[]){ 2, 32, 32, 3 });
        if (what == CODING_ENCODE_AUDIO)
                j->audio = tensor(ST_F32, 2, 4096, (uint64_t[]){ 2, 1601 });
        if (what == CODING_DECODE_VIDEO)
                j->output_type = ST_U8;
}

static bool put_coding(int fd, Input *x, unsigned *n_steps) {
        static const uint8_t models[] = { 0, 0, 0, 1, 2, 1, 2 };
        uint8_t variant = input_u8(x);
        unsigned what = variant % CODING_MAX;
        WireMessage m;

        if (!put_part(fd, parts + models[what]))
                return false;
        wire_init(&m, WIRE_JOB_OPEN, EPOCH, 3, 0);
        fill_coding(&m.job_open, what);
        m.job_open.flags = variant >> 6 == 3 ? WIRE_JOB_RESUME : 0;
        input_change(x, &m);
        planned = planned || (m.job_open.flags & WIRE_JOB_PLAN_ONLY);
        if (!put(fd, &m, m.header.size, -EBADF))
                return false;
        return ++*n_steps > STEPS_MAX || say(fd, WIRE_STEP, 3, 0, 0);
}

static bool put_message(int fd, Input *x, unsigned *n_steps) {
        WireMessage m;
        uint16_t type = input_u8(x) % WIRE_TYPE_MAX;
        uint64_t id = input_u8(x) % 8;
        uint32_t step = input_u8(x) % 4;
        uint8_t variant = input_u8(x);

        if (type == WIRE_DIE || wire_size_of(type) == 0)
                return true; /* would end this process, as it should */
        if ((type == WIRE_STEP || type == WIRE_JOB_RUN) && ++*n_steps > STEPS_MAX)
                return true;

        fill(&m, (WireType) type, id, step, variant);
        input_change(x, &m);
        planned = planned || (type == WIRE_JOB_OPEN && (m.job_open.flags & WIRE_JOB_PLAN_ONLY));
        /* Threads are no part of the question and each takes a stack. */
        if (type == WIRE_WELCOME) {
                m.welcome.threads = 1;
                m.welcome.ranks = 1;
        }
        return put(fd, &m, m.header.size, fd_for((WireType) type, &m, variant));
}

static void send_all(int fd, Input *x) {
        unsigned n_steps = 0;
        bool ok = true;

        if (input_u8(x) % 8 != 0)
                ok = say(fd, WIRE_WELCOME, 0, 0, 0);

        for (unsigned i = 0; ok && x->n > 0 && i < MESSAGES_MAX; i++) {
                uint8_t raw[WIRE_MESSAGE_MAX + 1];
                uint8_t op = input_u8(x);
                size_t n;

                if (op >= OP_CODING) {
                        ok = put_coding(fd, x, &n_steps);
                        continue;
                }
                switch (op % OP_MAX) {

                case OP_MESSAGE:
                        ok = put_message(fd, x, &n_steps);
                        break;

                case OP_RAW: {
                        int passed = (input_u8(x) & 1) ? arena_fds[0] : -EBADF;
                        WireHeader h;

                        n = input_raw(x, raw);
                        memcpy(&h, raw, sizeof(h));
                        if (n >= sizeof(h) && (h.type == WIRE_DIE || h.type == WIRE_WELCOME || h.type == WIRE_STEP ||
                                               h.type == WIRE_JOB_RUN))
                                break;
                        ok = n == 0 || put(fd, raw, n, passed);
                        break;
                }

                case OP_LIFE:
                        ok = put_life(fd, input_u8(x));
                        break;

                default:
                        for (unsigned k = 0, at = input_u8(x) * 256u, value = input_u8(x); k < 256; k++)
                                input_arena[(at + k) % ARENA_BYTES] = (uint8_t) value;
                        break;
                }
        }

        CHECK(shutdown(fd, SHUT_WR) == 0);
}

static void *read_answers(void *userdata) {
        int fd = *(int *) userdata;

        for (;;) {
                CLEANUP_CLOSE int passed = -EBADF;
                struct pollfd p = { .fd = fd, .events = POLLIN };
                WireMessage m;
                Fault f = {};
                int r;

                (void) poll(&p, 1, -1);
                r = wire_receive(fd, &m, &passed, &f);
                if (r == -EAGAIN)
                        continue;
                if (r <= 0) {
                        CHECK(r != -EBADMSG);
                        return NULL;
                }

                CHECK(passed < 0 && m.header.type >= WIRE_HELLO && m.header.type <= WIRE_ERROR);
                if (m.header.type == WIRE_ERROR)
                        CHECK(m.error.fault.name[0] != '\0' && m.error.fault.text[0] != '\0');
                if (m.header.type == WIRE_LORA_NOTES)
                        CHECK(m.lora_notes.n >= 1 && m.lora_notes.n <= WIRE_LORA_NOTES_MAX);
                if (m.header.type == WIRE_JOB_READY && !planned)
                        CHECK(m.job_ready.commit_offset <= ARENA_BYTES - 8 && m.job_ready.output_used <= ARENA_BYTES &&
                              m.job_ready.n_slots * m.job_ready.slot_stride <= ARENA_BYTES);
                if (m.header.type == WIRE_JOB_READY && !planned)
                        for (uint32_t i = 0; i < m.job_ready.n_outputs; i++)
                                CHECK(m.job_ready.outputs[i].tensor.offset + m.job_ready.outputs[i].tensor.size <= ARENA_BYTES);
        }
}

/* Steps that wait would be dropped with the ranks: let them run. Those of closed jobs end at once. */
static void finish_steps(const Worker *w) {
        for (size_t i = 0; i < JOBS_MAX; i++)
                while (w->jobs[i] && w->jobs[i]->n_pending > 0)
                        (void) usleep(100);
}

static void empty(Worker *w) {
        finish_steps(w);
        w->ranks = rank_group_free(w->ranks);
        step_runner_done(&w->steps);
        for (size_t i = 0; i < JOBS_MAX; i++)
                w->jobs[i] = job_unref(w->jobs[i]);
        for (size_t i = 0; i < MERGED_KEPT; i++)
                CHECK(!w->steps.merged.kept[i]);
        for (size_t i = 0; i < SESSIONS_MAX; i++)
                w->arenas[i] = arena_pair_unref(w->arenas[i]);
        for (size_t i = 0; i < MODELS_MAX; i++)
                w->models.models[i] = model_entry_unref(w->models.models[i]);
        w->link = link_free(w->link);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        Input x = { data, n };
        const Backend *backend;
        pthread_t reader;
        Fault f = {};
        int pair[2], r;

        log_set_max_level(-1);
        if (model.fd < 0)
                make_memory();
        planned = false;
        memset(input_arena, 0, ARENA_BYTES);
        memset(output_arena, 0, ARENA_BYTES);

        backend = backend_get(&f);
        CHECK(backend && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
        CHECK(worker_start(backend, pair[1], &f) == 0);
        send_all(pair[0], &x);
        CHECK(pthread_create(&reader, NULL, read_answers, &pair[0]) == 0);

        r = worker_run(&f);
        CHECK(r == 0 || f.text[0] != '\0' || r == -ENOMEM);

        empty(&worker);
        (void) close(pair[1]);
        CHECK(pthread_join(reader, NULL) == 0);
        (void) close(pair[0]);
        return 0;
}
