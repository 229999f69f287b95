/* SPDX-License-Identifier: Apache-2.0 */
/* Is cuDNN allowed for the denoiser's attention, and how fast is it? The engine and its knobs are asked for
 * once with the whole shape (all heads, all rows) and then set for every launch: parts of the heads and of
 * the query rows must have the bits of the whole. What cuDNN would choose for each part by itself is tried
 * beside it. bf16, head size 128, [row, head, dim], no mask.
 *
 *     measure-cudnn [LIBRARY]
 *
 * LIBRARY: the libcudnn.so.9 to load; without it the loader's. Headers are needed to build, the library only
 * to run. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cudnn.h>

#include "tests/gpu/attention-case.h"
#include "tests/gpu/device.h"

#define KNOBS_MAX 32
#define PLANS_MAX 160

/* The functions that are used, by their own names. */
#define FUNCTIONS(F)                                                                                        \
        F(cudnnBackendCreateDescriptor)                                                                     \
        F(cudnnBackendDestroyDescriptor) F(cudnnBackendExecute) F(cudnnBackendFinalize)                     \
                F(cudnnBackendGetAttribute) F(cudnnBackendSetAttribute) F(cudnnCreate)                      \
                        F(cudnnGetErrorString) F(cudnnGetLastErrorString) F(cudnnGetVersion)

#define MEMBER(name) __typeof__(name) *name;
static struct { FUNCTIONS(MEMBER) } lib;

/* What decides an engine's kernel. */
typedef struct Pin {
        int64_t engine, values[KNOBS_MAX], knobs;
        cudnnBackendKnobType_t types[KNOBS_MAX];
} Pin;

/* One shape: heads, query rows and keys; the strides are always the whole matrix's. */
typedef struct Plan {
        uint64_t heads, rows, keys;
        cudnnBackendDescriptor_t graph, plan;
        int64_t space;
        Pin pin;
        double build_seconds;
} Plan;

typedef struct Launch {
        const Plan *plan;
        void *q, *k, *v, *o;
} Launch;

static cudnnHandle_t handle;
static void *workspace;
static int64_t workspace_size;

static void good(cudnnStatus_t s, const char *what) {
        char more[512] = "";

        if (s == CUDNN_STATUS_SUCCESS)
                return;
        lib.cudnnGetLastErrorString(more, sizeof(more));
        fprintf(stderr, "%s: %s: %s\n", what, lib.cudnnGetErrorString(s), more);
        exit(1);
}

static void load(const char *path) {
        void *l = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        Dl_info info;

        if (!l) {
                fprintf(stderr, "%s\n", dlerror());
                exit(77);
        }
#define RESOLVE(name)                                                                                       \
        lib.name = (__typeof__(lib.name)) (uintptr_t) dlsym(l, #name);                                      \
        must_be(lib.name, "missing: " #name);
        FUNCTIONS(RESOLVE)
        must_be(dladdr((void *) (uintptr_t) lib.cudnnGetVersion, &info) != 0, "no file");
        printf("# cuDNN %zu\n", lib.cudnnGetVersion());
}

static cudnnBackendDescriptor_t descriptor(cudnnBackendDescriptorType_t type) {
        cudnnBackendDescriptor_t d;

        good(lib.cudnnBackendCreateDescriptor(type, &d), "descriptor");
        return d;
}

static void set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
        cudnnBackendAttributeType_t type, int64_t n, const void *value) {
        good(lib.cudnnBackendSetAttribute(d, name, type, n, value), "attribute");
}

static void finalize(cudnnBackendDescriptor_t d, const char *what) {
        good(lib.cudnnBackendFinalize(d), what);
}

static cudnnBackendDescriptor_t tensor(int64_t id, uint64_t heads, uint64_t rows) {
        const int64_t dims[] = {1, (int64_t) heads, (int64_t) rows, DIM}, align = 16;
        const int64_t strides[] = {(int64_t) (rows * WIDTH), DIM, WIDTH, 1};
        const cudnnDataType_t type = CUDNN_DATA_BFLOAT16;
        cudnnBackendDescriptor_t d = descriptor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);

        set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
        set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
        set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
        set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
        finalize(d, "tensor");
        return d;
}

