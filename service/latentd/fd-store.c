/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/fd-store.h"

#include <stdio.h>
#include <string.h>

#include <systemd/sd-daemon.h>

#include "service/shared/cleanup.h"
#include "service/shared/log.h"

struct FdStore {
        bool has_manager;
        int n_came; /* first of them: SD_LISTEN_FDS_START */
        char **names;
        unsigned n_kept;
};

DEFINE_CLEANUP(FdStore *, fd_store_free)

int fd_store_new(FdStore **ret) {
        CLEANUP(fd_store_freep) FdStore *s = NULL;
        const char *socket = getenv("NOTIFY_SOCKET");
        int r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        s->has_manager = socket && socket[0] != '\0';
        r = sd_listen_fds_with_names(1, &s->names);
        if (r < 0)
                return r;

        s->n_came = r;
        *ret = STEAL_PTR(s);
        return 0;
}

FdStore *fd_store_free(FdStore *s) {
        if (!s)
                return NULL;

        for (int i = 0; i < s->n_came; i++) {
                (void) close(SD_LISTEN_FDS_START + i);
                free(s->names[i]);
        }
        free(s->names);
        free(s);
        return NULL;
}

static bool is_unique(const FdStore *s, int n, int i) {
        for (int k = 0; k < n; k++)
                if (k != i && strcmp(s->names[k], s->names[i]) == 0)
                        return false;

        return true;
}

void fd_store_offer(FdStore *s, FdStoreTake take, void *userdata) {
        int n = STEAL(s->n_came, 0);

        s->n_kept += (unsigned) n;
        for (int i = 0; i < n; i++) {
                const char *name = s->names[i];

                if (is_unique(s, n, i) && take(userdata, SD_LISTEN_FDS_START + i, name))
                        continue;

                log_info("Descriptor \"%.64s\" of the service manager's store is dropped.", name);
                (void) close(SD_LISTEN_FDS_START + i);
                fd_store_remove(s, name);
        }

        for (int i = 0; i < n; i++)
                free(s->names[i]);
}

bool fd_store_push(FdStore *s, int fd, const char *name) {
        char text[128];
        int r;

        if (!s->has_manager)
                return false;
        if (s->n_kept >= FD_STORE_MAX) {
                log_debug("The service manager's store is full: %s will not outlive the service.", name);
                return false;
        }

        (void) snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
        r = sd_pid_notify_with_fds(0, 0, text, &fd, 1);
        if (r <= 0) {
                (void) log_warning_errno(r < 0 ? r : -ENOTCONN, "The service manager did not take %s", name);
                return false;
        }

        s->n_kept++;
        return true;
}

void fd_store_remove(FdStore *s, const char *name) {
        if (s->n_kept > 0)
                s->n_kept--;
        if (s->has_manager)
                (void) sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s", name);
}

unsigned fd_store_count(const FdStore *s) {
        return s->n_kept;
}
