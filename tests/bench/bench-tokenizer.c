/* SPDX-License-Identifier: Apache-2.0 */
/* Prints how much CPU time it takes to open a tokenizer and to encode texts.
 *
 *     bench-tokenizer FOLDER [TEXT_FILE ...]
 *
 * FOLDER has vocab.json and merges.txt, or tokenizer.json. Made texts: a megabyte of words, of Chinese, of
 * mixed marks, of spaces and of one letter. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "service/h3/tokenizer.h"
#include "service/shared/cleanup.h"

#define TEXT_SIZE 1000000u

/* Of this process, so that others on the machine do not count. */
static uint64_t cpu_usec(void) {
        struct timespec t = {};

        (void) clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (uint64_t) t.tv_sec * 1000000 + (uint64_t) t.tv_nsec / 1000;
}

static char *read_file(const char *path, size_t *ret_n) {
        FILE *f = fopen(path, "rbe");
        char *text;
        long n;

        if (!f)
                return NULL;
        (void) fseek(f, 0, SEEK_END);
        n = ftell(f);
        rewind(f);
        text = n >= 0 ? malloc((size_t) n + 1) : NULL;
        if (text && fread(text, 1, (size_t) n, f) != (size_t) n) {
                free(text);
                text = NULL;
        }
        (void) fclose(f);
        *ret_n = (size_t) n;
        return text;
}

static void encode(const H3Tokenizer *t, const char *what, const char *text, size_t n) {
        uint64_t best = UINT64_MAX;
        size_t n_ids = 0;
        Fault f = {};

        for (int i = 0; i < 5; i++) {
                CLEANUP_FREE int32_t *ids = NULL;
                uint64_t begin = cpu_usec(), took;

                if (h3_tokenizer_encode(t, text, n, &ids, &n_ids, &f) < 0) {
                        (void) fprintf(stderr, "%s: %s\n", what, f.text);
                        return;
                }
                took = cpu_usec() - begin;
                best = took < best ? took : best;
        }
        (void) printf("%-16s %8zu bytes %8zu ids %8.1f ms\n", what, n, n_ids, (double) best / 1e3);
}

/* A megabyte of parts chosen by a small generator. */
static void encode_parts(
        const H3Tokenizer *t, const char *what, const char *const *parts, uint32_t n_parts) {
        CLEANUP_FREE char *text = malloc(TEXT_SIZE + 64);
        uint32_t seed = 1;
        size_t n = 0;

        if (!text)
                return;
        while (n < TEXT_SIZE) {
                size_t len;

                seed = seed * 1664525u + 1013904223u;
                len = strlen(parts[(seed >> 8) % n_parts]);
                memcpy(text + n, parts[(seed >> 8) % n_parts], len);
                n += len;
        }
        encode(t, what, text, n);
}

static void encode_made(const H3Tokenizer *t) {
        static const char *const words[] = {" the", " camera", " moves", " slowly,", " over", "\n", " a",
                " 1080p", " lake.", " Cinematic", " light", "'s", " (wide", " shot)", " unbelievably",
                " xqzvkjw"};
        static const char *const chinese[] = {"镜头", "环绕", "她", "缓缓", "旋转", "，", "远处", "传来",
                "钟声", "。", "雪山", "之巅", "4K", "\n", "写实", "电影感"};
        static const char *const marks[] = {"e\xcc\x81", "\xcc\x81", "\xcc\xa3", "a", " ", "\xcc\xb4"};
        static const char *const space[] = {" "}, *const wide[] = {"\xe3\x80\x80"}, *const letter[] = {"a"},
                                 *const mark[] = {"\xcc\x81\xcc\xa3"},
                                 *const added[] = {"<|im", "<|", "<|im_start|>"};

        encode_parts(t, "words", words, ELEMENTSOF(words));
        encode_parts(t, "Chinese", chinese, ELEMENTSOF(chinese));
        encode_parts(t, "marks", marks, ELEMENTSOF(marks));
        encode_parts(t, "one run of marks", mark, ELEMENTSOF(mark));
        encode_parts(t, "spaces", space, ELEMENTSOF(space));
        encode_parts(t, "wide spaces", wide, ELEMENTSOF(wide));
        encode_parts(t, "added tokens", added, ELEMENTSOF(added));
        encode_parts(t, "one letter", letter, ELEMENTSOF(letter));
}

int main(int argc, char *argv[]) {
        static const char *const names[] = {
                "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"};
        H3Tokenizer *t = NULL;
        H3File files[ELEMENTSOF(names)];
        uint64_t begin;
        size_t n = 0;
        Fault f = {};

        if (argc < 2) {
                (void) fprintf(stderr, "bench-tokenizer FOLDER [TEXT_FILE ...]\n");
                return EXIT_FAILURE;
        }
        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                char path[4096];
                size_t size = 0;

                (void) snprintf(path, sizeof(path), "%s/%s", argv[1], names[i]);
                files[n] = (H3File){.name = names[i], .bytes = read_file(path, &size)};
                files[n].size = size;
                n += files[n].bytes != NULL;
        }
        begin = cpu_usec();
        if (h3_tokenizer_open(files, n, &t, &f) < 0) {
                (void) fprintf(stderr, "%s\n", f.text);
                return EXIT_FAILURE;
        }
        (void) printf("opened in %.1f ms\n", (double) (cpu_usec() - begin) / 1e3);
        encode_made(t);
        for (int i = 2; i < argc; i++) {
                size_t size = 0;
                char *text = read_file(argv[i], &size);

                if (text)
                        encode(t, argv[i], text, size);
                free(text);
        }
        (void) h3_tokenizer_free(t);
        for (size_t i = 0; i < n; i++)
                free((void *) (uintptr_t) files[i].bytes);
        return EXIT_SUCCESS;
}
