/* SPDX-License-Identifier: Apache-2.0 */
/* A Render with pictures, over a worker and a latent-media that the test plays. A file holds the answer to its PROBE. */
#include <dirent.h>

#include "service/shared/media-wire.h"
#include "tests/unit/latentd/fake-render.h"

#define CONNECTIONS 16

typedef struct Reader {
        int listen;
        sd_event_source *accept_source, *sources[CONNECTIONS];
        int conns[CONNECTIONS];
        MediaRead reads[64]; /* as they came, PROBEs too */
        unsigned n_reads;
        /* Before an answer leaves. False: it is not sent, and the process dies. */
        bool (*hook)(const MediaRead *q, MediaMessage *answer);
        bool silent;
} Reader;

static Reader reader;

static void hang_up(unsigned i) {
        reader.sources[i] = sd_event_source_disable_unref(reader.sources[i]);
        cleanup_closep(&reader.conns[i]);
}

static void answer(unsigned i, const MediaRead *q, int file) {
        MediaDone probed;
        MediaMessage m;

        assert_int_equal(pread(file, &probed, sizeof(probed), 0), sizeof(probed));
        (void) media_init(&m, MEDIA_DONE);
        if (q->what == MEDIA_PROBE) {
                probed.header = m.header;
                m.done = probed;
        } else if (q->what == MEDIA_SOUND)
                m.done.samples = probed.samples < q->samples_max ? probed.samples : q->samples_max;
        else {
                m.done.frames = q->what == MEDIA_CLIP ? probed.frames < q->frames_max ? probed.frames : q->frames_max : 1;
                m.done.width = q->width;
                m.done.height = q->height;
        }
        if (!reader.hook || reader.hook(q, &m))
                assert_int_equal(media_send(reader.conns[i], &m, NULL, 0), 0);
        hang_up(i);
}

static int on_message(sd_event_source *source, int fd, uint32_t events, void *userdata) {
        int fds[MEDIA_FDS_MAX] = { -EBADF, -EBADF };
        unsigned i = (unsigned) (uintptr_t) userdata;
        MediaMessage m;
        Fault f = {};
        int r;

        r = media_receive(fd, &m, fds, &f);
        if (r == -EAGAIN)
                return 0;
        if (r <= 0) {
                hang_up(i);
                return 0;
        }
        assert_int_equal(m.header.type, MEDIA_READ);
        assert_true(reader.n_reads < ELEMENTSOF(reader.reads));
        assert_true(m.read.what == MEDIA_PROBE ? fds[1] < 0 : fds[1] >= 0);
        reader.reads[reader.n_reads++] = m.read;
        if (!reader.silent)
                answer(i, &m.read, fds[0]);
        for (size_t k = 0; k < MEDIA_FDS_MAX; k++)
                cleanup_closep(&fds[k]);
        return 0;
}

static int on_connection(sd_event_source *source, int fd, uint32_t events, void *userdata) {
        Fake *f = userdata;
        MediaMessage m;
        unsigned i;

        for (i = 0; i < CONNECTIONS && reader.conns[i] >= 0; i++)
                ;
        assert_true(i < CONNECTIONS);
        reader.conns[i] = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        assert_true(reader.conns[i] >= 0);
        assert_true(sd_event_add_io(f->m->event, &reader.sources[i], reader.conns[i], EPOLLIN, on_message, (void *) (uintptr_t) i) >= 0);
        (void) media_init(&m, MEDIA_HELLO);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", LATENTD_VERSION);
        if (media_send(reader.conns[i], &m, NULL, 0) < 0) /* cancelled meanwhile */
                hang_up(i);
        return 0;
}

static int setup(void **state) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };
        Fake *f;

        assert_int_equal(fake_setup(state), 0);
        f = *state;
        reader = (Reader){};
        for (unsigned i = 0; i < CONNECTIONS; i++)
                reader.conns[i] = -EBADF;
        (void) snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/media.sock", f->dir);
        reader.listen = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_int_equal(bind(reader.listen, (struct sockaddr *) &sa, sizeof(sa)), 0);
        assert_int_equal(listen(reader.listen, 8), 0);
        free(f->m->config->media_socket);
        f->m->config->media_socket = strdup(sa.sun_path);
        assert_true(sd_event_add_io(f->m->event, &reader.accept_source, reader.listen, EPOLLIN, on_connection, f) >= 0);
        return 0;
}

