/* SPDX-License-Identifier: Apache-2.0 */

/* A denoiser checkpoint without the weights: the released sizes and ComfyUI's names, order and types of a pruned file, numbers from
 * counters (counter.h).
 *
 *     make-checkpoint DIR bf16|int8 [--hidden N] [--blocks N] [--text-dim N] [--flat] [--shard BYTES] [--threads N]
 *
 * Values stay healthy over all blocks and show mistakes: products keep their rows' size, what goes to the residual is scaled by
 * 1/sqrt(2 blocks), gates are 0.1 to 0.5 and differ by tag, scores have a deviation of 3 to 5, and in the last two blocks a few channels of
 * the keys are 20 times larger. --flat: scores of deviation 1, as a model of random weights has them, for timing beside such a one.
 * int8: the blocks' matrices as codes with a scale a row and a marker (rotated); a model of its own, not the bf16 one quantised.
 *
 * Files of at most BYTES (4 GiB) without an index: with one, these names would mean another order of the rows of q, k and v. */

#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/clock.h"
#include "service/shared/fmath.h"
#include "tests/gpu/counter.h"
#include "tests/gpu/made.h"

#define PROGRAM "make-checkpoint"
#define HEAD_DIM 128
#define TEXT_DIM 5120
#define VIDEO_ROW 96
#define AUDIO_ROW 32
#define REFINER_BLOCKS 2
#define CURVE_POINTS 1025
#define CURVE_RANK 8
#define FREQS 16
#define LN_THETA 9.210340371976184
#define TAGS 3 /* video, text, audio */
#define CHUNKS 6

typedef enum Own {
        OWN_OUTLIERS, /* center + spread * normal, seven channels times factor */
        OWN_GATES,    /* biases of a block's modulation: shifts, scales and gates by tag */
        OWN_CURVE,
        OWN_FREQS,
} Own;

typedef struct Checkpoint {
        bool is_int8, flat;
        uint64_t hidden, heads, ffn, inner, blocks, text_dim;
        MadeFiles files;
} Checkpoint;

/* ---- what is in it ---- */

/* cols 0: a vector. */
static MadeTensor *add(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, const char *prefix, const char *name) {
        return made_add(&c->files, type, cols > 0 ? 2 : 1, (uint64_t[]){rows, cols}, "%s%s", prefix, name);
}

static void add_own(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, Own own, const char *name) {
        MadeTensor *t = add(c, type, rows, cols, "", name);

        t->fill = MADE_OWN;
        t->own = own;
}

static void add_normal(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, float center, float spread, const char *name) {
        MadeTensor *t = add(c, type, rows, cols, "", name);

        t->center = center;
        t->spread = spread;
}

static float root(uint64_t n) {
        return 1.0f / sqrtf((float) n);
}

/* A matrix of a block. */
static void add_matrix(Checkpoint *c, bool quantised, uint64_t rows, uint64_t cols, float spread, const char *prefix, const char *name) {
        MadeTensor *t = made_add(&c->files, quantised ? ST_I8 : ST_BF16, 2, (uint64_t[]){rows, cols}, "%s%s.weight", prefix, name);
        char marker[sizeof(t->text)];
        unsigned group = 256;

        t->spread = spread;
        if (!quantised)
                return;
        t->fill = MADE_CODES;

        t = made_add(&c->files, ST_F32, 2, (uint64_t[]){rows, 1}, "%s%s.weight_scale", prefix, name);
        t->center = spread / MADE_CODE_DEVIATION;
        t->spread = t->center / 10;

        while (cols % group != 0)
                group /= 4;
        (void) snprintf(marker, sizeof(marker), "{\"format\":\"int8_tensorwise\",\"convrot\":true,\"convrot_groupsize\":%u}", group);
        t = made_add(&c->files, ST_U8, 1, (uint64_t[]){strlen(marker)}, "%s%s.comfy_quant", prefix, name);
        t->fill = MADE_TEXT;
        memcpy(t->text, marker, sizeof(marker));
}

static void add_head_norm(Checkpoint *c, float gain, bool outliers, float factor, const char *prefix, const char *name) {
        MadeTensor *t = made_add(&c->files, ST_BF16, 1, (uint64_t[]){HEAD_DIM}, "%sattn.%s.weight", prefix, name);

        t->center = gain;
        t->spread = gain / 20;
        t->fill = outliers ? MADE_OWN : MADE_NORMAL;
        t->own = OWN_OUTLIERS;
        t->factor = factor;
}

