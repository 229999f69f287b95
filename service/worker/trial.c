/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/trial.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "service/shared/clock.h"
#include "service/shared/wire.h"

#define POLL_USEC 20

void trial_fill(uint8_t *bytes, uint64_t size, uint32_t from, uint32_t to) {
        const uint32_t seed = from * WIRE_DEVICES_MAX + to + 1;

        for (uint64_t i = 0; i < size / 4; i++) {
                uint32_t x = (uint32_t) i * 2654435761u + seed * 0x9e3779b9u;

                memcpy(bytes + 4 * i, &x, sizeof(x));
        }
}

int trial_wait(const LkOps *ops, LkContext *c, uint64_t deadline_usec) {
        const struct timespec pause = {.tv_nsec = POLL_USEC * 1000};
        uint64_t until = clock_usec() + deadline_usec;
        int r;

        for (;;) {
                r = ops->is_done(c, TRIAL_DONE);
                if (r != 0)
                        return r < 0 ? r : 0;
                if (clock_usec() >= until)
                        return -ETIMEDOUT;
                (void) nanosleep(&pause, NULL);
        }
}
