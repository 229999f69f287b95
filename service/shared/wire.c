/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/wire.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

#include "service/shared/cleanup.h"
#include "service/shared/datagram.h"

typedef struct TypeInfo {
        const char *name;
        uint32_t size;
        bool with_fd;
} TypeInfo;

static const TypeInfo types[WIRE_TYPE_MAX] = {
        [WIRE_HELLO] = {"HELLO", sizeof(WireHello), false},
        [WIRE_ACK] = {"ACK", sizeof(WireAck), false},
        [WIRE_MODEL_READY] = {"MODEL_READY", sizeof(WireModelReady), false},
        [WIRE_JOB_READY] = {"JOB_READY", sizeof(WireJobReady), false},
        [WIRE_PROGRESS] = {"PROGRESS", sizeof(WireProgress), false},
        [WIRE_STEP_DONE] = {"STEP_DONE", sizeof(WireStepDone), false},
        [WIRE_LORA_NOTES] = {"LORA_NOTES", sizeof(WireLoraNotes), false},
        [WIRE_MEMORY] = {"MEMORY", sizeof(WireMemory), false},
        [WIRE_LINKS] = {"LINKS", sizeof(WireLinks), false},
        [WIRE_ERROR] = {"ERROR", sizeof(WireError), false},
        [WIRE_PINS] = {"PINS", sizeof(WirePins), false},
        [WIRE_WELCOME] = {"WELCOME", sizeof(WireWelcome), false},
        [WIRE_MODEL_OPEN] = {"MODEL_OPEN", sizeof(WireModelOpen), false},
        [WIRE_REGION] = {"REGION", sizeof(WireRegion), true},
        [WIRE_MODEL_COMMIT] = {"MODEL_COMMIT", sizeof(WireModelCommit), false},
        [WIRE_MODEL_CLOSE] = {"MODEL_CLOSE", sizeof(WireModelClose), false},
        [WIRE_ARENA] = {"ARENA", sizeof(WireArena), true},
        [WIRE_ARENA_CLOSE] = {"ARENA_CLOSE", sizeof(WireArenaClose), false},
        [WIRE_JOB_OPEN] = {"JOB_OPEN", sizeof(WireJobOpen), false},
        [WIRE_PLAN] = {"PLAN", sizeof(WirePlan), false},
        [WIRE_STEP] = {"STEP", sizeof(WireStep), false},
        [WIRE_JOB_CLOSE] = {"JOB_CLOSE", sizeof(WireJobClose), false},
        [WIRE_CANCEL] = {"CANCEL", sizeof(WireCancel), false},
        [WIRE_DIE] = {"DIE", sizeof(WireDie), false},
        [WIRE_TRIM] = {"TRIM", sizeof(WireTrim), false},
        [WIRE_KNOWN_PINS] = {"KNOWN_PINS", sizeof(WirePins), false},
        [WIRE_JOB_RUN] = {"JOB_RUN", sizeof(WireJobRun), false},
};

static const TypeInfo *type_info(uint16_t type) {
        if (type >= ELEMENTSOF(types) || types[type].size == 0)
                return NULL;

        return &types[type];
}

uint32_t wire_size_of(uint16_t type) {
        const TypeInfo *t = type_info(type);

        return t ? t->size : 0;
}

const char *wire_type_name(uint16_t type) {
        const TypeInfo *t = type_info(type);

        return t ? t->name : "?";
}

const char *wire_output_name(uint32_t name) {
        static const char *const names[] = {
                [WIRE_OUTPUT_IDS] = "ids",
                [WIRE_OUTPUT_TEXT] = "text",
                [WIRE_OUTPUT_TEXT_TAGS] = "text_tags",
                [WIRE_OUTPUT_FRAMES] = "frames",
                [WIRE_OUTPUT_SOUND] = "sound",
                [WIRE_OUTPUT_VIDEO] = "video",
                [WIRE_OUTPUT_AUDIO] = "audio",
                [WIRE_OUTPUT_PREVIEW] = "preview",
        };

        return name < ELEMENTSOF(names) ? names[name] : NULL;
}

