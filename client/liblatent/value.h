/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Trees of values, read from D-Bus messages. */

#include <systemd/sd-bus.h>

#include "client/latent.h"

/* An empty list or dictionary (LATENT_VALUE_LIST, LATENT_VALUE_DICT). NULL: no memory. */
latent_value *value_new(int type);

/* Adds a child to a list (key NULL) or a dictionary, taking it over also on failure. NULL child: -ENOMEM. */
int value_add(latent_value *parent, const char *key, latent_value *child);
int value_add_string(latent_value *parent, const char *key, const char *string);

/* A list of dictionaries by their "path", in the order in which the service made the objects. */
void value_sort_by_path(latent_value *list);

/* Reads the next complete value of the message, of any type but file descriptors; dictionaries with string
 * keys become LATENT_VALUE_DICT, other containers LATENT_VALUE_LIST, variants their content. -EBADMSG,
 * -ENOMEM. */
int value_read(sd_bus_message *m, latent_value **ret);
