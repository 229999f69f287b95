# SPDX-License-Identifier: Apache-2.0
"""Nodes for tests/comfyui/real: text encoder and VAEs without weights, and a node that saves latents."""


async def comfy_entrypoint():
    from .nodes import TestExtension

    return TestExtension()
