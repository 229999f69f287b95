/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of an audio VAE, as far as it is about the network: what shapes do not say is taken from it,
 * what they say is compared. */

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "service/h3/audio-vae-private.h"
#include "service/shared/cleanup.h"

#define SAMPLE_RATE 32000
#define HEADS 8
#define HEADS_MAX 1024

static const uint32_t dilations[H3_AUDIO_DILATIONS] = {1, 3, 5};

/* Of the released model (h3.md 6.4). */
static const float released_mean[] = {-0.020211687488382354f, 0.3876466479950502f, -0.04398279799186767f,
        -0.28591514936373f, 0.08179686214561671f, -0.35782641352446604f, 0.040623809960919084f,
        -0.01552534501956604f, -0.223362481667332f, 0.1821006842509091f, 0.2941778783780663f,
        -0.07901167601970885f, -0.056815072777201f, -0.3699028221860095f, -0.31616315591624855f,
        0.5905951377425391f, -0.052139568068853864f, 0.013673160263486295f, -0.03691647864630577f,
        0.09732660653298163f, -0.3394662328788498f, -0.30685677538541667f, -0.24504598907458763f,
        -0.034698524462007344f, 0.02868032184767538f, -0.21217779266454084f, -0.1678263169941987f,
        0.3221287889040614f, -0.1223055851554907f, 0.4356604928128464f, -0.0502599202236253f,
        0.3979258376211797f};
static const float released_std[] = {1.6895524230479284f, 2.76263727217653f, 1.7945344281264435f,
        1.6801681847309828f, 1.6390226546605453f, 2.7788298348882177f, 1.7659090095747236f,
        1.6199757612137327f, 2.6336525640336896f, 1.8539356672817833f, 2.5056497896915633f,
        1.811019237886178f, 1.9579657790720237f, 1.6685498243529284f, 1.4922469314453364f,
        3.298670198067373f, 1.9491804496832168f, 1.8720003270431442f, 1.8334080103291832f,
        1.6488070416529093f, 1.6176957696319716f, 1.9131449234774398f, 1.5695245398428617f,
        1.6943659940415912f, 1.8318420762504692f, 1.5540637421583379f, 1.9344930328968526f,
        1.599198216109855f, 1.718045989838149f, 1.6307219190837705f, 1.8661226051202384f,
        1.5613768203168363f};

static void json_unref(json_t **j) {
        json_decref(*j);
}

/* A whole number of 1 to max; 0 if it is something else. */
static uint32_t whole(const json_t *v, uint32_t max) {
        json_int_t n = json_is_integer(v) ? json_integer_value(v) : 0;

        return n >= 1 && n <= (json_int_t) max ? (uint32_t) n : 0;
}

static void compare(const json_t *root, const char *key, uint32_t is, H3List *wrong) {
        const json_t *v = json_object_get(root, key);

        if (v && is > 0 && whole(v, UINT32_MAX) != is)
                h3_list_add(wrong, "config.json's %s (the tensors say %u)", key, is);
}

/* n numbers that must be equal to those of the shapes. */
static void compare_list(
        const json_t *root, const char *key, const uint32_t *is, uint32_t n, H3List *wrong) {
        const json_t *v = json_object_get(root, key);
        bool same = json_is_array(v) && json_array_size(v) == n;

        if (!v || n == 0)
                return;
        for (uint32_t i = 0; same && i < n; i++)
                same = whole(json_array_get(v, i), UINT32_MAX) == is[i];
        if (!same)
                h3_list_add(wrong, "config.json's %s (the tensors say %u values, the first one %u)", key, n,
                        is[0]);
}

/* The rate of a transposed convolution: half its kernel, rounded up, unless config.json says otherwise. The
 * result is as long as the rate says if the difference of the two is even. */
static void read_rates(const json_t *root, H3AudioConfig *c, H3List *wrong) {
        const json_t *v = json_object_get(root, "decoder_rates");
        bool counted = !v || json_array_size(v) == c->decoder_stages;

        if (!counted)
                h3_list_add(
                        wrong, "config.json's decoder_rates (the tensors say %u values)", c->decoder_stages);
        for (uint32_t i = 0; i < c->decoder_stages; i++) {
                uint32_t kernel = c->decoder_kernels[i], rate = (kernel + 1) / 2;

                if (v && counted && kernel > 0) /* 0: missing, and said to be */
                        rate = whole(json_array_get(v, i), kernel);
                if (kernel > 0 && (rate == 0 || (kernel - rate) % 2 != 0)) {
                        h3_list_add(wrong, "the rate of decoder.ups.%u (kernel %u)", i, kernel);
                        rate = kernel;
                }
                c->decoder_rates[i] = rate > 0 ? rate : 1;
        }
}

