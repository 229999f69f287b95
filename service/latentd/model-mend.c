/* SPDX-License-Identifier: Apache-2.0 */
/* Before a worker gets a model's regions after another one has crashed: are they what was loaded? A model of ModelPath= has
 * its damaged files read again; of one that a client made the files are not ours to open, and it fails. Loop thread,
 * except open_work(). */
#include "service/latentd/model.h"

#include <inttypes.h>
#include <string.h>

#include "service/latentd/file-io.h"
#include "service/latentd/file-source.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

/* The files opened again, by a job that may outlive the rest. */
typedef struct MendOpen {
        ModelMend *mend; /* NULL: nobody wants it */
        Manager *manager;
        bool stuck;
        char *name, *tokenizer;
        ModelFiles files;
        FileIdentity *identities; /* of each */
        Fault fault;
} MendOpen;

struct ModelMend {
        Model *model;
        ModelMendFn fn;
        void *userdata;
        unsigned n_pending; /* checks, the opening, requests */
        MendOpen *open;
        Fault fault; /* the first failure */
        struct MendPart {
                ModelMend *mend;
                StoreCheck *check;
                StoreRequest *request;
        } parts[];
};

static MendOpen *mend_open_free(MendOpen *o) {
        if (!o)
                return NULL;

        model_files_done(&o->files);
        free(o->identities);
        free(o->name);
        free(o->tokenizer);
        free(o);
        return NULL;
}
DEFINE_CLEANUP(MendOpen *, mend_open_free)


static void mend_fail(ModelMend *x, int r, const char *name, const char *text) {
        if (x->fault.name[0] == '\0')
                (void) fault_set(&x->fault, r, name, "%s", text);
}

bool model_is_sound(const Model *m) {
        for (size_t i = 0; i < m->n_parts; i++)
                if (m->parts[i].region->unverified || m->parts[i].region->state != REGION_COMPLETE)
                        return false;

        return true;
}

static void mend_end(ModelMend *x) {
        Model *m = x->model;
        const Fault *f = x->fault.name[0] != '\0' ? &x->fault : NULL;
        bool failed = f && m->state == MODEL_READY;

        m->mend = NULL;
        if (failed) {
                log_warning("Model %" PRIu64 " cannot be used any more: %s", m->id, f->text);
                model_set_state(m, MODEL_FAILED);
                m->superseded = !m->is_private; /* its name may be loaded again */
                model_user_add(m);
        }
        x->fn(x->userdata, m, f);
        if (failed)
                model_user_remove(m);
        free(x);
}

/* One of the things that were waited for has come to its end. */
static void arrived(ModelMend *x) {
        if (--x->n_pending == 0)
                mend_end(x);
}

/* ---- reading again ---- */

static void on_region(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        struct MendPart *part = userdata;
        ModelMend *x = part->mend;
        Model *m = x->model;
        ModelPart *p = &m->parts[part - x->parts];

        part->request = NULL;
        if (r < 0)
                mend_fail(x, r, f->name, f->text);
        else {
                Region *old = p->region;

                p->region = region;
                region->keep = region->keep || old->keep;
                region->ease = old->ease;
                store_region_unref(m->manager->store, old);
                m->bytes_read += bytes_read;
        }
        arrived(x);
}

static const char changed[] =
        "A damaged file of the model cannot be read again, since it has changed since it was loaded: load the model again.";

static void read_again(ModelMend *x, const MendOpen *o, size_t i) {
        Model *m = x->model;
        ModelPart *p = &m->parts[i];
        char label[MODEL_LABEL_MAX];
        Fault f = {};
        size_t k;
        int r;

        for (k = 0; k < o->files.n_files; k++)
                if (strcmp(o->files.files[k].name, p->name) == 0)
                        break;
        if (k == o->files.n_files || !file_source_same(&o->identities[k], &p->region->identity)) {
                mend_fail(x, -ESTALE, FAULT_FILE_CHANGED, changed);
                return;
        }

        r = store_get(m->manager->store, o->files.files[k].fd, model_file_label(m, p->name, label), &m->numa, on_region, &x->parts[i],
                &x->parts[i].request, &f);
        if (r < 0)
                mend_fail(x, r, f.name[0] != '\0' ? f.name : FAULT_INTERNAL, f.name[0] != '\0' ? f.text : strerror(-r));
        else
                x->n_pending++;
}

