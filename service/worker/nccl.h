/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* NCCL between the devices of this process: loaded at run time, one communicator of all devices, made by the main thread before
 * the process is shut in. It makes sockets for that, so it is only started where somebody asks for it (LATENT_NCCL=1), and what
 * messages need is connected by the trial at its start. Without NVLink multicast. Its calls do not block: whoever waits has a
 * deadline. After an error that is NCCL's, or ranks that were lost, it is over for this process. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/fault.h"

typedef struct NcclDevices {
        const LkOps *ops;            /* with native(), copy() */
        uint32_t n;                  /* 2 at least */
        LkContext *const *contexts;  /* [n], of each device; used on the calling thread alone */
        int (*bind)(uint32_t device); /* of the calling thread */
        uint64_t size;               /* bytes from each to each of the trial, a multiple of 4; as large as messages are */
        uint64_t deadline_usec;      /* of each part of the start */
} NcclDevices;

/* Whether the environment asks for it. Then it holds what NCCL shall read there, too: before there are other threads. */
bool nccl_is_wanted(void);

/* Loads it, makes the communicator, and tries that bytes arrive as they were sent from each to each. On failure with f there is
 * none, and what was begun may go on in threads of NCCL. */
int nccl_start(const NcclDevices *d, Fault *f);

/* As the library counts, e.g. 22803 is 2.28.3; 0: there is none, or it is over. Any thread. */
uint32_t nccl_version(void);

typedef struct NcclMessage {
        void *data; /* memory of the device */
        uint64_t size;
        LkContext *peer; /* of the device it goes to or comes from */
        bool is_sent;
} NcclMessage;

/* One group: all of it begins when the queue has come to it, at both ends, and is done before the queue goes on. Messages from
 * one device to another are taken in the order in which they are sent, and have the size with which they are. Returns once the
 * queue has it; gives up after deadline_usec, or as soon as stop() is true. */
typedef struct NcclGroup {
        const NcclMessage *messages;
        size_t n;
        uint64_t deadline_usec;
        bool (*stop)(const void *userdata);
        const void *userdata;
} NcclGroup;

/* On the thread of a context that has one of the devices. -ECANCELED: stop(); else NCCL's error, with f: call nccl_abort(). */
int nccl_send(const LkOps *ops, LkContext *c, LkQueue queue, const NcclGroup *g, Fault *f);

/* After -ECANCELED: waits until the queue has that group. Else NCCL's error. */
int nccl_settle(const LkOps *ops, LkContext *c, uint64_t deadline_usec, Fault *f);

/* Ends what the context's device still waits for; there is no NCCL in this process from now on. */
void nccl_abort(const LkOps *ops, LkContext *c);

/* All of it, where no context is at work: before devices go. */
void nccl_end(void);
