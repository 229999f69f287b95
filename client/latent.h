/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LATENT_H
#define LATENT_H

/* liblatent: the C client of latentd, the sampler service.
 *
 * The usual way:
 *
 * - latent_client_new() connects;
 * - latent_model_load_path() gives a job: latent_job_wait(), then latent_job_model();
 * - latent_session_open() makes two arenas of shared memory;
 * - latent_session_allocate() gives places for the inputs: write them;
 * - latent_session_step() gives a job: latent_job_wait(), then read what latent_job_tensor() finds.
 *
 * Rules for all functions:
 *
 * - Returns. Functions that return int give 0 or the positive outcome that is documented, or a negative
 *   errno. Outputs (ret_*) are set on success only.
 *
 * - Errors. Functions that take a latent_error fill it when they fail, if it is not NULL, and leave it alone
 *   otherwise. The error belongs to this call alone; there is no last error of a thread or a library. What
 *   each name means: LATENT_ERROR_* below.
 *
 * - Handles are opaque; each has its _free function, which accepts NULL. Order does not matter: what one
 *   handle needs of another lives as long as it does.
 *
 * - Options are structs that start with struct_size. Zero the struct, set struct_size = sizeof, set what you
 *   need; zero and NULL mean the default. Later versions add fields at the end, and programs built against
 *   one version work with the other's library.
 *
 * - Strings are UTF-8. Strings passed in are copied before the call returns.
 *
 * - Restarts. When the service goes away during a step or a trajectory (a crash, an upgrade) and comes back,
 *   latent_job_wait() loads the model again by the same means, opens the session again with its inputs and sends the job
 *   again; a trajectory goes on from its last finished step, and coding is done again from the start. The result has the
 *   same bits. Pointers into the input arena stay valid. A client of the service's own socket connects there again, in
 *   latent_job_wait() and in any call; one of a message bus asks the bus to start a service that died, every two seconds
 *   while it waits in latent_job_wait(). Jobs that cannot be taken up (loads, a decode into a ring of frames, models that were
 *   found and not loaded by this client) end with Restarted, and so does a job whose service went away for the eleventh time
 *   without a step of it having been finished in between: it may be the reason. If a file of the model or of an adapter was
 *   replaced or written to since the session was opened or the adapters were set, the job ends with FileChanged, a step too:
 *   no result is made of two versions of the weights. Start it again, in a new session.
 *
 * - Threads. One thread at a time per client and everything that was made from it. Different clients are
 *   independent. After fork() only the parent may use them. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Everything below is of this interface, also of all later 1.x. */
#define LATENT_API_VERSION 1

typedef struct latent_client latent_client;   /* a connection to the service */
typedef struct latent_model latent_model;     /* a checkpoint that the service knows */
typedef struct latent_session latent_session; /* two arenas on a model */
typedef struct latent_job latent_job;         /* long work: a load, a step, a trajectory */
typedef struct latent_value latent_value;     /* what the service says about itself */

/* ---- errors ---- */

/* Of fixed size; may be uninitialised when passed in. Freeing is not needed. */
typedef struct latent_error {
        int32_t code;    /* the negative errno that the call returned */
        char name[60];   /* LATENT_ERROR_*: for programs */
        char text[1024]; /* for people: what was wrong, what was expected, what to do */
} latent_error;

#define LATENT_ERROR_INVALID_ARGUMENT "InvalidArgument" /* -EINVAL: a wrong value, unknown option */
#define LATENT_ERROR_INVALID_FILE "InvalidFile"         /* -EBADMSG: a file breaks a rule of its format */
#define LATENT_ERROR_INVALID_MODEL "InvalidModel"       /* -EBADMSG: well formed, but no known model */
#define LATENT_ERROR_INVALID_TENSOR "InvalidTensor"     /* -EINVAL: an input: place, type, shape, NaN, Inf */
#define LATENT_ERROR_NOT_FOUND "NotFound"               /* -ENOENT: model, file, job */
#define LATENT_ERROR_ACCESS_DENIED "AccessDenied"       /* -EACCES */
#define LATENT_ERROR_NOT_SUPPORTED "NotSupported"       /* -EOPNOTSUPP: by this version or this machine */
#define LATENT_ERROR_DOES_NOT_FIT "DoesNotFit"          /* -ENOMEM: memory, with the numbers */
#define LATENT_ERROR_LIMIT_EXCEEDED "LimitExceeded"     /* -EDQUOT: sessions, jobs, bytes of this user */
#define LATENT_ERROR_BUSY "Busy"                        /* -EBUSY: in use by a session or unfinished job */
#define LATENT_ERROR_CANCELLED "Cancelled"              /* -ECANCELED: the job was cancelled */
#define LATENT_ERROR_WORKER_CRASHED "WorkerCrashed"     /* -ENOTRECOVERABLE: the step was tried twice */
#define LATENT_ERROR_NO_WORKER "NoWorker"               /* -ENODEV: no worker can be started */
#define LATENT_ERROR_RESTARTED "Restarted"              /* -ECONNRESET: the service went away */
#define LATENT_ERROR_IO "IOError"                       /* -EIO: reading a file; -ETIMEDOUT: no answer */
#define LATENT_ERROR_FILE_CHANGED "FileChanged"         /* -ESTALE: a file changed while it was read, or over a restart */
#define LATENT_ERROR_INTERNAL "Internal"                /* any other code: a bug, memory of this process */

