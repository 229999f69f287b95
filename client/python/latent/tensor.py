# SPDX-License-Identifier: Apache-2.0
"""Tensors in shared memory, and putting foreign data there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from latent import _structs
from latent._arguments import text, uint
from latent._library import Handle, library
from latent.errors import InvalidArgument, NotSupported

if TYPE_CHECKING:
    import numpy
    import torch

# Types of the service: bytes, name in numpy, the same with ml_dtypes, name in torch, code of memoryview and array.array.
_TYPES: dict[str, tuple[int, str, Optional[str], Optional[str], Optional[str]]] = {
    "F64": (8, "float64", None, "float64", "d"),
    "F32": (4, "float32", None, "float32", "f"),
    "F16": (2, "float16", None, "float16", "e"),
    "BF16": (2, "uint16", "bfloat16", "bfloat16", None),
    "F8_E4M3": (1, "uint8", "float8_e4m3fn", "float8_e4m3fn", None),
    "F8_E5M2": (1, "uint8", "float8_e5m2", "float8_e5m2", None),
    "I64": (8, "int64", None, "int64", "q"),
    "I32": (4, "int32", None, "int32", "i"),
    "I16": (2, "int16", None, "int16", "h"),
    "I8": (1, "int8", None, "int8", "b"),
    "U64": (8, "uint64", None, "uint64", "Q"),
    "U32": (4, "uint32", None, "uint32", "I"),
    "U16": (2, "uint16", None, "uint16", "H"),
    "U8": (1, "uint8", None, "uint8", "B"),
    "BOOL": (1, "bool", None, "bool", "?"),
}


def _type(dtype: str) -> tuple[int, str, Optional[str], Optional[str], Optional[str]]:
    if dtype not in _TYPES:
        raise InvalidArgument("InvalidArgument", f"{dtype!r} is no type of a tensor; expected one of {', '.join(_TYPES)}.")
    return _TYPES[dtype]


def describe(dtype: str, shape: Sequence[int]) -> _structs.Struct:
    """A latent_tensor without a place."""
    dims = [uint("shape", n) for n in shape]
    if len(dims) > _structs.DIMS_MAX:
        raise InvalidArgument("InvalidArgument", f"{len(dims)} dimensions, at most {_structs.DIMS_MAX} are possible.")
    t = _structs.latent_tensor()
    t.dtype, t.n_dims = (text("dtype", dtype) or b"")[:16], len(dims)
    t.shape[: len(dims)] = dims
    return t


class Tensor:
    """A row-major tensor in an arena of a session, or in a result. Its memory stays readable as long as this object or a view of it lives.

    Inputs (of Session.allocate() and put()) are writable: do not write while a job that uses them runs. Results are read-only, and are
    overwritten by a later job with the same output range: copy what is needed longer.
    """

    __slots__ = ("_buffer", "_owner", "_struct", "dtype", "offset", "shape")

    def __init__(self, struct: _structs.Struct, address: Optional[int], owner: Handle, *, is_input: bool) -> None:
        self.dtype: str = struct.dtype.decode()
        self.shape: tuple[int, ...] = tuple(struct.shape[: struct.n_dims])
        self.offset: int = struct.offset
        self._struct = struct
        self._owner: Optional[Handle] = owner if is_input else None
        # Views refer to the buffer, and it refers to what must not be freed under them.
        kind = ctypes.c_ubyte * struct.size
        self._buffer = kind.from_address(address) if struct.size > 0 and address else kind()
        self._buffer.owner = owner

    def __repr__(self) -> str:
        return f"<latent.Tensor {self.dtype} {list(self.shape)}{'' if self._owner else ' read-only'}>"

    @property
    def nbytes(self) -> int:
        return len(self._buffer)

    @property
    def memory(self) -> memoryview:
        """Its bytes, without a copy; needs no other package."""
        m = memoryview(self._buffer).cast("B")
        return m if self._owner else m.toreadonly()

    @property
    def array(self) -> numpy.ndarray[Any, Any]:
        """A numpy view, without a copy. BF16 and F8 have a type of ml_dtypes where that is installed, else uint16 and uint8."""
        import numpy as np

        if self.nbytes == 0:
            return np.empty(self.shape, numpy_type(self.dtype))
        return np.frombuffer(self.memory, numpy_type(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """A torch view, without a copy. torch has no read-only tensors: an operation in place on a result ends the process; clone() first."""
        import torch

        kind = torch_type(self.dtype)
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=kind)
        return torch.frombuffer(self._buffer, dtype=kind).reshape(self.shape)

    def struct_of(self, owner: Handle, name: str) -> _structs.Struct:
        """As an input of that session."""
        if self._owner is not owner:
            raise InvalidArgument("InvalidArgument", f"{name} is a tensor of another session or a result; put() it into this session.")
        return self._struct


def numpy_type(dtype: str) -> Any:
    import numpy as np

    _, plain, special, _, _ = _type(dtype)
    if special is not None:
        try:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, special))
        except (ImportError, AttributeError):
            pass
    return np.dtype(plain)


def torch_type(dtype: str) -> Any:
    import torch

    kind = getattr(torch, _type(dtype)[3] or "", None)
    if kind is None:
        raise NotSupported("NotSupported", f"This torch has no type for {dtype}.")
    return kind


class Source:
    """Foreign data, checked and converted: its type, its shape and its way into a place of theirs."""

    def __init__(self, data: Any, dtype: Optional[str], shape: Optional[Sequence[int]]) -> None:
        self.data = data
        self.kind, own, dims = self._look()
        if self.kind != "memory" and shape is not None:
            raise InvalidArgument("InvalidArgument", f"A shape may only be given with plain memory; this data has its own: {list(dims)}.")
        self.dtype = dtype or own
        if self.dtype is None:
            raise InvalidArgument("InvalidArgument", f"The type of {type(data).__name__} has no counterpart; say dtype=.")
        size = _type(self.dtype)[0]
        if isinstance(data, Tensor):
            self.kind, self.data = "memory", data.memory
            if self.dtype != own:
                self.kind, self.data = "numpy", _numbers(data)
        if self.kind == "numpy":
            self.data = _converted(self.data, self.dtype)
        elif self.kind == "torch":
            torch_type(self.dtype)
        elif not isinstance(data, Tensor):
            if own not in (None, "U8", self.dtype):
                raise InvalidArgument("InvalidArgument", f"Plain memory of {own} is not converted to {self.dtype}; use numpy or torch.")
            if own != self.dtype and shape is None:
                raise InvalidArgument("InvalidArgument", f"Bytes to be taken as {self.dtype} need shape=.")
            dims = tuple(shape) if shape is not None else dims
            if math.prod(dims) * size != self.data.nbytes:
                raise InvalidArgument("InvalidArgument", f"{self.data.nbytes} bytes are no {self.dtype} {list(dims)}.")
        self.shape = tuple(dims)

    def _look(self) -> tuple[str, Optional[str], tuple[int, ...]]:
        data = self.data
        if isinstance(data, Tensor):
            return "tensor", data.dtype, data.shape
        module = type(data).__module__.partition(".")[0]
        if module == "torch" or hasattr(data, "data_ptr"):
            name = str(data.dtype).partition(".")[2]
            return "torch", next((k for k, v in _TYPES.items() if v[3] == name), None), tuple(data.shape)
        if module == "numpy" or hasattr(data, "__array_interface__"):
            name = str(data.dtype)
            own = next((k for k, v in _TYPES.items() if name == v[2] or (name == v[1] and v[2] is None)), None)
            return "numpy", own, tuple(data.shape)
        try:
            m = memoryview(data)
        except TypeError:
            raise TypeError(f"{type(data).__name__} is no array, tensor or memory that can be put into a session") from None
        own = next((k for k, v in _TYPES.items() if v[4] == m.format), None)
        dims = tuple(m.shape or ())
        self.data = m.cast("B") if m.c_contiguous and m.nbytes > 0 else memoryview(m.tobytes())
        return "memory", own, dims

    def copy_to(self, place: Tensor) -> None:
        if self.kind == "torch":
            place.torch().copy_(self.data.detach())
        elif self.kind == "numpy":
            place.array[...] = self.data
        else:
            place.memory[:] = self.data


def _numbers(tensor: Tensor) -> Any:
    if _type(tensor.dtype)[2] is not None and tensor.array.dtype == _type(tensor.dtype)[1]:
        raise NotSupported("NotSupported", f"Converting from {tensor.dtype} needs the package ml_dtypes.")
    return tensor.array


def _converted(data: Any, dtype: str) -> Any:
    """An array as numpy_type(dtype). Integers of the type's size are bits of the types that numpy itself does not have."""
    target = numpy_type(dtype)
    if data.dtype == target:
        return data
    if _type(dtype)[2] is None:
        return data.astype(target, casting="same_kind")
    if data.dtype.kind in "iub":
        if data.dtype != _type(dtype)[1]:
            raise InvalidArgument("InvalidArgument", f"{data.dtype} is no bits of {dtype}; expected floats, or {_type(dtype)[1]}.")
        return data.view(target)
    if target != _type(dtype)[1]:
        return data.astype(target)
    if dtype == "BF16":
        return _bf16_bits(data)
    raise NotSupported("NotSupported", f"Converting to {dtype} needs the package ml_dtypes.")


def _bf16_bits(data: Any) -> Any:
    """Rounded to nearest, ties to even; a NaN stays one."""
    import numpy as np

    wide = np.array(data, np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def output_bytes(video: Any, audio: Any, sampler: Optional[str] = None, steps: int = 1, keep_steps: bool = False) -> int:
    """How much room a job's results take at most: of a step (sampler None, steps 1) or a trajectory.

    video and audio: tensors or arrays like the inputs, or their shapes (then F32).

    >>> output_bytes((24, 2, 4, 4), (32, 2, 8))
    14336
    """

    def struct(x: Union[Tensor, Sequence[int], Any]) -> _structs.Struct:
        if isinstance(x, Tensor):
            return describe(x.dtype, x.shape)
        return describe("F32", x.shape if hasattr(x, "shape") else x)

    lib = library()
    n: int = lib.latent_output_bytes(struct(video), struct(audio), text("sampler", sampler), uint("steps", steps, 32), int(bool(keep_steps)))
    if n == (1 << 64) - 1:
        raise InvalidArgument("InvalidArgument", "Results of these shapes and so many steps would have more than 2^64 bytes.")
    return n
