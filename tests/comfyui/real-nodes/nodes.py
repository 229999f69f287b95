# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the loaders whose checkpoints no test has: what comes out has the shapes of the real ones and depends on what goes in."""

import hashlib
import os

import safetensors.torch
import torch
from comfy_api.latest import ComfyExtension, io

TEXT_DIM = 160


def numbers(*shape, of):
    """Random numbers of a tensor's or a text's content."""
    data = of.encode() if isinstance(of, str) else of.to(torch.float32).numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Clip:
    """A word is a row; an image has four rows of the picture's tag before the words."""

    def tokenize(self, text, images=(), minimax_ref_items=(), **_):
        pictures = list(images) + [r["data"] for r in minimax_ref_items if "data" in r]
        return {"text": text, "pictures": pictures}

    def encode_from_tokens_scheduled(self, tokens, **_):
        words = tokens["text"].split() or [""]
        rows = [numbers(4, TEXT_DIM, of=p) for p in tokens["pictures"]] + [numbers(1, TEXT_DIM, of=w) for w in words]
        tags = torch.tensor([0] * (4 * len(tokens["pictures"])) + [1] * len(words))
        return [[torch.cat(rows).bfloat16().float().unsqueeze(0), {"minimax_token_tags": tags}]]


class VideoVae:
    def encode(self, pixels):
        f, h, w, _ = pixels.shape
        t = 1 if f < 5 else (f - 5) // 17 * 5 + 2
        return numbers(1, 24, t, h // 16, w // 16, of=pixels)

    def decode(self, latent):
        latent = latent.unbind()[0] if latent.is_nested else latent
        t = latent.shape[2]
        picture = (latent[0, :3].permute(1, 2, 3, 0) * 0.25 + 0.5).clamp(0, 1)  # [t, h, w, 3]
        frames = 5 + (t - 2) // 5 * 17
        picture = picture.repeat_interleave(4, 0)[:frames]
        picture = torch.cat([picture, picture[-1:].expand(frames - picture.shape[0], -1, -1, -1)])
        return picture.repeat_interleave(16, 1).repeat_interleave(16, 2)


class AudioVae:
    audio_sample_rate = output_sample_rate = 32000

    def encode(self, waveform):
        return numbers(1, 32, 2, waveform.shape[1] // 800, of=waveform)

    def decode(self, latent):
        latent = latent.unbind()[-1] if latent.is_nested else latent
        return latent[:, 0].repeat_interleave(800, -1).clamp(-1, 1).movedim(1, -1)  # [1, samples, 2]


def node(name, output, make, **inputs):
    """A node class with string inputs, all ignored, and one output."""
    def define_schema(cls):
        return io.Schema(node_id=name, category="test", inputs=[io.String.Input(k, default=v) for k, v in inputs.items()], outputs=[output.Output()])

    def execute(cls, **_):
        return io.NodeOutput(make())

    return type(name, (io.ComfyNode,), {"define_schema": classmethod(define_schema), "execute": classmethod(execute)})


TestClip = node("TestClip", io.Clip, Clip, clip_name="", type="", device="")
TestVideoVae = node("TestVideoVae", io.Vae, VideoVae, vae_name="")
TestAudioVae = node("TestAudioVae", io.Vae, AudioVae, vae_name="")


class TestText(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="TestText", category="test", inputs=[io.String.Input("text")], outputs=[io.Conditioning.Output()])

    @classmethod
    def execute(cls, text):
        return io.NodeOutput(Clip().encode_from_tokens_scheduled(Clip().tokenize(text)))


class TestSave(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="TestSave", category="test", is_output_node=True,
                         inputs=[io.Latent.Input("samples"), io.String.Input("path")], outputs=[])

    @classmethod
    def execute(cls, samples, path):
        video, audio = samples["samples"].unbind()
        safetensors.torch.save_file({"video": video.contiguous(), "audio": audio.contiguous()}, path + ".part")
        os.rename(path + ".part", path)
        return io.NodeOutput()


class TestExtension(ComfyExtension):
    async def get_node_list(self):
        return [TestClip, TestVideoVae, TestAudioVae, TestText, TestSave]
