/* SPDX-License-Identifier: Apache-2.0 */
/* How long the coders of a film take at their full size, against what they may: numbers are made of a counter, one layer's for all layers.
 *
 *     bench-coders [decoder|products|parts|host|conditioner]...
 *
 * Limits: a film of 243 frames of 1344 x 768 in 8 s, a prompt of 1,400 tokens (1,008 of them of a picture) in 0.6 s. */

#include <math.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"
#include "tests/gpu/bench.h"
#include "tests/gpu/counter.h"

#define FILM_LIMIT 8.0
#define PROMPT_LIMIT 0.6
#define FILM_TOKENS 72u
#define HEIGHT 48u
#define WIDTH 84u
#define HIDDEN UINT64_C(2048)
#define FFN UINT64_C(8192)
#define LAYERS 36u
#define TILE_ROWS UINT64_C(1797)
#define TOKENS 1400u
#define PATCHES (HEIGHT * WIDTH)
#define TOGETHER 14u /* tiles a launch that a chunk of 28 is cut into */
#define CHUNK 28u
#define PERIOD UINT64_C(4194301) /* numbers that are made before they come again */

static LkContext *gpu;

static void good(int r, const char *what, const Fault *f) {
        if (r < 0)
                (void) fprintf(stderr, "%s\n", f ? f->text : "");
        must_be(r >= 0, what);
}

static void *must_malloc(uint64_t size) {
        void *p = malloc(size);

        must_be(p != NULL, "memory");
        return p;
}

static void upload(void *device, const void *host, uint64_t size) {
        must_be(lk_cuda_ops()->upload(gpu, device, host, size) == 0, "upload");
}

/* Numbers of standard deviation `sigma` around `mean`. */
static void *numbers(LkType type, uint64_t n, float mean, float sigma, const char *name) {
        uint64_t seed = counter_seed(name), size = lk_type_size(type), made = n < PERIOD ? n : PERIOD;
        uint8_t *host = must_malloc(made * size), *device = device_new(n * size);

        for (uint64_t i = 0; i < made; i++) {
                float f = mean + sigma * counter_normal(seed, i);
                uint16_t h = type == LK_F16 ? counter_f16(f) : counter_bf16(f);

                memcpy(host + i * size, type == LK_F32 ? (const void *) &f : (const void *) &h, size);
        }
        for (uint64_t i = 0; i < n; i += made)
                upload(device + i * size, host, (n - i < made ? n - i : made) * size);
        free(host);
        return device;
}

static LkVector vector(LkType type, uint64_t n, float mean, float sigma, const char *name) {
        return (LkVector){numbers(type, n, mean, sigma, name), type, n};
}

/* int8: rotated by groups of 256, nvfp4: with an input's scale, with scales that make its numbers about as large. */
static LkMatrix matrix(LkType type, uint64_t rows, uint64_t cols, const char *name) {
        LkMatrix m = {.type = type, .rows = rows, .cols = cols, .row_stride = lk_row_size(type, cols), .block_rows = rows};
        float sigma = 1 / sqrtf((float) cols);

        m.block_stride = rows * m.row_stride;
        if (type == LK_I8) {
                void *data = device_new(rows * cols);

                fill_s8(data, rows * cols, 32, (uint32_t) counter_seed(name));
                m.data = data;
                m.quant = (LkQuant){.scale = numbers(LK_F32, rows, sigma / 32, 0, name), .scale_stride = 4, .rotation = 256};
        } else if (type == LK_NVFP4) {
                uint64_t blocks = (rows + 127) / 128 * 128 * (cols / 16);
                void *data = device_new(rows * cols / 2), *ones = device_new(blocks);

                fill_s8(data, rows * cols / 2, 32, (uint32_t) counter_seed(name));
                must(cudaMemset(ones, 0x38, blocks), "scales"); /* 1 */
                m.data = data;
                m.quant = (LkQuant){.scale = numbers(LK_F32, 1, sigma / 3, 0, name), .block_scale = ones, .block_scale_cols = cols / 16,
                        .in_scale = vector(LK_BF16, cols, 1, 0.1f, name)};
        } else if (type == LK_BF16) {
                void *data = device_new(rows * cols * 2);

                fill_bf16(data, rows * cols, sigma, (uint32_t) counter_seed(name));
                m.data = data;
        } else
                m.data = numbers(type, rows * cols, 0, sigma, name);
        return m;
}