/* The scale is a number that the host gives with the launch. */
static cudnnBackendDescriptor_t number(int64_t id) {
        const int64_t ones[] = {1, 1, 1, 1}, align = 4;
        const cudnnDataType_t type = CUDNN_DATA_FLOAT;
        const bool by_value = true;
        cudnnBackendDescriptor_t d = descriptor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);

        set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
        set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, ones);
        set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, ones);
        set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
        set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
        set(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
        finalize(d, "scale");
        return d;
}

static void set_device(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name) {
        set(d, name, CUDNN_TYPE_HANDLE, 1, &handle);
}

static cudnnBackendDescriptor_t graph_new(uint64_t heads, uint64_t rows, uint64_t keys) {
        cudnnBackendDescriptor_t q = tensor(1, heads, rows), k = tensor(2, heads, keys),
                                 v = tensor(3, heads, keys), o = tensor(4, heads, rows), scale = number(5);
        cudnnBackendDescriptor_t op = descriptor(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR),
                                 g = descriptor(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);

        set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &q);
        set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &k);
        set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &v);
        set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &o);
        set(op, CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &scale);
        finalize(op, "attention");
        set(g, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &op);
        set_device(g, CUDNN_ATTR_OPERATIONGRAPH_HANDLE);
        finalize(g, "graph");
        return g;
}

static Pin pin_read(cudnnBackendDescriptor_t config) {
        cudnnBackendDescriptor_t engine = descriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR), choices[KNOBS_MAX];
        int64_t n;
        Pin p = {0};

        good(lib.cudnnBackendGetAttribute(
                     config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine),
                "engine");
        good(lib.cudnnBackendGetAttribute(
                     engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &n, &p.engine),
                "index");
        for (int i = 0; i < KNOBS_MAX; i++)
                choices[i] = descriptor(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        good(lib.cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                     CUDNN_TYPE_BACKEND_DESCRIPTOR, KNOBS_MAX, &p.knobs, choices),
                "knobs");
        for (int i = 0; i < p.knobs; i++) {
                good(lib.cudnnBackendGetAttribute(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                             CUDNN_TYPE_KNOB_TYPE, 1, &n, p.types + i),
                        "knob");
                good(lib.cudnnBackendGetAttribute(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE,
                             CUDNN_TYPE_INT64, 1, &n, p.values + i),
                        "value");
        }
        for (int i = 0; i < KNOBS_MAX; i++)
                (void) lib.cudnnBackendDestroyDescriptor(choices[i]);
        return p;
}

static void pin_print(const char *what, const Pin *p) {
        printf("%s: engine %ld", what, p->engine);
        for (int i = 0; i < p->knobs; i++)
                printf(", knob %d = %ld", (int) p->types[i], p->values[i]);
        printf("\n");
}

static bool pin_equal(const Pin *a, const Pin *b) {
        return a->engine == b->engine && a->knobs == b->knobs &&
               memcmp(a->types, b->types, sizeof(a->types)) == 0 &&
               memcmp(a->values, b->values, sizeof(a->values)) == 0;
}

