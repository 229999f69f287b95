/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/value.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/error.h"
#include "service/shared/cleanup.h"

/* D-Bus itself allows 64 containers in each other. */
#define VALUE_DEPTH_MAX 64

struct latent_value {
        int type;
        char *key; /* in a dictionary */
        union {
                int boolean;
                uint64_t u;
                int64_t i;
                double d;
                char *string;
        };
        latent_value **children; /* lists and dictionaries */
        size_t n_children, n_allocated;
};

DEFINE_CLEANUP(latent_value *, latent_value_free)

latent_value *value_new(int type) {
        latent_value *v = calloc(1, sizeof(*v));

        if (v)
                v->type = type;
        return v;
}

LATENT_PUBLIC void latent_value_free(latent_value *value) {
        if (!value)
                return;

        for (size_t i = 0; i < value->n_children; i++)
                latent_value_free(value->children[i]);
        free(value->children);
        if (value->type == LATENT_VALUE_STRING)
                free(value->string);
        free(value->key);
        free(value);
}

int value_add(latent_value *parent, const char *key, latent_value *child) {
        CLEANUP(latent_value_freep) latent_value *owned = child;

        if (!child)
                return -ENOMEM;

        if (parent->n_children == parent->n_allocated) {
                size_t n = parent->n_allocated > 0 ? 2 * parent->n_allocated : 8;
                latent_value **p = reallocarray(parent->children, n, sizeof(*p));

                if (!p)
                        return -ENOMEM;
                parent->children = p;
                parent->n_allocated = n;
        }

        if (key) {
                child->key = strdup(key);
                if (!child->key)
                        return -ENOMEM;
        }

        parent->children[parent->n_children++] = STEAL_PTR(owned);
        return 0;
}

static latent_value *value_new_string(const char *string) {
        CLEANUP(latent_value_freep) latent_value *v = value_new(LATENT_VALUE_STRING);

        if (!v)
                return NULL;
        v->string = strdup(string);
        return v->string ? STEAL_PTR(v) : NULL;
}

/* Paths end in numbers, which the bus escapes alike: a shorter one is a smaller one. */
static int compare_paths(const void *a, const void *b) {
        const char *x = latent_value_as_string(latent_value_get(*(latent_value *const *) a, "path"));
        const char *y = latent_value_as_string(latent_value_get(*(latent_value *const *) b, "path"));
        size_t n = x ? strlen(x) : 0, k = y ? strlen(y) : 0;

        if (n != k)
                return n < k ? -1 : 1;
        return n > 0 ? strcmp(x, y) : 0;
}

void value_sort_by_path(latent_value *list) {
        if (list->n_children > 0)
                qsort(list->children, list->n_children, sizeof(*list->children), compare_paths);
}

int value_add_string(latent_value *parent, const char *key, const char *string) {
        return value_add(parent, key, value_new_string(string));
}

/* Room for any basic type as sd-bus writes it. */
typedef union Basic {
        uint8_t y;
        int b; /* and a descriptor */
        int16_t n;
        uint16_t q;
        int32_t i;
        uint32_t u;
        int64_t x;
        uint64_t t;
        double d;
        const char *s;
} Basic;

static void value_set_integer(latent_value *v, char type, const Basic *b) {
        switch (type) {
        case 'y':
                v->u = b->y;
                break;
        case 'q':
                v->u = b->q;
                break;
        case 'u':
                v->u = b->u;
                break;
        case 't':
                v->u = b->t;
                break;
        case 'n':
                v->i = b->n;
                break;
        case 'i':
                v->i = b->i;
                break;
        default:
                v->i = b->x;
                break;
        }
        v->type = strchr("yqut", type) ? LATENT_VALUE_UINT : LATENT_VALUE_INT;
}

static int value_read_basic(sd_bus_message *m, char type, latent_value **ret) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        Basic b = {};
        int r;

        /* Nothing that the service says about itself has descriptors in it. */
        if (!strchr("ybnqiuxtdsog", type))
                return -EBADMSG;

        r = sd_bus_message_read_basic(m, type, &b);
        if (r <= 0)
                return r < 0 ? r : -EBADMSG;

        if (strchr("sog", type))
                v = value_new_string(b.s);
        else
                v = value_new(0);
        if (!v)
                return -ENOMEM;

        if (type == 'b') {
                v->type = LATENT_VALUE_BOOL;
                v->boolean = b.b != 0;
        } else if (type == 'd') {
                v->type = LATENT_VALUE_DOUBLE;
                v->d = b.d;
        } else if (!strchr("sog", type))
                value_set_integer(v, type, &b);

        *ret = STEAL_PTR(v);
        return 0;
}

static int value_read_depth(sd_bus_message *m, unsigned depth, latent_value **ret);

/* One {string: value} entry, entered and left here. */
static int value_read_entry(sd_bus_message *m, const char *contents, unsigned depth, latent_value *dict) {
        latent_value *child = NULL;
        const char *key;
        int r;

        r = sd_bus_message_enter_container(m, 'e', contents);
        if (r <= 0)
                return r < 0 ? r : -EBADMSG;
        r = sd_bus_message_read_basic(m, contents[0], &key);
        if (r <= 0)
                return r < 0 ? r : -EBADMSG;
        r = value_read_depth(m, depth, &child);
        if (r < 0)
                return r;
        r = value_add(dict, key, child);
        if (r < 0)
                return r;

        return sd_bus_message_exit_container(m);
}

