/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Messages between latentd and a worker: one SOCK_SEQPACKET datagram each, at most WIRE_MESSAGE_MAX bytes, at most one
 * descriptor, native byte order (both ends run on one machine and one build id). Truncation (MSG_TRUNC, MSG_CTRUNC), a size
 * that does not fit its type, an unknown type or a descriptor where none belongs is a protocol error: the other side is
 * dropped. Every struct starts with a WireHeader; padding is explicit and zero.
 *
 * Order of a worker's life:
 *   worker: HELLO                          broker: WELCOME (epoch); worker: LINKS, if that asks for it
 *                                          broker: KNOWN_PINS, if a worker with these numerics said PINS before
 *   broker: MODEL_OPEN, REGION x n, MODEL_COMMIT      worker: MODEL_READY or ERROR (header.job = model id)
 *   broker: ARENA x 2 per session
 *   broker: JOB_OPEN        worker: JOB_READY (rows, steps, where results lie) or ERROR
 *   broker: PLAN, then STEP step=i for i = committed .. steps-1
 *                           worker: PROGRESS (may be dropped), then STEP_DONE or ERROR
 *   broker: JOB_CLOSE, ARENA_CLOSE, MODEL_CLOSE in this order; CANCEL at any time; DIE.
 * A broker that knows the rows already (an equal request came before) sends JOB_RUN: JOB_OPEN, PLAN and the first STEP in one. The
 * answers are the same, in the same order; if the job is refused that ERROR is the only one.
 * Only a STEP or SAMPLE job has a PLAN; the others run on JOB_OPEN's `ranks` and need none.
 * Credits: the broker has at most WIRE_CREDITS messages (other than CANCEL and DIE) that the worker has not yet acknowledged.
 * The worker acknowledges what it has taken in (for STEP: queued) with header.acks of whatever it sends next, with an ACK where
 * it has nothing to say: within WIRE_ACK_DELAY_MSEC, at once when half of the credits are owed, of WELCOME, and of MODEL_COMMIT,
 * whose answer may take long. Neither side ever blocks in a send: what does not go out waits in a queue for POLLOUT, except
 * PROGRESS, which is dropped.
 * Epoch: the broker counts worker starts; both sides drop messages of another epoch (HELLO has 0). 1 .. UINT32_MAX: the commit
 * word has room for 32 bits.
 * What the worker does beyond this: a REGION or ARENA that cannot be used is no protocol error, the fault answers MODEL_COMMIT or
 * JOB_OPEN; a PLAN that is wrong answers STEP. A refused model or job is gone; closing what is not there is no error. The
 * ACK of a close says that nothing of it is in use any more; ARENA_CLOSE ends the session's jobs. A PLAN may only come
 * while no STEP of its job waits for an answer. A cancelled job answers every STEP with "Cancelled". A PLAN for a job
 * without one is ignored. A MERGE takes no flags and touches no arena. What a STEP makes is finite: NaN or Inf answers it with
 * "InvalidTensor" and nothing is committed, so that a run goes on from a committed state as it would have undisturbed. */

#include <stddef.h>
#include <stdint.h>

#include "service/shared/fault.h"
#include "service/shared/sparse.h"

#define WIRE_VERSION 1u
#define WIRE_MESSAGE_MAX 8192u
#define WIRE_CREDITS 16u
#define WIRE_ACK_DELAY_MSEC 20
#define WIRE_DIMS_MAX 5
#define WIRE_RANKS_MAX 64
#define WIRE_DEVICES_MAX 8
#define WIRE_CONDITIONS_MAX 30
#define WIRE_LORAS_MAX 16
#define WIRE_OUTPUTS_MAX 3
#define WIRE_TEXT_BYTES_MAX (UINT64_C(4) << 20) /* of a prompt */
#define WIRE_LORA_STRENGTH_MAX 1000.0 /* either way */

typedef enum WireType {
        WIRE_INVALID = 0,
        /* worker to broker */
        WIRE_HELLO,
        WIRE_ACK,
        WIRE_MODEL_READY,
        WIRE_JOB_READY,
        WIRE_PROGRESS,
        WIRE_STEP_DONE,
        WIRE_LORA_NOTES,
        WIRE_MEMORY,
        WIRE_LINKS,
        WIRE_PINS,
        WIRE_ERROR,
        /* broker to worker */
        WIRE_WELCOME = 32,
        WIRE_MODEL_OPEN,
        WIRE_REGION, /* with fd */
        WIRE_MODEL_COMMIT,
        WIRE_MODEL_CLOSE,
        WIRE_ARENA, /* with fd */
        WIRE_ARENA_CLOSE,
        WIRE_JOB_OPEN,
        WIRE_PLAN,
        WIRE_STEP,
        WIRE_JOB_CLOSE,
        WIRE_CANCEL,
        WIRE_DIE,
        WIRE_JOB_RUN,
        WIRE_TRIM,
        WIRE_KNOWN_PINS,
        WIRE_TYPE_MAX,
} WireType;

