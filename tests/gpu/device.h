/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the programs of this folder that print figures share: data made on the device, comparing there,
 * timing, clocks and watts. One device, one thread. Nothing here returns after an error: it is named on
 * stderr and the program ends. */

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ends the program with "WHAT: ..." unless e is cudaSuccess. */
void must(cudaError_t e, const char *what);
/* The same for what is not CUDA's. */
void must_be(bool ok, const char *what);

/* First device. Prints its name, driver, runtime, processors and the highest clock. Exit 77 without one. */
void device_open(void);
unsigned device_processors(void);

void *device_new(uint64_t size);
void device_free(void *p);

/* Normal numbers of standard deviation sigma, the same for the same seed. bf16; e4m3 and s8 saturate. */
void fill_bf16(void *p, uint64_t n, float sigma, uint32_t seed);
/* bf16 rows that go straight from one random vector to the next in `knot` rows; the vectors' numbers have the deviation sigma and are the
 * same for the same `walk`. Each number has noise of its own. */
void fill_walk(void *p, uint64_t rows, uint64_t width, uint32_t knot, float sigma, float noise, uint32_t walk, uint32_t seed);
void fill_e4m3(void *p, uint64_t n, float sigma, uint32_t seed);
void fill_s8(void *p, uint64_t n, float sigma, uint32_t seed);
/* Bytes of even distribution: as int8 data the worst case for power. */
void fill_bytes(void *p, uint64_t n, uint32_t seed);

/* Number of differing 16-bit words of two matrices of `height` rows of `width` bytes (even), rows `pitch`
 * bytes apart. */
uint64_t differing(
        const void *a, uint64_t a_pitch, const void *b, uint64_t b_pitch, uint64_t width, uint64_t height);
/* Number of 16-bit words of p that are NaN read as bf16. */
uint64_t nans(const void *p, uint64_t n);

/* What a launch took: median, range and number of samples (10 or more; short launches are timed in groups),
 * and clock and power read while the last of them ran. */
typedef struct Rate {
        double usec, shortest, longest;
        unsigned samples, mhz, watts;
} Rate;

/* Runs launch(arg) back to back on the default stream for about `seconds` after half as long unmeasured. */
Rate rate(void (*launch)(void *arg), void *arg, double seconds);
/* The same by the host's clock, for launches on any stream: groups of at least 20 ms, waited for. */
Rate rate_waited(void (*launch)(void *arg), void *arg, double seconds);
double now(void); /* seconds */

/* Of a program whose arguments name what it shall do: without one it does all. */
bool wanted(int argc, char **argv, const char *name);

#ifdef __cplusplus
}
#endif
