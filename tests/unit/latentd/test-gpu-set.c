/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/gpu-set.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/latentd/job.h"
#include "service/shared/cleanup.h"

#define TEST(name) cmocka_unit_test(name)
#define GIB (UINT64_C(1) << 30)

/* n GPUs, 0000:41:00.0 and so on; ways of 100, 101 ... from each to each, the host's of 10. */
static WireHello hello_of(uint32_t n) {
        WireHello h = {.n_devices = n};

        for (uint32_t i = 0; i < n; i++) {
                (void) snprintf(h.devices[i].name, sizeof(h.devices[i].name), "Card");
                (void) snprintf(h.devices[i].pci_address, sizeof(h.devices[i].pci_address), "0000:4%u:00.0", 1 + i);
                (void) snprintf(h.devices[i].uuid, sizeof(h.devices[i].uuid), "GPU-01234567-89ab-cdef-0123-456789abcde%u", i);
                h.devices[i].memory_free = (i + 1) * GIB;
                for (uint32_t k = 0; k < n; k++) {
                        h.peer_mbs[i][k] = i == k ? WIRE_LINK_SAME : 100 + 10 * i + k;
                        h.host_mbs[i][k] = i == k ? 0 : 10;
                }
        }
        return h;
}

/* Which of n stay, by their places: "02". */
static void expect_set(const Config *c, const DeviceInfo *infos, size_t n_infos, uint32_t n, const char *places, const char *note) {
        WireHello h = hello_of(n);
        GpuSet s;
        Fault f = {};

        assert_int_equal(gpu_set_apply(c, infos, n_infos, &h, &s, &f), 0);
        assert_int_equal(h.n_devices, strlen(places));
        for (uint32_t i = 0; i < h.n_devices; i++) {
                WireHello all = hello_of(n);
                uint32_t from = (uint32_t) (places[i] - '0');

                assert_int_equal(s.place[i], from);
                assert_string_equal(h.devices[i].pci_address, all.devices[from].pci_address);
                for (uint32_t k = 0; k < h.n_devices; k++)
                        assert_int_equal(h.peer_mbs[i][k], all.peer_mbs[from][places[k] - '0']);
        }
        if (note[0] == '\0')
                assert_string_equal(h.notes, "");
        else
                assert_non_null(strstr(h.notes, note));
}

static void set_of_each_key(void **state) {
        Config c = {};

        expect_set(&c, NULL, 0, 3, "012", "");
        c.gpus = (char *) "2, gpu-01234567-89AB-cdef-0123-456789abcde0";
        expect_set(&c, NULL, 0, 3, "02", "");
        expect_set(&c, NULL, 0, 2, "0", "Gpus= names \"2\", which is not there.");
        c.gpus_exclude = (char *) "0000:41:00.0";
        expect_set(&c, NULL, 0, 3, "2", "");
        c = (Config){.gpus_max = 2};
        expect_set(&c, NULL, 0, 3, "01", "0000:43:00.0) is left out: GpusMax= is 2");
        c.gpu_shares = (char *) "2=3 0=2";
        expect_set(&c, NULL, 0, 3, "02", "0000:42:00.0) is left out: GpusMax=");
        c = (Config){.gpu_min_free = 2 * GIB};
        expect_set(&c, NULL, 0, 3, "12", "1073741824 bytes of its memory are free, GpuMinFree= is 2147483648");
}

/* Its environment is not the service's. */
static void what_the_worker_left_out_is_left_out(void **state) {
        WireHello h = hello_of(2);
        Config c = {};
        Fault f = {};
        GpuSet s;

        h.devices[0].left_out = 1;
        h.devices[0].memory_free = 0;
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_int_equal(h.n_devices, 1);
        assert_int_equal(s.place[0], 1);
        assert_non_null(strstr(h.notes, "0000:41:00.0) is left out by the worker"));
}

/* What a plan says of all the GPUs that it leaves out. */
static void note_of_the_longest_is_kept(void **state) {
        char text[sizeof(((Job *) NULL)->left_out)];
        WireHello h = hello_of(2);

        memset(text, 'x', sizeof(text));
        text[sizeof(text) - 1] = '\0';
        gpu_set_note(&h, "%s (GpuShares= keeps it in).", text);
        assert_int_equal(strncmp(h.notes, text, strlen(text)), 0);
        assert_string_equal(h.notes + strlen(text), " (GpuShares= keeps it in).\n");
}

