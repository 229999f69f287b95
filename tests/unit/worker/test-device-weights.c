/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "service/worker/device-weights.h"
#include "tests/unit/worker/device-ops.h"

/* The holder alone, on parts of bytes: where they lie, when they come, what they wait for. The device is simulated
 * (device-ops.h): what is not waited for is not there, and what is overwritten too early fails. */

#define PARTS 8
#define PASSING 2
#define PART_BYTES 4096u

typedef struct Bench {
        const LkOps *ops;
        LkContext *context;
        DeviceWeights *w;
        uint8_t host[PARTS + PASSING][PART_BYTES];
        LkVector slots[PARTS + PASSING]; /* one a part */
} Bench;

static void bench_new(Bench *b, uint64_t ring) {
        *b = (Bench){.ops = device_ops()};
        assert_int_equal(b->ops->context_new(1, &b->context), 0);
        assert_int_equal(
                device_weights_new(
                        &(DeviceWeightsConfig){.ops = b->ops, .context = b->context, .first_event = 2, .ring_bytes = ring},
                        &b->w),
                0);
        for (uint32_t i = 0; i < PARTS + PASSING; i++) {
                memset(b->host[i], (int) i + 1, PART_BYTES);
                b->slots[i] = (LkVector){.data = b->host[i], .type = LK_BF16, .n = PART_BYTES / 2};
                assert_int_equal(device_weights_add_part(b->w, i >= PARTS, false), 0);
                assert_int_equal(device_weights_add_slot(b->w, NULL, b->slots + i), 0);
        }
}

static void bench_done(Bench *b) {
        b->w = device_weights_free(b->w);
        (void) b->ops->context_free(b->context);
        device_ops_done();
}

static void plan(Bench *b, uint64_t budget, uint32_t resident) {
        DeviceWeightsState s;
        uint64_t least = 0;

        assert_int_equal(device_weights_plan(b->w, budget, true, &least), 0);
        device_weights_state(b->w, &s);
        assert_int_equal(s.resident, resident);
        assert_true(s.bytes <= budget);
        assert_int_equal(s.bytes, device_sim.used);
}

/* As a kernel would: all of the part has the part's own bytes. */
static void use(Bench *b, uint32_t part) {
        const LkVector *v = b->slots + part;

        assert_ptr_not_equal(v->data, b->host[part]);
        device_ops_read(v->data, PART_BYTES);
        assert_memory_equal(v->data, b->host[part], PART_BYTES);
}

static void take(Bench *b, uint32_t part) {
        assert_int_equal(device_weights_take(b->w, part), 0);
        use(b, part);
}

/* In the order 0 1 2 ..; each is taken before the one before it is given. */
static void pass(Bench *b) {
        uint32_t order[PARTS];

        for (uint32_t i = 0; i < PARTS; i++)
                order[i] = i;
        assert_int_equal(device_weights_begin(b->w, order, PARTS), 0);
        for (uint32_t i = 0; i < PARTS; i++) {
                take(b, i);
                if (i > 0) {
                        use(b, i - 1); /* still there */
                        device_weights_give(b->w, i - 1);
                }
        }
        device_weights_give(b->w, PARTS - 1);
}

static void take_streams_through_any_ring(void **state) {
        for (uint64_t ring = 2; ring <= PARTS; ring++)
                for (uint64_t resident = 0; resident < PARTS; resident++) {
                        CLEANUP(bench_done) Bench b;

                        bench_new(&b, ring * PART_BYTES + 256); /* no multiple: it wraps at odd places */
                        plan(&b, ring * PART_BYTES + 256 + resident * PART_BYTES, (uint32_t) resident);
                        for (unsigned i = 0; i < 3; i++)
                                pass(&b);
                        assert_true(device_sim.fetched_bytes >= (3 * PARTS - 2 * resident) * PART_BYTES);
                }
}

static void take_keeps_what_stays(void **state) {
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 0);
        plan(&b, UINT64_C(1) << 20, PARTS);
        pass(&b);
        assert_int_equal(device_sim.fetched_bytes, PARTS * PART_BYTES);
        pass(&b);
        pass(&b);
        assert_int_equal(device_sim.fetched_bytes, PARTS * PART_BYTES);
        assert_int_equal(device_sim.allocations, PARTS + 1);
}

/* The first take fetches its own part alone; a give fetches one that was never registered, or some more that were, and not
 * everything. */