/* Up to `max` configurations, cuDNN's best first. */
static int64_t ask(cudnnBackendDescriptor_t graph, int64_t max, cudnnBackendDescriptor_t *ret) {
        const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
        cudnnBackendDescriptor_t h = descriptor(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        int64_t n = 0;

        set(h, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
        set(h, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
        finalize(h, "heuristics");
        for (int64_t i = 0; i < max; i++)
                ret[i] = descriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        good(lib.cudnnBackendGetAttribute(
                     h, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, max, &n, ret),
                "configurations");
        (void) lib.cudnnBackendDestroyDescriptor(h);
        return n;
}

/* NULL: the engine does not take this graph. */
static cudnnBackendDescriptor_t config_of(cudnnBackendDescriptor_t graph, const Pin *p) {
        cudnnBackendDescriptor_t engine = descriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR),
                                 config = descriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR), choices[KNOBS_MAX];

        set(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
        set(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &p->engine);
        if (lib.cudnnBackendFinalize(engine) != CUDNN_STATUS_SUCCESS)
                return NULL;
        for (int i = 0; i < p->knobs; i++) {
                choices[i] = descriptor(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
                set(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, p->types + i);
                set(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, p->values + i);
                finalize(choices[i], "knob");
        }
        set(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
        set(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, p->knobs, choices);
        return lib.cudnnBackendFinalize(config) == CUDNN_STATUS_SUCCESS ? config : NULL;
}

/* By a pin or by cuDNN's own choice (pin NULL). False: refused. */
static bool plan_init(Plan *p, uint64_t heads, uint64_t rows, uint64_t keys, const Pin *pin) {
        cudnnBackendDescriptor_t config = NULL;
        double begin = now();
        int64_t n;

        *p = (Plan){.heads = heads, .rows = rows, .keys = keys, .graph = graph_new(heads, rows, keys)};
        if (pin)
                config = config_of(p->graph, pin);
        else if (ask(p->graph, 1, &config) != 1)
                config = NULL;
        if (!config)
                return false;
        p->pin = pin_read(config);
        p->plan = descriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_device(p->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
        set(p->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
        finalize(p->plan, "plan");
        good(lib.cudnnBackendGetAttribute(
                     p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n, &p->space),
                "workspace");
        p->build_seconds = now() - begin;
        if (p->space > workspace_size) {
                if (workspace)
                        device_free(workspace);
                workspace = device_new((uint64_t) p->space);
                workspace_size = p->space;
        }
        return true;
}

/* The plan of a shape, built once, as a worker would. NULL: refused. */
static const Plan *plan(uint64_t heads, uint64_t rows, uint64_t keys, const Pin *pin) {
        static Plan plans[2][PLANS_MAX];
        static int used[2];
        Plan *p = plans[!pin];
        int n = used[!pin];

        for (int i = 0; i < n; i++)
                if (p[i].heads == heads && p[i].rows == rows && p[i].keys == keys)
                        return p[i].plan ? p + i : NULL;
        must_be(n < PLANS_MAX, "too many shapes");
        used[!pin]++;
        return plan_init(p + n, heads, rows, keys, pin) ? p + n : NULL;
}

static void launch(void *arg) {
        static float scale = 0.08838834764831845f; /* 1/sqrt(128) */
        static const int64_t ids[] = {1, 2, 3, 4, 5};
        const Launch *l = arg;
        void *pointers[] = {l->q, l->k, l->v, l->o, &scale};
        cudnnBackendDescriptor_t pack = descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);

        set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 5, pointers);
        set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 5, ids);
        set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
        finalize(pack, "pointers");
        good(lib.cudnnBackendExecute(handle, l->plan->plan, pack), "attention");
        (void) lib.cudnnBackendDestroyDescriptor(pack);
}

static Launch part(const Case *c, const Plan *p, uint64_t head, uint64_t row, uint8_t *o) {
        return (Launch){
                .plan = p,
                .q = c->q + (row * WIDTH + head * DIM) * 2,
                .k = c->k + head * DIM * 2,
                .v = c->v + head * DIM * 2,
                .o = o + (row * WIDTH + head * DIM) * 2,
        };
}

/* Words of the part that differ from the whole. The part goes to the same place of another matrix, poisoned
 * before. */
static uint64_t part_differs(const Case *c, const Plan *p, uint64_t head, uint64_t row) {
        uint64_t at = (row * WIDTH + head * DIM) * 2;
        Launch l = part(c, p, head, row, c->part);

        char what[128];

        (void) snprintf(what, sizeof(what), "heads %lu+%lu, rows %lu+%lu of %lu, engine %ld", head, p->heads,
                row, p->rows, c->rows, p->pin.engine);
        must(cudaMemset(c->part, 0xff, c->rows * WIDTH * 2), "poison");
        launch(&l);
        must(cudaDeviceSynchronize(), what);
        return differing(c->o + at, WIDTH * 2, c->part + at, WIDTH * 2, p->heads * DIM * 2, p->rows);
}

typedef struct Tally {
        unsigned parts, same, refused, own_pin, own_same;
} Tally;

static void try_part(const Case *c, const Pin *pin, Tally *t, uint64_t head, uint64_t heads, uint64_t row,
        uint64_t rows) {
        const Plan *pinned, *own;
        uint64_t n;

        if (head + heads > HEADS || rows > c->rows || row > c->rows - rows)
                return;
        pinned = plan(heads, rows, c->rows, pin);
        n = pinned ? part_differs(c, pinned, head, row) : 0;
        t->parts++;
        t->same += pinned && n == 0;
        t->refused += !pinned;
        if (n > 0)
                printf("  differs: heads %lu+%lu, rows %lu+%lu: %lu of %lu words\n", head, heads, row, rows,
                        n, heads * DIM * rows);
        own = plan(heads, rows, c->rows, NULL);
        if (!own)
                return;
        t->own_pin += pin_equal(&own->pin, pin);
        t->own_same += part_differs(c, own, head, row) == 0;
}

static void tally_print(const char *what, const Tally *t) {
        printf("  %s: pinned %u of %u parts with the bits of the whole, %u refused; by its own choice %u "
               "(the pinned engine and knobs in %u)\n",
                what, t->same, t->parts, t->refused, t->own_same, t->own_pin);
}

/* A NaN in one row's query stays in that row. */
static void spread(const Case *c, const Plan *whole) {
        const uint64_t row = c->rows / 2 + 3;
        uint8_t *q = device_new(WIDTH * 2);
        Launch l = part(c, whole, 0, 0, c->part);
        uint64_t above, below;

        must(cudaMemcpy(q, c->q + row * WIDTH * 2, WIDTH * 2, cudaMemcpyDeviceToDevice), "copy");
        must(cudaMemset(c->q + row * WIDTH * 2, 0xff, WIDTH * 2), "NaN");
        launch(&l);
        must(cudaMemcpy(c->q + row * WIDTH * 2, q, WIDTH * 2, cudaMemcpyDeviceToDevice), "copy");
        above = differing(c->o, WIDTH * 2, c->part, WIDTH * 2, WIDTH * 2, row);
        below = differing(c->o + (row + 1) * WIDTH * 2, WIDTH * 2, c->part + (row + 1) * WIDTH * 2,
                WIDTH * 2, WIDTH * 2, c->rows - row - 1);
        printf("  NaN in one row's query: %lu words of other rows change, %lu of its %lu are NaN\n",
                above + below, nans(c->part + row * WIDTH * 2, WIDTH), WIDTH);
        device_free(q);
}

/* Another engine's answer, to see that the comparison sees a difference. */
static void other_engine(const Case *c, const Pin *other) {
        Plan p;

        if (other->knobs > 0 && plan_init(&p, HEADS, c->rows, c->rows, other))
                printf("  engine %ld instead: %lu of %lu words differ\n", other->engine,
                        part_differs(c, &p, 0, 0), c->rows * WIDTH);
}

static void bits(uint64_t rows, const Pin *pin, const Pin *other) {
        static const uint64_t heads[] = {1, 7, 8, 14, 19, 28},
                              heights[] = {64, 127, 128, 129, 1000, 4096, 9472, 1};
        Tally by_head = {0}, by_row = {0}, both = {0};
        const Plan *whole = plan(HEADS, rows, rows, pin);
        Launch l;
        Case c;

        must_be(whole, "the pinned engine refuses all heads and rows");
        case_init(&c, rows);
        l = part(&c, whole, 0, 0, c.o);
        launch(&l);
        printf("%lu rows: error against f64 %.2e, workspace %ld, plan built in %.3f s; again: %lu words "
               "differ\n",
                rows, case_error(&c), whole->space, whole->build_seconds, part_differs(&c, whole, 0, 0));
        for (size_t i = 0; i < sizeof(heads) / sizeof(*heads); i++) {
                try_part(&c, pin, &by_head, 0, heads[i], 0, rows);
                try_part(&c, pin, &by_head, 3, heads[i], 0, rows);
                try_part(&c, pin, &by_head, HEADS - heads[i], heads[i], 0, rows);
        }
        tally_print("parts of the heads", &by_head);
        for (size_t i = 0; i < sizeof(heights) / sizeof(*heights); i++) {
                try_part(&c, pin, &by_row, 0, HEADS, 0, heights[i]);
                try_part(&c, pin, &by_row, 0, HEADS, 128, heights[i]);
                try_part(&c, pin, &by_row, 0, HEADS, 1001, heights[i]);
                try_part(&c, pin, &by_row, 0, HEADS, rows - heights[i], heights[i]);
                try_part(&c, pin, &both, 7, 7, 128, heights[i]);
                try_part(&c, pin, &both, 55, 1, 333, heights[i]);
        }
        tally_print("parts of the rows", &by_row);
        tally_print("both", &both);
        spread(&c, whole);
        other_engine(&c, other);
        case_done(&c);
}

static double teraflops(double heads, double rows, double keys, double usec) {
        return 4e-6 * heads * (double) DIM * rows * keys / usec;
}

/* The whole against a rank's part of the heads and against row chunks, in turn. */
static void rates(uint64_t rows, const Pin *pin) {
        static const uint64_t parts[][2] = {
                {56, 4}, {28, 1}, {7, 1}, {7, 8}, {1, 1}}; /* heads, chunks of rows */
        Case c;

        case_init(&c, rows);
        for (int round = 0; round < 2; round++) {
                const Plan *whole = plan(HEADS, rows, rows, pin);
                Launch l;
                Rate w;
                double best;

                must_be(whole, "the pinned engine refuses all heads and rows");
                l = part(&c, whole, 0, 0, c.o);
                w = rate(launch, &l, 1);
                best = teraflops((double) HEADS, (double) rows, (double) rows, w.usec);

                printf("%lu rows, %lu heads: %.1f ms (%.1f to %.1f, %u) %.0f TF %u MHz %u W\n", rows, HEADS,
                        w.usec / 1000, w.shortest / 1000, w.longest / 1000, w.samples, best, w.mhz, w.watts);
                for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
                        uint64_t heads = parts[i][0], height = rows / parts[i][1] / 128 * 128;
                        const Plan *p = plan(heads, parts[i][1] == 1 ? rows : height, rows, pin);
                        Launch m;
                        double tf;
                        Rate r;

                        must_be(p, "the pinned engine refuses a part");
                        m = part(&c, p, 0, 0, c.part);
                        r = rate(launch, &m, 0.3);
                        tf = teraflops((double) heads, (double) p->rows, (double) rows, r.usec);

                        printf("  %lu heads, %lu query rows: %.2f ms %.0f TF %u MHz %u W, against the whole "
                               "%.3f; plan built in %.3f s\n",
                                heads, p->rows, r.usec / 1000, tf, r.mhz, r.watts, tf / best,
                                p->build_seconds);
                }
        }
        case_done(&c);
}

int main(int argc, char **argv) {
        cudnnBackendDescriptor_t graph, config[8];
        Pin pins[2] = {0};
        int64_t n;

        device_open();
        load(argc > 1 ? argv[1] : "libcudnn.so.9");
        good(lib.cudnnCreate(&handle), "cuDNN");
        graph = graph_new(HEADS, 73686, 73686);
        n = ask(graph, 8, config);
        must_be(n > 0, "cuDNN has no attention for the whole shape");
        for (int64_t i = 0; i < n; i++) {
                Pin p = pin_read(config[i]);

                if (i < 2)
                        pins[i] = p;
                pin_print(i == 0 ? "pinned" : "offered too", &p);
        }
        bits(1409, pins, pins + 1);
        rates(73686, pins);
        bits(38010, pins, pins + 1);
        bits(7013, pins, pins + 1);
        rates(38010, pins);
        return 0;
}
