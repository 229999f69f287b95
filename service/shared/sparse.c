/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/sparse.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

#define TEXT_MAX 1024u

static const char *const method_names[] = {
        [SPARSE_NONE] = "off", [SPARSE_SOL] = "sol-attn", [SPARSE_SLA] = "sla", [SPARSE_VSA] = "vsa"};
static const char *const sinks_names[] = {[SPARSE_SINKS_KV_AND_ROWS] = "exact_kv_and_rows", [SPARSE_SINKS_KV] = "exact_kv",
        [SPARSE_SINKS_OFF] = "off"};
static const char *const switch_names[] = {"off", "on"};

const char *sparse_method_to_string(SparseMethod m) {
        return method_names[m];
}

static int refuse(Fault *f, const char *key, const char *value, const char *expected) {
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: \"%.32s\" is \"%.64s\", expected %s.", key, value, expected);
}

static int read_number(const char *key, const char *value, double low, double high, const char *expected, double *ret, Fault *f) {
        double number;
        char *end;

        errno = 0;
        number = strtod(value, &end);
        if (end == value || *end != '\0' || errno != 0 || !(number >= low && number <= high))
                return refuse(f, key, value, expected);
        *ret = number;
        return 0;
}

static int read_float(const char *key, const char *value, double low, double high, const char *expected, float *ret, Fault *f) {
        double number;
        int r;

        r = read_number(key, value, low, high, expected, &number, f);
        if (r >= 0)
                *ret = (float) number;
        return r;
}

static int read_name(const char *key, const char *value, const char *const *names, uint32_t n, const char *expected, uint32_t *ret,
        Fault *f) {
        for (uint32_t i = 0; i < n; i++)
                if (strcmp(value, names[i]) == 0) {
                        *ret = i;
                        return 0;
                }
        return refuse(f, key, value, expected);
}

/* "0+47-49": a comma would end the value. */
static int read_blocks(const char *key, const char *value, SparseOptions *o, Fault *f) {
        static const char expected[] = "numbers and ranges of blocks from 0 on with + between them, as in 0+47-49";
        const char *at = value;

        while (*value != '\0') {
                unsigned long first, last;
                char *end;

                if (*at < '0' || *at > '9')
                        return refuse(f, key, value, expected);
                first = last = strtoul(at, &end, 10);
                if (*end == '-') {
                        at = end + 1;
                        if (*at < '0' || *at > '9')
                                return refuse(f, key, value, expected);
                        last = strtoul(at, &end, 10);
                }
                if (last < first || last >= SPARSE_LAYERS_MAX || (*end != '\0' && *end != '+'))
                        return refuse(f, key, value, expected);
                for (unsigned long i = first; i <= last; i++)
                        o->dense[i / 8] |= (uint8_t) (1u << i % 8);
                if (*end == '\0')
                        return 0;
                at = end + 1;
        }
        return 0;
}

typedef enum Key {
        KEY_TAU,
        KEY_KEEP,
        KEY_START,
        KEY_END,
        KEY_SIGMA_START,
        KEY_SIGMA_END,
        KEY_DENSE_BLOCKS,
        KEY_MIN_TOKENS,
        KEY_SINKS,
        KEY_TAIL,
        _KEY_MAX,
} Key;

static const struct {
        const char *name;
        uint32_t methods; /* bit per SparseMethod */
} keys[] = {
        [KEY_TAU] = {"tau", 1u << SPARSE_SOL},
        [KEY_KEEP] = {"keep", 1u << SPARSE_SLA | 1u << SPARSE_VSA},
        [KEY_START] = {"start", ~0u},
        [KEY_END] = {"end", ~0u},
        [KEY_SIGMA_START] = {"sigma_start", ~0u},
        [KEY_SIGMA_END] = {"sigma_end", ~0u},
        [KEY_DENSE_BLOCKS] = {"dense_blocks", ~0u},
        [KEY_MIN_TOKENS] = {"min_tokens", ~0u},
        [KEY_SINKS] = {"sinks", 1u << SPARSE_SOL | 1u << SPARSE_SLA},
        [KEY_TAIL] = {"tail", 1u << SPARSE_SOL | 1u << SPARSE_SLA},
};

static int read_value(Key key, const char *value, SparseOptions *o, Fault *f) {
        const char *name = keys[key].name;
        double number;
        int r;

        switch (key) {
        case KEY_TAU:
                return read_float(name, value, 0, 4, "0 to 4", &o->tau, f);
        case KEY_KEEP:
                return read_float(name, value, 0.5, 95, "0.5 to 95 (percent of the blocks)", &o->keep, f);
        case KEY_START:
        case KEY_END:
                return read_float(name, value, 0, 1, "0 to 1 (part of the schedule)", key == KEY_START ? &o->start : &o->end, f);
        case KEY_SIGMA_START:
        case KEY_SIGMA_END:
                return read_float(name, value, 0, 1, "0 to 1", key == KEY_SIGMA_START ? &o->start : &o->end, f);
        case KEY_DENSE_BLOCKS:
                return read_blocks(name, value, o, f);
        case KEY_MIN_TOKENS:
                r = read_number(name, value, 0, 1u << 30, "a number of rows from 0 on", &number, f);
                if (r >= 0 && number != floor(number))
                        return refuse(f, name, value, "a number of rows from 0 on");
                o->min_tokens = r >= 0 ? (uint64_t) number : 0;
                return r;
        case KEY_SINKS:
                return read_name(name, value, sinks_names, ELEMENTSOF(sinks_names), "exact_kv_and_rows, exact_kv or off", &o->sinks, f);
        default:
                return read_name(name, value, switch_names, ELEMENTSOF(switch_names), "on or off", &o->tail, f);
        }
}

