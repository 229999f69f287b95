/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Whether a file that is there belongs to a model, so that no output may take its place. */

#include <stdbool.h>

/* model: as the command line names it. A file: that one. A directory: the weights, settings and word lists (.safetensors, .json, .txt) in
 * it, in the folders of its parts, and in the folders beside it that a part brings along. Files are told by device and inode; what
 * latentctl wrote is none of a model's. A name that only the service can find: whatever may be of a model by its content or name. */
bool model_file_is(const char *path, const char *model);
