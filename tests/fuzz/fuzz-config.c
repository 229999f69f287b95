/* SPDX-License-Identifier: Apache-2.0 */
/* Input: a latentd.conf. What is accepted must be within the limits that the manual promises; what is not must be named by line. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/latentd/config.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/shared/utf8.h"
#include "tests/fuzz/target.h"

DEFINE_CLEANUP(Config *, config_free)

static void check_path(const char *s, size_t max) {
        CHECK(s[0] == '/' && strlen(s) <= max);
        for (const char *p = s; p; p = strchr(p + 1, '/'))
                CHECK(strncmp(p, "/..", 3) != 0 || (p[3] != '/' && p[3] != '\0'));
}

static void check_config(const Config *c) {
        for (char **p = c->model_path; p && *p; p++)
                check_path(*p, 4095);
        for (size_t i = 0; i < c->n_allowed_users; i++)
                CHECK(c->allowed_users[i] != (uid_t) -1);
        check_path(c->worker_socket, 107);
        check_path(c->worker_directory, 4095);
        if (c->private_socket && c->private_socket[0] != '\0')
                check_path(c->private_socket, 107);

        CHECK(c->worker <= WORKER_CUDA && c->worker_start <= WORKER_START_SPAWN && c->lock_memory <= TRISTATE_AUTO);
        CHECK(c->worker_ranks <= 64 && c->worker_threads <= 1024);
        CHECK(c->sessions_per_user >= 1 && c->sessions_per_user <= 65536);
        CHECK(c->jobs_per_user >= 1 && c->jobs_per_user <= 65536);
        CHECK(c->log_level >= 0 && c->log_level <= 7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        CLEANUP(config_freep) Config *c = NULL;
        CLEANUP_CLOSE int fd = -EBADF;
        char path[64];
        Fault f = {};
        int r;

        log_set_max_level(-1); /* warnings of a library that cannot know the user would be most of the time */
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(fd >= 0 && write(fd, data, n) == (ssize_t) n);
        (void) snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);

        CHECK(config_new(&c) == 0);
        check_config(c);
        r = config_read(c, path, false, &f);
        CHECK((r == 0) == (f.name[0] == '\0'));
        if (r == 0) {
                check_config(c);
                return 0;
        }

        CHECK(r == -EBADMSG && strstr(f.text, path));
        CHECK(utf8_is_valid(f.text, strlen(f.text)));
        for (const char *s = f.text; *s != '\0'; s++)
                CHECK((unsigned char) *s >= 0x20 && *s != 0x7f);
        return 0;
}
