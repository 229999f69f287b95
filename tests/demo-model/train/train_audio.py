# SPDX-License-Identifier: Apache-2.0
"""Makes the audio autoencoder:  train_audio.py OUTDIR SECONDS [--smoke]

Training from a random start falls into silence, so it starts as a linear filter bank that already works:
1. a lapped cosine transform (50 ms windows, 32 coefficients per 25 ms) is fitted to the sounds as one long convolution and
   one long transposed convolution;
2. both are written exactly into the strided convolutions of the network (samples move into channels, 160 samples are
   64 cosines, 10 blocks are 32 coefficients, and back again); residual branches start small;
3. everything is trained together: waveform and spectra, a little noise on the latents, no KL term.
Two CPU cores are enough (about ten minutes).  Writes audio_vae.safetensors (the average of the weights).
"""
import copy
import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3Audio
from safetensors.torch import save_file

import data
import net

HOP, Q, BLOCK, BASIS = data.HOP, 32, 160, 64


def linear_encode(x, e):
    return F.conv1d(F.pad(x, (480, 320)), e, stride=HOP)


def linear_decode(z, d):
    return F.conv_transpose1d(z, d, stride=HOP)[..., HOP:-HOP]


def lapped_transform():
    """Analysis [32, 1, 1600] (sample -480 .. 1119 of a latent) and synthesis [32, 1, 2400] (sample -800 .. 1599)."""
    n, k = torch.arange(1600, dtype=torch.float64), torch.arange(Q, dtype=torch.float64)[:, None]
    w = torch.sin(math.pi * (n + 0.5) / 1600) * math.sqrt(2 / HOP)
    m = (w * torch.cos(math.pi / HOP * (n + 0.5 + HOP / 2) * (k + 0.5))).float()[:, None]
    return m, F.pad(m, (320, 480))


