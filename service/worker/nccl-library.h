/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What is used of nccl.h of 2.14, which newer ones take as it is: a program built without NCCL finds the library all the same, and
 * tests have one of their own. */

#include <stddef.h>

typedef enum NcclResult {
        NCCL_SUCCESS = 0,
        NCCL_UNHANDLED_CUDA_ERROR = 1,
        NCCL_INTERNAL_ERROR = 3,
        NCCL_INVALID_USAGE = 5,
        NCCL_IN_PROGRESS = 7,
} NcclResult;

typedef struct NcclUniqueId {
        char bytes[128];
} NcclUniqueId;

typedef struct NcclCommConfig {
        size_t size;
        unsigned magic, version;
        int blocking;
} NcclCommConfig;

#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_VERSION 21400u
#define NCCL_INT8 0

/* Those that return an NcclResult. Communicators and streams are void *. */
#define NCCL_FUNCTIONS(F)                                                                  \
        F(ncclGetVersion, (int *))                                                         \
        F(ncclGetUniqueId, (NcclUniqueId *))                                               \
        F(ncclCommInitRankConfig, (void **, int, NcclUniqueId, int, NcclCommConfig *))     \
        F(ncclCommGetAsyncError, (void *, NcclResult *))                                   \
        F(ncclCommAbort, (void *))                                                         \
        F(ncclGroupStart, (void))                                                          \
        F(ncclGroupEnd, (void))                                                            \
        F(ncclSend, (const void *, size_t, int, int, void *, void *))                      \
        F(ncclRecv, (void *, size_t, int, int, void *, void *))
