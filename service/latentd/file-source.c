/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/file-source.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include "service/shared/cleanup.h"

#ifndef OVERLAYFS_SUPER_MAGIC
#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#endif

static const char *const allowed_types[] = {
        "ext4",
        "ext3",
        "ext2",
        "xfs",
        "btrfs",
        "f2fs",
        "zfs",
        "bcachefs",
        "tmpfs",
        "overlay",
        "nfs",
        "nfs4",
};

DEFINE_CLEANUP(FILE *, fclose)

static bool is_allowed(const char *type) {
        for (size_t i = 0; i < ELEMENTSOF(allowed_types); i++)
                if (strcmp(allowed_types[i], type) == 0)
                        return true;

        return false;
}

/* What the mount table says about a file. */
typedef struct Mount {
        char type[32];               /* "" if no mount of ours has it */
        bool has_btrfs, has_overlay; /* anywhere */
} Mount;

/* By mount id, which names the mount itself, or else by device number: a container's own mounts of a file
 * system that we have too. */
static int find_mount(const char *mountinfo, const struct statx *stx, Mount *ret) {
        CLEANUP(fclosep) FILE *stream = NULL;
        CLEANUP_FREE char *line = NULL;
        bool by_id = false;
        size_t allocated = 0;
        Mount m = {};

        stream = fopen(mountinfo, "re");
        if (!stream)
                return -errno;

        while (getline(&line, &allocated, stream) > 0) {
                unsigned major, minor;
                unsigned long long id;
                const char *tail = strstr(line, " - ");
                char type[32];

                if (!tail || sscanf(tail, " - %31s", type) != 1 ||
                        sscanf(line, "%llu %*u %u:%u", &id, &major, &minor) != 3)
                        continue;

                m.has_btrfs = m.has_btrfs || strcmp(type, "btrfs") == 0;
                m.has_overlay = m.has_overlay || strcmp(type, "overlay") == 0;

                if ((stx->stx_mask & STATX_MNT_ID) && id == stx->stx_mnt_id) {
                        (void) snprintf(m.type, sizeof(m.type), "%s", type);
                        by_id = true;
                } else if (!by_id && m.type[0] == '\0' && major == stx->stx_dev_major &&
                           minor == stx->stx_dev_minor)
                        (void) snprintf(m.type, sizeof(m.type), "%s", type);
        }

        if (ferror(stream))
                return -EIO;

        *ret = m;
        return 0;
}

/* btrfs and overlay files have device numbers that stand in no mount table (one for each subvolume or
 * layer). Asked only where such a file system is mounted here and the number is an anonymous one; a FUSE
 * file system of another user answers this in the kernel. */
static void find_anonymous(int fd, const struct statx *stx, Mount *m) {
        struct statfs fs;

        if (m->type[0] != '\0' || stx->stx_dev_major != 0 || !(m->has_btrfs || m->has_overlay))
                return;
        if (fstatfs(fd, &fs) < 0)
                return;

        if (m->has_btrfs && (unsigned long) fs.f_type == BTRFS_SUPER_MAGIC)
                (void) snprintf(m->type, sizeof(m->type), "btrfs");
        if (m->has_overlay && (unsigned long) fs.f_type == OVERLAYFS_SUPER_MAGIC)
                (void) snprintf(m->type, sizeof(m->type), "overlay");
}

static const char *kind_of(unsigned mode) {
        return S_ISDIR(mode)    ? "a directory"
               : S_ISFIFO(mode) ? "a pipe"
               : S_ISSOCK(mode) ? "a socket"
               : S_ISCHR(mode)  ? "a character device"
               : S_ISBLK(mode)  ? "a block device"
               : S_ISLNK(mode)  ? "a symbolic link"
                                : "not a file";
}

static int check_mode(int fd, const char *name, Fault *f) {
        int flags = fcntl(fd, F_GETFL);

        if (flags < 0)
                return fault_set(f, -errno, FAULT_INVALID_ARGUMENT, "%s: not an open descriptor", name);
        if ((flags & O_PATH) || (flags & O_ACCMODE) == O_WRONLY)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s: the descriptor is not open for reading, open the file with O_RDONLY", name);

        return 0;
}

