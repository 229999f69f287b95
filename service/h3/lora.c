/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/lora.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/lora-private.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

#define RANK_MAX 65536u
#define TENSORS_MAX 16384u /* three for each module of fifty blocks are 1500 */

DEFINE_CLEANUP(H3Lora *, h3_lora_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

static int no_memory(Fault *f) {
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "No memory for the adapter's tables; free some and try again.");
}

/* The module of that name; tensors come in the order of names, but other keys may lie between a module's. */
static LoraModule *module_of(H3Lora *l, const char *key, size_t n) {
        LoraModule *m;

        for (size_t i = l->n_modules; i-- > 0;)
                if (strncmp(l->modules[i].name, key, n) == 0 && l->modules[i].name[n] == '\0')
                        return l->modules + i;
        m = l->modules + l->n_modules;
        m->name = strndup(key, n);
        if (!m->name)
                return NULL;
        m->target = lora_target_parse(m->name);
        l->n_modules++;
        return m;
}

static int take_key(H3Lora *l, const H3Tensor *t, Fault *f) {
        const H3Tensor **place;
        LoraModule *m;
        bool named;
        size_t n;
        LoraRole role = lora_key_split(t->entry->name, &n, &named);

        m = module_of(l, t->entry->name, n);
        if (!m)
                return no_memory(f);
        if (role == LORA_OTHER) {
                m->other = t->entry->name;
                return 0;
        }
        m->named_adapter = m->named_adapter || named;
        place = role == LORA_A ? &m->a : role == LORA_B ? &m->b : &m->alpha;
        if (*place)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "%.200s has two keys for one matrix of an adapter: %.200s and %.200s.", t->file,
                        (*place)->entry->name, t->entry->name);
        *place = t;
        return 0;
}

static bool is_pair(const LoraModule *m) {
        return m->a && m->b && !m->other;
}

/* Whether both change one matrix; q, k and v are parts of qkv. */
static bool is_same_target(const LoraTarget *x, const LoraTarget *y) {
        bool x_third = x->part == LORA_Q || x->part == LORA_K || x->part == LORA_V;
        bool y_third = y->part == LORA_Q || y->part == LORA_K || y->part == LORA_V;

        return x->part != LORA_NONE && x->refiner == y->refiner && x->layer == y->layer &&
               (x->part == y->part || (x->part == LORA_QKV && y_third) || (y->part == LORA_QKV && x_third));
}

/* Names of one module in two spellings are two modules here: merged both, they would change it twice. */
static void find_twins(H3Lora *l) {
        for (size_t i = 1; i < l->n_modules; i++) {
                LoraModule *m = l->modules + i;

                for (size_t k = 0; k < i && is_pair(m) && !m->twin; k++)
                        if (is_pair(l->modules + k) && is_same_target(&m->target, &l->modules[k].target))
                                m->twin = l->modules + k;
        }
}

/* Whole output heads beside the pairs: a bank of them (PDD, h3.md 1.13). The pairs alone would make another
 * film than they were trained for, so they are not merged without it. */
static int check_head_bank(const H3Lora *l, const char *file, Fault *f) {
        for (size_t i = 0; i < l->n_modules; i++) {
                const LoraModule *m = l->modules + i;
                const char *suffix = m->other ? m->other + strlen(m->name) : "";

                if ((m->target.part != LORA_VIDEO_OUT && m->target.part != LORA_AUDIO_OUT) ||
                        (strcmp(suffix, ".weight") != 0 && strcmp(suffix, ".bias") != 0))
                        continue;
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%.200s: %.200s is of a bank of output heads (PDD), which this version does not "
                        "run. "
                        "Use an adapter without one.",
                        file, m->other);
        }
        return 0;
}

