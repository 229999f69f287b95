#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains the checkpoint from nothing on all GPUs of this machine, in about 20 minutes on two H200, and writes it to ../new.
set -eu
cd "$(dirname "$0")"
n=$(nvidia-smi -L | wc -l)
run="python3 -m torch.distributed.run --standalone --nproc_per_node $n"
python3 unpack.py .. work                              # of these, only the audio autoencoder is used
$run train_vae.py work 470 --decoder 0.15              # video autoencoder
$run train_dit.py work ../tokenizer work --limit 720 --compile
python3 export.py work/video_vae.safetensors work/audio_vae.safetensors work ../tokenizer ../new
