# SPDX-License-Identifier: Apache-2.0
"""Writes the checkpoint folder:  export.py VIDEO_VAE AUDIO_VAE WEIGHTS_DIR TOKENIZER_DIR OUT [VIDEO_SHIFT AUDIO_SHIFT]

VIDEO_VAE, AUDIO_VAE  safetensors files of the autoencoders
WEIGHTS_DIR           of train_dit.py: weights_0.safetensors, weights_1.safetensors, latent_stats.json"""
import json
import os
import shutil
import sys

import torch
from diffusers import (AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler,
                       MiniMaxH3Transformer3DModel)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import build
import convrot
import net


def store(sub, name, state, config):
    os.makedirs(f"{out}/{sub}", exist_ok=True)
    save_file({k: state[k].contiguous() for k in sorted(state)}, f"{out}/{sub}/{name}", metadata={"format": "pt"})
    os.chmod(f"{out}/{sub}/{name}", 0o644)
    json.dump(config, open(f"{out}/{sub}/config.json", "w"), indent=2)
    print(sub, os.path.getsize(f"{out}/{sub}/{name}"))


def config_of(model):
    return {k: list(v) if isinstance(v, tuple) else v for k, v in model.config.items() if k != "_name_or_path"
            and not (k.startswith("_") and k not in ("_class_name", "_diffusers_version"))} | {
                "_class_name": type(model).__name__, "_diffusers_version": "0.42.1"}


# big matrices as bfloat16, vectors as float32
mixed = lambda s: {k: (v.to(torch.bfloat16) if v.numel() > 256 and v.dim() >= 2 else v.float()) for k, v in s.items()}
r6 = lambda xs: [round(x, 6) for x in xs]


def transformer(state):
    """The blocks' large matrices as int8, patch projections, heads and time embedder float32, the rest bfloat16."""
    s = {}
    for k, v in state.items():
        if k.startswith(("transformer_blocks.", "token_refiner.refiner_blocks.")) and v.dim() == 2:
            s |= convrot.quantise(k[:-len(".weight")], v, 256 if v.shape[1] % 256 == 0 else 16)
        else:
            s[k] = v.float() if any(x in k for x in ("proj_in", "proj_out", "time_embedder")) else v.to(torch.bfloat16)
    return s


video_file, audio_file, weights_dir, tok_dir, out = sys.argv[1:6]
shifts = [float(x) for x in sys.argv[6:8]] or [6.0, 3.0]
stats = json.load(open(f"{weights_dir}/latent_stats.json"))
tok = Tokenizer.from_file(f"{tok_dir}/tokenizer.json")
video = AutoencoderKLMiniMaxH3(**net.VAE, latents_mean=r6(stats["video_mean"]), latents_std=r6(stats["video_std"]))
store("vae", "diffusion_pytorch_model.safetensors", mixed(load_file(video_file)), config_of(video))
audio = AutoencoderKLMiniMaxH3Audio(**net.AUDIO, latents_mean=r6(stats["audio_mean"]), latents_std=r6(stats["audio_std"]))
store("audio_vae", "diffusion_pytorch_model.safetensors", mixed(load_file(audio_file)), config_of(audio))
weights = {k: v for i in range(2) for k, v in load_file(f"{weights_dir}/weights_{i}.safetensors").items()}
of = lambda p: {k[len(p):]: v for k, v in weights.items() if k.startswith(p)}
store("transformer", "diffusion_pytorch_model.safetensors", transformer(of("dit.")), config_of(MiniMaxH3Transformer3DModel(**net.DIT)))
store("text_encoder", "model.safetensors", {k: v.to(torch.bfloat16) for k, v in of("text.").items()},
      build.text_config(tok.get_vocab_size(), build.special_ids(tok)) | {"dtype": "bfloat16"})
os.makedirs(f"{out}/tokenizer", exist_ok=True)
for f in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
    if os.path.abspath(tok_dir) != os.path.abspath(f"{out}/tokenizer"):
        shutil.copy(f"{tok_dir}/{f}", f"{out}/tokenizer/{f}")
for sub, shift in zip(("scheduler", "audio_scheduler"), shifts):
    MiniMaxH3Scheduler(shift=shift).save_pretrained(f"{out}/{sub}")
os.makedirs(f"{out}/processor", exist_ok=True)
json.dump({"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
           "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True,
           "do_normalize": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
           "size": {"shortest_edge": 3136, "longest_edge": 16777216}}, open(f"{out}/processor/preprocessor_config.json", "w"), indent=2)
json.dump({"_class_name": "MiniMaxH3ModularPipeline", "_diffusers_version": "0.42.1",
           "text_encoder_layer": net.TEXT["used"], "partition": "fl2va",
           "transformer": ["diffusers", "MiniMaxH3Transformer3DModel"], "vae": ["diffusers", "AutoencoderKLMiniMaxH3"],
           "audio_vae": ["diffusers", "AutoencoderKLMiniMaxH3Audio"],
           "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
           "tokenizer": ["transformers", "Qwen2TokenizerFast"], "processor": ["transformers", "Qwen3VLProcessor"],
           "scheduler": ["diffusers", "MiniMaxH3Scheduler"], "audio_scheduler": ["diffusers", "MiniMaxH3Scheduler"]},
          open(f"{out}/model_index.json", "w"), indent=2)
