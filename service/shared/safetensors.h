/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Parser for hostile safetensors headers and shard indexes, and a writer. No I/O on files except the writer.
 *
 * A header is checked in this order: length against file size and the 100 MB cap, UTF-8 and depth, duplicate names,
 * then every entry (dtype known, shape, offsets in range, span = product of shape x size, no overlap, no holes,
 * nothing behind the last tensor). Nothing sized by content is allocated before its check. The caller must hand in a
 * private copy: the bytes may not change during the call.
 *
 * Where the format leaves room: an entry has "dtype", "shape" and "data_offsets", each once, and nothing else;
 * "__metadata__" is an object of strings or refused; integers go from 0 to 2^63 - 1; the product of the
 * dimensions that are not 0 must fit even if another one is 0; empty tensors may share a place but not lie
 * inside another tensor; no name holds a NUL character; white space may follow the object, nothing else may.
 * Any header length and any alignment of the data is accepted. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "service/shared/fault.h"

#define ST_HEADER_MAX (100u * 1000u * 1000u)
#define ST_DIMS_MAX 16

typedef enum StType {
        ST_BOOL, ST_U8, ST_I8, ST_U16, ST_I16, ST_F16, ST_BF16, ST_U32, ST_I32, ST_F32, ST_U64, ST_I64, ST_F64,
        ST_F8_E4M3, ST_F8_E5M2, ST_F8_E8M0,
        ST_TYPE_MAX,
        ST_TYPE_INVALID = -1,
} StType;

const char *st_type_name(StType t);         /* "BF16"; NULL for an invalid one */
StType st_type_parse(const char *name);     /* exact spelling; ST_TYPE_INVALID */
uint64_t st_type_size(StType t);            /* bytes per element */

typedef struct StTensor {
        const char *name; /* owned by the StHeader */
        StType type;
        uint32_t n_dims; /* 0 = scalar */
        uint64_t shape[ST_DIMS_MAX];
        uint64_t offset; /* bytes from the start of the FILE */
        uint64_t size;   /* bytes */
} StTensor;

typedef struct StMeta {
        const char *key, *value;
} StMeta;

typedef struct StHeader {
        StTensor *tensors; /* sorted by name (strcmp) */
        size_t n_tensors;
        StMeta *meta; /* sorted by key; values are strings by the format */
        size_t n_meta;
        uint64_t data_offset; /* first byte behind the header */
        char *text;           /* backing store of all names */
} StHeader;

/* From the first bytes of a file (>= 8 given, or all of a shorter file): how many bytes header and length take together.
 * Recognises what is not safetensors at all (zip, pickle, GGUF, gzip, HTML, Git LFS pointer) and says so.
 * -EBADMSG with fault InvalidFile naming `file_name`. */
int st_header_size(const void *start, size_t n, uint64_t file_size, const char *file_name, uint64_t *ret_size, Fault *f);

/* bytes: the first ret_size bytes of the file (8 length bytes + JSON). -EBADMSG (fault: file, tensor, rule), -ENOMEM. */
int st_header_parse(const void *bytes, uint64_t size, uint64_t file_size, const char *file_name, StHeader **ret, Fault *f);
StHeader *st_header_free(StHeader *h);

const StTensor *st_header_find(const StHeader *h, const char *name); /* NULL if absent */
const char *st_header_meta(const StHeader *h, const char *key);     /* NULL if absent */

/* Shard index ("*.safetensors.index.json"): weight_map name -> file. File names are plain (no '/', no "..", no NUL, not
 * empty, UTF-8) or it is refused. */
typedef struct StIndexEntry {
        const char *tensor, *file;
} StIndexEntry;

typedef struct StIndex {
        StIndexEntry *entries; /* sorted by tensor */
        size_t n_entries;
        const char **files; /* distinct, sorted */
        size_t n_files;
        char *text;
} StIndex;

int st_index_parse(const void *json, uint64_t size, const char *file_name, StIndex **ret, Fault *f);
StIndex *st_index_free(StIndex *x);
const char *st_index_file_of(const StIndex *x, const char *tensor);

/* The header alone: the data follow in the order of the names, which is the caller's part. */
int st_write_header(int fd, const StTensor *tensors, size_t n, const StMeta *meta, size_t n_meta);

/* Writes a file from tensors in memory: header sorted by name, padded with spaces to 8 bytes, data in that order without
 * gaps; written completely or -errno (short writes are continued). tensors[i].offset is ignored; data[i] has size bytes. */
int st_write(int fd, const StTensor *tensors, const void *const *data, size_t n, const StMeta *meta, size_t n_meta);
