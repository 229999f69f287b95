/* SPDX-License-Identifier: Apache-2.0 */

/* Connecting, and what the service says about itself. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/client/fake-service.h"

static void new_without_service_no_service(void **state) {
        Fake *f = *state;
        latent_client_options o = {
                .struct_size = sizeof(o), .bus = LATENT_BUS_ADDRESS, .address = f->address};
        latent_client *c = NULL;
        latent_error e = {};

        fake_kill_service(f);
        assert_int_equal(latent_client_new(&o, &c, &e), -ENOTCONN);
        assert_string_equal(e.name, "NoService");
        assert_null(c);
}

static void new_without_bus_no_service(void **state) {
        latent_client_options o = {
                .struct_size = sizeof(o), .bus = LATENT_BUS_ADDRESS, .address = "unix:path=/nowhere/bus"};
        latent_client *c = NULL;
        latent_error e = {};

        assert_int_equal(latent_client_new(&o, &c, &e), -ENOTCONN);
        assert_string_equal(e.name, "NoService");
        assert_null(c);
}

static void new_wrong_options_refused(void **state) {
        latent_client_options o = {.struct_size = sizeof(o), .bus = LATENT_BUS_ADDRESS};
        latent_client *c = NULL;
        latent_error e = {};

        assert_int_equal(latent_client_new(&o, &c, &e), -EINVAL);
        o.bus = 4;
        assert_int_equal(latent_client_new(&o, &c, &e), -EINVAL);
        o.struct_size = 0;
        assert_int_equal(latent_client_new(&o, &c, &e), -EINVAL);
        assert_string_equal(e.name, "InvalidArgument");
        assert_null(c);
}

/* The system bus wins if the service is there, else the user bus. */
static void new_auto_finds_the_bus(void **state) {
        Fake *f = *state;
        latent_client *c = NULL;
        latent_error e = {};

        assert_int_equal(setenv("DBUS_SYSTEM_BUS_ADDRESS", f->address, 1), 0);
        assert_int_equal(setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere/bus", 1), 0);
        assert_int_equal(latent_client_new(NULL, &c, &e), 0);
        latent_client_free(c);

        assert_int_equal(setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nowhere/bus", 1), 0);
        assert_int_equal(setenv("DBUS_SESSION_BUS_ADDRESS", f->address, 1), 0);
        assert_int_equal(latent_client_new(NULL, &c, &e), 0);
        latent_client_free(c);

        assert_int_equal(setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere/bus", 1), 0);
        c = NULL;
        assert_int_equal(latent_client_new(NULL, &c, &e), -ENOTCONN);
        assert_non_null(strstr(e.text, "system bus"));
        assert_non_null(strstr(e.text, "user bus"));
        assert_null(c);
}

static void models_sorted_with_path(void **state) {
        Fake *f = *state;
        latent_value *v = NULL;

        assert_int_equal(latent_client_models(f->client, &v, NULL), 0);
        assert_int_equal(latent_value_count(v), 2);
        assert_string_equal(latent_value_as_string(latent_value_get(latent_value_at(v, 0), "path")),
                "/org/latentd/Latent1/model/_39");
        assert_string_equal(latent_value_as_string(latent_value_get(latent_value_at(v, 1), "path")),
                "/org/latentd/Latent1/model/_310");
        latent_value_free(v);

        assert_int_equal(latent_client_devices(f->client, &v, NULL), 0);
        assert_int_equal(latent_value_count(v), 1);
        assert_string_equal(latent_value_as_string(latent_value_get(latent_value_at(v, 0), "Kind")), "cpu");
        latent_value_free(v);
}

static void cancel_job_wrong_path_refused(void **state) {
        Fake *f = *state;
        latent_error e = {};

        assert_int_equal(latent_client_cancel_job(f->client, "/org/latentd/Latent1/model/_31", &e), -EINVAL);
        assert_int_equal(latent_client_cancel_job(f->client, "12", &e), -EINVAL);
        assert_string_equal(e.name, "InvalidArgument");
        assert_int_equal(latent_client_cancel_job(f->client, "/org/latentd/Latent1/job/_31", &e), 0);
}

/* Whatever was left of a connection that is lost says so and nothing else happens. */
static void process_lost_bus_no_service(void **state) {
        Fake *f = *state;
        latent_job *job = fake_load(f, "forever");
        latent_error e = {};
        latent_value *v = NULL;
        int bus = f->bus_pid;

        fake_kill_service(f);
        f->service_pid = bus; /* ends it by the same means */
        f->bus_pid = 0;
        fake_kill_service(f);

        assert_int_equal(latent_job_wait(job, UINT64_C(10000000), NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        assert_int_equal(latent_client_process(f->client, &e), -ENOTCONN);
        assert_string_equal(e.name, "NoService");
        assert_int_equal(latent_client_status(f->client, &v, &e), -ENOTCONN);
        assert_null(v);
        assert_int_equal(latent_client_fd(f->client), -ENOTCONN);
        latent_job_free(job);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(new_without_service_no_service),
                TEST(new_without_bus_no_service),
                TEST(new_wrong_options_refused),
                TEST(new_auto_finds_the_bus),
                TEST(models_sorted_with_path),
                TEST(cancel_job_wrong_path_refused),
                TEST(process_lost_bus_no_service),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
