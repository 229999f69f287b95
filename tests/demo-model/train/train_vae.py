# SPDX-License-Identifier: Apache-2.0
"""Trains the video autoencoder for a fixed time, on one GPU or, under torch.distributed.run, on several.

train_vae.py OUTDIR SECONDS [--init FILE] [--decoder SHARE] [--rate R] [--adam] [--smoke]

First encoder and decoder together, on windows of the clips; in the last SHARE of the time the decoder alone, on latents of
whole clips.  OUTDIR/video_vae.safetensors is the averaged result (float32)."""
import argparse
import math
import os
import random
import time

t0 = time.time()
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLMiniMaxH3
from safetensors.torch import load_file, save_file

import data
import flat
import measure
import net

ap = argparse.ArgumentParser()
ap.add_argument("out"), ap.add_argument("seconds", type=float), ap.add_argument("--init")
ap.add_argument("--decoder", type=float, default=0.25), ap.add_argument("--rate", type=float, default=2e-3)
for name in ("adam", "smoke"):
    ap.add_argument("--" + name, action="store_true")
args = ap.parse_args()
smoke = args.smoke
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
dev = "cpu"
if torch.cuda.is_available():
    dev = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(dev)
kind = dev.split(":")[0]
if world > 1:
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.benchmark_limit = 4
torch.manual_seed(0)
os.makedirs(args.out, exist_ok=True)
say = lambda *a: rank or print(f"[vae {time.time() - t0:6.1f}s]", *a, flush=True)

vae = AutoencoderKLMiniMaxH3(**net.VAE)
with torch.no_grad():
    for n, p in vae.named_parameters():
        if n.endswith(("scale1", "scale2")):
            p.fill_(0.2)
if args.init:
    vae.load_state_dict({k: v.float() for k, v in load_file(args.init).items()})
vae = vae.to(dev)
matrix = lambda n, p: not args.adam and p.dim() >= 2 and ("transformer_blocks" in n or "resnets" in n or "downsamplers" in n)
opt = flat.Flat(vae.named_parameters(), matrix, dev)
torch.manual_seed(1 + rank)
rng = random.Random(7)  # the same on every rank
amp = lambda: torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")
MEAN, STD = (torch.tensor(x, device=dev).view(1, 3, 1, 1, 1) for x in (net.PIXEL_MEAN, net.PIXEL_STD))
pool = data.sample_specs(50 if smoke else 60000, dev, 11)
npool = pool["size"].shape[0]


def decode_loss(z, rope, img, alpha):
    d = net.decode_rows(vae, z, rope)
    d = torch.cat([d[:, :, 3:20], d[:, :, 23:28]], 2).float()
    err = d - (img - MEAN) / STD
    wgt = 1 + 3 * alpha + 24 * alpha * (1 - alpha)
    return (err.abs() * wgt).mean(), (err.square() * wgt).mean()


CANVAS = [(160, 256), (160, 160), (256, 160), (192, 192), (128, 208)]
SHAPES = [(128, 128, 16, 0.7), (160, 256, 6, 0.3)] if not smoke else [(32, 32, 2, 1.0)]


