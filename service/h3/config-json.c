/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/config-json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* A JSON tree takes up to 75 bytes for a byte of text; a published file has 100 to 800. */
#define FILE_MAX (UINT64_C(1) << 16)

static int wrong(const char *what, char ret_what[static 300]) {
        (void) snprintf(ret_what, 300, "%s", what);
        return -EBADMSG;
}

int config_json_load(const H3File *file, json_t **ret, char ret_what[static 300]) {
        CLEANUP(config_json_unref) json_t *root = NULL;
        CLEANUP_FREE char *copy = NULL; /* somebody may write to the bytes meanwhile */
        json_error_t error = {};

        if (file->size > FILE_MAX)
                return wrong("it has more than 65536 bytes", ret_what);
        copy = malloc((size_t) file->size + 1);
        if (!copy)
                return -ENOMEM;
        memcpy(copy, file->bytes, (size_t) file->size);
        root = json_loadb(copy, (size_t) file->size, JSON_REJECT_DUPLICATES, &error);
        if (!root) {
                (void) snprintf(ret_what, 300, "it is not JSON: %s (line %d)", error.text, error.line);
                return -EBADMSG;
        }
        if (!json_is_object(root))
                return wrong("it is not a JSON object", ret_what);
        *ret = STEAL_PTR(root);
        return 0;
}