int file_source_check(int fd, const char *name, const char *mountinfo, uint64_t *ret_device, Fault *f) {
        struct statx stx;
        Mount m;
        int r;

        r = check_mode(fd, name, f);
        if (r < 0)
                return r;

        /* Type, device and mount id are the kernel's own: with DONT_SYNC no file system is asked. */
        if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_MNT_ID, &stx) < 0)
                return fault_set(f, -errno, FAULT_IO, "%s: cannot be examined: %s", name, strerror(errno));
        if (!S_ISREG(stx.stx_mode))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s is %s, expected a regular file", name,
                        kind_of(stx.stx_mode));

        r = find_mount(mountinfo, &stx, &m);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "%s cannot be read: %s", mountinfo, strerror(-r));
        find_anonymous(fd, &stx, &m);

        if (m.type[0] == '\0')
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s lies on a file system that is not in the service's mount table: copy the file "
                        "to a local file system",
                        name);
        if (!is_allowed(m.type))
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                        "%s lies on a file system of type %s, from which the service does not read (whoever "
                        "serves it could stop it for ever): copy the file to a local file system",
                        name, m.type);

        if (ret_device)
                *ret_device = makedev(stx.stx_dev_major, stx.stx_dev_minor);
        return 0;
}

int file_source_identity(const FileIo *io, int fd, FileIdentity *ret) {
        struct stat st;

        if (io->fstat(fd, &st) < 0)
                return -errno;
        if (!S_ISREG(st.st_mode) || st.st_size < 0)
                return -EBADF;

        *ret = (FileIdentity){
                .device = st.st_dev,
                .inode = st.st_ino,
                .size = (uint64_t) st.st_size,
                .mtime_sec = st.st_mtim.tv_sec,
                .mtime_nsec = st.st_mtim.tv_nsec,
                .ctime_sec = st.st_ctim.tv_sec,
                .ctime_nsec = st.st_ctim.tv_nsec,
        };
        return 0;
}

bool file_source_same(const FileIdentity *a, const FileIdentity *b) {
        return memcmp(a, b, sizeof(*a)) == 0; /* eight-byte fields only: no padding */
}

/* Whether a read that failed is worth another attempt. */
static bool try_again(FileSource *s, int error, unsigned *n_retries) {
        if ((error == -EINVAL || error == -EOPNOTSUPP) && s->direct) {
                file_source_set_buffered(s);
                return true;
        }

        file_io_pause(error);
        return file_io_retry(error, n_retries);
}

/* Reads [0, size) into an aligned buffer. Multiples of a block, since the descriptor may have O_DIRECT set,
 * be it by its owner. */
static int read_start(
        FileSource *s, const char *name, void *buffer, uint64_t capacity, uint64_t size, Fault *f) {
        uint64_t at = 0, reached = 0;
        unsigned n_retries = 0, n_same_end = 0;

        while (reached < size) {
                ssize_t k = s->io->pread(s->fd, (char *) buffer + at, (size_t) (capacity - at), (off_t) at);

                if (k < 0) {
                        int error = -errno;

                        if (try_again(s, error, &n_retries))
                                continue;
                        return fault_set(f, error, FAULT_IO, "%s: reading at byte %llu failed: %s", name,
                                (unsigned long long) at, strerror(-error));
                }
                if (at + (uint64_t) k <= reached && k > 0 && ++n_same_end < FILE_IO_SAME_END)
                        continue;
                if (at + (uint64_t) k <= reached)
                        return fault_set(f, -ESTALE, FAULT_FILE_CHANGED,
                                "%s was truncated while it was read: %llu bytes expected, %llu found", name,
                                (unsigned long long) size, (unsigned long long) reached);

                n_retries = n_same_end = 0;
                reached = at + (uint64_t) k;
                at = reached - reached % REGION_BLOCK;
        }

        return 0;
}

static void *new_buffer(uint64_t size, uint64_t *ret_capacity) {
        uint64_t capacity = (size + REGION_BLOCK - 1) / REGION_BLOCK * REGION_BLOCK;
        void *p;

        if (posix_memalign(&p, REGION_BLOCK, (size_t) capacity) != 0)
                return NULL;

        memset(p, 0, capacity); /* btrfs goes through the page cache where pages are not there yet */
        *ret_capacity = capacity;
        return p;
}

