/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/model-files.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "service/latentd/descriptors.h"
#include "service/latentd/file-source.h"
#include "service/shared/cleanup.h"
#include "service/shared/suffix.h"

/* A directory with more entries than this is not a model. */
#define ENTRIES_MAX 65536

static const char suffix_weights[] = ".safetensors", suffix_index[] = ".safetensors.index.json";

/* All paths are relative to one ModelPath= directory, opened from there each time: links may lead anywhere
 * below it. */
typedef struct Root {
        int fd;
        const char *path;
} Root;

typedef struct Names {
        char **names;
        size_t n;
} Names;

static void names_done(Names *l) {
        for (size_t i = 0; i < l->n; i++)
                free(l->names[i]);
        free(l->names);
        *l = (Names){};
}

static int names_add(Names *l, const char *name) {
        char **grown, *copy;

        grown = reallocarray(l->names, l->n + 1, sizeof(char *));
        if (!grown)
                return -ENOMEM;
        l->names = grown;

        copy = strdup(name);
        if (!copy)
                return -ENOMEM;
        l->names[l->n++] = copy;
        return 0;
}

static int by_name(const void *a, const void *b) {
        return strcmp(*(char *const *) a, *(char *const *) b);
}

/* "a, b, c and 5 more" */
static void names_join(const Names *l, char *ret, size_t size) {
        size_t at = 0;

        ret[0] = '\0';
        for (size_t i = 0; i < l->n; i++) {
                if (at + strlen(l->names[i]) + 32 > size) {
                        (void) snprintf(ret + at, size - at, " and %zu more", l->n - i);
                        return;
                }
                at += (size_t) snprintf(ret + at, size - at, "%s%s", i > 0 ? ", " : "", l->names[i]);
        }
}

/* The walk for kernels and sandboxes without openat2: one component at a time, no links at all. */
static int open_by_component(int root, const char *path, int flags) {
        CLEANUP_CLOSE int fd = fcntl(root, F_DUPFD_CLOEXEC, 3);
        CLEANUP_FREE char *copy = strdup(path);
        char *save = NULL, *part, *next;

        if (fd < 0)
                return -errno;
        if (!copy)
                return -ENOMEM;

        for (part = strtok_r(copy, "/", &save); part; part = next) {
                int deeper;

                next = strtok_r(NULL, "/", &save);
                deeper = openat(fd, part, O_CLOEXEC | O_NOFOLLOW | (next ? O_PATH | O_DIRECTORY : flags));
                if (deeper < 0)
                        return errno == ELOOP ? -EMLINK : -errno; /* any link */
                (void) close(fd);
                fd = deeper;
        }

        return STEAL_FD(fd);
}

static int open_beneath(int root, const char *path, int flags) {
        struct open_how how = {
                .flags = (uint64_t) (flags | O_CLOEXEC),
                .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
        };

        for (unsigned tries = 0;; tries++) {
                long fd = syscall(SYS_openat2, root, path, &how, sizeof(how));

                if (fd >= 0)
                        return (int) fd;
                if (errno == ENOSYS || errno == EPERM) /* EPERM: a sandbox that does not know the call */
                        return open_by_component(root, path, flags);
                if (errno != EAGAIN || tries >= 32) /* EAGAIN: something was renamed meanwhile */
                        return -errno;
        }
}

/* O_NONBLOCK: opening a FIFO must not wait for a writer. */
static int open_file(const Root *root, const char *path) {
        return open_beneath(root->fd, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
}

static int open_failed(const Root *root, const char *path, int error, Fault *f) {
        switch (error) {
        case -ELOOP:
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s/%s cannot be opened: too many links lead from one to the next (one back to itself?)", root->path, path);
        case -EMLINK:
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s/%s is a link, which the service cannot follow here (the system call openat2 is missing): put the file itself "
                        "there",
                        root->path, path);
        case -EXDEV:
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s/%s leads out of its ModelPath= directory through a link", root->path, path);
        case -EACCES:
        case -EPERM:
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s/%s may not be read by the service: give its user read permission, or pass the "
                        "opened files",
                        root->path, path);
        case -ENXIO:
                return fault_set(
                        f, -EBADMSG, FAULT_INVALID_FILE, "%s/%s is not a regular file", root->path, path);
        default:
                return fault_set(f, error, FAULT_IO, "%s/%s cannot be opened: %s", root->path, path,
                        strerror(-error));
        }
}

