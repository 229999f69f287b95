/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A file that weights are read from: may we read it, which content is it, is its header sound, and a
 * descriptor for direct reads. The descriptor may come from a client: nothing of it is trusted, and a file
 * system that answers to a user (FUSE) is recognised without asking it anything. */

#include <stdbool.h>
#include <stdint.h>

#include "service/latentd/file-io.h"
#include "service/latentd/region.h"
#include "service/shared/fault.h"
#include "service/shared/safetensors.h"

/* Files other than .safetensors are small texts (config.json, an index). */
#define FILE_SOURCE_OTHER_MAX (100u * 1000u * 1000u)

/* A regular file, open for reading, on a file system of an allowed type that is mounted in our own mount
 * table. Does not ask the file system, so that it may run on the loop. mountinfo: "/proc/self/mountinfo",
 * else a made file (tests). ret_device (may be NULL): the number of its file system. InvalidFile -EBADMSG,
 * AccessDenied -EACCES, or a negative errno with f. */
int file_source_check(int fd, const char *name, const char *mountinfo, uint64_t *ret_device, Fault *f);

/* May block for as long as the file system likes: pool threads only, as all below. */
int file_source_identity(const FileIo *io, int fd, FileIdentity *ret);
bool file_source_same(const FileIdentity *a, const FileIdentity *b);

/* Reads and checks the header of a .safetensors file of `size` bytes. */
int file_source_read_header(int fd, const char *name, uint64_t size, StHeader **ret, Fault *f);

/* Reads a small file whole into malloc'ed memory (one NUL behind it). InvalidFile beyond
 * FILE_SOURCE_OTHER_MAX or if it is empty. */
int file_source_read_small(int fd, const char *name, uint64_t size, char **ret, Fault *f);

typedef struct FileSource {
        const FileIo *io;
        int fd;
        bool direct;  /* O_DIRECT is set */
        bool restore; /* ... by us on a description that is shared with whoever passed the descriptor */
} FileSource;

/* Takes its own descriptor for the same file with O_DIRECT where that can be had: re-opened if we may, else
 * by setting the flag until file_source_done(), else buffered. */
int file_source_open(const FileIo *io, int fd, FileSource *ret);
void file_source_done(FileSource *s);

/* What can be said about the content before memory is taken for it: not empty, header sound or size within
 * the limit. */
int file_source_check_content(FileSource *s, const char *name, uint64_t size, Fault *f);

/* Goes on without O_DIRECT (a file system that refuses it only at the read). From the loader thread; does
 * not block. */
void file_source_set_buffered(FileSource *s);
