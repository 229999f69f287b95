/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Limits per user: charged before use, counted from the manager's lists (nothing to get out of step). */

#include "service/latentd/manager.h"

int quota_check_session(const Manager *m, uid_t uid, uint64_t arena_bytes, Fault *f); /* LimitExceeded with the numbers */
int quota_check_arena(const Manager *m, uid_t uid, uint64_t bytes, Fault *f); /* one that is no session's; likewise */
/* One with its files (model_hash_files()) that is to be committed: those of the same files count once, whoever opened them. */
int quota_check_model(const Model *m, Fault *f);
int quota_check_job(const Manager *m, uid_t uid, Fault *f);
