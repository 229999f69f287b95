# SPDX-License-Identifier: Apache-2.0
"""The nodes."""

import logging
import os

import folder_paths
from comfy_api.latest import ComfyExtension, io

from . import library
from .run import SERVICE, Sparse, Split, parse_gpus, parse_shares

log = logging.getLogger("latentd")

SplitSocket = io.Custom("LATENTD_SPLIT")
SparseSocket = io.Custom("LATENTD_SPARSE")
ROUNDING = {"f32": False, "match ComfyUI": True}


def _precision_inputs():
    return [
        io.Combo.Input("precision", options=list(ROUNDING), default="f32",
                       tooltip="f32: the sampler's latents and velocities travel as they are. match ComfyUI: they are rounded to bf16 where "
                               "ComfyUI rounds them for a bf16 model; less exact, for comparisons."),
        io.Combo.Input("compute", options=["auto", "bf16", "f32"], default="auto",
                       tooltip="What the service computes in. auto: what the checkpoint is made for; f32: the slow reference."),
        SplitSocket.Input("split", optional=True, tooltip="From 'latentd Split': how a step is divided among devices. Without: as the service is set up."),
        SparseSocket.Input("sparse", optional=True, tooltip="From 'latentd Sparse Attention'. Without: dense attention."),
    ]


def _options(precision, compute, split, sparse):
    return {"rounding": ROUNDING[precision], "compute": None if compute == "auto" else compute, "split": split, "sparse": sparse}


