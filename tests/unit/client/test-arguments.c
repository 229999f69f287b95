/* SPDX-License-Identifier: Apache-2.0 */

/* Command lines of latentctl. */

#include "client/latentctl/arguments.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define ARGV(...) ((char *[]){"verb", __VA_ARGS__, NULL})
#define COUNT(...) ((int) (sizeof((char *[]){"verb", __VA_ARGS__}) / sizeof(char *)))

typedef struct Parsed {
        const char *output, *compute;
        uint64_t steps, some;
        double shift, sigma;
        bool keep, has_steps;
        StringList loras;
        const char *operands[2];
        Ctl ctl;
        latent_error error;
} Parsed;

static int parse(Parsed *p, int argc, char *argv[]) {
        const Option options[] = {
                {"output", OPTION_STRING, &p->output, NULL, 'o'},
                {"compute", OPTION_STRING, &p->compute, NULL, '\0'},
                {"steps", OPTION_UINT, &p->steps, &p->has_steps, '\0'},
                {"some", OPTION_UINT, &p->some, NULL, '\0', .min = 2, .max = 4},
                {"shift", OPTION_DOUBLE, &p->shift, NULL, '\0', .range = &range_shift},
                {"sigma", OPTION_DOUBLE, &p->sigma, NULL, '\0', .range = &range_sigma},
                {"keep-steps", OPTION_FLAG, &p->keep, NULL, '\0'},
                {"lora", OPTION_STRINGS, &p->loras, NULL, '\0'},
                {"more", OPTION_STRINGS, &p->loras, NULL, '\0', 7},
        };

        return arguments_parse(
                &p->ctl, argc, argv, options, ELEMENTSOF(options), 1, 2, p->operands, &p->error);
}

#define PARSE(p, ...) parse(p, COUNT(__VA_ARGS__), ARGV(__VA_ARGS__))

static void parse_all_spellings(void **state) {
        Parsed p = {};

        assert_int_equal(PARSE(&p, "model", "-o", "a", "--compute=f32", "--steps", "8", "in", "--keep-steps",
                                 "--shift=1.5"),
                0);
        assert_string_equal(p.operands[0], "model");
        assert_string_equal(p.operands[1], "in");
        assert_string_equal(p.output, "a");
        assert_string_equal(p.compute, "f32");
        assert_int_equal(p.steps, 8);
        assert_true(p.has_steps);
        assert_true(p.keep);
        assert_true(p.shift == 1.5);

        p = (Parsed){};
        assert_int_equal(PARSE(&p, "-oa", "--", "--steps"), 0);
        assert_string_equal(p.output, "a");
        assert_string_equal(p.operands[0], "--steps");
        assert_null(p.operands[1]);
        assert_false(p.has_steps);

        p = (Parsed){};
        assert_int_equal(
                PARSE(&p, "-", "--output="), 0); /* a dash alone is an operand; an empty value is a value */
        assert_string_equal(p.operands[0], "-");
        assert_string_equal(p.output, "");
}

static void parse_global_options(void **state) {
        Parsed p = {};

        assert_int_equal(PARSE(&p, "m", "--json", "--user"), 0);
        assert_true(p.ctl.json);
        assert_int_equal(p.ctl.bus.bus, LATENT_BUS_USER);

        p = (Parsed){};
        assert_int_equal(PARSE(&p, "m", "--bus-address=unix:path=/x"), 0);
        assert_int_equal(p.ctl.bus.bus, LATENT_BUS_ADDRESS);
        assert_string_equal(p.ctl.bus.address, "unix:path=/x");

        p = (Parsed){};
        assert_int_equal(PARSE(&p, "--help"), 0); /* operands do not matter then */
        assert_true(p.ctl.help);
}

static void refuse(int r, const Parsed *p, const char *says) {
        assert_int_equal(r, -EINVAL);
        assert_string_equal(p->error.name, CTL_ERROR_USAGE);
        if (!strstr(p->error.text, says))
                fail_msg("\"%s\" does not say \"%s\"", p->error.text, says);
}

