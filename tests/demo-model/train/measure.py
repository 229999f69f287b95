# SPDX-License-Identifier: Apache-2.0
"""Simple measurements on a clip: which shape, colour, background, motion and sound is it?"""
import math

import torch

import data


def _mask(v):
    side = torch.cat([v[..., :6], v[..., -6:]], -1)  # 3 F H 12
    bg = side.permute(0, 2, 1, 3).flatten(2).median(-1).values  # 3 H
    diff = (v - bg[:, None, :, None]).abs().amax(0)
    return diff > 0.14, bg


def classify_video(v):
    """v [3, F, H, W] in [0, 1] -> dict of names (None where nothing was found)."""
    _, F, H, W = v.shape
    mask, bg = _mask(v)
    area = mask.float().sum((1, 2))
    bgs = torch.tensor(list(data.BACKGROUNDS.values()), device=v.device) / 255
    ends = torch.stack([bg[:, 2], bg[:, -3]])  # top, bottom
    out = {"bg": data.BACKGROUND_NAMES[(bgs - ends).square().sum((1, 2)).argmin().item()]}
    if (area > 40).float().mean() < 0.8:
        return out | {"shape": None, "colour": None, "motion": None}
    ys, xs = torch.arange(H, device=v.device) + 0.5, torch.arange(W, device=v.device) + 0.5
    a = area.clamp(min=1)
    cy, cx = (mask.sum(2) * ys).sum(1) / a / H, (mask.sum(1) * xs).sum(1) / a / W
    core = mask & (torch.nn.functional.avg_pool2d(mask[:, None].float(), 5, 1, 2)[:, 0] > 0.95)
    core = core if core.sum() > 50 else mask
    col = v[:, core].median(1).values
    pal = torch.tensor(list(data.COLOURS.values()), device=v.device) / 255
    out["colour"] = data.COLOUR_NAMES[(pal - col).square().sum(1).argmin().item()]
    dx, dy = (cx[-2:].mean() - cx[:2].mean()).item(), (cy[-2:].mean() - cy[:2].mean()).item()
    rx, ry = (cx.max() - cx.min()).item(), (cy.max() - cy.min()).item()
    ratio = (area[-2:].mean() / area[:2].mean().clamp(min=1)).item()

    def patch(i, size=48):
        m = mask[i].float()
        r = math.sqrt(max(area[i].item(), 1)) * 1.1
        t = torch.linspace(-1, 1, size, device=v.device) * r
        gy = (cy[i] * H + t) / H * 2 - 1
        gx = (cx[i] * W + t) / W * 2 - 1
        g = torch.stack([gx[None].expand(size, -1), gy[:, None].expand(-1, size)], -1)
        return torch.nn.functional.grid_sample(m[None, None], g[None], align_corners=False)[0, 0] > 0.5

    iou = lambda p, q: ((p & q).sum() / (p | q).sum().clamp(min=1)).item()
    if ratio > 2.2:
        motion = "grow"
    elif ratio < 0.45:
        motion = "shrink"
    elif dx > 0.3 and abs(dx) * W > abs(dy) * H:
        motion = "right"
    elif dx < -0.3 and abs(dx) * W > abs(dy) * H:
        motion = "left"
    elif dy < -0.3:
        motion = "up"
    elif dy > 0.3:
        motion = "down"
    elif ry > 0.25 and rx * W < 0.12 * H:
        motion = "bounce"
    elif ry > 0.25 and rx * W > 0.3 * min(H, W):
        motion = "circle"
    elif rx * W < 0.15 * H and ry < 0.15:
        motion = "spin" if min(iou(patch(0), patch(i)) for i in (F // 4, F // 3)) < 0.86 else "stay"
    else:
        motion = None
    out["motion"] = motion
    votes = torch.zeros(len(data.SHAPES))
    for i in (1, F // 3, F // 2, 2 * F // 3, F - 2):
        p = patch(i)
        for s in range(len(data.SHAPES)):
            n = 12
            spec = {"shape": torch.full((n,), s), "motion": torch.full((n,), 9), "size": torch.ones(n).long(),
                    "colour": torch.zeros(n).long(), "bg": torch.zeros(n).long(), "sound": torch.zeros(n).long(),
                    "jitter": torch.zeros(n, 4)}
            key = (s, str(v.device))
            if key not in _templates:
                spec["jitter"][:, 3] = torch.arange(n) / n * 2 * math.pi / 0.15
                alpha = data.render(spec, 1, 128, 128, torch.tensor([0]), True)[1][:, 0, 0] > 0.5
                res = []
                for m in alpha:
                    ar = m.float().sum()
                    my = (m.sum(1) * (torch.arange(128) + 0.5)).sum() / ar
                    mx = (m.sum(0) * (torch.arange(128) + 0.5)).sum() / ar
                    t = torch.linspace(-1, 1, 48) * math.sqrt(ar) * 1.1
                    g = torch.stack([((mx + t) / 128 * 2 - 1)[None].expand(48, -1), ((my + t) / 128 * 2 - 1)[:, None].expand(-1, 48)], -1)
                    res.append(torch.nn.functional.grid_sample(m[None, None].float(), g[None], align_corners=False)[0, 0] > 0.5)
                _templates[key] = torch.stack(res).to(v.device)
            t = _templates[key]
            votes[s] += ((t & p).sum((1, 2)) / (t | p).sum((1, 2)).clamp(min=1)).max().item()
    out["shape"] = data.SHAPES[votes.argmax().item()]
    return out


_templates = {}


def classify_sound(wave):
    """wave [2, n] -> name of the nearest sound by magnitude spectrogram."""
    n = wave.shape[-1] // data.HOP
    if wave.square().mean().sqrt() < 0.012:
        return "silence"
    spec = {"sound": torch.arange(7, device=wave.device), "motion": torch.full((7,), 9, device=wave.device)}
    ref = data.sound(spec, n).mean(1)
    w = torch.hann_window(1024, device=wave.device)
    mag = lambda x: torch.stft(x, 1024, 400, 1024, w, return_complex=True).abs()[:, :80].sqrt().flatten(1)
    a, b = mag(wave.mean(0, keepdim=True).float()), mag(ref)
    return data.SOUNDS[torch.nn.functional.cosine_similarity(a, b).argmax().item()]


def score(spec, videos, waves):
    """Share of clips in which each property is as asked for, and the raw answers."""
    names = dict(shape=data.SHAPES, colour=data.COLOUR_NAMES, motion=data.MOTIONS, bg=data.BACKGROUND_NAMES, sound=data.SOUNDS)
    got = [classify_video(v) | {"sound": classify_sound(w)} for v, w in zip(videos, waves)]
    hit = {k: sum(g[k] == n[spec[k][i].item()] for i, g in enumerate(got)) for k, n in names.items()}
    hit["all"] = sum(all(g[k] == n[spec[k][i].item()] for k, n in names.items()) for i, g in enumerate(got))
    return hit, got


if __name__ == "__main__":  # the measurement itself on drawn clips
    s = data.sample_specs(60, "cpu", 4)
    print(score(s, data.render(s, 22, 160, 256), data.sound(s, 37))[0], "of 60")
