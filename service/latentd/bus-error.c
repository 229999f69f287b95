/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/bus-error.h"

#include <stdio.h>
#include <string.h>

#include "service/latentd/manager.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/shared/utf8.h"

#define TENSOR_SIGNATURE "(tsat)"

int bus_error_fault(sd_bus_error *error, int r, const Fault *f) {
        char name[sizeof(BUS_ERROR("")) + sizeof(f->name)];

        if (f && f->name[0] != '\0') {
                (void) snprintf(name, sizeof(name), "%s%s", BUS_ERROR(""), f->name);
                (void) sd_bus_error_set(error, name, f->text);
        } else {
                Fault internal = {};

                (void) fault_set(&internal, r, FAULT_INTERNAL, "Internal error: %s.", strerror(r < 0 ? -r : EIO));
                (void) sd_bus_error_set(error, BUS_ERROR(FAULT_INTERNAL), internal.text);
        }

        return r < 0 ? r : -EIO;
}

static const char *type_description(const char *type) {
        static const struct {
                const char *type, *text;
        } table[] = {
                { "s",              "a string"                                              },
                { "t",              "a 64-bit unsigned number"                              },
                { "u",              "a 32-bit unsigned number"                              },
                { "d",              "a floating-point number"                               },
                { "b",              "a boolean"                                             },
                { "o",              "an object path"                                        },
                { "as",             "an array of strings"                                   },
                { "ad",             "an array of floating-point numbers"                    },
                { "aa{sv}",         "an array of dictionaries"                              },
                { "au",             "an array of 32-bit unsigned numbers"                   },
                { TENSOR_SIGNATURE, "a tensor: offset, type name, array of dimensions"      },
        };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].type, type) == 0)
                        return table[i].text;

        return "see the interface's description";
}

static int unknown_key(const char *key, const BusKey *keys, size_t n_keys, Fault *f) {
        char known[600] = "";
        size_t used = 0;

        for (size_t i = 0; i < n_keys; i++) {
                int n;

                if (keys[i].later)
                        continue;

                n = snprintf(known + used, sizeof(known) - used, "%s%s", used > 0 ? ", " : "", keys[i].key);
                if (n < 0 || (size_t) n >= sizeof(known) - used)
                        break;

                used += (size_t) n;
        }

        if (used == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "Unknown key \"%.64s\": no key is known here.", key);

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "Unknown key \"%.64s\". Known keys are: %s.", key, known);
}

/* Type, dimensions and size of one tensor; the place in the arena is judged by whoever knows the arena. */
static int tensor_fill(const char *key, uint64_t offset, const char *type_name, const uint64_t *shape, size_t n_dims,
                       WireTensor *ret, Fault *f) {
        WireTensor t = { .offset = offset };
        StType type;

        type = st_type_parse(type_name);
        if (type == ST_TYPE_INVALID)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                 "Tensor \"%s\" has the unknown type \"%.32s\"; a safetensors type such as F32 or BF16 was expected.",
                                 key, type_name);

        if (n_dims > WIRE_DIMS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "Tensor \"%s\" has %zu dimensions; at most %d are allowed.",
                                 key, n_dims, WIRE_DIMS_MAX);

        t.dtype = (uint32_t) type;
        t.n_dims = (uint32_t) n_dims;
        t.size = st_type_size(type);

        for (size_t i = 0; i < n_dims; i++) {
                if (shape[i] == 0)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "Dimension %zu of tensor \"%s\" is 0.", i, key);

                if (__builtin_mul_overflow(t.size, shape[i], &t.size))
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                         "Tensor \"%s\" has more bytes than 64 bits can count.", key);

                t.shape[i] = shape[i];
        }

        *ret = t;
        return 0;
}

static int read_tensor(sd_bus_message *m, const BusKey *k, Fault *f) {
        const char *type_name;
        const void *shape;
        uint64_t offset;
        size_t size;
        int r;

        r = sd_bus_message_enter_container(m, 'r', "tsat");
        if (r < 0)
                return r;

        r = sd_bus_message_read(m, "ts", &offset, &type_name);
        if (r < 0)
                return r;

        r = sd_bus_message_read_array(m, 't', &shape, &size);
        if (r < 0)
                return r;

        r = sd_bus_message_exit_container(m);
        if (r < 0)
                return r;

        return tensor_fill(k->key, offset, type_name, shape, size / sizeof(uint64_t), k->value, f);
}

static int read_numbers(sd_bus_message *m, BusNumbers *ret) {
        const void *values;
        size_t size;
        int r;

        r = sd_bus_message_read_array(m, 'u', &values, &size);
        if (r < 0)
                return r;

        *ret = (BusNumbers){ values, size / sizeof(uint32_t) };
        return 0;
}