typedef struct WireHeader {
        uint32_t size; /* of the whole message */
        uint16_t type;
        uint16_t version;
        uint64_t epoch;
        uint64_t job; /* job id; model id in MODEL_* and REGION; session id in ARENA*; else 0 */
        uint32_t step;
        uint32_t acks; /* worker to broker: messages taken in since it last said so; else 0 */
} WireHeader;

/* A tensor in an arena. offset is from the start of the arena, ndim <= WIRE_DIMS_MAX, size = product x element size. */
typedef struct WireTensor {
        uint64_t offset, size;
        uint32_t dtype; /* StType */
        uint32_t n_dims;
        uint64_t shape[WIRE_DIMS_MAX];
} WireTensor;

typedef struct WireDevice {
        char name[64];
        char pci_address[16]; /* "0000:41:00.0"; empty for a CPU */
        char uuid[48];
        char architecture[24]; /* "x86-64-v3", "sm_90" */
        uint64_t memory_total, memory_free;
        int32_t numa_node; /* -1 unknown */
        uint32_t left_out; /* the worker has not opened it (gpu-names.h): memory_free is 0, and no rank can have it */
} WireDevice;

#define WIRE_LINK_SAME UINT32_MAX

typedef struct WireHello {
        WireHeader header;
        char build_id[64]; /* must equal the broker's own: LATENTD_VERSION */
        char backend[16];  /* "cpu", "cuda" */
        char numerics_id[128];
        int32_t pid; /* SO_PEERCRED shows the listener when systemd started the worker */
        uint32_t n_devices; /* 0: it can compute nothing, and waits to be ended */
        uint32_t sparse;    /* it has sparse attention */
        uint32_t nccl;      /* NCCL connects all of its devices: its version, e.g. 22803; else 0 */
        WireDevice devices[WIRE_DEVICES_MAX];
        char reason[512];   /* without devices: why, for people; else "" */
        char kernels[2048]; /* which kernel does what on the devices, in lines; "" with one set of kernels for all */
        /* From a device to another, in 10^6 bytes a second. peer: by itself, 0 where copies were not proven to arrive;
         * WIRE_LINK_SAME: to itself. host: through memory of the worker, 0: not measured. HELLO has ways to itself alone;
         * the broker keeps here what LINKS says, of this worker or of one before that had the same devices. */
        uint32_t peer_mbs[WIRE_DEVICES_MAX][WIRE_DEVICES_MAX], host_mbs[WIRE_DEVICES_MAX][WIRE_DEVICES_MAX];
        /* Of each device, 10^9 operations a second of one product in bf16; 0: not measured. As the ways. */
        uint32_t rates[WIRE_DEVICES_MAX];
        char notes[1024]; /* for people, a line each: devices that are there and left out, ways that are not taken; or "" */
} WireHello;

/* Before the ACK of a WELCOME with try_links, or with it: what ways there are between devices that have ranks, and how fast these
 * are, by places in HELLO's devices, as it says. */
typedef struct WireLinks {
        WireHeader header;
        uint32_t peer_mbs[WIRE_DEVICES_MAX][WIRE_DEVICES_MAX], host_mbs[WIRE_DEVICES_MAX][WIRE_DEVICES_MAX];
        uint32_t rates[WIRE_DEVICES_MAX];
        char notes[1024];
} WireLinks;

#define WIRE_PINS_MAX 72
#define WIRE_PIN_WORDS 8

/* How the products with a layer's weights are made, as a trial of it ended: by a library's algorithm, which has numbers of its own, or by
 * an own kernel. */
typedef struct WirePin {
        uint64_t columns, rows; /* of the weights */
        uint32_t type;          /* of what is made */
        uint32_t biased, own, few;
        uint32_t large[WIRE_PIN_WORDS], small[WIRE_PIN_WORDS];
} WirePin;

/* PINS: what the worker's trials have found so far, whenever that has changed; before the answer to what changed it. KNOWN_PINS: the
 * same, behind WELCOME, of a worker before it: it tries none of these layers again, but tries what its library does not take. What does not
 * fit it (numerics_id and device are not its own, numbers that are wrong) it leaves out, and says so in its log. */
