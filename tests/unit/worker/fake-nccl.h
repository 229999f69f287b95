/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A libnccl.so.2 for devices that the CPU plays (device-ops.h), with the order that the real one keeps: each communicator takes its
 * groups one after another, a message moves when both ends have come to its group, a group ends with its last message. Messages of two
 * sizes end the program. No call blocks; a communicator is in progress until its groups have ended. */

typedef struct FakeNccl {
        unsigned groups;   /* that were given */
        unsigned aborts;   /* of communicators */
        unsigned fails_in; /* ncclGroupEnd(): so many, the last one fails; 0: none. Or by LATENT_FAKE_NCCL_FAILS_IN */
} FakeNccl;

typedef FakeNccl *(*FakeNcclGet)(void); /* dlsym(): "fake_nccl" */
