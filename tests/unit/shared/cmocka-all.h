/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* CMocka with what it wants included in front of it. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
