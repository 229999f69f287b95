# SPDX-License-Identifier: Apache-2.0
"""The keyframes and references of a ComfyUI conditioning, as latentd takes them. Tensors are only asked for their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from .refusals import Refused

# The noise level of clean conditions that the model was trained with, and the only one the service has.
VISUAL_LEVEL = 0.999
AUDIO_LEVEL = 1.0

PAYLOAD_KEYS = {"seed", "audio_scale", "layout", "text_token_tags", "keyframes", "refs", "cond_video_latents", "cond_audio_latents",
                "visual_cond_noise_aug", "audio_cond_noise_aug"}
KEYFRAME_KEYS = {"resolved_frame_index", "latent", "audio_latent"}
REFERENCE_KEYS = {"kind", "latent", "latent_t", "latent_h", "latent_w", "audio_latent", "ref_audio_t"}


@dataclass(frozen=True)
class ConditionInput:
    """kind: "keyframe" (with its frame), "image", "video", "audio". video [24, T, H, W], audio [32, 2, A] or None."""

    kind: str
    frame: int = 0
    video: Optional[Any] = None
    audio: Optional[Any] = None


def _known(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(str(k) for k, v in given.items() if k not in known and v is not None)
    if unknown:
        raise Refused(f"{what} has {', '.join(unknown)}, which latentd does not know")


def _without_batch(what: str, latent: Any, channels: int, n_dims: int) -> Any:
    """[1, channels, ...] as [channels, ...]."""
    if latent is None:
        return None
    shape = tuple(latent.shape)
    if len(shape) != n_dims + 1 or shape[:2] != (1, channels):
        raise Refused(f"{what} has the shape {list(shape)}; expected [1, {channels}] and {n_dims - 1} more dimensions")
    return latent[0]


def _keyframe(i: int, k: Mapping[str, Any]) -> ConditionInput:
    what = f"keyframe {i}"
    _known(what, k, KEYFRAME_KEYS)
    video = _without_batch(f"the latent of {what}", k.get("latent"), 24, 4)
    audio = _without_batch(f"the audio latent of {what}", k.get("audio_latent"), 32, 3)
    return ConditionInput("keyframe", int(k["resolved_frame_index"]), video, audio)


def _reference(i: int, r: Mapping[str, Any]) -> ConditionInput:
    what, kind = f"reference {i}", r.get("kind")
    _known(what, r, REFERENCE_KEYS)
    if kind not in ("image", "video", "video_audio", "audio"):
        raise Refused(f"{what} is of the kind {kind!r}, which latentd does not know; it knows image, video, video_audio and audio")
    video = _without_batch(f"the latent of {what}", r.get("latent"), 24, 4)
    audio = _without_batch(f"the audio latent of {what}", r.get("audio_latent"), 32, 3)
    if (video is None) != (kind == "audio"):
        raise Refused(f"{what}, of the kind {kind}, has {'no' if video is None else 'a'} picture latent")
    for key, tensor, axis in (("latent_t", video, 1), ("latent_h", video, 2), ("latent_w", video, 3), ("ref_audio_t", audio, 2)):
        size = 0 if tensor is None else tensor.shape[axis]
        if r.get(key) is not None and int(r[key]) != size:
            raise Refused(f"{what} says {key} {r[key]}, and its latent has {size}")
    return ConditionInput("video" if kind == "video_audio" else str(kind), 0, video, audio)


def condition_inputs(payload: Mapping[str, Any]) -> list[ConditionInput]:
    """The conditions of a step in packed order: keyframes, then references."""
    _known("the conditioning", payload, PAYLOAD_KEYS)
    found = [_keyframe(i, k) for i, k in enumerate(payload.get("keyframes") or ())]
    found += [_reference(i, r) for i, r in enumerate(payload.get("refs") or ())]
    for key, level, part in (("visual_cond_noise_aug", VISUAL_LEVEL, "video"), ("audio_cond_noise_aug", AUDIO_LEVEL, "audio")):
        given = payload.get(key)
        if given is not None and float(given) != level and any(getattr(c, part) is not None for c in found):
            raise Refused(f"{key} is {given}; latentd has only {level}")
    return found