static int teardown(void **state) {
        Fake *f = *state;

        assert_int_equal(unlink(f->m->config->media_socket), 0);
        for (unsigned i = 0; i < CONNECTIONS; i++)
                if (reader.conns[i] >= 0)
                        hang_up(i);
        sd_event_source_disable_unref(reader.accept_source);
        cleanup_closep(&reader.listen);
        return fake_teardown(state);
}

/* ---- requests ---- */

/* What the film needs of the arena, whatever its size. */
static RenderOptions film(uint32_t frames, WirePictureRule rule) {
        RenderOptions o = fake_film(frames);

        o.picture_rule = rule;
        return o;
}

/* Clips without a length have 1 frame. */
static void add(RenderOptions *o, uint32_t kind, uint32_t width, uint32_t height, uint64_t frames, uint64_t samples) {
        const MediaDone d = { .width = width, .height = height, .frames = frames, .samples = samples,
                .still = frames == 1 && samples == 0 };
        RenderPicture *p = &o->pictures[o->n_pictures++];

        *p = (RenderPicture){ .kind = kind };
        (void) snprintf(p->name, sizeof(p->name), "file %u", o->n_pictures);
        p->file = memfd_create("picture", MFD_CLOEXEC);
        assert_true(p->file >= 0);
        assert_int_equal(pwrite(p->file, &d, sizeof(d), 0), sizeof(d));
}

#define ANY RENDER_KIND_BY_CONTENT

static unsigned count_files(void) {
        DIR *d = opendir("/proc/self/fd");
        unsigned n = 0;

        assert_non_null(d);
        while (readdir(d))
                n++;
        (void) closedir(d);
        return n;
}

static Job *run(Fake *f, Session *s, const RenderOptions *o) {
        Job *j = fake_render(f, s, o);

        RUN_UNTIL(f, job_is_finished(j));
        return j;
}

static WireJobOpen opened[24];
static unsigned n_opened;

static bool record(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_JOB_OPEN && n_opened < ELEMENTSOF(opened))
                opened[n_opened++] = m->job_open;
        return false;
}

static const WireJobOpen *first_of(WireJobKind kind, unsigned skip) {
        for (unsigned i = 0; i < n_opened; i++)
                if (opened[i].kind == kind && !(opened[i].flags & WIRE_JOB_PLAN_ONLY) && skip-- == 0)
                        return &opened[i];
        fail_msg("no job of kind %d", kind);
        return NULL;
}

static void assert_done(Fake *f, const Job *j) {
        if (j->state != JOB_DONE)
                fail_msg("%s: %s", j->fault.name, j->fault.text);
        assert_true(TAILQ_EMPTY(&f->m->unfinished));
}

/* All of it is gone but the session that the client has. */
static void assert_clean(Fake *f, const Session *s) {
        RUN_UNTIL(f, TAILQ_FIRST(&f->m->sessions) == s && !TAILQ_NEXT(s, entry) && TAILQ_EMPTY(&f->m->unfinished));
        RUN_UNTIL(f, f->m->arena_bytes == ARENA_BYTES + FILM_ARENA);
        assert_int_equal(s->n_busy, 0);
        assert_int_equal(f->vae->n_users, 1);
}

static void fails(Fake *f, const Session *s, const RenderOptions *o, const char *name, const char *word) {
        Job *j = run(f, (Session *) s, o);

        if (j->state != JOB_FAILED || strcmp(j->fault.name, name) != 0 || !strstr(j->fault.text, word))
                fail_msg("%s: \"%s\" is not %s with \"%s\"", j->fault.name, j->fault.text, name, word);
        assert_int_equal(f->count[WIRE_STEP], 0); /* nothing was computed */
        assert_clean(f, s);
}