static double median(double *took, unsigned n) {
        qsort(took, n, sizeof(*took), bench_compare);
        return took[n / 2];
}

/* ---- the video decoder ---- */

static VideoLinear linear(LkType type, uint64_t rows, uint64_t cols, const char *name) {
        return (VideoLinear){matrix(type, rows, cols, name), vector(LK_F16, rows, 0, 0.1f, name)};
}

static VideoLayer video_layer(LkType type) {
        float *scale = must_malloc(HIDDEN * sizeof(float));

        for (uint64_t i = 0; i < HIDDEN; i++)
                scale[i] = 0.1f;
        return (VideoLayer){.norm1 = vector(LK_F16, HIDDEN, 1, 0.1f, "norm1"), .norm2 = vector(LK_F16, HIDDEN, 1, 0.1f, "norm2"),
                .q = linear(type, HIDDEN, HIDDEN, "q"), .k = linear(type, HIDDEN, HIDDEN, "k"), .v = linear(type, HIDDEN, HIDDEN, "v"),
                .out = linear(type, HIDDEN, HIDDEN, "out"), .gate = linear(type, FFN, HIDDEN, "gate"),
                .up = linear(type, FFN, HIDDEN, "up"),
                .down = linear(type, HIDDEN, FFN, "down"), .scale1 = scale, .scale2 = scale};
}

static H3VideoVae *video_model(LkType type) {
        static VideoLayer layers[2][LAYERS];
        H3VideoVae *m = must_malloc(sizeof(*m));
        VideoLayer *all = layers[type == LK_I8];

        all[0] = video_layer(type);
        for (uint32_t i = 1; i < LAYERS; i++)
                all[i] = all[0];
        *m = (H3VideoVae){.config = {.latent_channels = 24, .has_decoder = true, .layers = LAYERS, .heads = 32, .head_dim = 64,
                                  .hidden = HIDDEN, .ffn = FFN, .registers = 4, .rope_freqs = 8, .eps = 1e-5f, .rope_theta = 100},
                .layers = all,
                .post_quant = linear(LK_F16, 24, 24, "post_quant"),
                .embed = linear(LK_F16, HIDDEN, 24, "embed"),
                .proj = linear(LK_F16, 3072, HIDDEN, "proj"),
                .decoder_norm = {vector(LK_F16, HIDDEN, 1, 0, "norm"), vector(LK_F16, HIDDEN, 0, 0.1f, "norm")},
                .suffix = calloc(5 * HIDDEN, sizeof(float))};
        for (uint32_t i = 0; i < 24; i++)
                m->config.std[i] = 1;
        must_be(m->suffix != NULL, "memory");
        return m;
}

static H3VideoDecodePlan film_plan(const H3VideoVae *m, uint32_t batch) {
        H3VideoDecodePlan p;
        Fault f = {};

        good(h3_video_decode_plan(m, FILM_TOKENS, HEIGHT, WIDTH, H3_VIDEO_TILING, &p, &f), "plan", &f);
        good(h3_video_decode_plan_as(m, LK_F16, batch, &p, &f), "plan", &f);
        return p;
}

/* A tile's products and attention, multiply and add. */
static double tile_work(void) {
        double rows = (double) TILE_ROWS, weights = (double) (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN);

        return LAYERS * (2 * rows * weights + 4 * rows * rows * (double) HIDDEN) + 2 * 1792.0 * 3072 * (double) HIDDEN;
}