static void parse_mistakes_refused(void **state) {
        Parsed p = {};

        refuse(PARSE(&p, "m", "--stepz", "3"), &p, "--stepz");
        refuse(PARSE(&p, "m", "--step=3"), &p, "--step=3"); /* no abbreviations */
        refuse(PARSE(&p, "m", "-x"), &p, "-x");
        refuse(PARSE(&p, "m", "--steps"), &p, "value");
        refuse(PARSE(&p, "m", "--keep-steps=yes"), &p, "--keep-steps=yes");
        refuse(PARSE(&p, "m", "in", "more"), &p, "more");
        refuse(PARSE(&p, "--keep-steps"), &p, "missing");
        refuse(PARSE(&p, "m", "--user", "--system"), &p, "only one");
        p.ctl = (Ctl){};
        refuse(PARSE(&p, "m", "--user", "--bus-address=x"), &p, "only one");
        refuse(PARSE(&p, "m", "--socket=/x", "--system"), &p, "only one");
        p.ctl = (Ctl){};
        for (size_t i = 0; i < 7; i++) {
                static char *const wrong[] = {"", "-1", "+1", " 1", "1x", "1.5", "99999999999999999999"};

                refuse(PARSE(&p, "m", "--steps", wrong[i]), &p, "whole number");
        }
        refuse(PARSE(&p, "m", "--some", "1"), &p, "--some 1: expected a whole number from 2 to 4");
        refuse(PARSE(&p, "m", "--some", "5"), &p, "2 to 4");
        refuse(PARSE(&p, "m", "--some", "-3"), &p, "2 to 4");
        refuse(PARSE(&p, "m", "--bus-address="), &p, "a value is missing behind --bus-address");
        p.ctl = (Ctl){};
        for (size_t i = 0; i < 9; i++) {
                static char *const wrong[] = {"", "nan", "inf", "1e999", " 1", "0", "-1.5", "1e300", "1e-300"};
                char says[96];

                (void) snprintf(says, sizeof(says), "--shift %s: expected a number greater than 0 and at most",
                        wrong[i][0] ? wrong[i] : "\"\"");
                refuse(PARSE(&p, "m", "--shift", wrong[i]), &p, says);
        }
        assert_int_equal(PARSE(&p, "m", "--sigma", "0", "--shift", "3e38"), 0);
        assert_int_equal(PARSE(&p, "m", "--sigma", "1", "--shift", "1e-40"), 0);
        refuse(PARSE(&p, "m", "--sigma", "1.0001"), &p, "--sigma 1.0001: expected a number from 0 to 1");
}

static void parse_global_stops_at_the_verb(void **state) {
        char *argv[] = {"latentctl", "--json", "--bus-address", "x", "step", "--steps", "3", NULL};
        Ctl c = {};
        bool version;

        assert_int_equal(arguments_parse_global(&c, 7, argv, &version, NULL), 4);
        assert_true(c.json);
        assert_false(version);
        assert_string_equal(c.bus.address, "x");

        argv[1] = "--version";
        argv[2] = NULL;
        assert_int_equal(arguments_parse_global(&c, 2, argv, &version, NULL), 2);
        assert_true(version);
}

static void parse_strings_all_in_their_order(void **state) {
        char *argv[2 + STRINGS_MAX + 1] = {"verb", "model"};
        Parsed p = {};

        assert_int_equal(PARSE(&p, "model", "--lora", "b", "--compute", "f32", "--lora=a:0.5", "--lora", ""), 0);
        assert_int_equal(p.loras.n, 3);
        assert_string_equal(p.loras.items[0], "b");
        assert_string_equal(p.loras.items[1], "a:0.5");
        assert_string_equal(p.loras.items[2], "");

        p = (Parsed){};
        assert_int_equal(PARSE(&p, "model", "--more", "a", "--lora", "b", "--more=c"), 0); /* one list, told apart */
        assert_int_equal(p.loras.n, 3);
        assert_string_equal(p.loras.items[2], "c");
        assert_memory_equal(p.loras.tags, ((uint8_t[]){7, 0, 7}), 3);

        for (unsigned i = 0; i <= STRINGS_MAX; i++)
                argv[2 + i] = "--lora=x";
        p = (Parsed){};
        assert_int_equal(parse(&p, 2 + STRINGS_MAX, argv), 0);
        assert_int_equal(p.loras.n, STRINGS_MAX);
        p = (Parsed){};
        assert_int_equal(parse(&p, 3 + STRINGS_MAX, argv), -EINVAL);
        assert_non_null(strstr(p.error.text, "30"));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(parse_strings_all_in_their_order),
                cmocka_unit_test(parse_all_spellings),
                cmocka_unit_test(parse_global_options),
                cmocka_unit_test(parse_mistakes_refused),
                cmocka_unit_test(parse_global_stops_at_the_verb),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
