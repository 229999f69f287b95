# SPDX-License-Identifier: Apache-2.0
"""Procedural clips: one coloured shape, one motion, one background, one sound, and the prompts that describe them.

Everything is drawn with torch on any device.  A clip is described by a dict of per-sample tensors (see `sample_specs`).
"""
import math
import random

import torch

from words import *  # noqa: F403: the names that this file has always had


def sample_specs(n, device, seed):
    """Random clip descriptions; all fields are tensors of length n on `device`."""
    spec = {k: torch.tensor(v, device=device) for k, v in sample_rows(n, seed).items()}
    g = torch.Generator().manual_seed(seed)
    spec["jitter"] = (torch.rand(n, 4, generator=g) * 2 - 1).to(device)  # x, y, radius, angle
    return spec


def take(spec, index):
    return {k: v[index] for k, v in spec.items()}


def trajectory(spec, frames, height, width):
    """x, y, radius (pixels) and angle, each [n, frames]."""
    m, j = spec["motion"], spec["jitter"]
    n, dev = m.shape[0], m.device
    u = torch.linspace(0, 1, frames, device=dev)[None].expand(n, -1)
    short = min(height, width)
    r0 = torch.tensor(RADII, device=dev)[spec["size"]] * short * (1 + 0.06 * j[:, 2])
    x = (0.5 + 0.12 * j[:, :1]).expand(n, frames).clone()
    y = (0.5 + 0.10 * j[:, 1:2]).expand(n, frames).clone()
    r = r0[:, None].expand(n, frames).clone()
    a = (0.15 * j[:, 3:4]).expand(n, frames).clone()

    def put(dst, name, val):
        dst.copy_(torch.where((m == MOTIONS.index(name))[:, None], val, dst))

    put(x, "right", 0.18 + 0.64 * u + 0.03 * j[:, :1])
    put(x, "left", 0.82 - 0.64 * u + 0.03 * j[:, :1])
    put(y, "up", 0.80 - 0.60 * u + 0.03 * j[:, 1:2])
    put(y, "down", 0.20 + 0.60 * u + 0.03 * j[:, 1:2])
    put(y, "bounce", 0.74 - 0.46 * (torch.sin(2 * math.pi * u)).abs() + 0.02 * j[:, 1:2])
    put(x, "circle", 0.5 + 0.26 * short / width * torch.sin(2 * math.pi * u))
    put(y, "circle", 0.5 - 0.26 * short / height * torch.cos(2 * math.pi * u))
    put(r, "grow", r0[:, None] * (0.6 + 0.9 * u))
    put(r, "shrink", r0[:, None] * (1.5 - 0.9 * u))
    put(a, "spin", 0.15 * j[:, 3:4] + 2 * math.pi * 0.75 * u)
    return x * width, y * height, r, a


def palette(spec):
    """Colour [n, 3] and background [n, 2, 3] (top, bottom) in [0, 1]."""
    dev = spec["motion"].device
    return (torch.tensor(list(COLOURS.values()), device=dev, dtype=torch.float32)[spec["colour"]] / 255,
            torch.tensor(list(BACKGROUNDS.values()), device=dev, dtype=torch.float32)[spec["bg"]] / 255)


def render(spec, frames, height, width, index=None, with_alpha=False):
    """[n, 3, frames, height, width] in [0, 1]; `index` picks some of the frames."""
    x, y, r, a = trajectory(spec, frames, height, width)
    if index is not None:
        x, y, r, a = x[:, index], y[:, index], r[:, index], a[:, index]
    return draw(spec["shape"], *palette(spec), x, y, r, a, height, width, with_alpha)


def draw(shape, col, bgs, x, y, r, a, height, width, with_alpha=False):
    """The same from positions, radii and angles [n, frames]; needs nothing from the host."""
    dev = x.device
    e = lambda t: t[:, :, None, None]
    px = torch.arange(width, device=dev)[None, None, None, :] + 0.5
    py = torch.arange(height, device=dev)[None, None, :, None] + 0.5
    dx, dy = (px - e(x)) / e(r), (py - e(y)) / e(r)
    c, s = torch.cos(a), torch.sin(a)
    qx, qy = e(c) * dx + e(s) * dy, -e(s) * dx + e(c) * dy
    rho = (qx * qx + qy * qy).sqrt()
    shape = shape[:, None, None, None]
    d = rho - 1.0
    d = torch.where(shape == 1, torch.maximum(qx.abs(), qy.abs()) - 0.86, d)
    k = math.sqrt(3) / 2
    d = torch.where(shape == 2, torch.maximum(torch.maximum(k * qx - 0.5 * qy, -k * qx - 0.5 * qy), qy) - 0.58, d)
    sec = math.pi / 5
    th = (torch.remainder(torch.atan2(qx, -qy) + sec, 2 * sec) - sec).abs()
    ox, ix, iy = 1.15, 0.5 * math.cos(sec), 0.5 * math.sin(sec)
    nx, ny = iy, ox - ix
    ln = math.hypot(nx, ny)
    d = torch.where(shape == 3, ((rho * th.cos() - ox) * nx + rho * th.sin() * ny) / ln, d)
    d = torch.where(shape == 4, (rho - 0.76).abs() - 0.24, d)
    alpha = (0.5 - d * e(r) / EDGE).clamp(0, 1)[:, None]
    v = torch.linspace(0, 1, height, device=dev)[None, None, :]
    bg = bgs[:, 0, :, None] * (1 - v) + bgs[:, 1, :, None] * v  # n, 3, h
    img = bg[:, :, None, :, None] * (1 - alpha) + col[:, :, None, None, None] * alpha
    return (img, alpha) if with_alpha else img