static int read_alpha(H3Lora *l, Fault *f) {
        l->alpha = NAN;
        for (size_t i = 0; i < l->set->n_headers; i++) {
                const char *text = st_header_meta(l->set->headers[i], "alpha");
                char *end;

                if (!text)
                        continue;
                l->alpha = strtod(text, &end);
                if (end == text || *end != '\0' || !isfinite(l->alpha) || l->alpha <= 0)
                        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                                "The adapter's metadata say alpha = \"%.50s\"; expected a number above 0.",
                                text);
        }
        return 0;
}

bool h3_lora_recognises(const H3File *files, size_t n_files) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        Fault ignored = {};

        if (h3_tensor_set_new(files, n_files, &s, &ignored) < 0)
                return false;
        for (size_t i = 0; i < s->n_tensors; i++) {
                size_t n;
                bool named;
                LoraRole role = lora_key_split(s->tensors[i].entry->name, &n, &named);

                if (role == LORA_A || role == LORA_B)
                        return true;
        }
        return false;
}

void h3_lora_describe(const H3Lora *l, H3LoraInfo *ret) {
        const H3TensorSet *s = l->set;
        size_t n = 0;

        *ret = (H3LoraInfo){.n_tensors = (uint32_t) s->n_tensors,
                .private_bytes = sizeof(*l) + s->n_tensors * (sizeof(*l->modules) + sizeof(*s->tensors))};
        for (size_t i = 0; i < s->n_tensors; i++)
                ret->weight_bytes += s->tensors[i].entry->size;
        for (StType t = 0; t < ST_TYPE_MAX; t++) {
                bool there = false;

                for (size_t i = 0; i < s->n_tensors && !there; i++)
                        there = s->tensors[i].entry->type == t;
                if (there && n < sizeof(ret->types))
                        n += (size_t) snprintf(ret->types + n, sizeof(ret->types) - n, "%s%s", n ? ", " : "",
                                st_type_name(t));
        }
}

