/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/client/fake-service.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <systemd/sd-bus.h>

#include "service/shared/cleanup.h"
#include "service/shared/wire.h"

#define NAME "org.latentd.Latent1"
#define ROOT "/org/latentd/Latent1"
#define JOB NAME ".Job"

/* ---- the fake service: a filter that answers every call; runs in the child ---- */

/* A text that grows: what a message holds, for the test to read. */
typedef struct Text {
        char buf[2048];
        size_t n;
} Text;

typedef struct Service {
        sd_bus *bus;
        const char *address;
        unsigned n_jobs, n_files, start;
        char behaviour[64]; /* of the newest job */
        uint8_t *input, *output;
        char adapters[8][32]; /* names of those that were loaded, by the number in their path */
        unsigned n_adapters;
        Text loras; /* of the newest SetLoras() */
        Text film;  /* of the newest coding request */
        bool leave;
} Service;


static void must(int r) {
        if (r < 0) {
                (void) fprintf(stderr, "fake service: %s\n", strerror(-r));
                _exit(1);
        }
}

__attribute__((format(printf, 2, 3))) static void add(Text *t, const char *format, ...) {
        va_list ap;

        va_start(ap, format);
        t->n += (size_t) vsnprintf(t->buf + t->n, sizeof(t->buf) - t->n, format, ap);
        va_end(ap);
        if (t->n >= sizeof(t->buf))
                _exit(1);
}

/* The next value of the message: "{seed=7,conditions=[{kind=image,video=(64,F32,[24,1,4,4])}]}". */
static void add_value(Text *t, sd_bus_message *m) {
        const char *contents;
        unsigned n = 0;
        char type;

        must(sd_bus_message_peek_type(m, &type, &contents));
        switch (type) {
        case 's':
        case 'o': {
                const char *v;

                must(sd_bus_message_read_basic(m, type, &v));
                add(t, "%s", v);
                return;
        }
        case 't': {
                uint64_t v;

                must(sd_bus_message_read_basic(m, type, &v));
                add(t, "%llu", (unsigned long long) v);
                return;
        }
        case 'h': { /* the first byte of the file */
                char c = '?';
                int fd;

                must(sd_bus_message_read_basic(m, type, &fd));
                must(pread(fd, &c, 1, 0));
                add(t, "%c", c);
                return;
        }
        case 'u':
        case 'b': {
                uint32_t v;

                must(sd_bus_message_read_basic(m, type, &v));
                add(t, "%u", v);
                return;
        }
        case 'd': {
                double v;

                must(sd_bus_message_read_basic(m, type, &v));
                add(t, "%g", v);
                return;
        }
        default:
                break;
        }

        must(sd_bus_message_enter_container(m, type, contents));
        if (type == 'a' && contents[0] == '{')
                add(t, "{");
        else if (type == 'a' || type == 'r')
                add(t, type == 'a' ? "[" : "(");
        while (sd_bus_message_at_end(m, false) == 0) {
                add(t, "%s", n++ == 0 ? "" : type == 'e' ? "=" : ",");
                add_value(t, m);
        }
        if (type == 'a')
                add(t, contents[0] == '{' ? "}" : "]");
        else if (type == 'r')
                add(t, ")");
        must(sd_bus_message_exit_container(m));
}

static void send_finished(
        sd_bus *bus, const char *to, const char *path, const char *state, const char *error) {
        sd_bus_message *m;

        must(sd_bus_message_new_signal(bus, &m, path, JOB, "Finished"));
        must(sd_bus_message_set_destination(m, to));
        must(sd_bus_message_append(m, "sss", state, error, error[0] ? "the reason" : ""));
        must(sd_bus_message_append(
                m, "a{sv}", 2, "model", "o", ROOT "/model/_37", "bytes-read", "t", UINT64_C(5)));
        must(sd_bus_send(bus, m, NULL));
        sd_bus_message_unref(m);
        must(sd_bus_flush(bus));
}

