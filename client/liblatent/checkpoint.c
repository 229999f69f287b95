/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "service/shared/suffix.h"
#include "service/shared/utf8.h"

#define SUFFIX ".safetensors"
#define INDEX_SUFFIX ".safetensors.index.json"

DEFINE_CLEANUP(DIR *, closedir)
DEFINE_CLEANUP(StIndex *, st_index_free)

void checkpoint_done(Checkpoint *c) {
        for (size_t i = 0; i < c->n_files; i++) {
                free(c->files[i].name);
                (void) close(c->files[i].fd);
        }
        free(c->files);
        free(c->name);
        *c = (Checkpoint){};
}

/* A failed open() or opendir() in words. */
static int fault_open(Fault *f, int r, const char *name) {
        switch (r) {
        case -ENOENT:
        case -ENOTDIR:
                return fault_set(f, -ENOENT, FAULT_NOT_FOUND, "%s does not exist.", name);
        case -EACCES:
        case -EPERM:
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "%s may not be read by this user.", name);
        default:
                return fault_set(f, r == -ENOMEM ? r : -EIO, r == -ENOMEM ? FAULT_INTERNAL : FAULT_IO,
                        "%s cannot be opened: %s.", name, strerror(-r));
        }
}

/* Opens a regular file without hanging on a FIFO. */
static int open_regular(int directory, const char *name, int *ret_fd, Fault *f) {
        CLEANUP_CLOSE int fd = -EBADF;
        struct stat st;

        fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (fd < 0)
                return fault_open(f, -errno, name);
        if (fstat(fd, &st) < 0)
                return fault_open(f, -errno, name);
        if (!S_ISREG(st.st_mode))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s is not a regular file; expected one with tensors.", name);

        *ret_fd = STEAL_FD(fd);
        return 0;
}

/* Takes fd over in any case. */
static int checkpoint_add(Checkpoint *c, const char *name, int fd, Fault *f) {
        CLEANUP_CLOSE int owned = fd;
        CheckpointFile *file;

        if (c->n_files >= CHECKPOINT_FILES_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "The checkpoint has more than %u files.",
                        CHECKPOINT_FILES_MAX);

        if (c->n_files == c->n_allocated) {
                size_t n = c->n_allocated > 0 ? 2 * c->n_allocated : 8;
                CheckpointFile *p = reallocarray(c->files, n, sizeof(*p));

                if (!p)
                        return fault_set(f, -ENOMEM, FAULT_INTERNAL, "Out of memory.");
                c->files = p;
                c->n_allocated = n;
        }

        file = &c->files[c->n_files];
        file->name = utf8_escape(name); /* names travel as text */
        if (!file->name)
                return fault_set(f, -ENOMEM, FAULT_INTERNAL, "Out of memory.");
        file->fd = STEAL_FD(owned);
        c->n_files++;
        return 0;
}

static int checkpoint_add_at(Checkpoint *c, int directory, const char *name, Fault *f) {
        int r, fd = -EBADF;

        r = open_regular(directory, name, &fd, f);
        if (r < 0)
                return r;

        return checkpoint_add(c, name, fd, f);
}

/* Beside a directory "transformer". The shifts of the schedules are the denoiser's business; both files have the same name
 * where they lie. */
