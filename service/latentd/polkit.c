/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/polkit.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/descriptors.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define AUTHORITY "org.freedesktop.PolicyKit1"
#define ALLOW_USER_INTERACTION 1u /* CheckAuthorizationFlags */

#define GRANTED_USEC UINT64_C(60000000)
#define WAITING_MAX 64 /* calls of one peer for one action */

/* One question; calls that need the same answer wait with the first. */
struct PolkitQuery {
        Peer *peer;
        PolkitAction action;
        sd_bus_slot *slot;
        sd_bus_message *waiting[WAITING_MAX];
        size_t n_waiting;
        TAILQ_ENTRY(PolkitQuery) entry;
};

const char *polkit_action_name(PolkitAction a) {
        static const char *const names[POLKIT_ACTION_MAX] = {
                [POLKIT_USE] = "org.latentd.latent1.use",
                [POLKIT_LOAD_MODEL] = "org.latentd.latent1.load-model",
                [POLKIT_MANAGE] = "org.latentd.latent1.manage",
        };

        return names[a];
}

/* One's own private model concerns nobody else. */
static PolkitAction unload_action(const Peer *p, const char *path) {
        const Model *model = NULL;
        uint64_t id;

        if (path && bus_path_id(path, BUS_ROOT "/model/", &id) >= 0)
                model = model_find(p->manager, id);

        return model && model->is_private && model->uid == p->uid ? POLKIT_USE : POLKIT_MANAGE;
}

/* By the member alone: a call may come without an interface, and ours share no member's name with the standard ones. */
PolkitAction polkit_action_of(const Peer *p, sd_bus_message *message) {
        static const struct {
                const char *member;
                PolkitAction action;
        } table[] = {
                { "LoadModel", POLKIT_LOAD_MODEL }, { "NewModel", POLKIT_LOAD_MODEL }, { "AddFiles", POLKIT_LOAD_MODEL },
                { "Commit", POLKIT_LOAD_MODEL },    { "DropCache", POLKIT_MANAGE },    { "ReleaseGpus", POLKIT_MANAGE },
                { "Pin", POLKIT_MANAGE },
        };
        const char *member = sd_bus_message_get_member(message);

        if (!member)
                return POLKIT_MANAGE;

        if (strcmp(member, "Unload") == 0)
                return unload_action(p, sd_bus_message_get_path(message));

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].member, member) == 0)
                        return table[i].action;

        return POLKIT_USE;
}

static void query_free(PolkitQuery *q) {
        TAILQ_REMOVE(&q->peer->manager->queries, q, entry);
        sd_bus_slot_unref(q->slot);
        for (size_t i = 0; i < q->n_waiting; i++)
                sd_bus_message_unref(q->waiting[i]);
        free(q);
}

/* The calls come again and find the answer. */
static void grant(PolkitQuery *q) {
        int r;

        q->peer->granted = true;
        q->peer->granted_until[q->action] = clock_usec() + GRANTED_USEC;

        for (size_t i = 0; i < q->n_waiting; i++) {
                r = sd_bus_message_rewind(q->waiting[i], true);
                if (r >= 0)
                        r = sd_bus_enqueue_for_read(q->peer->bus, q->waiting[i]);
                if (r < 0)
                        (void) sd_bus_reply_method_errno(q->waiting[i], r, NULL);
        }
}