static void send_progress(Service *s, const char *to, const char *path, unsigned block) {
        sd_bus_message *m;

        must(sd_bus_message_new_signal(s->bus, &m, path, JOB, "Progress"));
        must(sd_bus_message_set_destination(m, to));
        must(sd_bus_message_append(m, "suuuudt", "read", 0, 1, block, 3, block / 3.0, UINT64_C(1000)));
        must(sd_bus_send(s->bus, m, NULL));
        sd_bus_message_unref(m);
}

/* From somebody else on the bus: a lie about the job's end. */
static void send_forged(Service *s, const char *to, const char *path) {
        sd_bus *other;

        must(sd_bus_new(&other));
        must(sd_bus_set_address(other, s->address));
        must(sd_bus_set_bus_client(other, true));
        must(sd_bus_start(other));
        send_finished(other, to, path, "failed", "Internal");
        sd_bus_flush_close_unref(other);
}

/* An adapter: its model's path has its number, which means nothing to another run of the service. */
static int on_load_adapter(Service *s, sd_bus_message *m, const char *name) {
        unsigned i = s->n_adapters++;
        sd_bus_message *f;
        char job[64], path[64];

        (void) snprintf(s->adapters[i], sizeof(s->adapters[i]), "%s", name);
        (void) snprintf(job, sizeof(job), ROOT "/job/_7%u", i);
        (void) snprintf(path, sizeof(path), ROOT "/model/_8%u", i);
        must(sd_bus_reply_method_return(m, "o", job));
        must(sd_bus_message_new_signal(s->bus, &f, job, JOB, "Finished"));
        must(sd_bus_message_set_destination(f, sd_bus_message_get_sender(m)));
        must(sd_bus_message_append(f, "sssa{sv}", "done", "", "", 1, "model", "o", path));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
        return 1;
}

/* Names and strengths of what is set. A strength of 0.125 is the first run's end behind its answer. */
static int on_set_loras(Service *s, sd_bus_message *m) {
        const char *path, *to = sd_bus_message_get_sender(m);
        bool dies = false;
        double strength;
        Text t = {};
        sd_bus_message *f;
        unsigned i;

        must(sd_bus_message_enter_container(m, 'a', "(od)"));
        while (sd_bus_message_read(m, "(od)", &path, &strength) > 0) {
                bool known = sscanf(path, ROOT "/model/_8%u", &i) == 1 && i < s->n_adapters;

                add(&t, "%s:%g ", known ? s->adapters[i] : "?", strength);
                dies = dies || (strength == 0.125 && s->start == 1);
        }
        must(sd_bus_message_exit_container(m));
        add_value(&t, m);
        s->loras = t;

        must(sd_bus_reply_method_return(m, "o", ROOT "/job/_60"));
        must(sd_bus_flush(s->bus));
        if (dies)
                _exit(0);
        must(sd_bus_message_new_signal(s->bus, &f, ROOT "/job/_60", JOB, "Finished"));
        must(sd_bus_message_set_destination(f, to));
        must(sd_bus_message_append(f, "sssa{sv}", "done", "", "", 3, "applied", "as", 1, "blocks.0", "refused", "a(ss)", 1,
                "blocks.9", "no such block", "bytes", "t", UINT64_C(42)));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
        return 1;
}

static int on_plan(sd_bus_message *m) {
        const char *kind;
        Text t = {};

        must(sd_bus_message_read(m, "s", &kind));
        add(&t, "%s ", kind);
        add_value(&t, m);
        return sd_bus_reply_method_return(m, "a{sv}", 2, "rows", "t", UINT64_C(33), "request", "s", t.buf);
}