uint32_t wire_init(WireMessage *m, WireType type, uint64_t epoch, uint64_t job, uint32_t step) {
        uint32_t size = wire_size_of((uint16_t) type);

        memset(m, 0, sizeof(*m));
        if (size == 0)
                return 0;

        m->header = (WireHeader){
                .size = size,
                .type = (uint16_t) type,
                .version = WIRE_VERSION,
                .epoch = epoch,
                .job = job,
                .step = step,
                .acks = type == WIRE_ACK ? 1 : 0,
        };
        return size;
}

/* Appends a part of `size` bytes to the slot. */
static bool place_part(WireSlot *s, uint64_t size, uint64_t *ret_offset) {
        *ret_offset = s->stride;
        if (__builtin_add_overflow(size, WIRE_SLOT_ALIGN - 1, &size))
                return false;
        return !__builtin_add_overflow(s->stride, size & ~(WIRE_SLOT_ALIGN - 1), &s->stride);
}

int wire_slot_place(WireSampler sampler, uint64_t video, uint64_t audio, WireSlot *ret) {
        uint64_t begin;
        WireSlot s = {};

        if (!place_part(&s, video, &begin) || !place_part(&s, audio, &s.audio))
                return -EOVERFLOW;
        if (sampler == WIRE_SAMPLER_RES_MULTISTEP && !place_part(&s, audio, &s.carried))
                return -EOVERFLOW;
        if (sampler != WIRE_SAMPLER_EULER &&
                (!place_part(&s, video, &s.denoised_video) || !place_part(&s, audio, &s.denoised_audio)))
                return -EOVERFLOW;

        *ret = s;
        return 0;
}

int wire_commit_unpack(uint64_t word, uint32_t *ret_epoch, uint32_t *ret_steps_done) {
        if (!(word & ((uint64_t) 1 << 31)))
                return -ENODATA;

        *ret_epoch = (uint32_t) (word >> 32);
        *ret_steps_done = (uint32_t) (word & 0x7fffffffu);
        return 0;
}

int wire_send(int socket, const WireMessage *m, int fd) {
        const TypeInfo *t = type_info(m->header.type);

        /* A message that the other side would take for a protocol error never leaves. */
        if (!t || m->header.size != t->size || m->header.version != WIRE_VERSION || t->with_fd != (fd >= 0))
                return -EINVAL;

        return datagram_send(socket, m, m->header.size, &fd, fd >= 0 ? 1 : 0);
}

static int check_message(const WireMessage *m, size_t n, int flags, unsigned n_fds, Fault *f) {
        const TypeInfo *t;

        if (flags & (MSG_TRUNC | MSG_CTRUNC))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "A message was cut off (%s): more than %u bytes or more descriptors than one.",
                        (flags & MSG_TRUNC) ? "data" : "descriptors", WIRE_MESSAGE_MAX);

        if (n < sizeof(WireHeader))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "A message of %zu bytes is shorter than a header (%zu).", n, sizeof(WireHeader));

        /* First of all the version: what else stands in the header depends on it. */
        if (m->header.version != WIRE_VERSION)
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "The other side speaks protocol version %u, this program %u: restart both after an "
                        "upgrade.",
                        m->header.version, WIRE_VERSION);

        t = type_info(m->header.type);
        if (!t)
                return fault_set(
                        f, -EBADMSG, FAULT_INTERNAL, "A message has the unknown type %u.", m->header.type);

        if (n != t->size || m->header.size != t->size)
                return fault_set(f, -EBADMSG, FAULT_INTERNAL, "%s has %zu bytes and says %u, expected %u.",
                        t->name, n, m->header.size, t->size);

        if (n_fds != (t->with_fd ? 1u : 0u))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL, "%s carries %u descriptors, expected %u.",
                        t->name, n_fds, t->with_fd ? 1u : 0u);

        return 0;
}

#define TERMINATE(array) ((array)[sizeof(array) - 1] = '\0')