static void set_of_udev(void **state) {
        const DeviceInfo infos[] = {
                {.pci_address = "0000:42:00.0", .share = 1, .ignore = true},
                {.pci_address = "0000:43:00.0", .share = 0.5},
        };
        WireHello h = hello_of(3);
        Config c = {};
        Fault f = {};
        GpuSet s;

        expect_set(&c, infos, 2, 3, "02", "");
        assert_int_equal(gpu_set_apply(&c, infos, 2, &h, &s, &f), 0);
        assert_int_equal(s.shares[0], 1000);
        assert_int_equal(s.shares[1], 500);
        h = hello_of(3);
        c.gpu_shares = (char *) "0000:43:00.0=4"; /* goes before it */
        assert_int_equal(gpu_set_apply(&c, infos, 2, &h, &s, &f), 0);
        assert_int_equal(s.shares[1], 4000);
        assert_true(s.given);
        h = hello_of(3);
        c.gpus_exclude = (char *) "2"; /* what is said of one that has no part counts for nothing */
        assert_int_equal(gpu_set_apply(&c, infos, 2, &h, &s, &f), 0);
        assert_int_equal(h.n_devices, 1);
        assert_false(s.given);
}

static void set_without_any_is_refused(void **state) {
        Config c = {.gpus = (char *) "7"};
        WireHello h = hello_of(2);
        Fault f = {};
        GpuSet s;

        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), -ENODEV);
        assert_non_null(strstr(f.text, "None of the 2 GPUs"));
        h = (WireHello){.n_devices = 1}; /* a CPU is none of these */
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_int_equal(h.n_devices, 1);
}

static void keys_beside_a_cpu_are_noted(void **state) {
        Config c = {.gpus = (char *) "7", .gpu_shares = (char *) "0=2"};
        const Config none = {.vram_reserve = GIB, .vram_idle_sec = 300}; /* as they are without a word */
        const Config all = {.gpus = (char *) "1", .gpus_exclude = (char *) "1", .gpus_max = 1, .gpu_min_free = 1,
                .gpu_shares = (char *) "0=1", .vram_limit = 1, .part_gpus = {(char *) "0", (char *) "0", (char *) "0"}};
        WireHello h = {.n_devices = 1};
        Fault f = {};
        GpuSet s;

        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_string_equal(h.notes, "Gpus=, GpuShares= of latentd.conf: without effect, since the worker computes on the CPU.\n");
        h = (WireHello){.n_devices = 1};
        assert_int_equal(gpu_set_apply(&none, NULL, 0, &h, &s, &f), 0);
        assert_string_equal(h.notes, "");
        gpu_set_note_cpu(&all, &h);
        assert_non_null(strstr(h.notes,
                "Gpus=, GpusExclude=, GpusMax=, GpuMinFree=, DenoiserGpus=, ConditionerGpus=, VaeGpus=, GpuShares=, VramLimit= of"));
}

/* Two spellings of one are seen only here. */
static void gpu_named_twice_is_noted(void **state) {
        Config c = {.gpus = (char *) "0 1 0000:42:00.0"};
        WireHello h = hello_of(3);
        Fault f = {};
        GpuSet s;

        expect_set(&c, NULL, 0, 3, "01", "Gpus= names the GPU Card (0000:42:00.0) more than once.");
        c = (Config){.gpu_shares = (char *) "2=3 GPU-01234567-89ab-cdef-0123-456789abcde2=5"};
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_int_equal(s.shares[2], 5000);
        assert_string_equal(h.notes, "GpuShares= names the GPU Card (0000:43:00.0) more than once: the last share counts.\n");
}

/* As HELLO has it: ways to itself alone. */
static WireHello untried(uint32_t n) {
        WireHello h = hello_of(n);

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < n; k++)
                        if (i != k)
                                h.peer_mbs[i][k] = h.host_mbs[i][k] = 0;
        return h;
}