/* Descriptors once a worker is there and nothing runs. */
static unsigned settled_files(Fake *f, Session *s) {
        RenderOptions o = film(22, WIRE_PICTURE_COMFY);

        add(&o, WIRE_CONDITION_KEYFRAME, 64, 64, 1, 0);
        assert_done(f, run(f, s, &o));
        assert_clean(f, s);
        run_for(f, 100000);
        reader.n_reads = 0;
        return count_files();
}

/* ---- what is asked for ---- */

static void keyframes_are_stretched_and_stand_at_the_ends(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(22, WIRE_PICTURE_REFERENCE);
        const WireJobOpen *q;
        unsigned files = settled_files(f, s);
        Job *j;


        add(&o, WIRE_CONDITION_KEYFRAME, 100, 50, 1, 0);
        add(&o, WIRE_CONDITION_KEYFRAME, 50, 100, 1, 0);
        o.pictures[1].last = true;
        f->hook = record;
        n_opened = 0;
        j = run(f, s, &o);
        assert_done(f, j);
        assert_int_equal(reader.n_reads, 4);
        for (unsigned i = 0; i < 2; i++) {
                assert_int_equal(reader.reads[i].what, MEDIA_PROBE);
                assert_int_equal(reader.reads[2 + i].what, MEDIA_PICTURE);
                assert_int_equal(reader.reads[2 + i].fit, i == 0 ? MEDIA_FIT_STRETCH : MEDIA_FIT_COVER);
                assert_int_equal(reader.reads[2 + i].width, SIDE);
                q = first_of(WIRE_JOB_ENCODE_MEDIA, i);
                assert_int_equal(q->model, f->vae->id);
                assert_int_equal(q->video.offset, reader.reads[2 + i].offset);
                assert_int_equal(q->video.shape[0], 1);
                assert_int_equal(q->posterior, WIRE_POSTERIOR_SAMPLED);
                assert_int_equal(q->seed, 42);
        }
        q = first_of(WIRE_JOB_ENCODE, 0);
        assert_int_equal(q->n_conditions, 2);
        assert_int_equal(q->picture_rule, WIRE_PICTURE_REFERENCE);
        assert_int_equal(q->conditions[1].video_offset, reader.reads[3].offset);
        assert_int_equal(q->text.offset, 0);
        assert_int_equal(q->text.size, FAKE_TEXT);
        q = first_of(WIRE_JOB_SAMPLE, 0);
        assert_int_equal(q->n_conditions, 2);
        assert_int_equal(q->condition_noise, WIRE_NOISE_COMFY);
        assert_int_equal(q->conditions[0].frame, 0);
        assert_int_equal(q->conditions[1].frame, 21);
        assert_int_equal(q->conditions[1].height, SIDE / 16);
        assert_int_not_equal(q->conditions[0].video_offset, q->conditions[1].video_offset);
        assert_clean(f, s);
        RUN_UNTIL(f, count_files() <= files);
}

static void last_keyframe_alone_is_the_geometry(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        for (WirePictureRule rule = 0; rule < _WIRE_PICTURE_RULE_MAX; rule++) {
                RenderOptions o = film(22, rule);

                reader.n_reads = 0;
                add(&o, WIRE_CONDITION_KEYFRAME, 100, 50, 1, 0);
                o.pictures[0].last = true;
                assert_done(f, run(f, s, &o));
                assert_int_equal(reader.reads[1].fit, rule == WIRE_PICTURE_COMFY ? MEDIA_FIT_COVER : MEDIA_FIT_STRETCH);
        }
}