static void give_fetches_ahead(void **state) {
        static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7};
        CLEANUP(bench_done) Bench b;
        uint64_t before;

        bench_new(&b, 6 * PART_BYTES);
        plan(&b, 6 * PART_BYTES, 0);
        assert_int_equal(device_weights_begin(b.w, order, 8), 0);
        for (uint32_t i = 0; i < 8; i++) {
                take(&b, order[i]);
                assert_int_equal(device_sim.fetches, i + 1);
                device_weights_give(b.w, order[i]);
                assert_int_equal(device_sim.fetches, i + 1 < 8 ? i + 2 : 8);
        }

        assert_int_equal(device_weights_begin(b.w, order, 8), 0);
        before = device_sim.fetches;
        take(&b, 0);
        assert_int_equal(device_sim.fetches, before + 1);
        device_weights_give(b.w, 0);
        assert_true(device_sim.fetches > before + 2 && device_sim.fetches < before + 8);
        take(&b, 1);
        device_weights_give(b.w, 1);
        assert_int_equal(device_weights_begin(b.w, NULL, 0), 0);
}

/* Without an order, or in another one than was said, it is slower and right. */
static void take_in_another_order_is_right(void **state) {
        static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7}, taken[] = {0, 5, 2, 9, 9, 7, 1, 8, 0};
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 3 * PART_BYTES);
        plan(&b, 4 * PART_BYTES, 1);
        assert_int_equal(device_weights_begin(b.w, order, 8), 0);
        for (size_t i = 0; i < ELEMENTSOF(taken); i++) {
                take(&b, taken[i]);
                device_weights_give(b.w, taken[i]);
        }
        assert_int_equal(device_weights_take(b.w, PARTS + PASSING), -EINVAL);
        assert_int_equal(device_weights_begin(b.w, (const uint32_t[]){PARTS + PASSING}, 1), -EINVAL);
        assert_int_equal(device_weights_begin(b.w, NULL, 0), 0);
}

/* Taken again before anything else needed the room: not fetched again. */
static void take_again_finds_it(void **state) {
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 3 * PART_BYTES);
        plan(&b, 3 * PART_BYTES, 0);
        take(&b, 8);
        device_weights_give(b.w, 8);
        take(&b, 8);
        device_weights_give(b.w, 8);
        assert_int_equal(device_sim.fetches, 1);
}

static void take_without_room_is_refused(void **state) {
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 2 * PART_BYTES);
        assert_int_equal(device_weights_take(b.w, 0), -EINVAL); /* nothing planned */
        plan(&b, 2 * PART_BYTES, 0);
        take(&b, 0);
        take(&b, 1);
        assert_int_equal(device_weights_take(b.w, 2), -ENOMEM);
        use(&b, 0);
        use(&b, 1);
        device_weights_give(b.w, 0);
        take(&b, 2);
        device_weights_give(b.w, 1);
        device_weights_give(b.w, 2);
}

/* A step that ended in the middle: the next one finds nothing in its way. */
static void begin_forgets_what_was_not_given(void **state) {
        static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7};
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 3 * PART_BYTES);
        plan(&b, 5 * PART_BYTES, 2);
        assert_int_equal(device_weights_begin(b.w, order, 8), 0);
        take(&b, 0);
        take(&b, 1);
        device_weights_give(b.w, 0); /* fetches ahead */
        take(&b, 2);
        pass(&b);
        pass(&b);
}

static void plan_is_the_same_again(void **state) {
        CLEANUP(bench_done) Bench b;
        DeviceWeightsState s;
        uint64_t least;

        bench_new(&b, 3 * PART_BYTES);
        plan(&b, 8 * PART_BYTES, 5);
        pass(&b);
        for (unsigned i = 0; i < 10; i++) {
                assert_int_equal(device_weights_plan(b.w, (8 + i % 2) * PART_BYTES, false, &least), 0);
                device_weights_state(b.w, &s);
                assert_int_equal(s.resident, 5);
        }
        /* what stays is not fetched again when there are more or fewer of them */
        plan(&b, 9 * PART_BYTES, 6);
        pass(&b);
        assert_int_equal(device_sim.fetched_bytes, (8 + 3) * PART_BYTES);
        plan(&b, 5 * PART_BYTES, 2);
        pass(&b);
        assert_int_equal(device_sim.fetched_bytes, (8 + 3 + 6) * PART_BYTES);
}