typedef struct WirePins {
        WireHeader header;
        char numerics_id[128]; /* of HELLO */
        char device[256];      /* what else the pins hold for: device and driver, in words */
        uint32_t n, reserved;
        WirePin pins[WIRE_PINS_MAX];
} WirePins;

typedef struct WireWelcome {
        WireHeader header; /* epoch: adopted by the worker */
        uint32_t ranks;    /* logical ranks this worker runs, 1 .. WIRE_RANKS_MAX */
        uint32_t threads;  /* CPU threads over all ranks, 0 = all */
        uint64_t encode_cache_bytes; /* what ENCODE may keep of its results; 0: nothing */
        /* Of a worker whose devices have memory of their own, bytes of each: what others shall find free; what it may take, 0: all.
         * What it holds goes when no step came for so long; 0: never. */
        uint64_t vram_reserve, vram_limit, vram_idle_usec;
        uint8_t device_of[WIRE_RANKS_MAX]; /* rank: its place in HELLO's devices; the worker lets go of devices without ranks */
        uint64_t try_links; /* 1: what ways there are between its devices is not known: it tries them and says LINKS */
} WireWelcome;

/* wire_init() sets acks to 1. */
typedef struct WireAck {
        WireHeader header;
} WireAck;

typedef enum WireQkvOrder {
        WIRE_QKV_AUTO,
        WIRE_QKV_INTERLEAVED,
        WIRE_QKV_STACKED,
} WireQkvOrder;

typedef struct WireModelOpen {
        WireHeader header;
        uint32_t n_files;
        uint32_t qkv_order; /* WireQkvOrder */
        char partition[16]; /* "", "fl2va", "ref2va" */
        uint64_t identity;  /* the same for files with the same names and bytes, for results that are kept when the model is
                               closed; 0: not known */
} WireModelOpen;

/* One file of the model. The fd is the region: file bytes at their own offsets from 0 to size. Kept open by the worker
 * until MODEL_CLOSE. */
typedef struct WireRegion {
        WireHeader header;
        uint64_t size;        /* of the file */
        uint64_t region_size; /* of the memfd */
        uint32_t index;       /* 0 .. n_files - 1, ascending */
        uint32_t reserved;
        char name[256]; /* base name: "config.json", "diffusion_pytorch_model-00001-of-00002.safetensors" */
} WireRegion;

typedef struct WireModelCommit {
        WireHeader header;
} WireModelCommit;

typedef enum WireModelKind {
        WIRE_MODEL_DENOISER,
        WIRE_MODEL_LORA, /* its files hold a LoRA adapter: for WireLora, no job runs on it; no layers */
        WIRE_MODEL_CONDITIONER, /* TOKENIZE, ENCODE; text_dim: columns of what it makes */
        WIRE_MODEL_VIDEO_VAE,   /* DECODE, ENCODE_MEDIA of pictures */
        WIRE_MODEL_AUDIO_VAE,   /* DECODE, ENCODE_MEDIA of sound */
        _WIRE_MODEL_KIND_MAX,
} WireModelKind;

typedef struct WireModelReady {
        WireHeader header;
        uint32_t kind; /* WireModelKind */
        uint32_t gated; /* a denoiser that was made for SPARSE_VSA, and has its gates */
        float shift_video, shift_audio; /* of a denoiser: what it was made for; 0: not known */
        uint32_t layers, refiner_layers, heads, head_dim, hidden, ffn, text_dim;
        uint32_t n_tensors;
        char layout[24];     /* as H3Model: "diffusers", "original", "comfy", each also with "-sharded"; "lora" */
        char qkv_order[16];  /* "split", "interleaved", "stacked" */
        char partition[16];  /* "", "fl2va", "ref2va" */
        char types[64];      /* "BF16, F32, I8 (rotated)": those of plain tensors, then of quantised matrices */
        uint64_t weight_bytes; /* tensors the model uses */
        uint64_t private_bytes; /* memory the worker holds for this model outside the regions */
        char support[160]; /* what the backend does with each type of weights, in words */
        char warning[240]; /* for people; "" none */
} WireModelReady;

typedef struct WireModelClose {
        WireHeader header;
} WireModelClose;

typedef enum WireArenaKind {
        WIRE_ARENA_INPUT,
        WIRE_ARENA_OUTPUT,
} WireArenaKind;

