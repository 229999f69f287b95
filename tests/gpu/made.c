/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/made.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/shared/clock.h"
#include "tests/gpu/counter.h"

#define PIECE_BYTES (UINT64_C(8) << 20)
#define TENSORS_MAX 8192
#define SHARDS_MAX 200
#define THREADS_MAX 64
#define QUICK_NUMBERS 4096u

typedef struct Piece {
        const MadeTensor *tensor;
        uint64_t begin, bytes; /* of the tensor */
} Piece;

typedef struct Writing {
        MadeFiles *m;
        int shards[SHARDS_MAX];
        Piece *pieces;
        size_t n_pieces;
        atomic_size_t next; /* piece */
} Writing;

void made_die(const char *program, const char *format, ...) {
        va_list ap;

        va_start(ap, format);
        (void) fprintf(stderr, "%s: ", program);
        (void) vfprintf(stderr, format, ap);
        (void) fputc('\n', stderr);
        va_end(ap);
        exit(1);
}

/* ---- what is in it ---- */

MadeTensor *made_add(MadeFiles *m, StType type, uint32_t n_dims, const uint64_t *shape, const char *format, ...) {
        MadeTensor *t;
        va_list ap;

        if (!m->tensors)
                m->tensors = calloc(TENSORS_MAX, sizeof(*m->tensors));
        if (!m->tensors)
                made_die(m->program, "out of memory");
        if (m->n_tensors == TENSORS_MAX)
                made_die(m->program, "more than %d tensors", TENSORS_MAX);
        t = m->tensors + m->n_tensors++;
        va_start(ap, format);
        (void) vsnprintf(t->name, sizeof(t->name), format, ap);
        va_end(ap);
        t->type = type;
        t->n_dims = n_dims;
        t->bytes = st_type_size(type);
        for (uint32_t i = 0; i < n_dims; i++)
                t->bytes *= t->shape[i] = shape[i];
        t->seed = counter_seed(t->name);
        return t;
}

/* ---- numbers ---- */

static void fill_codes(const MadeTensor *t, uint64_t begin, uint64_t n, int8_t *out) {
        for (uint64_t i = 0; i < n; i++)
                out[i] = (int8_t) lrintf((float) counter_sum(t->seed, begin + i) * (127.0f / COUNTER_MEAN));
}

/* The most of a checkpoint: without a choice for each number. */
static void fill_bf16(const MadeTensor *t, uint64_t begin, uint64_t n, uint16_t *out) {
        for (uint64_t i = 0; i < n; i++)
                out[i] = counter_bf16(t->center + t->spread * counter_normal(t->seed, begin + i));
}

static void fill_f16(const MadeTensor *t, uint64_t begin, uint64_t n, uint16_t *out) {
        for (uint64_t i = 0; i < n; i++)
                out[i] = counter_f16(t->center + t->spread * counter_normal(t->seed, begin + i));
}

/* Four numbers of a hash; pieces begin at multiples of that. */
static void fill_quick(const MadeTensor *t, uint64_t begin, uint64_t n, void *out) {
        float table[QUICK_NUMBERS];
        uint16_t halves[QUICK_NUMBERS];

        for (unsigned i = 0; i < QUICK_NUMBERS; i++) {
                table[i] = t->center + t->spread * counter_normal(t->seed, i);
                halves[i] = counter_f16(table[i]);
        }
        for (uint64_t i = 0; i < n; i += 4) {
                uint64_t h = counter_hash(t->seed, (begin + i) / 4);

                for (unsigned k = 0; k < 4 && i + k < n; k++, h >>= 16)
                        if (t->type == ST_F32)
                                ((float *) out)[i + k] = table[h % QUICK_NUMBERS];
                        else
                                ((uint16_t *) out)[i + k] = halves[h % QUICK_NUMBERS];
        }
}

/* Pieces begin at multiples of 8 bytes. */
static void fill_bits(const MadeTensor *t, uint64_t begin, uint64_t n, uint8_t *out) {
        uint64_t mask = t->fill == MADE_SCALES ? 0x0f0f0f0f0f0f0f0f : UINT64_MAX, bits = t->fill == MADE_SCALES ? 0x3030303030303030 : 0;

        for (uint64_t i = 0; i < n; i += 8) {
                uint64_t h = (counter_hash(t->seed, (begin + i) / 8) & mask) | bits;

                memcpy(out + i, &h, n - i < 8 ? n - i : 8);
        }
}

