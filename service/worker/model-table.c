/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/model-table.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

/* Of a denoiser's first parts: the text's refiner and a block or two. */
#define TOUCH_AHEAD (UINT64_C(2) << 30)

ModelEntry *model_entry_ref(ModelEntry *m) {
        m->n_ref++;
        return m;
}

static void region_done(Region *x) {
        if (x->map)
                (void) munmap(x->map, (size_t) x->region_size);
        ranges_done(&x->registered);
        cleanup_closep(&x->fd);
}

ModelEntry *model_entry_unref(ModelEntry *m) {
        if (!m || --m->n_ref > 0)
                return NULL;

        (void) touch_free(m->touch);
        (void) h3_model_free(m->h3); /* before what its views point to */
        (void) h3_lora_free(m->lora);
        (void) h3_text_free(m->conditioner);
        (void) h3_tokenizer_free(m->tokenizer);
        (void) h3_video_vae_free(m->video_vae);
        (void) h3_audio_vae_free(m->audio_vae);
        for (uint32_t i = 0; i < m->n_regions; i++) {
                if (m->ops && !m->ops->host_weights && m->regions[i].map)
                        m->ops->unpin(m->regions[i].map, m->regions[i].region_size);
                region_done(&m->regions[i]);
        }
        free(m->regions);
        free(m);
        return NULL;
}

DEFINE_CLEANUP(ModelEntry *, model_entry_unref)

static ModelEntry **find_slot(ModelTable *t, uint64_t id) {
        for (size_t i = 0; i < MODELS_MAX; i++)
                if (t->models[i] && t->models[i]->id == id)
                        return &t->models[i];
        return NULL;
}

static ModelEntry **find_free_slot(ModelTable *t) {
        for (size_t i = 0; i < MODELS_MAX; i++)
                if (!t->models[i])
                        return &t->models[i];
        return NULL;
}

static bool is_committed(const ModelEntry *m) {
        return m->h3 || m->lora || m->conditioner || m->video_vae || m->audio_vae;
}

const char *model_entry_kind_name(const ModelEntry *m) {
        static const char *const names[] = {
                [H3_KIND_DENOISER] = "denoiser",
                [H3_KIND_LORA] = "LoRA adapter",
                [H3_KIND_CONDITIONER] = "conditioner",
                [H3_KIND_VIDEO_VAE] = "video VAE",
                [H3_KIND_AUDIO_VAE] = "audio VAE",
        };

        return names[m->summary.kind];
}

ModelEntry *model_table_find(const ModelTable *t, uint64_t id) {
        ModelEntry **slot = find_slot((ModelTable *) t, id);

        return slot && is_committed(*slot) ? *slot : NULL;
}

static int qkv_order_from_wire(uint32_t w, H3QkvOrder *ret) {
        switch (w) {
        case WIRE_QKV_AUTO:
                *ret = H3_QKV_AUTO;
                return 0;
        case WIRE_QKV_INTERLEAVED:
                *ret = H3_QKV_INTERLEAVED;
                return 0;
        case WIRE_QKV_STACKED:
                *ret = H3_QKV_STACKED;
                return 0;
        default:
                return -EPROTO;
        }
}

static const char *qkv_order_to_string(H3QkvOrder o) {
        switch (o) {
        case H3_QKV_SPLIT:
                return "split";
        case H3_QKV_INTERLEAVED:
                return "interleaved";
        case H3_QKV_STACKED:
                return "stacked";
        default:
                return "";
        }
}

int model_table_open(ModelTable *t, const WireModelOpen *w, Fault *f) {
        CLEANUP(model_entry_unrefp) ModelEntry *m = NULL;
        ModelEntry **slot = find_free_slot(t);
        H3QkvOrder order;

        if (find_slot(t, w->header.job))
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "Model %" PRIu64 " is open already.", w->header.job);
        if (!slot)
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "More than %d models are open.", MODELS_MAX);
        if (w->n_files == 0 || w->n_files > MODEL_FILES_MAX)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "MODEL_OPEN announces %" PRIu32 " files, expected 1 to %d.", w->n_files,
                        MODEL_FILES_MAX);
        if (qkv_order_from_wire(w->qkv_order, &order) < 0)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "MODEL_OPEN has the unknown QKV order %" PRIu32 ".", w->qkv_order);
        if (strcmp(w->partition, "") != 0 && strcmp(w->partition, "fl2va") != 0 &&
                strcmp(w->partition, "ref2va") != 0)
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "MODEL_OPEN has the unknown partition \"%s\".",
                        w->partition);

        m = calloc(1, sizeof(*m));
        if (!m)
                return -ENOMEM;
        m->n_ref = 1;
        m->id = w->header.job;
        m->serial = ++t->last_serial;
        m->identity = w->identity;
        m->qkv_order = order;
        m->n_files = w->n_files;
        (void) snprintf(m->partition, sizeof(m->partition), "%s", w->partition);
        m->regions = calloc(w->n_files, sizeof(*m->regions));
        if (!m->regions)
                return -ENOMEM;

        *slot = STEAL_PTR(m);
        return 0;
}