typedef struct WireArena {
        WireHeader header;
        uint64_t size;
        uint32_t kind;
        uint32_t reserved;
} WireArena;

typedef struct WireArenaClose {
        WireHeader header;
} WireArenaClose;

typedef enum WireJobKind {
        WIRE_JOB_STEP,
        WIRE_JOB_SAMPLE,
        WIRE_JOB_MERGE, /* makes the model with loras ready and says what of them applies: one step, no tensors, no output */
        /* Coding: what the model's kind is for. */
        WIRE_JOB_TOKENIZE,     /* text: ids */
        WIRE_JOB_ENCODE,       /* text and conditions (pictures): text, text_tags, ids */
        WIRE_JOB_DECODE,       /* video or audio (latents): frames, or sound. A step per temporal chunk */
        WIRE_JOB_ENCODE_MEDIA, /* video (frames) or audio (sound): video, or audio (latents). A step per clip */
        _WIRE_JOB_KIND_MAX,
} WireJobKind;

/* Works on a conditioner or a VAE, needs no PLAN. */
static inline int wire_job_is_coding(uint32_t kind) {
        return kind >= WIRE_JOB_TOKENIZE && kind < _WIRE_JOB_KIND_MAX;
}

/* How pictures for the conditioner are brought to its sizes (h3.md 3.3). */
typedef enum WirePictureRule {
        WIRE_PICTURE_REFERENCE, /* the published processor: bicubic */
        WIRE_PICTURE_COMFY,     /* ComfyUI: its limits, bilinear; references as images, videos, audios */
        _WIRE_PICTURE_RULE_MAX,
} WirePictureRule;

/* Which latent of the encoder's distribution ENCODE_MEDIA gives for pictures (h3.md 5.7). */
typedef enum WirePosterior {
        WIRE_POSTERIOR_MEAN,    /* ComfyUI */
        WIRE_POSTERIOR_SAMPLED, /* the reference: drawn from seed, rounded to f16 */
        _WIRE_POSTERIOR_MAX,
} WirePosterior;

typedef enum WireCompute {
        WIRE_COMPUTE_AUTO, /* bf16 */
        WIRE_COMPUTE_F32,
        WIRE_COMPUTE_BF16,
} WireCompute;

typedef enum WireSampler {
        WIRE_SAMPLER_EULER,
        WIRE_SAMPLER_RES_MULTISTEP,
        WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM,
} WireSampler;

typedef enum WireSchedule {
        WIRE_SCHEDULE_GIVEN, /* sigmas_video, sigmas_audio: F32 [steps + 1] in the input arena */
        WIRE_SCHEDULE_SIMPLE,
        WIRE_SCHEDULE_REFERENCE,
} WireSchedule;

/* Who draws noise, of a trajectory's start or of the conditions (h3.md 1.10, 4.7). OFFICIAL: conditions only. */
typedef enum WireNoise {
        WIRE_NOISE_GIVEN, /* video and audio are the state at the first sigmas; conditions are as the model shall see them */
        WIRE_NOISE_COMFY,
        WIRE_NOISE_DIFFUSERS,
        WIRE_NOISE_OFFICIAL,
} WireNoise;

typedef enum WireConditionKind {
        WIRE_CONDITION_KEYFRAME,
        WIRE_CONDITION_IMAGE,
        WIRE_CONDITION_VIDEO,
        WIRE_CONDITION_AUDIO,
} WireConditionKind;

/* Latents in the input arena, F32 [24, frames, height, width] and [32, 2, audio], at multiples of 4. frames 0: no picture;
 * audio 0: no sound. ENCODE: pictures, U8 [frames, height, width, 3] at any byte, of a video at 24 frames a second; audio 1: a
 * video with sound, or the sound itself (which the conditioner does not hear). */
typedef struct WireCondition {
        uint32_t kind; /* WireConditionKind */
        uint32_t reserved;
        uint64_t frame; /* KEYFRAME: pixel frame of the film, from 0 */
        uint64_t video_offset, frames, height, width;
        uint64_t audio_offset, audio;
} WireCondition;

typedef struct WireLora {
        uint64_t model; /* a committed one of WIRE_MODEL_LORA */
        double strength;
} WireLora;

enum {
        WIRE_JOB_KEEP_STEPS = 1u << 0, /* SAMPLE only */
        WIRE_JOB_RESUME = 1u << 1, /* the output arena holds a valid commit word of this job: go on from there */
        WIRE_JOB_PLAN_ONLY = 1u << 2, /* everything is checked and counted, nothing is written: only JOB_CLOSE may follow */
        WIRE_JOB_UNREAD = 1u << 3, /* PLAN_ONLY of a SAMPLE (made noise, no masks) or DECODE: the latents have a shape, no content yet */
};