static void fill_values(const MadeFiles *m, const MadeTensor *t, uint64_t begin, uint64_t n, void *out) {
        for (uint64_t i = 0; i < n; i++) {
                float v = t->fill == MADE_OWN ? m->value(m->userdata, t, begin + i)
                                              : t->center + t->spread * counter_normal(t->seed, begin + i);

                if (t->type == ST_F32)
                        ((float *) out)[i] = v;
                else
                        ((uint16_t *) out)[i] = t->type == ST_F16 ? counter_f16(v) : counter_bf16(v);
        }
}

static void fill(const MadeFiles *m, const Piece *p, void *out) {
        const MadeTensor *t = p->tensor;
        uint64_t size = st_type_size(t->type), begin = p->begin / size, n = p->bytes / size;

        if (t->fill == MADE_TEXT)
                memcpy(out, t->text + begin, n);
        else if (t->fill == MADE_CODES)
                fill_codes(t, begin, n, out);
        else if (t->fill == MADE_QUICK)
                fill_quick(t, begin, n, out);
        else if (t->fill == MADE_BITS || t->fill == MADE_SCALES)
                fill_bits(t, begin, n, out);
        else if (t->fill == MADE_NORMAL && t->type == ST_BF16)
                fill_bf16(t, begin, n, out);
        else if (t->fill == MADE_NORMAL && t->type == ST_F16)
                fill_f16(t, begin, n, out);
        else
                fill_values(m, t, begin, n, out);
}

/* ---- files ---- */

/* As the reference writer has it: wide elements first, then by name. */
static int compare_places(const void *a, const void *b) {
        const MadeTensor *x = a, *y = b;
        uint64_t i = st_type_size(x->type), j = st_type_size(y->type);

        if (x->shard != y->shard)
                return x->shard < y->shard ? -1 : 1;
        return i != j ? (i > j ? -1 : 1) : strcmp(x->name, y->name);
}

static void share_out(MadeFiles *m) {
        uint64_t bytes = 0;

        for (size_t i = 0; i < m->n_tensors; i++) {
                if (bytes > 0 && bytes + m->tensors[i].bytes > m->shard_bytes) {
                        bytes = 0;
                        m->n_shards++;
                }
                m->tensors[i].shard = m->n_shards;
                bytes += m->tensors[i].bytes;
                m->bytes += m->tensors[i].bytes;
        }
        if (++m->n_shards > SHARDS_MAX)
                made_die(m->program, "more than %d files", SHARDS_MAX);
        qsort(m->tensors, m->n_tensors, sizeof(*m->tensors), compare_places);
}

static int create(const MadeFiles *m, uint32_t shard) {
        char path[4096];
        int n, fd;

        if (m->n_shards == 1)
                n = snprintf(path, sizeof(path), "%s/%s.safetensors", m->directory, m->name);
        else
                n = snprintf(path, sizeof(path), "%s/%s-%05u-of-%05u.safetensors", m->directory, m->name, shard + 1, m->n_shards);
        if (n < 0 || (size_t) n >= sizeof(path))
                made_die(m->program, "%s: the path is too long", m->directory);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0)
                made_die(m->program, "%s cannot be made: %s", path, strerror(errno));
        return fd;
}

static void write_at(const MadeFiles *m, int fd, const void *data, uint64_t size, uint64_t offset) {
        const char *p = data;

        while (size > 0) {
                ssize_t n = pwrite(fd, p, size, (off_t) offset);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        made_die(m->program, "writing failed: %s", n < 0 ? strerror(errno) : "nothing was taken");
                p += n;
                offset += (uint64_t) n;
                size -= (uint64_t) n;
        }
}

static void print_tensor(FILE *f, const MadeTensor *t, uint64_t begin) {
        (void) fprintf(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, st_type_name(t->type));
        for (uint32_t i = 0; i < t->n_dims; i++)
                (void) fprintf(f, "%s%" PRIu64, i > 0 ? "," : "", t->shape[i]);
        (void) fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, begin + t->bytes);
}