static bool has_file(const ModelFiles *m, const char *name) {
        for (size_t i = 0; i < m->n_files; i++)
                if (strcmp(m->files[i].name, name) == 0)
                        return true;
        return false;
}

static int add_file_as(ModelFiles *m, const Root *root, const char *path, const char *name, int fd_taken, Fault *f) {
        CLEANUP_CLOSE int fd = fd_taken;
        ModelFile *grown;
        struct stat st;
        int r;

        if (fstat(fd, &st) < 0)
                return open_failed(root, path, -errno, f);
        if (!S_ISREG(st.st_mode))
                return fault_set(
                        f, -EBADMSG, FAULT_INVALID_FILE, "%s/%s is not a regular file", root->path, path);
        r = descriptor_check(fd, path, f);
        if (r < 0)
                return r;
        if (has_file(m, name))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s/%s: the model has a file of this name already",
                        root->path, path);
        if (m->n_files >= MODEL_FILES_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s/%s: a model may have at most %d files",
                        root->path, path, MODEL_FILES_MAX);

        grown = reallocarray(m->files, m->n_files + 1, sizeof(ModelFile));
        if (!grown)
                return -ENOMEM;
        m->files = grown;

        grown[m->n_files] = (ModelFile){.name = strdup(name), .fd = -EBADF};
        if (!grown[m->n_files].name)
                return -ENOMEM;
        grown[m->n_files++].fd = STEAL_FD(fd);
        return 0;
}

static int add_file(ModelFiles *m, const Root *root, const char *path, int fd_taken, Fault *f) {
        const char *base = strrchr(path, '/');

        return add_file_as(m, root, path, base ? base + 1 : path, fd_taken, f);
}

static int join(const char *directory, const char *name, char *ret, size_t size) {
        return snprintf(ret, size, "%s/%s", directory, name) < (int) size ? 0 : -ENAMETOOLONG;
}

/* Opens directory/name, which the model knows as `as`. -ENOENT without f if it is not there. */
static int add_named_as(ModelFiles *m, const Root *root, const char *directory, const char *name, const char *as, Fault *f) {
        char path[PATH_MAX];
        int fd, r;

        r = join(directory, name, path, sizeof(path));
        if (r < 0)
                return r;

        fd = open_file(root, path);
        if (fd == -ENOENT || fd == -ENOTDIR)
                return -ENOENT;
        if (fd < 0)
                return open_failed(root, path, fd, f);

        return add_file_as(m, root, path, as, fd, f);
}

static int add_named(ModelFiles *m, const Root *root, const char *directory, const char *name, Fault *f) {
        return add_named_as(m, root, directory, name, name, f);
}

/* Every name at once, so that one look tells what has to be downloaded again. */
static int add_all(ModelFiles *m, const Root *root, const char *directory, const Names *names,
        const char *index, Fault *f) {
        char list[512];
        Names absent = {};
        int r = 0;

        for (size_t i = 0; i < names->n && r >= 0; i++) {
                r = add_named(m, root, directory, names->names[i], f);
                if (r == -ENOENT)
                        r = names_add(&absent, names->names[i]);
        }

        if (r >= 0 && absent.n > 0) {
                names_join(&absent, list, sizeof(list));
                r = fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s/%s/%s names %zu files, %zu of them are not there: %s. An incomplete download?",
                        root->path, directory, index, names->n, absent.n, list);
        }

        names_done(&absent);
        return r;
}

static int read_index(const ModelFile *file, const char *path, Names *ret, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        FileIdentity identity;
        StIndex *x = NULL;
        int r;

        r = file_source_identity(&file_io_system, file->fd, &identity);
        if (r < 0)
                return r;
        r = file_source_read_small(file->fd, path, identity.size, &text, f);
        if (r < 0)
                return r;
        r = st_index_parse(text, identity.size, path, &x, f);
        if (r < 0)
                return r;

        for (size_t i = 0; i < x->n_files && r >= 0; i++)
                r = names_add(ret, x->files[i]);

        st_index_free(x);
        return r;
}

static int add_indexed(ModelFiles *m, const Root *root, const char *directory, const char *index, Fault *f) {
        char path[PATH_MAX];
        Names shards = {};
        int r;

        r = join(directory, index, path, sizeof(path));
        if (r >= 0)
                r = add_named(m, root, directory, index, f);
        if (r == -ENOENT)
                r = fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s/%s/%s is a link to a file that is not there", root->path, directory, index);
        if (r >= 0)
                r = read_index(&m->files[m->n_files - 1], path, &shards, f);
        if (r >= 0)
                r = add_all(m, root, directory, &shards, index, f);

        names_done(&shards);
        return r;
}