/* -ENOTCONN: the bus or the service is not reachable. The service does not know this one. */
#define LATENT_ERROR_NO_SERVICE "NoService"

/* ---- library ---- */

/* Version of this library, e.g. "0.1.0". Static. */
const char *latent_version(void);

/* ---- connection ---- */

enum {
        /* The system bus if the service runs there or can be started there, else the user bus. */
        LATENT_BUS_AUTO = 0,
        LATENT_BUS_SYSTEM = 1,
        LATENT_BUS_USER = 2,
        LATENT_BUS_ADDRESS = 3
};

typedef struct latent_client_options {
        uint32_t struct_size;
        uint32_t bus;        /* LATENT_BUS_* */
        const char *address; /* LATENT_BUS_ADDRESS: of a message bus, e.g. "unix:path=/run/x/bus" */
        /* Path of the service's own socket, e.g. "/run/latentd/bus": no message bus is used; bus must be 0 then. */
        const char *socket;
        uint32_t flags;      /* LATENT_CLIENT_* */
        uint32_t restart_timeout_sec; /* how long a job waits for a service that went away; 0: 60 */
} latent_client_options;

enum {
        /* Jobs end with Restarted when the service goes away, instead of going on when it is back. */
        LATENT_CLIENT_NO_RESUME = 1
};

/* Connects. options may be NULL. *ret_client: latent_client_free(). The service may be started by the first
 * call that needs it. Errors: NoService, InvalidArgument, Internal. */
int latent_client_new(const latent_client_options *options, latent_client **ret_client, latent_error *error);

/* Closes the connection: the service then cancels this client's jobs, closes its sessions and forgets its
 * private models. Other handles may be freed afterwards, and calls on them fail with Restarted. */
void latent_client_free(latent_client *client);

/* For event loops: poll this descriptor for latent_client_events() (poll(2) bits), at latest until
 * latent_client_timeout(), then call latent_client_process(). Ask anew before each poll. The descriptor
 * belongs to the client; it is another one after a client of the service's own socket connected again.
 * Negative errno if the connection is lost. */
int latent_client_fd(latent_client *client);
int latent_client_events(latent_client *client);

/* *ret_usec: how long a poll may last, in microseconds; UINT64_MAX: as long as it likes. */
int latent_client_timeout(latent_client *client, uint64_t *ret_usec);

/* Takes in whatever arrived, without blocking. Jobs that ended then answer latent_job_wait() at once.
 * Returns 1 if something was taken in, else 0. Errors: NoService (the connection is lost; all jobs have
 * ended with Restarted, or, of a client of the service's own socket, wait to be taken up by latent_job_wait()). */
int latent_client_process(latent_client *client, latent_error *error);

/* ---- what the service says about itself ---- */

/* Values are trees. Types: */
enum {
        LATENT_VALUE_BOOL = 1,
        LATENT_VALUE_UINT = 2,
        LATENT_VALUE_INT = 3,
        LATENT_VALUE_DOUBLE = 4,
        LATENT_VALUE_STRING = 5,
        LATENT_VALUE_LIST = 6,
        LATENT_VALUE_DICT = 7 /* ordered as the service sent it */
};

/* All accessors accept NULL for the value, which is then of type 0 and has nothing in it, so that look-ups
 * can be chained. What they return belongs to the tree. */
int latent_value_type(const latent_value *value);

/* How many elements a list or dictionary has, else 0. One of them and its key: NULL beyond the end. */
size_t latent_value_count(const latent_value *value);
const latent_value *latent_value_at(const latent_value *value, size_t index);
const char *latent_value_key_at(const latent_value *value, size_t index);

/* The element of a dictionary under this key; NULL if absent. */
const latent_value *latent_value_get(const latent_value *value, const char *key);

/* NULL if it is not a string. */
const char *latent_value_as_string(const latent_value *value);

/* -EINVAL if it is not an integer, -ERANGE if it does not fit. */
int latent_value_as_uint(const latent_value *value, uint64_t *ret_value);
int latent_value_as_int(const latent_value *value, int64_t *ret_value);

/* Any number, else -EINVAL. */
int latent_value_as_double(const latent_value *value, double *ret_value);

/* 0 or 1, else -EINVAL. */
int latent_value_as_bool(const latent_value *value);

/* Frees a tree that was returned by a ret_ parameter below, and only such a one. */
void latent_value_free(latent_value *value);

/* A dictionary of the service's properties (org.latentd.Latent1.Manager): Version, State, CacheBytes, ...
 * Errors: NoService, AccessDenied, Internal. */
int latent_client_status(latent_client *client, latent_value **ret_value, latent_error *error);

/* Lists of dictionaries: "path" and the properties of each object as org.latentd.Latent1.Device, .Model,
 * .Job and .Session name them. Jobs and sessions of this user only. Errors: NoService, AccessDenied,
 * Internal. */