static int open_work(void *userdata) {
        MendOpen *o = userdata;
        int r;

        r = model_files_open(o->manager->config, o->name, o->tokenizer, &o->files, &o->fault);
        if (r < 0)
                return r;

        o->identities = calloc(o->files.n_files, sizeof(*o->identities));
        if (!o->identities)
                return -ENOMEM;

        for (size_t i = 0; r >= 0 && i < o->files.n_files; i++)
                r = file_source_identity(&file_io_system, o->files.files[i].fd, &o->identities[i]);
        return r;
}

static void on_open_stuck(void *userdata) {
        MendOpen *o = userdata;
        ModelMend *x = STEAL_PTR(o->mend);

        o->stuck = true;
        o->manager->n_stuck_opens++;
        if (!x)
                return;

        x->open = NULL;
        mend_fail(x, -ETIMEDOUT, FAULT_IO,
                "The model's weights were damaged in memory when a worker crashed, and the file system of ModelPath= does not "
                "answer: load the model again when it does.");
        arrived(x);
}

static void on_opened(void *userdata, int r) {
        CLEANUP(mend_open_freep) MendOpen *o = userdata;
        ModelMend *x = o->mend;

        if (o->stuck)
                o->manager->n_stuck_opens--;
        if (!x)
                return;

        x->open = NULL;
        if (r < 0)
                mend_fail(x, r, o->fault.name[0] != '\0' ? o->fault.name : FAULT_IO,
                        o->fault.name[0] != '\0' ? o->fault.text : strerror(-r));
        for (size_t i = 0; r >= 0 && i < x->model->n_parts; i++)
                if (x->model->parts[i].region->state != REGION_COMPLETE)
                        read_again(x, o, i);
        arrived(x);
}

static int open_again(ModelMend *x) {
        CLEANUP(mend_open_freep) MendOpen *o = NULL;
        Manager *m = x->model->manager;
        int r;

        o = calloc(1, sizeof(*o));
        if (!o)
                return -ENOMEM;

        *o = (MendOpen) { .mend = x, .manager = m, .name = strdup(x->model->name), .tokenizer = strdup(x->model->tokenizer) };
        if (!o->name || !o->tokenizer)
                return -ENOMEM;

        r = file_jobs_submit(store_file_jobs(m->store), open_work, on_open_stuck, on_opened, o);
        if (r < 0)
                return r;

        x->open = STEAL_PTR(o);
        return 0;
}

/* ---- checking ---- */

/* All checks are in: n_pending is that of the caller alone. */
static void look_at_damage(ModelMend *x) {
        Model *m = x->model;
        bool damaged = false;
        int r;

        for (size_t i = 0; i < m->n_parts; i++)
                damaged = damaged || m->parts[i].region->state != REGION_COMPLETE;
        if (!damaged)
                return;

        if (m->is_private) {
                mend_fail(x, -EIO, FAULT_IO,
                        "The model's weights were damaged in memory when a worker crashed, and only its owner can open "
                        "its files: load the model again.");
                return;
        }

        r = open_again(x);
        if (r < 0)
                mend_fail(x, r, FAULT_INTERNAL, strerror(-r));
        else
                x->n_pending++;
}

static void on_checked(void *userdata, Region *region, bool sound) {
        struct MendPart *part = userdata;
        ModelMend *x = part->mend;

        part->check = NULL;
        if (x->n_pending == 1)
                look_at_damage(x);
        arrived(x);
}

int model_mend(Model *m, ModelMendFn fn, void *userdata) {
        CLEANUP_FREE ModelMend *x = NULL;
        int r;

        if (m->mend)
                return 0; /* its end will be told to the same caller */

        x = calloc(1, sizeof(*x) + m->n_parts * sizeof(x->parts[0]));
        if (!x)
                return -ENOMEM;

        *x = (ModelMend) { .model = m, .fn = fn, .userdata = userdata };
        for (size_t i = 0; i < m->n_parts; i++) {
                x->parts[i].mend = x;
                r = store_check(m->manager->store, m->parts[i].region, on_checked, &x->parts[i], &x->parts[i].check);
                if (r < 0) {
                        for (size_t k = 0; k < i; k++)
                                (void) store_check_cancel(x->parts[k].check);
                        return r;
                }
                x->n_pending++;
        }

        m->mend = STEAL_PTR(x);
        return 0;
}

void model_mend_stop(Model *m) {
        ModelMend *x = STEAL_PTR(m->mend);

        if (!x)
                return;

        for (size_t i = 0; i < m->n_parts; i++) {
                (void) store_check_cancel(x->parts[i].check);
                (void) store_request_cancel(x->parts[i].request);
        }

        if (x->open)
                x->open->mend = NULL;
        free(x);
}
