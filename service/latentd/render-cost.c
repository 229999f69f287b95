/* SPDX-License-Identifier: Apache-2.0 */
/* What the phases of a Render take: time, from what was measured before, and memory. */
#include "service/latentd/render-internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/model.h"
#include "service/shared/cleanup.h"

/* A unit of work is a byte of weights that a row goes through, about one floating-point operation at bf16. What one takes as long as
 * nothing was measured on this machine: only the ratio of phases matters then. */
#define USEC_PER_UNIT 4e-5
/* Attention: two products of rows x rows x hidden, two operations each. */
#define ATTENTION 4.0
/* A convolution's weights serve many positions of each latent one; figures of the demo checkpoint's VAEs on a CPU. */
#define REUSE_VIDEO 1.3
#define REUSE_SOUND 30.0
#define USEC_PER_BYTE 1e-3 /* of a file that is read: 1 GB/s */
#define USEC_PER_PIXEL 2e-2 /* that latent-media still has to write when the last frame is made */
#define TOKENS_GUESS 64u    /* as long as the prompt was not counted */

enum { /* of PaceKey, behind the phases */
        PACE_LOAD = _RENDER_PHASE_MAX,
        PACE_WRITE,
};

/* Two models with the same names and sizes of files are equally fast, and that is known before they are loaded. */
static uint64_t hash_of_files(const Model *m) {
        uint64_t h = UINT64_C(0xcbf29ce484222325);

        for (size_t i = 0; i < m->n_parts; i++) {
                for (const char *p = m->parts[i].name; *p; p++)
                        h = (h ^ (uint8_t) *p) * UINT64_C(0x100000001b3);
                for (unsigned k = 0; k < 64; k += 8)
                        h = (h ^ ((m->parts[i].size >> k) & 0xff)) * UINT64_C(0x100000001b3);
        }

        return h;
}

/* What the phase is measured with: of CONDITION the pictures, sounds are next to nothing beside them. */
static const Model *timed_model(const Render *r, RenderPhase p) {
        return p == RENDER_CONDITION ? r->client->video_vae : render_model(r, p);
}

static PaceKey key_of(const Render *r, RenderPhase p) {
        return (PaceKey){
                .files = hash_of_files(timed_model(r, p)),
                .phase = p,
                .compute = r->o.sample.compute == WIRE_COMPUTE_AUTO ? WIRE_COMPUTE_BF16 : r->o.sample.compute,
                .ranks = r->client->split.ranks,
                .sparse = p == RENDER_SAMPLE ? r->o.sample.sparse.method : SPARSE_NONE,
        };
}

static const PaceEntry *measured(const Render *r, RenderPhase p) {
        const PaceKey key = key_of(r, p);

        return pace_find(&r->job->manager->paces, &key);
}

static double attention_of(const Model *m, const PaceEntry *e) {
        if (model_is_known(m))
                return ATTENTION * m->info.hidden * m->info.layers;
        return e ? e->attention : 0;
}

/* Units of so many rows of a phase. */
static double units_of(const Render *r, RenderPhase p, double rows) {
        const Model *m = timed_model(r, p);
        double bytes = (double) m->bytes + 1;

        switch (p) {

        case RENDER_ENCODE:
                return (rows > 0 ? rows : TOKENS_GUESS) * bytes;
        case RENDER_SAMPLE:
                return rows * (bytes + (double) r->sizes.rows * attention_of(m, measured(r, p)));
        case RENDER_SOUND:
                return rows * bytes * REUSE_SOUND;
        default:
                return rows * bytes * REUSE_VIDEO;
        }
}

static double units(const Render *r, RenderPhase p) {
        return units_of(r, p, render_work(r, p));
}

/* What a unit took in the phases that were measured, on the whole. */
static double usual_pace(const Render *r) {
        double usec = 0, work = 0;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                const PaceEntry *e = measured(r, p);

                if (e) {
                        usec += e->usec * units(r, p);
                        work += units(r, p);
                }
        }

        return work > 0 ? usec / work : USEC_PER_UNIT;
}

static double pace_or(const Render *r, uint32_t phase, double usual) {
        const PaceKey key = { .phase = phase };
        const PaceEntry *e = pace_find(&r->job->manager->paces, &key);

        return e ? e->usec : usual;
}

static uint64_t pixels(const Render *r) {
        return (uint64_t) r->o.width * r->o.height * r->o.frames;
}

/* Once read it counts with what that took, so that the fraction stays where it is; unless that was for a phase before, and it is still
 * there. */
static void weigh_load(const Render *r, RenderPhase p, const Model *m, double *load) {
        if (m->state != MODEL_READY)
                *load = (double) m->bytes * pace_or(r, PACE_LOAD, USEC_PER_BYTE);
        else if (p > r->phase)
                *load = 0;
}

static bool has_sounds(const Render *r) {
        for (uint32_t i = 0; i < r->o.n_pictures; i++)
                if (r->items[i].has_sound)
                        return true;

        return false;
}