/* Everything a job needs, by place in the session's arenas. Fields that a kind does not name are 0. The worker copies what it
 * uses and checks the copies (types, shapes against the model, NaN and Inf) before JOB_READY; nothing of the output arena is
 * written for a refused job.
 *
 * The start of a trajectory: GIVEN: video and audio. Else they are the clean latents (zeros where nothing is known), and the
 * start is sigma * noise + (1 - sigma) * latent with the first sigmas; at sigma 1 the noise alone, to the bit. With masks the
 * kept part comes from clean_video and clean_audio, or where these are absent and noise is made from video and audio. The
 * noise that the model sees on the kept part of a video is the made noise, or for GIVEN `video`.
 * In a STEP the latents are what the model sees, kept parts included; a mask sets the rows' timesteps and the velocities. */
typedef struct WireJobOpen {
        WireHeader header;
        uint64_t model, session;
        uint32_t kind;    /* WireJobKind */
        uint32_t compute; /* WireCompute */
        uint32_t flags;
        uint32_t sampler;  /* SAMPLE */
        uint32_t schedule; /* SAMPLE */
        uint32_t steps;    /* SAMPLE, not GIVEN: number of evaluations; GIVEN: 0 */
        float sigma_video, sigma_audio; /* STEP */
        float shift_video, shift_audio; /* SAMPLE: of the schedule, not GIVEN; RES_MULTISTEP also with GIVEN: how the streams relate */
        uint32_t noise;           /* WireNoise; SAMPLE */
        uint32_t condition_noise; /* WireNoise */
        uint64_t seed;            /* where noise is made; 0 else */
        uint64_t output_offset, output_size; /* where results may lie in the output arena; offset is a multiple of 64 */
        /* BF16 [L, text_dim]; U8 [L] (n_dims 0 and size 0: all 1). TOKENIZE, ENCODE: text is U8 [bytes] of UTF-8, absent: empty. */
        WireTensor text, text_tags;
        /* F32 [24, T, H, W]; F32 [32, 2, A]. DECODE, ENCODE_MEDIA: one of them; the latter U8 or F32 (0 to 1) [F, H, W, 3], F32 [2,
         * samples] at 32 kHz. */
        WireTensor video, audio;
        /* GIVEN. STEP: the whole schedule that it is one of, F32 [steps + 1], both or none. Its own sigmas need not be among
         * them. The bits are the same; what depends on sigmas alone may be computed once for all the steps. */
        WireTensor sigmas_video, sigmas_audio;
        WireTensor mask_video, mask_audio;     /* F32 [T, H, W]; F32 [2, A] or [32, 2, A]; absent: generate everything */
        WireTensor clean_video, clean_audio;   /* SAMPLE with masks: as video and audio */
        /* SAMPLE that another run of the service began: slot is the slot of the state after start_step steps (below the number
         * of steps) as it lay there, U8 [slot_stride], made by a worker of this numerics id (empty: not checked). With
         * KEEP_STEPS kept holds those of the states before it, 0 .. start_step - 1: U8 [start_step, slot_stride]. */
        WireTensor slot, kept;
        uint32_t start_step;
        uint32_t n_conditions, n_loras;
        /* Coding. */
        uint32_t output_type;  /* StType of what is made: ENCODE BF16 or F32; DECODE of video U8 or F32 (0 to 1) */
        uint32_t picture_rule; /* WirePictureRule; ENCODE */
        uint32_t posterior;    /* WirePosterior; ENCODE_MEDIA of video */
        uint32_t exchange;     /* WireExchange, never NCCL; ENCODE on several ranks. AUTO: as HOST */
        uint32_t reserved;
        uint64_t ranks;        /* that take part, a bit each; 0: all. MERGE: the first of them does it; STEP, SAMPLE: 0 */
        uint64_t ring_frames;  /* DECODE of video: frames that the output may hold at a time; 0: all */
        uint64_t owner;        /* ENCODE: whose results it may take from the cache; users have different ones, not 0 */
        uint64_t private_max; /* bytes that merged copies made for this job may take anew; 0: not limited */
        SparseOptions sparse; /* STEP, SAMPLE: of the steps that it applies to; zeros: dense */
        char numerics[128];
        WireCondition conditions[WIRE_CONDITIONS_MAX]; /* in packed order */
        WireLora loras[WIRE_LORAS_MAX];                /* merged in this order */
        uint32_t preview_steps; /* SAMPLE: a preview after every so many steps and the last; 0: none */
        float preview_map[75]; /* with preview_steps: [25][3] (service/h3/preview.h) */
} WireJobOpen;