static void links_are_kept_for_the_same_devices(void **state) {
        const WireHello tried = hello_of(3);
        Config c = {.gpus_exclude = (char *) "1"};
        WireHello h = untried(3), next = untried(3);
        WireLinks m = {.notes = "one line\n"};
        GpuLinks known = {};
        Fault f = {};
        GpuSet s;

        memcpy(m.peer_mbs, tried.peer_mbs, sizeof(m.peer_mbs));
        memcpy(m.host_mbs, tried.host_mbs, sizeof(m.host_mbs));
        m.peer_mbs[0][0] = 0; /* HELLO said it */
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_false(gpu_set_recall(&known, &s, &h));
        gpu_set_learn(&s, &m, &h, &known);
        assert_int_equal(h.peer_mbs[0][0], WIRE_LINK_SAME);
        assert_int_equal(h.peer_mbs[0][1], tried.peer_mbs[0][2]);
        assert_int_equal(h.peer_mbs[1][0], tried.peer_mbs[2][0]);
        assert_int_equal(h.host_mbs[1][0], 10);
        assert_string_equal(h.notes, "one line\n");

        assert_int_equal(gpu_set_apply(&c, NULL, 0, &next, &s, &f), 0);
        assert_true(gpu_set_recall(&known, &s, &next));
        assert_memory_equal(next.peer_mbs, h.peer_mbs, sizeof(h.peer_mbs));
        assert_memory_equal(next.host_mbs, h.host_mbs, sizeof(h.host_mbs));
        assert_string_equal(next.notes, "one line\n");
        memset(next.notes, 'x', sizeof(next.notes) - 5); /* no room */
        next.notes[sizeof(next.notes) - 5] = '\0';
        assert_true(gpu_set_recall(&known, &s, &next));
        assert_int_equal(strlen(next.notes), sizeof(next.notes) - 5);

        next = untried(3); /* one more */
        assert_int_equal(gpu_set_apply(&(Config){}, NULL, 0, &next, &s, &f), 0);
        assert_false(gpu_set_recall(&known, &s, &next));
        c.gpus_exclude = (char *) "0"; /* others */
        next = untried(3);
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &next, &s, &f), 0);
        assert_false(gpu_set_recall(&known, &s, &next));
        assert_int_equal(next.peer_mbs[0][1], 0);
}

/* As measured, the fastest 1, about as fast ones too; not where somebody says what they are to be, or not all are known. */
static void shares_follow_the_rates(void **state) {
        static const struct {
                uint32_t rates[3], shares[3];
                const char *conf;
        } cases[] = {
                {{700000, 690000, 350000}, {1000, 1000, 501}, NULL},
                {{20000, 65000, 64000}, {308, 1000, 1000}, NULL},
                {{1, 4000000, 1}, {1, 1000, 1}, NULL},
                {{700000, 0, 350000}, {1000, 1000, 1000}, NULL},
                {{700000, 700000, 350000}, {1000, 1000, 2000}, "2=2"},
                {{700000, 700000, 350000}, {1000, 1000, 1000}, "0=1"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                const Config c = {.gpu_shares = (char *) cases[i].conf};
                WireHello h = untried(3), next = untried(3);
                GpuLinks known = {};
                WireLinks m = {};
                Fault f = {};
                GpuSet s;

                memcpy(m.rates, cases[i].rates, sizeof(cases[i].rates));
                assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
                gpu_set_learn(&s, &m, &h, &known);
                assert_memory_equal(s.shares, cases[i].shares, sizeof(cases[i].shares));
                assert_int_equal(s.given, cases[i].conf != NULL);
                assert_int_equal(gpu_set_apply(&c, NULL, 0, &next, &s, &f), 0);
                assert_true(gpu_set_recall(&known, &s, &next));
                assert_memory_equal(s.shares, cases[i].shares, sizeof(cases[i].shares));
                assert_memory_equal(next.rates, m.rates, sizeof(m.rates));
        }
}

static void wishes_become_ranks(void **state) {
        const GpuSet s = {.shares = {1000, 3000}, .parts = {3, 3, 3}}, same = {.shares = {1000, 1000}, .parts = {3, 3, 3}};
        WireHello h = hello_of(2);
        PlanWishes w = {};

        assert_int_equal(gpu_set_wishes(&same, GPU_PART_DENOISER, &h, 4, &w), 0);
        assert_int_equal(w.without, 0);
        assert_int_equal(w.n_shares, 0);
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_DENOISER, &h, 4, &w), 0);
        assert_int_equal(w.n_shares, 4);
        assert_int_equal(w.shares[2], 1000);
        assert_int_equal(w.shares[3], 3000);

        w = (PlanWishes){.n_gpus = 1, .gpus = {"0000:42:00.0"}, .n_shares = 2, .shares = {7, 8}};
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_DENOISER, &h, 4, &w), 0);
        assert_int_equal(w.without, 5); /* ranks 0 and 2 */
        assert_int_equal(w.n_shares, 2);
        assert_int_equal(w.shares[0], 7); /* the session's own */
        w = (PlanWishes){.n_gpus = 1, .gpus = {"0000:4f:00.0"}};
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_DENOISER, &h, 4, &w), -ENODEV);
}