static int on_load(Service *s, sd_bus_message *m) {
        const char *name, *to = sd_bus_message_get_sender(m);
        char path[64];

        must(sd_bus_message_read(m, "s", &name));
        if (strcmp(name, "refused") == 0)
                return sd_bus_reply_method_errorf(m, NAME ".Error.NotFound", "no model called %s", name);
        if (strcmp(name, "unknown-error") == 0)
                return sd_bus_reply_method_errorf(m, NAME ".Error.Novel", "of a later version");
        if (strcmp(name, "vanish-in-call") == 0)
                _exit(0);
        if (strncmp(name, "lora-", 5) == 0)
                return on_load_adapter(s, m, name);

        (void) snprintf(s->behaviour, sizeof(s->behaviour), "%s", name);
        (void) snprintf(path, sizeof(path), ROOT "/job/_%u", ++s->n_jobs);
        if (strcmp(name, "signal-first") == 0)
                send_finished(s->bus, to, path, "done", "");

        must(sd_bus_reply_method_return(m, "o", path));
        must(sd_bus_flush(s->bus));
        if (strcmp(name, "immediate") == 0 || strcmp(name, "changes") == 0)
                send_finished(s->bus, to, path, "done", "");
        else if (strcmp(name, "failed") == 0)
                send_finished(s->bus, to, path, "failed", "InvalidModel");
        else if (strcmp(name, "forged") == 0) {
                send_forged(s, to, path);
                send_finished(s->bus, to, path, "done", "");
        } else if (strcmp(name, "progress") == 0) {
                for (unsigned i = 1; i <= 3; i++)
                        send_progress(s, to, path, i);
                send_finished(s->bus, to, path, "done", "");
        } else if (strcmp(name, "strange") == 0)
                must(sd_bus_emit_signal(s->bus, path, JOB, "Finished", "u", 1));
        else if (strcmp(name, "vanish") == 0)
                _exit(0);
        return 1;
}

/* Job properties, for clients that lost a signal. */
static int on_get_all(Service *s, sd_bus_message *m) {
        const char *state = "running", *name = "", *text = "";

        if (strcmp(s->behaviour, "lost") == 0)
                state = "done";
        else if (strcmp(s->behaviour, "lost-failed") == 0)
                state = "failed", name = "DoesNotFit", text = "the numbers";
        else if (strcmp(s->behaviour, "forgotten") == 0)
                return sd_bus_reply_method_errorf(m, SD_BUS_ERROR_UNKNOWN_OBJECT, "no such job");

        return sd_bus_reply_method_return(m, "a{sv}", 5, "State", "s", state, "Phase", "s", "read", "Block",
                "u", 2, "Fraction", "d", 0.5, "Error", "(ss)", name, text);
}

/* A model or an adapter whose name ends so is another one in each run. */
static bool changes(const char *name) {
        size_t n = strlen(name);

        return n >= 7 && strcmp(name + n - 7, "changes") == 0;
}

static int on_get_identity(Service *s, sd_bus_message *m) {
        bool is_adapter = false;
        char text[32];
        unsigned i;

        is_adapter = sscanf(sd_bus_message_get_path(m), ROOT "/model/_8%u", &i) == 1 && i < s->n_adapters;
        (void) snprintf(text, sizeof(text), "fake-identity-%u", changes(is_adapter ? s->adapters[i] : s->behaviour) ? s->start : 0);
        return sd_bus_reply_method_return(m, "v", "s", text);
}

static int on_get(Service *s, sd_bus_message *m) {
        const char *interface, *property;

        must(sd_bus_message_read(m, "ss", &interface, &property));
        if (strcmp(property, "NumericsId") == 0)
                return sd_bus_reply_method_return(m, "v", "s", "fake-numerics");
        if (strcmp(property, "Identity") == 0)
                return on_get_identity(s, m);
        return sd_bus_reply_method_return(m, "v", "a{sv}", 1, "model", "o", ROOT "/model/_39");
}

