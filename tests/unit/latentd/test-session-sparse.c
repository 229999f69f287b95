/* SPDX-License-Identifier: Apache-2.0 */
/* The key sparse of OpenSession. */
#include "tests/unit/latentd/fake-request.h"

#include "service/latentd/session-request.h"

static void request_open_sparse_goes_by_model_and_worker(void **state) {
        static const struct {
                const char *text, *error, *words;
                bool gated, without; /* the model has gates; the worker has no sparse attention */
        } list[] = {
                {"sol-attn:tau=2", NULL, NULL, false, false},
                {"vsa:keep=20", NULL, NULL, true, false},
                {"off", NULL, NULL, true, true},
                {"sla:dense_blocks=0-1", NULL, NULL, false, false},
                {"sla:dense_blocks=2", FAULT_INVALID_ARGUMENT, "blocks 0 to 1", false, false},
                {"sla:tau=2", FAULT_INVALID_ARGUMENT, "not for sla", false, false},
                {"vsa", FAULT_NOT_SUPPORTED, "gate weights", false, false},
                {"sla", FAULT_NOT_SUPPORTED, "made for vsa", true, false},
                {"sol-attn", FAULT_NOT_SUPPORTED, "Worker=cpu", false, true},
        };
        Fake *f = *state;
        CLEANUP_FREE char *path = NULL;
        const WireModelReady known = f->model->info;
        WireHello *h = &f->m->worker->hello, was = *h;
        WireJobOpen q;

        f->model->announced = true;
        assert_int_equal(model_path(f->model, &path), 0);
        h->n_devices = 1;
        for (size_t i = 0; i < ELEMENTSOF(list); i++) {
                sd_bus_message *m = request_new();
                SessionOptions o = {};
                Fault fault;
                int r;

                f->model->info.gated = list[i].gated;
                f->model->info.layers = 2;
                h->sparse = !list[i].without;
                ADD(m, "model", "o", path);
                ADD(m, "sparse", "s", list[i].text);
                seal(m);
                fault = (Fault){};
                r = session_request_open(m, f->m, getuid(), &o, &fault);
                (void) sd_bus_message_unref(m);
                assert_int_equal(r < 0, list[i].error != NULL);
                if (r < 0) {
                        assert_string_equal(fault.name, list[i].error);
                        assert_non_null(strstr(fault.text, list[i].words));
                        continue;
                }

                /* the request's own shift, else the model's, else the published one */
                q = (WireJobOpen){.shift_video = 6};
                session_request_sparse(&o.sparse, f->model, &q);
                assert_true(q.sparse.method == o.sparse.method && q.sparse.shift == (o.sparse.method ? 6 : 0));
                q = (WireJobOpen){};
                f->model->info.shift_video = 10;
                session_request_sparse(&o.sparse, f->model, &q);
                assert_true(q.sparse.shift == (o.sparse.method ? 10 : 0));
                f->model->info.shift_video = 0;
                session_request_sparse(&o.sparse, f->model, &q);
                assert_true(q.sparse.shift == (o.sparse.method ? 12 : 0));
        }
        f->model->info = known;
        *h = was;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(request_open_sparse_goes_by_model_and_worker, request_setup, request_teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