static void references_come_in_comfys_order(void **state) {
        const uint32_t want[] = { WIRE_CONDITION_IMAGE, WIRE_CONDITION_VIDEO, WIRE_CONDITION_AUDIO };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(39, WIRE_PICTURE_COMFY);
        const WireJobOpen *q;

        add(&o, ANY, 0, 0, 0, 32000 * 600);
        add(&o, ANY, 64, 64, 30, 8000);
        add(&o, ANY, 64, 32, 1, 0);
        f->hook = record;
        n_opened = 0;
        assert_done(f, run(f, s, &o));
        assert_int_equal(reader.n_reads, 3 + 4);
        assert_int_equal(reader.reads[3].what, MEDIA_PICTURE);
        assert_true(reader.reads[3].width == 32 && reader.reads[3].height == 32); /* 64 x 32 in a film of 32 x 32: 45 x 22 */
        assert_int_equal(reader.reads[4].what, MEDIA_CLIP);
        assert_int_equal(reader.reads[4].width, 64);
        assert_int_equal(reader.reads[4].frames_max, 39); /* not 54 */
        assert_int_equal(reader.reads[5].what, MEDIA_SOUND);
        assert_int_equal(reader.reads[5].samples_max, 39 * 4000 / 3);
        assert_int_equal(reader.reads[5].cut, 1);
        q = first_of(WIRE_JOB_ENCODE, 0);
        for (unsigned i = 0; i < 3; i++)
                assert_int_equal(q->conditions[i].kind, want[i]);
        assert_int_equal(q->conditions[1].frames, 22); /* of 30 */
        assert_int_equal(q->conditions[1].audio, 1);
        assert_int_equal(first_of(WIRE_JOB_ENCODE_MEDIA, 0)->posterior, WIRE_POSTERIOR_MEAN);
        assert_int_equal(first_of(WIRE_JOB_ENCODE_MEDIA, 1)->video.shape[0], 22);
        assert_int_equal(first_of(WIRE_JOB_ENCODE_MEDIA, 2)->audio.shape[1], 8000);
        assert_int_equal(first_of(WIRE_JOB_ENCODE_MEDIA, 3)->audio.shape[1], 52000);
        q = first_of(WIRE_JOB_SAMPLE, 0);
        assert_int_equal(q->conditions[1].frames, 7);
        assert_int_equal(q->conditions[1].audio, 10);
        assert_int_equal(q->conditions[2].audio, 65);
        assert_clean(f, s);
}

static void references_keep_their_order_by_the_reference(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(22, WIRE_PICTURE_REFERENCE);
        const WireJobOpen *q;

        add(&o, ANY, 0, 0, 0, 1); /* of unknown length */
        add(&o, ANY, 64, 64, 20, 0);
        f->hook = record;
        n_opened = 0;
        assert_done(f, run(f, s, &o));
        assert_int_equal(reader.reads[2].what, MEDIA_SOUND);
        assert_int_equal(reader.reads[3].width, 768);
        q = first_of(WIRE_JOB_ENCODE, 0);
        assert_int_equal(q->conditions[0].kind, WIRE_CONDITION_AUDIO);
        assert_int_equal(q->conditions[1].frames, 20); /* all are shown */
        assert_int_equal(first_of(WIRE_JOB_ENCODE_MEDIA, 0)->video.shape[0], 5); /* the sound has its turn after it */;
}

static void sound_of_a_clip_is_a_wish(void **state) {
        const struct {
                RenderSound wish;
                uint64_t samples;
                bool read;
        } cases[] = { { RENDER_SOUND_AS_IT_HAS, 800, true }, { RENDER_SOUND_AS_IT_HAS, 0, false }, { RENDER_SOUND_NONE, 800, false },
                { RENDER_SOUND_NEEDED, 800, true } };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        f->hook = record;
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);

                n_opened = 0;
                add(&o, WIRE_CONDITION_VIDEO, 64, 64, 22, cases[i].samples);
                o.pictures[0].sound = cases[i].wish;
                assert_done(f, run(f, s, &o));
                assert_int_equal(first_of(WIRE_JOB_ENCODE, 0)->conditions[0].audio, cases[i].read);
                assert_int_equal(first_of(WIRE_JOB_SAMPLE, 0)->conditions[0].audio, cases[i].read);
        }
}

static void film_is_as_its_first_picture(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(22, WIRE_PICTURE_COMFY);

        o.width = o.height = 0;
        add(&o, WIRE_CONDITION_KEYFRAME, 64, 64, 1, 0);
        fails(f, s, &o, FAULT_DOES_NOT_FIT, "output arena"); /* 768 x 768 */
        assert_int_equal(reader.n_reads, 1);

        o = film(22, WIRE_PICTURE_COMFY);
        o.width = o.height = 0;
        add(&o, WIRE_CONDITION_KEYFRAME, 500, 100, 1, 0);
        fails(f, s, &o, FAULT_INVALID_ARGUMENT, "\"pictures\"[0] (file 1): 500x100");
}

