# SPDX-License-Identifier: Apache-2.0
"""Measures a checkpoint folder with the public classes (float32, CPU) and writes contact sheets:

evaluate.py ROOT OUT vae            the autoencoders
evaluate.py ROOT OUT text N         N held-out prompts, 8 and 20 steps, with the pitch of the sounds
evaluate.py ROOT OUT tasks N        N clips each of: first keyframe, first and last, one reference image, other sizes and lengths

Results are added to OUT/measured.json."""
import json
import os
import random
import sys

import torch

import data
import generate
import measure
import net


def pitch(x, low=25, high=2500, size=3200):
    """The strongest frequency between low and high of every 100 ms (Hz, parabola through the peak), nan where it is quiet."""
    f = x.unfold(-1, size, size) * torch.hann_window(size)
    s = torch.fft.rfft(f, 8 * size).abs()
    lo, hi = (int(v * 8 * size / data.RATE) for v in (low, high))
    k = s[:, lo:hi].argmax(-1) + lo
    a, b, c = (s.gather(1, (k + d)[:, None])[:, 0] for d in (-1, 0, 1))
    hz = (k + 0.5 * (a - c) / (a - 2 * b + c)) * data.RATE / (8 * size)
    return torch.where(f.square().mean(-1) > 1e-4, hz, float("nan"))


def spectrogram(pairs, path):
    """Columns: sounds; upper row drawn, lower row made; 0 .. 1000 Hz, 60 dB."""
    from PIL import Image

    def picture(x):
        s = torch.stft(x, 2048, 400, 2048, torch.hann_window(2048), return_complex=True).abs()[:64]
        v = ((20 * torch.log10(s + 1e-3) + 10) / 60).clamp(0, 1).flip(0)
        v = torch.stack([v ** 0.7, v ** 1.5, (1 - (2 * v - 0.8).abs()).clamp(0, 1) * 0.7 * v.sqrt()])
        return torch.nn.functional.pad(v.repeat_interleave(2, 1).repeat_interleave(2, 2), (0, 4, 0, 4), value=1.0)

    both = torch.cat([torch.cat([picture(a), picture(b)], 1) for a, b in pairs], 2)
    Image.fromarray((both * 255).round().byte().permute(1, 2, 0).numpy()).save(path, optimize=True)


@torch.no_grad()
def autoencoders():
    for size in ((160, 256), (160, 160), (96, 160)):
        spec, psnr, seen = data.sample_specs(48, "cpu", 99), [], []
        for i in torch.arange(48).split(4):
            img = data.render(data.take(spec, i), 22, *size)
            seen += list(net.denormalise(p.vae.decode(p.vae.encode(net.normalise(img)).latent_dist.mode()).sample))
            psnr += [(-10 * torch.log10((a - b).square().mean())).item() for a, b in zip(seen[-len(i):], img)]
            if i[0] == 0 and size == (160, 256):
                generate.sheet([torch.cat([a, b], -1) for a, b in zip(img, seen)], f"{out}/vae_reconstruction.png", (0, 10, 21))
        hit, _ = measure.score(spec, seen, list(data.sound(spec, 37)))
        result["video %dx%d" % size] = dict(psnr_mean=round(sum(psnr) / 48, 2), psnr_min=round(min(psnr), 2),
                                            decoded_of_48={k: hit[k] for k in ("bg", "colour", "shape", "motion")})
        print(size, result["video %dx%d" % size], flush=True)
    x = data.sound({"sound": torch.arange(8), "motion": torch.full((8,), 9)}, 37)[:, :1]
    y = p.audio.decode(p.audio.encode(x).latent_dist.mode()).sample
    snr = 10 * torch.log10(x.square().mean((1, 2)).clamp(min=1e-9) / (x - y).square().mean((1, 2)).clamp(min=1e-12))
    result["audio_snr_db"] = {k: round(v, 1) for k, v in zip(data.SOUNDS[:7], snr.tolist())} | {
        "silence_rms": round(y[7].square().mean().sqrt().item(), 5)}


def specs(n, seed, words, kind=data.prompt, **more):
    spec, rng = data.sample_specs(n, "cpu", seed), random.Random(words)
    return spec, [kind({k: int(v[i]) for k, v in spec.items() if k != "jitter"}, rng, **more) for i in range(n)]


