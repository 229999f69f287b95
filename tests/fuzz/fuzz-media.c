/* SPDX-License-Identifier: Apache-2.0 */
/* Input: a byte that says what is asked, then a file. Whatever it holds, the answer is done or a named
 * error. */
#include <string.h>
#include <sys/mman.h>

#include "service/media/decode.h"
#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"
#include "tests/fuzz/target.h"

#define PLACE (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        CLEANUP_CLOSE int file = memfd_create("fuzz-media", MFD_CLOEXEC);
        MediaRead m = {.width = 32, .height = 32, .frames_max = 8, .samples_max = 8000, .size = PLACE};
        CLEANUP_FREE uint8_t *place = malloc(PLACE);
        Channel c = {.socket = -EBADF};
        MediaDone done = {};
        Fault f = {};
        int r;

        if (n < 1)
                return 0;
        CHECK(file >= 0 && place && write(file, data + 1, n - 1) == (ssize_t) (n - 1));
        libraries_init();
        m.what = data[0] % _MEDIA_WHAT_MAX;
        m.fit = data[0] / _MEDIA_WHAT_MAX % _MEDIA_FIT_MAX;
        CHECK(decode_check(&m, PLACE, &f) == 0);

        r = decode_run(&m, file, place, &c, &done, &f);
        CHECK((r < 0) == (f.name[0] != '\0'));
        CHECK(utf8_is_valid(f.text, strlen(f.text)));
        CHECK(r < 0 || (done.samples <= 8000 || m.what == MEDIA_PROBE));
        CHECK(r < 0 || m.what != MEDIA_CLIP || (done.frames >= 1 && done.frames <= 8));
        return 0;
}
