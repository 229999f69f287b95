/* SPDX-License-Identifier: Apache-2.0 */
/* latent-media as it is where the libraries lack the encoders that TEST_WITHOUT="a,b" names. */
#include <stdlib.h>
#include <string.h>

#include "service/media/codecs.h"
#include "service/shared/cleanup.h"

__attribute__((constructor)) static void hide(void) {
        static const char *names[16];
        const char *list = getenv("TEST_WITHOUT");
        char *copy = strdup(list ? list : ""), *rest = copy;
        size_t n = 0;

        for (char *name; n + 1 < ELEMENTSOF(names) && (name = strsep(&rest, ","));)
                names[n++] = name;
        codecs_hide(names);
}
