/* SPDX-License-Identifier: Apache-2.0 */

/* A denoiser checkpoint without the weights: the released sizes and ComfyUI's names, order and types of a pruned file, numbers from
 * counters (counter.h).
 *
 *     make-checkpoint DIR bf16|int8 [--hidden N] [--blocks N] [--flat] [--shard BYTES] [--threads N]
 *
 * Values stay healthy over all blocks and show mistakes: products keep their rows' size, what goes to the residual is scaled by
 * 1/sqrt(2 blocks), gates are 0.1 to 0.5 and differ by tag, scores have a deviation of 3 to 5, and in the last two blocks a few channels of
 * the keys are 20 times larger. --flat: scores of deviation 1, as a model of random weights has them, for timing beside such a one.
 * int8: the blocks' matrices as codes with a scale a row and a marker (rotated); a model of its own, not the bf16 one quantised.
 *
 * Files of at most BYTES (4 GiB) without an index: with one, these names would mean another order of the rows of q, k and v. */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/shared/clock.h"
#include "service/shared/fmath.h"
#include "service/shared/safetensors.h"
#include "tests/gpu/counter.h"

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

#define PIECE_BYTES (UINT64_C(8) << 20)
#define TENSORS_MAX 8192
#define SHARDS_MAX 200
#define THREADS_MAX 64
#define CODE_DEVIATION (127.0f * COUNTER_DEVIATION / COUNTER_MEAN)

typedef enum Fill {
        FILL_NORMAL,   /* center + spread * normal */
        FILL_OUTLIERS, /* the same, seven channels times factor */
        FILL_GATES,    /* biases of a block's modulation: shifts, scales and gates by tag */
        FILL_CURVE,
        FILL_FREQS,
        FILL_CODES,
        FILL_MARKER,
} Fill;

typedef struct Tensor {
        char name[80], marker[80];
        StType type;
        uint32_t n_dims;
        uint64_t shape[2];
        Fill fill;
        float center, spread, factor;
        uint64_t seed, bytes;
        uint32_t shard;
        uint64_t offset; /* in the file */
} Tensor;

typedef struct Piece {
        const Tensor *tensor;
        uint64_t begin, bytes; /* of the tensor */
} Piece;

typedef struct Checkpoint {
        const char *directory;
        bool is_int8, flat;
        uint64_t hidden, heads, ffn, inner, blocks;
        uint64_t shard_bytes;
        unsigned n_threads;
        Tensor *tensors;
        size_t n_tensors;
        uint32_t n_shards;
        int shards[SHARDS_MAX];
        Piece *pieces;
        size_t n_pieces;
        atomic_size_t next; /* piece */
} Checkpoint;

static void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void die(const char *format, ...) {
        va_list ap;

        va_start(ap, format);
        (void) fputs("make-checkpoint: ", stderr);
        (void) vfprintf(stderr, format, ap);
        (void) fputc('\n', stderr);
        va_end(ap);
        exit(1);
}

/* ---- what is in it ---- */

static Tensor *add(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, const char *format, ...)
        __attribute__((format(printf, 5, 6)));

/* cols 0: a vector. */
static Tensor *add(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, const char *format, ...) {
        Tensor *t = c->tensors + c->n_tensors++;
        va_list ap;

        if (c->n_tensors > TENSORS_MAX)
                die("more than %d tensors", TENSORS_MAX);
        va_start(ap, format);
        (void) vsnprintf(t->name, sizeof(t->name), format, ap);
        va_end(ap);
        t->type = type;
        t->n_dims = cols > 0 ? 2 : 1;
        t->shape[0] = rows;
        t->shape[1] = cols;
        t->bytes = st_type_size(type) * rows * (cols > 0 ? cols : 1);
        t->seed = counter_seed(t->name);
        return t;
}

static void add_normal(Checkpoint *c, StType type, uint64_t rows, uint64_t cols, float center, float spread, const char *name) {
        Tensor *t = add(c, type, rows, cols, "%s", name);

        t->center = center;
        t->spread = spread;
}

static float root(uint64_t n) {
        return 1.0f / sqrtf((float) n);
}