static void decode(const H3VideoVae *m, const char *what, const float *z, float *out, uint32_t batch) {
        const H3Rank rank = {.ops = lk_cuda_ops(), .context = gpu};
        H3VideoDecodePlan p = film_plan(m, batch);
        double took[5], msec, film;
        Fault f = {};
        void *work;

        must_be(lk_cuda_ops()->memory_new(gpu, p.memory.device, &work) == 0, "work memory");
        for (int i = -1; i < (int) ELEMENTSOF(took); i++) {
                double from = now();

                good(h3_video_decode_batch(&rank, m, &p, z, 0, 0, batch, work, NULL, out, &f), "decode", &f);
                if (i >= 0)
                        took[i] = (now() - from) * 1000;
        }
        lk_cuda_ops()->memory_free(gpu, work);
        msec = median(took, ELEMENTSOF(took));
        film = msec / batch * (double) h3_video_decode_jobs(&p) / 1000;
        printf("decoder, %s, %u tiles a launch: %8.2f ms %5.0f TF, %4.0f MB; a film %6.2f s, %.2f of the limit\n", what, batch, msec,
                tile_work() * batch / msec / 1e9, (double) p.memory.device / 1e6, film, film / FILM_LIMIT);
        fflush(stdout);
}

static void bench_decoder(void) {
        static const uint32_t batches[] = {1, 4, 7, 8, TOGETHER, CHUNK};
        H3VideoVae *half = video_model(LK_F16), *i8 = video_model(LK_I8);
        H3VideoDecodePlan p = film_plan(half, CHUNK);
        uint64_t n = UINT64_C(24) * FILM_TOKENS * HEIGHT * WIDTH;
        float *z = must_malloc(n * sizeof(float)), *out = must_malloc(CHUNK * p.memory.tile);

        for (uint64_t i = 0; i < n; i++)
                z[i] = counter_normal(1, i);
        memset(out, 0, CHUNK * p.memory.tile);
        must_be(lk_cuda_ops()->pin(gpu, out, CHUNK * p.memory.tile) == 0, "registering");
        for (size_t i = 0; i < ELEMENTSOF(batches); i++)
                decode(half, "f16", z, out, batches[i]);
        decode(i8, "int8 as f16", z, out, TOGETHER);
        for (uint64_t i = 0; i < TOGETHER * p.memory.tile / sizeof(float); i++)
                must_be(isfinite(out[i]), "a pixel is no number");
        lk_cuda_ops()->unpin(out, CHUNK * p.memory.tile);
        free(z);
        free(out);
}

/* ---- its operations, one by one ---- */

static int run_gemm(LkContext *c, const void *a) {
        return lk_cuda_ops()->gemm(c, a);
}

static int run_attention(LkContext *c, const void *a) {
        return lk_cuda_ops()->attention(c, a);
}

static int run_norm(LkContext *c, const void *a) {
        return lk_cuda_ops()->norm(c, a);
}

static int run_residual(LkContext *c, const void *a) {
        return lk_cuda_ops()->residual(c, a);
}

static int run_swiglu(LkContext *c, const void *a) {
        return lk_cuda_ops()->swiglu(c, a);
}

static int run_qk(LkContext *c, const void *a) {
        return lk_cuda_ops()->qk_norm_rope(c, a);
}

static int run_layer_norm(LkContext *c, const void *a) {
        return lk_cuda_ops()->layer_norm(c, a);
}

static int run_unpatch(LkContext *c, const void *a) {
        return lk_cuda_ops()->unpatch(c, a);
}

/* times: of a launch of TOGETHER tiles. work: multiply and add, or 0. */
static void part(const char *what, BenchRun run, const void *args, double times, double work, double bytes, void *device) {
        double msec = bench_msec(gpu, run, args, BENCH_SAMPLES, device);

        printf("    %-22s %8.3f ms", what, msec);
        if (work > 0)
                printf(" %5.0f TF", work / msec / 1e9);
        else
                printf(" %5.0f GB/s", bytes / msec / 1e6);
        printf(", of a film %5.2f s\n", msec * times * 392 / TOGETHER / 1000);
        fflush(stdout);
}

