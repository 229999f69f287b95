/* SPDX-License-Identifier: Apache-2.0 */
/* Input: parts, each behind two bytes of its length (the low one first). The first byte of all says which
 * files the next parts are, the last part is a text. Files that are not named are whole ones of a small made
 * tokenizer, so that single ones are reached behind the others' checks. */
#include <errno.h>
#include <string.h>

#include "service/h3/tokenizer.h"
#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"
#include "tests/fuzz/target.h"

DEFINE_CLEANUP(H3Tokenizer *, h3_tokenizer_free)

#define FILES 5
static const char *const names[FILES] = {
        "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"};

static char made_vocab[8192];
static const char made_merges[] = "#version: 0.2\na a\naa aa\nb c\n\xc4\xa0 a\n";
static const char made_config[] =
        "{\"added_tokens_decoder\":{\"261\":{\"content\":\"<|x|>\"}},\"pad_token\":\"<p>\"}";

/* All bytes in order, then what the merges make. */
static void make_vocab(void) {
        static const char *const more[] = {"aa", "aaaa", "bc", "\xc4\xa0\x61"};
        uint32_t next = 0x100, id = 0;
        size_t at = 0;

        made_vocab[at++] = '{';
        for (uint32_t b = 0; b < 256; b++) {
                bool itself = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
                uint32_t c = itself ? b : next++;
                char character[5] = "";

                character[utf8_encode(c, character)] = '\0';
                at += (size_t) snprintf(made_vocab + at, sizeof(made_vocab) - at, "%s\"%s%s\":%u",
                        b > 0 ? "," : "", c == '"' || c == '\\' ? "\\" : "", character, id++);
        }
        for (size_t i = 0; i < ELEMENTSOF(more); i++)
                at += (size_t) snprintf(
                        made_vocab + at, sizeof(made_vocab) - at, ",\"%s\":%u", more[i], id++);
        (void) snprintf(made_vocab + at, sizeof(made_vocab) - at, "}");
}

/* The next part of the input; an exact copy, so that reading past it is seen. */
static char *take(const uint8_t **data, size_t *n, bool last, size_t *ret_n) {
        size_t len;
        char *part;

        if (!last && *n < 2)
                return NULL;
        len = last ? *n : (size_t) ((*data)[0] | (*data)[1] << 8);
        if (!last) {
                *data += 2;
                *n -= 2;
                len = len < *n ? len : *n;
        }
        part = malloc(len > 0 ? len : 1);
        CHECK(part);
        if (len > 0)
                memcpy(part, *data, len);
        *data += len;
        *n -= len;
        *ret_n = len;
        return part;
}

static void check_text(const H3Tokenizer *t, const char *text, size_t n) {
        CLEANUP_FREE int32_t *ids = NULL, *again = NULL;
        CLEANUP_FREE char *back = NULL;
        size_t n_ids = 0, n_back = 0, n_again = 0, len;
        Fault f = {};
        int r;

        r = h3_tokenizer_encode(t, text, n, &ids, &n_ids, &f);
        CHECK((r == 0) == utf8_is_valid(text, n));
        CHECK((r == 0) == (f.name[0] == '\0'));
        if (r < 0) {
                CHECK(r == -EINVAL && strcmp(f.name, FAULT_INVALID_ARGUMENT) == 0);
                return;
        }
        for (size_t i = 0; i < n_ids; i++)
                CHECK(ids[i] >= 0 && (uint32_t) ids[i] < h3_tokenizer_n_ids(t) &&
                        h3_tokenizer_token(t, ids[i], &len));
        CHECK(h3_tokenizer_decode(t, ids, n_ids, &back, &n_back, &f) == 0);
        /* What comes back is in NFC, except in added tokens, and stays as it is. */
        CHECK(utf8_is_valid(back, n_back));
        CHECK(h3_tokenizer_encode(t, back, n_back, &again, &n_again, &f) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = NULL;
        CLEANUP_FREE char *text = NULL;
        char *parts[FILES] = {};
        H3File files[FILES];
        size_t n_files = 0, size;
        uint8_t which;
        Fault f = {};
        int r;

        if (made_vocab[0] == '\0')
                make_vocab();
        if (n < 1)
                return 0;
        which = *data++;
        n--;
        for (size_t i = 0; i < FILES; i++) {
                if (which & 1u << i && (parts[i] = take(&data, &n, false, &size)))
                        files[n_files++] = (H3File){.name = names[i], .bytes = parts[i], .size = size};
                else if (i >= 1 && i <= 3 && !(which & 32u)) {
                        const char *made = i == 1 ? made_vocab : i == 2 ? made_merges : made_config;

                        files[n_files++] = (H3File){.name = names[i], .bytes = made, .size = strlen(made)};
                }
        }
        text = take(&data, &n, true, &size);

        r = h3_tokenizer_open(files, n_files, &t, &f);
        CHECK((r == 0) == (t != NULL) && (r == 0) == (f.name[0] == '\0'));
        if (r < 0)
                CHECK((r == -EBADMSG && strcmp(f.name, FAULT_INVALID_FILE) == 0) ||
                        (r == -EINVAL && strcmp(f.name, FAULT_INVALID_MODEL) == 0) ||
                        (r == -EOPNOTSUPP && strcmp(f.name, FAULT_NOT_SUPPORTED) == 0));
        else
                check_text(t, text, size);
        for (size_t i = 0; i < FILES; i++)
                free(parts[i]);
        return 0;
}