def fit_linear(batch, steps):
    e, d = (t.clone().requires_grad_() for t in lapped_transform())
    opt = torch.optim.Adam([e, d], lr=2e-4)
    for i in range(steps):
        opt.param_groups[0]["lr"] = 2e-4 * (1 - i / steps) + 1e-6
        x = batch(16)
        z = linear_encode(x, e)
        y = linear_decode(z + 0.05 * torch.randn_like(z), d)
        loss = ((y - x).square().mean((1, 2)) / (x.square().mean((1, 2)) + 1e-3)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return e.detach(), d.detach()


def set_normed(conv, w, rest=0.0):
    """Weight-normed weights; rows without any use get a small random direction and the length `rest`."""
    norm = w.flatten(1).norm(dim=1).view(-1, 1, 1)
    with torch.no_grad():
        conv.weight_v.copy_(torch.where(norm > 0, w, torch.randn_like(w) * 0.05))
        conv.weight_g.copy_(torch.where(norm > 0, norm, torch.full_like(norm, rest)))


@torch.no_grad()
def write_linear(vae, e, d, small=0.04):
    cos = torch.cos(math.pi / BLOCK * (torch.arange(BLOCK, dtype=torch.float64)[:, None] + 0.5) * torch.arange(BASIS))
    cos = (cos * math.sqrt(2 / BLOCK)).float()
    cos[:, 0] /= math.sqrt(2)
    rot = torch.linalg.qr(torch.randn(Q, Q, generator=torch.Generator().manual_seed(5)))[0]
    for n, m in vae.named_modules():
        if hasattr(m, "weight_g") and m.bias is not None:
            m.bias.zero_()
        if type(m).__name__ == "MiniMaxH3AudioSnake1d":
            m.alpha.fill_(0.02)
    # encoder
    blocks = vae.encoder.block
    w = torch.zeros_like(blocks[0].weight_v)
    w[0, 0, 3] = 1
    set_normed(blocks[0], w, small)
    for blk in blocks[1:6]:
        for unit in blk.block[:3]:
            unit.block[3].weight_g.mul_(small)
    used = 1
    for blk, s in zip(blocks[1:4], (2, 4, 4)):
        w = torch.zeros_like(blk.block[4].weight_v)
        for r in range(s):
            for c in range(used):
                w[r * used + c, c, r + math.ceil(s / 2)] = 1
        set_normed(blk.block[4], w, small)
        used *= s
    w = torch.zeros_like(blocks[4].block[4].weight_v)
    w[:, :, 3:8] = cos.view(5, 32, BASIS).permute(2, 1, 0)
    set_normed(blocks[4].block[4], w)
    w = torch.zeros_like(blocks[5].block[4].weight_v)
    w[:Q] = torch.einsum("qkn,nc->qck", 0.1 * e[:, 0].view(Q, 10, BLOCK), cos)
    set_normed(blocks[5].block[4], w, small)
    w = torch.zeros_like(blocks[7].weight_v)
    w[torch.arange(Q), torch.arange(Q), 1] = 1
    set_normed(blocks[7], w, small)
    blocks[7].bias[Q::2], blocks[7].bias[Q + 1::2] = 1.0, -1.0  # constant channels keep the layer norm nearly linear
    pre, rest = vae.pre_block, vae.pre_block.proj.in_features - Q
    pre.proj.weight.zero_()
    pre.proj.weight[:, :Q] = torch.eye(Q)
    pre.proj.weight[:, Q:] = -1 / rest
    pre.proj.weight.mul_(5 * math.sqrt(rest / (rest + Q)))
    pre.proj.bias.zero_()
    pre.attn.proj.weight.mul_(small), pre.attn.proj.bias.zero_()
    pre.mlp.w2.weight.mul_(small), pre.mlp.w2.bias.zero_()
    vae.mean_proj.weight.copy_(rot[..., None]), vae.mean_proj.bias.zero_()
    vae.logs_proj.weight.mul_(0.05), vae.logs_proj.bias.fill_(-3.0)
    # decoder
    dec = vae.decoder
    vae.dec_in_proj.weight.mul_(small), vae.dec_in_proj.bias.zero_()
    vae.dec_in_proj.weight[:Q, :, 0] = 2 * rot.T
    w = torch.zeros_like(dec.conv_pre.weight_v)
    for j in range(3):  # the latents before, at and after
        w[torch.arange(Q) + j * Q, torch.arange(Q), 2 + j] = 1
    set_normed(dec.conv_pre, w, small)
    w = torch.zeros_like(dec.ups[0][0].weight_v)
    for j in range(3):
        part = d[:, 0, (2 - j) * HOP:(3 - j) * HOP].view(Q, 5, BLOCK)
        w[j * Q:(j + 1) * Q, :, 2:7] = torch.einsum("qrn,nc->qcr", part, cos)
    set_normed(dec.ups[0][0], w, small)
    w = torch.zeros_like(dec.ups[1][0].weight_v)
    rev = torch.tensor([int(f"{c:05b}"[::-1], 2) for c in range(32)])
    w[:, :, 2:7] = cos.view(5, 32, BASIS)[:, rev].permute(2, 1, 0)
    set_normed(dec.ups[1][0], w)
    for up in dec.ups[2:]:
        w = torch.zeros_like(up[0].weight_v)
        for o in range(w.shape[1]):
            w[2 * o, o, 1] = w[2 * o + 1, o, 2] = 1
        set_normed(up[0], w)
    for blk in dec.resblocks:
        for c in blk.convs2:
            c.weight_g.mul_(small)
    dec.activation_post.act.alpha.fill_(-3.0)
    w = torch.zeros_like(dec.conv_post.weight_v)
    w[0, 0, 3] = 1
    set_normed(dec.conv_post, w)


def snr(x, y):
    return 10 * torch.log10((x.square().mean((1, 2)) + 1e-9) / ((x - y).square().mean((1, 2)) + 1e-9))


def fixed_sounds(latents):
    spec = {"sound": torch.arange(8), "motion": torch.full((8,), 9)}
    return data.sound(spec, latents)[:, :1]


@torch.no_grad()
def report(name, f, say):
    for latents in (37, 93):
        x = fixed_sounds(latents)
        y = f(x)
        say(f"{name}, {latents} latents: SNR", " ".join(f"{n} {s:.1f}" for n, s in zip(data.SOUNDS[:7], snr(x, y).tolist())),
            "silence rms %.5f" % y[7].square().mean().sqrt().item())


def spectral(a, b, wins):
    loss = 0
    for n, w in wins.items():
        x, y = (torch.stft(t.squeeze(1), n, n // 4, n, w, return_complex=True).abs() for t in (a, b))
        loss = loss + (x - y).abs().mean() * (16 / math.sqrt(n)) + 0.02 * (torch.log(x + 0.03) - torch.log(y + 0.03)).abs().mean()
    return loss / len(wins)


def main():
    out, budget, smoke = sys.argv[1], float(sys.argv[2]), "--smoke" in sys.argv
    torch.manual_seed(0)
    os.makedirs(out, exist_ok=True)
    t0 = time.time()
    say = lambda *a: print(f"[audio {time.time() - t0:6.1f}s]", *a, flush=True)
    gen = torch.Generator().manual_seed(3)
    pool = []
    for latents in (37, 65, 93, 37) if not smoke else (37,):
        x = data.audio_batch(256 if not smoke else 32, latents, "cpu", gen)[:, 0]
        pool.append(x.unfold(1, 16 * HOP, HOP).flatten(0, 1)[:: 3 if latents == 37 else 7])
    pool = torch.cat(pool)[:, None]
    say("pool", tuple(pool.shape))
    batch = lambda n: pool[torch.randint(len(pool), (n,), generator=gen)]
    e, d = fit_linear(batch, 1500 if not smoke else 20)
    report("linear", lambda x: linear_decode(linear_encode(x, e), d), say)
    vae = AutoencoderKLMiniMaxH3Audio(**net.AUDIO)
    write_linear(vae, e, d, 0.0)
    report("written into the network", lambda x: vae.decode(vae.encode(x).latent_dist.mode()).sample, say)
    vae = AutoencoderKLMiniMaxH3Audio(**net.AUDIO)
    write_linear(vae, e, d)
    report("with small branches", lambda x: vae.decode(vae.encode(x).latent_dist.mode()).sample, say)
    vae.logs_proj.requires_grad_(False)
    ema = copy.deepcopy(vae)
    params = [p for p in vae.parameters() if p.requires_grad]
    averaged = [p for p in ema.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0)
    wins = {n: torch.hann_window(n) for n in (256, 1024, 2048)}
    start, step, last = time.time(), 0, time.time()
    while time.time() - t0 < budget and not (smoke and step >= 3):
        u = (time.time() - start) / (budget - (start - t0))
        opt.param_groups[0]["lr"] = 1e-4 * min(1, (step + 1) / 30) * max(0.01, 0.5 * (1 + math.cos(math.pi * min(1, u))))
        x = batch(4)
        z = vae.encode(x).latent_dist.mean
        y = vae.decoder(vae.dec_in_proj(z + 0.03 * torch.randn_like(z)))
        rel = ((y - x).square().mean((1, 2)) / (x.square().mean((1, 2)) + 1e-3)).mean()
        sp = spectral(y, x, wins)
        opt.zero_grad(set_to_none=True)
        (10 * rel + 10 * (y - x).abs().mean() + sp).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, params, 1 - min(0.98, (step + 1) / (step + 5)))
        step += 1
        if step in (1, 10, 50) or time.time() - last > 45:
            last = time.time()
            say(f"step {step} error {rel.item():.5f} spectra {sp.item():.4f}")
    report("trained", lambda x: ema.decode(ema.encode(x).latent_dist.mode()).sample, say)
    save_file({k: v.detach().float().contiguous() for k, v in ema.state_dict().items()}, f"{out}/audio_vae.safetensors")
    say("steps", step)


if __name__ == "__main__":
    main()