/* Two parts beside each other find room wherever the first lies; and that is the least. */
static void plan_makes_a_ring_that_two_parts_fit(void **state) {
        CLEANUP(bench_done) Bench b;
        DeviceWeightsState s;
        uint64_t least = 0;

        bench_new(&b, 0);
        assert_int_equal(device_weights_plan(b.w, 100, true, &least), -ENOSPC);
        assert_int_equal(least, 3 * PART_BYTES);
        assert_int_equal(device_sim.used, 0);
        plan(&b, least, 0);
        pass(&b);
        device_weights_state(b.w, &s);
        assert_int_equal(s.parts, PARTS);
        assert_int_equal(s.ring_bytes, 3 * PART_BYTES);
        assert_int_equal(s.all_bytes, (PARTS + 1) * PART_BYTES);
        plan(&b, s.all_bytes, PARTS); /* the ring is for one of the passing ones then */
        device_weights_state(b.w, &s);
        assert_int_equal(s.ring_bytes, PART_BYTES);
        pass(&b);
        plan(&b, s.all_bytes - 1, PARTS - 3 + 0);
        pass(&b);
}

/* The device has less than it said. */
static void plan_takes_what_the_device_has(void **state) {
        for (uint64_t have = 0; have <= PARTS + 1; have++) {
                CLEANUP(bench_done) Bench b;
                DeviceWeightsState s;
                uint64_t least;

                bench_new(&b, 0);
                device_sim.limit = have * PART_BYTES + 1;
                if (have < 3) {
                        assert_int_equal(device_weights_plan(b.w, UINT64_C(1) << 30, true, &least), -ENOMEM);
                        continue;
                }
                assert_int_equal(device_weights_plan(b.w, UINT64_C(1) << 30, true, &least), 0);
                device_weights_state(b.w, &s);
                assert_int_equal(s.resident, have == PARTS + 1 ? PARTS : have - 3);
                pass(&b);
        }
}

static void shrink_lets_the_last_ones_go(void **state) {
        CLEANUP(bench_done) Bench b;
        DeviceWeightsState s;

        bench_new(&b, 0);
        plan(&b, UINT64_C(1) << 20, PARTS);
        pass(&b);
        for (uint64_t before = device_sim.used; device_weights_shrink(b.w, PART_BYTES + 1) >= 0; before = device_sim.used) {
                assert_true(device_sim.used + PART_BYTES < before);
                pass(&b);
        }
        device_weights_state(b.w, &s);
        assert_true(s.resident <= 1);
        assert_int_equal(device_weights_shrink(b.w, 1 << 20), -ENOMEM);
        pass(&b);
}

static void release_gives_everything_back(void **state) {
        CLEANUP(bench_done) Bench b;

        bench_new(&b, 3 * PART_BYTES);
        plan(&b, 6 * PART_BYTES, 3);
        pass(&b);
        device_weights_release(b.w);
        assert_int_equal(device_sim.used, 0);
        assert_int_equal(device_weights_take(b.w, 0), -EINVAL);
        plan(&b, 6 * PART_BYTES, 3);
        pass(&b);
}

/* A copy that cannot be started is the take's error, now or when it comes; then all goes on. */
static void fetch_that_fails_is_said(void **state) {
        static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7};

        for (unsigned resident = 0; resident <= PARTS; resident += PARTS)
                for (int64_t after = 0; after < 4; after++) {
                        CLEANUP(bench_done) Bench b;
                        uint32_t i = 0;
                        int r = 0;

                        bench_new(&b, 3 * PART_BYTES);
                        plan(&b, (3 + resident) * PART_BYTES, resident);
                        device_sim.fetches_left = after;
                        assert_int_equal(device_weights_begin(b.w, order, 8), 0);
                        for (; r >= 0 && i < PARTS; i++) {
                                r = device_weights_take(b.w, i);
                                if (r >= 0)
                                        use(&b, i);
                                device_weights_give(b.w, i);
                        }
                        assert_int_equal(r, -EIO);
                        assert_true(i <= (uint32_t) after + 1);
                        device_sim.fetches_left = -1;
                        pass(&b);
                }
}