/* Maps a region the way a worker with a GPU must: writable, which is what pinning asks for, and read-only
 * from then on. */
static int map_region(int fd, uint64_t region_size, void **ret) {
        void *map;
        int r;

        r = memfd_check(fd, region_size);
        if (r < 0)
                return r;

        r = memfd_map(fd, region_size, PROT_READ | PROT_WRITE, &map);
        if (r < 0)
                return r;

        if (mprotect(map, (size_t) region_size, PROT_READ) < 0) {
                r = -errno;
                (void) munmap(map, (size_t) region_size);
                return r;
        }

        *ret = map;
        return 0;
}

int model_table_add_region(ModelTable *t, const WireRegion *w, int *fd, Fault *f) {
        ModelEntry **slot = find_slot(t, w->header.job), *m;
        Region *x;
        int r;

        if (!slot || is_committed(*slot))
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "REGION is for model %" PRIu64 ", which is not being opened.", w->header.job);

        m = *slot;
        if (m->n_regions >= m->n_files || w->index != m->n_regions)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "REGION %" PRIu32 " came where %" PRIu32 " of %" PRIu32 " was next.", w->index,
                        m->n_regions, m->n_files);
        if (w->name[0] == '\0' || strchr(w->name, '/'))
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "REGION has a name that is no file name: \"%s\".", w->name);

        x = &m->regions[m->n_regions++];
        *x = (Region){.fd = -EBADF};
        (void) snprintf(x->name, sizeof(x->name), "%s", w->name);
        if (w->size > w->region_size) {
                (void) fault_set(&m->fault, -EINVAL, FAULT_INTERNAL,
                        "The file %s has %" PRIu64 " bytes, its region only %" PRIu64 ".", x->name, w->size,
                        w->region_size);
                return 0;
        }

        r = map_region(*fd, w->region_size, &x->map);
        if (r < 0) {
                (void) fault_set(&m->fault, r, r == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "The region of the file %s (%" PRIu64 " bytes) cannot be used: %s.", x->name,
                        w->region_size, strerror(-r));
                return 0;
        }

        x->fd = STEAL_FD(*fd);
        x->size = w->size;
        x->region_size = w->region_size;
        return 0;
}

static H3Partition partition_of(const ModelEntry *m) {
        return strcmp(m->partition, "fl2va") == 0    ? H3_PARTITION_FL2VA
               : strcmp(m->partition, "ref2va") == 0 ? H3_PARTITION_REF2VA
                                                     : H3_PARTITION_UNKNOWN;
}

static bool is_tokenizer_file(const H3File *file) {
        static const char *const names[] = {"vocab.json", "merges.txt", "tokenizer.json"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                if (strcmp(file->name, names[i]) == 0)
                        return true;
        return false;
}

/* Files that a tokenizer is made of may be left out altogether, but not be wrong. */
static int open_conditioner(ModelEntry *m, const H3File *files, const LkOps *ops, Fault *f) {
        bool has_tokenizer = false;
        int r;

        r = h3_picture_rules_read(files, m->n_files, &m->picture_rules, f);
        if (r >= 0)
                r = h3_text_open(files, m->n_files, ops, &m->conditioner, f);
        for (uint32_t i = 0; i < m->n_files; i++)
                has_tokenizer = has_tokenizer || is_tokenizer_file(files + i);
        if (r < 0 || !has_tokenizer)
                return r;
        r = h3_tokenizer_open(files, m->n_files, &m->tokenizer, f);
        if (r < 0)
                return r;
        if (h3_tokenizer_n_ids(m->tokenizer) > m->conditioner->config.vocab)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The tokenizer has ids up to %" PRIu32 ", the conditioner %" PRIu32
                        " tokens: they do not belong together.",
                        h3_tokenizer_n_ids(m->tokenizer) - 1, m->conditioner->config.vocab);
        return 0;
}

/* A writer of the region may make another file of it meanwhile: then the opener says that this is none of the
 * kind. */
