/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A session's arenas in this process. */

#include "client/liblatent/arena.h"
#include "client/liblatent/client.h"

struct latent_session {
        unsigned n_ref;        /* the user's handle and its jobs */
        latent_client *client; /* reference */
        Object object;
        bool closed;
        void *input, *output; /* mappings; output is read-only */
        uint64_t input_bytes, output_bytes;
        Arena arena; /* of the input */
};

latent_session *session_ref(latent_session *s);
latent_session *session_unref(latent_session *s);

/* NULL if the range does not lie in the output arena. */
const void *session_output_at(const latent_session *s, uint64_t offset, uint64_t size);
