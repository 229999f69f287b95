/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How people name a GPU: its number (from 0) in the worker's HELLO, its UUID or its PCI address. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/wire.h"

bool gpu_is_named(const char *name, const WireDevice *d, uint32_t number);

/* Whether a list as Gpus= or GpuShares= has it (words, with commas or without) has such a name; what is behind a '=' does not count.
 * NULL has none. */
bool gpu_is_listed(const char *list, const WireDevice *d, uint32_t number);

/* Of the environment of a worker: Gpus= and GpusExclude= of the latentd.conf of whoever starts it. "" as if it were not there. A GPU
 * that they leave out need not be opened. */
#define GPU_NAMES_VARIABLE "LATENT_GPUS"
#define GPU_NAMES_EXCLUDE_VARIABLE "LATENT_GPUS_EXCLUDE"

/* Whether those two leave it out. */
bool gpu_is_left_out(const WireDevice *d, uint32_t number);

/* -ENODEV with f: of so many GPUs none is left. */
int gpu_names_refuse(uint32_t n, Fault *f);