static void weigh_loads_of_pictures(Render *r) {
        double pictures = r->loads[RENDER_CONDITION] - r->load_of_sounds;

        weigh_load(r, RENDER_CONDITION, r->client->video_vae, &pictures);
        if (has_sounds(r))
                weigh_load(r, RENDER_CONDITION, r->client->audio_vae, &r->load_of_sounds);
        r->loads[RENDER_CONDITION] = pictures + r->load_of_sounds;
}

void render_weigh(Render *r) {
        double usual = usual_pace(r);

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                const PaceEntry *e = measured(r, p);

                r->measured[p] = e || !render_has_phase(r, p);
                if (!render_has_phase(r, p))
                        continue;

                r->weights[p] = units(r, p) * (e ? e->usec : usual);
                if (p == RENDER_CONDITION)
                        weigh_loads_of_pictures(r);
                else
                        weigh_load(r, p, render_model(r, p), &r->loads[p]);
        }
        r->tail = render_to_file(&r->o) ? (double) pixels(r) * pace_or(r, PACE_WRITE, USEC_PER_PIXEL) : 0;
}

bool render_is_measured(const Render *r, RenderPhase p) {
        return measured(r, p);
}

void render_measure_phase(Render *r, RenderPhase p, uint64_t usec) {
        const PaceKey key = key_of(r, p);
        double rows = render_work(r, p), unused;

        if (p == RENDER_CONDITION && r->item_sound)
                return;
        if (p == RENDER_CONDITION) /* each by itself */
                render_condition_work(r, &unused, &rows, &unused);

        pace_add(&r->job->manager->paces, &key, (double) usec / units_of(r, p, rows), attention_of(timed_model(r, p), NULL));
}

void render_measure_load(Render *r, uint64_t bytes, uint64_t usec) {
        const PaceKey key = { .phase = PACE_LOAD };

        if (bytes > 0)
                pace_add(&r->job->manager->paces, &key, (double) usec / (double) bytes, 0);
}

void render_measure_write(Render *r, uint64_t usec) {
        const PaceKey key = { .phase = PACE_WRITE };

        pace_add(&r->job->manager->paces, &key, (double) usec / (double) pixels(r), 0);
}

uint64_t render_weights_bytes(const Model *m) {
        uint64_t bytes = 0;

        for (size_t i = 0; i < m->n_parts; i++)
                bytes += region_memory_bytes(m->parts[i].size);
        return bytes;
}

static bool is_part(const Render *r, const Model *m) {
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++)
                if (render_model(r, p) == m)
                        return true;

        return false;
}

/* Bytes that others would give up for m: cached files, idle models, and what this Render has no use for then. */
static uint64_t could_leave(const Render *r, const Model *needed) {
        const Manager *manager = r->job->manager;
        uint64_t bytes = 0;
        const Model *m;

        for (const Region *x = store_first(manager->store); x; x = x->next)
                if (x->state == REGION_COMPLETE && x->n_ref == 0 && !x->keep)
                        bytes += x->size;

        TAILQ_FOREACH(m, &manager->models, entry) {
                bool idle = !m->is_private && m->state == MODEL_READY && !m->keep && m->n_users == 0;
                bool rests = m->defer && m->state == MODEL_READY && !m->keep && (is_part(r, m) || model_can_rest(m));

                if (m != needed && (idle || rests))
                        bytes += render_weights_bytes(m);
        }

        return bytes;
}

/* The one of a phase's models that has most to load. */
static const Model *largest_of(const Render *r, RenderPhase p) {
        const Model *video = r->client->video_vae, *audio = r->client->audio_vae;

        if (p != RENDER_CONDITION)
                return render_model(r, p);

        return has_sounds(r) && audio->state != MODEL_READY &&
                        (video->state == MODEL_READY || render_weights_bytes(audio) > render_weights_bytes(video))
                ? audio
                : video;
}

int render_check_memory(const Render *r, Fault *f) {
        uint64_t work = r->work ? 0 : r->sizes.work_bytes, most = 0, most_weights = 0, most_have = 0;
        RenderPhase worst = 0;
        MemoryHeadroom h;
        int error;

        error = manager_headroom(r->job->manager, &h);
        if (error < 0)
                return error;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                const Model *m = largest_of(r, p);
                uint64_t weights = m->state == MODEL_READY ? 0 : render_weights_bytes(m), have = h.bytes + could_leave(r, m);

                if (p > RENDER_CONDITION && r->pixels)
                        have += r->pixels->output_bytes; /* gone by then */
                if (!render_has_phase(r, p) || m->state == MODEL_LOADING || weights + work <= have || weights + work <= most)
                        continue;

                worst = p;
                most = weights + work;
                most_weights = weights;
                most_have = have;
        }
        if (most == 0)
                return 0;

        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "The film does not fit: phase \"%s\" needs %" PRIu64 " bytes (%" PRIu64 " of weights of \"%.64s\" to be loaded, %" PRIu64
                " for what lies between the phases), %" PRIu64 " can be had (limit: %s). Nothing was begun: ask for a smaller or shorter "
                "film, unload models, close sessions, or allow more memory.",
                render_phase_name(worst), most, most_weights, largest_of(r, worst)->name, work, most_have, h.limit);
}
