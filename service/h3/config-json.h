/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A small configuration file of a checkpoint as a JSON object. */

#include <jansson.h>

#include "service/h3/model.h"

static inline void config_json_unref(json_t **j) {
        json_decref(*j);
}

/* *ret: the caller's. -EBADMSG, with what is wrong in words ("it is not JSON: ..."); -ENOMEM. */
int config_json_load(const H3File *file, json_t **ret, char ret_what[static 300]);