int latent_client_devices(latent_client *client, latent_value **ret_value, latent_error *error);
int latent_client_models(latent_client *client, latent_value **ret_value, latent_error *error);
int latent_client_jobs(latent_client *client, latent_value **ret_value, latent_error *error);
int latent_client_sessions(latent_client *client, latent_value **ret_value, latent_error *error);

/* The weight cache, a dictionary per file (Manager.ListRegions). Errors as above. */
int latent_client_regions(latent_client *client, latent_value **ret_value, latent_error *error);

/* Frees all weights that no model uses. *ret_bytes: how much. Errors: NoService, AccessDenied, Internal. */
int latent_client_drop_cache(latent_client *client, uint64_t *ret_bytes, latent_error *error);

/* Ends idle workers, and with them what they have on devices; the weights stay in main memory, and the next job starts
 * a worker again. Errors: Busy (jobs run or wait), NoService, AccessDenied, Internal. */
int latent_client_release_gpus(latent_client *client, latent_error *error);

/* Cancels any job of this user by its object path. Errors: NotFound, InvalidArgument (no path of a job),
 * NoService. */
int latent_client_cancel_job(latent_client *client, const char *path, latent_error *error);

/* ---- models ---- */

enum {
        /* The files are opened, nothing is read: latent_session_render() has the model loaded when it needs it, and its weights leave
         * memory when others need the room. No other job runs on it as long as it is deferred. One that is loaded already stays so. */
        LATENT_LOAD_DEFER = 1
};

typedef struct latent_load_options {
        uint32_t struct_size;
        uint32_t flags;   /* LATENT_LOAD_* */
        const char *name; /* latent_model_load_path() only: for people; default: the last part of the path */
        const char *qkv_order; /* of files with original names: "auto" (default), "interleaved", "stacked" */
        const char *partition; /* "fl2va", "ref2va"; default: from the name */
        const char *numa; /* "auto", "default", "interleave", "bind:N"; default: as the service is set up */
        /* Of a conditioner: a directory with its tokenizer's files (vocab.json, merges.txt, tokenizer.json, tokenizer_config.json,
         * added_tokens.json, those that are there): for a path one that this process can read, for a name one below ModelPath=.
         * Default: of a directory text_encoder the directory tokenizer beside it, else none. The sizes of pictures come from
         * preprocessor_config.json and video_preprocessor_config.json in the directory processor beside it, or else with the
         * tokenizer; absent: as the released model has them. */
        const char *tokenizer;
} latent_load_options;

/* Loads a model below the service's ModelPath= by its name there. options may be NULL. *ret_job:
 * latent_job_free(); when it is done, latent_job_model(). A model that is loaded already is done at once.
 * Errors: NotFound, AccessDenied, InvalidArgument, LimitExceeded, NoService; by the job: InvalidFile,
 * InvalidModel, DoesNotFit, NotSupported, IOError, FileChanged, NoWorker, Cancelled. */
int latent_model_load_name(latent_client *client, const char *name, const latent_load_options *options,
        latent_job **ret_job, latent_error *error);

/* Loads files that this library opens with the rights of this process: a .safetensors file, or a directory
 * with one checkpoint: config.json if there, and the shards that its one *.safetensors.index.json names, or
 * without an index all its .safetensors files; of a pipeline directory its transformer/. Of a pipeline the
 * other parts are DIR/text_encoder, which brings the files of DIR/tokenizer, DIR/vae and DIR/audio_vae. The model is
 * private to this user and goes when this client is freed and no session uses it; its weights stay in the
 * service's cache while memory lasts. Errors: NotFound, InvalidFile (also: which shards are absent),
 * AccessDenied, IOError and those of latent_model_load_name(). */
int latent_model_load_path(latent_client *client, const char *path, const latent_load_options *options,
        latent_job **ret_job, latent_error *error);

/* A model that is there, by its object path or its name (the newest of that name). *ret_model:
 * latent_model_free(). Errors: NotFound, NoService. */
int latent_model_find(
        latent_client *client, const char *name, latent_model **ret_model, latent_error *error);

/* Its object path; belongs to the handle. */
const char *latent_model_path(const latent_model *model);

/* A dictionary of its properties (org.latentd.Latent1.Model): Name, State, Layout, Types, Bytes, ... Errors:
 * NotFound, Restarted. */
int latent_model_properties(latent_model *model, latent_value **ret_value, latent_error *error);

/* Removes it from the service; weights that no other model uses are freed. Errors: Busy (sessions use it),
 * AccessDenied, NotFound, Restarted. */
int latent_model_unload(latent_model *model, latent_error *error);

/* Frees the handle; the model stays. */
void latent_model_free(latent_model *model);

/* ---- sessions ---- */

#define LATENT_DIMS_MAX 8
#define LATENT_ALIGNMENT 64

