/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* From a Fault to a D-Bus error, reading a{sv} dictionaries strictly, and what messages hold in more than one place. */

#include <stdbool.h>

#include <systemd/sd-bus.h>

#include "service/shared/fault.h"
#include "service/shared/wire.h"

/* Sets *error to org.latentd.Latent1.Error.<name> and returns a negative errno for sd-bus. A fault without a name becomes Internal with
 * strerror(r). */
int bus_error_fault(sd_bus_error *error, int r, const Fault *f);

/* An array of numbers, in the message. */
typedef struct BusNumbers {
        const uint32_t *values;
        size_t n;
} BusNumbers;

/* One expected key. `type` is the D-Bus signature of the value ("s", "t", "u", "d", "b", "o", "au", "(tsat)"); value points to
 * const char *, uint64_t, uint32_t, double, int, const char *, BusNumbers, WireTensor; valid as long as the message. seen is set. Other
 * types: read() does it. */
typedef struct BusKey BusKey;
struct BusKey {
        const char *key;
        const char *type;
        void *value;
        bool *seen; /* may be NULL */
        bool later; /* a key of a later version: NotSupported if given */
        int (*read)(sd_bus_message *m, const BusKey *k, Fault *f); /* from inside of the variant */
};

/* Reads the a{sv} at the message's read position; InvalidArgument names the key and the expected type (unknown keys: the known ones).
 * For "(tsat)": offset, type name, shape; size is computed with overflow checks, at most WIRE_DIMS_MAX dimensions, none of them 0
 * (InvalidTensor). At most 64 keys. Values read before an error stay written: look at them on success only. */
int bus_read_dictionary(sd_bus_message *m, const BusKey *keys, size_t n_keys, Fault *f);

/* One entry of an a{sv} that is open: an array, whose elements (of that type, at most 14 characters) come between these two. */
int bus_open_list(sd_bus_message *m, const char *key, const char *element);
int bus_close_list(sd_bus_message *m);

/* Such an entry of numbers, "at". */
int bus_append_numbers(sd_bus_message *m, const char *key, const uint64_t *values, size_t n);

/* Likewise of strings, "as". */
int bus_append_strings(sd_bus_message *m, const char *key, const char *const *values, size_t n);

/* Replaces by '?' what a D-Bus string cannot carry: s comes from a worker. */
void bus_text(char *s);

/* The number behind prefix (BUS_ROOT "/job/") in a path: decimal, no leading zero. -ENOENT if path is no such path. */
int bus_path_id(const char *path, const char *prefix, uint64_t *ret);
