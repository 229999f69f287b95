/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/arguments.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/report.h"

const NumberRange range_shift = {FLT_TRUE_MIN, FLT_MAX, "a number greater than 0 and at most 3.4e+38, such as 12"};
const NumberRange range_sigma = {0, 1, "a number from 0 to 1"};

int parse_uint(const char *s, uint64_t *ret) {
        unsigned long long v;
        char *end;

        if (!isdigit((unsigned char) s[0])) /* strtoull() takes signs and spaces */
                return -EINVAL;
        errno = 0;
        v = strtoull(s, &end, 10);
        if (errno != 0 || *end != '\0')
                return -EINVAL;

        *ret = v;
        return 0;
}

int parse_double(const char *s, double *ret) {
        char *end;
        double v;

        if (s[0] == '\0' || isspace((unsigned char) s[0]))
                return -EINVAL;
        errno = 0;
        v = strtod(s, &end);
        if (*end != '\0' || !isfinite(v))
                return -EINVAL;

        *ret = v;
        return 0;
}

/* Global state of one parse. */
typedef struct Parser {
        Ctl *ctl;
        const Option *options;
        size_t n_options;
        bool system, user, version;
        latent_error *error;
} Parser;

static int usage(Parser *p, const char *what, const char *name) {
        return ctl_error(p->error, -EINVAL, CTL_ERROR_USAGE, "%s %s", what, name);
}

static const Option *find_long(const Option *options, size_t n, const char *name, size_t length) {
        for (size_t i = 0; i < n; i++)
                if (strlen(options[i].name) == length && strncmp(options[i].name, name, length) == 0)
                        return &options[i];

        return NULL;
}

static const Option *find_letter(const Option *options, size_t n, char letter) {
        for (size_t i = 0; i < n; i++)
                if (options[i].letter == letter)
                        return &options[i];

        return NULL;
}

static int add_string(Parser *p, const Option *o, const char *value) {
        StringList *l = o->value;

        if (l->n == STRINGS_MAX)
                return ctl_error(p->error, -EINVAL, CTL_ERROR_USAGE, "--%s may be given at most %u times", o->name,
                        STRINGS_MAX);

        l->tags[l->n] = o->tag;
        l->items[l->n++] = value;
        return 0;
}

static int set_uint(Parser *p, const Option *o, const char *value) {
        uint64_t max = o->max > 0 ? o->max : UINT64_MAX, v;

        if (parse_uint(value, &v) < 0 || v < o->min || v > max)
                return ctl_error(p->error, -EINVAL, CTL_ERROR_USAGE, "--%s %s: expected a whole number from %" PRIu64 " to %" PRIu64,
                        o->name, format_value(value), o->min, max);
        *(uint64_t *) o->value = v;
        return 0;
}

static int set_double(Parser *p, const Option *o, const char *value) {
        double v;

        if (parse_double(value, &v) < 0 || v < o->range->min || v > o->range->max)
                return ctl_error(p->error, -EINVAL, CTL_ERROR_USAGE, "--%s %s: expected %s", o->name, format_value(value), o->range->text);
        *(double *) o->value = v;
        return 0;
}

static int set_option(Parser *p, const Option *o, const char *value) {
        int r = 0;

        switch (o->type) {
        case OPTION_FLAG:
                *(bool *) o->value = true;
                break;
        case OPTION_STRING:
                *(const char **) o->value = value;
                break;
        case OPTION_UINT:
                r = set_uint(p, o, value);
                break;
        case OPTION_DOUBLE:
                r = set_double(p, o, value);
                break;
        case OPTION_STRINGS:
                return add_string(p, o, value);
        }
        if (r >= 0 && o->seen)
                *o->seen = true;
        return r;
}

