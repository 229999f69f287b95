# SPDX-License-Identifier: Apache-2.0
"""Reference numbers for five requests:  make_reference.py ROOT OUT

float32, CPU, public classes; the text embeddings are rounded to bfloat16, as the service takes them."""
import sys

import torch
from safetensors.torch import save_file

import data
import generate

root, out = sys.argv[1:3]
p = generate.Pipeline(root)
one = lambda **k: {n: torch.tensor([v]) for n, v in k.items()} | {"jitter": torch.zeros(1, 4)}
FRAMES = [0, 10, 21]
drawn = lambda spec, H, W, index: (data.render(spec, 22, H, W, torch.tensor([index]))[0, :, 0] * 255).round() / 255
square = one(shape=1, colour=2, size=1, motion=0, bg=1, sound=0)
ring = one(shape=4, colour=0, size=1, motion=9, bg=0, sound=0)
FIRST, LAST, PICTURE = drawn(square, 96, 160, 0), drawn(square, 96, 160, 21), drawn(ring, 128, 128, 0)
REQUESTS = [
    ("A large red circle moves from left to right over a dark blue background, with a rising tone.", 160, 256, 22, 1, []),
    ("A small yellow star moves up on a black background with a chord.", 96, 160, 39, 2, []),
    ("The square moves from left to right, with a low tone.", 96, 160, 22, 3, [("first", FIRST)]),
    ("The yellow square moves right with beeps.", 96, 160, 22, 4, [("first", FIRST), ("last", LAST)]),
    ("The ring gets bigger over a blue sky, with a falling tone.", 96, 160, 22, 5, [((8, 8), PICTURE)])]
for i, (prompt, H, W, F, seed, given) in enumerate(REQUESTS):
    kf = [(k, p.encode_frame(x)) for k, x in given]
    ids, tags, emb = p.encode_text(prompt, [x for _, x in given])
    emb = emb.bfloat16()  # as the service takes it
    t = {"token_ids": torch.tensor(ids, dtype=torch.int32), "token_tags": torch.tensor(tags, dtype=torch.int32), "text_embeds": emb[0],
         "canvas": torch.tensor([H, W, F, seed], dtype=torch.int32)}
    gen = torch.Generator().manual_seed(seed)
    for j, ((_, x), (_, rows)) in enumerate(zip(given, kf)):
        suffix = "" if j == 0 else f"_{j + 1}"
        t["keyframe_pixels_u8" + suffix] = (x * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
        t["keyframe_rows_clean" + suffix] = rows
        t["keyframe_rows_fed" + suffix] = 0.999 * rows + 0.001 * torch.randn(rows.shape, generator=gen)
    for steps in (8, 20):
        (nv, na), (xv, xa) = p.denoise(emb.float(), tags, H, W, F, steps, seed, kf)
        t |= {"noise_video_rows": nv, "noise_audio_rows": na, f"video_rows_{steps}": xv, f"audio_rows_{steps}": xa}
    if i == 2:
        video, wave = p.decode(t["video_rows_8"], t["audio_rows_8"], H, W, F)
        t |= {"frames_8_u8": (video[:, FRAMES] * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous(), "wave_8": wave[:, :3200]}
    save_file({k: v.detach().clone().contiguous() for k, v in t.items()}, f"{out}/ref_{i + 1}.safetensors", metadata={"prompt": prompt})
    print(i + 1, prompt, len(ids), xv.std().item(), xa.std().item())