/* A tensor in an arena: row-major, without gaps. Of fixed size. */
typedef struct latent_tensor {
        uint64_t offset; /* bytes from the start of the arena */
        uint64_t size;   /* bytes: product of the shape times the size of an element */
        char dtype[16];  /* as in safetensors: "F32", "BF16", "U8", ... */
        uint32_t n_dims; /* <= LATENT_DIMS_MAX; the service takes at most 5 */
        uint32_t reserved;
        uint64_t shape[LATENT_DIMS_MAX];
} latent_tensor;

typedef struct latent_session_options {
        uint32_t struct_size;
        uint32_t ranks;        /* 1 .. 64, as many as the worker has at most; 0: all */
        uint64_t input_bytes;  /* size of the input arena; 0: 64 MiB; rounded up to pages */
        uint64_t output_bytes; /* size of the output arena; likewise. See latent_output_bytes() */
        const char *compute;   /* "auto" (default), "f32", "bf16": default of the session's jobs */
        const char *job_class; /* "normal" (default), "batch", "interactive": stored and shown; no effect on the order yet */
        /* How a step is split over ranks. Every split gives the same bits. */
        const uint32_t *shares; /* [n_shares] relative weights, one per rank, 1 .. 1000000; NULL: equal */
        uint32_t n_shares;
        uint32_t chunks;      /* parts of a rank's rows, exchanged one by one: 1 .. 32; 0: as fits */
        const char *plan;     /* "auto" (default), "hidden-gather", "kv-gather", "qkv-all-to-all" */
        const char *exchange; /* "auto" (default), "host", "p2p" (between GPUs), "nccl" */
        /* [n_gpus] the devices that its jobs use, by number, or the Uuid or PciAddress of org.latentd.Latent1.Device; NULL: all that
         * take part. A service without GPUs answers NotSupported. */
        const char *const *gpus;
        uint32_t n_gpus;
        uint32_t reserved;
        /* The other parts of a pipeline, for latent_session_render(); `model` is its denoiser then. NULL: none. */
        latent_model *conditioner;
        latent_model *video_vae;
        latent_model *audio_vae;
        /* Attention of the steps: METHOD[:key=value,...] as latentctl --sparse has it (latentctl(1)); NULL, "" or "off": dense. What the
         * model or the service cannot do: NotSupported. */
        const char *sparse;
} latent_session_options;

/* Opens a session and maps its arenas. options may be NULL. *ret_session: latent_session_free(). Errors:
 * NotFound, Busy (model still loading), LimitExceeded, DoesNotFit, NotSupported, InvalidArgument, NoService,
 * Restarted. */
int latent_session_open(latent_client *client, latent_model *model, const latent_session_options *options,
        latent_session **ret_session, latent_error *error);

/* How much room a job's results take at most: the state of a step or trajectory with this many steps (1 for
 * a step), all kept or not. video and audio: type and shape of the inputs; sampler: NULL for a step, else as
 * in latent_sample_options (one that this library does not know counts as the largest). UINT64_MAX if the
 * numbers make no sense. */
uint64_t latent_output_bytes(const latent_tensor *video, const latent_tensor *audio, const char *sampler,
        uint32_t steps, int keep_steps);

/* A LoRA adapter and its strength. Of fixed size. */
typedef struct latent_lora {
        latent_model *model; /* loaded like any model; its Kind is "lora" */
        double strength;     /* -1000 .. 1000; 0 changes no bit */
} latent_lora;

/* The adapters that later jobs of the session use, merged in this order, at most 16; n 0: none. The base
 * model stays as it is. compute: NULL: the session's. *ret_job: latent_job_free(); it merges, and its result
 * has "applied" (names of modules), "refused" (pairs of name and reason) and "bytes". A session that is
 * opened again after a restart of the service gets them again, from the models' files. Errors:
 * InvalidArgument, NotFound, Busy, NoService, Restarted; by the job: InvalidModel, DoesNotFit, Cancelled,
 * FileChanged. */
int latent_session_set_loras(latent_session *session, const latent_lora *loras, size_t n, const char *compute,
        latent_job **ret_job, latent_error *error);

/* Its object path; belongs to the handle. */
const char *latent_session_path(const latent_session *session);

/* The arenas in this process. They stay readable until the session and all its jobs are freed, whatever
 * becomes of the service. A restart of the service during a job moves the output arena, not the input arena. */
void *latent_session_input(latent_session *session);              /* for writing */
const void *latent_session_output(const latent_session *session); /* read-only memory */
uint64_t latent_session_input_bytes(const latent_session *session);
uint64_t latent_session_output_bytes(const latent_session *session);

/* Takes a place in the input arena, aligned to LATENT_ALIGNMENT, behind the last one. tensor: dtype, n_dims
 * and shape are read, offset and size are set. *ret_data: where to write its bytes (not cleared); belongs to
 * the session. Do not write while a job that uses it runs. Errors: InvalidArgument (type, shape), DoesNotFit
 * (the arena is full). */
int latent_session_allocate(
        latent_session *session, latent_tensor *tensor, void **ret_data, latent_error *error);

/* Gives all places back. The bytes stay as they are. */
void latent_session_reset(latent_session *session);

/* Cancels its jobs and frees its arenas in the service. Errors: Restarted (it is gone anyway), NotFound. */
int latent_session_close(latent_session *session, latent_error *error);