static int on_add_files(Service *s, sd_bus_message *m) {
        unsigned n = 0;
        const char *name;
        int fd;

        must(sd_bus_message_enter_container(m, 'a', "(sh)"));
        while (sd_bus_message_read(m, "(sh)", &name, &fd) > 0) {
                char buf[8] = "";

                /* Each file of the test holds its own name's first bytes. */
                if (pread(fd, buf, 4, 0) != 4 || strncmp(buf, name, 4) != 0)
                        return sd_bus_reply_method_errorf(
                                m, NAME ".Error.InvalidFile", "%s holds %s", name, buf);
                n++;
        }
        if (n > 4)
                return sd_bus_reply_method_errorf(m, NAME ".Error.InvalidArgument", "%u files in a call", n);
        s->n_files += n;
        return sd_bus_reply_method_return(m, NULL);
}

static int on_commit(Service *s, sd_bus_message *m) {
        const char *to = sd_bus_message_get_sender(m);
        sd_bus_message *f;

        must(sd_bus_reply_method_return(m, "o", ROOT "/job/_99"));
        must(sd_bus_message_new_signal(s->bus, &f, ROOT "/job/_99", JOB, "Finished"));
        must(sd_bus_message_set_destination(f, to));
        must(sd_bus_message_append(f, "sss", "done", "", ""));
        must(sd_bus_message_append(f, "a{sv}", 1, "bytes-read", "t", (uint64_t) s->n_files));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
        return 1;
}

static int arena(uint64_t size, bool sealed, uint8_t **ret_map) {
        int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        if (fd < 0 || ftruncate(fd, (off_t) size) < 0)
                _exit(1);
        if (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) < 0)
                _exit(1);
        *ret_map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*ret_map == MAP_FAILED)
                _exit(1);
        return fd;
}

static int on_open_session(Service *s, sd_bus_message *m) {
        char path[64];
        int in, out, r;
        bool is_batch = false, is_split = false;
        uint64_t input_bytes = ARENA;
        const uint32_t *shares = NULL;
        const char *key, *text;
        size_t n_shares = 0;
        uint32_t chunks = 0;
        char gpus[64] = "";

        must(sd_bus_message_enter_container(m, 'a', "{sv}"));
        while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
                must(sd_bus_message_read(m, "s", &key));
                is_batch = is_batch || strcmp(key, "class") == 0;
                if (strcmp(key, "input-bytes") == 0)
                        must(sd_bus_message_read(m, "v", "t", &input_bytes));
                else if (strcmp(key, "plan") == 0) {
                        must(sd_bus_message_read(m, "v", "s", &text));
                        is_split = strcmp(text, "kv-gather") == 0;
                } else if (strcmp(key, "chunks") == 0)
                        must(sd_bus_message_read(m, "v", "u", &chunks));
                else if (strcmp(key, "shares") == 0) {
                        must(sd_bus_message_enter_container(m, 'v', "au"));
                        must(sd_bus_message_read_array(m, 'u', (const void **) &shares, &n_shares));
                        must(sd_bus_message_exit_container(m));
                } else if (strcmp(key, "gpus") == 0) {
                        must(sd_bus_message_enter_container(m, 'v', "as"));
                        must(sd_bus_message_enter_container(m, 'a', "s"));
                        while (sd_bus_message_read(m, "s", &text) > 0)
                                (void) snprintf(gpus + strlen(gpus), sizeof(gpus) - strlen(gpus), "%s;", text);
                        must(sd_bus_message_exit_container(m));
                        must(sd_bus_message_exit_container(m));
                } else
                        must(sd_bus_message_skip(m, "v"));
                must(sd_bus_message_exit_container(m));
        }

        /* The plan that the test asks for comes with just this. */
        if (is_split && (chunks != 5 || n_shares != 2 * sizeof(uint32_t) || shares[0] != 3 || shares[1] != 1))
                return sd_bus_reply_method_errorf(m, NAME ".Error.InvalidArgument", "other shares or chunks");

        if (gpus[0] != '\0' && strcmp(gpus, "0000:41:00.0;GPU-1;") != 0)
                return sd_bus_reply_method_errorf(m, NAME ".Error.NotSupported", "gpus: %s", gpus);

        in = arena(input_bytes, true, &s->input);
        out = arena(ARENA, !is_batch, &s->output);
        (void) snprintf(path, sizeof(path), ROOT "/session/_31");
        r = sd_bus_reply_method_return(m, "ohh", path, in, out);
        (void) close(in);
        (void) close(out);
        return r;
}

