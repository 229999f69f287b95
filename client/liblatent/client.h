/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The connection: calls, and which signals belong to which job. Everything that is made from a client holds
 * a reference to it, so that handles may be freed in any order. Objects remember the unique bus name of the
 * service that made them and are called under that name: after a restart the same object path may mean
 * something else. */

#include <stdbool.h>
#include <sys/queue.h>

#include <systemd/sd-bus.h>

#include "client/liblatent/error.h"
#include "service/shared/cleanup.h"

#define CLOCK_USEC_PER_SEC UINT64_C(1000000)

struct latent_client {
        unsigned n_ref;
        sd_bus *bus; /* NULL once the user freed the client or the connection was lost */
        bool is_peer; /* no message bus: the connection names the owner of objects, its end is the end of the service */
        char *socket; /* of a peer: where to connect again; NULL once the user freed the client */
        uint64_t n_connected;
        sd_bus_slot *filter, *owner_match;
        LIST_HEAD(, latent_job) jobs; /* handles that the user holds, for signals */
        /* Who has the service's name; NULL: nobody, or it did not change since we came. Of a peer: the connection, by its number;
         * NULL: there is none. */
        char *owner;
        uint64_t start_usec; /* when the bus may be asked to start the service; 0: it is there, or was stopped */
        bool said_goodbye;   /* the service ended our jobs before it left: it was stopped, not killed */
        bool no_resume;
        uint64_t restart_usec;
};

/* A place on the bus: an object of one run of the service. */
typedef struct Object {
        char *owner; /* unique name, e.g. ":1.42"; NULL: whoever has the service's name */
        char *path;
} Object;

int object_init(Object *o, const char *owner, const char *path);
void object_done(Object *o);

latent_client *client_ref(latent_client *c);
latent_client *client_unref(latent_client *c);

/* Whether the service can be reached from here once it is back. */
bool client_can_return(const latent_client *c);
/* Connects to the socket again if the connection was lost. Does not wait for a service that is not there. */
int client_connect_again(latent_client *c, latent_error *e);
/* For who waits for its return: asks the bus to start the service that died, now and then, without waiting. Where the bus has nothing
 * to start, or another one is starting it already, that does nothing. */
void client_ask_start(latent_client *c);
/* Who sent it, as objects remember it. */
const char *client_sender(const latent_client *c, sd_bus_message *m);

/* A method call. owner NULL: the service, started if need be. */
int client_message(latent_client *c, const char *owner, const char *path, const char *interface,
        const char *member, sd_bus_message **ret, latent_error *e);

/* Sends it and waits for the answer. doing: "Opening a session". */
int client_call(
        latent_client *c, sd_bus_message *m, const char *doing, sd_bus_message **ret_reply, latent_error *e);

/* Waits as long as the service takes: for a method that is answered behind other work. */
int client_call_patiently(
        latent_client *c, sd_bus_message *m, const char *doing, sd_bus_message **ret_reply, latent_error *e);

/* A call without arguments whose answer does not matter. */
int client_call_simple(latent_client *c, const Object *o, const char *interface, const char *member,
        const char *doing, latent_error *e);

/* All properties of an interface of an object as a dictionary. owner may be NULL. */
int client_properties(latent_client *c, const char *owner, const char *path, const char *interface,
        const char *doing, latent_value **ret, latent_error *e);

/* A message of ours could not be built or an answer could not be read: the service is not of our kind. */
int client_error_message(int r, const char *doing, latent_error *e);

/* Dispatches all that has arrived, without blocking. 1: there was something. */
int client_dispatch(latent_client *c, latent_error *e);

DEFINE_CLEANUP(latent_client *, client_unref)
DEFINE_CLEANUP(latent_value *, latent_value_free)