static int read_header(FileSource *s, const char *name, uint64_t size, StHeader **ret, Fault *f) {
        CLEANUP_FREE char *start = NULL, *header = NULL;
        uint64_t capacity, n, header_size;
        int r;

        n = size < REGION_BLOCK ? size : REGION_BLOCK;
        start = new_buffer(REGION_BLOCK, &capacity);
        if (!start)
                return -ENOMEM;
        r = read_start(s, name, start, capacity, n, f);
        if (r < 0)
                return r;

        r = st_header_size(start, (size_t) n, size, name, &header_size, f);
        if (r < 0)
                return r;
        if (header_size <= n)
                return st_header_parse(start, header_size, size, name, ret, f);

        header = new_buffer(header_size, &capacity);
        if (!header)
                return -ENOMEM;
        r = read_start(s, name, header, capacity, header_size, f);
        if (r < 0)
                return r;

        return st_header_parse(header, header_size, size, name, ret, f);
}

int file_source_read_header(int fd, const char *name, uint64_t size, StHeader **ret, Fault *f) {
        return read_header(&(FileSource){.io = &file_io_system, .fd = fd}, name, size, ret, f);
}

static int check_small(const char *name, uint64_t size, Fault *f) {
        if (size == 0)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "%s is empty", name);
        if (size > FILE_SOURCE_OTHER_MAX)
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "%s has %llu bytes: files other than .safetensors may have at most %u", name,
                        (unsigned long long) size, FILE_SOURCE_OTHER_MAX);

        return 0;
}

int file_source_read_small(int fd, const char *name, uint64_t size, char **ret, Fault *f) {
        CLEANUP_FREE char *text = NULL;
        uint64_t capacity;
        int r;

        r = check_small(name, size, f);
        if (r < 0)
                return r;

        text = new_buffer(size + 1, &capacity);
        if (!text)
                return -ENOMEM;
        r = read_start(&(FileSource){.io = &file_io_system, .fd = fd}, name, text, capacity, size, f);
        if (r < 0)
                return r;

        text[size] = '\0';
        *ret = STEAL_PTR(text);
        return 0;
}

static bool is_safetensors(const char *name) {
        size_t n = strlen(name), k = strlen(".safetensors");

        return n >= k && strcmp(name + n - k, ".safetensors") == 0;
}

int file_source_check_content(FileSource *s, const char *name, uint64_t size, Fault *f) {
        StHeader *h = NULL;
        int r;

        if (!is_safetensors(name) || size == 0)
                return check_small(name, size, f);

        r = read_header(s, name, size, &h, f);
        st_header_free(h);
        return r;
}

int file_source_open(const FileIo *io, int fd, FileSource *ret) {
        char path[sizeof("/proc/self/fd/") + 11];
        int flags, own;

        /* Our own description: nobody else sees the flag. Needs read permission, which a passed descriptor
         * need not imply. O_NONBLOCK: a lease of the file's owner must not hold us up; but for reads it
         * would tell the ring that they may be tried on the loader thread, whatever the file system. */
        (void) snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        own = io->open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_DIRECT);
        if (own >= 0) {
                (void) io->set_flags(own, O_RDONLY | O_DIRECT);
                *ret = (FileSource){.io = io, .fd = own, .direct = true};
                return 0;
        }

        own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (own < 0)
                return -errno;

        *ret = (FileSource){.io = io, .fd = own};
        flags = fcntl(own, F_GETFL);
        if (flags >= 0 && (flags & O_DIRECT))
                ret->direct = true;
        else if (flags >= 0 && io->set_flags(own, flags | O_DIRECT) >= 0)
                ret->direct = ret->restore = true;

        return 0;
}

void file_source_set_buffered(FileSource *s) {
        int flags = fcntl(s->fd, F_GETFL);

        if (flags >= 0)
                (void) s->io->set_flags(s->fd, flags & ~O_DIRECT);
        s->direct = false;
}

void file_source_done(FileSource *s) {
        if (s->fd < 0)
                return;

        if (s->restore && s->direct)
                file_source_set_buffered(s);
        (void) close(s->fd);
        s->fd = -EBADF;
}