/* A matrix of a block. */
static void add_matrix(Checkpoint *c, bool quantised, uint64_t rows, uint64_t cols, float spread, const char *prefix, const char *name) {
        Tensor *t = add(c, quantised ? ST_I8 : ST_BF16, rows, cols, "%s%s.weight", prefix, name);
        unsigned group = 256;

        t->spread = spread;
        if (!quantised)
                return;
        t->fill = FILL_CODES;

        t = add(c, ST_F32, rows, 1, "%s%s.weight_scale", prefix, name);
        t->center = spread / CODE_DEVIATION;
        t->spread = t->center / 10;

        while (cols % group != 0)
                group /= 4;
        t = add(c, ST_U8, 0, 0, "%s%s.comfy_quant", prefix, name);
        t->fill = FILL_MARKER;
        (void) snprintf(t->marker, sizeof(t->marker), "{\"format\":\"int8_tensorwise\",\"convrot\":true,\"convrot_groupsize\":%u}", group);
        t->shape[0] = t->bytes = strlen(t->marker);
}

static void add_head_norm(Checkpoint *c, float gain, bool outliers, float factor, const char *prefix, const char *name) {
        Tensor *t = add(c, ST_BF16, HEAD_DIM, 0, "%sattn.%s.weight", prefix, name);

        t->center = gain;
        t->spread = gain / 20;
        t->fill = outliers ? FILL_OUTLIERS : FILL_NORMAL;
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

static void add_modulation(Checkpoint *c, const char *prefix, uint64_t rows, Fill fill) {
        Tensor *t = add(c, ST_F16, rows, CURVE_RANK, "%sadaln_proj.linear.weight", prefix);

        t->spread = 0.02f;
        t = add(c, ST_F16, rows, 0, "%sadaln_proj.linear.bias", prefix);
        t->spread = 0.1f;
        t->fill = fill;
}

static void add_all(Checkpoint *c) {
        char prefix[40];

        c->tensors = calloc(TENSORS_MAX + 1, sizeof(*c->tensors));
        if (!c->tensors)
                die("out of memory");
        add_normal(c, ST_F32, c->hidden, VIDEO_ROW, 0, root(VIDEO_ROW), "video_patch_proj.weight");
        add_normal(c, ST_F32, c->hidden, 0, 0, 0.05f, "video_patch_proj.bias");
        add_normal(c, ST_F32, c->hidden, AUDIO_ROW, 0, root(AUDIO_ROW), "audio_patch_proj.weight");
        add_normal(c, ST_F32, c->hidden, 0, 0, 0.05f, "audio_patch_proj.bias");
        add_normal(c, ST_BF16, c->hidden, TEXT_DIM, 0, root(TEXT_DIM), "condition_proj.weight");
        add_normal(c, ST_BF16, c->hidden, 0, 0, 0.05f, "condition_proj.bias");
        add(c, ST_F32, FREQS, 0, "rope.inv_freq")->fill = FILL_FREQS;
        add(c, ST_F32, CURVE_POINTS, CURVE_RANK, "adaln_t_table")->fill = FILL_CURVE;
        for (uint64_t i = 0; i < REFINER_BLOCKS; i++) {
                (void) snprintf(prefix, sizeof(prefix), "token_refiner.blocks.%" PRIu64 ".", i);
                add_block(c, prefix, true, i, root(2 * REFINER_BLOCKS));
        }
        add_normal(c, ST_BF16, c->hidden, 0, 1, 0.05f, "token_refiner.final_norm.weight");
        for (uint64_t i = 0; i < c->blocks; i++) {
                (void) snprintf(prefix, sizeof(prefix), "blocks.%" PRIu64 ".", i);
                add_block(c, prefix, false, i, root(2 * c->blocks));
                add_modulation(c, prefix, TAGS * CHUNKS * c->hidden, FILL_GATES);
        }
        add_normal(c, ST_BF16, c->hidden, 0, 1, 0.05f, "final_layer.norm.weight");
        add_modulation(c, "final_layer.", 2 * c->hidden, FILL_NORMAL);
        add_normal(c, ST_F32, VIDEO_ROW, c->hidden, 0, root(c->hidden), "final_layer.video_out.weight");
        add_normal(c, ST_F32, VIDEO_ROW, 0, 0, 0.05f, "final_layer.video_out.bias");
        add_normal(c, ST_F32, AUDIO_ROW, c->hidden, 0, root(c->hidden), "final_layer.audio_out.weight");
        add_normal(c, ST_F32, AUDIO_ROW, 0, 0, 0.05f, "final_layer.audio_out.bias");
}

/* ---- numbers ---- */

static float gate_value(const Checkpoint *c, const Tensor *t, uint64_t i) {
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

static float value_of(const Checkpoint *c, const Tensor *t, uint64_t i) {
        float v = t->center + t->spread * counter_normal(t->seed, i);

        switch (t->fill) {
        case FILL_OUTLIERS: /* beyond the channels that turn by position, which would mix them with others */
                return i >= 96 && i % 5 == 2 ? v * t->factor : v;
        case FILL_GATES:
                return gate_value(c, t, i);
        case FILL_CURVE:
                return curve_value(i);
        case FILL_FREQS:
                return 1.0f / (float) fmath_exp(LN_THETA * (double) i / FREQS);
        default:
                return v;
        }
}

static void fill_codes(const Tensor *t, uint64_t begin, uint64_t n, int8_t *out) {
        for (uint64_t i = 0; i < n; i++)
                out[i] = (int8_t) lrintf((float) counter_sum(t->seed, begin + i) * (127.0f / COUNTER_MEAN));
}

/* The most of a checkpoint: without a choice for each number. */
static void fill_bf16(const Tensor *t, uint64_t begin, uint64_t n, uint16_t *out) {
        for (uint64_t i = 0; i < n; i++)
                out[i] = counter_bf16(t->center + t->spread * counter_normal(t->seed, begin + i));
}

static void fill_values(const Checkpoint *c, const Tensor *t, uint64_t begin, uint64_t n, void *out) {
        for (uint64_t i = 0; i < n; i++) {
                float v = value_of(c, t, begin + i);

                if (t->type == ST_F32)
                        ((float *) out)[i] = v;
                else
                        ((uint16_t *) out)[i] = t->type == ST_F16 ? counter_f16(v) : counter_bf16(v);
        }
}

static void fill(const Checkpoint *c, const Piece *p, void *out) {
        const Tensor *t = p->tensor;
        uint64_t size = st_type_size(t->type), begin = p->begin / size, n = p->bytes / size;

        if (t->fill == FILL_MARKER)
                memcpy(out, t->marker + begin, n);
        else if (t->fill == FILL_CODES)
                fill_codes(t, begin, n, out);
        else if (t->fill == FILL_NORMAL && t->type == ST_BF16)
                fill_bf16(t, begin, n, out);
        else
                fill_values(c, t, begin, n, out);
}

/* ---- files ---- */

/* As the reference writer has it: wide elements first, then by name. */
static int compare_places(const void *a, const void *b) {
        const Tensor *x = a, *y = b;
        uint64_t i = st_type_size(x->type), j = st_type_size(y->type);

        if (x->shard != y->shard)
                return x->shard < y->shard ? -1 : 1;
        return i != j ? (i > j ? -1 : 1) : strcmp(x->name, y->name);
}

static void share_out(Checkpoint *c) {
        uint64_t bytes = 0;

        for (size_t i = 0; i < c->n_tensors; i++) {
                if (bytes > 0 && bytes + c->tensors[i].bytes > c->shard_bytes) {
                        bytes = 0;
                        c->n_shards++;
                }
                c->tensors[i].shard = c->n_shards;
                bytes += c->tensors[i].bytes;
        }
        if (++c->n_shards > SHARDS_MAX)
                die("more than %d files", SHARDS_MAX);
        qsort(c->tensors, c->n_tensors, sizeof(*c->tensors), compare_places);
}

static int create(const Checkpoint *c, uint32_t shard) {
        const char *kind = c->is_int8 ? "int8_convrot" : "bf16";
        char path[4096];
        int n, fd;

        if (c->n_shards == 1)
                n = snprintf(path, sizeof(path), "%s/minimax_h3_fl2va_pruned_%s.safetensors", c->directory, kind);
        else
                n = snprintf(path, sizeof(path), "%s/minimax_h3_fl2va_pruned_%s-%05u-of-%05u.safetensors", c->directory, kind,
                        shard + 1, c->n_shards);
        if (n < 0 || (size_t) n >= sizeof(path))
                die("%s: the path is too long", c->directory);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0)
                die("%s cannot be made: %s", path, strerror(errno));
        return fd;
}

static void write_at(int fd, const void *data, uint64_t size, uint64_t offset) {
        const char *p = data;

        while (size > 0) {
                ssize_t n = pwrite(fd, p, size, (off_t) offset);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        die("writing failed: %s", n < 0 ? strerror(errno) : "nothing was taken");
                p += n;
                offset += (uint64_t) n;
                size -= (uint64_t) n;
        }
}

static void print_tensor(FILE *f, const Tensor *t, uint64_t begin) {
        (void) fprintf(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRIu64, t->name, st_type_name(t->type), t->shape[0]);
        if (t->n_dims > 1)
                (void) fprintf(f, ",%" PRIu64, t->shape[1]);
        (void) fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, begin + t->bytes);
}