/* Names count as the worker has the GPUs, bits as they are left. */
static void parts_have_their_gpus(void **state) {
        const Config c = {.gpus_exclude = (char *) "0",
                .part_gpus = {[GPU_PART_CONDITIONER] = (char *) "0000:43:00.0", [GPU_PART_VAE] = (char *) "1,2"}};
        WireHello h = hello_of(4);
        PlanWishes w = {};
        Fault f = {};
        GpuSet s;

        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_string_equal(h.notes, "");
        assert_int_equal(s.parts[GPU_PART_DENOISER], 7);
        assert_int_equal(s.parts[GPU_PART_CONDITIONER], 2);
        assert_int_equal(s.parts[GPU_PART_VAE], 3);
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_VAE, &h, 6, &w), 0);
        assert_int_equal(w.without, 4 | 32); /* ranks of the third */
        w = (PlanWishes){.n_gpus = 1, .gpus = {"0000:44:00.0"}}; /* the session's go before */
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_VAE, &h, 6, &w), 0);
        assert_int_equal(w.without, 3 | 24);

        h = (WireHello){.n_devices = 1}; /* a CPU has all parts */
        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_int_equal(s.parts[GPU_PART_VAE], 1);
}

static void part_without_any_gpu_is_refused(void **state) {
        const Config c = {.gpus_exclude = (char *) "1", .part_gpus = {[GPU_PART_DENOISER] = (char *) "7", [GPU_PART_VAE] = (char *) "1"}};
        WireHello h = hello_of(2);
        PlanWishes w = {};
        Fault f = {};
        GpuSet s;

        assert_int_equal(gpu_set_apply(&c, NULL, 0, &h, &s, &f), 0);
        assert_non_null(strstr(h.notes, "DenoiserGpus= names \"7\", which is not there.\n"));
        assert_null(strstr(h.notes, "ConditionerGpus"));
        for (GpuPart p = 0; p < _GPU_PART_MAX; p++)
                assert_int_equal(s.parts[p], p == GPU_PART_CONDITIONER); /* Parts of a Device: the doctor knows by them */
        assert_int_equal(gpu_set_wishes(&s, GPU_PART_DENOISER, &h, 1, &w), -ENODEV);
        assert_int_equal(gpu_set_ranks(&s, WIRE_JOB_DECODE, &h, 1, &w), 0);
        assert_int_equal(gpu_set_ranks(&s, WIRE_JOB_TOKENIZE, &h, 1, &w), 1);
        assert_int_equal(gpu_set_refuse(GPU_PART_VAE, &w, &f), -ENODEV);
        assert_string_equal(f.name, FAULT_NO_WORKER);
        assert_non_null(strstr(f.text, "None of the GPUs of VaeGpus= of latentd.conf takes part."));
        w.n_gpus = 1;
        f = (Fault){};
        assert_int_equal(gpu_set_refuse(GPU_PART_VAE, &w, &f), -ENODEV);
        assert_non_null(strstr(f.text, "the session's \"gpus\""));
}

/* Two ranks on each of three GPUs. */
static void ranks_of_jobs_without_plan(void **state) {
        const GpuSet all = {.parts = {7, 7, 7}};
        const GpuSet some = {.parts = {[GPU_PART_DENOISER] = 6, [GPU_PART_CONDITIONER] = 4, [GPU_PART_VAE] = 5}};
        const PlanWishes any = {}, two = {.ranks = 2}, nine = {.ranks = 9}, third = {.n_gpus = 1, .gpus = {"0000:43:00.0"}};
        const char *addresses[WIRE_DEVICES_MAX];
        WireHello h = hello_of(3), cpu = {.n_devices = 1};
        const GpuSet own = {.parts = {1, 1, 1}};

        assert_int_equal(gpu_set_ranks(&all, WIRE_JOB_DECODE, &h, 6, &any), 63);
        assert_int_equal(gpu_set_ranks(&all, WIRE_JOB_ENCODE, &h, 6, &any), 1); /* a prompt: one of them */
        assert_int_equal(gpu_set_ranks(&all, WIRE_JOB_ENCODE, &h, 6, &two), 3);
        assert_int_equal(gpu_set_ranks(&all, WIRE_JOB_DECODE, &h, 6, &nine), 63);
        assert_int_equal(gpu_set_ranks(&all, WIRE_JOB_DECODE, &h, 6, &third), 4 | 32);
        assert_int_equal(gpu_set_ranks(&some, WIRE_JOB_ENCODE_MEDIA, &h, 6, &any), 1 | 4 | 8 | 32);
        assert_int_equal(gpu_set_ranks(&some, WIRE_JOB_DECODE, &h, 6, &two), 1 | 4);
        assert_int_equal(gpu_set_ranks(&some, WIRE_JOB_ENCODE, &h, 6, &any), 4);
        assert_int_equal(gpu_set_ranks(&some, WIRE_JOB_ENCODE, &h, 6, &two), 4 | 32);
        assert_int_equal(gpu_set_ranks(&some, WIRE_JOB_MERGE, &h, 6, &any), 2);
        assert_int_equal(gpu_set_ranks(&own, WIRE_JOB_ENCODE, &cpu, 3, &any), 7);

        assert_int_equal(gpu_set_addresses(&h, 2 | 32, addresses), 2);
        assert_string_equal(addresses[0], "0000:42:00.0");
        assert_string_equal(addresses[1], "0000:43:00.0");
        assert_int_equal(gpu_set_addresses(&cpu, 1, addresses), 0);
}