static void pin_comes_once_and_may_fail(void **state) {
        for (unsigned fails = 0; fails < 2; fails++) {
                CLEANUP(bench_done) Bench b;

                bench_new(&b, 3 * PART_BYTES);
                device_sim.pin_fails = fails;
                plan(&b, 5 * PART_BYTES, 2);
                pass(&b);
                pass(&b);
                assert_int_equal(device_sim.pinned_bytes, fails ? 0 : PARTS * PART_BYTES);
        }
}

/* Matrices. */

typedef struct MatrixBench {
        const LkOps *ops;
        LkContext *context;
        DeviceWeights *w;
} MatrixBench;

static void matrix_new(MatrixBench *b) {
        *b = (MatrixBench){.ops = device_ops()};
        assert_int_equal(b->ops->context_new(1, &b->context), 0);
        assert_int_equal(
                device_weights_new(&(DeviceWeightsConfig){.ops = b->ops, .context = b->context}, &b->w), 0);
        assert_int_equal(device_weights_add_part(b->w, false, false), 0);
}

static void matrix_done(MatrixBench *b) {
        b->w = device_weights_free(b->w);
        (void) b->ops->context_free(b->context);
        device_ops_done();
}

static void matrix_take(MatrixBench *b) {
        uint64_t least;

        assert_int_equal(device_weights_plan(b->w, UINT64_C(1) << 24, true, &least), 0);
        assert_int_equal(device_weights_take(b->w, 0), 0);
        device_ops_sync();
}

/* Expanded by the CPU, a view and its dense copy are the same numbers. */
static void check_same(MatrixBench *b, const LkMatrix *host, const LkMatrix *device) {
        const LkOps *cpu = device_ops_cpu();
        uint64_t n = host->rows * host->cols;
        CLEANUP_FREE float *want = malloc(n * sizeof(float)), *got = malloc(n * sizeof(float));
        void *y;

        assert_int_equal(device->rows, host->rows);
        assert_int_equal(device->cols, host->cols);
        assert_int_equal(device->row_stride, lk_row_size(host->type, host->cols));
        assert_true(device->block_rows >= device->rows);
        assert_ptr_not_equal(device->data, host->data);
        assert_int_equal((uintptr_t) device->data % 256, 0);
        assert_int_equal(cpu->dequantise(b->context, &(LkDequantise){*host, want, host->cols}), 0);
        assert_int_equal(b->ops->memory_new(b->context, n * sizeof(float), &y), 0);
        assert_int_equal(b->ops->dequantise(b->context, &(LkDequantise){*device, y, host->cols}), 0);
        assert_int_equal(b->ops->download(b->context, got, y, n * sizeof(float)), 0);
        b->ops->memory_free(b->context, y);
        assert_memory_equal(got, want, n * sizeof(float));
}

static void fill(uint8_t *p, size_t n, unsigned seed) {
        for (size_t i = 0; i < n; i++)
                p[i] = (uint8_t) ((i * 2654435761u + seed * 40503u) >> 13);
}

/* q, k and v of a matrix whose heads are interleaved, also with a last block that is cut. */
static void matrix_of_blocks_becomes_dense(void **state) {
        enum { HEAD = 4, HEADS = 6, COLS = 24 };
        static uint8_t bytes[3 * HEAD * HEADS * COLS * 2 + 1];

        fill(bytes, sizeof(bytes), 1);
        for (size_t i = 1; i < sizeof(bytes); i += 2)
                bytes[i + 1] = 0x3f; /* finite, at an odd address */
        for (uint64_t rows = HEAD * HEADS - 1; rows <= HEAD * HEADS; rows++) {
                CLEANUP(matrix_done) MatrixBench b;
                LkMatrix host[3], device[3];

                matrix_new(&b);
                for (unsigned i = 0; i < 3; i++) {
                        host[i] = device[i] = (LkMatrix){.data = bytes + 1 + i * HEAD * COLS * 2, .type = LK_BF16,
                                .rows = rows, .cols = COLS, .row_stride = COLS * 2, .block_rows = HEAD,
                                .block_stride = 3 * HEAD * COLS * 2};
                        assert_int_equal(device_weights_add_slot(b.w, device + i, NULL), 0);
                }
                matrix_take(&b);
                for (unsigned i = 0; i < 3; i++)
                        check_same(&b, host + i, device + i);
                device_weights_give(b.w, 0);
        }
}

