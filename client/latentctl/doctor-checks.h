/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The single checks of latentctl doctor. Each adds one finding. */

#include "client/latentctl/ctl.h"

typedef enum Level {
        LEVEL_OK,
        LEVEL_WARNING,
        LEVEL_PROBLEM,
} Level;

typedef struct Finding {
        const char *name; /* "huge pages" */
        Level level;
        char text[512];   /* what is */
        char advice[512]; /* what to do; empty if nothing */
} Finding;

#define FINDINGS_MAX 64u

typedef struct Findings {
        size_t n;
        Finding list[FINDINGS_MAX];
} Findings;

void finding_add(Findings *f, const char *name, Level level, const char *advice, const char *format, ...)
        __attribute__((format(printf, 5, 6)));

/* This machine. root: "" or, in tests, a directory with proc/ and sys/ in it. */
void check_io_uring(Findings *f, const char *root);
void check_huge_pages(Findings *f, const char *root);
void check_memory(Findings *f, const char *root);
void check_numa(Findings *f, const char *root);

/* The service, by its own word. status: latent_client_status(); regions: latent_client_regions(). */
void check_version(Findings *f, const latent_value *status);
void check_state(Findings *f, const latent_value *status);
void check_sandbox(Findings *f, const latent_value *status);
void check_stuck(Findings *f, uint64_t n); /* StuckReads */
void check_headroom(Findings *f, const latent_value *status);
void check_devices(Findings *f, const latent_value *devices);
void check_parts(Findings *f, const latent_value *devices); /* of a film, each on some GPU */
void check_device_notes(Findings *f, const latent_value *status);
void check_links(Findings *f, const char *root, const latent_value *devices);
void check_kernels(Findings *f, const latent_value *devices);
void check_device_reason(Findings *f, const latent_value *status);
void check_cache(Findings *f, const latent_value *regions);
void check_locked(Findings *f, const latent_value *regions);
void check_numa_applied(Findings *f, const latent_value *regions);
