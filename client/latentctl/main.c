/* SPDX-License-Identifier: Apache-2.0 */

/* latentctl: a person's hand on the service, through liblatent's public interface only. */

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/latentctl/arguments.h"
#include "client/latentctl/report.h"

#define LOAD_OPTIONS                                                                                        \
        "  --qkv-order auto|interleaved|stacked   row order of qkv_proj in files with original names\n"

#define COMPUTE_HELP                                                                                        \
        "  -o, --output FILE\n"                                                                             \
        "  --compute auto|f32|bf16\n"                                                                       \
        "  --lora FILE[:STRENGTH]                 an adapter, merged for this work only; at most 16 times\n" \
        "  --condition-noise given|comfy|diffusers|official\n"                                              \
        "                                         given: as the model sees them (default); else IN has them clean and they\n" \
        "                                         get noise from --seed as this program draws it\n"         \
        "  --seed N                               of noise that the service makes\n"                        \
        RESTART_HELP LOAD_OPTIONS SPARSE_HELP

#define SPARSE_HELP \
        "  --sparse METHOD[:KEY=VALUE,...]        sparse attention: sol-attn, sla or vsa; see latentctl(1)\n"

#define RESTART_HELP \
        "  --restart-timeout SECONDS              how long to wait for a service that went away; default: 60; 0: not\n"
#define TOKENIZER_HELP \
        "  --tokenizer DIRECTORY                  of vocab.json, merges.txt, ...; default: tokenizer/ beside\n" \
        "                                         text_encoder/\n"