class LatentdLoadH3(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentdLoadH3",
            display_name="Load MiniMax H3 (latentd)",
            category="model/loaders",
            description="Loads a MiniMax H3 diffusion model into the latentd service, in place of Load Diffusion Model. The weights stay there, one "
                        "copy for all programs, and survive a restart of ComfyUI.",
            search_aliases=["latentd", "minimax", "h3", "unet loader", "load diffusion model"],
            inputs=[
                io.Combo.Input("model_name", options=folder_paths.get_filename_list("diffusion_models"),
                               tooltip="A file of models/diffusion_models, in ComfyUI's format: full, pruned, int8, fp8 or nvfp4."),
                *_precision_inputs(),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name, **others):
        path = folder_paths.get_full_path("diffusion_models", model_name)
        s = os.stat(path) if path else None
        return None if s is None else (path, s.st_size, s.st_mtime_ns)

    @classmethod
    def execute(cls, model_name, precision="f32", compute="auto", split=None, sparse=None) -> io.NodeOutput:
        from .remote import remote_patcher

        path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        patcher = remote_patcher(path, **_options(precision, compute, split, sparse))
        SERVICE.reliably(lambda: SERVICE.begin_load(path, patcher.model.diffusion_model))  # it reads while the text is encoded
        return io.NodeOutput(patcher)


class LatentdUseH3(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentdUseH3",
            display_name="Use latentd for MiniMax H3",
            category="model/patch/minimax",
            description="Samples a MiniMax H3 model that ComfyUI's own loader loaded with the latentd service: same file, LoRAs and patches. Put it "
                        "last, before the guider. ComfyUI's copy of the weights is not used; Load MiniMax H3 (latentd) avoids it altogether.",
            search_aliases=["latentd", "minimax", "h3"],
            inputs=[io.Model.Input("model", tooltip="From Load Diffusion Model, with or without LoRAs."), *_precision_inputs()],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, precision="f32", compute="auto", split=None, sparse=None) -> io.NodeOutput:
        from .remote import take_over

        return io.NodeOutput(take_over(model, **_options(precision, compute, split, sparse)))


class LatentdSplit(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentdSplit",
            display_name="latentd Split",
            category="model/patch/minimax",
            description="How one step is divided among the service's devices. The result has the same bits whatever is set here.",
            search_aliases=["latentd", "gpu", "multi gpu", "ranks"],
            inputs=[
                io.Int.Input("ranks", default=0, min=0, max=64, tooltip="How many devices work on a step. 0: all that the service has."),
                io.String.Input("shares", default="", tooltip="Speed of each device, for example 3,2,2: the first gets three sevenths of the rows. "
                                                              "Empty: as the service measures or is set up."),
                io.Combo.Input("plan", options=["auto", "hidden-gather", "kv-gather", "qkv-all-to-all"], default="auto",
                               tooltip="What the devices exchange."),
                io.Combo.Input("exchange", options=["auto", "host", "p2p", "nccl"], default="auto",
                               tooltip="How they exchange it: through main memory, from card to card, or with NCCL. CPUs have main memory only."),
                io.Int.Input("chunks", default=0, min=0, max=32, tooltip="In how many pieces, so that sending and computing overlap. 0: automatic."),
                io.String.Input("gpus", default="", tooltip="Which GPUs of the service to use: UUIDs or PCI addresses as `latentctl devices` shows them, "
                                                            "with commas between. Empty: all. A service that computes on the CPU has none to choose."),
            ],
            outputs=[SplitSocket.Output(display_name="split")],
        )

    @classmethod
    def execute(cls, ranks=0, shares="", plan="auto", exchange="auto", chunks=0, gpus="") -> io.NodeOutput:
        return io.NodeOutput(Split(ranks=ranks or None, shares=parse_shares(shares, ranks), plan=None if plan == "auto" else plan,
                                   exchange=None if exchange == "auto" else exchange, chunks=chunks or None, gpus=parse_gpus(gpus)))


class LatentdSparse(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentdSparse",
            display_name="latentd Sparse Attention",
            category="model/patch/minimax",
            description="Sparse attention in the service, with the settings of ComfyUI's Model Sparse Attention, whose own patch cannot reach another "
                        "process, but for extra_tokens, which latentd does not have. The same composition, quicker, with another timing of motion.",
            search_aliases=["latentd", "sparse", "sol-attn", "sla", "vsa", "block sparse attention"],
            inputs=[
                io.Combo.Input("method", options=["sol-attn", "sla", "vsa"], default="sol-attn",
                               tooltip="sol-attn: blocks above a threshold; sla: the best share of the blocks; vsa: cubes, for models that were trained "
                                       "with it (FastH3), which take nothing else."),
                io.Float.Input("tau", default=1.3, min=0.0, max=4.0, step=0.05,
                               tooltip="sol-attn: threshold in standard deviations. 1.0 keeps about 16 % of the blocks exact, 1.5 7 %, 2.0 3 %."),
                io.Float.Input("keep_percent", default=10.0, min=0.5, max=95.0, step=0.5, tooltip="sla, vsa: share of the blocks that is kept exact."),
                io.Float.Input("start_percent", default=0.2, min=0.0, max=1.0, step=0.01, tooltip="Steps before this part of the schedule are dense."),
                io.Float.Input("end_percent", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Steps behind this part of the schedule are dense."),
                io.String.Input("dense_blocks", default="", tooltip="Blocks of the model that stay dense, for example 0, 47-49."),
                io.Int.Input("min_tokens", default=12288, min=0, max=1 << 24, tooltip="Shorter sequences stay dense."),
                io.Combo.Input("sink_conditioning", options=["exact_kv_and_rows", "exact_kv", "off"], default="exact_kv_and_rows",
                               tooltip="sol-attn, sla: whether text, pictures and sound are seen exactly by all, and the sound sees all exactly."),
            ],
            outputs=[SparseSocket.Output(display_name="sparse")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(Sparse(**settings))


class LatentdRelease(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentdRelease",
            display_name="latentd Release",
            category="model/patch/minimax",
            description="Gives memory of the latentd service back, for what comes next in the workflow. Whatever goes in comes out unchanged: put it "
                        "into a link, for example between the sampler and the VAE decoder.",
            search_aliases=["latentd", "free", "vram", "unload"],
            inputs=[
                io.AnyType.Input("value", tooltip="Anything; the release happens when it is there."),
                io.Combo.Input("what", options=["GPU memory", "GPU memory and weights"], default="GPU memory",
                               tooltip="GPU memory: weights stay in main memory. With weights: these too, unless another program uses them."),
            ],
            outputs=[io.AnyType.Output(display_name="value")],
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        return float("nan")  # it is for its effect

    @classmethod
    def execute(cls, value, what="GPU memory") -> io.NodeOutput:
        return io.NodeOutput(value, ui={"text": SERVICE.reliably(lambda: release(what == "GPU memory and weights"))})


def release(weights):
    """What was done, a line each. What the service refuses, because others use it or this user may not, is a line as well: the workflow goes on."""
    client, lines = SERVICE.client(), []

    def attempt(what, f):
        try:
            lines.append(f"{what}: {f()}")
        except library.latent().Error as e:
            if e.name not in ("AccessDenied", "Busy", "NotSupported"):
                raise
            lines.append(f"{what}: kept, {e}")

    def gpus():
        client.release_gpus()
        devices = client.devices()
        if not devices:
            return "none, nothing was computed yet"
        names = [d["Name"] for d in devices if d["Kind"] != "cpu"]
        return f"{', '.join(names)} given back" if names else "none, the service computes on the CPU; its worker has ended until the next step"

    attempt("GPU memory", gpus)
    if weights:
        lines += SERVICE.unload()
        attempt("weights that nobody uses", lambda: f"{client.drop_cache() / 2**20:.0f} MiB freed")
    for line in lines:
        log.info("latentd: %s", line)
    return lines


class LatentdExtension(ComfyExtension):
    async def get_node_list(self):
        return [LatentdLoadH3, LatentdUseH3, LatentdSplit, LatentdSparse, LatentdRelease]
