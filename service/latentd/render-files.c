/* SPDX-License-Identifier: Apache-2.0 */
/* Before anything of a Render is done: would the files of the parts that are not read yet be taken when it is their turn? What hours later
 * would be an error is one now. Only what costs next to nothing is looked at: headers and sizes, as a load does first. */
#include "service/latentd/render-internal.h"

#include <errno.h>
#include <string.h>

#include "service/latentd/model.h"
#include "service/latentd/store.h"
#include "service/shared/cleanup.h"

struct RenderFiles {
        Render *render;
        size_t n, n_pending;
        Fault fault; /* the first one */
        struct RenderFile {
                RenderFiles *all;
                StoreRequest *request;
        } files[];
};

/* Those that may have to be read, once each: *ret has room for all phases. */
static size_t find_models(const Render *r, const Model *ret[static _RENDER_PHASE_MAX]) {
        const Session *s = r->client;
        const Model *parts[] = { s->model, s->conditioner, s->video_vae, s->audio_vae };
        size_t n = 0, k;

        _Static_assert(ELEMENTSOF(parts) <= _RENDER_PHASE_MAX, "room");
        for (size_t i = 0; i < ELEMENTSOF(parts); i++) {
                for (k = 0; k < n && ret[k] != parts[i]; k++)
                        ;
                if (k == n && parts[i] && parts[i]->defer) /* also one that is in memory: it may have to leave before its turn */
                        ret[n++] = parts[i];
        }

        return n;
}

void render_files_stop(Render *r) {
        RenderFiles *x = STEAL_PTR(r->files);

        for (size_t i = 0; x && i < x->n; i++)
                (void) store_request_cancel(x->files[i].request);
        free(x);
}

static void on_looked(void *userdata, int result, Region *region, uint64_t bytes_read, const Fault *f) {
        struct RenderFile *file = userdata;
        RenderFiles *x = file->all;
        Render *r = x->render;

        file->request = NULL;
        if (result < 0)
                (void) fault_set(&x->fault, result, f->name, "%s", f->text);
        if (--x->n_pending > 0 && result >= 0)
                return;

        r->files_fault = x->fault;
        render_files_stop(r);
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static int look_at(RenderFiles *x, const Model *m, Fault *f) {
        char label[MODEL_LABEL_MAX];
        int r;

        for (size_t i = 0; i < m->n_parts; i++) {
                struct RenderFile *file = &x->files[x->n];

                if (m->parts[i].fd < 0)
                        continue; /* it will not be read again */
                file->all = x;
                r = store_look(m->manager->store, m->parts[i].fd, model_file_label(m, m->parts[i].name, label), on_looked, file,
                        &file->request, f);
                if (r < 0)
                        return r;
                x->n++;
                x->n_pending++;
        }

        return 0;
}

int render_files_start(Render *r, Fault *f) {
        const Model *models[_RENDER_PHASE_MAX];
        size_t n_models = find_models(r, models), n = 0;
        int error = 0;

        for (size_t i = 0; i < n_models; i++)
                n += models[i]->n_parts;
        r->files = calloc(1, sizeof(*r->files) + n * sizeof(r->files->files[0]));
        if (!r->files)
                return -ENOMEM;

        r->files->render = r;
        for (size_t i = 0; i < n_models && error >= 0; i++)
                error = look_at(r->files, models[i], f);
        if (error < 0 || r->files->n == 0)
                render_files_stop(r);
        return error;
}