def window(h, w, b):
    """Clips of 22 frames, a window of h x w of a larger canvas that the shape is in."""
    spec = data.take(pool, torch.randint(npool, (b,), device=dev))
    H, W = (160, 256) if (h, w) == (160, 256) else rng.choice(CANVAS)
    frames = rng.choice((22, 22, 39, 56))
    first = 17 * rng.randrange((frames - 5) // 17)
    x, y, r, a = (t[:, first:first + 22] for t in data.trajectory(spec, frames, H, W))
    free = lambda n: torch.rand(b, 1, device=dev) * n
    ox = (x.mean(1, True) - w / 2 + 64 * free(1) - 32).clamp(0, W - w).round()
    oy = (y.mean(1, True) - h / 2 + 64 * free(1) - 32).clamp(0, H - h).round()
    col, bgs = data.palette(spec)
    top, bottom = bgs[:, :1], bgs[:, 1:]
    at = lambda v: top + (bottom - top) * (v / (H - 1))[..., None]
    return data.draw(spec["shape"], col, torch.cat([at(oy), at(oy + h - 1)], 1), x - ox, y - oy, r, a, h, w, True)


def rows(img):
    out = torch.zeros(*img.shape[:1], *img.shape[2:], 8, device=dev, dtype=torch.bfloat16 if kind == "cuda" else torch.float32)
    out[..., :3] = ((img - MEAN) / STD).permute(0, 2, 3, 4, 1)
    return out


ropes = {}


def rope(h, w):
    if (h, w) not in ropes:
        ropes[h, w] = net.decoder_rope(vae, 7, h // 16, w // 16, dev)
    return ropes[h, w]


def joint(h, w, b):
    img, alpha = window(h, w, b)
    with amp():
        mean, logvar = net.encode_rows(vae, rows(img), net.clips(22)).float().chunk(2, -1)
        logvar = logvar.clamp(-30, 20)
        spread = mean.detach().std((0, 1, 2, 3), keepdim=True)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean) + 0.05 * spread * torch.randn_like(mean)
        l1, l2 = decode_loss(z.to(torch.bfloat16 if kind == "cuda" else z.dtype), rope(h, w), img, alpha)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return l1, l2, kl


def step(loss, n, rate, keep):
    opt.backward(loss)
    if world > 1:
        dist.all_reduce(opt.g, dist.ReduceOp.AVG) if kind == "cuda" else (dist.all_reduce(opt.g), opt.g.div_(world))
    opt.lr.fill_(rate)
    opt.keep.fill_(min(keep, (n + 1) / (n + 20)))
    opt.update()


clock = torch.zeros(1, dtype=torch.float64, device=dev)


def elapsed():
    """The time of rank 0, the same on every rank."""
    clock.fill_(time.time() - t0)
    if world > 1:
        dist.broadcast(clock, 0)
    return clock.item()


def averaged():
    with torch.no_grad():
        keep = opt.p.clone()
        opt.p.copy_(opt.ema)
    return keep


@torch.no_grad()
def psnr(n=32, size=(160, 256), judge=False):
    """Held-out clips, with the averaged weights."""
    keep, out, spec, seen = averaged(), [], data.sample_specs(n, dev, 99), []
    img = data.render(spec, 22, *size)
    for x in img.split(8):
        with amp():
            z = net.encode_rows(vae, rows(x), net.clips(22))[..., :24]
            d = net.decode_rows(vae, z, rope(*size))
        d = torch.cat([d[:, :, 3:20], d[:, :, 23:28]], 2).float()
        seen += list(net.denormalise(d))
        out.append(-10 * torch.log10((net.denormalise(d) - x).square().mean((1, 2, 3, 4))))
    opt.p.copy_(keep)
    out = torch.cat(out)
    hit = ""
    if judge:
        hit, _ = measure.score(spec, seen, [torch.zeros(2, 29600, device=dev)] * n)
        hit = " ".join(f"{k} {hit[k]}" for k in ("bg", "colour", "shape", "motion")) + f" of {n}"
    return f"PSNR mean {out.mean().item():.2f} min {out.min().item():.2f} {hit}"


def save():
    if rank == 0:
        keep = averaged()
        save_file({k: v.detach().float().cpu().contiguous() for k, v in vae.state_dict().items()}, f"{args.out}/.vae")
        os.rename(f"{args.out}/.vae", f"{args.out}/video_vae.safetensors")
        opt.p.copy_(keep)


end = args.seconds * (1 - args.decoder)
n, now, mark, begun, last = 0, elapsed(), time.time(), None, 0
for h, w, b, _ in SHAPES:
    step(sum(joint(h, w, b)[:2]), 0, 0.0, 0.0)
begun = elapsed()
say("begin", "parameters", opt.p.numel(), "orthogonal", opt.tail)
for h, w, b, _ in SHAPES:
    if kind == "cuda":
        for _ in range(3):
            step(sum(joint(h, w, b)[:2]), 0, 0.0, 0.0)
        torch.cuda.synchronize()
        a = time.time()
        for _ in range(5):
            step(sum(joint(h, w, b)[:2]), 0, 0.0, 0.0)
        torch.cuda.synchronize()
        say(f"{h}x{w} batch {b}: {(time.time() - a) * 200:.1f} ms a step")
now = begun = elapsed()
while now < end and not (smoke and n >= 6):
    u = (now - begun) / (end - begun)
    rate = args.rate * min(1, (n + 1) / 200) * max(0.03, 0.5 * (1 + math.cos(math.pi * min(u, 1))))
    h, w, b, _ = rng.choices(SHAPES, [s[3] for s in SHAPES])[0]
    l1, l2, kl = joint(h, w, b)
    step(l1 + 0.5 * l2 + 2e-4 * kl, n, rate, 0.998)
    n += 1
    if n % 8 == 0 or smoke:
        now = elapsed()
    if n in (1, 50) or time.time() - mark > 40:
        mark = time.time()
        say(f"step {n} {h}x{w} l1 {l1.item():.4f} l2 {l2.item():.4f} kl {kl.item():.2f} grad {opt.norm.item():.2f}",
            psnr(4 if smoke else 16, (64, 64) if smoke else (160, 256)))
        save()
say("joint steps", n, psnr(4, (64, 64), True) if smoke else psnr(48, judge=True))
save()

if args.decoder > 0:  # the decoder alone on fixed latents
    with torch.no_grad():
        opt.p.copy_(opt.ema)
    made = []
    sizes = [(160, 256, 1536), (160, 160, 1024), (256, 160, 512), (192, 192, 512), (96, 160, 1024)] if not smoke else [(64, 64, 4)]
    for i, (H, W, m) in enumerate(sizes):
        spec, z = data.sample_specs(m, dev, 1000 + 10 * i + rank), []
        frames = torch.tensor([22, 39, 56], device=dev)
        for idx in torch.arange(m, device=dev).split(16):
            fr = (22, 39, 56)[(idx[0].item() // 16) % 3]
            with torch.no_grad(), amp():
                x = data.render(data.take(spec, idx), fr, H, W, torch.arange(22, device=dev) + (0 if fr == 22 else 17))
                z.append(net.encode_rows(vae, rows(x), net.clips(22))[..., :24].half())
        made.append((H, W, spec, torch.cat(z)))
    say("latents for the decoder")
    for p in [*vae.encoder.parameters(), *vae.quant_conv.parameters()]:
        p.requires_grad_(False)
    free = flat.Flat(vae.named_parameters(), matrix, dev)
    opt, joined = free, opt
    spreads = [z.float().std((0, 1, 2, 3)) for *_, z in made]
    n, start = 0, elapsed()
    now = start
    while now < args.seconds and not (smoke and n >= 4):
        u = (now - start) / (args.seconds - start)
        i = rng.randrange(len(made))
        H, W, spec, z = made[i]
        b = 4 if smoke else 16
        g = rng.randrange(z.shape[0] // b) if not smoke else 0
        fr = (22, 39, 56)[g % 3]
        idx = torch.arange(g * b, g * b + b, device=dev)
        x, y, r, a = (t[:, (0 if fr == 22 else 17):][:, :22] for t in data.trajectory(data.take(spec, idx), fr, H, W))
        img, alpha = data.draw(spec["shape"][idx], *data.palette(data.take(spec, idx)), x, y, r, a, H, W, True)
        with amp():
            zz = z[idx].float()
            zz = zz + 0.05 * spreads[i] * torch.randn_like(zz)
            l1, l2 = decode_loss(zz.to(torch.bfloat16 if kind == "cuda" else zz.dtype), rope(H, W), img, alpha)
        step(l1 + 0.5 * l2, n, 1e-3 * min(1, (n + 1) / 100) * max(0.01, 0.5 * (1 + math.cos(math.pi * min(1, u)))), 0.998)
        n += 1
        if n % 8 == 0 or smoke:
            now = elapsed()
        if n in (1, 50) or time.time() - mark > 20:
            mark = time.time()
            say(f"decoder step {n} l1 {l1.item():.4f} l2 {l2.item():.4f}")
    say("decoder steps", n, psnr(4, (64, 64)) if smoke else psnr(48, judge=True))
    save()
for H, W in () if smoke else ((160, 160), (256, 160), (96, 160)):
    say(H, W, psnr(16, (H, W)))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