/* The file with its header, in its final size, and the places of its tensors. */
static void begin_shard(Checkpoint *c, uint32_t shard, Tensor *tensors, size_t n) {
        char *text = NULL;
        size_t size = 0;
        uint64_t end = 0, length;
        FILE *f = open_memstream(&text, &size);

        if (!f)
                die("out of memory");
        (void) fwrite("\0\0\0\0\0\0\0\0{", 9, 1, f);
        for (size_t i = 0; i < n; i++) {
                if (i > 0)
                        (void) fputc(',', f);
                print_tensor(f, tensors + i, end);
                tensors[i].offset = end;
                end += tensors[i].bytes;
        }
        (void) fputc('}', f);
        while (ftell(f) % 8 != 0)
                (void) fputc(' ', f);
        if (fclose(f) != 0)
                die("out of memory");
        length = size - 8;
        memcpy(text, &length, sizeof(length)); /* little endian, as x86-64 is */

        c->shards[shard] = create(c, shard);
        if (fallocate(c->shards[shard], 0, 0, (off_t) (size + end)) < 0 && errno != EOPNOTSUPP)
                die("%" PRIu64 " bytes in %s: %s", size + end, c->directory, strerror(errno));
        write_at(c->shards[shard], text, size, 0);
        for (size_t i = 0; i < n; i++)
                tensors[i].offset += size;
        free(text);
}