/* Answers with the video's bytes at offset 128 of the output, where the request's dictionary says that they
 * are. */
static int on_step(Service *s, sd_bus_message *m) {
        const char *to = sd_bus_message_get_sender(m), *key, *type;
        uint64_t offset = 0, out = 128, bad = ARENA - 4;
        sd_bus_message *f;
        double sigma = 0;
        Text t = {};

        add_value(&t, m);
        must(sd_bus_message_rewind(m, true));
        must(sd_bus_message_enter_container(m, 'a', "{sv}"));
        while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
                must(sd_bus_message_read(m, "s", &key));
                if (strcmp(key, "video") == 0) {
                        must(sd_bus_message_enter_container(m, 'v', "(tsat)"));
                        must(sd_bus_message_enter_container(m, 'r', "tsat"));
                        must(sd_bus_message_read(m, "ts", &offset, &type));
                        must(sd_bus_message_skip(m, "at"));
                        must(sd_bus_message_exit_container(m));
                        must(sd_bus_message_exit_container(m));
                } else if (strcmp(key, "sigma-video") == 0)
                        must(sd_bus_message_read(m, "v", "d", &sigma));
                else
                        must(sd_bus_message_skip(m, "v"));
                must(sd_bus_message_exit_container(m));
        }
        if ((sigma == 0.125 && s->start == 1) || (sigma == 0.0625 && s->start <= 2)) {
                must(sd_bus_reply_method_return(m, "o", ROOT "/job/_50"));
                must(sd_bus_flush(s->bus));
                _exit(0);
        }
        if (sigma == 0.1875 && s->start == 1) /* never ends */
                return sd_bus_reply_method_return(m, "o", ROOT "/job/_50");
        memcpy(s->output + out, s->input + offset, 24);

        must(sd_bus_reply_method_return(m, "o", ROOT "/job/_50"));
        must(sd_bus_message_new_signal(s->bus, &f, ROOT "/job/_50", JOB, "Finished"));
        must(sd_bus_message_set_destination(f, to));
        must(sd_bus_message_append(f, "sss", "done", "", ""));
        must(sd_bus_message_append(f, "a{sv}", 4, "rows", "t", (uint64_t) (sigma * 1000), "request", "s", t.buf, "loras", "s",
                s->loras.buf, "tensors", "a(stsat)", 2, "video_velocity", out, "F32", 2, UINT64_C(2), UINT64_C(3), "outside", bad,
                "F32", 1, UINT64_C(2)));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
        return 1;
}

/* The first run makes SAMPLE_STATES states in slots of as many bytes as the test says (seed), and is gone. The later ones answer
 * with their request; slots that came in lie from SAMPLE_COPIES of the output on. */
