# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, configs and the checkpoint folder."""
import json
import os
import random

import torch
from safetensors.torch import save_file

import data
import net

GENERAL = """
The quick brown fox jumps over the lazy dog while the sun sets behind the hills. A child plays with a ball in the
garden, and the rain falls softly on the roof. People walk along the street, cars pass by, and music comes from an open
window. In the morning the light is soft and warm; in the evening the sky turns orange, pink and purple. Please make a
short video with sound. The camera is still. The scene shows water, fire, wind, trees, mountains, a river and the sea.
A man and a woman talk about the weather. First one thing happens, then another, and at the end everything is quiet.
What is this? Where are we going? There are many ways to say the same thing: quickly, slowly, again and again, before
and after, above and below, inside and outside, near and far. It was made by hand from small parts, and it works well.
<Picture 1>: <Picture 2>: <Video 1>: <Audio 1>: <0.2 seconds><1.2 seconds><2.2 seconds>
"""


def train_tokenizer(out, size=900):
    """Byte-level BPE with the Qwen2 pre-tokenizer, written as vocab.json, merges.txt and tokenizer.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    rng, lines = random.Random(1), [GENERAL] * 40
    spec = {k: v.tolist() for k, v in data.sample_specs(4000, "cpu", 5).items() if k != "jitter"}
    for i in range(4000):
        lines.append(data.prompt({k: v[i] for k, v in spec.items()}, rng, keyframe=i % 4 == 0))
    tok.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in net.SPECIAL])
    os.makedirs(out, exist_ok=True)
    tok.save(os.path.join(out, "tokenizer.json"))
    tok.model.save(out)
    first = tok.token_to_id(net.SPECIAL[0])
    cfg = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "add_bos_token": False, "bos_token": None,
           "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
           "clean_up_tokenization_spaces": False, "model_max_length": 32768, "split_special_tokens": False,
           "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
           "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
           "added_tokens_decoder": {str(first + i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                                                     "single_word": False, "special": True}
                                    for i, t in enumerate(net.SPECIAL)}}
    json.dump(cfg, open(os.path.join(out, "tokenizer_config.json"), "w"), indent=1)
    return tok


def special_ids(tok):
    return dict(image=tok.token_to_id("<|image_pad|>"), video=tok.token_to_id("<|video_pad|>"),
                start=tok.token_to_id("<|vision_start|>"), end=tok.token_to_id("<|vision_end|>"),
                pad=tok.token_to_id("<|endoftext|>"))


def text_config(vocab, ids):
    c, v = net.TEXT, net.VISION
    return dict(
        architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", image_token_id=ids["image"],
        video_token_id=ids["video"], vision_start_token_id=ids["start"], vision_end_token_id=ids["end"],
        tie_word_embeddings=True,
        text_config=dict(model_type="qwen3_vl_text", vocab_size=vocab, hidden_size=c["hidden"],
                         intermediate_size=c["inter"], num_hidden_layers=c["layers"], num_attention_heads=c["heads"],
                         num_key_value_heads=c["kv_heads"], head_dim=c["head_dim"], hidden_act="silu",
                         max_position_embeddings=32768, rms_norm_eps=c["eps"], attention_bias=False,
                         attention_dropout=0.0, rope_theta=c["theta"], tie_word_embeddings=True,
                         rope_scaling=dict(rope_type="default", mrope_section=[24, 20, 20], mrope_interleaved=True)),
        vision_config=dict(model_type="qwen3_vl", depth=v["depth"], hidden_size=v["hidden"], hidden_act="gelu_pytorch_tanh",
                           intermediate_size=v["inter"], num_heads=v["heads"], in_channels=3, patch_size=16,
                           spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=c["hidden"],
                           num_position_embeddings=v["table"] ** 2, deepstack_visual_indexes=list(v["deepstack"])))


def hf_text_encoder(vocab, state, ids):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    cfg = Qwen3VLConfig(**{k: v for k, v in text_config(vocab, ids).items() if k not in ("architectures", "model_type")})
    m = Qwen3VLForConditionalGeneration(cfg).eval()
    missing, unexpected = m.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return m