static const Verb verbs[] = {
        {"status", "[--json]", "Says how the service is and what it did since it started.", "", verb_status},
        {"devices", "[--json]", "Lists the devices that compute.", "", verb_devices},
        {"models", "[--json]", "Lists the models that the service holds.", "", verb_models},
        {"load", "NAME|DIRECTORY|FILE [OPTION]...",
                "Loads a model: a file or directory that exists here, or a name below ModelPath= of the "
                "service. The weights stay in the\n"
                "service's memory for the next use.",
                LOAD_OPTIONS "  --partition fl2va|ref2va               which part of the model the files "
                             "hold; default: from the name\n"
                             "  --numa auto|default|interleave|bind:N  where its memory lies; default: as "
                             "the service is set up\n",
                verb_load},
        {"unload", "MODEL",
                "Removes a model, by its name or number. Its weights are freed if no other model uses them.",
                "", verb_unload},
        {"cache", "[drop]", "Lists the weights in memory; with drop frees those that no model uses.", "",
                verb_cache},
        {"release", "",
                "Makes idle workers give back the memory of their devices. Weights stay in memory of the machine.", "",
                verb_release},
        {"jobs", "[--json]", "Lists your jobs.", "", verb_jobs},
        {"cancel", "JOB", "Cancels one of your jobs, by its number.", "", verb_cancel},
        {"step", "MODEL IN.safetensors -o OUT.safetensors [OPTION]...",
                "Evaluates the model once. IN: text, video, audio, text_tags, cond.I.video and cond.I.audio, mask_video, "
                "mask_audio;\nOUT: video_velocity, audio_velocity.",
                "  --sigma-video S, --sigma-audio S       noise levels, 0 to 1; default: from IN's "
                "metadata\n" COMPUTE_HELP,
                verb_step},
        {"sample", "MODEL IN.safetensors -o OUT.safetensors --steps N [OPTION]...",
                "Runs a whole trajectory. IN: as for step, video and audio being the noise (see --noise); sigmas_video with "
                "sigmas_audio if the\nschedule is given there; clean_video, clean_audio: what masks keep. OUT: video, audio.",
                "  --steps N                              evaluations, 1 to 1000; needed without sigmas in "
                "IN\n"
                "  --schedule simple|reference            default: simple\n"
                "  --shift-video S, --shift-audio S       default: from IN's metadata, else the model's\n"
                "  --sampler euler|res_multistep|res_multistep_perstream  default: euler\n"
                "  --keep-steps                           OUT also has step.I.video, step.I.audio, and for res_multistep "
                "step.I.audio_carried\n"
                "  --noise given|comfy|diffusers          given: IN holds it (default); else it is drawn from --seed as "
                "this program does,\n"
                "                                         and IN's video and audio are the clean latents\n" COMPUTE_HELP,
                verb_sample},
        {"tokenize", "MODEL TEXT|- [OPTION]...",
                "Prints the tokens of a text. MODEL: a conditioner, or a pipeline with one in text_encoder/; -: standard input.",
                TOKENIZER_HELP, verb_tokenize},
        {"encode", "MODEL --prompt TEXT|- -o TEXT.safetensors [OPTION]...",
                "Makes of a prompt and pictures what the denoiser reads. MODEL: as for tokenize. The file gets text, text_tags, ids.",
                "  -o, --output FILE\n"
                "  -p, --prompt TEXT                      -: standard input\n"
                "  --keyframe FILE.safetensors:TENSOR     U8 [H, W, 3]: first, then last picture of the film\n"
                "  --reference FILE.safetensors:TENSOR    U8 [H, W, 3], or a clip [F, H, W, 3]; at most 30 times, in this order\n"
                "  --reference FILE.safetensors:TENSOR+sound   a clip that has sound\n"
                "  --reference audio                      a sound\n"
                "  --image FILE, --last-image FILE        first and last picture of the film, from image files\n"
                "  --size WIDTHxHEIGHT                    of that film; default: as the image\n"
                "  --picture-rule reference|comfy         how pictures get their size; default: reference\n"
                "  --type bf16|f32                        of text in the file; default: bf16\n"
                "  --compute auto|f32|bf16\n" TOKENIZER_HELP RESTART_HELP,
                verb_encode},
        {"decode", "MODEL LATENTS.safetensors -o FRAMES.safetensors [OPTION]...",
                "Makes frames and sound of the latents video and audio. MODEL: a VAE, or a pipeline with vae/ and audio_vae/. The file\n"
                "gets frames [F, H, W, 3] and sound [2, samples].",
                "  -o, --output FILE\n"
                "  --type u8|f32                          of the frames; default: u8\n" RESTART_HELP,
                verb_decode},
        {"encode-media", "MODEL FRAMES.safetensors -o LATENTS.safetensors [OPTION]...",
                "Makes the latents video and audio of frames and sound. MODEL: as for decode.",
                "  -o, --output FILE\n"
                "  --posterior mean|sampled               which latent of the distribution; default: mean\n"
                "  --seed N                               of sampled; default: 42\n" RESTART_HELP,
                verb_encode_media},
        {"render", "MODEL --prompt TEXT|- -o FILM.mp4|--plan [OPTION]...",
                "Makes a film of a prompt. MODEL: a pipeline with transformer/, text_encoder/, vae/ and audio_vae/; FILM: .mp4, .webm or\n"
                ".mkv.",
                "  -o, --output FILE\n"
                "  -p, --prompt TEXT                      -: standard input\n"
                "  --image FILE, --last-image FILE        what the film begins and ends with\n"
                "  --reference FILE                       a picture, clip or sound that it goes by; at most 12 times: 9 pictures,\n"
                "                                         3 clips and 3 sounds; not together with --image and --last-image\n"
                "  --reference-sound FILE                 only the sound of a file\n"
                "  --picture-rule comfy|reference         how pictures are brought in; default: as the program whose noise it is\n"
                "  --size WIDTHxHEIGHT                    rounded to multiples of 32; default: as the image, else 1344x768\n"
                "  --seconds S, --frames N                rounded up to 17k+5 frames at 24 a second, at most 362; default: 124\n"
                "  --steps N                              evaluations, 1 to 1000; default: 20\n"
                "  --seed N                               of the noise; default: 42\n"
                "  --noise comfy|diffusers                as this program draws it; default: comfy\n"
                "  --schedule simple|reference            default: simple\n"
                "  --shift-video S, --shift-audio S       default: the model's\n"
                "  --sampler euler|res_multistep|res_multistep_perstream  default: euler\n"
                "  --lora FILE[:STRENGTH]                 an adapter, merged for this work only; at most 16 times\n"
                "  --plan                                 says what memory and time it would take, and runs nothing\n"
                "  --keep-latents FILE.safetensors        gets the latents video and audio\n"
                "  --contact-sheet FILE.png               gets frames of the film, 4 by 3, in one picture\n"
                "  --preview K                            after every K steps a picture, FILM.step-NNNN.ppm\n"
                "  --preview-map FILE                     how latents look; default: vae/latent_rgb.txt of MODEL\n"
                "  --compute auto|f32|bf16\n" SPARSE_HELP TOKENIZER_HELP RESTART_HELP,
                verb_render},
        {"parity", "MODEL [OPTION]...",
                "Runs a short step on one rank and on every number of ranks, plan and exchange that the service "
                "offers, and compares the\n"
                "results bit by bit. Exit status 1 if there is a difference.",
                "  --compute auto|f32|bf16\n" LOAD_OPTIONS, verb_parity},
        {"doctor", "[--json]",
                "Checks this machine and the service, and says what to do. Exit status 1 if there is a "
                "problem.",
                "", verb_doctor},
};

