/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* cublasLt itself, loaded while the driver starts: its half gigabyte has 350,000 places to be relocated and 6,500 functions
 * to be run before main(), a tenth of a second that a program linked with it waits first. */

#include <cublasLt.h>

#define LT_FUNCTIONS(F)                    \
        F(cublasLtCreate)                  \
        F(cublasLtDestroy)                 \
        F(cublasLtGetVersion)              \
        F(cublasLtMatmul)                  \
        F(cublasLtMatmulAlgoCheck)         \
        F(cublasLtMatmulAlgoConfigGetAttribute) \
        F(cublasLtMatmulAlgoConfigSetAttribute) \
        F(cublasLtMatmulAlgoGetHeuristic)  \
        F(cublasLtMatmulAlgoInit)          \
        F(cublasLtMatmulDescCreate)        \
        F(cublasLtMatmulDescDestroy)       \
        F(cublasLtMatmulDescSetAttribute)  \
        F(cublasLtMatmulPreferenceCreate)  \
        F(cublasLtMatmulPreferenceDestroy) \
        F(cublasLtMatmulPreferenceSetAttribute) \
        F(cublasLtMatrixLayoutCreate)      \
        F(cublasLtMatrixLayoutDestroy)

/* Functions by their names in the library's own header. */
typedef struct LtLibrary {
#define LT_MEMBER(name) __typeof__(&(name)) name;
        LT_FUNCTIONS(LT_MEMBER)
#undef LT_MEMBER
} LtLibrary;

extern LtLibrary lt_functions; /* NULLs until they are loaded; then it never changes */

/* By the first call, which others wait for. -ELIBACC: the library is not there, or lacks a function. Any thread. */
int lt_library_load(void);
