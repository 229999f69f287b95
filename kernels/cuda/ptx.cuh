/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Instructions of every card since sm_80 that several kernels want by name. Addresses `to` and `at` are of shared memory. */

#include <stdint.h>

/* 16 bytes on their way to shared memory. */
__device__ static inline void copy16(uint32_t to, const void *from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* The first `size` of them, then zeros. */
__device__ static inline void copy16_part(uint32_t to, const void *from, uint32_t size) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

/* The copies that the thread began since the last time are one group. */
__device__ static inline void copies_commit(void) {
        asm volatile("cp.async.commit_group;" ::: "memory");
}

/* For all groups but the newest LEFT. */
template <int LEFT> __device__ static inline void copies_wait(void) {
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ static inline void copies_wait_all(void) {
        asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Four 8 x 8 matrices of 16 bits; a thread's `at` is one of their rows. */
__device__ static inline void matrices_load(uint32_t *d, uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(at)
                     : "memory");
}

__device__ static inline void matrices_load_turned(uint32_t *d, uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(at)
                     : "memory");
}

/* The same of f16; a NaN becomes 0x7fff. */
__device__ static inline uint32_t pair_round_f16(float low, float high) {
        uint32_t y;

        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
}

/* d[16, 8] += a . b over 16 numbers of f16. */
__device__ static inline void multiply_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d[16, 8] += a . b over 16 numbers of bf16. */
__device__ static inline void multiply_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d[16, 8] += a . b over 32 integers of 8 bits. */
__device__ static inline void multiply_i8(int32_t *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same; a's have no sign. */
__device__ static inline void multiply_u8_i8(int32_t *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two numbers of bf16, to nearest even; a NaN becomes 0x7fff, which is not that of ops.h. */
__device__ static inline uint32_t pair_round(float low, float high) {
        uint32_t y;

        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
}

/* The lowest bytes of four numbers. */
__device__ static inline uint32_t bytes_pack(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