/* Closes it if that was not done, without waiting, and frees the handle. */
void latent_session_free(latent_session *session);

/* ---- jobs ---- */

/* A keyframe or a reference. Of fixed size. */
typedef struct latent_condition {
        const char *kind; /* "keyframe", "image", "video", "audio" */
        uint64_t frame;   /* keyframe: pixel frame of the film, from 0 */
        const latent_tensor *video; /* F32 [24, T, H, W]; NULL: no picture */
        const latent_tensor *audio; /* F32 [32, 2, A]; NULL: no sound */
} latent_condition;

/* Tensors: from latent_session_allocate(); NULL where optional. */
typedef struct latent_step_options {
        uint32_t struct_size;
        uint32_t reserved;
        const latent_tensor *text;      /* BF16 [L, text_dim] */
        const latent_tensor *text_tags; /* U8 [L]: 0 vision row, 1 text row; optional: all 1 */
        const latent_tensor *video;     /* F32 [24, T, H, W], the latent as the model sees it */
        const latent_tensor *audio;     /* F32 [32, 2, A] */
        double sigma_video;             /* 0 .. 1, taken as f32 */
        double sigma_audio;
        const char *compute;    /* "auto", "f32", "bf16"; default: the session's */
        uint64_t output_offset; /* where results may start in the output arena: n * LATENT_ALIGNMENT */
        uint64_t output_bytes;  /* how many bytes they may take; 0: the rest of the arena */
        const latent_condition *conditions; /* in packed order, at most 30 */
        uint32_t n_conditions;
        uint32_t has_seed;
        const char *condition_noise; /* "given" (default), "comfy", "diffusers", "official": then with seed */
        uint64_t seed;
        const latent_tensor *mask_video; /* F32 [T, H, W]: 1 generate, 0 keep */
        const latent_tensor *mask_audio; /* F32 [2, A] or [32, 2, A] */
        /* F32 [n + 1], 2 .. 1001 values, strictly descending; both or none: the whole schedule that this step is
         * one of, which saves work in its other steps. The result is the same, bit by bit; the step's own sigmas
         * need not be among them. */
        const latent_tensor *sigmas_video;
        const latent_tensor *sigmas_audio;
} latent_step_options;

/* One evaluation of the model. *ret_job: latent_job_free(). Results: "video_velocity", "audio_velocity", in
 * the model's own sign (x0 = x + sigma v). Errors: InvalidArgument, InvalidTensor, Busy (the output range),
 * LimitExceeded, Restarted; by the job: InvalidTensor, DoesNotFit, WorkerCrashed, NoWorker, Cancelled,
 * Restarted, FileChanged. */
int latent_session_step(latent_session *session, const latent_step_options *options, latent_job **ret_job,
        latent_error *error);

enum {
        LATENT_SAMPLE_KEEP_STEPS = 1 /* keep the state after every step */
};

typedef struct latent_sample_options {
        uint32_t struct_size;
        uint32_t flags;            /* LATENT_SAMPLE_* */
        const latent_tensor *text; /* as in latent_step_options */
        const latent_tensor *text_tags;
        const latent_tensor *video; /* F32 [24, T, H, W]: the noise; or, if noise is made, the clean latent */
        const latent_tensor *audio; /* F32 [32, 2, A] */
        /* F32 [n + 1], strictly descending; both or none; they win over steps and schedule, and but for
         * "res_multistep" over the shifts. */
        const latent_tensor *sigmas_video;
        const latent_tensor *sigmas_audio;
        uint32_t steps; /* 1 .. 1000: required without sigmas */
        uint32_t reserved;
        const char *schedule; /* "simple" (default), "reference" */
        double shift_video;   /* > 0; 0: the checkpoint's (its scheduler_config.json), or else 12 */
        double shift_audio;   /* > 0; 0: likewise, or else 3 */
        const char *sampler;  /* "euler" (default), "res_multistep", "res_multistep_perstream" */
        const char *compute;  /* as in latent_step_options, and so on */
        uint64_t output_offset;
        uint64_t output_bytes;
        const latent_condition *conditions;
        uint32_t n_conditions;
        uint32_t has_seed;
        const char *condition_noise;
        uint64_t seed;
        const latent_tensor *mask_video;
        const latent_tensor *mask_audio;
        const char *noise;                /* "given" (default), "comfy", "diffusers": then with seed */
        const latent_tensor *clean_video; /* what mask_video keeps; default where noise is made: video */
        const latent_tensor *clean_audio;
} latent_sample_options;

/* A whole trajectory. *ret_job: latent_job_free(). Results: "video", "audio"; with KEEP_STEPS also
 * "step.I.video", "step.I.audio", and for res_multistep "step.I.audio_carried". Errors as latent_session_step(), and NotSupported. */
int latent_session_sample(latent_session *session, const latent_sample_options *options,
        latent_job **ret_job, latent_error *error);

/* What such a job would take, without running it: a dictionary with rows, steps, output-bytes, ranks.
 * *ret_value: latent_value_free(). Errors as those of the call and its job. */
int latent_session_plan_step(
        latent_session *session, const latent_step_options *options, latent_value **ret_value, latent_error *error);
