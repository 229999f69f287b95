/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* An error for a person: the last part of a D-Bus error name and a sentence that says what was wrong, what was
 * expected and what to do. Filled on failure only; `Fault f = {}` is the empty one. */

typedef struct Fault {
        char name[48];   /* "InvalidFile": org.latentd.Latent1.Error.InvalidFile */
        char text[1024]; /* UTF-8, cut at a character boundary */
} Fault;

/* Fills f (may be NULL; a fault that is already filled is kept) and returns error, so that
 * `return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "...")` is one line. Bytes of the text that are not printable
 * UTF-8 are replaced by '?': texts may quote hostile files. */
int fault_set(Fault *f, int error, const char *name, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The complete list of error names. The bus files, liblatent and the XML use these and no others. */
#define FAULT_INVALID_ARGUMENT "InvalidArgument" /* a bus argument: type, range, unknown key */
#define FAULT_INVALID_FILE "InvalidFile"         /* a model file breaks a rule of its format */
#define FAULT_INVALID_MODEL "InvalidModel"       /* files are well formed but not an H3 model: missing, extra, mis-shaped tensors */
#define FAULT_INVALID_TENSOR "InvalidTensor"     /* an input tensor: place, type, shape, NaN or Inf */
#define FAULT_NOT_FOUND "NotFound"               /* model name, file */
#define FAULT_ACCESS_DENIED "AccessDenied"
#define FAULT_NOT_SUPPORTED "NotSupported"       /* of a later version, or of another backend */
#define FAULT_DOES_NOT_FIT "DoesNotFit"          /* memory, with the numbers */
#define FAULT_LIMIT "LimitExceeded"              /* sessions, jobs, arena bytes of a user */
#define FAULT_BUSY "Busy"                        /* in use by a session or an unfinished job */
#define FAULT_CANCELLED "Cancelled"
#define FAULT_WORKER_CRASHED "WorkerCrashed"     /* the step was tried twice */
#define FAULT_NO_WORKER "NoWorker"               /* no worker can be started; State says why */
#define FAULT_RESTARTED "Restarted"              /* the service went away during the job (made by liblatent) */
#define FAULT_IO "IOError"                       /* reading a file failed */
#define FAULT_FILE_CHANGED "FileChanged"         /* a file changed while it was read, or over a restart */
#define FAULT_INTERNAL "Internal"                /* a bug of ours, with errno */
