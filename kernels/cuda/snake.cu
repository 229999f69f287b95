/* SPDX-License-Identifier: Apache-2.0 */
/* Snake over dense rows: kernels/cpu/snake.c, the same bits. */

#include "kernels/cuda/snake.cuh"

__global__ static void __launch_bounds__(FLAT_THREADS) snake_flat(const __grid_constant__ LkSnake s) {
        for (uint64_t i = flat_first(); i < s.m * s.channels; i += flat_step()) {
                float a, gain;

                snake_channel(&s.alpha, &s.beta, s.exponents, i % s.channels, &a, &gain);
                s.y[i] = snake_at(s.x[i], a, gain);
        }
}

extern "C" int lk_cuda_snake(LkContext *c, const LkSnake *a) {
        if (!c || !a || !check_snake(a))
                return -EINVAL;
        if (a->m == 0)
                return 0;

        snake_flat<<<flat_blocks(a->m * a->channels), FLAT_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
