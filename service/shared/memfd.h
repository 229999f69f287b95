/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Shared memory objects of the service (DESIGN.md "Memory"): mode 0600, sized once, sealed against resizing, never
 * dumped. No write seals: a restarted worker must be able to pin again. */

#include <stdint.h>

/* name is visible in /proc: never user text. Size is rounded up by the caller. Seals SHRINK|GROW|SEAL are set.
 * Negative errno; a seal that cannot be set is an error. */
int memfd_new(const char *name, uint64_t size, int *ret_fd);

/* Checks that fd is a memfd (-EBADF: something else, or of huge pages, whose faults can fail in spite of seals) of
 * exactly `size` bytes (-EINVAL) with at least the seals SHRINK and GROW (-EPERM). */
int memfd_check(int fd, uint64_t size);

/* Maps the whole object shared with MADV_DONTDUMP. prot: PROT_READ or PROT_READ|PROT_WRITE. */
int memfd_map(int fd, uint64_t size, int prot, void **ret_map);

/* A descriptor of the same object, by re-opening it (-EACCES without /proc). Unlike what memfd_new() gave, it counts for
 * memfd_is_shared(): what goes to others is to be one of these. */
int memfd_reopen_read_only(int fd, int *ret_fd);
int memfd_reopen_read_write(int fd, int *ret_fd);

/* fd is of memfd_new(). 1: a re-opened descriptor of the object is open somewhere, or a mapping of one is there; 0: none is;
 * negative: the kernel does not tell (-EINVAL: leases are switched off). */
int memfd_is_shared(int fd);

/* Populates [p, p + size) for writing, with huge pages where the system allows (MADV_HUGEPAGE first, never
 * fallocate). Blocks in proportion to size: never call it on the event loop. */
int memory_populate(void *p, uint64_t size);

/* Of memory that malloc() gave and that is about to be written: huge pages where the system allows, instead of a fault for every small
 * one. Nothing for what is too small to have some. */
void memory_prefer_huge(void *p, uint64_t size);
