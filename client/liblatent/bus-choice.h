/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which bus to talk to the service on. */

#include <systemd/sd-bus.h>

#include "client/latent.h"

/* kind: LATENT_BUS_*; address for LATENT_BUS_ADDRESS. Fails if the service neither runs nor can be started
 * there. */
int bus_choose(uint32_t kind, const char *address, sd_bus **ret, latent_error *e);

/* The service's own socket, without a message bus. kind: must be LATENT_BUS_AUTO. Waits until the service has answered once, not
 * longer than ping_usec. */
int bus_open_socket(uint32_t kind, const char *path, uint64_t ping_usec, sd_bus **ret, latent_error *e);
