# SPDX-License-Identifier: Apache-2.0
"""Finds the Python package `latent`: installed, or beside this pack as the installer laid it, or in the source tree that this folder is of."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = "latent"


class Missing(RuntimeError):
    pass


def _folders() -> list[Path]:
    return [root for root in (HERE / "vendor", HERE.parent / "python") if (root / NAME / "__init__.py").is_file()]


def _usable(module: ModuleType) -> bool:
    return hasattr(module, "Client") and hasattr(module, "library_version")


def _import() -> ModuleType:
    try:
        found = importlib.import_module(NAME)
        if _usable(found):
            return found
    except ImportError:
        pass
    if NAME in sys.modules:
        raise Missing(f"latentd: another Python package called {NAME} is in use here ({sys.modules[NAME].__file__}).")
    folders = _folders()
    if not folders:
        raise Missing(f"latentd: the Python package {NAME} is not installed, and there is no copy of it in {HERE / 'vendor'}. "
                      "Install the pack with packaging/install-comfyui of latentd's source.")
    sys.path.insert(0, str(folders[0]))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(NAME)
    finally:
        sys.path.remove(str(folders[0]))


def latent() -> Any:
    """The package. Raises Missing with what to do."""
    found = sys.modules.get(NAME)
    return found if found is not None and _usable(found) else _import()
