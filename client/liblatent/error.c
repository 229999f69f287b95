/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* The size is part of the interface. */
_Static_assert(sizeof(latent_error) == 1088, "public layout changed");
_Static_assert(sizeof(((latent_error *) NULL)->text) >= sizeof(((Fault *) NULL)->text), "a fault must fit");
_Static_assert(sizeof(((latent_error *) NULL)->name) >= sizeof(((Fault *) NULL)->name), "a fault must fit");

static const struct {
        const char *name;
        int code;
} error_table[] = {
        {LATENT_ERROR_INVALID_ARGUMENT, -EINVAL},
        {LATENT_ERROR_INVALID_FILE, -EBADMSG},
        {LATENT_ERROR_INVALID_MODEL, -EBADMSG},
        {LATENT_ERROR_INVALID_TENSOR, -EINVAL},
        {LATENT_ERROR_NOT_FOUND, -ENOENT},
        {LATENT_ERROR_ACCESS_DENIED, -EACCES},
        {LATENT_ERROR_NOT_SUPPORTED, -EOPNOTSUPP},
        {LATENT_ERROR_DOES_NOT_FIT, -ENOMEM},
        {LATENT_ERROR_LIMIT_EXCEEDED, -EDQUOT},
        {LATENT_ERROR_BUSY, -EBUSY},
        {LATENT_ERROR_CANCELLED, -ECANCELED},
        {LATENT_ERROR_WORKER_CRASHED, -ENOTRECOVERABLE},
        {LATENT_ERROR_NO_WORKER, -ENODEV},
        {LATENT_ERROR_RESTARTED, -ECONNRESET},
        {LATENT_ERROR_IO, -EIO},
        {LATENT_ERROR_FILE_CHANGED, -ESTALE},
        {LATENT_ERROR_INTERNAL, -EPROTO},
        {LATENT_ERROR_NO_SERVICE, -ENOTCONN},
};

/* Errors of the bus itself. There are more that mean "cannot be started": see is_start_error(). */
static const struct {
        const char *bus_name, *name;
} bus_table[] = {
        {SD_BUS_ERROR_UNKNOWN_OBJECT, LATENT_ERROR_NOT_FOUND},
        {SD_BUS_ERROR_UNKNOWN_METHOD, LATENT_ERROR_NOT_SUPPORTED},
        {SD_BUS_ERROR_UNKNOWN_INTERFACE, LATENT_ERROR_NOT_SUPPORTED},
        {SD_BUS_ERROR_UNKNOWN_PROPERTY, LATENT_ERROR_NOT_SUPPORTED},
        {SD_BUS_ERROR_ACCESS_DENIED, LATENT_ERROR_ACCESS_DENIED},
        {SD_BUS_ERROR_INTERACTIVE_AUTHORIZATION_REQUIRED, LATENT_ERROR_ACCESS_DENIED},
        {SD_BUS_ERROR_LIMITS_EXCEEDED, LATENT_ERROR_LIMIT_EXCEEDED},
        {SD_BUS_ERROR_INVALID_ARGS, LATENT_ERROR_INVALID_ARGUMENT},
        {SD_BUS_ERROR_NO_MEMORY, LATENT_ERROR_INTERNAL},
};

int error_code(const char *name) {
        for (size_t i = 0; i < ELEMENTSOF(error_table); i++)
                if (strcmp(error_table[i].name, name) == 0)
                        return error_table[i].code;

        return -EPROTO;
}

int error_fault(latent_error *e, int code, const Fault *f) {
        if (e) {
                *e = (latent_error){.code = code};
                (void) snprintf(e->name, sizeof(e->name), "%s",
                        f->name[0] != '\0' ? f->name : LATENT_ERROR_INTERNAL);
                (void) snprintf(
                        e->text, sizeof(e->text), "%s", f->text[0] != '\0' ? f->text : strerror(-code));
        }

        return code;
}

int error_set(latent_error *e, int code, const char *name, const char *format, ...) {
        char text[sizeof(((Fault *) NULL)->text)];
        Fault f = {};
        va_list ap;

        if (!e)
                return code;

        va_start(ap, format);
        (void) vsnprintf(text, sizeof(text), format, ap);
        va_end(ap);

        (void) fault_set(&f, code, name, "%s", text);
        return error_fault(e, code, &f);
}

int error_errno(latent_error *e, int code, const char *doing) {
        return error_set(e, code, LATENT_ERROR_INTERNAL, "%s failed: %s.", doing, strerror(-code));
}

/* The service cannot be reached: nobody has the name and nobody could be started. */
static bool is_start_error(const char *name) {
        return strcmp(name, SD_BUS_ERROR_SERVICE_UNKNOWN) == 0 ||
               strcmp(name, SD_BUS_ERROR_NAME_HAS_NO_OWNER) == 0 ||
               strncmp(name, "org.freedesktop.DBus.Error.Spawn.", 33) == 0 ||
               strncmp(name, "org.freedesktop.systemd1.", 25) == 0;
}

static bool is_connection_error(int r) {
        return r == -ENOTCONN || r == -ECONNRESET || r == -EPIPE || r == -ESHUTDOWN || r == -ECONNREFUSED;
}

static int error_restarted(latent_error *e, const char *doing) {
        return error_set(e, -ECONNRESET, LATENT_ERROR_RESTARTED,
                "%s failed: the service went away (it stopped, crashed or was restarted). Sessions, jobs "
                "and "
                "private models are gone; open them again.",
                doing);
}

int error_bus(latent_error *e, int r, const sd_bus_error *b, bool to_object, const char *doing) {
        const char *name = b && b->name ? b->name : "", *text = b && b->message ? b->message : strerror(-r);

        if (strncmp(name, BUS_ERROR_PREFIX, sizeof(BUS_ERROR_PREFIX) - 1) == 0) {
                name += sizeof(BUS_ERROR_PREFIX) - 1;
                return error_set(e, error_code(name), name, "%s", text);
        }

        /* The bus says NoReply when the service leaves while we wait; sd-bus makes that ETIMEDOUT too. */
        if (strcmp(name, SD_BUS_ERROR_NO_REPLY) == 0)
                return error_restarted(e, doing);

        if (r == -ETIMEDOUT || strcmp(name, SD_BUS_ERROR_TIMEOUT) == 0)
                return error_set(e, -ETIMEDOUT, LATENT_ERROR_IO,
                        "%s failed: the service did not answer in time. See its log: journalctl -u latentd.",
                        doing);

        if (is_start_error(name) || is_connection_error(r)) {
                if (to_object)
                        return error_restarted(e, doing);
                return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE,
                        "%s failed: the service is not reachable: %s", doing, text);
        }

        for (size_t i = 0; i < ELEMENTSOF(bus_table); i++)
                if (strcmp(bus_table[i].bus_name, name) == 0)
                        return error_set(e, error_code(bus_table[i].name), bus_table[i].name,
                                "%s failed: %s", doing, text);

        return error_set(e, r < 0 ? r : -EPROTO, LATENT_ERROR_INTERNAL, "%s failed: %s", doing, text);
}
