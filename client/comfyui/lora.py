# SPDX-License-Identifier: Apache-2.0
"""LoRA patches of a ModelPatcher as adapter files for the service.

ComfyUI keeps no file name with a patch, only its tensors. They are sorted into adapters (patches of one strength, one for a module), each
adapter is named by a hash of its content, and its file is written once. A change of strength therefore sends nothing again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from .checkpoint import Raw, write_safetensors
from .refusals import Refused

MODEL_PREFIX = "diffusion_model."
ADAPTERS_MAX = 16


# A tensor, or a float, as it is written.
Encode = Callable[[Any], Raw]


@dataclass(frozen=True)
class Adapter:
    """modules: {module: patch object with .weights}; digest: of names and content, not of the strength."""

    strength: float
    modules: dict[str, Any]
    digest: str

    @property
    def user(self) -> object:
        """Lives as long as ComfyUI keeps the LoRA."""
        return next(iter(self.modules.values()))


def _module(key: str, patch: tuple[Any, ...]) -> str:
    """Name of the module that one entry of patcher.patches changes. Raises Refused for all but a plain LoRA."""
    _, adapter, strength_model, offset, function = patch
    kind = getattr(adapter, "name", None)
    if kind != "lora":
        if kind is None:  # ("diff", ...), ("set", ...) or a bare tensor
            kind = adapter[0] if isinstance(adapter, tuple) and adapter and isinstance(adapter[0], str) else type(adapter).__name__
        raise Refused(f"{key} is patched by {kind}; of weight patches latentd has LoRA only")
    if not (key.startswith(MODEL_PREFIX) and key.endswith(".weight")):
        raise Refused(f"a LoRA patches {key}; latentd knows weights of {MODEL_PREFIX}* only")
    if strength_model != 1.0:
        raise Refused(f"{key} is scaled by {strength_model} (a merge of models)")
    if offset is not None or function is not None:
        raise Refused(f"a LoRA patches a part of {key} only")
    for what, extra in zip(("a middle matrix (LoCon)", "a magnitude (DoRA)", "another shape (reshape)"), adapter.weights[3:6]):
        if extra is not None:
            raise Refused(f"the LoRA of {key} has {what}")
    return key[len(MODEL_PREFIX):-len(".weight")]


def tensors_of(module: str, patch: Any, encode: Encode) -> dict[str, Raw]:
    """What a file has of one module."""
    up, down, alpha = patch.weights[:3]
    found = {module + ".lora_up.weight": encode(up), module + ".lora_down.weight": encode(down)}
    if alpha is not None:
        found[module + ".alpha"] = encode(float(alpha))
    return found


class Exporter:
    """Remembers digests as long as ComfyUI keeps the patch objects, which is until the LoRA loader runs again."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def _digest(self, patch: Any) -> str:
        found = self._digests.get(patch)
        if found is None:
            h = hashlib.sha256()
            for name, (dtype, shape, data) in sorted(tensors_of("", patch, self._encode).items()):
                h.update(f"{name} {dtype} {list(shape)} {len(data)}\n".encode())
                h.update(data)
            found = self._digests[patch] = h.hexdigest()
        return found

    def adapters(self, patches: Mapping[str, list[tuple[Any, ...]]]) -> list[Adapter]:
        """patches: ModelPatcher.patches. Adapters in the order in which their first patch was applied."""
        groups: dict[tuple[float, int], dict[str, Any]] = {}  # (strength, n-th patch of that strength on a module) → {module: patch}
        for key, entries in patches.items():
            seen: dict[float, int] = {}
            for entry in entries:
                module, strength = _module(key, entry), float(entry[0])
                n = seen[strength] = seen.get(strength, -1) + 1
                groups.setdefault((strength, n), {})[module] = entry[1]
        if len(groups) > ADAPTERS_MAX:
            raise Refused(f"there are {len(groups)} LoRAs of different strengths; at most {ADAPTERS_MAX} work")
        found = []
        for (strength, _), modules in groups.items():
            h = hashlib.sha256()
            for module in sorted(modules):
                h.update(f"{module} {self._digest(modules[module])}\n".encode())
            found.append(Adapter(strength, modules, h.hexdigest()[:32]))
        return found

    def write(self, adapter: Adapter, folder: str) -> str:
        """The file of an adapter, written if it is not there. Whole or not at all: another process may share the folder."""
        path = os.path.join(folder, f"lora-{adapter.digest}.safetensors")
        if not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            tensors: dict[str, Raw] = {}
            for module, patch in adapter.modules.items():
                tensors.update(tensors_of(module, patch, self._encode))
            handle, part = tempfile.mkstemp(prefix=".lora-", suffix=".part", dir=folder)
            os.close(handle)
            try:
                write_safetensors(part, tensors)
                os.rename(part, path)
            except BaseException:
                os.unlink(part)
                raise
        return path