/* The elements of a container that has been entered. */
static int value_read_children(sd_bus_message *m, unsigned depth, latent_value *parent) {
        for (;;) {
                latent_value *child = NULL;
                const char *contents;
                char type;
                int r;

                r = sd_bus_message_peek_type(m, &type, &contents);
                if (r <= 0)
                        return r;

                if (parent->type == LATENT_VALUE_DICT) {
                        r = value_read_entry(m, contents, depth, parent);
                        if (r < 0)
                                return r;
                        continue;
                }

                r = value_read_depth(m, depth, &child);
                if (r < 0)
                        return r;
                r = value_add(parent, NULL, child);
                if (r < 0)
                        return r;
        }
}

static int value_read_container(
        sd_bus_message *m, char type, const char *contents, unsigned depth, latent_value **ret) {
        CLEANUP(latent_value_freep) latent_value *v = NULL;
        bool is_dict = type == 'a' && contents[0] == '{' && strchr("sog", contents[1]);
        int r;

        r = sd_bus_message_enter_container(m, type, contents);
        if (r <= 0)
                return r < 0 ? r : -EBADMSG;

        if (type == 'v')
                r = value_read_depth(m, depth, &v);
        else {
                v = value_new(is_dict ? LATENT_VALUE_DICT : LATENT_VALUE_LIST);
                r = v ? value_read_children(m, depth, v) : -ENOMEM;
        }
        if (r < 0)
                return r;

        r = sd_bus_message_exit_container(m);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(v);
        return 0;
}

static int value_read_depth(sd_bus_message *m, unsigned depth, latent_value **ret) {
        const char *contents;
        char type;
        int r;

        if (depth >= VALUE_DEPTH_MAX)
                return -EBADMSG;

        r = sd_bus_message_peek_type(m, &type, &contents);
        if (r <= 0)
                return r < 0 ? r : -EBADMSG;

        if (strchr("arve", type))
                return value_read_container(m, type, contents, depth + 1, ret);

        return value_read_basic(m, type, ret);
}

int value_read(sd_bus_message *m, latent_value **ret) {
        return value_read_depth(m, 0, ret);
}

LATENT_PUBLIC int latent_value_type(const latent_value *value) {
        return value ? value->type : 0;
}

LATENT_PUBLIC size_t latent_value_count(const latent_value *value) {
        return value ? value->n_children : 0;
}

LATENT_PUBLIC const latent_value *latent_value_at(const latent_value *value, size_t index) {
        return value && index < value->n_children ? value->children[index] : NULL;
}

LATENT_PUBLIC const char *latent_value_key_at(const latent_value *value, size_t index) {
        const latent_value *v = latent_value_at(value, index);

        return v ? v->key : NULL;
}

LATENT_PUBLIC const latent_value *latent_value_get(const latent_value *value, const char *key) {
        if (!value || value->type != LATENT_VALUE_DICT || !key)
                return NULL;

        for (size_t i = 0; i < value->n_children; i++)
                if (strcmp(value->children[i]->key, key) == 0)
                        return value->children[i];

        return NULL;
}

LATENT_PUBLIC const char *latent_value_as_string(const latent_value *value) {
        return latent_value_type(value) == LATENT_VALUE_STRING ? value->string : NULL;
}

LATENT_PUBLIC int latent_value_as_uint(const latent_value *value, uint64_t *ret_value) {
        switch (latent_value_type(value)) {
        case LATENT_VALUE_UINT:
                *ret_value = value->u;
                return 0;
        case LATENT_VALUE_INT:
                if (value->i < 0)
                        return -ERANGE;
                *ret_value = (uint64_t) value->i;
                return 0;
        default:
                return -EINVAL;
        }
}

LATENT_PUBLIC int latent_value_as_int(const latent_value *value, int64_t *ret_value) {
        switch (latent_value_type(value)) {
        case LATENT_VALUE_UINT:
                if (value->u > INT64_MAX)
                        return -ERANGE;
                *ret_value = (int64_t) value->u;
                return 0;
        case LATENT_VALUE_INT:
                *ret_value = value->i;
                return 0;
        default:
                return -EINVAL;
        }
}

LATENT_PUBLIC int latent_value_as_double(const latent_value *value, double *ret_value) {
        switch (latent_value_type(value)) {
        case LATENT_VALUE_UINT:
                *ret_value = (double) value->u;
                return 0;
        case LATENT_VALUE_INT:
                *ret_value = (double) value->i;
                return 0;
        case LATENT_VALUE_DOUBLE:
                *ret_value = value->d;
                return 0;
        default:
                return -EINVAL;
        }
}

LATENT_PUBLIC int latent_value_as_bool(const latent_value *value) {
        return latent_value_type(value) == LATENT_VALUE_BOOL ? value->boolean : -EINVAL;
}