static void part_gemm(const char *what, const VideoLinear *l, LkType type, void *x, void *y, double times) {
        const uint64_t m = TOGETHER * TILE_ROWS;
        const LkGemm a = {.m = m, .x = x, .x_type = type, .x_ld = l->w.cols, .w = l->w, .bias = l->bias, .y = y, .y_type = type,
                .y_ld = l->w.rows};

        part(what, run_gemm, &a, times, 2.0 * (double) m * (double) l->w.rows * (double) l->w.cols, 0, y);
}

/* All products of a layer with so many tiles' rows: the algorithm of each is fixed, but not how full its last blocks are. */
static void bench_products(void) {
        static const struct {
                const char *what;
                uint64_t rows, cols, times;
        } products[] = {{"q, k, v, out", HIDDEN, HIDDEN, 4}, {"gate, up", FFN, HIDDEN, 2}, {"down", HIDDEN, FFN, 1}};
        VideoLinear linears[ELEMENTSOF(products)];
        void *x = numbers(LK_F16, CHUNK * TILE_ROWS * FFN, 0, 1, "x"), *y = device_new(CHUNK * TILE_ROWS * FFN * 2);

        for (size_t i = 0; i < ELEMENTSOF(products); i++)
                linears[i] = linear(LK_F16, products[i].rows, products[i].cols, products[i].what);
        printf("products of a layer, ms a tile (TF):\n");
        for (unsigned tiles = 1; tiles <= CHUNK; tiles = tiles == TOGETHER + 2 ? CHUNK : tiles + 1) {
                double all = 0;

                printf("    %2u tiles:", tiles);
                for (size_t i = 0; i < ELEMENTSOF(products); i++) {
                        const VideoLinear *l = linears + i;
                        const LkGemm a = {.m = tiles * TILE_ROWS, .x = x, .x_type = LK_F16, .x_ld = l->w.cols, .w = l->w, .bias = l->bias,
                                .y = y, .y_type = LK_F16, .y_ld = l->w.rows};
                        double msec = bench_msec(gpu, run_gemm, &a, 3, y);

                        all += msec * (double) products[i].times / tiles;
                        printf(" %s %.4f (%.0f),", products[i].what, msec / tiles,
                                2.0 * (double) a.m * (double) l->w.rows * (double) l->w.cols / msec / 1e9);
                }
                printf(" all %.4f, of a film %.2f s\n", all, all * LAYERS * 392 / 1000);
                fflush(stdout);
        }
        device_free(x);
        device_free(y);
}

