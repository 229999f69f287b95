/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The tokenizer of the conditioner: byte-level BPE of the Qwen2 family (h3.md 3.2). Text is cut at the added
 * tokens, on the raw bytes; what lies between them is brought to NFC, cut into words by one fixed pattern
 * and merged, pair by pair, in the order of the merge list.
 *
 * Nothing is added to a text: no begin or end token, no template. Tokenizers do not change after they are
 * opened: any number of threads may use one. */

#include <stddef.h>
#include <stdint.h>

#include "service/h3/model.h"
#include "service/shared/fault.h"

typedef struct H3Tokenizer H3Tokenizer;

/* No id is this high: ids index tables. */
#define H3_TOKEN_IDS_MAX (UINT32_C(1) << 20)
/* Bytes of a text that can be encoded. */
#define H3_TOKENIZER_TEXT_MAX (UINT64_C(1) << 22)

/* Opens a tokenizer from its files; a name's last part decides what a file is, others are ignored:
 *  - tokenizer.json, which has it all, or vocab.json and merges.txt. If both are there, tokenizer.json
 * counts and the others must say the same.
 *  - added_tokens.json and tokenizer_config.json for added tokens: added_tokens_decoder has ids;
 *    additional_special_tokens without one get the next free ids, in their order, as transformers does.
 * Nothing of the files is referred to afterwards. -EBADMSG (InvalidFile: a file breaks its format), -EINVAL
 * (InvalidModel: a file is missing, or files disagree), -EOPNOTSUPP (NotSupported: another kind of
 * tokenizer, normaliser or word pattern), -ENOMEM. */
int h3_tokenizer_open(const H3File *files, size_t n_files, H3Tokenizer **ret, Fault *f);
H3Tokenizer *h3_tokenizer_free(H3Tokenizer *t); /* accepts NULL, returns NULL */

/* The ids of a text of n bytes, which may hold NUL characters. ret_ids is freed by the caller; an empty text
 * has none, and ret_ids is still to be freed. Time: n log n. -EINVAL (InvalidArgument: not UTF-8, with the
 * offset of the byte, or longer than H3_TOKENIZER_TEXT_MAX), -ENOMEM. */
int h3_tokenizer_encode(
        const H3Tokenizer *t, const char *text, size_t n, int32_t **ret_ids, size_t *ret_n, Fault *f);

/* The bytes of one token, not terminated and not always whole characters; an added token's are its content.
 * They live as long as t. NULL: no token has this id. */
const char *h3_tokenizer_token(const H3Tokenizer *t, int32_t id, size_t *ret_n);

/* The bytes of ids one after the other, with a NUL behind them, freed by the caller. Ids of a valid text
 * give its NFC back (added tokens as they stand). Bytes that are no UTF-8 stay as they are. -EINVAL
 * (InvalidArgument: an id without a token, named with its index), -ENOMEM. */
int h3_tokenizer_decode(
        const H3Tokenizer *t, const int32_t *ids, size_t n, char **ret, size_t *ret_n, Fault *f);

/* The id of an added token by its content ("<|image_pad|>"). -ENOENT: there is none. */
int h3_tokenizer_added(const H3Tokenizer *t, const char *content, int32_t *ret_id);

/* One more than the highest id: the embedding table has at least so many rows. */
uint32_t h3_tokenizer_n_ids(const H3Tokenizer *t);
