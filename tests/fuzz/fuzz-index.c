/* SPDX-License-Identifier: Apache-2.0 */
/* Input: a shard index. What is accepted must be JSON for another parser, with nothing but plain names in
 * it. */
#include <errno.h>
#include <string.h>

#include <jansson.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/shared/utf8.h"
#include "tests/fuzz/target.h"

DEFINE_CLEANUP(StIndex *, st_index_free)

static void check_index(const StIndex *x) {
        CHECK(x->n_files <= x->n_entries && (x->n_files == 0) == (x->n_entries == 0));

        for (size_t i = 0; i < x->n_entries; i++) {
                const StIndexEntry *e = &x->entries[i];
                bool found = false;

                CHECK(i == 0 || strcmp(x->entries[i - 1].tensor, e->tensor) < 0);
                CHECK(e->file[0] != '\0' && !strchr(e->file, '/') && strcmp(e->file, "..") != 0 &&
                        strcmp(e->file, ".") != 0);
                CHECK(strlen(e->file) <= 255 && utf8_is_valid(e->file, strlen(e->file)));
                CHECK(st_index_file_of(x, e->tensor) == e->file);
                for (size_t k = 0; k < x->n_files && !found; k++)
                        found = strcmp(x->files[k], e->file) == 0;
                CHECK(found);
        }

        for (size_t k = 1; k < x->n_files; k++)
                CHECK(strcmp(x->files[k - 1], x->files[k]) < 0);
}

/* Duplicates outside of weight_map and numbers beyond a double's range are ignored by us with what they are
 * in. */
static void check_json(const char *json, size_t n, const StIndex *x) {
        const json_t *map;
        json_error_t e;
        json_t *j;

        j = json_loadb(json, n, 0, &e);
        if (!j) {
                CHECK(json_error_code(&e) == json_error_numeric_overflow);
                return;
        }

        map = json_object_get(j, "weight_map");
        CHECK(json_is_object(map) && json_object_size(map) == x->n_entries);
        for (size_t i = 0; i < x->n_entries; i++) {
                const char *file = json_string_value(json_object_get(map, x->entries[i].tensor));

                CHECK(file && strcmp(file, x->entries[i].file) == 0);
        }
        json_decref(j);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        CLEANUP(st_index_freep) StIndex *x = NULL;
        Fault f = {};
        int r;

        r = st_index_parse(data, n, "fuzz.json", &x, &f);
        CHECK((r == 0) == (x != NULL) && (r == 0) == (f.name[0] == '\0'));
        if (!x) {
                CHECK(r == -EBADMSG && strcmp(f.name, FAULT_INVALID_FILE) == 0 &&
                        strstr(f.text, "'fuzz.json'"));
                CHECK(utf8_is_valid(f.text, strlen(f.text)));
                return 0;
        }

        check_index(x);
        check_json((const char *) data, n, x);
        return 0;
}
