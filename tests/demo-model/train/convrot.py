# SPDX-License-Identifier: Apache-2.0
"""int8_tensorwise with rotation: a matrix as int8 rows with one scale each, its columns turned by a Hadamard matrix in groups."""
import json

import torch


def hadamard(g):
    """The normalised matrix of g = 4^k columns; it is its own inverse."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float32)
    h = torch.ones(1, 1)
    while h.shape[0] < g:
        h = torch.kron(h4, h)
    return h / g ** 0.5


def rotate(w, g):
    return (w.view(w.shape[0], -1, g) @ hadamard(g)).view(w.shape)


def quantise(name, w, group):
    """Tensors of the file for the matrix `name`.weight."""
    r = rotate(w.float(), group)
    scale = (r.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    marker = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}).encode()
    return {f"{name}.weight": (r / scale).round().clamp(-128, 127).to(torch.int8), f"{name}.weight_scale": scale,
            f"{name}.comfy_quant": torch.tensor(list(marker), dtype=torch.uint8)}


def expand(state):
    """The state with every quantised matrix as float32 and without scales and markers."""
    out = dict(state)
    for key in [k for k in state if k.endswith(".comfy_quant")]:
        name = key[:-len(".comfy_quant")]
        group = json.loads(bytes(state[key].tolist()))["convrot_groupsize"]
        w = state[f"{name}.weight"].float() * state[f"{name}.weight_scale"]
        out[f"{name}.weight"] = rotate(w, group)
        del out[key], out[f"{name}.weight_scale"]
    return out