static void begin_shards(Checkpoint *c) {
        for (size_t i = 0, n; i < c->n_tensors; i += n) {
                for (n = 1; i + n < c->n_tensors && c->tensors[i + n].shard == c->tensors[i].shard; n++)
                        ;
                begin_shard(c, c->tensors[i].shard, c->tensors + i, n);
        }
}

static void cut(Checkpoint *c) {
        size_t n = 0;

        for (size_t i = 0; i < c->n_tensors; i++)
                n += c->tensors[i].bytes / PIECE_BYTES + 1;
        c->pieces = calloc(n, sizeof(*c->pieces));
        if (!c->pieces)
                die("out of memory");
        for (size_t i = 0; i < c->n_tensors; i++)
                for (uint64_t at = 0; at < c->tensors[i].bytes; at += PIECE_BYTES) {
                        uint64_t rest = c->tensors[i].bytes - at;

                        c->pieces[c->n_pieces++] = (Piece){c->tensors + i, at, rest < PIECE_BYTES ? rest : PIECE_BYTES};
                }
}

static void *writer(void *userdata) {
        Checkpoint *c = userdata;
        void *buffer = aligned_alloc(4096, PIECE_BYTES);

        if (!buffer)
                die("out of memory");
        for (size_t i; (i = atomic_fetch_add(&c->next, 1)) < c->n_pieces;) {
                const Piece *p = c->pieces + i;

                fill(c, p, buffer);
                write_at(c->shards[p->tensor->shard], buffer, p->bytes, p->tensor->offset + p->begin);
        }
        free(buffer);
        return NULL;
}