static void matrix_with_wide_rows_becomes_dense(void **state) {
        static uint8_t bytes[6 * 100];
        CLEANUP(matrix_done) MatrixBench b;
        LkMatrix host = {.data = bytes, .type = LK_F32, .rows = 6, .cols = 20, .row_stride = 100, .block_rows = 2,
                         .block_stride = 200},
                 device = host;

        for (size_t i = 0; i < sizeof(bytes) / 4; i++)
                memcpy(bytes + 4 * i, &(float){(float) i}, 4);
        matrix_new(&b);
        assert_int_equal(device_weights_add_slot(b.w, &device, NULL), 0);
        matrix_take(&b);
        check_same(&b, &host, &device);
}

/* One scale, a scale a row, a part of the tensor, interleaved heads. */
static void matrix_of_int8_takes_its_scales_along(void **state) {
        enum { ROWS = 48, COLS = 16 };
        static uint8_t bytes[ROWS * COLS];
        static float scales[ROWS];
        CLEANUP(matrix_done) MatrixBench b;
        LkMatrix host[4], device[4];

        fill(bytes, sizeof(bytes), 2);
        for (unsigned i = 0; i < ROWS; i++)
                scales[i] = (float) (i + 1) / 64;
        matrix_new(&b);
        for (unsigned i = 0; i < 4; i++) {
                bool interleaved = i == 3;
                uint64_t first = i == 0 ? 0 : i == 1 ? 16 : i == 2 ? 31 : 4;

                host[i] = device[i] = (LkMatrix){.data = bytes + first * COLS, .type = LK_I8, .rows = 16,
                        .cols = COLS, .row_stride = COLS, .block_rows = interleaved ? 4 : 16,
                        .block_stride = (interleaved ? 12 : 16) * COLS,
                        .quant = {.scale = scales, .scale_stride = i == 0 ? 0 : 4, .first_row = first,
                                .rotation = i % 2 ? 16 : 0}};
                assert_int_equal(device_weights_add_slot(b.w, device + i, NULL), 0);
        }
        matrix_take(&b);
        for (unsigned i = 0; i < 4; i++) {
                check_same(&b, host + i, device + i);
                assert_int_equal(device[i].quant.rotation, host[i].quant.rotation);
                assert_int_equal((uintptr_t) device[i].quant.scale % 256, 0);
        }
}

static void matrix_of_nvfp4_takes_its_tiles_along(void **state) {
        enum { ROWS = 768, COLS = 64 };
        static uint8_t bytes[ROWS * COLS / 2], scales[ROWS * 4];
        static float scale = 0.25f, in_scale[COLS];
        const struct {
                uint64_t first, rows, block, step;
                int result;
        } cases[] = {
                {0, 300, 300, 300, 0},
                {300, 200, 200, 200, 0},
                {128, 256, 128, 384, 0},
                {0, 128, 64, 192, -EOPNOTSUPP},
        };

        fill(bytes, sizeof(bytes), 3);
        for (size_t i = 0; i < sizeof(scales); i++)
                scales[i] = (uint8_t) (0x30 + i % 13); /* finite */
        for (unsigned i = 0; i < COLS; i++)
                in_scale[i] = (float) i;
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP(matrix_done) MatrixBench b;
                LkMatrix host = {.data = bytes + cases[i].first * COLS / 2, .type = LK_NVFP4, .rows = cases[i].rows,
                                 .cols = COLS, .row_stride = COLS / 2, .block_rows = cases[i].block,
                                 .block_stride = cases[i].step * COLS / 2,
                                 .quant = {.scale = &scale, .first_row = cases[i].first, .block_scale = scales,
                                         .block_scale_cols = 4, .in_scale = {in_scale, LK_F32, COLS}}},
                         device = host;

                matrix_new(&b);
                assert_int_equal(device_weights_add_slot(b.w, &device, NULL), cases[i].result);
                if (cases[i].result < 0)
                        continue;
                matrix_take(&b);
                check_same(&b, &host, &device);
                device_ops_read(device.quant.in_scale.data, sizeof(in_scale));
                assert_memory_equal(device.quant.in_scale.data, in_scale, sizeof(in_scale));
                assert_ptr_not_equal(device.quant.in_scale.data, in_scale);
        }
}

/* Parts with a matrix of each kind and a vector; behind those that stay one that passes. */

enum { WIDE_PARTS = 4, WIDE_ROWS = 40, WIDE_COLS = 48, WIDE_N = WIDE_ROWS * WIDE_COLS };
enum { OF_FP8, OF_NVFP4, OF_INT8, OF_BF16, KINDS };

