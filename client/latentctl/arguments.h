/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Command lines: --name VALUE, --name=VALUE, -o VALUE, -oVALUE; options and operands in any order, "--" ends
 * the options. */

#include "client/latentctl/ctl.h"

typedef enum OptionType {
        OPTION_FLAG,   /* bool */
        OPTION_STRING, /* const char *: the newest */
        OPTION_UINT,   /* uint64_t, decimal */
        OPTION_DOUBLE, /* double, finite */
        OPTION_STRINGS, /* StringList: all, in their order */
} OptionType;

#define STRINGS_MAX 30u

typedef struct StringList {
        const char *items[STRINGS_MAX];
        uint8_t tags[STRINGS_MAX]; /* of the option that each came with */
        uint32_t n;
} StringList;

typedef struct NumberRange {
        double min, max;
        const char *text; /* "expected " and this */
} NumberRange;

/* What the service takes as an f32. */
extern const NumberRange range_shift, range_sigma;

typedef struct Option {
        const char *name; /* without the dashes */
        OptionType type;
        void *value;
        bool *seen;  /* may be NULL */
        char letter; /* '\0': none */
        uint8_t tag; /* STRINGS: for options that share a list */
        uint64_t min, max; /* UINT; max 0: all */
        const NumberRange *range; /* DOUBLE */
} Option;

/* Parses argv[1..] against the verb's options and the global ones (c). Operands go to ret_operands,
 * operands_min to operands_max of them; absent ones are NULL. With --help only c->help is sure to be set.
 * -EINVAL with e (CTL_ERROR_USAGE). */
int arguments_parse(Ctl *c, int argc, char *argv[], const Option *options, size_t n_options,
        size_t operands_min, size_t operands_max, const char **ret_operands, latent_error *e);

/* Up to the first operand: the index of the verb in argv, argc if there is none. *ret_version: --version was
 * given. -EINVAL with e. */
int arguments_parse_global(Ctl *c, int argc, char *argv[], bool *ret_version, latent_error *e);

/* Whole decimal numbers, and finite ones. -EINVAL. */
int parse_uint(const char *s, uint64_t *ret);
int parse_double(const char *s, double *ret);