/* What coding makes. */
typedef enum WireOutputName {
        WIRE_OUTPUT_IDS,       /* I32 [L] */
        WIRE_OUTPUT_TEXT,      /* [L, text_dim] of output_type */
        WIRE_OUTPUT_TEXT_TAGS, /* U8 [L] */
        WIRE_OUTPUT_FRAMES,    /* [ring or F, H, W, 3] of output_type */
        WIRE_OUTPUT_SOUND,     /* F32 [2, samples] */
        WIRE_OUTPUT_VIDEO,     /* F32 [24, T, H, W] */
        WIRE_OUTPUT_AUDIO,     /* F32 [32, 2, A] */
        WIRE_OUTPUT_PREVIEW,   /* U8 [T, H, W, 3], of SAMPLE */
        _WIRE_OUTPUT_NAME_MAX,
} WireOutputName;

typedef struct WireOutput {
        uint32_t name; /* WireOutputName */
        uint32_t reserved;
        WireTensor tensor; /* from the start of the output arena */
} WireOutput;

/* Numbers of the commit word, slots and outputs count from the start of the output arena, output_used from output_offset.
 * The commit word lies at commit_offset of the output arena (8 bytes, atomic, written last). State k (after k steps; 0 is
 * the start) lies in slot k % n_slots at slot_offset + (k % n_slots) * slot_stride; the tensors are relative to their slot.
 * A slot is [video | audio | carried | denoised video | denoised audio], each at a multiple of 64; the last three are there
 * only for samplers that have them (sampler.h). A STEP job has one slot, holding the velocities, and steps = 1; a MERGE job
 * has steps = 1 and nothing else: its STEP comes without a PLAN and writes no commit word.
 *
 * A SAMPLE with preview_steps has one output, PREVIEW, behind its slots, unless the range has no room for it: then it has no previews.
 * What it shows may be overwritten by the next one while it is read.
 *
 * Coding: video, audio and carried are absent; rows are tokens (TOKENIZE, ENCODE), latent rows or samples. The outputs lie
 * between the commit word and the end of output_used; what a step makes is there before its commit word. n_slots is 0, or for
 * DECODE of video 2: slot k % 2 holds what the chunk after k steps needs of the one before, F32. Frame i of the film is
 * frame i % ring_frames of the tensor; a step may come only if step_frames more of them fit beside those not released
 * (ring_frames >= frames: always). */
typedef struct WireJobReady {
        WireHeader header;
        uint64_t rows;
        uint32_t steps, blocks;
        uint32_t committed; /* steps already done (RESUME, start_step) */
        uint32_t n_slots;
        uint64_t commit_offset;
        uint64_t slot_offset, slot_stride;
        uint64_t output_used; /* bytes from output_offset */
        WireTensor video, audio;
        WireTensor carried; /* [32, 2, A]; absent for samplers without */
        uint32_t n_outputs, reserved;
        WireOutput outputs[WIRE_OUTPUTS_MAX];
        uint64_t frames, ring_frames, step_frames; /* of the film; in the output; that one step makes at most. 0: none are made */
        uint64_t frames_done; /* finished by the committed steps, as STEP_DONE would say; 0 without RESUME */
        uint64_t memory_bytes; /* what a step takes beside the arenas and the model; STEP, SAMPLE: with PLAN_ONLY, about; else 0 */
} WireJobReady;

#define WIRE_LORA_NOTES_MAX 12

/* What of a MERGE job's adapters applies, before its STEP_DONE, in as many messages as it takes. */
typedef struct WireLoraNote {
        uint32_t lora; /* index in JOB_OPEN */
        uint32_t refused;
        char name[160]; /* module, as the file spells it */
        char reason[160]; /* "" for an applied one */
} WireLoraNote;

typedef struct WireLoraNotes {
        WireHeader header;
        uint32_t n, reserved;
        WireLoraNote notes[WIRE_LORA_NOTES_MAX];
} WireLoraNotes;

typedef struct WireRange {
        uint64_t begin, end;
} WireRange;

typedef struct WireHeads {
        uint32_t begin, end;
} WireHeads;

