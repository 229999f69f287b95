# SPDX-License-Identifier: Apache-2.0
"""Python values for C fields: ctypes cuts integers that are too large and strings at a NUL, which must be refused here."""

from __future__ import annotations

import operator
import os
from typing import Any, Optional, Union

from latent.errors import InvalidArgument


def uint(name: str, value: Any, bits: int = 64) -> int:
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number") from None
    if not 0 <= n < 1 << bits:
        raise InvalidArgument("InvalidArgument", f"{name} is {n}, expected 0 to 2^{bits} - 1.")
    return n


def number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} is {value!r}, expected a number")
    return float(value)


def text(name: str, value: Optional[str]) -> Optional[bytes]:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected a string")
    return _no_nul(name, value.encode())


def path(name: str, value: Union[str, os.PathLike[str]]) -> bytes:
    return _no_nul(name, os.fsencode(value))


def _no_nul(name: str, value: bytes) -> bytes:
    if b"\0" in value:
        raise InvalidArgument("InvalidArgument", f"{name} has a NUL in it.")
    return value