int latent_session_plan_sample(latent_session *session, const latent_sample_options *options,
        latent_value **ret_value, latent_error *error);

/* ---- coding: a conditioner's and a VAE's jobs ---- */

/* Options as everywhere; output_offset and output_bytes as in latent_step_options. How many bytes a result takes
 * the plan functions below say; a session with a small output arena is enough for them. */
typedef struct latent_tokenize_options {
        uint32_t struct_size;
        uint32_t reserved;
        const latent_tensor *text; /* U8 [bytes] of UTF-8; NULL: the empty text */
        uint64_t output_offset;
        uint64_t output_bytes;
} latent_tokenize_options;

/* A text's tokens. Result: "ids" I32 [L]. The session's model is a conditioner with a tokenizer. *ret_job:
 * latent_job_free(). Errors as latent_session_step(); by the job also InvalidArgument: no UTF-8, with the offset. */
int latent_session_tokenize(latent_session *session, const latent_tokenize_options *options, latent_job **ret_job,
        latent_error *error);

enum {
        LATENT_MEDIA_LAST = 1,   /* keyframe: it is the film's last frame, else the first */
        LATENT_MEDIA_SOUND = 2,  /* video: its sound is needed; else it is taken if there is any */
        LATENT_MEDIA_SILENT = 4  /* video: without its sound */
};

/* A file with a picture, clip or sound that a film goes by: PNG, JPEG, WebP, GIF, BMP, MP4, Matroska, WebM, AVI, WAV, FLAC, MP3, Ogg,
 * AAC. Of fixed size. */
typedef struct latent_media {
        const char *kind; /* "keyframe"; or a reference: "image", "video", "audio", NULL: what is in the file. The two do not go together */
        const char *name; /* of the file, for messages; NULL: none */
        int file;         /* a regular file, open for reading; the library keeps a duplicate until the job is freed */
        uint32_t flags;   /* LATENT_MEDIA_* */
} latent_media;

/* What the conditioner sees beside the prompt. Of fixed size. */
typedef struct latent_picture {
        const char *kind; /* "keyframe"; or "image", "video", "audio": references. The two do not go together */
        const latent_tensor *picture; /* U8 [H, W, 3], of a video U8 [F, H, W, 3] at 24 frames a second; NULL: of an audio */
        uint32_t sound; /* video: it has sound */
        uint32_t reserved;
} latent_picture;

typedef struct latent_encode_options {
        uint32_t struct_size;
        uint32_t n_pictures; /* at most 30 */
        const latent_tensor *text; /* as in latent_tokenize_options */
        const latent_picture *pictures; /* in the order of the request */
        const char *picture_rule; /* "reference" (default), "comfy": sizes and filter of the pictures */
        const char *type; /* "bf16" (default), "f32": of the result text */
        const char *compute; /* as in latent_step_options */
        uint64_t output_offset;
        uint64_t output_bytes;
        /* Instead of pictures: files, as in latent_render_options, of a film of this size and length. Not for a plan. */
        const latent_media *files;
        uint32_t n_files;
        uint32_t width, height, frames;
} latent_encode_options;

/* A prompt and pictures, as the denoiser reads them. Results: "text" [L, text_dim], "text_tags" U8 [L], "ids" I32 [L]. */
int latent_session_encode(latent_session *session, const latent_encode_options *options, latent_job **ret_job,
        latent_error *error);

typedef struct latent_decode_options {
        uint32_t struct_size;
        uint32_t reserved;
        const latent_tensor *video; /* F32 [24, T, H, W]: of a video VAE */
        const latent_tensor *audio; /* F32 [32, 2, A]: of an audio VAE */
        const char *type; /* "u8" (default), "f32" (0 to 1): of the frames */
        uint64_t frames; /* a ring: how many frames the result may hold at a time, 22 or more; 0: all */
        const char *compute;
        uint64_t output_offset;
        uint64_t output_bytes;
} latent_decode_options;

/* Latents as pictures or sound. Results: "frames" [F, H * 16, W * 16, 3], RGB, frame i at i modulo its first dimension;
 * or "sound" F32 [2, samples], 32 kHz. The job's result also has "frames", the number of frames of the film. Frames are
 * there one after the other: latent_job_frames_ready(). */
int latent_session_decode(latent_session *session, const latent_decode_options *options, latent_job **ret_job,
        latent_error *error);

typedef struct latent_encode_media_options {
        uint32_t struct_size;
        uint32_t has_seed;
        const latent_tensor *video; /* U8 or F32 (0 to 1) [F, H, W, 3]: of a video VAE; H and W multiples of 16, 32 or more */
        const latent_tensor *audio; /* F32 [2, samples], 32 kHz: of an audio VAE */
        const char *posterior; /* video: "mean" (default), "sampled" */
        uint64_t seed; /* of sampled; default 42 */
        uint64_t output_offset;
        uint64_t output_bytes;
} latent_encode_media_options;

/* Pictures or sound as latents. Results: "video" F32 [24, T, H / 16, W / 16] or "audio" F32 [32, 2, A]. */
int latent_session_encode_media(latent_session *session, const latent_encode_media_options *options,
        latent_job **ret_job, latent_error *error);

