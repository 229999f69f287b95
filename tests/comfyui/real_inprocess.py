# SPDX-License-Identifier: Apache-2.0
"""Native against remote in one process with the real ComfyUI of $COMFY_ROOT: the same nodes, seeds and conditions, final latents compared. Run by
tests/comfyui/real, which sets the environment. Prints TAP and, after "| ", rows of a table."""

import os
import pathlib
import sys
import threading
import time

sys.path.insert(0, os.environ["COMFY_ROOT"])
arguments, sys.argv = sys.argv[1:], ["main.py", "--cpu"]
import comfy.options

comfy.options.enable_args_parsing()
import comfy.model_management
import comfy.nested_tensor
import comfy.sd
import comfy.utils
import folder_paths
import nodes as stock
import torch
from comfy_extras import nodes_custom_sampler as sampling
from comfy_extras import nodes_minimax_h3 as h3

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(TESTS.parent), str(TESTS)]
import pack
from tap import Tap

pack.load()
import asyncio

asyncio.run(pack.load().comfy_entrypoint())
nodes, remote, run = pack.part("nodes"), pack.part("remote"), pack.part("run")

WORK = pathlib.Path(arguments[0])
DATA = pathlib.Path(arguments[1])
DERIVED = pathlib.Path(arguments[2])
EXACT = 2e-5


def rel(got, wanted):
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, wanted))


class Scene:
    """A conditioning and a latent. Text is exact in bf16, as a text encoder's is; conditions are random latents of a VAE's scale."""

    def __init__(self, t=7, h=4, w=6, a=37, text=22, tags=True, seed=1):
        self.g = torch.Generator().manual_seed(seed)
        self.shape, self.text = (t, h, w, a), self.rand(1, text, 160).bfloat16().float()
        self.values = {"minimax_token_tags": torch.ones(text, dtype=torch.long)}
        if tags:
            self.values["minimax_token_tags"][3:9] = 0
        self.clean = None
        self.mask = None

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.g)

    def keyframe(self, frame, frames=1, audio=0, picture=True):
        _, h, w, _ = self.shape
        k = {"resolved_frame_index": frame}
        if picture:
            k["latent"] = self.rand(1, 24, frames, h, w)
        if audio:
            k["audio_latent"] = self.rand(1, 32, 2, audio)
        self.values.setdefault("minimax_keyframes", []).append(k)
        return self

    def image(self, h, w):
        self._ref({"kind": "image", "latent_h": h, "latent_w": w, "latent": self.rand(1, 24, 1, h, w)})
        return self

    def video(self, t, h, w, audio=0):
        self._ref({"kind": "video_audio" if audio else "video", "latent_t": t, "latent_h": h, "latent_w": w, "ref_audio_t": audio,
                   "latent": self.rand(1, 24, t, h, w), "audio_latent": self.rand(1, 32, 2, audio) if audio else None})
        return self

    def audio(self, t):
        self._ref({"kind": "audio", "ref_audio_t": t, "audio_latent": self.rand(1, 32, 2, t)})
        return self

    def _ref(self, r):
        self.values.setdefault("minimax_refs", []).append(r)

    def conditioning(self):
        return [[self.text, dict(self.values)]]

    def latent(self):
        t, h, w, a = self.shape
        parts = self.clean or (torch.zeros(1, 24, t, h, w), torch.zeros(1, 32, 2, a))
        out = {"samples": comfy.nested_tensor.NestedTensor(parts)}
        if self.mask is not None:
            out["noise_mask"] = self.mask
        return out


def sample(model, scene, steps=4, sampler="res_multistep", scheduler="simple", seed=5, sigmas=None, denoise=1.0, negative=None, cfg=1.0):
    with torch.no_grad():
        if negative is None:
            guider = sampling.BasicGuider.execute(model, scene.conditioning())[0]
        else:
            guider = sampling.CFGGuider.execute(model, scene.conditioning(), negative.conditioning(), cfg)[0]
        sigmas = sampling.BasicScheduler.execute(model, scheduler, steps, denoise)[0] if sigmas is None else sigmas
        out = sampling.SamplerCustomAdvanced.execute(sampling.RandomNoise.execute(seed)[0], guider, sampling.KSamplerSelect.execute(sampler)[0], sigmas,
                                                     scene.latent())
        return out[0]["samples"].unbind()