int h3_lora_open(const H3File *files, size_t n_files, const H3LoraOptions *options, H3Lora **ret, Fault *f) {
        CLEANUP(h3_lora_freep) H3Lora *l = NULL;
        size_t pairs = 0;
        int r;

        l = calloc(1, sizeof(*l));
        if (!l)
                return no_memory(f);
        l->qkv_order = options ? options->qkv_order : H3_QKV_AUTO;
        if (l->qkv_order == H3_QKV_SPLIT)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The QKV order of an adapter is auto, interleaved or stacked.");
        r = h3_tensor_set_new(files, n_files, &l->set, f);
        if (r < 0)
                return r;
        if (l->set->n_tensors > TENSORS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The adapter has %zu tensors; expected at most %u.", l->set->n_tensors, TENSORS_MAX);
        l->modules = calloc(l->set->n_tensors ? l->set->n_tensors : 1, sizeof(*l->modules));
        if (!l->modules)
                return no_memory(f);
        for (size_t i = 0; i < l->set->n_tensors; i++) {
                r = take_key(l, l->set->tensors + i, f);
                if (r < 0)
                        return r;
        }
        find_twins(l);
        for (size_t i = 0; i < l->n_modules; i++)
                pairs += l->modules[i].a && l->modules[i].b;
        if (pairs == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "%.200s is no LoRA: it has no pair of keys ending in .lora_A.weight and "
                        ".lora_B.weight (or "
                        ".lora_down.weight and .lora_up.weight).",
                        n_files > 0 ? files[0].name : "The file");
        r = check_head_bank(l, files[0].name, f);
        if (r >= 0)
                r = read_alpha(l, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(l);
        return 0;
}

H3Lora *h3_lora_free(H3Lora *l) {
        if (!l)
                return NULL;
        for (size_t i = 0; i < l->n_modules; i++)
                free(l->modules[i].name);
        free(l->modules);
        (void) h3_tensor_set_free(l->set);
        free(l);
        return NULL;
}

H3LoraReport *h3_lora_report_free(H3LoraReport *r) {
        if (!r)
                return NULL;
        free(r->applied);
        free(r->refused);
        free(r);
        return NULL;
}

__attribute__((format(printf, 3, 4))) static void note(
        H3LoraNote *n, const char *name, const char *format, ...) {
        va_list ap;

        (void) snprintf(n->name, sizeof(n->name), "%.159s", name);
        va_start(ap, format);
        (void) vsnprintf(n->reason, sizeof(n->reason), format, ap);
        va_end(ap);
}

static LoraSlot whole(LkMatrix *m, uint64_t first) {
        return (LoraSlot){.matrix = m, .first = first, .block_rows = m->rows, .block_step = m->rows};
}

static size_t qkv_slots(H3Attention *a, const H3Config *c, bool interleaved, LoraSlot *ret) {
        LkMatrix *parts[] = {&a->q, &a->k, &a->v};

        for (uint64_t i = 0; i < 3; i++) {
                ret[i] = whole(parts[i], i * c->inner);
                if (interleaved)
                        ret[i] = (LoraSlot){parts[i], i * c->head_dim, c->head_dim, 3ull * c->head_dim};
        }
        return 3;
}

size_t lora_slots(H3Model *m, const LoraTarget *t, bool interleaved, LoraSlot *ret) {
        LkMatrix *ends[] = {[LORA_VIDEO_IN] = &m->video_in,
                [LORA_AUDIO_IN] = &m->audio_in,
                [LORA_TEXT_IN] = &m->text_in,
                [LORA_TIME_1] = &m->time_1,
                [LORA_TIME_2] = &m->time_2,
                [LORA_FINAL_ADALN] = &m->final_adaln,
                [LORA_VIDEO_OUT] = &m->video_out,
                [LORA_AUDIO_OUT] = &m->audio_out};
        LkMatrix *one = t->part > LORA_ADALN ? ends[t->part] : NULL;
        H3Block *b;

        if (!one) {
                if (t->part == LORA_NONE ||
                        t->layer >= (t->refiner ? m->config.refiner_layers : m->config.layers))
                        return 0;
                b = (t->refiner ? m->refiner : m->blocks) + t->layer;
                if (t->part == LORA_QKV)
                        return qkv_slots(&b->attn, &m->config, interleaved, ret);
                if (t->part == LORA_FC1) {
                        ret[0] = whole(&b->mlp.gate, t->diffusers ? m->config.ffn : 0);
                        ret[1] = whole(&b->mlp.up, t->diffusers ? 0 : m->config.ffn);
                        return 2;
                }
                one = t->part == LORA_Q     ? &b->attn.q
                      : t->part == LORA_K   ? &b->attn.k
                      : t->part == LORA_V   ? &b->attn.v
                      : t->part == LORA_OUT ? &b->attn.out
                      : t->part == LORA_FC2 ? &b->mlp.down
                                            : &b->adaln;
        }
        if (!one->data)
                return 0;
        ret[0] = whole(one, 0);
        return 1;
}

static bool is_matrix(const H3Tensor *t) {
        return h3_is_float(t->entry->type) && t->entry->n_dims == 2;
}

/* Why a module cannot be merged, into ret->reason; "" if it can. */
static void judge(const H3Lora *l, const LoraModule *k, const H3Model *m, const LoraSlot *slots, size_t n,
        H3LoraNote *ret) {
        uint64_t rows = 0, rank, cols;
        bool adaln = k->target.part == LORA_ADALN || k->target.part == LORA_FINAL_ADALN;
        bool time = k->target.part == LORA_TIME_1 || k->target.part == LORA_TIME_2;

        note(ret, k->name, "%s", "");
        if (k->other)
                return note(ret, k->name, "%.100s is of an adapter kind that is not merged here", k->other);
        if (!k->a || !k->b)
                return note(
                        ret, k->name, "%s is missing", k->a ? "the B (up) matrix" : "the A (down) matrix");
        if (k->twin)
                return note(ret, k->name, "the adapter changes that matrix as %.100s already", k->twin->name);
        if (time && m->curve.data)
                return note(ret, k->name, "the model has a curve instead of a time embedder");
        if (n == 0)
                return note(ret, k->name, "the model has no such matrix");
        if (!is_matrix(k->a) || !is_matrix(k->b))
                return note(ret, k->name, "its matrices must be F32, BF16 or F16 with 2 dimensions");

        for (size_t i = 0; i < n; i++)
                rows += slots[i].matrix->rows;
        cols = slots[0].matrix->cols;
        rank = k->a->entry->shape[0];
        if (adaln && m->curve.data && k->a->entry->shape[1] != cols)
                return note(ret, k->name,
                        "made for the full model's AdaLN (%" PRIu64
                        " inputs); this model has a curve of rank %" PRIu64,
                        k->a->entry->shape[1], cols);
        if (rank < 1 || rank > RANK_MAX || k->b->entry->shape[1] != rank || k->a->entry->shape[1] != cols ||
                k->b->entry->shape[0] != rows)
                return note(ret, k->name,
                        "A is [%" PRIu64 ", %" PRIu64 "] and B [%" PRIu64 ", %" PRIu64
                        "]; the matrix is [%" PRIu64 ", %" PRIu64 "]",
                        rank, k->a->entry->shape[1], k->b->entry->shape[0], k->b->entry->shape[1], rows,
                        cols);
        if (k->alpha && (!h3_is_float(k->alpha->entry->type) ||
                                k->alpha->entry->size != st_type_size(k->alpha->entry->type)))
                note(ret, k->name, "its alpha is not one number of F32, BF16 or F16");
}

static float factor_of(const H3Lora *l, const LoraModule *k, double strength) {
        double rank = (double) k->a->entry->shape[0];
        double alpha = k->alpha ? (double) h3_number(k->alpha->data, h3_float_type(k->alpha->entry->type), 0)
                       : isnan(l->alpha) ? rank
                                         : l->alpha;

        return (float) (strength * (alpha / rank));
}

typedef struct Plan {
        H3Model *model;
        LoraDelta *deltas;
        size_t n_deltas;
        H3LoraReport *report;
} Plan;

static int plan_module(Plan *p, uint32_t index, const H3LoraUse *use, const LoraModule *k, Fault *f) {
        const H3Lora *l = use->lora;
        bool interleaved =
                l->qkv_order == H3_QKV_INTERLEAVED || (l->qkv_order == H3_QKV_AUTO && k->named_adapter);
        H3LoraNote ruling = {.lora = index};
        LoraSlot slots[LORA_SLOTS_MAX];
        size_t n = lora_slots(p->model, &k->target, interleaved, slots);
        float factor;

        judge(l, k, p->model, slots, n, &ruling);
        if (ruling.reason[0] != '\0') {
                p->report->refused[p->report->n_refused++] = ruling;
                return 0;
        }
        factor = factor_of(l, k, use->strength);
        if (!isfinite(factor))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The alpha of module %.200s is not finite.", k->name);
        for (size_t i = 0; i < n && use->strength != 0; i++) {
                p->deltas[p->n_deltas] = (LoraDelta){
                        .slot = slots[i], .index = i, .module = k, .factor = factor, .order = p->n_deltas};
                p->n_deltas++;
        }
        p->report->applied[p->report->n_applied++] = ruling;
        return 0;
}

static int plan_use(Plan *p, uint32_t index, const H3LoraUse *use, Fault *f) {
        size_t applied = p->report->n_applied, refused = p->report->n_refused;

        if (!isfinite(use->strength) || fabs(use->strength) > H3_LORA_STRENGTH_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The strength of adapter %u is %g; expected a number from -%g to %g.", index,
                        use->strength, H3_LORA_STRENGTH_MAX, H3_LORA_STRENGTH_MAX);
        for (size_t i = 0; i < use->lora->n_modules; i++) {
                int r = plan_module(p, index, use, use->lora->modules + i, f);

                if (r < 0)
                        return r;
        }
        if (p->report->n_applied > applied)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "Nothing of adapter %u applies to this model. %zu modules are refused; the first, %.150s: "
                "%.150s.",
                index, p->report->n_refused - refused, p->report->refused[refused].name,
                p->report->refused[refused].reason);
}

static int compare_deltas(const void *x, const void *y) {
        const LoraDelta *a = x, *b = y;

        if (a->slot.matrix != b->slot.matrix)
                return a->slot.matrix < b->slot.matrix ? -1 : 1;
        return a->order < b->order ? -1 : a->order > b->order;
}

static void plan_done(Plan *p) {
        (void) h3_model_free(p->model);
        free(p->deltas);
        (void) h3_lora_report_free(p->report);
}

/* What is to be merged, by matrix; nothing is merged yet. The caller calls plan_done(), also on failure. */
static int plan_uses(const H3Model *base, const H3LoraUse *uses, size_t n_uses, Plan *p, Fault *f) {
        size_t modules = 1;
        int r;

        for (size_t i = 0; i < n_uses; i++)
                modules += uses[i].lora->n_modules;
        p->model = h3_model_copy(base);
        p->report = calloc(1, sizeof(*p->report));
        p->deltas = calloc(3 * modules, sizeof(*p->deltas));
        if (!p->model || !p->report || !p->deltas)
                return no_memory(f);
        p->report->applied = calloc(modules, sizeof(*p->report->applied));
        p->report->refused = calloc(modules, sizeof(*p->report->refused));
        if (!p->report->applied || !p->report->refused)
                return no_memory(f);

        for (size_t i = 0; i < n_uses; i++) {
                r = plan_use(p, (uint32_t) i, uses + i, f);
                if (r < 0)
                        return r;
        }
        qsort(p->deltas, p->n_deltas, sizeof(*p->deltas), compare_deltas);
        return 0;
}

/* Deltas from `first` on that are of the same matrix. */
static size_t count_equal(const Plan *p, size_t first) {
        size_t n = 1;

        while (first + n < p->n_deltas && p->deltas[first + n].slot.matrix == p->deltas[first].slot.matrix)
                n++;
        return n;
}

int h3_lora_memory(const H3Model *base, const H3LoraUse *uses, size_t n_uses, H3Compute compute,
        uint64_t *ret_bytes, uint64_t *ret_kept, Fault *f) {
        CLEANUP(plan_done) Plan p = {};
        uint64_t all = 0, largest = 0;
        int r;

        r = plan_uses(base, uses, n_uses, &p, f);
        if (r < 0)
                return r;
        for (size_t i = 0, n; i < p.n_deltas; i += n) {
                uint64_t kept, work;

                n = count_equal(&p, i);
                r = lora_merge_size(p.deltas + i, n, compute, &kept, &work);
                if (r < 0 || __builtin_add_overflow(all, kept, &all))
                        return fault_set(f, -EOVERFLOW, FAULT_DOES_NOT_FIT,
                                "The merged copies have more bytes than can be counted.");
                largest = work > largest ? work : largest;
        }
        *ret_bytes = all + largest;
        *ret_kept = all;
        return 0;
}

int h3_model_with_loras(const H3Model *base, const H3LoraUse *uses, size_t n_uses, H3Compute compute,
        const LkOps *ops, LkContext *context, H3Weights *weights, H3Model **ret, H3LoraReport **ret_report,
        Fault *f) {
        const H3Rank rank = {.ops = ops, .context = context, .weights = weights};
        CLEANUP(plan_done) Plan p = {};
        int r;

        r = plan_uses(base, uses, n_uses, &p, f);
        if (r < 0)
                return r;
        for (size_t i = 0, n; i < p.n_deltas; i += n) {
                n = count_equal(&p, i);
                r = lora_merge(p.model, p.deltas + i, n, compute, &rank, f);
                if (r < 0)
                        return r;
        }
        h3_model_note_matrices(p.model);

        *ret = STEAL_PTR(p.model);
        *ret_report = STEAL_PTR(p.report);
        return 0;
}
