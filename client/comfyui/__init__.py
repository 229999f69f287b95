# SPDX-License-Identifier: Apache-2.0
"""MiniMax H3 in ComfyUI, sampled by latentd.

Nothing of ComfyUI, of torch or of liblatent is imported before ComfyUI asks for the nodes, and nothing of liblatent before one runs: a machine
without the service shows the nodes, and they say what is missing."""


async def comfy_entrypoint() -> object:
    from .nodes import LatentdExtension

    return LatentdExtension()