static void write_all(Checkpoint *c) {
        pthread_t threads[THREADS_MAX];

        for (unsigned i = 0; i < c->n_threads; i++)
                if (pthread_create(threads + i, NULL, writer, c) != 0)
                        die("a thread could not be started");
        for (unsigned i = 0; i < c->n_threads; i++)
                (void) pthread_join(threads[i], NULL);
        for (uint32_t i = 0; i < c->n_shards; i++)
                if (close(c->shards[i]) < 0)
                        die("closing failed: %s", strerror(errno));
}

/* ---- arguments ---- */

static uint64_t number(const char *option, const char *s, uint64_t least, uint64_t most) {
        char *end;
        unsigned long long v;

        errno = 0;
        v = strtoull(s, &end, 10);
        if (errno != 0 || *end != '\0' || s[0] < '0' || s[0] > '9' || v < least || v > most)
                die("--%s %s: expected a number from %" PRIu64 " to %" PRIu64, option, s, least, most);
        return v;
}

static void usage(void) {
        (void) fprintf(stderr, "usage: make-checkpoint DIR bf16|int8 [--hidden N] [--blocks N] [--flat] [--shard BYTES] [--threads N]\n");
        exit(2);
}

static void parse(Checkpoint *c, int argc, char *argv[]) {
        static const struct option options[] = {{"hidden", required_argument, NULL, 'h'}, {"blocks", required_argument, NULL, 'b'},
                {"flat", no_argument, NULL, 'f'}, {"shard", required_argument, NULL, 's'}, {"threads", required_argument, NULL, 't'}, {}};
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        int o, index;

        *c = (Checkpoint){.hidden = 5376, .blocks = 50, .shard_bytes = UINT64_C(4) << 30,
                .n_threads = n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : (unsigned) n};
        while ((o = getopt_long(argc, argv, "", options, &index)) != -1)
                switch (o) {
                case 'h':
                        c->hidden = number("hidden", optarg, 64, 16384);
                        if (c->hidden % 64 != 0)
                                die("--hidden %s: expected a multiple of 64", optarg);
                        break;
                case 'b':
                        c->blocks = number("blocks", optarg, 1, 400);
                        break;
                case 'f':
                        c->flat = true;
                        break;
                case 's':
                        c->shard_bytes = number("shard", optarg, 1, INT64_MAX);
                        break;
                case 't':
                        c->n_threads = (unsigned) number("threads", optarg, 1, THREADS_MAX);
                        break;
                default:
                        usage();
                }
        if (argc - optind != 2 || (strcmp(argv[optind + 1], "bf16") != 0 && strcmp(argv[optind + 1], "int8") != 0))
                usage();
        c->directory = argv[optind];
        c->is_int8 = strcmp(argv[optind + 1], "int8") == 0;
        c->heads = c->hidden < 96 ? 1 : c->hidden / 96; /* the released proportions: 56 heads, 14336 */
        c->inner = c->heads * HEAD_DIM;
        c->ffn = c->hidden * 8 / 3 / 64 * 64;
}

int main(int argc, char *argv[]) {
        uint64_t begin = clock_usec(), bytes = 0;
        double seconds;
        Checkpoint c;

        parse(&c, argc, argv);
        if (mkdir(c.directory, 0777) < 0 && errno != EEXIST)
                die("%s cannot be made: %s", c.directory, strerror(errno));
        add_all(&c);
        share_out(&c);
        begin_shards(&c);
        cut(&c);
        write_all(&c);

        for (size_t i = 0; i < c.n_tensors; i++)
                bytes += c.tensors[i].bytes;
        seconds = (double) (clock_usec() - begin) / 1e6;
        (void) printf("%zu tensors, %" PRIu64 " bytes in %u files, %.2f s, %.2f GB/s by %u threads\n", c.n_tensors, bytes, c.n_shards,
                seconds, (double) bytes / 1e9 / seconds, c.n_threads);
        free(c.tensors);
        free(c.pieces);
        return 0;
}