static int open_kind(ModelEntry *m, const H3File *files, const LkOps *ops, Fault *f) {
        const H3ModelOptions options = {.qkv_order = m->qkv_order, .partition = partition_of(m), .ops = ops};
        const H3LoraOptions lora_options = {.qkv_order = m->qkv_order};

        h3_model_summary(files, m->n_files, &m->summary);
        switch (m->summary.kind) {

        case H3_KIND_LORA:
                return h3_lora_open(files, m->n_files, &lora_options, &m->lora, f);

        case H3_KIND_CONDITIONER:
                return open_conditioner(m, files, ops, f);

        case H3_KIND_VIDEO_VAE:
                return h3_video_vae_open(files, m->n_files, ops, &m->video_vae, f);

        case H3_KIND_AUDIO_VAE:
                return h3_audio_vae_open(files, m->n_files, &m->audio_vae, f);

        default:
                return h3_model_open(files, m->n_files, &options, &m->h3, f);
        }
}

static int open_files(ModelEntry *m, const LkOps *ops, Fault *f) {
        CLEANUP_FREE H3File *files = NULL;
        int r;

        if (m->fault.name[0] != '\0') {
                *f = m->fault;
                return -ENODATA;
        }
        if (m->n_regions != m->n_files)
                return fault_set(f, -ENODATA, FAULT_INTERNAL,
                        "The model was committed with %" PRIu32 " of %" PRIu32 " files.", m->n_regions,
                        m->n_files);

        files = calloc(m->n_files, sizeof(*files));
        if (!files)
                return -ENOMEM;
        for (uint32_t i = 0; i < m->n_files; i++)
                files[i] = (H3File){
                        .name = m->regions[i].name, .bytes = m->regions[i].map, .size = m->regions[i].size};

        r = open_kind(m, files, ops, f);
        if (r == -ENOMEM)
                (void) fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for the model's tables (some MB beside its regions).");
        return r;
}

static void describe_lora(const ModelEntry *m, WireModelReady *ret) {
        H3LoraInfo info;

        h3_lora_describe(m->lora, &info);
        ret->kind = WIRE_MODEL_LORA;
        ret->n_tensors = info.n_tensors;
        ret->weight_bytes = info.weight_bytes;
        ret->private_bytes = sizeof(ModelEntry) + m->n_files * sizeof(Region) + info.private_bytes;
        (void) snprintf(ret->layout, sizeof(ret->layout), "lora");
        (void) snprintf(ret->types, sizeof(ret->types), "%s", info.types);
}

static void describe_denoiser(const ModelEntry *m, WireModelReady *ret) {
        const H3Config *c = &m->h3->config;

        ret->kind = WIRE_MODEL_DENOISER;
        ret->layers = c->layers;
        ret->refiner_layers = c->refiner_layers;
        ret->heads = c->heads;
        ret->head_dim = c->head_dim;
        ret->hidden = c->hidden;
        ret->ffn = c->ffn;
        ret->text_dim = c->text_dim;
        ret->gated = m->h3->gated;
        ret->shift_video = m->h3->shift_video;
        ret->shift_audio = m->h3->shift_audio;
        ret->n_tensors = m->h3->n_tensors;
        ret->weight_bytes = m->h3->weight_bytes;
        ret->private_bytes = sizeof(ModelEntry) + m->n_files * sizeof(Region) + sizeof(H3Model) +
                             m->h3->private_bytes +
                             ((uint64_t) c->layers + c->refiner_layers) * sizeof(H3Block);
        (void) snprintf(ret->layout, sizeof(ret->layout), "%s", m->h3->layout);
        (void) snprintf(ret->qkv_order, sizeof(ret->qkv_order), "%s", qkv_order_to_string(m->h3->qkv_order));
        (void) snprintf(ret->types, sizeof(ret->types), "%s", m->h3->types);
        (void) snprintf(ret->support, sizeof(ret->support), "%s", m->h3->support);
        (void) snprintf(ret->warning, sizeof(ret->warning), "%s", m->h3->warning);
}

/* The openers have refused what the backend does not run. Only denoisers make products in int8. */
static void describe_support(uint32_t matrix_types, const LkOps *ops, WireModelReady *ret) {
        const H3Model types = {.matrix_types = matrix_types};
        Fault ignored = {};

        (void) h3_model_support(&types, ops, ret->support, sizeof(ret->support), &ignored);
}