/* ---- what is refused ---- */

static void files_that_are_no_good_are_named(void **state) {
        const struct {
                uint32_t kind, width, height;
                uint64_t frames, samples;
                RenderSound sound;
                const char *name, *word;
        } cases[] = {
                { WIRE_CONDITION_KEYFRAME, 1, 1, 1, 0, 0, FAULT_INVALID_FILE, "1x1 pixels" },
                { ANY, 15, 64, 1, 0, 0, FAULT_INVALID_FILE, "15x64" },
                { ANY, 257, 64, 1, 0, 0, FAULT_INVALID_ARGUMENT, "4:1" },
                { WIRE_CONDITION_KEYFRAME, 0, 0, 0, 800, 0, FAULT_INVALID_FILE, "only sound" },
                { WIRE_CONDITION_VIDEO, 64, 64, 1, 0, 0, FAULT_INVALID_FILE, "where a clip is asked" },
                { WIRE_CONDITION_AUDIO, 64, 64, 22, 0, 0, FAULT_INVALID_FILE, "no sound" },
                { ANY, 64, 64, 22, 0, RENDER_SOUND_NEEDED, FAULT_INVALID_FILE, "no sound" },
                { ANY, 0, 0, 0, 800, RENDER_SOUND_NEEDED, FAULT_INVALID_ARGUMENT, "\"sound\"" },
                { ANY, 64, 64, 24 * 601, 0, 0, FAULT_LIMIT, "601 seconds" },
                { ANY, 64, 64, 4, 0, 0, FAULT_INVALID_FILE, "4 frames" },
                { ANY, 0, 0, 0, 800, 0, FAULT_INVALID_ARGUMENT, "sounds alone" },
                { ANY, 0, 0, 0, UINT64_C(32000) * 36000, 0, FAULT_LIMIT, "36000 seconds" },
        };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        unsigned files = count_files();

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);

                add(&o, cases[i].kind, cases[i].width, cases[i].height, cases[i].frames, cases[i].samples);
                o.pictures[0].sound = cases[i].sound;
                fails(f, s, &o, cases[i].name, cases[i].word);
                f->peer->n_finished = 0;
                while (!TAILQ_EMPTY(&f->m->jobs))
                        (void) job_free(TAILQ_FIRST(&f->m->jobs));
        }
        RUN_UNTIL(f, count_files() <= files);
}

static void reference_shows_thirteen_frames(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(22, WIRE_PICTURE_REFERENCE);

        add(&o, ANY, 64, 64, 12, 0);
        fails(f, s, &o, FAULT_INVALID_FILE, "at least 13");
}

static void too_many_of_a_kind_are_refused(void **state) {
        const struct {
                unsigned images, videos, audios;
                const char *word;
        } cases[] = { { 10, 0, 0, "at most 9" }, { 0, 4, 0, "at most 3" }, { 1, 0, 4, "at most 3" }, { 9, 3, 0, NULL } };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);

                reader.n_reads = 0;
                for (unsigned k = 0; k < cases[i].images; k++)
                        add(&o, ANY, 64, 64, 1, 0);
                for (unsigned k = 0; k < cases[i].videos; k++)
                        add(&o, ANY, 64, 64, 22, 0);
                for (unsigned k = 0; k < cases[i].audios; k++)
                        add(&o, ANY, 0, 0, 0, 800);
                if (cases[i].word)
                        fails(f, s, &o, FAULT_INVALID_ARGUMENT, cases[i].word);
                else
                        assert_done(f, run(f, s, &o));
        }
}