typedef struct WideBench {
        const LkOps *ops;
        LkContext *context;
        DeviceWeights *w;
        LkMatrix host[WIDE_PARTS + 1][KINDS], slots[WIDE_PARTS + 1][KINDS];
        LkVector host_vector[WIDE_PARTS + 1], vector[WIDE_PARTS + 1];
        uint8_t bytes[WIDE_PARTS + 1][KINDS][WIDE_N * 2], tiles[128 * 4];
        float scale[WIDE_ROWS], in_scale[WIDE_COLS];
} WideBench;

static LkMatrix wide_matrix(const WideBench *b, unsigned part, unsigned kind) {
        static const LkType types[] = {LK_F8_E4M3, LK_NVFP4, LK_I8, LK_BF16};
        uint64_t row = lk_row_size(types[kind], WIDE_COLS);
        LkMatrix m = {.data = b->bytes[part][kind], .type = types[kind], .rows = WIDE_ROWS, .cols = WIDE_COLS, .row_stride = row,
                .block_rows = WIDE_ROWS, .block_stride = WIDE_ROWS * row, .layer_rows = 3 * WIDE_ROWS};

        if (kind != OF_BF16)
                m.quant = (LkQuant){.scale = b->scale, .scale_stride = kind == OF_INT8 ? 4 : 0};
        if (kind == OF_NVFP4) {
                m.quant.block_scale = b->tiles;
                m.quant.block_scale_cols = 4;
                m.quant.in_scale = (LkVector){b->in_scale, LK_F32, WIDE_COLS};
        }
        return m;
}

static WideBench *wide_new(bool expand) {
        WideBench *b = calloc(1, sizeof(*b));

        assert_non_null(b);
        b->ops = device_ops();
        assert_int_equal(b->ops->context_new(1, &b->context), 0);
        assert_int_equal(
                device_weights_new(&(DeviceWeightsConfig){.ops = b->ops, .context = b->context, .expand = expand}, &b->w), 0);
        for (size_t i = 0; i < sizeof(b->tiles); i++)
                b->tiles[i] = (uint8_t) (0x30 + i % 13);
        for (unsigned i = 0; i < WIDE_ROWS; i++)
                b->scale[i] = (float) (i + 3) / 77;
        for (unsigned i = 0; i < WIDE_COLS; i++)
                b->in_scale[i] = 1 + (float) i / 50;
        for (unsigned i = 0; i <= WIDE_PARTS; i++) {
                assert_int_equal(device_weights_add_part(b->w, i == WIDE_PARTS, true), 0);
                for (unsigned k = 0; k < KINDS; k++) {
                        fill(b->bytes[i][k], sizeof(b->bytes[i][k]), i * KINDS + k);
                        for (size_t j = 0; k == OF_FP8 && j < WIDE_N; j++)
                                b->bytes[i][k][j] &= 0xf7; /* finite */
                        for (size_t j = 1; k == OF_BF16 && j < 2 * WIDE_N; j += 2)
                                b->bytes[i][k][j] = 0x3f;
                        b->host[i][k] = b->slots[i][k] = wide_matrix(b, i, k);
                        assert_int_equal(device_weights_add_slot(b->w, b->slots[i] + k, NULL), 0);
                }
                b->host_vector[i] = b->vector[i] = (LkVector){b->bytes[i][OF_BF16], LK_BF16, WIDE_N};
                assert_int_equal(device_weights_add_slot(b->w, NULL, b->vector + i), 0);
        }
        return b;
}

static void wide_free(WideBench **b) {
        (void) device_weights_free((*b)->w);
        (void) (*b)->ops->context_free((*b)->context);
        device_ops_done();
        free(*b);
}

/* What a product of bf16 meets: of a matrix that is not expanded what it would be. */
static void wide_numbers(WideBench *b, const LkMatrix *m, bool on_device, uint16_t *ret) {
        void *y;

        if (!on_device) {
                assert_int_equal(device_ops_cpu()->expand(b->context, &(LkExpand){*m, ret}), 0);
                return;
        }
        assert_int_equal(b->ops->memory_new(b->context, WIDE_N * 2, &y), 0);
        if (m->type == LK_BF16)
                assert_int_equal(b->ops->copy(b->context, LK_COMPUTE, &(LkCopy){y, m->data, 1, WIDE_N * 2, 0, 0}), 0);
        else
                assert_int_equal(b->ops->expand(b->context, &(LkExpand){*m, y}), 0);
        assert_int_equal(b->ops->download(b->context, ret, y, WIDE_N * 2), 0);
        b->ops->memory_free(b->context, y);
}

