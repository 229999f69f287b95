/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/lt-library.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

#define TEXT(x) #x
#define SONAME(major) "libcublasLt.so." TEXT(major)

static pthread_once_t once = PTHREAD_ONCE_INIT;
LtLibrary lt_functions;
static bool complete;

static pthread_t loader; /* these two are of whoever started it */
static bool loading;

/* Where every library is looked for, then in the toolkit that this was built with. */
static void load(void) {
        void *handle = dlopen(SONAME(CUBLAS_VER_MAJOR), RTLD_LAZY | RTLD_LOCAL);

        if (!handle)
                handle = dlopen(LK_CUDA_LIBRARIES "/" SONAME(CUBLAS_VER_MAJOR), RTLD_LAZY | RTLD_LOCAL);
        if (!handle)
                return;
        complete = true;
#define FIND(name)                                                                           \
        {                                                                                    \
                void *p = dlsym(handle, #name);                                              \
                memcpy(&lt_functions.name, &p, sizeof(p)); /* C has no cast from data to a function */ \
                complete = complete && p;                                                    \
        }
        LT_FUNCTIONS(FIND)
#undef FIND
}

int lt_library_load(void) {
        (void) pthread_once(&once, load);
        return complete ? 0 : -ELIBACC;
}

static void *load_thread(void *userdata) {
        (void) lt_library_load();
        return NULL;
}

void lk_cuda_load_libraries(void) {
        loading = pthread_create(&loader, NULL, load_thread, NULL) == 0;
}

void lk_cuda_await_libraries(void) {
        if (loading)
                (void) pthread_join(loader, NULL);
        loading = false;
}
