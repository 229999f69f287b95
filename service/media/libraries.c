/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/libraries.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <libavutil/cpu.h>
#include <libswresample/swresample.h>
#include <libswscale/swscale.h>

#include "service/shared/log.h"

#define THREADS_MAX 8
#define ALLOCATION_MAX (UINT64_C(2) << 30)

static void append(char *s, size_t size, const char *name, unsigned version) {
        size_t n = strlen(s);

        (void) snprintf(s + n, size - n, "%s%s %u.%u.%u", n > 0 ? ", " : "", name, AV_VERSION_MAJOR(version),
                AV_VERSION_MINOR(version), AV_VERSION_MICRO(version));
}

void libraries_describe(char *ret, size_t size) {
        ret[0] = '\0';
        append(ret, size, "libavformat", avformat_version());
        append(ret, size, "libavcodec", avcodec_version());
        append(ret, size, "libavutil", avutil_version());
        append(ret, size, "libswscale", swscale_version());
        append(ret, size, "libswresample", swresample_version());
}

/* A hostile file makes the libraries say much, which nobody needs to read. */
__attribute__((format(printf, 3, 0))) static void on_log(
        void *context, int level, const char *format, va_list ap) {
        char line[256];

        if (level > AV_LOG_WARNING)
                return;
        (void) vsnprintf(line, sizeof(line), format, ap);
        line[strcspn(line, "\n")] = '\0';
        log_debug("libav: %s", line);
}

void libraries_init(void) {
        av_log_set_callback(on_log);
        av_max_alloc(ALLOCATION_MAX);
        (void) setenv("SVT_LOG", "1", 0); /* it speaks to stderr by itself: errors alone */
}

const char *libraries_error(int error, char buffer[static 128]) {
        if (av_strerror(error, buffer, 128) < 0)
                (void) snprintf(buffer, 128, "error %d", error);
        return buffer;
}

int64_t libraries_seek(uint64_t *position, uint64_t size, int64_t offset, int whence) {
        int64_t base = 0;

        switch (whence & ~AVSEEK_FORCE) {
        case AVSEEK_SIZE:
                return (int64_t) size;
        case SEEK_CUR:
                base = (int64_t) *position;
                break;
        case SEEK_END:
                base = (int64_t) size;
                break;
        case SEEK_SET:
                break;
        default:
                return AVERROR(EINVAL);
        }
        if (__builtin_add_overflow(base, offset, &base) || base < 0)
                return AVERROR(EINVAL);
        *position = (uint64_t) base;
        return base;
}

int libraries_threads(void) {
        int n = av_cpu_count();

        return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : n;
}