static int on_sample(Service *s, sd_bus_message *m) {
        uint64_t stride = 0, slot = 0, kept = 0, n_slots = 2;
        const char *key, *type;
        sd_bus_message *f;
        Text t = {};

        add_value(&t, m);
        must(sd_bus_message_rewind(m, true));
        must(sd_bus_message_enter_container(m, 'a', "{sv}"));
        while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
                must(sd_bus_message_read(m, "s", &key));
                if (strcmp(key, "seed") == 0)
                        must(sd_bus_message_read(m, "v", "t", &stride));
                else if (strcmp(key, "resume-slot") == 0 || strcmp(key, "kept-slots") == 0) {
                        must(sd_bus_message_enter_container(m, 'v', "(tsat)"));
                        must(sd_bus_message_enter_container(m, 'r', "tsat"));
                        must(sd_bus_message_read(m, "ts", key[0] == 'r' ? &slot : &kept, &type));
                        must(sd_bus_message_skip(m, "at"));
                        must(sd_bus_message_exit_container(m));
                        must(sd_bus_message_exit_container(m));
                } else {
                        if (strcmp(key, "keep-steps") == 0)
                                n_slots = SAMPLE_STATES;
                        must(sd_bus_message_skip(m, "v"));
                }
                must(sd_bus_message_exit_container(m));
        }

        must(sd_bus_reply_method_return(m, "o", ROOT "/job/_55"));
        if (s->start == 1) {
                uint64_t word = wire_commit_pack(1, SAMPLE_STATES - 1);

                for (unsigned k = 0; k < SAMPLE_STATES; k++)
                        memset(s->output + 64 + k % n_slots * stride, (int) k + 1, stride);
                memcpy(s->output, &word, sizeof(word));
                must(sd_bus_flush(s->bus));
                _exit(0);
        }

        if (slot > 0)
                memcpy(s->output + SAMPLE_COPIES, s->input + slot, stride);
        if (kept > 0)
                memcpy(s->output + SAMPLE_COPIES + stride, s->input + kept, (SAMPLE_STATES - 1) * stride);
        must(sd_bus_message_new_signal(s->bus, &f, ROOT "/job/_55", JOB, "Finished"));
        must(sd_bus_message_set_destination(f, sd_bus_message_get_sender(m)));
        must(sd_bus_message_append(f, "sssa{sv}", "done", "", "", 1, "request", "s", t.buf));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
        return 1;
}

#define FILM ROOT "/job/_66"

static void append_film(sd_bus_message *m, const char *request) {
        must(sd_bus_message_append(m, "a{sv}", 3, "request", "s", request, "frames", "t", UINT64_C(22), "tensors", "a(stsat)", 1, "frames",
                UINT64_C(192), "U8", 4, UINT64_C(22), UINT64_C(1), UINT64_C(1), UINT64_C(3)));
}

static void send_film(Service *s, const char *to) {
        sd_bus_message *f;

        must(sd_bus_message_new_signal(s->bus, &f, FILM, JOB, "Finished"));
        must(sd_bus_message_set_destination(f, to));
        must(sd_bus_message_append(f, "sss", "done", "", ""));
        append_film(f, s->film.buf);
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
}

static void send_frames(Service *s, const char *to, uint64_t first, uint64_t count) {
        sd_bus_message *f;

        for (uint64_t i = first; i < first + count; i++)
                memset(s->output + 192 + 3 * i, (int) (i + 1), 3);
        must(sd_bus_message_new_signal(s->bus, &f, FILM, JOB, "FramesReady"));
        must(sd_bus_message_set_destination(f, to));
        must(sd_bus_message_append(f, "tt", first, count));
        must(sd_bus_send(s->bus, f, NULL));
        sd_bus_message_unref(f);
}

/* Answers with the request. A film has 22 frames: 17 at once, the rest when 17 were released; one of type f32 takes the first run of
 * the service with it when 17 frames are there, and another is done at once in the next. */
static int on_coding(Service *s, sd_bus_message *m) {
        const char *to = sd_bus_message_get_sender(m);

        s->film = (Text){};
        add(&s->film, "%s ", sd_bus_message_get_member(m));
        add_value(&s->film, m);
        must(sd_bus_reply_method_return(m, "o", FILM));
        if (strcmp(sd_bus_message_get_member(m), "Decode") != 0) {
                send_film(s, to);
                return 1;
        }

        send_frames(s, to, 0, 17);
        must(sd_bus_flush(s->bus));
        if (!strstr(s->film.buf, "type=f32"))
                return 1;
        if (s->start > 1) {
                send_frames(s, to, 17, 5);
                send_film(s, to);
        } else
                s->leave = true; /* when its result was read */
        return 1;
}

static int on_release(Service *s, sd_bus_message *m) {
        uint64_t up_to;

        must(sd_bus_message_read(m, "t", &up_to));
        must(sd_bus_reply_method_return(m, NULL));
        if (up_to == 17) {
                send_frames(s, sd_bus_message_get_sender(m), 17, 5);
                send_film(s, sd_bus_message_get_sender(m));
        }
        return 1;
}