static void refuse(PolkitQuery *q, int r, const Fault *f) {
        CLEANUP(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;

        (void) bus_error_fault(&error, r, f);
        for (size_t i = 0; i < q->n_waiting; i++)
                (void) sd_bus_reply_method_error(q->waiting[i], &error);
}

static bool is_absent(const sd_bus_error *e) {
        return sd_bus_error_has_name(e, SD_BUS_ERROR_SERVICE_UNKNOWN) || sd_bus_error_has_name(e, SD_BUS_ERROR_NAME_HAS_NO_OWNER) ||
               strncmp(e->name, "org.freedesktop.DBus.Error.Spawn.", 33) == 0 ||
               strncmp(e->name, "org.freedesktop.systemd1.", 25) == 0;
}

/* 1: yes; else AccessDenied. */
static int read_answer(const PolkitQuery *q, sd_bus_message *reply, Fault *f) {
        const sd_bus_error *e = sd_bus_message_get_error(reply);
        int yes, challenge, r;

        if (e && is_absent(e))
                return q->peer->listed ? 1 : peer_refuse(q->peer, f);

        if (e)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "polkit could not be asked for %s: %s", polkit_action_name(q->action),
                                 e->message ? e->message : e->name);

        r = sd_bus_message_enter_container(reply, 'r', "bba{ss}");
        if (r >= 0)
                r = sd_bus_message_read(reply, "bb", &yes, &challenge);
        if (r < 0)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "The answer of polkit could not be understood: %s.", strerror(-r));

        if (yes)
                return 1;

        return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "User %" PRIu32 " has not the right %s%s.", (uint32_t) q->peer->uid,
                         polkit_action_name(q->action),
                         challenge ? ": an administrator's password would give it, or a rule of polkit" : " by the rules of polkit");
}

static int on_answer(sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        PolkitQuery *q = userdata;
        Fault f = {};
        int r;

        r = read_answer(q, reply, &f);
        if (r > 0)
                grant(q);
        else
                refuse(q, r, &f);

        query_free(q);
        return 0;
}

static int send_query(PolkitQuery *q, bool interactive) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = sd_bus_message_new_method_call(q->peer->bus, &m, AUTHORITY, "/org/freedesktop/PolicyKit1/Authority", AUTHORITY ".Authority",
                                           "CheckAuthorization");
        if (r >= 0)
                r = sd_bus_message_append(m, "(sa{sv})sa{ss}us", "system-bus-name", 1, "name", "s", q->peer->name,
                                          polkit_action_name(q->action), 0, interactive ? ALLOW_USER_INTERACTION : 0u, "");
        if (r < 0)
                return r;

        /* A person who types a password takes as long as that takes. */
        return sd_bus_call_async(q->peer->bus, &q->slot, m, on_answer, q, interactive ? UINT64_MAX : 0);
}

static int ask(Peer *p, PolkitAction action, sd_bus_message *message, Fault *f) {
        bool interactive = sd_bus_message_get_allow_interactive_authorization(message) > 0;
        PolkitQuery *q;
        int r;

        TAILQ_FOREACH(q, &p->manager->queries, entry)
                if (q->peer == p && q->action == action)
                        break;

        /* It keeps its own meanwhile. */
        r = descriptors_check("A call that waits for polkit", f);
        if (r < 0)
                return r;

        if (!q) {
                q = calloc(1, sizeof(*q));
                if (!q)
                        return -ENOMEM;

                q->peer = p;
                q->action = action;
                TAILQ_INSERT_TAIL(&p->manager->queries, q, entry);
                r = send_query(q, interactive);
                if (r < 0) {
                        query_free(q);
                        return fault_set(f, r, FAULT_INTERNAL, "polkit could not be asked: %s.", strerror(-r));
                }
        } else if (q->n_waiting == WAITING_MAX)
                return fault_set(f, -EDQUOT, FAULT_LIMIT, "%d of your calls wait for polkit already; wait for their answers.",
                                 WAITING_MAX);

        q->waiting[q->n_waiting++] = sd_bus_message_ref(message);
        return 0;
}

int polkit_check(Peer *p, sd_bus_message *message, Fault *f) {
        PolkitAction action = polkit_action_of(p, message);

        if (p->listed && (p->manager->user_mode || p->uid == 0 || !p->name || action != POLKIT_MANAGE))
                return 1;

        if (p->manager->user_mode || !p->name)
                return peer_refuse(p, f);

        if (p->granted_until[action] > clock_usec())
                return 1;

        return ask(p, action, message, f);
}

void polkit_peer_gone(Peer *p) {
        PolkitQuery *q, *next;

        for (q = TAILQ_FIRST(&p->manager->queries); q; q = next) {
                next = TAILQ_NEXT(q, entry);
                if (q->peer == p)
                        query_free(q);
        }
}