static void bench_parts(void) {
        const uint64_t m = TOGETHER * TILE_ROWS, n = m * HIDDEN;
        const double rows = (double) m, wide = (double) n;
        VideoLayer l = video_layer(LK_F16);
        VideoLinear proj = linear(LK_F16, 3072, HIDDEN, "proj");
        void *x = numbers(LK_F32, n, 0, 1, "x"), *h = numbers(LK_F16, n, 0, 1, "h"), *q = numbers(LK_F16, n, 0, 1, "q"),
             *k = numbers(LK_F16, n, 0, 1, "k"), *y = device_new(n * 4), *gate = numbers(LK_F16, m * FFN, 0, 1, "gate"),
             *up = device_new(m * FFN * 2), *scale = numbers(LK_F32, HIDDEN, 0, 0.1f, "scale"), *pixels = device_new(m * 3072 * 4),
             *frames = device_new(m * 3072 * 4);
        int32_t *zeros = device_new(m * sizeof(*zeros));
        const LkVector ones = vector(LK_F32, 64, 1, 0, "ones");
        const LkResidual add = {.type = LK_F32, .m = m, .n = HIDDEN, .x = x, .x_ld = HIDDEN, .y = h, .y_type = LK_F16, .y_ld = HIDDEN,
                .mod = scale, .mod_ld = HIDDEN, .mod_index = zeros};
        LkNorm norm = {.type = LK_F32, .m = m, .n = HIDDEN, .x = x, .x_ld = HIDDEN, .weight = l.norm1, .eps = 1e-5f, .y = y,
                .y_type = LK_F16,
                .y_ld = HIDDEN};
        const LkAttention attention = {.type = LK_F16, .n_q = TILE_ROWS, .n_k = TILE_ROWS, .sequences = TOGETHER, .heads = 32,
                .head_dim = 64,
                .scale = 0.125f, .q = q, .k = k, .v = h, .o = y, .q_ld = HIDDEN, .k_ld = HIDDEN, .v_ld = HIDDEN, .o_ld = HIDDEN};
        const LkQkNormRope rope = {.type = LK_F16, .m = m, .heads = 32, .head_dim = 64, .x = q, .x_ld = HIDDEN, .weight = ones,
                .eps = 1e-5f,
                .cos = x, .sin = x, .rope_dims = 24, .period = TILE_ROWS};
        const LkSwiglu swiglu = {.type = LK_F16, .m = m, .n = FFN, .gate = gate, .up = up, .y = up, .gate_ld = FFN, .up_ld = FFN,
                .y_ld = FFN};
        const LkLayerNorm last = {.type = LK_F32, .m = m, .n = HIDDEN, .x = x, .x_ld = HIDDEN, .weight = l.norm1, .bias = l.norm2,
                .eps = 1e-5f,
                .y = y, .y_ld = HIDDEN};
        const LkUnpatch unpatch = {.t = 7, .h = 16, .w = 16, .patch = {4, 16, 16}, .channels = 3, .x = pixels, .x_ld = 3072, .y = frames};

        must(cudaMemset(zeros, 0, m * sizeof(*zeros)), "zeros");
        must(cudaMemset(pixels, 0, m * 3072 * 4), "pixels");
        printf("parts of %u tiles, f16:\n", TOGETHER);
        part_gemm("q (k, v, out alike)", &l.q, LK_F16, h, y, 4 * LAYERS);
        part_gemm("gate (up alike)", &l.gate, LK_F16, h, up, 2 * LAYERS);
        part_gemm("down", &l.down, LK_F16, gate, y, LAYERS);
        part("attention", run_attention, &attention, LAYERS, 4.0 * rows * (double) TILE_ROWS * (double) HIDDEN, 0, y);
        part("norm", run_norm, &norm, LAYERS, 0, wide * 6, y);
        norm.add = &add;
        part("residual and norm", run_norm, &norm, LAYERS, 0, wide * 12, y);
        part("residual", run_residual, &add, LAYERS, 0, wide * 10, x);
        part("q (k alike): norm, rope", run_qk, &rope, 2 * LAYERS, 0, wide * 4, q);
        part("swiglu", run_swiglu, &swiglu, LAYERS, 0, rows * (double) FFN * 6, up);
        part("last norm", run_layer_norm, &last, 1, 0, wide * 8, y);
        part_gemm("pixels, f32", &proj, LK_F32, y, pixels, 1);
        part("pixels to frames", run_unpatch, &unpatch, TOGETHER, 0, 1792.0 * 3072 * 8, frames);
}

/* ---- what the host does with a chunk ---- */

