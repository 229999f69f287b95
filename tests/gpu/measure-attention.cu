/* SPDX-License-Identifier: Apache-2.0 */
/* Which form of Hopper's attention suits the video decoder: f16, heads of 64, tiles of 1,797 rows. One line a form of attention-sm90.cuh, and
 * one of the portable kernel, from which the others' distance is taken.
 *
 *     measure-attention [TILES]
 */

#include <math.h>
#include <string.h>

#include "kernels/cuda/attention-sm90.cuh"
#include "tests/gpu/bench.h"

#define TILE UINT64_C(1797)
#define HEADS 32u
#define WIDTH (HEADS * UINT64_C(64))
#define PERIOD UINT64_C(1048573) /* numbers that are made before they come again */

static LkContext *gpu;
static uint16_t *right, *got;

/* The sum of four even ones is normal enough. */
static uint16_t *numbers(uint64_t n, float size, uint32_t seed) {
        const uint64_t made = n < PERIOD ? n : PERIOD;
        uint16_t *host = (uint16_t *) malloc(made * 2), *device = (uint16_t *) device_new(n * 2);
        uint64_t x = seed;

        must_be(host != NULL, "memory");
        for (uint64_t i = 0; i < made; i++) {
                float sum = 0;
                int e;

                for (int k = 0; k < 4; k++) {
                        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                        sum += (float) (int32_t) (x >> 32) * 0x1p-31f;
                }
                sum *= size * 0.866f;
                (void) frexpf(sum, &e);
                e = e < -13 ? -13 : e;
                sum = rintf(ldexpf(sum, 11 - e)); /* to 11 digits */
                host[i] = (uint16_t) ((sum < 0 ? 0x8000 : 0) + ((e + 13) << 10) + (int) fabsf(sum));
        }
        for (uint64_t i = 0; i < n; i += made)
                must_be(lk_cuda_ops()->upload(gpu, device + i, host, (n - i < made ? n - i : made) * 2) == 0, "upload");
        free(host);
        return device;
}

static double number(uint16_t h) {
        const int exponent = h >> 10 & 31, fraction = h & 1023;
        const double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);

        return h >> 15 ? -x : x;
}

static double distance(uint64_t n) {
        double off = 0, all = 0;

        for (uint64_t i = 0; i < n; i += 7) {
                const double x = number(right[i]), y = number(got[i]);

                off += (x - y) * (x - y);
                all += x * x;
        }
        return sqrt(off / all);
}

static int portable(LkContext *c, const Attention *a) {
        return attention_f16(c, a);
}

template <int (*ATTENTION)(LkContext *, const Attention *)> static int run(LkContext *c, const void *a) {
        return ATTENTION(c, (const Attention *) a);
}

template <int (*ATTENTION)(LkContext *, const Attention *)> static void measure(const char *what, const Attention &a, bool first) {
        const uint64_t n = a.sequences * TILE * WIDTH;
        double msec = bench_msec(gpu, run<ATTENTION>, &a, 7, a.a.o);

        must_be(lk_cuda_ops()->download(gpu, first ? right : got, a.a.o, n * 2) == 0, "download");
        printf("%-54s %7.3f ms %5.0f TF", what, msec, 4.0 * a.sequences * TILE * TILE * WIDTH / msec / 1e9);
        if (!first)
                printf(", %.1e from the first", distance(n));
        printf("\n");
        fflush(stdout);
}

#define FORM(keys, groups, stages, soft, stays) \
        measure<attention_launch<LK_F16, 64, keys, groups, stages, true, soft, stays>>( \
                #groups " groups, " #keys " keys, " #stages " stages, soft " #soft ", stays " #stays, a, false)

int main(int argc, char **argv) {
        const uint64_t tiles = argc > 1 ? strtoull(argv[1], NULL, 10) : 7, n = tiles * TILE * WIDTH;
        LkAttention args = {};

        device_open();
        must_be(lk_cuda_ops()->context_new(0, &gpu) == 0, "context");
        right = (uint16_t *) malloc(n * 2);
        got = (uint16_t *) malloc(n * 2);
        must_be(right && got, "memory");
        args.type = LK_F16;
        args.n_q = args.n_k = TILE;
        args.sequences = tiles;
        args.heads = HEADS;
        args.head_dim = 64;
        args.scale = 0.125f;
        args.q = numbers(n, 1, 1);
        args.k = numbers(n, 1, 2);
        args.v = numbers(n, 1, 3);
        args.o = device_new(n * 2);
        args.q_ld = args.k_ld = args.v_ld = args.o_ld = WIDTH;

        const Attention a = attention_call(&args);

        measure<portable>("portable", a, true);
        FORM(128, 3, 4, 0, false);
        FORM(128, 3, 4, 6, false);
        FORM(128, 3, 4, 4, false);
        FORM(128, 3, 4, 3, false);
        FORM(96, 3, 4, 0, false);
        FORM(96, 3, 4, 4, false);
        FORM(176, 2, 4, 0, false);
        FORM(176, 2, 4, 4, false);
        FORM(128, 3, 4, 0, true);
        FORM(128, 3, 4, 4, true);
        lk_cuda_ops()->context_free(gpu);
        return 0;
}