/* Makes what the other side may have got wrong harmless: strings end, padding is zero. */
static void normalise(WireMessage *m) {
        memset(m->bytes + m->header.size, 0, sizeof(m->bytes) - m->header.size);
        if (m->header.type >= WIRE_WELCOME)
                m->header.acks = 0;

        switch ((WireType) m->header.type) {

        case WIRE_HELLO:
                TERMINATE(m->hello.build_id);
                TERMINATE(m->hello.backend);
                TERMINATE(m->hello.numerics_id);
                TERMINATE(m->hello.reason);
                TERMINATE(m->hello.kernels);
                TERMINATE(m->hello.notes);
                for (size_t i = 0; i < WIRE_DEVICES_MAX; i++) {
                        WireDevice *d = &m->hello.devices[i];

                        TERMINATE(d->name);
                        TERMINATE(d->pci_address);
                        TERMINATE(d->uuid);
                        TERMINATE(d->architecture);
                        d->left_out = d->left_out != 0;
                }
                break;

        case WIRE_MODEL_READY:
                TERMINATE(m->model_ready.layout);
                TERMINATE(m->model_ready.qkv_order);
                TERMINATE(m->model_ready.partition);
                TERMINATE(m->model_ready.types);
                TERMINATE(m->model_ready.support);
                TERMINATE(m->model_ready.warning);
                break;

        case WIRE_JOB_READY:
                m->job_ready.reserved = 0;
                for (size_t i = 0; i < WIRE_OUTPUTS_MAX; i++)
                        m->job_ready.outputs[i].reserved = 0;
                break;

        case WIRE_STEP_DONE:
                m->step_done.reserved = 0;
                break;

        case WIRE_LINKS:
                TERMINATE(m->links.notes);
                break;

        case WIRE_PINS:
        case WIRE_KNOWN_PINS:
                TERMINATE(m->pins.numerics_id);
                TERMINATE(m->pins.device);
                m->pins.reserved = 0;
                break;

        case WIRE_LORA_NOTES:
                for (size_t i = 0; i < WIRE_LORA_NOTES_MAX; i++) {
                        TERMINATE(m->lora_notes.notes[i].name);
                        TERMINATE(m->lora_notes.notes[i].reason);
                }
                m->lora_notes.reserved = 0;
                break;

        case WIRE_ERROR:
                TERMINATE(m->error.fault.name);
                TERMINATE(m->error.fault.text);
                m->error.reserved = 0;
                break;

        case WIRE_MODEL_OPEN:
                TERMINATE(m->model_open.partition);
                break;

        case WIRE_JOB_OPEN:
                TERMINATE(m->job_open.numerics);
                m->job_open.reserved = 0;
                for (size_t i = 0; i < WIRE_CONDITIONS_MAX; i++)
                        m->job_open.conditions[i].reserved = 0;
                break;

        case WIRE_REGION:
                TERMINATE(m->region.name);
                m->region.reserved = 0;
                break;

        case WIRE_ARENA:
                m->arena.reserved = 0;
                break;

        case WIRE_PLAN:
                m->plan.reserved = 0;
                break;

        case WIRE_JOB_RUN:
                TERMINATE(m->job_run.open.numerics);
                m->job_run.open.reserved = 0;
                m->job_run.plan.header = (WireHeader){};
                break;

        default:
                break;
        }
}

int wire_receive(int socket, WireMessage *ret, int *ret_fd, Fault *f) {
        WireMessage m;
        Datagram d;
        int r;

        r = datagram_receive(socket, &m, sizeof(m), &d);
        if (r == 0 || r == -EAGAIN)
                return r;
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Receiving a message failed: %s.", strerror(-r));

        r = check_message(&m, d.size, d.flags, d.n_fds, f);
        if (r < 0) {
                datagram_close(&d);
                return r;
        }

        normalise(&m);
        *ret = m;
        *ret_fd = d.n_fds > 0 ? d.fds[0] : -EBADF;
        return 1;
}
