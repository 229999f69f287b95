/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The a{sv} dictionaries of Session.Step and Session.Sample (dbus/org.latentd.Latent1.Session.xml). Only
 * what the caller set is sent: the service knows the defaults and judges the values. Negative errno of
 * sd-bus. */

#include <stdbool.h>

#include "client/liblatent/adapters.h"

/* {key: string} unless value is NULL. */
int append_string(sd_bus_message *m, const char *key, const char *value);

/* One entry of an a{sv} that is open: an array, whose elements (of that type, at most 14 characters) come between these two. */
int open_list(sd_bus_message *m, const char *key, const char *element);
int close_list(sd_bus_message *m);

/* NULL stays NULL. -ENOMEM. */
int copy_string(const char *s, char **ret);

/* Where a trajectory goes on that an earlier run of the service began. */
typedef struct Resume {
        uint32_t step;      /* 0: it starts at its beginning */
        latent_tensor slot; /* the state, U8 [bytes of a slot] */
        latent_tensor kept; /* with KEEP_STEPS: the states before, U8 [step, bytes of a slot] */
        const char *numerics;
} Resume;

typedef enum RequestKind {
        REQUEST_STEP,
        REQUEST_SAMPLE,
        REQUEST_MERGE, /* SetLoras(): only `adapters` counts */
        REQUEST_TOKENIZE, /* these four: `adapters` does not */
        REQUEST_ENCODE,
        REQUEST_DECODE,
        REQUEST_ENCODE_MEDIA,
        REQUEST_RENDER, /* `adapters` does; its prompt is sample.text */
} RequestKind;

#define CONDITIONS_MAX 30u
#define PICTURES_MAX 12u /* files of a render */
#define REQUEST_TENSORS 10u
#define REQUEST_STRINGS 9u

/* A request as the caller made it, with copies of all that it points to: it may be sent again much later. */
typedef struct Request {
        RequestKind kind;
        AdapterSet *adapters; /* reference; NULL: none were ever set */
        /* A step is put here too: of its fields only its own sigmas are not of a trajectory as well. And so is coding, whose pictures
         * are the conditions. */
        latent_sample_options sample;
        double sigma_video, sigma_audio;
        const char *type, *picture_rule, *posterior;
        uint64_t ring_frames;
        bool sound[CONDITIONS_MAX];
        uint32_t width, height, frames; /* RENDER */
        bool keep_latents, has_file;
        int file;           /* with has_file: ours, open for writing */
        const char *format;
        latent_media pictures[PICTURES_MAX]; /* likewise, open for reading */
        uint32_t n_pictures;
        bool has_sheet;
        int sheet; /* likewise */
        uint32_t sheet_columns, sheet_rows;
        uint32_t preview_steps;
        bool has_map;
        double preview_map[75];

        latent_tensor tensors[REQUEST_TENSORS];
        latent_condition conditions[CONDITIONS_MAX];
        latent_tensor condition_video[CONDITIONS_MAX], condition_audio[CONDITIONS_MAX];
        char *strings[REQUEST_STRINGS], *condition_kinds[CONDITIONS_MAX];
        char *picture_kinds[PICTURES_MAX], *picture_names[PICTURES_MAX];
} Request;

/* One of step and sample is NULL. adapters may be NULL. InvalidArgument: what cannot even be sent. */
int request_new(const latent_step_options *step, const latent_sample_options *sample, AdapterSet *adapters,
        Request **ret, latent_error *e);
/* Coding: q with what the caller gave, which is copied. */
int request_new_coding(const Request *q, Request **ret, latent_error *e);
int request_new_merge(AdapterSet *adapters, Request **ret, latent_error *e);
Request *request_free(Request *r);

/* Frames become ready one after the other. */
bool request_makes_frames(const Request *q);
/* Before it is sent again: what was written of its files goes. */
int request_rewind(const Request *q);

/* The method of the Session interface, the kind of Plan() and what an error says was tried; of a MERGE none. */
const char *request_method(const Request *q);
const char *request_plan_kind(const Request *q);
const char *request_doing(const Request *q);

/* The dictionary of all but a MERGE. resume may be NULL. */
int request_append(sd_bus_message *m, const Request *q, const Resume *resume);

DEFINE_CLEANUP(Request *, request_free)
