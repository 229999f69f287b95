/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What kernels for Hopper (sm_90a) share: products of a warpgroup, barriers in shared memory, the copy engine, pairs of blocks. */

#include <stdint.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#define CLUSTER 2 /* blocks beside each other that bring tiles for both */

#define LIST64(F)                                                                                           \
        F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14),      \
                F(15), F(16), F(17), F(18), F(19), F(20), F(21), F(22), F(23), F(24), F(25), F(26), F(27),  \
                F(28), F(29), F(30), F(31), F(32), F(33), F(34), F(35), F(36), F(37), F(38), F(39), F(40),  \
                F(41), F(42), F(43), F(44), F(45), F(46), F(47), F(48), F(49), F(50), F(51), F(52), F(53),  \
                F(54), F(55), F(56), F(57), F(58), F(59), F(60), F(61), F(62), F(63)
#define D64                                                                                                 \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%"  \
        "26,%27,%28,%29,%30,%31,%32,%33,"                                                                   \
        "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%" \
        "58,%59,%60,%61,%62,%63}"

static __device__ inline void products_begin(void) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ inline void products_commit(void) {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT> static __device__ inline void products_wait(void) {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

static __device__ inline uint32_t shared_address(const void *p) {
        return (uint32_t) __cvta_generic_to_shared(p);
}

/* Rows of 128 bytes, swizzled by 128 bytes, groups of eight rows 1024 bytes apart. leading: bytes from one
 * half of the columns to the other, where rows are the products' inner dimension; else not looked at. */
static __device__ inline uint64_t describe(uint32_t at, uint32_t leading) {
        return (at & 0x3ffff) >> 4 | (uint64_t) (leading >> 4) << 16 | (uint64_t) (1024 >> 4) << 32 | UINT64_C(1) << 62;
}

static __device__ inline void barrier_init(uint64_t *b, uint32_t count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}

static __device__ inline void barrier_expect(uint64_t *b, uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                     : "memory");
}

/* Arrives at the barrier of the same place in block `rank` of the cluster. */
static __device__ inline void barrier_arrive(uint64_t *b, uint32_t rank) {
        asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1;"
                     " mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(shared_address(b)),
                     "r"(rank)
                     : "memory");
}

static __device__ inline void barrier_wait(uint64_t *b, uint32_t phase) {
        asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
                     " @p bra done; bra again; done: }" ::"r"(shared_address(b)),
                     "r"(phase)
                     : "memory");
}

static __device__ inline void load(void *to, const CUtensorMap *map, uint64_t *b, uint32_t column, uint32_t row) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                             shared_address(to)),
                     "l"(map), "r"(shared_address(b)), "r"(column), "r"(row)
                     : "memory");
}

/* To the same place in all blocks of the cluster. */
static __device__ inline void load_for_all(void *to, const CUtensorMap *map, uint64_t *b, uint32_t column, uint32_t row) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
                     "l"(map), "r"(shared_address(b)), "h"((uint16_t) ((1 << CLUSTER) - 1)), "r"(column), "r"(row)
                     : "memory");
}

/* Of arrays of three dimensions. */
static __device__ inline void load(void *to, const CUtensorMap *map, uint64_t *b, uint32_t column, uint32_t row, uint32_t plane) {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                             shared_address(to)),
                     "l"(map), "r"(shared_address(b)), "r"(column), "r"(row), "r"(plane)
                     : "memory");
}

static __device__ inline void load_for_all(void *to, const CUtensorMap *map, uint64_t *b, uint32_t column, uint32_t row, uint32_t plane) {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(to)),
                     "l"(map), "r"(shared_address(b)), "h"((uint16_t) ((1 << CLUSTER) - 1)), "r"(column), "r"(row), "r"(plane)
                     : "memory");
}

static __device__ inline uint32_t cluster_rank(void) {
        uint32_t r;

        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
        return r;
}

static __device__ inline void cluster_sync(void) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

typedef CUresult (*EncodeFunction)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
        const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
        CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, without linking the driver. */
static inline EncodeFunction encode_function(void) {
        cudaDriverEntryPointQueryResult result;
        void *f = NULL;

        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result) != cudaSuccess ||
                result != cudaDriverEntryPointSuccess) {
                (void) cudaGetLastError();
                return NULL;
        }
        return (EncodeFunction) f;
}
