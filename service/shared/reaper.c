/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/reaper.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>

#include "service/shared/cleanup.h"

#define STACK_SIZE (128u * 1024u)

void reaper_kill_process(void) {
        /* Not exit(): handlers and destructors could wait for a lock of a thread that hangs. */
        (void) kill(getpid(), SIGKILL);
        for (;;)
                (void) pause();
}

static void *reaper_thread(void *userdata) {
        int socket = (int) (intptr_t) userdata;

        (void) prctl(PR_SET_NAME, "reaper");
        for (;;) {
                struct pollfd p = {.fd = socket, .events = POLLRDHUP};

                /* No POLLIN: messages are the link thread's. POLLHUP, POLLERR and POLLNVAL come unasked.
                 * POLLERR alone may be a peer that died with unread messages; it is gone too. */
                if (poll(&p, 1, -1) > 0 && p.revents)
                        reaper_kill_process();
        }
        return NULL;
}

int reaper_start(int socket) {
        pthread_attr_t attributes;
        sigset_t all, old;
        pthread_t thread;
        int r;

        r = pthread_attr_init(&attributes);
        if (r != 0)
                return -r;

        (void) pthread_attr_setstacksize(&attributes, STACK_SIZE);
        (void) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        (void) sigfillset(&all);
        (void) pthread_sigmask(SIG_SETMASK, &all, &old);
        r = pthread_create(&thread, &attributes, reaper_thread, (void *) (intptr_t) socket);
        (void) pthread_sigmask(SIG_SETMASK, &old, NULL);
        (void) pthread_attr_destroy(&attributes);
        return -r;
}