static void bench_host(void) {
        static const char *const names[] = {"u8", "f32"};
        H3VideoVae m = {.config = {.has_decoder = true, .layers = 0, .latent_channels = 24, .hidden = 64, .ffn = 64, .head_dim = 64,
                .rope_freqs = 8}};
        H3VideoDecodePlan p = film_plan(&m, 1);
        float *raw = must_malloc(p.memory.chunk), *before = calloc(1, p.memory.tail), *after = must_malloc(p.memory.tail);
        void *frames = must_malloc(UINT64_C(17) * 16 * HEIGHT * 16 * WIDTH * 12);
        const float *tiles[28];

        must_be(before != NULL, "memory");
        for (uint64_t i = 0; i < p.memory.chunk / sizeof(float); i++)
                raw[i] = (float) (i % 4096) * 0x1p-11f - 1;
        for (unsigned i = 0; i < 28; i++)
                tiles[i] = raw + i * (p.memory.tile / sizeof(float));
        for (unsigned i = 0; i < 2; i++) {
                const H3VideoBlend b = {.chunk = 1, .tiles = tiles, .tail_before = before, .tail_after = after,
                        .pixels = i == 0 ? H3_PIXELS_U8 : H3_PIXELS_F32, .frames = frames};
                double took[10];

                for (unsigned k = 0; k < ELEMENTSOF(took); k++) {
                        double from = now();

                        must_be(h3_video_decode_blend(&p, &b, (H3Range){0, p.rows.length}) == 0, "blend");
                        took[k] = (now() - from) * 1000;
                }
                printf("blend of a chunk to %s, one thread of the host's: %.0f ms, of a film %.2f s beside the device's work\n", names[i],
                        median(took, ELEMENTSOF(took)), 14 * took[ELEMENTSOF(took) / 2] / 1000);
        }
        fflush(stdout);
        free(raw);
        free(before);
        free(after);
        free(frames);
}

/* ---- the conditioner ---- */

static H3Linear tower_linear(uint64_t rows, uint64_t cols, const char *name) {
        return (H3Linear){matrix(LK_BF16, rows, cols, name), vector(LK_BF16, rows, 0, 0.1f, name)};
}

static H3LayerNorm tower_norm(uint64_t n) {
        return (H3LayerNorm){vector(LK_BF16, n, 1, 0.1f, "norm"), vector(LK_BF16, n, 0, 0.1f, "norm")};
}

static H3TextModel text_model(LkType type) {
        static H3TextLayer layers[50];
        static H3VisionBlockWeights blocks[27];
        static uint16_t table[16 * 5120], positions[2304 * 1152];
        H3TextModel m = {.config = {.layers = 50, .hidden = 5120, .heads = 64, .kv_heads = 8, .head_dim = 128, .ffn = 25600, .vocab = 16,
                                 .sections = {24, 20, 20}, .tokens_max = 262144, .eps = 1e-6f, .theta = 5e6f,
                                 .vision = {.depth = 27, .hidden = 1152, .heads = 16, .head_dim = 72, .ffn = 4304, .merged = 4608,
                                 .patch = 1536,
                                         .grid = 48, .n_deepstack = 3, .deepstack = {8, 16, 24}, .eps = 1e-6f, .theta = 10000}},
                .layers = layers,
                .blocks = blocks,
                .patch = tower_linear(1152, 1536, "patch"),
                .positions = {positions, LK_BF16, 2304 * 1152},
                .embed = {.data = table, .type = LK_BF16, .rows = 16, .cols = 5120, .row_stride = 10240, .block_rows = 16,
                .block_stride = 163840},
                .merger = {tower_norm(1152), tower_linear(4608, 4608, "fc1"), tower_linear(5120, 4608, "fc2")}};

        layers[0] = (H3TextLayer){.norm1 = vector(LK_BF16, 5120, 1, 0.1f, "norm1"), .norm2 = vector(LK_BF16, 5120, 1, 0.1f, "norm2"),
                .q_norm = vector(LK_BF16, 128, 1, 0.1f, "q_norm"), .k_norm = vector(LK_BF16, 128, 1, 0.1f, "k_norm"),
                .q = matrix(type, 8192, 5120, "q"), .k = matrix(type, 1024, 5120, "k"), .v = matrix(type, 1024, 5120, "v"),
                .out = matrix(type, 5120, 8192, "out"), .gate = matrix(type, 25600, 5120, "gate"), .up = matrix(type, 25600, 5120, "up"),
                .down = matrix(type, 5120, 25600, "down")};
        blocks[0] = (H3VisionBlockWeights){tower_norm(1152), tower_norm(1152), tower_linear(3456, 1152, "qkv"),
                tower_linear(1152, 1152, "out"),
                tower_linear(4304, 1152, "fc1"), tower_linear(1152, 4304, "fc2")};
        for (unsigned i = 0; i < 50; i++)
                layers[i] = layers[0];
        for (unsigned i = 0; i < 27; i++)
                blocks[i] = blocks[0];
        for (unsigned i = 0; i < 3; i++)
                m.deepstack[i] = (H3Merger){tower_norm(4608), m.merger.fc1, m.merger.fc2};
        for (unsigned i = 0; i < ELEMENTSOF(table); i++)
                table[i] = counter_bf16(counter_normal(5, i));
        for (unsigned i = 0; i < ELEMENTSOF(positions); i++)
                positions[i] = counter_bf16(0.1f * counter_normal(6, i));
        return m;
}

