/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/gpu-names.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SEPARATORS " \t,"
#define NAME_MAX_SIZE 64u

bool gpu_is_named(const char *name, const WireDevice *d, uint32_t number) {
        char *end;

        if (isdigit((unsigned char) name[0]) && strlen(name) < 4 && strtoul(name, &end, 10) == number && *end == '\0')
                return true;

        return name[0] != '\0' && (strcasecmp(name, d->uuid) == 0 || strcasecmp(name, d->pci_address) == 0);
}

bool gpu_is_listed(const char *list, const WireDevice *d, uint32_t number) {
        for (const char *s = list ? list + strspn(list, SEPARATORS) : ""; *s != '\0'; s += strspn(s, SEPARATORS)) {
                size_t word = strcspn(s, SEPARATORS), n = strcspn(s, SEPARATORS "=");
                char name[NAME_MAX_SIZE] = "";

                if (n < sizeof(name)) { /* longer ones name nothing */
                        memcpy(name, s, n);
                        if (gpu_is_named(name, d, number))
                                return true;
                }
                s += word;
        }
        return false;
}

bool gpu_is_left_out(const WireDevice *d, uint32_t number) {
        const char *list = secure_getenv(GPU_NAMES_VARIABLE);

        return (list && list[0] != '\0' && !gpu_is_listed(list, d, number)) ||
               gpu_is_listed(secure_getenv(GPU_NAMES_EXCLUDE_VARIABLE), d, number);
}

int gpu_names_refuse(uint32_t n, Fault *f) {
        return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED,
                "None of the %" PRIu32 " GPUs that are there may be used: look at Gpus=, GpusExclude= and GpuMinFree= of "
                "latentd.conf, and LATENTD_IGNORE.",
                n);
}