static void plan_leaves_ranks_out(void **state) {
        PlanWishes w = {.without = 5, .n_shares = 2, .shares = {1, 3}};
        WirePlan p = {};

        assert_int_equal(plan_make(800, 8, 4, 100, &w, &p), 0);
        assert_int_equal(p.ranks, 4);
        assert_int_equal(p.rows[0].end, 0);
        assert_int_equal(p.rows[1].end, 200);
        assert_int_equal(p.rows[2].end, 200);
        assert_int_equal(p.rows[3].end, 800);
        assert_int_equal(p.heads[1].end - p.heads[1].begin, 2);
        assert_int_equal(p.heads[2].begin, p.heads[2].end);
        assert_int_equal(plan_ranks_used(&p), 2);
        w.ranks = 1;
        assert_int_equal(plan_make(800, 8, 4, 100, &w, &p), 0);
        assert_int_equal(p.ranks, 2);
        assert_int_equal(plan_ranks_used(&p), 1);
        w.without = 15;
        assert_int_equal(plan_make(800, 8, 4, 100, &w, &p), -EINVAL);
}

static void exchange_is_the_faster_proven_way(void **state) {
        WireHello h = hello_of(3);
        PlanWishes w = {};
        WirePlan p = {};

        assert_int_equal(plan_make(900, 9, 3, 100, &w, &p), 0);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_P2P);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_HOST), WIRE_EXCHANGE_HOST);
        h.peer_mbs[2][1] = 5; /* slower than the host */
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_HOST);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_P2P), WIRE_EXCHANGE_P2P);
        h.peer_mbs[2][1] = 0; /* not proven */
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_P2P), WIRE_EXCHANGE_HOST);
        w.without = 4; /* nor needed */
        assert_int_equal(plan_make(900, 9, 3, 100, &w, &p), 0);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_P2P);
        w.without = 6; /* one rank has nobody to exchange with */
        assert_int_equal(plan_make(900, 9, 3, 100, &w, &p), 0);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_P2P), WIRE_EXCHANGE_HOST);

        h = hello_of(3);
        assert_int_equal(plan_make(900, 9, 3, 100, &(PlanWishes){}, &p), 0);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_NCCL), WIRE_EXCHANGE_HOST);
        h.nccl = 22803;
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_NCCL), WIRE_EXCHANGE_NCCL);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_P2P);
        h.n_devices = 2; /* two ranks of one */
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_NCCL), WIRE_EXCHANGE_HOST);

        h = hello_of(1); /* ranks of one device */
        assert_int_equal(plan_make(900, 9, 3, 100, &(PlanWishes){}, &p), 0);
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_P2P);
        h.peer_mbs[0][0] = 0; /* a CPU */
        assert_int_equal(gpu_set_exchange(&h, &p, WIRE_EXCHANGE_AUTO), WIRE_EXCHANGE_HOST);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(set_of_each_key),
                TEST(what_the_worker_left_out_is_left_out),
                TEST(note_of_the_longest_is_kept),
                TEST(set_of_udev),
                TEST(set_without_any_is_refused),
                TEST(keys_beside_a_cpu_are_noted),
                TEST(gpu_named_twice_is_noted),
                TEST(links_are_kept_for_the_same_devices),
                TEST(shares_follow_the_rates),
                TEST(wishes_become_ranks),
                TEST(parts_have_their_gpus),
                TEST(part_without_any_gpu_is_refused),
                TEST(ranks_of_jobs_without_plan),
                TEST(plan_leaves_ranks_out),
                TEST(exchange_is_the_faster_proven_way),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