/* branch: what goes to the residual is this much smaller. */
static void add_block(Checkpoint *c, const char *prefix, bool refiner, uint64_t i, float branch) {
        bool quantised = c->is_int8 && !refiner, outliers = !refiner && !c->flat && i + 2 >= c->blocks;
        float gain = refiner || c->flat ? 1 : 3 + (c->blocks > 1 ? 2 * (float) i / (float) (c->blocks - 1) : 0);
        char name[80];

        for (unsigned n = 1; n <= 2; n++) {
                (void) snprintf(name, sizeof(name), "%snorm%u.weight", prefix, n);
                add_normal(c, ST_BF16, c->hidden, 0, 1, 0.05f, name);
        }
        add_matrix(c, quantised, 3 * c->inner, c->hidden, root(c->hidden), prefix, "attn.qkv_proj");
        add_head_norm(c, gain, outliers, 1.0f / 20, prefix, "q_norm"); /* so that the scores stay as they are */
        add_head_norm(c, 1, outliers, 20, prefix, "k_norm");
        add_matrix(c, quantised, c->hidden, c->inner, branch * root(c->inner), prefix, "attn.out_proj");
        add_matrix(c, quantised, 2 * c->ffn, c->hidden, root(c->hidden), prefix, "mlp.fc1");
        add_matrix(c, quantised, c->hidden, c->ffn, branch * root(c->ffn), prefix, "mlp.fc2");
}

static void add_modulation(Checkpoint *c, const char *prefix, uint64_t rows, bool gates) {
        MadeTensor *t = add(c, ST_F16, rows, CURVE_RANK, prefix, "adaln_proj.linear.weight");

        t->spread = 0.02f;
        t = add(c, ST_F16, rows, 0, prefix, "adaln_proj.linear.bias");
        t->spread = 0.1f;
        t->fill = gates ? MADE_OWN : MADE_NORMAL;
        t->own = OWN_GATES;
}

static void add_all(Checkpoint *c) {
        char prefix[40];

        add_normal(c, ST_F32, c->hidden, VIDEO_ROW, 0, root(VIDEO_ROW), "video_patch_proj.weight");
        add_normal(c, ST_F32, c->hidden, 0, 0, 0.05f, "video_patch_proj.bias");
        add_normal(c, ST_F32, c->hidden, AUDIO_ROW, 0, root(AUDIO_ROW), "audio_patch_proj.weight");
        add_normal(c, ST_F32, c->hidden, 0, 0, 0.05f, "audio_patch_proj.bias");
        add_normal(c, ST_BF16, c->hidden, c->text_dim, 0, root(c->text_dim), "condition_proj.weight");
        add_normal(c, ST_BF16, c->hidden, 0, 0, 0.05f, "condition_proj.bias");
        add_own(c, ST_F32, FREQS, 0, OWN_FREQS, "rope.inv_freq");
        add_own(c, ST_F32, CURVE_POINTS, CURVE_RANK, OWN_CURVE, "adaln_t_table");
        for (uint64_t i = 0; i < REFINER_BLOCKS; i++) {
                (void) snprintf(prefix, sizeof(prefix), "token_refiner.blocks.%" PRIu64 ".", i);
                add_block(c, prefix, true, i, root(2 * REFINER_BLOCKS));
        }
        add_normal(c, ST_BF16, c->hidden, 0, 1, 0.05f, "token_refiner.final_norm.weight");
        for (uint64_t i = 0; i < c->blocks; i++) {
                (void) snprintf(prefix, sizeof(prefix), "blocks.%" PRIu64 ".", i);
                add_block(c, prefix, false, i, root(2 * c->blocks));
                add_modulation(c, prefix, TAGS * CHUNKS * c->hidden, true);
        }
        add_normal(c, ST_BF16, c->hidden, 0, 1, 0.05f, "final_layer.norm.weight");
        add_modulation(c, "final_layer.", 2 * c->hidden, false);
        add_normal(c, ST_F32, VIDEO_ROW, c->hidden, 0, root(c->hidden), "final_layer.video_out.weight");
        add_normal(c, ST_F32, VIDEO_ROW, 0, 0, 0.05f, "final_layer.video_out.bias");
        add_normal(c, ST_F32, AUDIO_ROW, c->hidden, 0, root(c->hidden), "final_layer.audio_out.weight");
        add_normal(c, ST_F32, AUDIO_ROW, 0, 0, 0.05f, "final_layer.audio_out.bias");
}

/* ---- numbers ---- */

