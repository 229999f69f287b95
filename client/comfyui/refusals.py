# SPDX-License-Identifier: Apache-2.0
"""What other nodes do to a MODEL that a sampler in another process cannot follow. Each is an error that names it; nothing is ignored silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Refused(ValueError):
    """Said to the user as it is."""

    def __init__(self, what: str, cure: str = "Take the node that adds it out of the workflow, or use ComfyUI's own loader") -> None:
        super().__init__(f"latentd: {what}. {cure}.")


def _names(nested: Mapping[Any, Any]) -> str:
    return ", ".join(sorted({str(k) for k, v in nested.items() if v}))


def _replaced(patches_replace: Mapping[Any, Any]) -> list[str]:
    found: list[str] = []
    for part, blocks in patches_replace.items():
        found += [f"{part} {' '.join(str(x) for x in k) if isinstance(k, tuple) else k}" for k in blocks]
    return found


def check_call(transformer_options: Mapping[str, Any], control: object, others: Mapping[str, Any]) -> None:
    """The arguments of one evaluation. others: further keyword arguments."""
    replaced = _replaced(transformer_options.get("patches_replace") or {})
    if replaced:
        raise Refused(f"blocks are replaced in this process (patches_replace: {', '.join(replaced[:3])}{' ...' if len(replaced) > 3 else ''})")
    patches = _names(transformer_options.get("patches") or {})
    if patches:
        raise Refused(f"the model's inside is patched in this process (patches: {patches})")
    if transformer_options.get("optimized_attention_override") is not None:
        raise Refused("another attention is set for this process (optimized_attention_override); the service has its own")
    if transformer_options.get("rope_options"):
        raise Refused("positions are scaled (rope_options)")
    if control is not None:
        raise Refused("a ControlNet is applied (control), which latentd does not have")
    unknown = sorted(k for k, v in others.items() if v is not None)
    if unknown:
        raise Refused(f"the conditioning brings {', '.join(unknown)}, which latentd does not know")


def _sparse_settings(functions: Iterable[Any]) -> str:
    """What ComfyUI's Model Sparse Attention was set to, where it can be read: its settings sit on an object in the callback's closure."""
    for f in functions:
        for cell in getattr(f, "__closure__", None) or ():
            try:
                patch = cell.cell_contents
            except ValueError:  # empty
                continue
            if not hasattr(patch, "min_tokens"):
                continue
            share = getattr(patch, "topk_ratio", None)
            found = [f"method {'vsa' if getattr(patch, 'vsa', False) else 'sla' if share else 'sol-attn'}"]
            found += [f"keep_percent {100 * share:g}"] if share else [f"tau {patch.tau}"] if hasattr(patch, "tau") else []
            found += [f"{name} {getattr(patch, name)}" for name in ("dense_blocks", "min_tokens", "sink_conditioning") if getattr(patch, name, None)]
            found += [f"{getattr(patch, name):.5g} as sigma of its {end}" for name, end in (("sigma_start", "start"), ("sigma_end", "end"))
                      if isinstance(getattr(patch, name, None), float)]
            if getattr(patch, "extra_tokens", 0):
                found.append(f"without its extra_tokens {patch.extra_tokens}, which latentd does not have (a lower tau or a higher keep_percent sees more)")
            return ": " + ", ".join(found)
    return ""


def check_patcher(patcher: Any) -> None:
    """What sits on a ModelPatcher and never arrives at an evaluation."""
    for callbacks in patcher.callbacks.values():
        if callbacks.get("block_sparse_attention"):
            raise Refused("sparse attention is set up for ComfyUI's own blocks (block_sparse_attention)",
                          "Take Model Sparse Attention out, and put the node latentd Sparse Attention into the input sparse of latentd's loader "
                          f"with the same settings{_sparse_settings(callbacks['block_sparse_attention'])}")
    if patcher.hook_patches:
        raise Refused("LoRAs are scheduled by hooks (hook_patches); latentd takes them at one strength for the whole run")
    inside = sorted(k for k in patcher.object_patches if k.split(".")[0] == "diffusion_model")
    if inside:
        raise Refused(f"parts of the model are replaced in this process (object_patches: {', '.join(inside[:3])})")
    sampling = patcher.object_patches.get("model_sampling")
    if sampling is not None and not hasattr(sampling, "audio_scale"):
        raise Refused("the schedule is that of another kind of model, without sound (model_sampling)",
                      "Take the node that sets it, such as ModelSamplingSD3, out of the workflow; MiniMaxH3SigmaShift shifts the schedule of H3")
    if patcher.weight_wrapper_patches:
        raise Refused(f"weights are wrapped (weight_wrapper_patches: {', '.join(sorted(patcher.weight_wrapper_patches)[:3])})")
    injections = _names(patcher.injections)
    if injections:
        raise Refused(f"something is injected into the model (injections: {injections})")