/* The file with its header, in its final size, and the places of its tensors. */
static int begin_shard(const MadeFiles *m, uint32_t shard, MadeTensor *tensors, size_t n) {
        char *text = NULL;
        size_t size = 0;
        uint64_t end = 0, length;
        FILE *f = open_memstream(&text, &size);
        int fd;

        if (!f)
                made_die(m->program, "out of memory");
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
                made_die(m->program, "out of memory");
        length = size - 8;
        memcpy(text, &length, sizeof(length)); /* little endian, as x86-64 is */

        fd = create(m, shard);
        if (fallocate(fd, 0, 0, (off_t) (size + end)) < 0 && errno != EOPNOTSUPP)
                made_die(m->program, "%" PRIu64 " bytes in %s: %s", size + end, m->directory, strerror(errno));
        write_at(m, fd, text, size, 0);
        for (size_t i = 0; i < n; i++)
                tensors[i].offset += size;
        free(text);
        return fd;
}

static void begin_shards(Writing *w) {
        MadeTensor *all = w->m->tensors;

        for (size_t i = 0, n; i < w->m->n_tensors; i += n) {
                for (n = 1; i + n < w->m->n_tensors && all[i + n].shard == all[i].shard; n++)
                        ;
                w->shards[all[i].shard] = begin_shard(w->m, all[i].shard, all + i, n);
        }
}

static void cut(Writing *w) {
        size_t n = 0;

        for (size_t i = 0; i < w->m->n_tensors; i++)
                n += w->m->tensors[i].bytes / PIECE_BYTES + 1;
        w->pieces = calloc(n, sizeof(*w->pieces));
        if (!w->pieces)
                made_die(w->m->program, "out of memory");
        for (size_t i = 0; i < w->m->n_tensors; i++)
                for (uint64_t at = 0; at < w->m->tensors[i].bytes; at += PIECE_BYTES) {
                        uint64_t rest = w->m->tensors[i].bytes - at;

                        w->pieces[w->n_pieces++] = (Piece){w->m->tensors + i, at, rest < PIECE_BYTES ? rest : PIECE_BYTES};
                }
}

static void *writer(void *userdata) {
        Writing *w = userdata;
        void *buffer = aligned_alloc(4096, PIECE_BYTES);

        if (!buffer)
                made_die(w->m->program, "out of memory");
        for (size_t i; (i = atomic_fetch_add(&w->next, 1)) < w->n_pieces;) {
                const Piece *p = w->pieces + i;

                fill(w->m, p, buffer);
                write_at(w->m, w->shards[p->tensor->shard], buffer, p->bytes, p->tensor->offset + p->begin);
        }
        free(buffer);
        return NULL;
}

static void write_all(Writing *w) {
        pthread_t threads[THREADS_MAX];

        for (unsigned i = 0; i < w->m->n_threads; i++)
                if (pthread_create(threads + i, NULL, writer, w) != 0)
                        made_die(w->m->program, "a thread could not be started");
        for (unsigned i = 0; i < w->m->n_threads; i++)
                (void) pthread_join(threads[i], NULL);
        for (uint32_t i = 0; i < w->m->n_shards; i++)
                if (close(w->shards[i]) < 0)
                        made_die(w->m->program, "closing failed: %s", strerror(errno));
}

void made_write(MadeFiles *m) {
        Writing w = {.m = m};

        if (mkdir(m->directory, 0777) < 0 && errno != EEXIST)
                made_die(m->program, "%s cannot be made: %s", m->directory, strerror(errno));
        share_out(m);
        begin_shards(&w);
        cut(&w);
        write_all(&w);
        free(w.pieces);
        free(m->tensors);
        m->tensors = NULL;
}

void made_report(const MadeFiles *m, uint64_t begin_usec) {
        double seconds = (double) (clock_usec() - begin_usec) / 1e6;

        (void) printf("%zu tensors, %" PRIu64 " bytes in %u files, %.2f s, %.2f GB/s by %u threads\n", m->n_tensors, m->bytes, m->n_shards,
                seconds, (double) m->bytes / 1e9 / seconds, m->n_threads);
}

/* ---- arguments ---- */

uint64_t made_number(const char *program, const char *option, const char *s, uint64_t least, uint64_t most) {
        char *end;
        unsigned long long v;

        errno = 0;
        v = strtoull(s, &end, 10);
        if (errno != 0 || *end != '\0' || s[0] < '0' || s[0] > '9' || v < least || v > most)
                made_die(program, "--%s %s: expected a number from %" PRIu64 " to %" PRIu64, option, s, least, most);
        return v;
}

unsigned made_threads(void) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);

        return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : (unsigned) n;
}