/* What travels between ranks (service/h3/rank.h); the bits are the same. */
typedef enum WirePlanKind {
        WIRE_PLAN_AUTO, /* of a request only, never of a PLAN */
        WIRE_PLAN_HIDDEN_GATHER,
        WIRE_PLAN_KV_GATHER,
        WIRE_PLAN_QKV_ALL_TO_ALL,
        _WIRE_PLAN_MAX,
} WirePlanKind;

/* How it travels. */
typedef enum WireExchange {
        WIRE_EXCHANGE_AUTO, /* of a request only */
        WIRE_EXCHANGE_HOST, /* through memory of the worker */
        WIRE_EXCHANGE_P2P,  /* from device to device: only between those that HELLO says it of */
        WIRE_EXCHANGE_NCCL, /* by NCCL: only where HELLO has it, and with a device for each rank */
        _WIRE_EXCHANGE_MAX,
} WireExchange;

/* A rank's rows are exchanged and computed in so many parts at most. */
#define WIRE_CHUNKS_MAX 32

/* Which rank does what, decided by the broker; ranks: at most those of the WELCOME, the others have no part. Row cuts are
 * multiples of row_tile; ranges are contiguous, ascending, cover [0, rows) and [0, heads); a rank may have none of either. */
typedef struct WirePlan {
        WireHeader header;
        uint32_t ranks, row_tile, chunks;
        uint32_t kind;     /* WirePlanKind */
        uint32_t exchange; /* WireExchange */
        uint32_t reserved;
        WireRange rows[WIRE_RANKS_MAX];
        WireHeads heads[WIRE_RANKS_MAX];
} WirePlan;

/* The step is the first one: start_step of the job. No RESUME, PLAN_ONLY or MERGE. */
typedef struct WireJobRun {
        WireJobOpen open;
        WirePlan plan; /* its header is not used */
} WireJobRun;

typedef struct WireStep {
        WireHeader header; /* step: index, must equal the number of committed steps */
} WireStep;

typedef struct WireProgress {
        WireHeader header;
        uint32_t block, blocks; /* blocks finished, of */
} WireProgress;

typedef struct WireStepDone {
        WireHeader header; /* step: the one that is done; the commit word says step + 1 */
        /* The step; with the first one since JOB_OPEN also the copying and checking of the inputs there, which goes by bytes too. */
        uint64_t compute_usec;
        uint64_t merged_bytes; /* MERGE: memory of the merged matrices, shared by all jobs of these adapters; else 0 */
        uint64_t exchanged_bytes; /* that ranks received from each other, over all ranks */
        uint64_t exposed_usec; /* what the exchange took of the rank that was longest in it; 0: not measured (exchange-test.h) */
        uint64_t frames; /* DECODE of video: finished so far; else 0 */
        uint64_t first_usec; /* STEP, SAMPLE: when (CLOCK_MONOTONIC) its device could begin with block 0; 0: not known */
        uint32_t cached; /* ENCODE: taken from the cache */
        uint32_t preview; /* SAMPLE: that of this step is there */
        uint32_t sparse;  /* STEP, SAMPLE: its attention was */
        uint32_t reserved;
        uint32_t tiles[WIRE_RANKS_MAX]; /* coding of video: what each rank has made of the film since the step before */
        /* of sparse attention, each rank's: pairs of blocks whose keys queries saw row by row, and all; else 0 */
        uint64_t blocks_seen[WIRE_RANKS_MAX], blocks_all[WIRE_RANKS_MAX];
} WireStepDone;

/* A model's weights in device memory, over all ranks. */
#define WIRE_DEVICE_MODELS_MAX 8u
typedef struct WireDeviceModel {
        uint64_t model; /* 0: none, and none behind it */
        uint64_t bytes; /* of device memory */
        uint64_t registered_bytes; /* of host memory, with the devices */
        uint32_t blocks; /* of the model that stay there, on the rank that has most of them */
        uint32_t reserved;
} WireDeviceModel;

/* What the worker holds beside regions and arenas, whenever that has changed; before the answer to what changed it. */
typedef struct WireMemory {
        WireHeader header;
        uint64_t merged_bytes; /* of all merged matrices, in use or kept */
        WireDeviceModel models[WIRE_DEVICE_MODELS_MAX]; /* whose weights are in device memory, the last used first */
        uint32_t idle; /* how many times welcome.vram_idle_usec has passed without a step: what a worker that waits still takes
                          of its devices comes back when its process ends */
        uint32_t reserved;
} WireMemory;

/* Ends a MODEL_COMMIT, JOB_OPEN, JOB_RUN or STEP (header.job, header.step say which). name "Cancelled": the job was cancelled at a
 * block. */
