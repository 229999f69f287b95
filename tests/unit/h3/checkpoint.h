/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Checkpoints made in memory from the tiny model, one thing changed at a time. */

#include "service/h3/model.h"
#include "service/shared/safetensors.h"

#define CHECKPOINT_TENSORS_MAX 512

typedef struct Checkpoint {
        StTensor tensors[CHECKPOINT_TENSORS_MAX];
        const void *data[CHECKPOINT_TENSORS_MAX];
        char *names[CHECKPOINT_TENSORS_MAX]; /* owned */
        size_t n;
        uint8_t *source; /* comfy.safetensors; tensors that were not changed point into it */
} Checkpoint;

Checkpoint *checkpoint_new(void); /* with all tensors of the tiny model, in the comfy layout */
Checkpoint *checkpoint_of(const char *folder, const char *file); /* of golden_read() */
Checkpoint *checkpoint_empty(void);
Checkpoint *checkpoint_free(Checkpoint *c);
void checkpoint_freep(Checkpoint **c);

const void *checkpoint_data(Checkpoint *c, const char *name);
/* Another name; the data stays. */
void checkpoint_rename(Checkpoint *c, const char *name, const char *to);
StTensor *checkpoint_find(Checkpoint *c, const char *name); /* fails the test if it is not there */
void checkpoint_drop(Checkpoint *c, const char *name);
/* data: kept by reference, size bytes; NULL: zeros (at most 64 KiB). n_dims 0 to 2. */
void checkpoint_add(Checkpoint *c, const char *name, StType type, uint32_t n_dims, uint64_t a, uint64_t b,
        const void *data);
/* Moves a tensor to another checkpoint (which must not outlive this one). */
void checkpoint_move(Checkpoint *from, const char *name, Checkpoint *to);

/* Another type, shape and content of the same name. */
void checkpoint_replace(Checkpoint *c, const char *name, StType type, uint32_t n_dims, uint64_t a, uint64_t b,
        const void *data);

/* The file's bytes, freed by the caller. */
uint8_t *checkpoint_write(const Checkpoint *c, uint64_t *ret_size);