enum {
        LATENT_RENDER_KEEP_LATENTS = 1, /* the latents are results, too: "video", "audio" */
        LATENT_RENDER_FILE = 2,         /* `file` counts */
        LATENT_RENDER_SHEET = 4         /* `sheet` counts */
};

typedef struct latent_render_options {
        uint32_t struct_size;
        uint32_t flags;              /* LATENT_RENDER_* */
        const latent_tensor *prompt; /* U8 [bytes] of UTF-8; NULL: empty */
        uint32_t width, height;      /* pixels, rounded to multiples of 32; 0, both: as the first keyframe, else 1344, 768 */
        uint32_t frames;             /* 1 .. 362, rounded up to 17k + 5; 0: 124 */
        uint32_t steps;              /* as in latent_sample_options, and so on; 0: 20 */
        const latent_tensor *sigmas_video;
        const latent_tensor *sigmas_audio;
        const char *schedule;
        double shift_video;
        double shift_audio;
        const char *sampler;
        const char *noise; /* "comfy" (default), "diffusers" */
        uint64_t seed;     /* with has_seed; default 42 */
        uint32_t has_seed;
        /* With LATENT_RENDER_FILE: a regular, empty file, open for writing; the library keeps a duplicate until the job is
         * freed. The film is written there while it is made, and the output arena has the kept latents alone. */
        int file;
        const char *format; /* of it: "mp4" (default), "webm", "mkv" */
        const char *type;   /* of frames in the output arena: "u8" (default), "f32" */
        uint64_t ring;      /* likewise, as frames in latent_decode_options */
        const char *compute;
        uint64_t output_offset;
        uint64_t output_bytes;
        /* At most 12; of references 9 images, 3 clips, 3 sounds, which come in this order with "comfy", and not sounds alone. */
        const latent_media *pictures;
        uint32_t n_pictures;
        uint32_t reserved;
        const char *picture_rule; /* "comfy", "reference": how they are brought in; NULL: as the program whose noise it is */
        /* With LATENT_RENDER_SHEET and a file: likewise a file, which gets a contact sheet (PNG): frames of the film, evenly from the first
         * to the last, in so many columns and rows (0: 4, 3), at most 64. One that cannot be written costs no film: the result has
         * sheet-error (name, text) then, else sheet-bytes. */
        int sheet;
        uint32_t sheet_columns;
        uint32_t sheet_rows;
        /* Pictures of the film while it is sampled, after every so many steps and the last: result "preview", U8 [T, H/16, W/16, 3], and
         * latent_progress.preview says when there is a new one. They are written to the output arena with the latents; if it has no room
         * for both (latent_output_bytes() and 3 * T * H/16 * W/16) there are none, and the film is the same. 0: none. */
        uint32_t preview_steps;
        /* With it: what a latent looks like: RGB from 0 to 1 is the sum of each channel times its row, and the last row, [25][3]. Differs
         * from VAE to VAE. */
        const double *preview_map;
} latent_render_options;

/* A film of a prompt, in a session with the parts of a pipeline. Results: "frames" and "sound" as latent_session_decode() has
 * them, but with a file; "video" and "audio" as asked for. The job's result has frames, width, height, samples, with a file bytes, and
 * phases (pairs of name and microseconds). After a restart of the service it is made again from the start; what was written of the file
 * is cut off. */
int latent_session_render(latent_session *session, const latent_render_options *options, latent_job **ret_job,
        latent_error *error);

/* The last preview of a render, as latent_job_tensor(); also while it runs: from a latent_progress_fn, or after latent_job_wait(). The
 * next one may be written over it at any time. NotFound: there is none yet. */
int latent_job_preview(latent_job *job, latent_tensor *ret_tensor, const void **ret_data, latent_error *error);

/* What it would take, before it is started: rows, tokens, steps, ranks, frames, width, height; output-bytes, work-bytes (what lies
 * between the phases), memory-bytes (most of it all at a time, with the weights); usec, where each phase was measured before; phases: an
 * array of dictionaries with phase, model, loaded, weight-bytes, ranks, numa, node-bytes, leave (names of the models that leave memory
 * for it), and where they are known step-bytes and usec. The conditioner counts the tokens, and is loaded for it. Errors: those of the job,
 * DoesNotFit with the numbers among them; NotSupported with pictures. */
int latent_session_plan_render(latent_session *session, const latent_render_options *options,
        latent_value **ret_value, latent_error *error);

/* What such a job would take: as latent_session_plan_step(), and memory-bytes: what a step takes beside arenas and weights. */
int latent_session_plan_tokenize(latent_session *session, const latent_tokenize_options *options,
        latent_value **ret_value, latent_error *error);
int latent_session_plan_encode(latent_session *session, const latent_encode_options *options,
        latent_value **ret_value, latent_error *error);
int latent_session_plan_decode(latent_session *session, const latent_decode_options *options,
        latent_value **ret_value, latent_error *error);
