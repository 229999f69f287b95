/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that the network does not use as the file has them: weight-norm pairs, transposed convolutions. */

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "service/h3/audio-vae-private.h"
#include "service/h3/number.h"

float *audio_own(H3AudioVae *v, uint64_t n) {
        H3AudioWeights *w = v->weights;
        void **owned;
        float *p;

        owned = realloc(w->owned, (w->n_owned + 1) * sizeof(*owned));
        if (!owned)
                return NULL;
        w->owned = owned;
        if (n > PTRDIFF_MAX / sizeof(float))
                return NULL;
        p = malloc(n * sizeof(float) + 1);
        if (!p)
                return NULL;

        w->owned[w->n_owned++] = p;
        v->private_bytes += n * sizeof(float);
        return p;
}

float *audio_fold(
        H3AudioVae *v, const H3Tensor *g, const H3Tensor *direction, uint64_t rows, uint64_t cols) {
        LkType type = h3_float_type(direction->entry->type), g_type = h3_float_type(g->entry->type);
        float *w = audio_own(v, rows * cols);

        if (!w)
                return NULL;
        for (uint64_t i = 0; i < rows; i++) {
                double sum = 0, factor;

                for (uint64_t j = 0; j < cols; j++) {
                        double d = (double) h3_number(direction->data, type, i * cols + j);

                        sum += d * d;
                }
                factor = (double) h3_number(g->data, g_type, i) / sqrt(sum);
                for (uint64_t j = 0; j < cols; j++)
                        w[i * cols + j] =
                                (float) ((double) h3_number(direction->data, type, i * cols + j) * factor);
        }
        return w;
}

int audio_fold_up(H3AudioVae *v, const void *w, LkType type, const LkVector *bias, uint32_t in,
        uint32_t kernel, AudioStage *s) {
        uint32_t taps = (kernel + s->rate - 1) / s->rate, rows = s->rate * s->channels;
        float *up = audio_own(v, (uint64_t) rows * in * taps), *up_bias = audio_own(v, rows);

        if (!up || !up_bias)
                return -ENOMEM;
        for (uint32_t i = 0; i < rows; i++) {
                uint32_t phase = i / s->channels, out = i % s->channels;

                up_bias[i] = h3_number(bias->data, bias->type, out);
                for (uint32_t k = 0; k < in * taps; k++) {
                        uint32_t tap = phase + s->rate * (taps - 1 - k % taps);
                        uint64_t at = ((uint64_t) (k / taps) * s->channels + out) * kernel + tap;

                        up[(uint64_t) i * in * taps + k] = tap < kernel ? h3_number(w, type, at) : 0;
                }
        }

        s->up = (AudioConv){
                .in = in, .out = rows, .kernel = taps, .stride = 1, .dilation = 1, .pad = taps - 1};
        s->up.w = (LkMatrix){.data = up, .type = LK_F32, .rows = rows, .cols = (uint64_t) in * taps};
        s->up.w.row_stride = s->up.w.cols * sizeof(float);
        s->up.w.block_rows = rows;
        s->up.w.block_stride = rows * s->up.w.row_stride;
        s->up.bias = (LkVector){up_bias, LK_F32, rows};
        return 0;
}
