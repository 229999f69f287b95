# SPDX-License-Identifier: Apache-2.0
"""Loads the ComfyUI pack as ComfyUI does: a folder as a package, under a name that is not the folder's."""

import importlib
import importlib.util
import os
import pathlib
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PACK = pathlib.Path(os.environ.get("LATENT_COMFYUI_PACK", SOURCE / "client/comfyui"))
NAME = "latentd_comfyui_pack"


def load():
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, PACK / "__init__.py", submodule_search_locations=[str(PACK)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def part(name):
    """A module of the pack."""
    load()
    return importlib.import_module(f"{NAME}.{name}")
