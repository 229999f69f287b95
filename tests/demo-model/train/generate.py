# SPDX-License-Identifier: Apache-2.0
"""Runs the checkpoint folder with the public classes (float32, CPU) and the Euler sampler of the scheduler class."""
import json
from types import SimpleNamespace

import numpy as np
import torch
from diffusers import (AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler,
                       MiniMaxH3Transformer3DModel)
from diffusers.modular_pipelines.minimax_h3.before_denoise import (MiniMaxH3PrepareLayoutStep, MiniMaxH3Ref2VAPrepareLayoutStep,
                                                                   patchify_video_latents)
from safetensors.torch import load_file
from tokenizers import Tokenizer

import build
import convrot
import net


class Pipeline:
    def __init__(self, root):
        f32 = dict(torch_dtype=torch.float32)
        self.dit = MiniMaxH3Transformer3DModel.from_config(json.load(open(f"{root}/transformer/config.json"))).eval()
        state = convrot.expand(load_file(f"{root}/transformer/diffusion_pytorch_model.safetensors"))
        self.dit.load_state_dict({k: v.float() for k, v in state.items()})
        self.vae = AutoencoderKLMiniMaxH3.from_pretrained(f"{root}/vae", **f32).eval()
        self.audio = AutoencoderKLMiniMaxH3Audio.from_pretrained(f"{root}/audio_vae", **f32).eval()
        self.tok = Tokenizer.from_file(f"{root}/tokenizer/tokenizer.json")
        self.ids = build.special_ids(self.tok)
        state = {k: v.float() for k, v in load_file(f"{root}/text_encoder/model.safetensors").items()}
        self.text = build.hf_text_encoder(self.tok.get_vocab_size(), state, self.ids)
        self.layer = json.load(open(f"{root}/model_index.json"))["text_encoder_layer"]
        self.sched = [json.load(open(f"{root}/{s}/scheduler_config.json"))["shift"] for s in ("scheduler", "audio_scheduler")]
        st = lambda v, c: torch.tensor(c.config[v]).view(1, -1, *([1] * 3))
        self.vm, self.vs = st("latents_mean", self.vae), st("latents_std", self.vae)
        self.am = torch.tensor(self.audio.config.latents_mean).view(1, -1, 1)
        self.as_ = torch.tensor(self.audio.config.latents_std).view(1, -1, 1)

    @torch.no_grad()
    def encode_text(self, prompt, images=()):
        """images: list of [3, H, W] in [0, 1] -> token ids, tags, embeddings [1, L, text_dim]."""
        ids, tags, px, grids = [], [], [], []
        for i, img in enumerate(images):
            h, w = img.shape[1] // 32, img.shape[2] // 32
            label = self.tok.encode(f"<Picture {i + 1}>: ", add_special_tokens=False).ids
            ids += label + [self.ids["start"]] + [self.ids["image"]] * (h * w) + [self.ids["end"]]
            tags += [1] * len(label) + [0] * (h * w + 2)
            p = (img * 2 - 1).view(3, h, 2, 16, w, 2, 16).permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, 256)
            px.append(p.expand(-1, -1, 2, -1).reshape(-1, 1536))
            grids.append([1, 2 * h, 2 * w])
        more = self.tok.encode(prompt, add_special_tokens=False).ids
        ids, tags = ids + more, tags + [1] * len(more)
        t = torch.tensor([ids])
        kw = dict(pixel_values=torch.cat(px), image_grid_thw=torch.tensor(grids)) if px else {}
        out = self.text.model(input_ids=t, attention_mask=torch.ones_like(t), use_cache=False, output_hidden_states=True,
                              mm_token_type_ids=(t == self.ids["image"]).int(), **kw)
        return ids, tags, out.hidden_states[self.layer]

    @torch.no_grad()
    def encode_frame(self, img):
        z = self.vae.encode(net.normalise(img[None, :, None])).latent_dist.mode()
        return patchify_video_latents((z - self.vm) / self.vs, (1, 2, 2))

    @torch.no_grad()
    def denoise(self, emb, tags, H, W, frames, steps, seed, keyframes=()):
        """keyframes: list of ("first" | "last" | (h, w), rows), the last for one reference image of that latent size.

        Returns initial and final rows of both streams."""
        T, A, h, w = net.latent_frames(frames), net.audio_latents(frames), H // 16, W // 16
        gen = torch.Generator().manual_seed(seed)
        cond = [0.999 * r + 0.001 * torch.randn(r.shape, generator=gen) for _, r in keyframes]
        xv = patchify_video_latents(torch.randn(1, 24, T, h, w, generator=gen), (1, 2, 2))
        xa = torch.randn(2 * A, 32, generator=gen)
        start = (xv.clone(), xa.clone())
        common = (T, h, w, A, (1, 2, 2), 2, 2, 0)
        if keyframes and keyframes[0][0] not in ("first", "last"):
            pos, tag, vi, ai, ti, nc, _ = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
                torch.tensor(tags), [SimpleNamespace(kind="image")] * len(keyframes),
                [torch.zeros(1, 24, 1, *k) for k, _ in keyframes], [], *common)
        else:
            pos, tag, vi, ai, ti, nc, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                torch.tensor(tags), *common, tuple(k for k, _ in keyframes))
        cond = torch.cat([*cond, xv[:0]])
        sv, sa = MiniMaxH3Scheduler(self.sched[0]), MiniMaxH3Scheduler(self.sched[1])
        sv.set_timesteps(steps + 1), sa.set_timesteps(steps + 1)
        for tv, ta in zip(sv.timesteps, sa.timesteps):
            row = torch.full((len(pos),), tv.item())
            row[ai], row[vi[:nc]] = ta, max(tv.item(), 0.999)
            ts, idx = torch.unique(row, return_inverse=True)
            v = self.dit(torch.cat([cond, xv])[None], xa[None], emb, ts, idx, tag, pos, vi, ai, ti)
            xv = sv.step(v.sample[0, nc:], tv, xv).prev_sample
            xa = sa.step(v.audio_sample[0], ta, xa).prev_sample
        return start, (xv, xa)

    @torch.no_grad()
    def decode(self, xv, xa, H, W, frames):
        T, A = net.latent_frames(frames), net.audio_latents(frames)
        z = net.unpatchify(xv[None], T, H // 16, W // 16) * self.vs + self.vm
        video = net.denormalise(self.vae.decode(z).sample)[0]
        wave = self.audio.decode(xa.view(2, A, 32).transpose(1, 2) * self.as_ + self.am).sample[:, 0]
        return video, wave

    def __call__(self, prompt, H=160, W=256, frames=22, steps=8, seed=0, first=None, last=None, reference=None):
        given = [(k, i) for k, i in (("first", first), ("last", last), ("image", reference)) if i is not None]
        images = [i for _, i in given]
        kfs = [((i.shape[1] // 16, i.shape[2] // 16) if k == "image" else k, self.encode_frame(i)) for k, i in given]
        _, tags, emb = self.encode_text(prompt, images)
        _, (xv, xa) = self.denoise(emb, tags, H, W, frames, steps, seed, kfs)
        return self.decode(xv, xa, H, W, frames)


def sheet(videos, path, frames=(0, 4, 8, 12, 16, 21)):
    from PIL import Image

    rows = [torch.cat([v[:, f] for f in frames], -1) for v in videos]
    Image.fromarray((torch.cat(rows, 1) * 255).round().byte().permute(1, 2, 0).numpy()).save(path, optimize=True)


def wav(wave, path):
    import wave as w

    with w.open(path, "wb") as f:
        f.setnchannels(2), f.setsampwidth(2), f.setframerate(32000)
        f.writeframes((wave.clamp(-1, 1) * 32767).round().short().t().contiguous().numpy().astype(np.int16).tobytes())