static void print_help(void) {
        (void) printf("usage: latentctl [OPTION]... VERB [ARGUMENT]...\n\nTalks to latentd, the sampler "
                      "service.\n\n");
        for (size_t i = 0; i < ELEMENTSOF(verbs); i++)
                (void) printf("  %-12s %s\n", verbs[i].name, verbs[i].arguments);
        (void) printf("\nOptions of all verbs:\n"
                      "  --json                 machine-readable output\n"
                      "  --system, --user       which bus; default: the system bus if the service is there, "
                      "else the user bus\n"
                      "  --bus-address=ADDRESS  another bus\n"
                      "  --socket=PATH          the service's own socket, without a bus\n"
                      "  --help, --version\n\n"
                      "latentctl VERB --help says more, latentctl(1) everything.\n");
}

static const Verb *find_verb(const char *name) {
        for (size_t i = 0; i < ELEMENTSOF(verbs); i++)
                if (strcmp(verbs[i].name, name) == 0)
                        return &verbs[i];

        return NULL;
}

static int run(int argc, char *argv[]) {
        Ctl c = {.bus = {.struct_size = sizeof(c.bus)}};
        bool version = false;
        latent_error e;
        const Verb *verb;
        int at;

        at = arguments_parse_global(&c, argc, argv, &version, &e);
        if (at < 0)
                return report_error(&c, NULL, &e);
        if (version) {
                (void) printf("latentctl %s\n", latent_version());
                return STATUS_OK;
        }
        if (at == argc) {
                if (c.help) {
                        print_help();
                        return STATUS_OK;
                }
                (void) ctl_error(&e, -1, CTL_ERROR_USAGE, "no verb given");
                return report_error(&c, NULL, &e);
        }

        verb = find_verb(argv[at]);
        if (!verb) {
                (void) ctl_error(&e, -1, CTL_ERROR_USAGE, "unknown verb %s", argv[at]);
                return report_error(&c, NULL, &e);
        }
        if (c.help) {
                report_help(verb);
                return STATUS_OK;
        }

        return verb->run(&c, verb, argc - at, argv + at);
}

/* A file that is opened must not become standard output because that is closed. */
static bool open_missing(void) {
        for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
                if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR | O_NOCTTY) != fd)
                        return false;

        return true;
}

int main(int argc, char *argv[]) {
        int status;

        if (!open_missing()) {
                (void) fprintf(stderr, "latentctl: standard input, output or error is closed, and /dev/null cannot stand in.\n");
                return STATUS_FAILED;
        }
        (void) signal(SIGXFSZ, SIG_IGN); /* a file that may not get larger is an error of write() */
        status = run(argc, argv);

        /* What could not be written was not said: a script must not take silence for an answer. */
        if ((fflush(stdout) != 0 || ferror(stdout)) && status == STATUS_OK) {
                (void) fprintf(stderr, "latentctl: standard output cannot be written.\n");
                return STATUS_FAILED;
        }
        return status;
}
