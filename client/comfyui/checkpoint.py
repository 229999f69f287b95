# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a checkpoint, from its safetensors header. No weight is read: the service does that."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

HEADER_MAX = 100_000_000
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
MARKS = ("video_patch_proj.weight", "audio_patch_proj.weight")
DIFFUSERS_MARKS = ("audio_proj_in.weight", "context_embedder.weight")
ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class Raw(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class BadCheckpoint(ValueError):
    """Said to the user as it is."""

    def __init__(self, what: str) -> None:
        super().__init__(f"latentd: {what}. Choose the file of a MiniMax H3 diffusion model that is made for ComfyUI.")


@dataclass(frozen=True)
class Checkpoint:
    """shapes: of all weights and biases, by the names that ComfyUI's model has."""

    path: str
    shapes: dict[str, tuple[int, ...]]
    text_dim: int


def read_header(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)}"""
    with open(path, "rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        start = f.read(8)
        if size == 0:
            raise BadCheckpoint(f"{path} is no safetensors file: it is empty, as after a download that failed")
        n = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= n <= min(HEADER_MAX, size - 8):
            raise BadCheckpoint(f"{path} is no safetensors file: its first eight bytes give a header of {n} bytes, and the file has {size}")
        raw = f.read(n)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        return {name: (e["dtype"], tuple(int(d) for d in e["shape"])) for name, e in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise BadCheckpoint(f"{path} is no safetensors file: its header cannot be read ({e})") from e


def read_checkpoint(path: str) -> Checkpoint:
    header = read_header(path)
    prefix = next((p for p in (*PREFIXES, "") if all(p + m in header for m in MARKS)), None)
    if prefix is None and all(m in header for m in DIFFUSERS_MARKS):
        raise BadCheckpoint(f"{path} has the names of diffusers, which latentctl can use and ComfyUI cannot")
    if prefix is None:
        raise BadCheckpoint(f"{path} is no MiniMax H3 diffusion model in ComfyUI's names: it has no {' and '.join(MARKS)}")
    shapes = {name[len(prefix):]: shape for name, (_, shape) in header.items()
              if name.startswith(prefix) and name.endswith((".weight", ".bias"))}
    text = shapes.get("condition_proj.weight")
    if text is None or len(text) != 2:
        raise BadCheckpoint(f"{path} has no condition_proj.weight of two dimensions")
    return Checkpoint(path, shapes, text[1])


def write_safetensors(path: str, tensors: Mapping[str, Raw]) -> None:
    """Names sorted, without gaps, the header padded to eight bytes."""
    header: dict[str, object] = {}
    at = 0
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        if dtype in ELEMENT_BYTES and math.prod(shape) * ELEMENT_BYTES[dtype] != len(data):
            raise ValueError(f"{name}: {len(data)} bytes for {dtype} {list(shape)}")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)))
        f.write(raw)
        for name in sorted(tensors):
            f.write(tensors[name].data)