/* One key=value; seen: bits of the keys so far. */
static int read_pair(char *pair, SparseOptions *o, uint32_t *seen, Fault *f) {
        char *value = strchr(pair, '=');
        Key key = 0;

        if (!value)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: \"%.64s\" is no key=value.", pair);
        *value++ = '\0';
        while (key < _KEY_MAX && strcmp(keys[key].name, pair) != 0)
                key++;
        if (strcmp(pair, "extra_tokens") == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "sparse: there is no extra_tokens: single keys of blocks that are not seen are not picked out. Leave it out; "
                        "a lower tau or a higher keep sees more.");
        if (key == _KEY_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "sparse: there is no key \"%.64s\"; there are tau, keep, start, end, sigma_start, sigma_end, dense_blocks, "
                        "min_tokens, sinks and tail.",
                        pair);
        if (!(keys[key].methods >> o->method & 1))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: \"%s\" is not for %s.", keys[key].name,
                        method_names[o->method]);
        if (*seen >> key & 1)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: \"%s\" is there twice.", keys[key].name);
        *seen |= 1u << key;
        return read_value(key, value, o, f);
}

/* start and end were read one by one, of one kind or of both. */
static int check_range(SparseOptions *o, uint32_t seen, Fault *f) {
        bool parts = seen & (1u << KEY_START | 1u << KEY_END), sigmas = seen & (1u << KEY_SIGMA_START | 1u << KEY_SIGMA_END);

        if (parts && sigmas)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "sparse: start and end are given as parts of the schedule and as sigmas; give one of both.");
        if (sigmas) {
                o->by_sigma = 1;
                if (!(seen & 1u << KEY_SIGMA_START))
                        o->start = 1;
                if (!(seen & 1u << KEY_SIGMA_END))
                        o->end = 0;
        }
        if (sigmas ? o->start < o->end : o->start > o->end)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: it would start (%g) after its end (%g).",
                        (double) o->start, (double) o->end);
        return 0;
}

int sparse_parse(const char *text, SparseOptions *ret, Fault *f) {
        SparseOptions o = {.tail = 1, .tau = 1.3f, .keep = 10, .start = 0.2f, .end = 1, .min_tokens = 12288};
        char copy[TEXT_MAX], *rest = copy, *pair;
        uint32_t seen = 0;
        int r;

        if (strlen(text) >= sizeof(copy))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "sparse: the text has more than %u bytes.", TEXT_MAX - 1);
        if (text[0] == '\0' || strcmp(text, method_names[SPARSE_NONE]) == 0) {
                *ret = (SparseOptions){};
                return 0;
        }
        (void) memcpy(copy, text, strlen(text) + 1);
        pair = strsep(&rest, ":");
        for (o.method = SPARSE_SOL; o.method < _SPARSE_METHOD_MAX && strcmp(pair, method_names[o.method]) != 0;)
                o.method++;
        if (o.method == _SPARSE_METHOD_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "sparse: \"%.64s\" is no method; there are sol-attn, sla and vsa, or off.", pair);
        if (o.method == SPARSE_VSA)
                o.tail = 0;

        while ((pair = strsep(&rest, ","))) {
                r = read_pair(pair, &o, &seen, f);
                if (r < 0)
                        return r;
        }
        r = check_range(&o, seen, f);
        if (r < 0)
                return r;
        *ret = o;
        return 0;
}

int sparse_refuse_model(bool vsa, Fault *f) {
        if (vsa)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "sparse: vsa needs a model that was made for it, with gate weights (attn.to_gate_compress), and this one has "
                        "none: use sol-attn or sla.");
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "sparse: the model was made for vsa (it has gate weights, attn.to_gate_compress): use vsa, or leave sparse out.");
}

static bool between(float x, float low, float high) {
        return x >= low && x <= high;
}

bool sparse_check(const SparseOptions *o, uint32_t layers) {
        static const SparseOptions none = {};

        if (o->method == SPARSE_NONE)
                return memcmp(o, &none, sizeof(none)) == 0;
        for (uint32_t i = layers; i < SPARSE_LAYERS_MAX; i++)
                if (sparse_is_dense(o, i))
                        return false;
        return o->method < _SPARSE_METHOD_MAX && o->sinks < _SPARSE_SINKS_MAX && o->tail <= (o->method != SPARSE_VSA) &&
               o->by_sigma <= 1 && o->reserved == 0 && between(o->tau, 0, 4) && between(o->keep, 0.5f, 95) &&
               between(o->start, 0, 1) && between(o->end, 0, 1) && (o->by_sigma ? o->start >= o->end : o->start <= o->end) &&
               isfinite(o->shift) && o->shift > 0 && o->min_tokens <= UINT64_C(1) << 30;
}

/* ComfyUI's percent_to_sigma(): the ends are exact. */
static float sigma_of(float part, float shift) {
        double b = 1 - (double) part, s = (double) shift;

        if (part <= 0)
                return 1;
        if (part >= 1)
                return 0;
        return (float) (s * b / (1 + (s - 1) * b));
}

void sparse_sigmas(const SparseOptions *o, float *ret_start, float *ret_end) {
        *ret_start = o->by_sigma ? o->start : sigma_of(o->start, o->shift);
        *ret_end = o->by_sigma ? o->end : sigma_of(o->end, o->shift);
}