/* Takes the part: its formats, wide or not, have the right bits. */
static void wide_check(WideBench *b, unsigned part, bool wide) {
        _Alignas(16) uint16_t want[WIDE_N], got[WIDE_N];

        assert_int_equal(device_weights_take(b->w, part), 0);
        for (unsigned k = 0; k < KINDS; k++) {
                const LkMatrix *m = b->slots[part] + k, *host = b->host[part] + k;
                bool expanded = wide && part < WIDE_PARTS && k <= OF_NVFP4;

                assert_int_equal(m->type, expanded ? LK_BF16 : host->type);
                assert_int_equal(m->row_stride, lk_row_size(m->type, WIDE_COLS));
                assert_int_equal(m->layer_rows, host->layer_rows);
                assert_true(!m->quant.scale == (m->type == LK_BF16));
                if (k == OF_BF16)
                        memcpy(want, host->data, sizeof(want));
                else
                        wide_numbers(b, host, false, want);
                wide_numbers(b, m, true, got);
                assert_memory_equal(got, want, sizeof(want));
        }
        device_ops_read(b->vector[part].data, WIDE_N * 2);
        assert_memory_equal(b->vector[part].data, b->host_vector[part].data, WIDE_N * 2);
        device_weights_give(b->w, part);
}

static void wide_pass(WideBench *b, bool wide) {
        static const uint32_t order[] = {WIDE_PARTS, 0, 1, 2, 3};

        assert_int_equal(device_weights_begin(b->w, order, ELEMENTSOF(order)), 0);
        for (size_t i = 0; i < ELEMENTSOF(order); i++)
                wide_check(b, order[i], wide);
}

static DeviceWeightsState wide_plan(WideBench *b, uint64_t budget, bool grow, bool wide) {
        DeviceWeightsState s;
        uint64_t least;

        assert_int_equal(device_weights_plan(b->w, budget, grow, &least), 0);
        device_weights_state(b->w, &s);
        assert_int_equal(s.wide, wide);
        assert_true(s.bytes <= budget);
        return s;
}

static void plan_expands_where_all_of_it_fits(void **state) {
        CLEANUP(wide_free) WideBench *b = wide_new(true);
        DeviceWeightsState s;
        uint64_t passing, once;

        device_weights_state(b->w, &s);
        assert_true(s.wide_bytes > s.all_bytes + WIDE_PARTS * (WIDE_N + WIDE_N * 3 / 2 - 2048));
        s = wide_plan(b, s.wide_bytes, true, true);
        assert_int_equal(s.resident, WIDE_PARTS);
        assert_int_equal(s.bytes, s.wide_bytes);
        wide_pass(b, true);
        device_weights_state(b->w, &s);
        once = s.fetched_bytes; /* the file's numbers */
        assert_in_range(once, 5 * (WIDE_N * 5 / 2 + WIDE_N * 4), 5 * (WIDE_N * 5 / 2 + WIDE_N * 4 + 1024));
        passing = once / 5;
        for (unsigned i = 0; i < 3; i++)
                wide_pass(b, true);
        device_weights_state(b->w, &s);
        assert_int_equal(s.fetched_bytes, once + 3 * passing);
        wide_plan(b, s.wide_bytes + 1, true, true); /* as it is */
        wide_check(b, 2, true);
        device_weights_state(b->w, &s);
        assert_int_equal(s.fetched_bytes, once + 3 * passing);
        device_weights_release(b->w);
        wide_plan(b, s.wide_bytes - 1, true, false);
        wide_pass(b, false);
        device_ops_sync();
        wide_free(&b);

        b = wide_new(false);
        device_weights_state(b->w, &s);
        assert_int_equal(s.wide_bytes, 0);
        wide_plan(b, UINT64_C(1) << 24, true, false);
        wide_pass(b, false);
}