static void partition_of_the_model_decides(void **state) {
        const struct {
                const char *partition, *word; /* NULL: taken */
                uint32_t kind;
        } cases[] = { { "fl2va", "fl2va partition", ANY }, { "fl2va", NULL, WIRE_CONDITION_KEYFRAME }, { "ref2va", NULL, ANY },
                { "ref2va", "ref2va partition", WIRE_CONDITION_KEYFRAME }, { "", NULL, ANY } };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);
                Fault fault = {};
                Job *j;

                (void) snprintf(f->model->partition, sizeof(f->model->partition), "%s", cases[i].partition);
                add(&o, cases[i].kind, 64, 64, 1, 0);
                if (!cases[i].word) {
                        assert_done(f, run(f, s, &o));
                        continue;
                }
                assert_int_equal(render_new(s, f->peer, &o, &j, &fault), -EINVAL);
                assert_non_null(strstr(fault.text, cases[i].word));
                assert_true(fcntl(o.pictures[0].file, F_GETFD) >= 0); /* still the caller's */
                render_options_done(&o);
        }
}

/* ---- deaths and lies ---- */

static uint32_t victim; /* MediaWhat */
static unsigned deaths, died;

static bool die(const MediaRead *q, MediaMessage *m) {
        return q->what != victim || died++ >= deaths;
}

static void reader_that_dies_is_asked_once_more(void **state) {
        const uint32_t whats[] = { MEDIA_PROBE, MEDIA_PICTURE, MEDIA_CLIP, MEDIA_SOUND };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        reader.hook = die;
        for (deaths = 2; deaths > 0; deaths--)
                for (size_t i = 0; i < ELEMENTSOF(whats); i++) {
                        RenderOptions o = film(22, WIRE_PICTURE_COMFY);

                        victim = whats[i];
                        died = reader.n_reads = 0;
                        add(&o, ANY, 64, 64, 1, 0);
                        add(&o, ANY, 64, 64, 22, 800);
                        if (deaths == 2)
                                fails(f, s, &o, FAULT_IO, "latent-media died");
                        else {
                                assert_done(f, run(f, s, &o));
                                assert_int_equal(reader.n_reads, 6);
                        }
                }
        assert_clean(f, s);
}

static void (*lie)(MediaDone *d);
static uint32_t lied_to;

static bool tell(const MediaRead *q, MediaMessage *m) {
        if (q->what == lied_to)
                lie(&m->done);
        return true;
}

static void lie_frames(MediaDone *d) {
        d->frames += 1000;
}

static void lie_none(MediaDone *d) {
        d->frames = 0;
}

static void lie_width(MediaDone *d) {
        d->width++;
}

static void lie_samples(MediaDone *d) {
        d->samples += 1000000;
}

static void lie_size(MediaDone *d) {
        d->height = UINT32_MAX;
}

static void lie_flat(MediaDone *d) {
        d->height = 0;
}

static void numbers_that_cannot_be_are_not_used(void **state) {
        const struct {
                uint32_t what;
                void (*lie)(MediaDone *d);
                const char *name;
        } cases[] = { { MEDIA_CLIP, lie_frames, FAULT_IO }, { MEDIA_CLIP, lie_none, FAULT_IO }, { MEDIA_PICTURE, lie_width, FAULT_IO },
                { MEDIA_SOUND, lie_samples, FAULT_INVALID_FILE }, { MEDIA_PROBE, lie_size, FAULT_IO },
                { MEDIA_PROBE, lie_flat, FAULT_IO } };
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        reader.hook = tell;
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);

                lie = cases[i].lie;
                lied_to = cases[i].what;
                add(&o, ANY, 64, 64, 1, 0);
                add(&o, ANY, 64, 64, 22, 800);
                fails(f, s, &o, cases[i].name, "\"pictures\"[");
        }
}

static bool say_no(const MediaRead *q, MediaMessage *m) {
        (void) media_init(m, MEDIA_ERROR);
        (void) fault_set(&m->error.fault, -EFBIG, FAULT_LIMIT, "The fake reader says no.");
        return true;
}

static void errors_of_the_reader_keep_their_name(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        RenderOptions o = film(22, WIRE_PICTURE_COMFY);

        reader.hook = say_no;
        add(&o, ANY, 64, 64, 1, 0);
        fails(f, s, &o, FAULT_LIMIT, "\"pictures\"[0] (file 1): The fake reader says no.");
        assert_int_equal(reader.n_reads, 1); /* not asked again */
}