/* argv[*at] begins with a dash. Takes the value from the next argument where need be. */
static int parse_option(Parser *p, int argc, char *argv[], int *at, const Option *global, size_t n_global) {
        const char *a = argv[*at], *value = NULL;
        const Option *o = NULL;

        if (a[1] == '-') {
                size_t n = strcspn(a + 2, "=");

                o = find_long(p->options, p->n_options, a + 2, n);
                if (!o)
                        o = find_long(global, n_global, a + 2, n);
                if (a[2 + n] == '=')
                        value = a + 2 + n + 1;
        } else {
                o = find_letter(p->options, p->n_options, a[1]);
                if (!o)
                        o = find_letter(global, n_global, a[1]);
                if (a[2] != '\0')
                        value = a + 2;
        }
        if (!o)
                return usage(p, "unknown option", a);
        if (o->type == OPTION_FLAG)
                return value ? usage(p, "no value is expected:", a) : set_option(p, o, NULL);

        if (!value) {
                if (*at + 1 >= argc)
                        return usage(p, "a value is missing behind", a);
                value = argv[++*at];
        }
        return set_option(p, o, value);
}

static int take_bus(Parser *p) {
        int n = (p->system ? 1 : 0) + (p->user ? 1 : 0) + (p->ctl->bus.address ? 1 : 0) +
                (p->ctl->bus.socket ? 1 : 0);

        if (n > 1)
                return ctl_error(p->error, -EINVAL, CTL_ERROR_USAGE,
                        "only one of --system, --user, --bus-address and --socket is possible");
        if (p->ctl->bus.address && p->ctl->bus.address[0] == '\0')
                return usage(p, "a value is missing behind", "--bus-address");
        if (p->system)
                p->ctl->bus.bus = LATENT_BUS_SYSTEM;
        else if (p->user)
                p->ctl->bus.bus = LATENT_BUS_USER;
        else if (p->ctl->bus.address)
                p->ctl->bus.bus = LATENT_BUS_ADDRESS;
        return 0;
}

/* Returns the index behind the last argument that was taken. */
static int parse(Parser *p, int argc, char *argv[], bool stop_at_operand, size_t operands_max,
        const char **ret_operands, size_t *ret_n) {
        const Option global[] = {
                {"json", OPTION_FLAG, &p->ctl->json, NULL, '\0'},
                {"system", OPTION_FLAG, &p->system, NULL, '\0'},
                {"user", OPTION_FLAG, &p->user, NULL, '\0'},
                {"bus-address", OPTION_STRING, &p->ctl->bus.address, NULL, '\0'},
                {"socket", OPTION_STRING, &p->ctl->bus.socket, NULL, '\0'},
                {"help", OPTION_FLAG, &p->ctl->help, NULL, 'h'},
                {"version", OPTION_FLAG, &p->version, NULL, '\0'},
        };
        bool only_operands = false;
        int i, r;

        /* What an earlier call (before the verb) set counts too. */
        p->system = p->ctl->bus.bus == LATENT_BUS_SYSTEM;
        p->user = p->ctl->bus.bus == LATENT_BUS_USER;

        for (i = 1; i < argc; i++) {
                if (!only_operands && strcmp(argv[i], "--") == 0) {
                        only_operands = true;
                        continue;
                }
                if (!only_operands && argv[i][0] == '-' && argv[i][1] != '\0') {
                        r = parse_option(p, argc, argv, &i, global, ELEMENTSOF(global));
                        if (r < 0)
                                return r;
                        continue;
                }
                if (stop_at_operand)
                        break;
                if (*ret_n >= operands_max)
                        return p->ctl->help ? i : usage(p, "unexpected argument", argv[i]);
                ret_operands[(*ret_n)++] = argv[i];
        }

        r = take_bus(p);
        return r < 0 ? r : i;
}

int arguments_parse(Ctl *c, int argc, char *argv[], const Option *options, size_t n_options,
        size_t operands_min, size_t operands_max, const char **ret_operands, latent_error *e) {
        Parser p = {.ctl = c, .options = options, .n_options = n_options, .error = e};
        size_t n = 0;
        int r;

        for (size_t i = 0; i < operands_max; i++)
                ret_operands[i] = NULL;

        r = parse(&p, argc, argv, false, operands_max, ret_operands, &n);
        if (r < 0)
                return r;
        if (n < operands_min && !c->help)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "%zu argument%s missing", operands_min - n,
                        operands_min - n == 1 ? " is" : "s are");

        return 0;
}

int arguments_parse_global(Ctl *c, int argc, char *argv[], bool *ret_version, latent_error *e) {
        Parser p = {.ctl = c, .error = e};
        size_t n = 0;
        int r;

        r = parse(&p, argc, argv, true, 0, NULL, &n);
        if (r < 0)
                return r;

        *ret_version = p.version;
        return r;
}
