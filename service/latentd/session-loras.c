/* SPDX-License-Identifier: Apache-2.0 */
/* Session.SetLoras and the property Loras. */
#include "service/latentd/session.h"

#include "service/latentd/bus-error.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/session-request.h"
#include "service/shared/cleanup.h"

int session_method_set_loras(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Session *s = userdata;
        WireCompute compute;
        LoraList loras;
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(s->manager, message, &p, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_request_loras(message, s, &loras, &compute, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = session_set_loras(s, p, &loras, compute, &j, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return job_bus_reply(j, message, error);
}

int session_property_loras(sd_bus *bus, const char *path, const char *interface, const char *property,
        sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        const Session *s = userdata;
        int r;

        r = sd_bus_message_open_container(reply, 'a', "(od)");
        if (r < 0)
                return r;

        for (uint32_t i = 0; i < s->loras.n; i++) {
                CLEANUP_FREE char *model = NULL;

                r = model_path(s->loras.models[i], &model);
                if (r < 0)
                        return r;

                r = sd_bus_message_append(reply, "(od)", model, s->loras.strengths[i]);
                if (r < 0)
                        return r;
        }

        return sd_bus_message_close_container(reply);
}
