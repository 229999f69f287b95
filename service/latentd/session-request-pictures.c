/* SPDX-License-Identifier: Apache-2.0 */
/* The key "pictures" of Session.Render: files that latent-media reads. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "service/latentd/descriptors.h"
#include "service/shared/cleanup.h"

typedef struct Entry {
        const char *kind, *name;
        int file, last, sound;
        bool has_file, has_last, has_sound;
} Entry;

int request_read_file(sd_bus_message *m, const BusKey *k, Fault *f) {
        int r;

        r = sd_bus_message_read(m, "h", (int *) k->value);
        return r < 0 ? r : 0;
}

static int check_file(int fd, Fault *f) {
        int flags = fcntl(fd, F_GETFL);
        struct stat st;

        if (flags < 0 || fstat(fd, &st) < 0)
                return fault_set(f, -errno, FAULT_IO, "\"file\" cannot be looked at: %s.", strerror(errno));
        if (!S_ISREG(st.st_mode) || (flags & O_ACCMODE) == O_WRONLY || (flags & O_PATH))
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE, "\"file\" must be a regular file, open for reading.");

        return 0;
}

static int check_entry(const Entry *e, RenderPicture *ret, Fault *f) {
        RenderPicture p = {.file = e->file, .kind = RENDER_KIND_BY_CONTENT, .last = e->last};
        int r;

        if (!e->has_file)
                return request_missing("file", "a file that is open for reading", f);
        r = e->kind ? request_condition_kind(e->kind, &p.kind, f) : 0;
        if (r < 0)
                return r;
        if (e->has_last && p.kind != WIRE_CONDITION_KEYFRAME)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"last\" is for entries of kind \"keyframe\".");
        if (e->has_sound && p.kind != WIRE_CONDITION_VIDEO && p.kind != RENDER_KIND_BY_CONTENT)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"sound\" is for clips, this is of kind \"%s\".", e->kind);
        r = check_file(e->file, f);
        if (r < 0)
                return r;

        if (e->has_sound)
                p.sound = e->sound ? RENDER_SOUND_NEEDED : RENDER_SOUND_NONE;
        if (e->name)
                (void) snprintf(p.name, sizeof(p.name), "%s", e->name);
        bus_text(p.name); /* it may have been cut inside of a character */
        *ret = p;
        return 0;
}

static int read_entry(sd_bus_message *m, void *ret, Fault *f) {
        Entry e = {.file = -EBADF};
        const BusKey keys[] = {
                {"kind", "s", &e.kind},
                {"file", "h", &e.file, &e.has_file, .read = request_read_file},
                {"last", "b", &e.last, &e.has_last},
                {"sound", "b", &e.sound, &e.has_sound},
                {"name", "s", &e.name},
        };
        int r;

        r = bus_read_dictionary(m, keys, ELEMENTSOF(keys), f);
        return r < 0 ? r : check_entry(&e, ret, f);
}

int request_read_pictures(sd_bus_message *m, const BusKey *k, Fault *f) {
        RequestPictures *p = k->value;
        const RequestEntries e = {
                .key = k->key,
                .limit = "that the model takes",
                .entries = p->items,
                .size = sizeof(p->items[0]),
                .max = RENDER_PICTURES_MAX,
                .n = &p->n,
                .read = read_entry,
        };

        return request_read_entries(m, &e, f);
}

/* One for each end. The first one comes first. */
static int check_keyframes(RequestPictures *p, Fault *f) {
        RenderPicture first = p->items[0];

        if (p->n > 2 || (p->n == 2 && p->items[0].last == p->items[1].last))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%" PRIu32 " keyframes are given, %s; a film has at most one for its first and one, with \"last\", for "
                        "its last frame.",
                        p->n, p->n > 2 ? "too many" : p->items[0].last ? "both last" : "both first");

        if (p->n == 2 && first.last) {
                p->items[0] = p->items[1];
                p->items[1] = first;
        }
        return 0;
}

int request_check_pictures(RequestPictures *p, RenderOptions *o, Fault *f) {
        uint32_t keyframes = 0;
        int r;

        for (uint32_t i = 0; i < p->n; i++)
                keyframes += p->items[i].kind == WIRE_CONDITION_KEYFRAME;
        if (keyframes > 0 && keyframes < p->n)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%" PRIu32 " keyframes and %" PRIu32 " references are given: the model takes either of them.", keyframes,
                        p->n - keyframes);

        r = keyframes > 0 ? check_keyframes(p, f) : 0;
        if (r >= 0 && p->n > 0)
                r = descriptors_check("A picture", f);
        if (r < 0)
                return r;

        memcpy(o->pictures, p->items, sizeof(o->pictures));
        return 0;
}

int request_read_canvas(const RequestCanvas *c, const RequestPictures *p, RenderOptions *o, Fault *f) {
        int r;

        if (c->width_seen != c->height_seen)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"width\" and \"height\" go together: \"%s\" is missing.",
                        c->width_seen ? "height" : "width");

        r = canvas_frames(c->frames, &o->frames, f);
        if (r < 0)
                return r;

        if (!c->width_seen && p->n > 0 && p->items[0].kind == WIRE_CONDITION_KEYFRAME)
                return 0;

        return canvas_size(c->width, c->height, &o->width, &o->height, f);
}

/* The message's descriptors become ours. */
int request_own_pictures(const RequestPictures *p, RenderOptions *o) {
        int r = 0;

        o->n_pictures = 0;
        for (uint32_t i = 0; r >= 0 && i < p->n; i++) {
                r = request_own_file(p->items[i].file, &o->pictures[i].file);
                o->n_pictures += r >= 0; /* what failed is not o's */
        }
        return r;
}
