/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors-internal.h"
#include "service/shared/safetensors.h"

static const struct {
        const char *name;
        uint64_t size;
} types[ST_TYPE_MAX] = {
        [ST_BOOL] = {"BOOL", 1},
        [ST_U8] = {"U8", 1},
        [ST_I8] = {"I8", 1},
        [ST_U16] = {"U16", 2},
        [ST_I16] = {"I16", 2},
        [ST_F16] = {"F16", 2},
        [ST_BF16] = {"BF16", 2},
        [ST_U32] = {"U32", 4},
        [ST_I32] = {"I32", 4},
        [ST_F32] = {"F32", 4},
        [ST_U64] = {"U64", 8},
        [ST_I64] = {"I64", 8},
        [ST_F64] = {"F64", 8},
        [ST_F8_E4M3] = {"F8_E4M3", 1},
        [ST_F8_E5M2] = {"F8_E5M2", 1},
        [ST_F8_E8M0] = {"F8_E8M0", 1},
};

static bool is_type(StType t) {
        return (int) t >= 0 && (int) t < (int) ST_TYPE_MAX;
}

const char *st_type_name(StType t) {
        return is_type(t) ? types[t].name : NULL;
}

StType st_type_parse(const char *name) {
        for (int t = 0; t < ST_TYPE_MAX; t++)
                if (strcmp(types[t].name, name) == 0)
                        return (StType) t;

        return ST_TYPE_INVALID;
}

uint64_t st_type_size(StType t) {
        return is_type(t) ? types[t].size : 0;
}

static bool begins_with_tag(const char *s, size_t n, const char *tag) {
        size_t len = strlen(tag);

        /* With only 8 bytes at hand a longer tag is known by its beginning. */
        return n >= 8 && strncasecmp(s, tag, len < n ? len : n) == 0;
}

const char *st_foreign_format(const void *start, size_t n) {
        static const struct {
                const char *magic;
                size_t n;
                const char *what;
        } formats[] = {
                {"PK\3\4", 4, "a zip archive (a PyTorch checkpoint?)"},
                {"PK\5\6", 4, "an empty zip archive"},
                {"GGUF", 4, "a GGUF file"},
                {"\x1f\x8b", 2, "gzip data"},
                {"\x28\xb5\x2f\xfd", 4, "zstd data"},
                {"\x89HDF", 4, "an HDF5 file"},
                {"\x93NUMPY", 6, "a NumPy array"},
                {"version https://git-lfs", 23,
                        "a Git LFS pointer: the file itself was not downloaded (git lfs pull)"},
        };
        const char *s = start;

        for (size_t i = 0; i < ELEMENTSOF(formats); i++) {
                size_t len = formats[i].n;

                if (len > n && len > 8) /* the pointer's text, of which only 8 bytes are at hand */
                        len = n >= 8 ? n : len;
                if (n >= len && memcmp(s, formats[i].magic, len) == 0)
                        return formats[i].what;
        }

        if (n >= 2 && (unsigned char) s[0] == 0x80 && s[1] >= 2 && s[1] <= 5)
                return "a Python pickle (a PyTorch checkpoint?)";

        while (n > 0 && (*s == ' ' || *s == '\n' || *s == '\r' || *s == '\t')) {
                s++;
                n--;
        }
        if (begins_with_tag(s, n, "<!doctype") || begins_with_tag(s, n, "<html") ||
                begins_with_tag(s, n, "<?xml"))
                return "an HTML or XML page (a download that failed?)";
        if (n >= 2 && s[0] == '{' && (s[1] == '"' || s[1] == '\n' || s[1] == '\r' || s[1] == ' '))
                return "JSON text";

        return NULL;
}

int st_grow(void **p, size_t n, size_t *cap, size_t element) {
        size_t want = *cap > 0 ? *cap : 16;
        void *q;

        if (n < *cap)
                return 0;
        if (*cap > 0 && __builtin_mul_overflow(want, 2, &want))
                return -ENOMEM;

        q = reallocarray(*p, want, element);
        if (!q)
                return -ENOMEM;

        *p = q;
        *cap = want;
        return 0;
}