/* The worker cannot go on (a device failed, a rank does not end) and ends; what was asked goes on in the next one. The text
 * goes behind "the worker ". */
typedef enum WireFatal {
        WIRE_FATAL_NONE,
        WIRE_FATAL_DEVICE,  /* failed */
        WIRE_FATAL_OFF_BUS, /* is not there any more; the text has its PCI address */
} WireFatal;

typedef struct WireError {
        WireHeader header;
        Fault fault;
        uint32_t fatal; /* WireFatal; others count as WIRE_FATAL_DEVICE */
        uint32_t reserved;
} WireError;

typedef struct WireJobClose {
        WireHeader header;
} WireJobClose;

typedef struct WireCancel {
        WireHeader header;
} WireCancel;

typedef struct WireDie {
        WireHeader header;
} WireDie;

/* Memory is short: what is only kept (merged matrices, tables, results) goes. */
typedef struct WireTrim {
        WireHeader header;
} WireTrim;

typedef union WireMessage {
        WireHeader header;
        WireHello hello;
        WireAck ack;
        WireModelReady model_ready;
        WireJobReady job_ready;
        WireProgress progress;
        WireStepDone step_done;
        WireLoraNotes lora_notes;
        WireMemory memory;
        WireLinks links;
        WirePins pins; /* KNOWN_PINS, too */
        WireError error;
        WireWelcome welcome;
        WireModelOpen model_open;
        WireRegion region;
        WireModelCommit model_commit;
        WireModelClose model_close;
        WireArena arena;
        WireArenaClose arena_close;
        WireJobOpen job_open;
        WirePlan plan;
        WireStep step;
        WireJobClose job_close;
        WireCancel cancel;
        WireDie die;
        WireJobRun job_run;
        WireTrim trim;
        uint8_t bytes[WIRE_MESSAGE_MAX];
} WireMessage;

_Static_assert(sizeof(WireMessage) == WIRE_MESSAGE_MAX, "a message does not fit");

#define WIRE_SLOT_ALIGN UINT64_C(64)

/* Up to the next place for a tensor; of sizes that cannot overflow. */
static inline uint64_t wire_slot_pad(uint64_t size) {
        return (size + WIRE_SLOT_ALIGN - 1) / WIRE_SLOT_ALIGN * WIRE_SLOT_ALIGN;
}

/* Where the parts of a slot begin (WireJobReady); the video does at 0. 0: the sampler does not have it. */
typedef struct WireSlot {
        uint64_t audio, carried, denoised_video, denoised_audio;
        uint64_t stride; /* bytes of the whole slot */
} WireSlot;

/* The slot of a sampler (of a STEP: WIRE_SAMPLER_EULER) for streams of so many bytes. -EOVERFLOW. */
int wire_slot_place(WireSampler sampler, uint64_t video, uint64_t audio, WireSlot *ret);

/* The commit word: epoch, steps done. Written with release order after the slot. */
static inline uint64_t wire_commit_pack(uint32_t epoch, uint32_t steps_done) {
        return ((uint64_t) epoch << 32) | ((uint64_t) 1 << 31) | (steps_done & 0x7fffffffu);
}

/* Returns 0 if the word is a commit, -ENODATA if nothing was committed. */
int wire_commit_unpack(uint64_t word, uint32_t *ret_epoch, uint32_t *ret_steps_done);

/* Zeroes m and fills the header; returns m's size for its type (0 for an unknown type). */
uint32_t wire_init(WireMessage *m, WireType type, uint64_t epoch, uint64_t job, uint32_t step);
uint32_t wire_size_of(uint16_t type);
const char *wire_type_name(uint16_t type); /* "HELLO"; "?" */
const char *wire_output_name(uint32_t name); /* "text_tags"; NULL for an unknown one */

/* Sends one message, never blocks. fd < 0: none. -EAGAIN: try again on POLLOUT; -EPIPE: the peer is gone. */
int wire_send(int socket, const WireMessage *m, int fd);

/* Receives one message, never blocks. 1: a valid message in *ret (version, size and type checked, strings NUL-terminated by
 * force, padding zeroed), *ret_fd its descriptor (O_CLOEXEC) or -EBADF; 0: end of file; -EAGAIN; -EBADMSG: protocol error,
 * the text in f; other errors of recvmsg(). Descriptors of refused messages are closed, outputs untouched then. */
int wire_receive(int socket, WireMessage *ret, int *ret_fd, Fault *f);