static int on_get_film(Service *s, sd_bus_message *m) {
        sd_bus_message *r;

        must(sd_bus_message_new_method_return(m, &r));
        must(sd_bus_message_open_container(r, 'v', "a{sv}"));
        append_film(r, "");
        must(sd_bus_message_close_container(r));
        must(sd_bus_send(s->bus, r, NULL));
        sd_bus_message_unref(r);
        must(sd_bus_flush(s->bus));
        if (s->leave)
                _exit(0);
        return 1;
}

static int on_release_gpus(Service *s, sd_bus_message *m) {
        return sd_bus_message_has_signature(m, "a{sv}") > 0 ?
                sd_bus_reply_method_errorf(m, NAME ".Error.Busy", "The worker is busy.") :
                sd_bus_reply_method_errorf(m, NAME ".Error.InvalidArgument", "no options");
}

static int on_property(Service *s, sd_bus_message *m) {
        return strcmp(sd_bus_message_get_path(m), FILM) == 0 ? on_get_film(s, m) : on_get(s, m);
}

static int on_new_model(Service *s, sd_bus_message *m) {
        return sd_bus_reply_method_return(m, "o", ROOT "/model/_37");
}

static int on_any_plan(Service *s, sd_bus_message *m) {
        return on_plan(m);
}

static int on_cancel(Service *s, sd_bus_message *m) {
        must(sd_bus_reply_method_return(m, NULL));
        send_finished(s->bus, sd_bus_message_get_sender(m), sd_bus_message_get_path(m), "cancelled", "Cancelled");
        return 1;
}

static int on_managed_objects(Service *s, sd_bus_message *m) {
        return sd_bus_reply_method_return(m, "a{oa{sa{sv}}}", 3, ROOT "/model/_310", 1,
                NAME ".Model", 1, "Name", "s", "tiny", ROOT "/model/_39", 1, NAME ".Model", 1,
                "Name", "s", "tiny", ROOT "/device/_31", 1, NAME ".Device", 1, "Kind", "s", "cpu");
}

static int on_message(sd_bus_message *m, void *userdata, sd_bus_error *reterr_error) {
        static const struct {
                const char *member;
                int (*answer)(Service *s, sd_bus_message *m);
        } calls[] = {
                {"AddFiles", on_add_files},     {"Cancel", on_cancel},
                {"Commit", on_commit},          {"Decode", on_coding},
                {"Encode", on_coding},          {"EncodeMedia", on_coding},
                {"Get", on_property},           {"GetAll", on_get_all},
                {"GetManagedObjects", on_managed_objects},
                {"LoadModel", on_load},         {"NewModel", on_new_model},
                {"OpenSession", on_open_session}, {"Plan", on_any_plan},
                {"ReleaseFrames", on_release},  {"ReleaseGpus", on_release_gpus},
                {"Render", on_coding},
                {"Sample", on_sample},          {"SetLoras", on_set_loras},
                {"Step", on_step},              {"Tokenize", on_coding},
        };
        const char *member = sd_bus_message_get_member(m), *path = sd_bus_message_get_path(m);

        if (!member || !path || sd_bus_message_is_method_call(m, NULL, NULL) <= 0 ||
                strncmp(path, ROOT, strlen(ROOT)) != 0)
                return 0;

        for (size_t i = 0; i < ELEMENTSOF(calls); i++)
                if (strcmp(member, calls[i].member) == 0)
                        return calls[i].answer(userdata, m);
        return sd_bus_reply_method_return(m, NULL);
}

static _Noreturn void service_run(const char *address, unsigned start, int ready) {
        Service s = {.address = address, .start = start};

        must(sd_bus_new(&s.bus));
        must(sd_bus_set_address(s.bus, address));
        must(sd_bus_set_bus_client(s.bus, true));
        must(sd_bus_start(s.bus));
        must(sd_bus_add_filter(s.bus, NULL, on_message, &s));
        must(sd_bus_request_name(s.bus, NAME, 0));
        if (write(ready, "", 1) != 1)
                _exit(1);

        for (;;) {
                int r = sd_bus_process(s.bus, NULL);

                must(r);
                if (r == 0)
                        must(sd_bus_wait(s.bus, UINT64_MAX));
        }
}