/* With a picture of the canvas in front, or of words alone. */
static void encode(const H3TextModel *m, const char *what, const float *patches) {
        static int32_t ids[TOKENS], positions[3 * TOKENS];
        H3Range rows[1];
        const H3Plan plan = h3_text_plan(1, rows);
        const H3Rank rank = {.ops = lk_cuda_ops(), .context = gpu, .plan = &plan};
        const H3VisionInput vision = {.grid_height = HEIGHT, .grid_width = WIDTH, .first_token = 4, .patches = patches};
        const H3TextInput in = {.compute = H3_COMPUTE_BF16, .n = TOKENS, .ids = ids, .positions = positions, .vision = &vision,
                .n_vision = patches ? 1 : 0};
        uint16_t *hidden = must_malloc((uint64_t) TOKENS * 5120 * 2);
        double took[10], msec, work = 2.0 * 487.6e6 * 50 * TOKENS;
        Fault f = {};

        for (unsigned i = 0; i < TOKENS; i++) {
                ids[i] = (int32_t) (i % 16);
                for (unsigned k = 0; k < 3; k++)
                        positions[k * TOKENS + i] = (int32_t) i;
        }
        for (int i = -1; i < (int) ELEMENTSOF(took); i++) {
                double from = now();

                good(h3_text_run(&rank, m, &in, NULL, hidden, &f), "encode", &f);
                if (i >= 0)
                        took[i] = (now() - from) * 1000;
        }
        msec = median(took, ELEMENTSOF(took));
        for (uint64_t i = 0; i < (uint64_t) TOKENS * 5120; i++)
                must_be((hidden[i] & 0x7f80) != 0x7f80, "a hidden number is none");
        printf("conditioner, %s, %u tokens%s: %8.2f ms %5.0f TF, %.2f of the limit\n", what, TOKENS, patches ? ", a picture" : "", msec,
                work / msec / 1e9, msec / 1000 / PROMPT_LIMIT);
        fflush(stdout);
        free(hidden);
}

static void bench_conditioner(void) {
        float *patches = must_malloc((uint64_t) PATCHES * 1536 * sizeof(float));
        H3TextModel m = text_model(LK_BF16);

        for (uint64_t i = 0; i < (uint64_t) PATCHES * 1536; i++)
                patches[i] = (float) ((int32_t) (i % 256) - 127) / 127.5f;
        encode(&m, "bf16", NULL);
        encode(&m, "bf16", patches);
        m = text_model(LK_I8);
        encode(&m, "int8 as bf16", patches);
        m = text_model(LK_NVFP4);
        encode(&m, "nvfp4 as bf16", patches);
        free(patches);
}

int main(int argc, char **argv) {
        double from = now();

        device_open();
        must_be(lk_cuda_ops()->context_new(0, &gpu) == 0, "context");
        if (wanted(argc, argv, "decoder"))
                bench_decoder();
        if (wanted(argc, argv, "products"))
                bench_products();
        if (wanted(argc, argv, "parts"))
                bench_parts();
        if (wanted(argc, argv, "host"))
                bench_host();
        if (wanted(argc, argv, "conditioner"))
                bench_conditioner();
        lk_cuda_ops()->context_free(gpu);
        printf("%.1f s in all\n", now() - from);
        return 0;
}