static unsigned seen;

static bool worker_dies(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || fake_job(f, m->header.job)->open.kind != WIRE_JOB_ENCODE_MEDIA || seen++ != died)
                return false;
        fake_die(f);
        return true;
}

static void worker_that_dies_costs_a_clip(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        f->hook = worker_dies;
        for (died = 0; died < 5; died++) { /* a picture, three clips of a film, its sound */
                RenderOptions o = film(39, WIRE_PICTURE_COMFY);

                seen = 0;
                add(&o, ANY, 64, 64, 1, 0);
                add(&o, ANY, 64, 64, 39, 800);
                assert_done(f, run(f, s, &o));
                assert_int_equal(seen, 6);
        }
        assert_clean(f, s);
}

static bool hold_media(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
                return true;
        }
        if (m->header.type != WIRE_STEP || fake_job(f, m->header.job)->open.kind != WIRE_JOB_ENCODE_MEDIA)
                return false;
        seen++;
        return true;
}

static bool be_silent_on_read(const MediaRead *q, MediaMessage *m) {
        if (q->what != MEDIA_PROBE)
                reader.silent = true;
        return q->what == MEDIA_PROBE;
}

static void cancel_is_answered_at_once(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);
        unsigned files = settled_files(f, s);

        for (unsigned when = 0; when < 4; when++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);
                Job *j;

                reader.n_reads = seen = 0;
                reader.silent = when == 1;
                reader.hook = when == 2 ? be_silent_on_read : NULL;
                f->hook = when == 3 ? hold_media : NULL;
                add(&o, ANY, 64, 64, 22, 800);
                j = fake_render(f, s, &o);
                if (when == 1)
                        RUN_UNTIL(f, reader.n_reads == 1);
                if (when == 2)
                        RUN_UNTIL(f, reader.silent);
                if (when == 3)
                        RUN_UNTIL(f, seen > 0);
                if (when == 1)
                        assert_string_equal(j->phase, "read");
                if (when == 3)
                        assert_string_equal(j->phase, "condition");
                job_cancel(j);
                assert_int_equal(j->state, JOB_CANCELLED);
                assert_clean(f, s);
        }
        RUN_UNTIL(f, count_files() <= files);
}

static bool is_measured(const Fake *f, RenderPhase phase) {
        const PaceTable *t = &f->m->paces;

        for (size_t i = 0; i < PACE_ENTRIES; i++)
                if (t->entries[i].usec > 0 && t->entries[i].key.files != 0 && t->entries[i].key.phase == (uint32_t) phase)
                        return true;

        return false;
}

static void phases_have_their_share(void **state) {
        Fake *f = *state;
        Session *s = fake_pipeline(f, FILM_ARENA);

        for (int i = 0; i < 2; i++) {
                RenderOptions o = film(22, WIRE_PICTURE_COMFY);
                Job *j;

                add(&o, ANY, 64, 64, 1, 0);
                add(&o, ANY, 64, 64, 22, 800);
                j = run(f, s, &o);
                assert_done(f, j);
                assert_int_equal(j->fraction, 1);
                for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++)
                        assert_true(is_measured(f, p));
        }
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        const struct CMUnitTest tests[] = {
                TEST(keyframes_are_stretched_and_stand_at_the_ends),
                TEST(last_keyframe_alone_is_the_geometry),
                TEST(references_come_in_comfys_order),
                TEST(references_keep_their_order_by_the_reference),
                TEST(sound_of_a_clip_is_a_wish),
                TEST(film_is_as_its_first_picture),
                TEST(files_that_are_no_good_are_named),
                TEST(reference_shows_thirteen_frames),
                TEST(too_many_of_a_kind_are_refused),
                TEST(partition_of_the_model_decides),
                TEST(reader_that_dies_is_asked_once_more),
                TEST(numbers_that_cannot_be_are_not_used),
                TEST(errors_of_the_reader_keep_their_name),
                TEST(worker_that_dies_costs_a_clip),
                TEST(cancel_is_answered_at_once),
                TEST(phases_have_their_share),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