def off_pitch(spec, i, sound):
    """Hz between the made and the drawn sound, the median over 100 ms pieces."""
    want = data.sound(data.take(spec, torch.tensor([i])), sound.shape[-1] // data.HOP)[0]
    chord = data.SOUNDS[int(spec["sound"][i])] == "chord"  # its three tones are equally loud: each is looked for by itself
    bands = [(f - 40, f + 40) for f in (320, 400, 480)] if chord else [(25, 2500)]
    d = torch.cat([(pitch(sound.mean(0), *b) - pitch(want.mean(0), *b)).abs() for b in bands])
    d = d[~d.isnan()]
    return d.median().item() if len(d) else None


def text(n):
    spec, prompts = specs(n, 4242, 17)
    clips, off, pairs = {8: [], 20: []}, {}, {}
    for i, t in enumerate(prompts):
        for steps in clips:
            clips[steps].append(p(t, steps=steps, seed=i))
        made, name = clips[8][-1][1], data.SOUNDS[int(spec["sound"][i])]
        if measure.classify_sound(made) == name != "silence":
            off.setdefault(name, []).append(off_pitch(spec, i, made))
            pairs.setdefault(name, (data.sound(data.take(spec, torch.tensor([i])), 37)[0].mean(0), made.mean(0)))
        if i % 8 == 7 or i == n - 1:
            s = data.take(spec, torch.arange(i + 1))
            for steps, c in clips.items():
                hit, got = measure.score(s, [v for v, _ in c], [w for _, w in c])
                result[f"{steps}_steps"] = hit | {"of": i + 1}
                print(steps, result[f"{steps}_steps"], flush=True)
    result["pitch_error_hz"] = {k: dict(clips=len(v), median=round(sorted(v)[len(v) // 2], 2), max=round(max(v), 2))
                                for k, v in off.items() if None not in v}
    result["prompts_of_the_sheets"] = prompts[:8]
    for steps, c in clips.items():
        generate.sheet([v for v, _ in c[:8]], f"{out}/sheet_{steps}_steps.png")
    generate.sheet([v for v, _ in clips[8][8:40]], f"{out}/.more.png", (0, 10, 21))
    spectrogram([pairs[k] for k in data.SOUNDS if k in pairs], f"{out}/sounds.png")
    names = dict(shape=data.SHAPES, colour=data.COLOUR_NAMES, motion=data.MOTIONS, bg=data.BACKGROUND_NAMES, sound=data.SOUNDS)
    for i, g in enumerate(measure.score(spec, [v for v, _ in clips[8]], [w for _, w in clips[8]])[1]):
        bad = {k: (names[k][int(spec[k][i])], g[k]) for k in names if names[k][int(spec[k][i])] != g[k]}
        if bad:
            print(i, prompts[i], bad)
    for i in range(4):
        generate.wav(clips[8][i][1], f"{out}/.sound_{i}.wav")


def tasks(n):
    def run(name, spec, prompts, size, frames, given=lambda i: {}):
        clips, kept = [], []
        for i, t in enumerate(prompts):
            clips.append(p(t, *size, frames=frames, seed=100 + i, **given(i)))
            for k, at in (("first", 0), ("last", -1)):
                if k in given(i):
                    kept.append((-10 * torch.log10((clips[-1][0][:, at] - given(i)[k]).square().mean())).item())
        hit, _ = measure.score(spec, [v for v, _ in clips], [w for _, w in clips])
        result[name] = hit | {"of": n} | ({"keyframe_psnr": round(sum(kept) / len(kept), 1)} if kept else {})
        print(name, result[name], flush=True)
        generate.sheet([v for v, _ in clips[:4]], f"{out}/.{name.replace(' ', '_')}.png", (0, 4, 8, 12, 16, 21))

    exact = lambda x: (x * 255).round() / 255
    for name, ks in (("first keyframe", ("first",)), ("first and last keyframe", ("first", "last"))):
        spec, prompts = specs(n, 51, 18, keyframe=True)
        img = data.render(spec, 22, 160, 256)
        run(name, spec, prompts, (160, 256), 22, lambda i: {k: exact(img[i, :, 0 if k == "first" else -1]) for k in ks})
    spec, prompts = specs(n, 52, 19, data.reference_prompt)
    ref = data.render(data.reference_spec(spec, 3), 1, data.REFERENCE_SIZE, data.REFERENCE_SIZE)
    run("reference image", spec, prompts, (160, 256), 22, lambda i: dict(reference=exact(ref[i, :, 0])))
    for size, frames in (((160, 256), 39), ((160, 256), 56), ((160, 160), 22), ((256, 160), 22), ((96, 160), 39), ((192, 192), 22)):
        spec, prompts = specs(n, 53 + frames, 20)
        run("%dx%dx%d" % (*size, frames), spec, prompts, size, frames)


root, out, what = sys.argv[1:4]
os.makedirs(out, exist_ok=True)
result, p = {}, generate.Pipeline(root)
{"vae": autoencoders, "text": text, "tasks": tasks}[what](*map(int, sys.argv[4:5]))
old = json.load(open(f"{out}/measured.json")) if os.path.exists(f"{out}/measured.json") else {}
json.dump(old | result, open(f"{out}/measured.json", "w"), indent=1)