static int checkpoint_add_schedulers(Checkpoint *c, int transformer, Fault *f) {
        static const char *const files[][2] = {
                {"../scheduler/scheduler_config.json", "scheduler_config.json"},
                {"../audio_scheduler/scheduler_config.json", "audio_scheduler_config.json"},
        };
        int r, fd = -EBADF;

        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                if (faccessat(transformer, files[i][0], F_OK, 0) < 0 && (errno == ENOENT || errno == ENOTDIR))
                        continue;
                r = open_regular(transformer, files[i][0], &fd, f);
                if (r >= 0)
                        r = checkpoint_add(c, files[i][1], fd, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int compare_files(const void *a, const void *b) {
        return strcmp(((const CheckpointFile *) a)->name, ((const CheckpointFile *) b)->name);
}

/* What a directory holds, as far as it matters. */
typedef struct Listing {
        char *index; /* the index file, NULL if none */
        size_t n_indexes;
        bool has_config, has_transformer;
        char **tensors; /* *.safetensors */
        size_t n_tensors;
} Listing;

static void listing_done(Listing *l) {
        for (size_t i = 0; i < l->n_tensors; i++)
                free(l->tensors[i]);
        free(l->tensors);
        free(l->index);
}

static int listing_add(Listing *l, const char *name) {
        if (strcmp(name, "config.json") == 0)
                l->has_config = true;
        else if (strcmp(name, "transformer") == 0)
                l->has_transformer = true;
        else if (name[0] == '.') /* downloads that are not complete, for one */
                return 0;
        else if (has_suffix(name, INDEX_SUFFIX)) {
                l->n_indexes++;
                free(l->index);
                l->index = strdup(name);
                if (!l->index)
                        return -ENOMEM;
        } else if (has_suffix(name, SUFFIX)) {
                char **p = reallocarray(l->tensors, l->n_tensors + 1, sizeof(*p));

                if (!p)
                        return -ENOMEM;
                l->tensors = p;
                p[l->n_tensors] = strdup(name);
                if (!p[l->n_tensors])
                        return -ENOMEM;
                l->n_tensors++;
        }

        return 0;
}

static int listing_read(int directory, Listing *l) {
        CLEANUP(closedirp) DIR *d = NULL;
        struct dirent *entry;
        int fd, r;

        fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        d = fdopendir(fd);
        if (!d) {
                r = -errno;
                (void) close(fd);
                return r;
        }

        for (;;) {
                errno = 0;
                entry = readdir(d);
                if (!entry)
                        return -errno;
                r = listing_add(l, entry->d_name);
                if (r < 0)
                        return r;
        }
}

/* Reads a whole file of limited size into memory. */
static int read_index(int fd, const char *name, void **ret_bytes, uint64_t *ret_size, Fault *f) {
        CLEANUP_FREE char *bytes = NULL;
        struct stat st;
        size_t n = 0;

        if (fstat(fd, &st) < 0)
                return fault_open(f, -errno, name);
        if (st.st_size <= 0 || (uint64_t) st.st_size > ST_HEADER_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s has %lld bytes; expected 1 to %u.",
                        name, (long long) st.st_size, ST_HEADER_MAX);

        bytes = malloc((size_t) st.st_size);
        if (!bytes)
                return fault_set(f, -ENOMEM, FAULT_INTERNAL, "Out of memory.");
        while (n < (size_t) st.st_size) {
                ssize_t k = pread(fd, bytes + n, (size_t) st.st_size - n, (off_t) n);

                if (k < 0 && errno == EINTR)
                        continue;
                if (k <= 0)
                        return fault_set(f, -EIO, FAULT_IO, "%s cannot be read: %s.", name,
                                k < 0 ? strerror(errno) : "it got shorter");
                n += (size_t) k;
        }

        *ret_size = n;
        *ret_bytes = STEAL_PTR(bytes);
        return 0;
}

/* All shards that are absent at once, so that a broken download is one message. */
static int fault_absent(Fault *f, const StIndex *x, const char *index, int directory) {
        char list[512] = "";
        size_t n = 0, n_absent = 0;

        for (size_t i = 0; i < x->n_files; i++) {
                if (faccessat(directory, x->files[i], F_OK, 0) == 0)
                        continue;
                n_absent++;
                if (n < sizeof(list) - 1)
                        n += (size_t) snprintf(
                                list + n, sizeof(list) - n, "%s%s", n > 0 ? ", " : "", x->files[i]);
        }
        if (n_absent == 0)
                return 0;

        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                "%zu of the %zu files that %s names are absent: %s%s. Download them into the same "
                "directory.",
                n_absent, x->n_files, index, list, n >= sizeof(list) ? " ..." : "");
}

static int checkpoint_add_index(Checkpoint *c, int directory, const char *index, Fault *f) {
        CLEANUP(st_index_freep) StIndex *x = NULL;
        CLEANUP_FREE void *bytes = NULL;
        uint64_t size = 0;
        int r;

        r = checkpoint_add_at(c, directory, index, f);
        if (r < 0)
                return r;
        r = read_index(c->files[c->n_files - 1].fd, index, &bytes, &size, f);
        if (r < 0)
                return r;
        r = st_index_parse(bytes, size, index, &x, f);
        if (r < 0)
                return r;
        r = fault_absent(f, x, index, directory);
        if (r < 0)
                return r;

        for (size_t i = 0; i < x->n_files; i++) {
                r = checkpoint_add_at(c, directory, x->files[i], f);
                if (r < 0)
                        return r;
        }

        return 0;
}

static int checkpoint_open_directory(
        const char *path, int directory, bool may_descend, Checkpoint *c, Fault *f) {
        CLEANUP(listing_done) Listing l = {};
        CLEANUP_CLOSE int below = -EBADF;
        int r;

        r = listing_read(directory, &l);
        if (r < 0)
                return fault_open(f, r, path);

        if (may_descend && l.n_indexes == 0 && l.n_tensors == 0 && l.has_transformer) {
                below = openat(directory, "transformer", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
                if (below < 0)
                        return fault_open(f, -errno, "transformer");
                r = checkpoint_open_directory(path, below, false, c, f);
                return r < 0 ? r : checkpoint_add_schedulers(c, below, f);
        }
        if (l.n_indexes > 1)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s holds %zu files *" INDEX_SUFFIX
                        "; expected one checkpoint. Name the directory of one, or a file.",
                        path, l.n_indexes);
        if (l.n_indexes == 0 && l.n_tensors == 0)
                return fault_set(f, -ENOENT, FAULT_NOT_FOUND,
                        "%s holds no *.safetensors file; expected a checkpoint, or a pipeline with one in "
                        "transformer/.",
                        path);

        if (l.has_config) {
                r = checkpoint_add_at(c, directory, "config.json", f);
                if (r < 0)
                        return r;
        }
        if (l.index)
                return checkpoint_add_index(c, directory, l.index, f);

        for (size_t i = 0; i < l.n_tensors; i++) {
                r = checkpoint_add_at(c, directory, l.tensors[i], f);
                if (r < 0)
                        return r;
        }
        return 0;
}

static const char *const tokenizer_names[] = {
        "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", NULL};
static const char *const processor_names[] = {
        "preprocessor_config.json", "video_preprocessor_config.json", NULL};

/* Those of the names that are in this directory: *ret_n. */
static int add_those(Checkpoint *c, int directory, const char *const *names, size_t *ret_n, Fault *f) {
        size_t n = 0;
        int r;

        for (size_t i = 0; names[i]; i++) {
                if (faccessat(directory, names[i], F_OK, 0) < 0 && errno == ENOENT)
                        continue;
                r = checkpoint_add_at(c, directory, names[i], f);
                if (r < 0)
                        return r;
                n++;
        }

        *ret_n = n;
        return 0;
}

static bool has_file(const Checkpoint *c, const char *name) {
        for (size_t i = 0; i < c->n_files; i++)
                if (strcmp(c->files[i].name, name) == 0)
                        return true;
        return false;
}

/* Pictures' sizes are the processor's business; where it is no directory of its own its files lie with the
 * tokenizer's. */
static int add_tokenizer(Checkpoint *c, int directory, size_t *ret_n, Fault *f) {
        size_t ignored;
        int r;

        r = add_those(c, directory, tokenizer_names, ret_n, f);
        if (r < 0 || has_file(c, processor_names[0]) || has_file(c, processor_names[1]))
                return r;
        return add_those(c, directory, processor_names, &ignored, f);
}

/* 0: there is none, *ret_fd stays. */
static int open_beside(int directory, const char *path, int *ret_fd, Fault *f) {
        int fd = openat(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

        if (fd < 0)
                return errno == ENOENT || errno == ENOTDIR ? 0 : fault_open(f, -errno, path);
        *ret_fd = fd;
        return 0;
}

/* Of a transformer or a text_encoder; a pipeline without them is none of our business. */
static int add_beside(Checkpoint *c, int directory, bool with_tokenizer, Fault *f) {
        CLEANUP_CLOSE int processor = -EBADF, tokenizer = -EBADF;
        size_t n;
        int r;

        if (strcmp(c->name, "transformer") == 0)
                return checkpoint_add_schedulers(c, directory, f);
        if (strcmp(c->name, "text_encoder") != 0)
                return 0;

        r = open_beside(directory, "../processor", &processor, f);
        if (r >= 0 && processor >= 0)
                r = add_those(c, processor, processor_names, &n, f);
        if (r >= 0 && with_tokenizer)
                r = open_beside(directory, "../tokenizer", &tokenizer, f);
        if (r >= 0 && tokenizer >= 0)
                r = add_tokenizer(c, tokenizer, &n, f);
        return r;
}

static int add_tokenizer_at(Checkpoint *c, const char *path, Fault *f) {
        CLEANUP_CLOSE int fd = -EBADF;
        size_t n;
        int r;

        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
                return fault_open(f, -errno, path);

        r = add_tokenizer(c, fd, &n, f);
        if (r >= 0 && n == 0)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s holds no tokenizer; expected vocab.json and merges.txt, or tokenizer.json.", path);
        return r;
}

/* The last part of the path, of a directory also where the path ends in "." or "/". */
static char *name_of(const char *path, bool is_directory) {
        CLEANUP_FREE char *real = is_directory ? realpath(path, NULL) : NULL;
        const char *p = real ? real : path, *slash = strrchr(p, '/');

        if (slash && slash[1] != '\0')
                p = slash + 1;
        return strdup(p);
}

int checkpoint_open(const char *path, const char *tokenizer, Checkpoint *ret, Fault *f) {
        CLEANUP(checkpoint_done) Checkpoint c = {};
        CLEANUP_CLOSE int fd = -EBADF;
        struct stat st;
        char *label;
        int r;

        fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (fd < 0)
                return fault_open(f, -errno, path);
        if (fstat(fd, &st) < 0)
                return fault_open(f, -errno, path);

        c.name = name_of(path, S_ISDIR(st.st_mode));
        if (!c.name)
                return fault_set(f, -ENOMEM, FAULT_INTERNAL, "Out of memory.");

        if (S_ISDIR(st.st_mode)) {
                r = checkpoint_open_directory(path, fd, true, &c, f);
                if (r >= 0)
                        r = add_beside(&c, fd, !tokenizer, f);
                if (r >= 0 && tokenizer)
                        r = add_tokenizer_at(&c, tokenizer, f);
                if (r >= 0)
                        qsort(c.files, c.n_files, sizeof(*c.files), compare_files);
        } else if (!S_ISREG(st.st_mode) || !has_suffix(path, SUFFIX))
                r = fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s is not a checkpoint; expected a *.safetensors file or a directory.", path);
        else {
                r = checkpoint_add(&c, c.name, STEAL_FD(fd), f);
                if (r >= 0 && tokenizer)
                        r = add_tokenizer_at(&c, tokenizer, f);
        }
        if (r < 0)
                return r;

        label = utf8_escape(c.name);
        if (!label)
                return fault_set(f, -ENOMEM, FAULT_INTERNAL, "Out of memory.");
        free(c.name);
        c.name = label;

        *ret = c;
        c = (Checkpoint){};
        return 0;
}
