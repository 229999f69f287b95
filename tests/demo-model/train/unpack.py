# SPDX-License-Identifier: Apache-2.0
"""Writes the files that training goes on from, of the checkpoint folder ROOT:  unpack.py ROOT OUT

video_vae, audio_vae (float32), weights_0, weights_1 (transformer and text encoder, bfloat16) and latent_stats.json."""
import json
import os
import sys

import torch
from safetensors.torch import load_file, save_file

import convrot

root, out = sys.argv[1:3]
os.makedirs(out, exist_ok=True)
stats = {}
for sub, name in (("vae", "video"), ("audio_vae", "audio")):
    s = load_file(f"{root}/{sub}/diffusion_pytorch_model.safetensors")
    save_file({k: v.float() for k, v in s.items()}, f"{out}/{name}_vae.safetensors")
    config = json.load(open(f"{root}/{sub}/config.json"))
    stats |= {f"{name}_mean": config["latents_mean"], f"{name}_std": config["latents_std"]}
json.dump(stats, open(f"{out}/latent_stats.json", "w"))
dit = convrot.expand(load_file(f"{root}/transformer/diffusion_pytorch_model.safetensors"))
w = {"dit." + k: v for k, v in dit.items()} | {"text." + k: v for k, v in load_file(f"{root}/text_encoder/model.safetensors").items()}
names = sorted(w)
for i in range(2):
    save_file({k: w[k].to(torch.bfloat16).contiguous() for k in names[i::2]}, f"{out}/weights_{i}.safetensors")
