/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Filling a latent_error, from our own words, a Fault or a D-Bus error. All return the code, so that a
 * failure is one line. */

#include <stdbool.h>

#include <systemd/sd-bus.h>

#include "client/latent.h"
#include "service/shared/fault.h"

#define LATENT_PUBLIC __attribute__((visibility("default")))

#define BUS_NAME "org.latentd.Latent1"
#define BUS_ROOT "/org/latentd/Latent1"
#define BUS_INTERFACE(x) "org.latentd.Latent1." x
#define BUS_ERROR_PREFIX "org.latentd.Latent1.Error."

/* e may be NULL. What is not printable in the text is replaced. */
int error_set(latent_error *e, int code, const char *name, const char *format, ...)
        __attribute__((format(printf, 4, 5)));

/* Out of memory, or another failure that only errno names. */
int error_errno(latent_error *e, int code, const char *doing);

int error_fault(latent_error *e, int code, const Fault *f);

/* The code that goes with an error name; -EPROTO for one that this library does not know. */
int error_code(const char *name);

/* A failed bus call: r as sd-bus returned it, b the error. to_object: the call went to an object of a
 * service that was there before, so that its absence means Restarted rather than NoService. doing: "Opening
 * a session". */
int error_bus(latent_error *e, int r, const sd_bus_error *b, bool to_object, const char *doing);