static void take_in_any_order_expands_once(void **state) {
        static const uint32_t order[] = {0, 1, 2, 3}, takes[] = {2, 0, 0, WIDE_PARTS, 3, 1, 2, 3, 0};
        CLEANUP(wide_free) WideBench *b = wide_new(true);
        DeviceWeightsState s;

        wide_plan(b, UINT64_C(1) << 24, true, true);
        assert_int_equal(device_weights_begin(b->w, order, 4), 0);
        for (size_t i = 0; i < ELEMENTSOF(takes); i++)
                wide_check(b, takes[i], true);
        assert_int_equal(device_weights_begin(b->w, order, 4), 0); /* what is fetched and not taken is forgotten */
        device_weights_state(b->w, &s);
        wide_pass(b, true);
}

static void shrink_of_what_is_expanded_keeps_it_packed(void **state) {
        CLEANUP(wide_free) WideBench *b = wide_new(true);
        DeviceWeightsState s = wide_plan(b, UINT64_C(1) << 24, true, true), after;

        wide_pass(b, true);
        assert_int_equal(device_weights_shrink(b->w, 1), 0);
        device_weights_state(b->w, &after);
        assert_true(!after.wide && after.bytes < s.bytes);
        assert_int_equal(after.resident, WIDE_PARTS);
        wide_pass(b, false);
        wide_plan(b, UINT64_C(1) << 24, true, false); /* what stays is not fetched again */
        device_weights_state(b->w, &after);
        wide_pass(b, false);
        assert_int_equal(device_weights_shrink(b->w, 1), 0);
        device_weights_state(b->w, &after);
        assert_true(after.resident < WIDE_PARTS);
        wide_pass(b, false);
}

/* Memory of the device that is not there: as much of it as there is, as the file has it. */
static void plan_expands_less_where_the_device_has_less(void **state) {
        for (unsigned i = 0; i <= 8; i++) {
                CLEANUP(wide_free) WideBench *b = wide_new(true);
                DeviceWeightsState s;

                device_weights_state(b->w, &s);
                device_sim.limit = s.wide_bytes - (s.wide_bytes - s.all_bytes) * i / 8;
                wide_plan(b, UINT64_C(1) << 24, true, i == 0);
                device_sim.limit = 0;
                wide_pass(b, i == 0);
        }
}

static void fetch_that_fails_while_it_expands_is_said(void **state) {
        for (int64_t n = 0; n < 44; n++) {
                CLEANUP(wide_free) WideBench *b = wide_new(true);
                static const uint32_t order[] = {0, 1, 2, 3};
                int r = 0;

                wide_plan(b, UINT64_C(1) << 24, true, true);
                assert_int_equal(device_weights_begin(b->w, order, 4), 0);
                device_sim.fetches_left = n;
                for (uint32_t i = 0; r >= 0 && i < 4; i++) {
                        r = device_weights_take(b->w, i);
                        device_weights_give(b->w, i);
                }
                assert_int_equal(r, n < 40 ? -EIO : 0); /* 10 copies a part */
                device_sim.fetches_left = -1;
                wide_pass(b, true);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(take_streams_through_any_ring),
                cmocka_unit_test(take_keeps_what_stays),
                cmocka_unit_test(give_fetches_ahead),
                cmocka_unit_test(take_in_another_order_is_right),
                cmocka_unit_test(take_again_finds_it),
                cmocka_unit_test(take_without_room_is_refused),
                cmocka_unit_test(begin_forgets_what_was_not_given),
                cmocka_unit_test(plan_is_the_same_again),
                cmocka_unit_test(plan_makes_a_ring_that_two_parts_fit),
                cmocka_unit_test(plan_takes_what_the_device_has),
                cmocka_unit_test(shrink_lets_the_last_ones_go),
                cmocka_unit_test(release_gives_everything_back),
                cmocka_unit_test(fetch_that_fails_is_said),
                cmocka_unit_test(pin_comes_once_and_may_fail),
                cmocka_unit_test(matrix_of_blocks_becomes_dense),
                cmocka_unit_test(matrix_with_wide_rows_becomes_dense),
                cmocka_unit_test(matrix_of_int8_takes_its_scales_along),
                cmocka_unit_test(matrix_of_nvfp4_takes_its_tiles_along),
                cmocka_unit_test(plan_expands_where_all_of_it_fits),
                cmocka_unit_test(take_in_any_order_expands_once),
                cmocka_unit_test(shrink_of_what_is_expanded_keeps_it_packed),
                cmocka_unit_test(plan_expands_less_where_the_device_has_less),
                cmocka_unit_test(fetch_that_fails_while_it_expands_is_said),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