static int read_value(sd_bus_message *m, const BusKey *k, Fault *f) {
        const char *given;
        int r;

        r = sd_bus_message_peek_type(m, NULL, &given);
        if (r < 0)
                return r;

        if (strcmp(given, k->type) != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "Key \"%s\" has type \"%.32s\"; expected \"%s\" (%s).",
                                 k->key, given, k->type, type_description(k->type));

        if (k->later)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                 "Key \"%s\" is of a later version of this service; leave it out.", k->key);

        r = sd_bus_message_enter_container(m, 'v', k->type);
        if (r < 0)
                return r;

        if (k->read)
                r = k->read(m, k, f);
        else if (strcmp(k->type, TENSOR_SIGNATURE) == 0)
                r = read_tensor(m, k, f);
        else if (strcmp(k->type, "au") == 0)
                r = read_numbers(m, k->value);
        else
                r = sd_bus_message_read_basic(m, k->type[0], k->value);
        if (r < 0)
                return r;

        return sd_bus_message_exit_container(m);
}

/* One {sv}: the read position is inside it. */
static int read_entry(sd_bus_message *m, const BusKey *keys, size_t n_keys, uint64_t *seen, Fault *f) {
        const char *key;
        size_t i;
        int r;

        r = sd_bus_message_read_basic(m, 's', &key);
        if (r < 0)
                return r;

        for (i = 0; i < n_keys; i++)
                if (strcmp(keys[i].key, key) == 0)
                        break;

        if (i == n_keys)
                return unknown_key(key, keys, n_keys, f);

        if (*seen & (UINT64_C(1) << i))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "Key \"%s\" is given twice.", key);

        r = read_value(m, &keys[i], f);
        if (r < 0)
                return r;

        *seen |= UINT64_C(1) << i;
        if (keys[i].seen)
                *keys[i].seen = true;

        return 0;
}

int bus_read_dictionary(sd_bus_message *m, const BusKey *keys, size_t n_keys, Fault *f) {
        uint64_t seen = 0;
        int r;

        if (n_keys > 64)
                return -E2BIG;

        r = sd_bus_message_enter_container(m, 'a', "{sv}");
        if (r < 0)
                return r;

        while ((r = sd_bus_message_enter_container(m, 'e', "sv")) > 0) {
                r = read_entry(m, keys, n_keys, &seen, f);
                if (r < 0)
                        return r;

                r = sd_bus_message_exit_container(m);
                if (r < 0)
                        return r;
        }
        if (r < 0)
                return r;

        r = sd_bus_message_exit_container(m);
        return r < 0 ? r : 0;
}

int bus_open_list(sd_bus_message *m, const char *key, const char *element) {
        char type[16];
        int r;

        (void) snprintf(type, sizeof(type), "a%s", element);
        r = sd_bus_message_open_container(m, 'e', "sv");
        if (r >= 0)
                r = sd_bus_message_append(m, "s", key);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'v', type);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'a', element);
        return r;
}

int bus_close_list(sd_bus_message *m) {
        int r = 0;

        for (int i = 0; i < 3 && r >= 0; i++)
                r = sd_bus_message_close_container(m);
        return r;
}

int bus_append_numbers(sd_bus_message *m, const char *key, const uint64_t *values, size_t n) {
        int r;

        r = bus_open_list(m, key, "t");
        for (size_t i = 0; i < n && r >= 0; i++)
                r = sd_bus_message_append(m, "t", values[i]);
        return r < 0 ? r : bus_close_list(m);
}

int bus_append_strings(sd_bus_message *m, const char *key, const char *const *values, size_t n) {
        int r;

        r = bus_open_list(m, key, "s");
        for (size_t i = 0; i < n && r >= 0; i++)
                r = sd_bus_message_append(m, "s", values[i]);
        return r < 0 ? r : bus_close_list(m);
}

void bus_text(char *s) {
        size_t n = strlen(s);
        uint32_t c;

        for (size_t i = 0; i < n;) {
                size_t len = utf8_decode(s + i, n - i, &c);

                if (len == 0)
                        s[i] = '?';
                i += len > 0 ? len : 1;
        }
}

int bus_path_id(const char *path, const char *prefix, uint64_t *ret) {
        size_t n = strlen(prefix);
        uint64_t id = 0;

        if (strncmp(path, prefix, n) != 0 || path[n] < '1' || path[n] > '9')
                return -ENOENT;

        for (const char *p = path + n; *p; p++) {
                if (*p < '0' || *p > '9')
                        return -ENOENT;

                if (__builtin_mul_overflow(id, 10u, &id) || __builtin_add_overflow(id, (uint64_t) (*p - '0'), &id))
                        return -ENOENT;
        }

        *ret = id;
        return 0;
}