/* What is used of the weights of a conditioner or a VAE is nearly all. */
static void describe_coder(const ModelEntry *m, const LkOps *ops, WireModelReady *ret) {
        ret->n_tensors = m->summary.n_tensors;
        ret->weight_bytes = m->summary.tensor_bytes;
        ret->private_bytes = sizeof(ModelEntry) + m->n_files * sizeof(Region);
        (void) snprintf(ret->types, sizeof(ret->types), "%s", m->summary.types);
        describe_support(m->summary.matrix_types, ops, ret);
}

static void describe_conditioner(const ModelEntry *m, const LkOps *ops, WireModelReady *ret) {
        const H3TextConfig *c = &m->conditioner->config;

        describe_coder(m, ops, ret);
        describe_support(m->conditioner->matrix_types, ops, ret);
        ret->kind = WIRE_MODEL_CONDITIONER;
        ret->layers = c->layers;
        ret->heads = c->heads;
        ret->head_dim = c->head_dim;
        ret->hidden = ret->text_dim = c->hidden;
        ret->ffn = c->ffn;
        ret->weight_bytes = m->conditioner->weight_bytes;
        ret->private_bytes += sizeof(H3TextModel) + c->layers * sizeof(H3TextLayer) +
                              c->vision.depth * sizeof(H3VisionBlockWeights);
        (void) snprintf(ret->layout, sizeof(ret->layout), "%s", m->conditioner->layout);
        (void) snprintf(ret->types, sizeof(ret->types), "%s", m->conditioner->types);
        if (!m->tokenizer)
                (void) snprintf(ret->warning, sizeof(ret->warning),
                        "There is no tokenizer: Tokenize and Encode need one (option tokenizer).");
}

static void describe_video_vae(const ModelEntry *m, const LkOps *ops, WireModelReady *ret) {
        const H3VideoConfig *c = h3_video_vae_config(m->video_vae);

        describe_coder(m, ops, ret);
        ret->kind = WIRE_MODEL_VIDEO_VAE;
        ret->layers = c->layers;
        ret->heads = c->heads;
        ret->head_dim = c->head_dim;
        ret->hidden = c->hidden;
        ret->ffn = c->ffn;
        (void) snprintf(ret->layout, sizeof(ret->layout), "%s", h3_video_vae_layout(m->video_vae));
}

static void describe_audio_vae(const ModelEntry *m, const LkOps *ops, WireModelReady *ret) {
        describe_coder(m, ops, ret);
        ret->kind = WIRE_MODEL_AUDIO_VAE;
        ret->heads = m->audio_vae->config.heads;
        ret->hidden = m->audio_vae->config.latent_dim;
        ret->private_bytes += m->audio_vae->private_bytes;
        (void) snprintf(ret->layout, sizeof(ret->layout), "%s", m->audio_vae->layout);
}

static void describe(const ModelEntry *m, const LkOps *ops, WireModelReady *ret) {
        switch (m->summary.kind) {

        case H3_KIND_LORA:
                describe_lora(m, ret);
                break;

        case H3_KIND_CONDITIONER:
                describe_conditioner(m, ops, ret);
                break;

        case H3_KIND_VIDEO_VAE:
                describe_video_vae(m, ops, ret);
                break;

        case H3_KIND_AUDIO_VAE:
                describe_audio_vae(m, ops, ret);
                break;

        default:
                describe_denoiser(m, ret);
                break;
        }
        (void) snprintf(ret->partition, sizeof(ret->partition), "%s", m->partition);
}

int model_table_commit(ModelTable *t, uint64_t id, const LkOps *ops, WireModelReady *ret, Fault *f) {
        ModelEntry **slot = find_slot(t, id);
        int r;

        if (!slot)
                return fault_set(f, -ENOENT, FAULT_INTERNAL, "Model %" PRIu64 " was not opened.", id);
        if (is_committed(*slot))
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "Model %" PRIu64 " was committed twice.", id);

        (*slot)->ops = ops;
        r = open_files(*slot, ops, f);
        if (r < 0) {
                *slot = model_entry_unref(*slot);
                return r;
        }

        if ((*slot)->h3 && !ops->host_weights)
                (*slot)->touch = touch_begin(&h3_weights_denoiser, (*slot)->h3, TOUCH_AHEAD);
        describe(*slot, ops, ret);
        return 0;
}

uint64_t model_table_close(ModelTable *t, uint64_t id) {
        ModelEntry **slot = find_slot(t, id);
        uint64_t serial;

        if (!slot)
                return 0;
        serial = (*slot)->serial;
        (*slot)->closed = true;
        *slot = model_entry_unref(*slot);
        return serial;
}
