/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/client/temporary.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int temporary_setup(void **state) {
        char *path = strdup("/tmp/latent-test-XXXXXX");

        assert_non_null(path);
        assert_non_null(mkdtemp(path));
        assert_int_equal(chdir(path), 0);
        *state = path;
        return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

int temporary_teardown(void **state) {
        assert_int_equal(chdir("/"), 0);
        assert_int_equal(nftw(*state, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
        free(*state);
        return 0;
}

void temporary_write(const char *name, const void *bytes, size_t n) {
        char path[256];
        FILE *f;

        (void) snprintf(path, sizeof(path), "%s", name);
        for (char *p = strchr(path, '/'); p; p = strchr(p + 1, '/')) {
                *p = '\0';
                (void) mkdir(path, 0755);
                *p = '/';
        }

        f = fopen(name, "we");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, n, f), n);
        assert_int_equal(fclose(f), 0);
}

void temporary_write_tensors(const char *name, const char *header, size_t n) {
        size_t length = strlen(header), size = 8 + length + n;
        uint8_t *bytes = calloc(1, size);

        assert_non_null(bytes);
        for (size_t i = 0; i < 8; i++)
                bytes[i] = (uint8_t) ((uint64_t) length >> (8 * i));
        memcpy(bytes + 8, header, length);
        temporary_write(name, bytes, size);
        free(bytes);
}
