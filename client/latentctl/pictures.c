/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/pictures.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/latentctl/report.h"
#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"

static int fail(const char *path, latent_error *e) {
        int error = errno;

        return ctl_error(e, -error,
                error == ENOENT || error == ENOTDIR ? LATENT_ERROR_NOT_FOUND
                : error == EACCES                   ? LATENT_ERROR_ACCESS_DENIED
                                                    : LATENT_ERROR_IO,
                "%s cannot be read: %s.", format_value(path), strerror(error));
}

static int open_one(Pictures *p, const char *path, const char *kind, uint32_t flags, latent_error *e) {
        struct stat st;
        int fd;

        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a pipe is refused, not waited for */
        if (fd < 0)
                return fail(path, e);

        p->names[p->n] = utf8_escape(path);
        p->items[p->n] = (latent_media){.kind = kind, .name = p->names[p->n], .file = fd, .flags = flags};
        p->n++;
        if (!p->names[p->n - 1])
                return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        if (fstat(fd, &st) < 0)
                return fail(path, e);
        if (!S_ISREG(st.st_mode))
                return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_FILE, "%s is no regular file: expected a picture, film or sound.", path);
        return 0;
}

int pictures_open(Pictures *p, latent_error *e) {
        int r = 0;

        if ((p->image || p->last_image) && p->references.n > 0)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--image and --last-image do not go together with references");
        if (p->references.n > PICTURES_MAX)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "%u references, expected at most %u", p->references.n, PICTURES_MAX);
        if (p->rule && !p->image && !p->last_image && p->references.n == 0)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--picture-rule is for pictures, and none is given");

        if (p->image)
                r = open_one(p, p->image, "keyframe", 0, e);
        if (r >= 0 && p->last_image)
                r = open_one(p, p->last_image, "keyframe", LATENT_MEDIA_LAST, e);
        for (uint32_t i = 0; r >= 0 && i < p->references.n; i++)
                r = open_one(p, p->references.items[i], p->references.tags[i] == PICTURES_TAG_SOUND ? "audio" : NULL, 0, e);
        return r;
}

int parse_size(const char *size, uint32_t *ret_width, uint32_t *ret_height, latent_error *e) {
        const char *cross = size ? strchr(size, 'x') : NULL;
        CLEANUP_FREE char *width = NULL;
        uint64_t w = 0, h = 0;

        if (!size)
                return 0;

        if (cross) {
                width = strndup(size, (size_t) (cross - size));
                if (!width)
                        return ctl_error(e, -ENOMEM, LATENT_ERROR_INTERNAL, "Out of memory.");
        }
        if (!width || parse_uint(width, &w) < 0 || parse_uint(cross + 1, &h) < 0 || w == 0 || h == 0 || w > UINT32_MAX || h > UINT32_MAX)
                return ctl_error(e, -EINVAL, CTL_ERROR_USAGE, "--size %s: expected WIDTHxHEIGHT in pixels, such as 1344x768",
                        format_value(size));

        *ret_width = (uint32_t) w;
        *ret_height = (uint32_t) h;
        return 0;
}

void pictures_done(Pictures *p) {
        for (uint32_t i = 0; i < p->n; i++) {
                (void) close(p->items[i].file);
                free(p->names[i]);
        }
        p->n = 0;
}
