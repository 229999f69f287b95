/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/media-wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "service/shared/cleanup.h"
#include "service/shared/datagram.h"

_Static_assert(MEDIA_FDS_MAX < DATAGRAM_FDS_MAX, "one descriptor too many must be seen");

typedef struct TypeInfo {
        const char *name;
        uint32_t size;
} TypeInfo;

static const TypeInfo types[_MEDIA_TYPE_MAX] = {
        [MEDIA_HELLO] = {"HELLO", sizeof(MediaHello)},
        [MEDIA_PROGRESS] = {"PROGRESS", sizeof(MediaProgress)},
        [MEDIA_TAKEN] = {"TAKEN", sizeof(MediaTaken)},
        [MEDIA_DONE] = {"DONE", sizeof(MediaDone)},
        [MEDIA_ERROR] = {"ERROR", sizeof(MediaError)},
        [MEDIA_READ] = {"READ", sizeof(MediaRead)},
        [MEDIA_WRITE] = {"WRITE", sizeof(MediaWrite)},
        [MEDIA_FRAMES] = {"FRAMES", sizeof(MediaFrames)},
};

static const TypeInfo *type_info(uint16_t type) {
        return type < ELEMENTSOF(types) && types[type].size > 0 ? &types[type] : NULL;
}

const char *media_type_name(uint16_t type) {
        const TypeInfo *t = type_info(type);

        return t ? t->name : "?";
}

uint32_t media_init(MediaMessage *m, MediaType type) {
        const TypeInfo *t = type_info((uint16_t) type);

        memset(m, 0, sizeof(*m));
        if (!t)
                return 0;

        m->header = (MediaHeader){.size = t->size, .type = (uint16_t) type, .version = MEDIA_VERSION};
        return t->size;
}

static unsigned fds_of(const MediaMessage *m) {
        switch (m->header.type) {
        case MEDIA_READ:
                return m->read.what == MEDIA_PROBE ? 1 : 2;
        case MEDIA_WRITE:
                return 2;
        default:
                return 0;
        }
}

int media_send(int socket, const MediaMessage *m, const int *fds, size_t n_fds) {
        const TypeInfo *t = type_info(m->header.type);

        /* A message that the other side would take for a protocol error never leaves. */
        if (!t || m->header.size != t->size || m->header.version != MEDIA_VERSION || n_fds > MEDIA_FDS_MAX)
                return -EINVAL;
        while (n_fds > 0 && fds[n_fds - 1] < 0)
                n_fds--;
        if (n_fds != fds_of(m))
                return -EINVAL;

        return datagram_send(socket, m, m->header.size, fds, n_fds);
}

static int check_message(const MediaMessage *m, const Datagram *d, Fault *f) {
        const TypeInfo *t;

        if (d->flags & (MSG_TRUNC | MSG_CTRUNC))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "A message was cut off (%s): more than %u bytes or more descriptors than %u.",
                        (d->flags & MSG_TRUNC) ? "data" : "descriptors", MEDIA_MESSAGE_MAX, MEDIA_FDS_MAX);

        if (d->size < sizeof(MediaHeader))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "A message of %zu bytes is shorter than a header (%zu).", d->size,
                        sizeof(MediaHeader));

        if (m->header.version != MEDIA_VERSION)
                return fault_set(f, -EBADMSG, FAULT_INTERNAL,
                        "The other side speaks protocol version %u, this program %u: restart both after an "
                        "upgrade.",
                        m->header.version, MEDIA_VERSION);

        t = type_info(m->header.type);
        if (!t)
                return fault_set(
                        f, -EBADMSG, FAULT_INTERNAL, "A message has the unknown type %u.", m->header.type);

        if (d->size != t->size || m->header.size != t->size)
                return fault_set(f, -EBADMSG, FAULT_INTERNAL, "%s has %zu bytes and says %u, expected %u.",
                        t->name, d->size, m->header.size, t->size);

        if (d->n_fds != fds_of(m))
                return fault_set(f, -EBADMSG, FAULT_INTERNAL, "%s carries %u descriptors, expected %u.",
                        t->name, d->n_fds, fds_of(m));
        return 0;
}

#define TERMINATE(array) ((array)[sizeof(array) - 1] = '\0')

/* Makes what the other side may have got wrong harmless: strings end, padding is zero. */
static void normalise(MediaMessage *m) {
        memset(m->bytes + m->header.size, 0, sizeof(m->bytes) - m->header.size);

        switch ((MediaType) m->header.type) {
        case MEDIA_HELLO:
                TERMINATE(m->hello.build_id);
                TERMINATE(m->hello.libraries);
                TERMINATE(m->hello.formats);
                m->hello.reserved = 0;
                break;
        case MEDIA_DONE:
                TERMINATE(m->done.format);
                m->done.reserved = 0;
                break;
        case MEDIA_READ:
                m->read.reserved = 0;
                break;
        case MEDIA_ERROR:
                TERMINATE(m->error.fault.name);
                TERMINATE(m->error.fault.text);
                break;
        case MEDIA_WRITE:
                TERMINATE(m->write.title);
                break;
        case MEDIA_FRAMES:
                m->frames.reserved = 0;
                break;
        default:
                break;
        }
}

int media_receive(int socket, MediaMessage *ret, int ret_fds[static MEDIA_FDS_MAX], Fault *f) {
        MediaMessage m;
        Datagram d;
        int r;

        r = datagram_receive(socket, &m, sizeof(m), &d);
        if (r == 0 || r == -EAGAIN)
                return r;
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Receiving a message failed: %s.", strerror(-r));

        r = check_message(&m, &d, f);
        if (r < 0) {
                datagram_close(&d);
                return r;
        }

        normalise(&m);
        *ret = m;
        for (unsigned i = 0; i < MEDIA_FDS_MAX; i++)
                ret_fds[i] = i < d.n_fds ? d.fds[i] : -EBADF;
        return 1;
}
