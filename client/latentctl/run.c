/* SPDX-License-Identifier: Apache-2.0 */
#include "client/latentctl/run.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "client/latentctl/progress.h"
#include "client/latentctl/report.h"

/* How late Ctrl-C may be noticed. */
#define SLICE_USEC 100000u

static volatile sig_atomic_t n_signals;

static void on_signal(int number) {
        n_signals = n_signals + 1;
}

void run_catch_signals(void) {
        struct sigaction a = {.sa_handler = on_signal}, hup;

        (void) sigaction(SIGINT, &a, NULL);
        (void) sigaction(SIGTERM, &a, NULL);
        /* A closed terminal would leave the temporary file; under nohup it is no reason to end. */
        if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN)
                (void) sigaction(SIGHUP, &a, NULL);
}

bool run_interrupted(void) {
        return n_signals > 0;
}

int run_connect(const Ctl *c, latent_client **ret, latent_error *e) {
        return latent_client_new(&c->bus, ret, e);
}

static int error_interrupted(latent_error *e) {
        return ctl_error(e, -EINTR, CTL_ERROR_INTERRUPTED, "interrupted; nothing was written.");
}

int run_outcome(int r, latent_error *e) {
        return r < 0 && n_signals > 0 ? error_interrupted(e) : r;
}

/* Who hears of news. */
typedef struct Listener {
        Progress progress;
        latent_progress_fn also;
        void *userdata;
} Listener;

static void on_news(const latent_progress *news, void *userdata) {
        Listener *l = userdata;

        progress_show(news, &l->progress);
        if (l->also)
                l->also(news, l->userdata);
}

int run_wait(const Ctl *c, latent_job *job, const char *label, latent_error *e) {
        return run_wait_and(c, job, label, NULL, NULL, e);
}

int run_wait_and(const Ctl *c, latent_job *job, const char *label, latent_progress_fn also, void *userdata, latent_error *e) {
        Listener l = {.also = also, .userdata = userdata};
        bool cancelled = false;
        int r;

        progress_init(&l.progress, c, label);
        while ((r = latent_job_wait(job, SLICE_USEC, on_news, &l, e)) == 1) {
                if (n_signals > 1)
                        break;
                if (n_signals > 0 && !cancelled) {
                        r = latent_job_cancel(job, e);
                        if (r < 0)
                                break;
                        cancelled = true;
                }
        }
        progress_done(&l.progress);

        /* A job that came to its end before it noticed counts as interrupted too: its user wanted it
         * stopped. */
        return n_signals > 0 ? error_interrupted(e) : r;
}

/* Names a model in use: its path, number or name; the newest of that name. */
static const latent_value *find_model(const latent_value *models, const char *name) {
        const latent_value *found = NULL;

        for (size_t i = 0; i < latent_value_count(models); i++) {
                const latent_value *v = latent_value_at(models, i);
                const char *path = get_string(v, "path");
                char id[FORMAT_MAX];

                if (strcmp(path, name) == 0 || strcmp(format_id(path, id), name) == 0)
                        return v;
                if (strcmp(get_string(v, "Name"), name) == 0)
                        found = v;
        }

        return found;
}

/* A private model has its order for good. */
static int check_order(const latent_value *model, const latent_load_options *o, latent_error *e) {
        const char *order = get_string(model, "QkvOrder");

        if (!o->qkv_order || strcmp(o->qkv_order, "auto") == 0 || strcmp(o->qkv_order, order) == 0 ||
                strcmp(order, "split") == 0)
                return 0;

        return ctl_error(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                "The model \"%s\" is in use with QKV order %s, not %s. Name its files to load it once more.",
                get_string(model, "Name"), order, o->qkv_order);
}

/* Starts the load and waits for it. */
static int load_job(const Ctl *c, latent_client *client, const char *name, bool is_path,
        const latent_load_options *o, latent_job **ret, latent_error *e) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        int r;

        r = is_path ? latent_model_load_path(client, name, o, &job, e)
                    : latent_model_load_name(client, name, o, &job, e);
        if (r < 0)
                return r;
        r = run_wait(c, job, "loading", e);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(job);
        return 0;
}

static int load_and_wait(const Ctl *c, latent_client *client, const char *name, bool is_path,
        const latent_load_options *o, latent_model **ret, latent_job **ret_load, latent_error *e) {
        CLEANUP(latent_job_freep) latent_job *job = NULL;
        int r;

        r = load_job(c, client, name, is_path, o, &job, e);
        if (r == -ENOENT && !is_path) {
                latent_error service = *e;

                return ctl_error(e, r, LATENT_ERROR_NOT_FOUND,
                        "%s is no file or directory here, and the service says: %s", name, service.text);
        }
        if (r < 0)
                return r;
        r = latent_job_model(job, ret, e);
        if (r < 0)
                return r;

        if (ret_load)
                *ret_load = STEAL_PTR(job);
        return 0;
}

/* A file or directory, also one that cannot be reached, which is said of it then: a link to nowhere, or a path of the whole machine. */
static bool is_here(const char *name) {
        struct stat st;

        return lstat(name, &st) >= 0 || (name[0] == '/' && errno != ENOENT && errno != ENOTDIR);
}

int run_open_model(const Ctl *c, latent_client *client, const char *name, const latent_load_options *options,
        latent_model **ret, latent_job **ret_load, latent_error *e) {
        CLEANUP(latent_value_freep) latent_value *models = NULL;
        const latent_value *model;
        int r;

        if (is_here(name))
                return load_and_wait(c, client, name, true, options, ret, ret_load, e);

        r = latent_client_models(client, &models, e);
        if (r < 0)
                return r;
        model = find_model(models, name);
        if (!model && name[0] == '/')
                return ctl_error(e, -ENOENT, LATENT_ERROR_NOT_FOUND, "%s does not exist here.", name);

        /* Models of ModelPath= are asked for by name, which costs nothing if they are there and settles the
         * options. */
        if (!model || latent_value_as_bool(latent_value_get(model, "Private")) == 0)
                return load_and_wait(c, client, model ? get_string(model, "Name") : name, false, options,
                        ret, ret_load, e);

        r = check_order(model, options, e);
        if (r < 0)
                return r;
        if (ret_load)
                *ret_load = NULL;
        return latent_model_find(client, get_string(model, "path"), ret, e);
}