/* ---- the test's side ---- */

void fake_start_service(Fake *f) {
        int pipe_fd[2];
        char c;

        assert_int_equal(pipe2(pipe_fd, O_CLOEXEC), 0);
        f->n_starts++;
        f->service_pid = fork();
        assert_true(f->service_pid >= 0);
        if (f->service_pid == 0) {
                (void) prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that crashes leaves nothing behind */
                (void) close(pipe_fd[0]);
                service_run(f->address, f->n_starts, pipe_fd[1]);
        }
        (void) close(pipe_fd[1]);
        assert_int_equal(read(pipe_fd[0], &c, 1), 1);
        (void) close(pipe_fd[0]);
}

static void end_process(int *pid) {
        if (*pid <= 0)
                return;
        (void) kill(*pid, SIGKILL);
        (void) waitpid(*pid, NULL, 0);
        *pid = 0;
}

void fake_kill_service(Fake *f) {
        end_process(&f->service_pid);
}

static void start_bus(Fake *f) {
        char config[128];
        int pipe_fd[2];
        FILE *file;
        char c;

        (void) snprintf(f->directory, sizeof(f->directory), "/tmp/latent-test-XXXXXX");
        assert_non_null(mkdtemp(f->directory));
        (void) snprintf(f->address, sizeof(f->address), "unix:path=%s/bus", f->directory);
        (void) snprintf(config, sizeof(config), "%s/bus.conf", f->directory);
        file = fopen(config, "we");
        assert_non_null(file);
        (void) fprintf(file,
                "<busconfig><type>session</type><listen>%s</listen><auth>EXTERNAL</auth><policy "
                "context=\"default\">"
                "<allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/><allow "
                "receive_sender=\"*\"/></policy>"
                "</busconfig>",
                f->address);
        assert_int_equal(fclose(file), 0);

        assert_int_equal(pipe(pipe_fd), 0);
        f->bus_pid = fork();
        assert_true(f->bus_pid >= 0);
        if (f->bus_pid == 0) {
                char option[160], print[48];

                (void) prctl(PR_SET_PDEATHSIG, SIGKILL);

                (void) snprintf(option, sizeof(option), "--config-file=%s", config);
                (void) snprintf(print, sizeof(print), "--print-address=%d", pipe_fd[1]);
                execlp("dbus-daemon", "dbus-daemon", option, print, "--nofork", "--nosyslog", NULL);
                _exit(127);
        }
        (void) close(pipe_fd[1]);
        assert_int_equal(read(pipe_fd[0], &c, 1), 1); /* it listens */
        (void) close(pipe_fd[0]);
}

int fake_setup(void **state) {
        latent_client_options o = {.struct_size = sizeof(o), .bus = LATENT_BUS_ADDRESS};
        latent_error e = {};
        Fake *f;

        f = calloc(1, sizeof(*f));
        assert_non_null(f);
        start_bus(f);
        fake_start_service(f);

        o.address = f->address;
        if (latent_client_new(&o, &f->client, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        *state = f;
        return 0;
}

int fake_teardown(void **state) {
        Fake *f = *state;
        char path[128];

        latent_client_free(f->client);
        end_process(&f->service_pid);
        end_process(&f->bus_pid);
        (void) snprintf(path, sizeof(path), "%s/bus.conf", f->directory);
        (void) unlink(path);
        (void) snprintf(path, sizeof(path), "%s/bus", f->directory);
        (void) unlink(path);
        (void) rmdir(f->directory);
        free(f);
        return 0;
}

latent_job *fake_load(Fake *f, const char *behaviour) {
        latent_job *job = NULL;
        latent_error e = {};

        if (latent_model_load_name(f->client, behaviour, NULL, &job, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        return job;
}