def sound(spec, latents):
    """[n, 2, latents * HOP] stereo waveform.  Everything lies below 600 Hz: 32 numbers per 25 ms carry no more.

    Steady tones have whole periods per latent, so they are easy to continue."""
    dev, n, total = spec["sound"].device, spec["sound"].shape[0], latents * HOP
    t = torch.arange(total, device=dev, dtype=torch.float64) / RATE
    dur = total / RATE
    tone = lambda f: torch.sin(2 * math.pi * f * t)
    sweep = lambda f0, f1: torch.sin(2 * math.pi * (f0 * t + (f1 - f0) * t * t / (2 * dur)))
    lat = t * (RATE / HOP)
    ramp = lambda p: torch.sigmoid(p * 12)  # soft edges, p in latents
    ph4 = torch.remainder(lat, 8)
    gate = ramp(ph4 - 0.3) * ramp(3.7 - ph4)
    td = torch.remainder(lat, 10) * (HOP / RATE)
    drum = 0.75 * torch.sin(2 * math.pi * 80 * td) * torch.exp(-td * 16) + 0.3 * torch.sin(2 * math.pi * 280 * td) * torch.exp(-td * 60)
    bank = torch.stack([0.32 * tone(160.) + 0.08 * tone(320.), 0.28 * tone(560.), 0.35 * sweep(160., 560.),
                        0.35 * sweep(560., 160.), 0.34 * tone(480.) * gate, drum,
                        0.17 * (tone(320.) + tone(400.) + tone(480.)), 0 * t])
    fade = (t / 0.01).clamp(0, 1) * ((dur - t) / 0.02).clamp(0, 1)
    mono = (bank * fade).float()[spec["sound"]]
    u = (t / dur).float()[None].expand(n, -1)
    m = spec["motion"][:, None]
    pos = torch.where(m == 0, u, torch.where(m == 1, 1 - u, torch.full_like(u, 0.5)))
    return torch.stack([mono * (1.05 - 0.7 * pos), mono * (0.35 + 0.7 * pos)], dim=1)


REFERENCE_SIZE = 128


def reference_spec(spec, seed):
    """The same shape, colour and size, at rest before some other background (for one-image references)."""
    rng, out = random.Random(seed), dict(spec)
    ok = [[i for i, b in enumerate(BACKGROUND_NAMES) if (c, b) not in LOW_CONTRAST] for c in COLOUR_NAMES]
    bg = [rng.choice(ok[c]) for c in spec["colour"].tolist()]
    out["bg"] = torch.tensor(bg, device=spec["bg"].device)
    out["motion"] = torch.full_like(spec["motion"], MOTIONS.index("stay"))
    return out


def audio_batch(n, latents, device, gen):
    """Mono training clips for the audio autoencoder: half the fixed sounds with random gain, half free variations."""
    rnd = lambda *s: torch.rand(*s, device=device, generator=gen)
    spec = {"sound": (rnd(n) * 8).long().clamp(max=7), "motion": (rnd(n) * 3).long()}
    fixed = sound(spec, latents)[torch.arange(n, device=device), (rnd(n) < 0.5).long()]
    t = torch.arange(latents * HOP, device=device) / RATE
    dur = latents * HOP / RATE
    out = torch.zeros(n, latents * HOP, device=device)
    for _ in range(3):
        f0, f1 = 80 * 2 ** (rnd(n, 1) * 2.8), 80 * 2 ** (rnd(n, 1) * 2.8)
        f1 = torch.where(rnd(n, 1) < 0.5, f0, f1)
        on = (rnd(n, 1) < 0.6).float()
        wave = torch.sin(2 * math.pi * (f0 * t + (f1 - f0) * t * t / (2 * dur)) + 6.283 * rnd(n, 1))
        per = 0.1 + 0.4 * rnd(n, 1)
        ph = torch.remainder(t + rnd(n, 1), per) / per
        kind = rnd(n, 1)
        env = torch.where(kind < 0.5, torch.ones_like(ph),
                          torch.where(kind < 0.75, torch.sigmoid(40 * (ph - 0.1)) * torch.sigmoid(40 * (0.5 - ph)),
                                      torch.exp(-ph * per * (5 + 20 * rnd(n, 1)))))
        out += on * 0.35 * rnd(n, 1) * wave * env
    free = (rnd(n, 1) < 0.4).float()
    return (fixed * (1 - free) + out * free)[:, None]