/* Without an index several files are one checkpoint only if no tensor stands in two of them. */
static int check_disjoint(const ModelFiles *m, size_t first, const char *directory, Fault *f) {
        StHeader *headers[MODEL_FILES_MAX] = {};
        int r = 0;

        for (size_t i = first; i < m->n_files && r >= 0; i++) {
                FileIdentity identity;

                r = file_source_identity(&file_io_system, m->files[i].fd, &identity);
                if (r >= 0)
                        r = file_source_read_header(
                                m->files[i].fd, m->files[i].name, identity.size, &headers[i], f);

                for (size_t k = first; k < i && r >= 0; k++)
                        for (size_t t = 0; t < headers[i]->n_tensors && r >= 0; t++)
                                if (st_header_find(headers[k], headers[i]->tensors[t].name))
                                        r = fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                                                "%s holds more than one checkpoint: %s and %s both have the "
                                                "tensor %s. Name one file",
                                                directory, m->files[k].name, m->files[i].name,
                                                headers[i]->tensors[t].name);
        }

        for (size_t i = first; i < m->n_files; i++)
                st_header_free(headers[i]);
        return r;
}

static int list_directory(int fd, Names *ret_weights, Names *ret_indexes, bool *ret_transformer) {
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
        struct dirent *e;
        size_t n = 0;
        int r = 0;

        if (!d) {
                r = -errno;
                if (copy >= 0)
                        (void) close(copy);
                return r;
        }

        for (errno = 0; r >= 0 && (e = readdir(d)); errno = 0) {
                if (++n > ENTRIES_MAX)
                        r = -E2BIG;
                else if (e->d_name[0] == '.')
                        continue;
                else if (strcmp(e->d_name, "transformer") == 0)
                        *ret_transformer = true;
                else if (has_suffix(e->d_name, suffix_weights))
                        r = names_add(ret_weights, e->d_name);
                else if (has_suffix(e->d_name, suffix_index))
                        r = names_add(ret_indexes, e->d_name);
        }
        if (r >= 0 && errno > 0)
                r = -errno;

        (void) closedir(d);
        if (ret_weights->n > 1)
                qsort(ret_weights->names, ret_weights->n, sizeof(char *), by_name);
        if (ret_indexes->n > 1)
                qsort(ret_indexes->names, ret_indexes->n, sizeof(char *), by_name);
        return r;
}

static int add_checkpoint(ModelFiles *m, const Root *root, const char *directory, const Names *weights,
        const Names *indexes, Fault *f) {
        size_t first;
        char list[512];
        int r;

        if (indexes->n > 1) {
                names_join(indexes, list, sizeof(list));
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s/%s holds more than one checkpoint: %s. Keep one index there", root->path,
                        directory, list);
        }
        if (indexes->n == 0 && weights->n == 0)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s/%s holds no checkpoint: expected a .safetensors file, an index of shards, or a "
                        "folder transformer/ with one",
                        root->path, directory);

        r = add_named(m, root, directory, "config.json", f);
        if (r < 0 && r != -ENOENT)
                return r;

        if (indexes->n == 1)
                return add_indexed(m, root, directory, indexes->names[0], f);

        first = m->n_files;
        for (size_t i = 0; i < weights->n; i++) {
                r = add_named(m, root, directory, weights->names[i], f);
                if (r < 0)
                        return r == -ENOENT ? fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                                                      "%s/%s/%s is a link to a file that is not there",
                                                      root->path, directory, weights->names[i])
                                            : r;
        }

        return weights->n > 1 ? check_disjoint(m, first, directory, f) : 0;
}

/* Of a directory called `base`: the path of the directory `sibling` beside it. False: it is none. */
static bool path_beside(const char *directory, const char *base, const char *sibling, char ret[static PATH_MAX]) {
        size_t n = strlen(directory);

        while (n > 0 && directory[n - 1] == '/')
                n--;
        if (n < strlen(base) || strncmp(directory + n - strlen(base), base, strlen(base)) != 0)
                return false;
        n -= strlen(base);
        if (n > 0 && directory[n - 1] != '/')
                return false;

        return snprintf(ret, PATH_MAX, "%.*s%s", (int) n, directory, sibling) < PATH_MAX;
}