static void read_dilations(const json_t *root, H3AudioConfig *c, H3List *wrong) {
        const json_t *v = json_object_get(root, "resblock_dilation_sizes");
        bool good = !v || json_array_size(v) == H3_AUDIO_BLOCKS;

        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++)
                for (uint32_t k = 0; k < H3_AUDIO_DILATIONS; k++) {
                        const json_t *list = json_array_get(v, i);

                        c->block_dilations[i][k] = v ? whole(json_array_get(list, k), 64) : dilations[k];
                        good = good && c->block_dilations[i][k] > 0 &&
                               (!v || json_array_size(list) == H3_AUDIO_DILATIONS);
                }
        if (!good)
                h3_list_add(wrong, "config.json's resblock_dilation_sizes (three lists of three numbers)");
}

static void read_heads(const json_t *root, H3AudioConfig *c, H3List *wrong) {
        const json_t *v = json_object_get(root, "num_attention_heads");
        uint64_t step;

        c->heads = v ? whole(v, HEADS_MAX) : HEADS;
        step = (uint64_t) c->heads * c->channels; /* a head is averaged to `channels` numbers */
        if (c->heads == 0 || c->latent_dim == 0 || c->channels == 0 || c->latent_dim % step != 0 ||
                c->latent_dim / c->heads % 8 != 0 || c->latent_dim / c->heads > 256) {
                h3_list_add(wrong,
                        "%u attention heads of %u numbers (say num_attention_heads in config.json; a head "
                        "has up to 256)",
                        c->heads, c->latent_dim);
                c->heads = 0;
        }
}

/* config.json's, else the file's own (stored, may be NULL), else the released model's. */
static void read_statistics(const json_t *root, const char *key, const float *stored, const float *released,
        bool positive, uint32_t n, float *ret, H3List *wrong) {
        const json_t *v = json_object_get(root, key);
        bool good = v ? json_array_size(v) == n : stored || n == ELEMENTSOF(released_mean);

        for (uint32_t i = 0; i < n && good; i++) {
                const json_t *number = json_array_get(v, i);

                ret[i] = v ? (float) json_number_value(number) : stored ? stored[i] : released[i];
                good = (!v || json_is_number(number)) && isfinite(ret[i]) && (!positive || ret[i] > 0) &&
                       (!stored || h3_statistics_agree(ret[i], stored[i]));
        }
        if (!good && n > 0)
                h3_list_add(wrong, "%s in config.json (expected %u numbers%s%s)", key, n,
                        positive ? " above 0" : "", stored ? ", the file's own" : "");
}

int audio_config_read(const char *json, uint64_t size, const H3Statistics *stored, H3AudioConfig *c, H3List *wrong,
        Fault *f) {
        CLEANUP(json_unref) json_t *root = NULL;
        const json_t *rate;
        json_error_t error = {};

        root = json ? json_loadb(json, size, JSON_REJECT_DUPLICATES, &error) : json_object();
        if (!root || !json_is_object(root))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "config.json is not a JSON object: %s (line %d).",
                        root ? "it is something else" : error.text, root ? 1 : error.line);

        compare(root, "latent_channels", c->channels, wrong);
        compare(root, "latent_dim", c->latent_dim, wrong);
        compare(root, "encoder_dim", c->encoder_dim, wrong);
        compare(root, "decoder_dim", c->decoder_dim, wrong);
        compare_list(root, "encoder_rates", c->encoder_rates, c->encoder_stages, wrong);
        compare_list(root, "decoder_kernel_sizes", c->decoder_kernels, c->decoder_stages, wrong);
        if (c->decoder_stages > 0) {
                compare_list(root, "resblock_kernel_sizes", c->block_kernels, H3_AUDIO_BLOCKS, wrong);
                read_rates(root, c, wrong);
                read_dilations(root, c, wrong);
        }
        if (c->encoder_stages > 0)
                read_heads(root, c, wrong);
        if (stored->n > 0 && stored->n != c->channels)
                h3_list_add(wrong, "latents_mean (%u numbers for %u channels)", stored->n, c->channels);
        read_statistics(root, "latents_mean", stored->n == c->channels ? stored->mean : NULL, released_mean, false,
                c->channels, c->mean, wrong);
        read_statistics(root, "latents_std", stored->n == c->channels ? stored->std : NULL, released_std, true,
                c->channels, c->std, wrong);

        rate = json_object_get(root, "sampling_rate");
        c->sample_rate = rate ? whole(rate, 1000000) : SAMPLE_RATE;
        if (c->sample_rate == 0)
                h3_list_add(wrong, "config.json's sampling_rate");
        return 0;
}
