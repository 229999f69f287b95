/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* latentctl render --plan: what a film would take, for people. */

#include "client/latentctl/ctl.h"

/* plan: of latent_session_plan_render(). */
void render_plan_print(const latent_value *plan);