int latent_session_plan_encode_media(latent_session *session, const latent_encode_media_options *options,
        latent_value **ret_value, latent_error *error);

enum {
        LATENT_JOB_QUEUED = 0,
        LATENT_JOB_RUNNING = 1,
        LATENT_JOB_CANCELLING = 2,
        LATENT_JOB_DONE = 3,
        LATENT_JOB_FAILED = 4,
        LATENT_JOB_CANCELLED = 5
};

/* How far a job is. Set struct_size before a call that fills one; in a callback the library has set it. */
typedef struct latent_progress {
        uint32_t struct_size;
        uint32_t state;         /* LATENT_JOB_* */
        char phase[32];         /* "read", "check" (load; a render's parts); "queue", "sample", "merge", "tokenize", "encode", "decode",
                                 "encode-media", "decode-sound", "write" (a render's file);
                                 "frames-wait" (latent_job_release_frames()); "crash-wait" (CrashBudget= of the service); "restart" (the
                                 service went away) */
        uint32_t step, steps;   /* finished, of; 0: not known yet */
        uint32_t block, blocks; /* of the current step; MiB read for a load */
        double fraction;        /* 0 .. 1 of the whole job */
        uint64_t eta_usec;      /* until the end; 0: unknown, as nothing was measured yet */
        uint32_t preview;       /* of a render: steps before its last preview; 0: none yet */
        uint32_t reserved;
} latent_progress;

typedef void (*latent_progress_fn)(const latent_progress *progress, void *userdata);

/* Waits for the end, at most timeout_usec (0: looks only, UINT64_MAX: for ever). progress may be NULL; it is
 * called from inside this call with the newest news, and may call latent_job_cancel(), but must not free the
 * job or wait. Returns 0: done; 1: not finished yet; negative: it failed, with the name and text of the
 * job's error, or the connection did. A lost signal costs a delay of a second, no more. Signal handlers do
 * not end the wait. */
int latent_job_wait(latent_job *job, uint64_t timeout_usec, latent_progress_fn progress, void *userdata,
        latent_error *error);

/* How many frames of a decoded film are final and can be read, counted from its start. Waits as latent_job_wait() does,
 * until there are more than `known` or the job ends. Returns 0: *ret_frames are there, more than `known` unless the job
 * is done, in which case it is all of them; 1: no more yet; negative: as latent_job_wait(). From the first frame on
 * latent_job_tensor() finds "frames", and latent_job_result() has the number of all. After a restart of the service the
 * frames are made again, with the same bits in another place: the number then begins at 0 again. */
int latent_job_frames_ready(latent_job *job, uint64_t known, uint64_t timeout_usec, latent_progress_fn progress,
        void *userdata, uint64_t *ret_frames, latent_error *error);

/* The reader is done with the frames before this one: in a ring others may take their place. Does nothing for a job that
 * is done. Errors: InvalidArgument (more than were ready, no decode), NoService, Restarted. */
int latent_job_release_frames(latent_job *job, uint64_t up_to, latent_error *error);

/* The newest news that arrived, without asking the service. -EINVAL: struct_size. */
int latent_job_progress(const latent_job *job, latent_progress *ret_progress);

/* Asks the service to cancel it; the end comes by latent_job_wait(). No error if it has ended already.
 * Errors: NoService, Restarted. */
int latent_job_cancel(latent_job *job, latent_error *error);

/* Its object path; belongs to the handle. Another one after a restart of the service. */
const char *latent_job_path(const latent_job *job);

/* A dictionary of its properties (org.latentd.Latent1.Job). Errors: NotFound, Restarted. */
int latent_job_properties(latent_job *job, latent_value **ret_value, latent_error *error);

/* The result of a job that is done, a dictionary: rows, numerics, tensors, compute-usec, queued-usec and how
 * it was split: plan, ranks, chunks, exchange, exchanged-bytes; model, bytes-read of a load; cached of an encode, frames of
 * a decode, rank-tiles (pieces that each rank has made) of pictures. Belongs to the job. NULL before, but of a decode:
 * there from its first frame on (latent_job_frames_ready()),
 * until the service is restarted. A render with LATENT_RENDER_KEEP_LATENTS that fails when they are done has them all the same:
 * tensors ("video", "audio"), rows, numerics, compute-usec, queued-usec, and latent_job_tensor() finds them. */
const latent_value *latent_job_result(const latent_job *job);

/* The model of a load that is done. *ret_model: latent_model_free(). Errors: InvalidArgument (not a load,
 * not done). */
int latent_job_model(latent_job *job, latent_model **ret_model, latent_error *error);

/* Names of the result's tensors; NULL beyond the end. Belongs to the job. */
const char *latent_job_tensor_name(const latent_job *job, size_t index);

/* A tensor of the result by name. *ret_data: its bytes in the session's output arena, readable until the job
 * is freed; another job with the same output range overwrites them. Errors: NotFound. */
int latent_job_tensor(const latent_job *job, const char *name, latent_tensor *ret_tensor,
        const void **ret_data, latent_error *error);

/* Frees the handle; the job goes on. */
void latent_job_free(latent_job *job);

#ifdef __cplusplus
}
#endif

#endif