class Tests:
    def __init__(self):
        self.native = comfy.sd.load_diffusion_model(str(DATA / "dit/comfy.safetensors"))
        self.remote = nodes.LatentdLoadH3.execute("comfy.safetensors", compute="f32")[0]
        self.full = str(WORK / "models/diffusion_models/comfy_f32.safetensors")
        self.rows = []

    def row(self, what, got, limit):
        self.rows.append(f"| {what} | {got:.1e} | {limit:.0e} |")
        assert got <= limit, f"{got:.2e} > {limit:.0e}"
        return f"{got:.1e}"

    def same(self, what, scene, limit=EXACT, both=lambda m: m, models=None, **options):
        native, far = models or (self.native, self.remote)
        wanted = sample(both(native), scene, **options)
        return self.row(what, rel(sample(both(far), scene, **options), wanted), limit)

    def t2v_simple_12_3(self):
        return self.same("text to video, simple, 12/3, res_multistep, 4 steps", Scene())

    def t2v_simple_12_3_eight_steps(self):
        return self.same("the same, 8 steps, larger latent", Scene(12, 8, 10, 65, 37, False), steps=8, seed=2**63 + 11)

    def t2v_simple_6_3(self):
        return self.same("simple, 6/3 (MiniMaxH3SigmaShift)", Scene(), both=lambda m: h3.MiniMaxH3SigmaShift.execute(m, 6.0, 3.0)[0])

    def t2v_shift_there_and_back(self):
        def both(m):
            return h3.MiniMaxH3SigmaShift.execute(h3.MiniMaxH3SigmaShift.execute(m, 6.0, 3.0)[0], 12.0, 3.0)[0]
        return self.same("shift 6/3 and back to 12/3", Scene(), both=both)

    def t2v_shift_10_3_and_equal_shifts(self):
        a = self.same("simple, 10/3", Scene(), both=lambda m: h3.MiniMaxH3SigmaShift.execute(m, 10.0, 3.0)[0])
        b = self.same("simple, 5/5 (sound not carried)", Scene(), both=lambda m: h3.MiniMaxH3SigmaShift.execute(m, 5.0, 5.0)[0])
        return f"{a}, {b}"

    def t2v_reference_schedule(self):
        import json
        notes = []
        for shift in (12.0, 6.0):
            table = next(t for t in json.loads((DATA / "dit/schedule.json").read_text())["tables"]
                         if (t["kind"], t["shift"], t["evaluations"]) == ("reference", shift, 4))
            sigmas = torch.tensor([float(s) for s in table["sigmas"]])
            notes.append(self.same(f"reference schedule, {shift:.0f}/3", Scene(), sigmas=sigmas,
                                   both=lambda m, shift=shift: h3.MiniMaxH3SigmaShift.execute(m, shift, 3.0)[0]))
        return ", ".join(notes)

    def t2v_other_samplers(self):
        return ", ".join(self.same(f"{s}, {k}", Scene(), sampler=s, scheduler=k) for s, k in
                         (("euler", "normal"), ("dpmpp_2m", "beta"), ("euler_ancestral", "simple"), ("heun", "simple")))

    def conditions_first_and_last_keyframe(self):
        return self.same("keyframes, first and last", Scene().keyframe(0).keyframe(21))

    def conditions_guides(self):
        scene = Scene(12, 4, 6, 65).keyframe(7).keyframe(13, 2).keyframe(17, 7, 9).keyframe(5, picture=False, audio=11)
        return self.same("guides: image, clip, clip with sound, sound", scene)

    def conditions_references(self):
        return self.same("references: image, video with sound, sound, video, image", Scene(7, 4, 8).image(4, 6).video(7, 4, 4, 12).audio(5).video(2, 6, 4)
                         .image(6, 4))

    def conditions_references_and_keyframes(self):
        return self.same("references and a keyframe, 6/3", Scene().image(4, 6).audio(5).keyframe(0),
                         both=lambda m: h3.MiniMaxH3SigmaShift.execute(m, 6.0, 3.0)[0])

    def cfg_two_conditionings_of_different_length(self):
        return self.same("CFG 3, negative shorter", Scene().keyframe(0), negative=Scene(text=5, seed=3), cfg=3.0, limit=5e-5)

    def img2img_and_mask(self):
        scene = Scene()
        scene.clean = scene.rand(1, 24, 7, 4, 6), scene.rand(1, 32, 2, 37)
        a = self.same("from a latent, denoise 0.6", scene, denoise=0.6)
        scene.mask = comfy.nested_tensor.NestedTensor((torch.ones(1, 1, 7, 4, 6), torch.ones(1, 1, 2, 37)))
        scene.mask.tensors[0][:, :, :2] = 0
        return f"{a}, {self.same('from a latent with a noise mask', scene)}"

    def pruned(self):
        path = str(DERIVED / "comfy_pruned.safetensors")
        return self.same("pruned checkpoint", Scene().keyframe(0), models=(comfy.sd.load_diffusion_model(path), remote.remote_patcher(path, compute="f32")))

    def int8(self):
        path, scene = str(DERIVED / "comfy_int8.safetensors"), Scene().keyframe(0)
        native = comfy.sd.load_diffusion_model(path)
        return self.same("int8 checkpoint: both quantise what they compute", scene, 6e-2,
                         models=(native, remote.remote_patcher(path, compute="bf16")))

    def bf16_matching_comfyui(self):
        """Distances from ComfyUI's f32 run: the remote bf16 run is no farther than 1.25 times ComfyUI's own."""
        path, scene = str(DATA / "dit/comfy.safetensors"), Scene().keyframe(0)
        native = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.bfloat16})
        native.model.manual_cast_dtype = None  # on a CPU it would compute in f32
        wanted, own = sample(self.native, scene), sample(native, scene)
        far = sample(remote.remote_patcher(path, rounding=True, compute="bf16"), scene)
        plain = sample(remote.remote_patcher(path, compute="bf16"), scene)
        a, b, c = rel(own, wanted), rel(far, wanted), rel(plain, wanted)
        self.rows.append(f"| bf16 against ComfyUI f32: ComfyUI bf16 {a:.1e}, remote matching {b:.1e}, remote f32 latents {c:.1e} | {b / a:.2f}x | 1.25x |")
        assert b <= 1.25 * a and c <= 1.25 * a, (a, b, c)
        return f"ComfyUI {a:.2e}, matching {b:.2e}, f32 latents {c:.2e}"

    def lora(self, path, limit, what):
        native, far = comfy.sd.load_diffusion_model(path), remote.remote_patcher(path, compute="f32")
        tensors, notes = comfy.utils.load_torch_file(str(WORK / "models/loras/lora_comfy.safetensors")), []
        scene = Scene().keyframe(0)
        base = sample(far, scene)
        for strength in (1.0, 0.5, 0.0):
            def both(m, strength=strength):
                return comfy.sd.load_lora_for_models(m, None, tensors, strength, 0)[0] if strength else m
            changed = rel(sample(both(far), scene), base)
            assert (changed > 1e-3) if strength else (changed == 0), changed
            notes.append(self.same(f"LoRA on {what}, strength {strength}" if strength else f"LoRA on {what}, removed again", scene, limit, both,
                                   models=(native, far)))
        return ", ".join(notes)

    def lora_on_f32_weights(self):
        return self.lora(self.full, EXACT, "f32 weights")

    def lora_on_bf16_weights(self):
        return self.lora(str(DATA / "dit/comfy.safetensors"), 1e-2, "bf16 weights")

    def lora_two_by_the_stock_loader(self):
        def both(m):
            loader = stock.LoraLoaderModelOnly()
            m = loader.load_lora_model_only(m, "lora_comfy.safetensors", 0.75)[0]
            return stock.LoraLoaderModelOnly().load_lora_model_only(m, "lora_comfy.safetensors", -0.25)[0]
        native, far = comfy.sd.load_diffusion_model(self.full), remote.remote_patcher(self.full, compute="f32")
        return self.same("LoraLoaderModelOnly twice, 0.75 and -0.25", Scene(), both=both, models=(native, far))

    def use_node_takes_over(self):
        native = comfy.sd.load_diffusion_model(self.full)
        m = stock.LoraLoaderModelOnly().load_lora_model_only(native, "lora_comfy.safetensors", 0.5)[0]
        m = h3.MiniMaxH3SigmaShift.execute(m, 6.0, 3.0)[0]
        far = nodes.LatentdUseH3.execute(m, compute="f32")[0]
        scene = Scene().keyframe(0)
        return self.row("patch node behind UNETLoader, LoRA 0.5 and shift 6/3", rel(sample(far, scene), sample(m, scene)), EXACT)

    def other_wrappers_work(self):
        """EasyCache wraps the network from outside: whole evaluations are left out, in both alike or with the same error."""
        from comfy_extras.nodes_easycache import EasyCacheNode

        def outcome(m):
            try:
                return sample(EasyCacheNode.execute(m, 0.2, 0.15, 0.95, False)[0], Scene(), steps=8)
            except Exception as e:
                return f"{type(e).__name__}: {e}"
        a, b = outcome(self.native), outcome(self.remote)
        if isinstance(a, str):
            Tap.equal(b, a)
            return f"both: {a}"
        return self.row("EasyCache", rel(b, a), EXACT)

    def torch_compile_is_harmless(self):
        from comfy_extras.nodes_torch_compile import TorchCompileModel
        m = TorchCompileModel.execute(self.remote, "inductor")[0]
        return self.row("TorchCompileModel on the remote model", rel(sample(m, Scene()), sample(self.remote, Scene())), 1e-30)

    def unsupported_patches_are_named(self):
        import comfy.hooks
        from comfy_extras.nodes_model_merging import ModelMergeSimple

        def attention(m):
            m.set_model_optimized_attention(lambda *a, **k: None)

        def replaced(m):
            m.set_model_patch_replace(lambda a, b: a, "dit", "double_block", 1)

        def hooked(m):
            hooks = comfy.hooks.create_hook_lora(comfy.utils.load_torch_file(str(WORK / "models/loras/lora_comfy.safetensors")), 1.0, 0.0)
            scene.values["hooks"] = hooks

        def beside(m):
            comfy.sd.load_bypass_lora_for_models(m, None, comfy.utils.load_torch_file(str(WORK / "models/loras/lora_comfy.safetensors")), 1.0, 0)

        for change, word in ((attention, "optimized_attention_override"), (replaced, "double_block 1"), (hooked, "hooks"), (beside, "diffusion_model.blocks")):
            m, scene = self.remote.clone(), Scene()
            try:
                change(m)
                sample(m, scene)
            except Exception as e:
                assert "latentd" in str(e) and word in str(e), e
            else:
                raise AssertionError(f"{word} was ignored")
        try:
            ModelMergeSimple().merge(self.remote, self.remote, 0.5)
        except Exception as e:
            assert "merged" in str(e), e
        else:
            raise AssertionError("merged")
        sample(self.remote, Scene())

    def interrupt_ends_at_once(self):
        scene, late, asked = Scene(42, 16, 24, 212, 300), [], []

        def stop():
            asked.append(time.monotonic())
            comfy.model_management.interrupt_current_processing()

        def start(executor, *args, **kwargs):  # the clock runs from the call of the network: ComfyUI itself looks at the flag between steps only
            threading.Timer(0.5, stop).start()
            return executor(*args, **kwargs)

        m = self.remote.clone()
        m.add_wrapper_with_key("diffusion_model", "clock", start)
        for _ in range(3):
            try:
                sample(m, scene, steps=200)
                raise AssertionError("it ended by itself")
            except comfy.model_management.InterruptProcessingException:
                late.append(time.monotonic() - asked[-1])
        assert max(late) < 0.1, late
        end = time.monotonic() + 5
        while any(j["State"] in ("queued", "running", "cancelling") for j in run.SERVICE.client().jobs()) and time.monotonic() < end:
            time.sleep(0.005)
        free = time.monotonic() - asked[-1] - late[-1]
        self.rows.append(f"| interrupt inside a step of {42 * 8 * 12 + 424 + 300} rows: prompt ends after | {1000 * max(late):.0f} ms | 100 ms |")
        self.rows.append(f"| … and the worker is free after another | {1000 * free:.0f} ms | a block |")
        return f"{', '.join(f'{1000 * x:.0f}' for x in late)} ms, worker free {1000 * free:.0f} ms later, next: {self.same('the next run after it', Scene())}"

    def nothing_is_left(self):
        Tap.equal(run.SERVICE.client().sessions(), [])


def main():
    folder_paths.add_model_folder_path("diffusion_models", str(WORK / "models/diffusion_models"))
    folder_paths.add_model_folder_path("loras", str(WORK / "models/loras"))
    folder_paths.set_temp_directory(str(WORK / "temp"))
    tap, t = Tap(), None
    t = Tests()
    only = arguments[3:]
    for name, f in vars(Tests).items():
        if callable(f) and name not in ("__init__", "row", "same", "lora") and (not only or any(o in name for o in only)):
            def check(f=f):
                try:
                    return f(t)
                except (AssertionError, OSError, ValueError, KeyError):
                    raise
                except BaseException as e:
                    raise AssertionError(f"{type(e).__name__}: {e}") from e
            tap.check(name, check)
    print("\n".join(f"# {r}" for r in t.rows))
    return tap.end()


if __name__ == "__main__":
    sys.exit(main())