/* The shifts of the schedules are the denoiser's business. Both files have the same name where they lie. */
static int add_schedulers(ModelFiles *m, const Root *root, const char *transformer, Fault *f) {
        static const char *const folders[][2] = {
                {"scheduler", "scheduler_config.json"}, {"audio_scheduler", "audio_scheduler_config.json"}};
        char path[PATH_MAX];
        int r;

        for (size_t i = 0; i < ELEMENTSOF(folders); i++) {
                if (!path_beside(transformer, "transformer", folders[i][0], path))
                        return 0;
                r = add_named_as(m, root, path, "scheduler_config.json", folders[i][1], f);
                if (r < 0 && r != -ENOENT)
                        return r;
        }
        return 0;
}

static int add_directory(
        ModelFiles *m, const Root *root, const char *directory, int fd, bool below, Fault *f) {
        Names weights = {}, indexes = {};
        bool transformer = false;
        char path[PATH_MAX];
        int r;

        r = list_directory(fd, &weights, &indexes, &transformer);
        if (r < 0)
                r = open_failed(root, directory, r, f);
        else if (transformer && !below) {
                CLEANUP_CLOSE int inner = -EBADF;

                r = join(directory, "transformer", path, sizeof(path));
                if (r >= 0) {
                        inner = open_beneath(root->fd, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
                        r = inner < 0 ? open_failed(root, path, inner, f)
                                      : add_directory(m, root, path, inner, true, f);
                }
        } else {
                r = add_checkpoint(m, root, directory, &weights, &indexes, f);
                if (r >= 0)
                        r = add_schedulers(m, root, directory, f);
        }

        names_done(&weights);
        names_done(&indexes);
        return r;
}

static const char *const tokenizer_names[] = {
        "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", NULL};
static const char *const processor_names[] = {
        "preprocessor_config.json", "video_preprocessor_config.json", NULL};

/* Those of the names that are in this directory: *ret_n. -ENOENT without f: there is no such directory. */
static int add_those(ModelFiles *m, const Root *root, const char *directory, const char *const *names,
        size_t *ret_n, Fault *f) {
        CLEANUP_CLOSE int fd = open_beneath(root->fd, directory, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
        size_t n = 0;
        int r;

        if (fd == -ENOENT || fd == -ENOTDIR)
                return -ENOENT;
        if (fd < 0)
                return open_failed(root, directory, fd, f);

        for (size_t i = 0; names[i]; i++) {
                r = add_named(m, root, directory, names[i], f);
                if (r < 0 && r != -ENOENT)
                        return r;
                n += r >= 0;
        }

        *ret_n = n;
        return 0;
}

/* Pictures' sizes are the processor's business; where it is no directory of its own its files lie with the
 * tokenizer's. */
static int add_tokenizer(ModelFiles *m, const Root *root, const char *directory, size_t *ret_n, Fault *f) {
        size_t ignored;
        int r;

        r = add_those(m, root, directory, tokenizer_names, ret_n, f);
        if (r < 0 || has_file(m, processor_names[0]) || has_file(m, processor_names[1]))
                return r;
        return add_those(m, root, directory, processor_names, &ignored, f);
}

static int add_beside(ModelFiles *m, const Root *root, const char *directory, bool tokenizer, Fault *f) {
        char path[PATH_MAX];
        size_t n;
        int r = 0;

        if (path_beside(directory, "text_encoder", "processor", path))
                r = add_those(m, root, path, processor_names, &n, f);
        if ((r >= 0 || r == -ENOENT) && tokenizer && path_beside(directory, "text_encoder", "tokenizer", path))
                r = add_tokenizer(m, root, path, &n, f);
        return r == -ENOENT ? 0 : r;
}

/* -ENOENT without f: this directory does not have it. beside: a tokenizer beside a text_encoder comes along, as
 * its processor does in any case. */
static int open_in_root(const Root *root, const char *name, bool beside, ModelFiles *m, Fault *f) {
        CLEANUP_CLOSE int fd = -EBADF;
        struct stat st;

        fd = open_file(root, name);
        if (fd == -ENOENT || fd == -ENOTDIR)
                return -ENOENT;
        if (fd < 0)
                return open_failed(root, name, fd, f);
        if (fstat(fd, &st) < 0)
                return open_failed(root, name, -errno, f);

        if (S_ISDIR(st.st_mode)) {
                int r = add_directory(m, root, name, fd, false, f);

                return r < 0 ? r : add_beside(m, root, name, beside, f);
        }
        if (S_ISREG(st.st_mode) && !has_suffix(name, suffix_weights))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s/%s is not a .safetensors file",
                        root->path, name);

        return add_file(m, root, name, STEAL_FD(fd), f);
}

static int check_name(const char *name, Fault *f) {
        if (name[0] == '\0' || strlen(name) >= PATH_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "the model's name is %s",
                        name[0] == '\0' ? "empty" : "too long");
        if (name[0] == '/')
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s is an absolute path: the service opens only names below its ModelPath= "
                        "directories; pass opened files instead",
                        name);

        for (const char *p = name; p; p = strchr(p, '/')) {
                p += strspn(p, "/");
                if (strncmp(p, "..", 2) == 0 && (p[2] == '/' || p[2] == '\0'))
                        return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                                "%s: \"..\" is not allowed in a model's name", name);
        }

        return 0;
}