static float gate_value(const Checkpoint *c, const MadeTensor *t, uint64_t i) {
        static const float centers[][TAGS] = {{0, 0.2f, -0.2f}, {0.1f, -0.1f, 0}, {0.3f, 0.15f, 0.4f}}; /* shift, scale, gate */
        uint64_t chunk = i / c->hidden % CHUNKS, tag = i / (CHUNKS * c->hidden);
        float center = centers[chunk % 3][tag];

        return center + (chunk % 3 == 2 ? 0.05f * center : t->spread) * counter_normal(t->seed, i);
}

/* Chebyshev's polynomials over the points: smooth and all different. */
static float curve_value(uint64_t i) {
        double x = 2.0 * (double) (i / CURVE_RANK) / (CURVE_POINTS - 1) - 1, before = 1, value = x;

        if (i % CURVE_RANK == 0)
                return 1;
        for (uint64_t k = 1; k < i % CURVE_RANK; k++) {
                double next = 2 * x * value - before;

                before = value;
                value = next;
        }
        return (float) value;
}

static float value_of(const void *userdata, const MadeTensor *t, uint64_t i) {
        const Checkpoint *c = userdata;
        float v = t->center + t->spread * counter_normal(t->seed, i);

        switch ((Own) t->own) {
        case OWN_OUTLIERS: /* beyond the channels that turn by position, which would mix them with others */
                return i >= 96 && i % 5 == 2 ? v * t->factor : v;
        case OWN_GATES:
                return gate_value(c, t, i);
        case OWN_CURVE:
                return curve_value(i);
        default:
                return 1.0f / (float) fmath_exp(LN_THETA * (double) i / FREQS);
        }
}

/* ---- arguments ---- */

static void usage(void) {
        (void) fprintf(stderr, "usage: make-checkpoint DIR bf16|int8 [--hidden N] [--blocks N] [--text-dim N] [--flat] [--shard BYTES] "
                               "[--threads N]\n");
        exit(2);
}

static void parse(Checkpoint *c, int argc, char *argv[]) {
        static const struct option options[] = {{"hidden", required_argument, NULL, 'h'}, {"blocks", required_argument, NULL, 'b'},
                {"text-dim", required_argument, NULL, 'd'}, {"flat", no_argument, NULL, 'f'}, {"shard", required_argument, NULL, 's'},
                {"threads", required_argument, NULL, 't'}, {}};
        int o, index;

        *c = (Checkpoint){.hidden = 5376, .blocks = 50, .text_dim = TEXT_DIM,
                .files = {.program = PROGRAM, .shard_bytes = UINT64_C(4) << 30, .n_threads = made_threads(), .value = value_of,
                        .userdata = c}};
        while ((o = getopt_long(argc, argv, "", options, &index)) != -1)
                switch (o) {
                case 'h':
                        c->hidden = made_number(PROGRAM, "hidden", optarg, 64, 16384);
                        if (c->hidden % 64 != 0)
                                made_die(PROGRAM, "--hidden %s: expected a multiple of 64", optarg);
                        break;
                case 'b':
                        c->blocks = made_number(PROGRAM, "blocks", optarg, 1, 400);
                        break;
                case 'd':
                        c->text_dim = made_number(PROGRAM, "text-dim", optarg, 8, 65536);
                        break;
                case 'f':
                        c->flat = true;
                        break;
                case 's':
                        c->files.shard_bytes = made_number(PROGRAM, "shard", optarg, 1, INT64_MAX);
                        break;
                case 't':
                        c->files.n_threads = (unsigned) made_number(PROGRAM, "threads", optarg, 1, 64);
                        break;
                default:
                        usage();
                }
        if (argc - optind != 2 || (strcmp(argv[optind + 1], "bf16") != 0 && strcmp(argv[optind + 1], "int8") != 0))
                usage();
        c->is_int8 = strcmp(argv[optind + 1], "int8") == 0;
        c->files.directory = argv[optind];
        c->files.name = c->is_int8 ? "minimax_h3_fl2va_pruned_int8_convrot" : "minimax_h3_fl2va_pruned_bf16";
        c->heads = c->hidden < 96 ? 1 : c->hidden / 96; /* the released proportions: 56 heads, 14336 */
        c->inner = c->heads * HEAD_DIM;
        c->ffn = c->hidden * 8 / 3 / 64 * 64;
}

int main(int argc, char *argv[]) {
        uint64_t begin = clock_usec();
        Checkpoint c;

        parse(&c, argc, argv);
        add_all(&c);
        made_write(&c.files);
        made_report(&c.files, begin);
        return 0;
}
