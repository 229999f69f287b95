/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Plays latentd against the real latent-media. Failures end the test. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "service/shared/media-wire.h"

typedef struct Peer {
        int socket;
        pid_t pid;
        MediaHello hello;
        uint64_t taken;      /* of the last TAKEN */
        unsigned n_progress; /* PROGRESS seen */
} Peer;

/* Another program below the build folder for peer_open(). */
void peer_set_program(const char *path);
/* Starts the program and takes its HELLO. */
Peer *peer_open(void);
Peer *peer_free(Peer *p);
void peer_freep(Peer **p);
#define CLEANUP_PEER __attribute__((__cleanup__(peer_freep)))

void peer_send(Peer *p, const MediaMessage *m, int file, int arena);
/* The next message but PROGRESS and TAKEN; false: end of file. */
bool peer_receive(Peer *p, MediaMessage *ret);
/* Takes in what is there. */
void peer_take_in(Peer *p);
void peer_say_frames(Peer *p, uint64_t ready, bool sound);
int peer_wait(Peer *p); /* status of waitpid */

/* One whole request. f is empty when it was served. */
MediaDone peer_read(const MediaRead *request, int file, int arena, Fault *f);
void expect_fault(const Fault *f, const char *name, const char *part);

/* An arena of this size, mapped at *ret_map. */
int arena_new(uint64_t size, void **ret_map);
/* A new file without a name, with these bytes. */
int file_new(const void *bytes, size_t size);
int file_open(const char *path);
uint64_t file_size(int fd);

/* Reads. */
MediaDone probe_file(int file);
/* To a new [frames, height, width, 3], free(). */
uint8_t *read_picture(int file, MediaFit fit, uint32_t width, uint32_t height);
uint8_t *read_clip(int file, uint32_t width, uint32_t height, uint64_t frames_max, uint64_t *ret_frames);
/* To a new F32 [2, samples]. */
float *read_sound(int file, uint64_t samples_max, uint64_t *ret_samples);

/* Writes all of it at once, in a ring of all the frames; frames NULL: sound alone; sound NULL: silent.
 * Returns the file. */
int write_file(MediaFormat format, uint32_t width, uint32_t height, const uint8_t *frames, uint64_t n_frames,
        const float *sound, uint64_t samples);

/* Runs ffmpeg or ffprobe with these arguments; its output (free()), NULL where it is not installed: then the
 * test is skipped. */
bool ffmpeg(const char *format, ...) __attribute__((format(printf, 1, 2)));
char *ffprobe(const char *path, const char *arguments);
/* A folder for this test program's files; removed at the end. */
const char *temporary_folder(void);
/* fd as a path, for programs. */
const char *path_of(int fd);