static int not_found(const Config *c, const char *name, Fault *f) {
        Names where = {};
        char list[512];

        if (!c->model_path || !c->model_path[0])
                return fault_set(f, -ENOENT, FAULT_NOT_FOUND,
                        "there is no model \"%s\": no ModelPath= is set in latentd.conf", name);

        for (where.names = c->model_path; where.names[where.n]; where.n++)
                ;
        names_join(&where, list, sizeof(list));
        return fault_set(f, -ENOENT, FAULT_NOT_FOUND, "there is no model \"%s\". Looked in: %s", name, list);
}

/* One that the caller names. */
static int open_tokenizer(const Config *c, const char *name, ModelFiles *m, Fault *f) {
        size_t n;
        int r;

        r = check_name(name, f);
        if (r < 0)
                return r;

        for (char **p = c->model_path; p && *p; p++) {
                CLEANUP_CLOSE int fd = open(*p, O_PATH | O_DIRECTORY | O_CLOEXEC);
                Root root = {.fd = fd, .path = *p};

                r = fd < 0 ? -ENOENT : add_tokenizer(m, &root, name, &n, f);
                if (r >= 0 && n == 0)
                        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                                "%s/%s holds no tokenizer: expected vocab.json and merges.txt, or tokenizer.json", *p, name);
                if (r != -ENOENT)
                        return r < 0 ? fault_set(f, r, FAULT_INTERNAL, "%s/%s: %s", *p, name, strerror(-r)) : 0;
        }

        return fault_set(f, -ENOENT, FAULT_NOT_FOUND,
                "there is no directory \"%s\" with a tokenizer below any ModelPath= directory", name);
}

static int open_model(const Config *c, const char *name, bool beside, ModelFiles *ret, Fault *f) {
        ModelFiles m = {};
        int r;

        r = check_name(name, f);
        if (r < 0)
                return r;

        for (char **p = c->model_path; p && *p; p++) {
                CLEANUP_CLOSE int fd = open(*p, O_PATH | O_DIRECTORY | O_CLOEXEC);
                Root root = {.fd = fd, .path = *p};

                if (fd < 0)
                        continue; /* an unplugged disk must not hide the other directories */

                r = open_in_root(&root, name, beside, &m, f);
                if (r >= 0) {
                        *ret = m;
                        return 0;
                }
                if (r != -ENOENT) {
                        model_files_done(&m);
                        return fault_set(f, r, FAULT_INTERNAL, "%s/%s: %s", *p, name, strerror(-r));
                }
        }

        return not_found(c, name, f);
}

int model_files_open(const Config *c, const char *name, const char *tokenizer, ModelFiles *ret, Fault *f) {
        bool given = tokenizer[0] != '\0';
        ModelFiles m = {};
        int r;

        r = open_model(c, name, !given, &m, f);
        if (r >= 0 && given)
                r = open_tokenizer(c, tokenizer, &m, f);
        if (r < 0) {
                model_files_done(&m);
                return r;
        }

        *ret = m;
        return 0;
}

void model_files_done(ModelFiles *m) {
        for (size_t i = 0; i < m->n_files; i++) {
                free(m->files[i].name);
                if (m->files[i].fd >= 0)
                        (void) close(m->files[i].fd);
        }
        free(m->files);
        *m = (ModelFiles){};
}
