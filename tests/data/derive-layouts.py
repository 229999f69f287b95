#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny model's other published layouts and formats from dit/comfy.safetensors, byte for byte as the reference writer did.

    derive-layouts.py DATA OUT [STAMP]

DATA is this folder, OUT gets original.safetensors, diffusers/, diffusers_sharded/, and of delta/NAME, the tensors in which a format
differs, NAME: comfy_pruned.safetensors (a curve instead of the time embedder) and comfy_int8.safetensors. comfy_fp8.safetensors and
comfy_nvfp4.safetensors are quantised here, to the nearest. Every file is checked against DATA/dit/SHA256SUMS; a mismatch is an error.
STAMP is written last, for the build.
"""
import bisect
import functools
import hashlib
import json
import operator
import os
import struct
import sys

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}
SHARDS = 2


def read(path):
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as f:
        data = f.read()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    base = 8 + length
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[base + t["data_offsets"][0]:base + t["data_offsets"][1]]) for name, t in header.items()}


def write(path, tensors, metadata=None):
    """Wide elements first, then by name; compact JSON padded with spaces to 8 bytes."""
    header, offset, parts = {}, 0, []
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in sorted(tensors.items(), key=lambda item: (-SIZES[item[1][0]], item[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        parts.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(parts))


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def thirds(tensor):
    dtype, shape, raw = tensor
    n = len(raw) // 3
    return [(dtype, [shape[0] // 3, shape[1]], raw[i * n:(i + 1) * n]) for i in range(3)]


def interleave(tensor, head_dim):
    """[Q ; K ; V] to q, k, v of head 0, then of head 1, ..."""
    dtype, shape, raw = tensor
    size = head_dim * shape[1] * SIZES[dtype]
    parts = [t[2] for t in thirds(tensor)]
    return dtype, shape, b"".join(p[at:at + size] for at in range(0, len(parts[0]), size) for p in parts)


def swap_halves(tensor):
    dtype, shape, raw = tensor
    n = len(raw) // 2
    return dtype, shape, raw[n:] + raw[:n]


WHOLE_NAMES = {"video_patch_proj": "proj_in", "audio_patch_proj": "audio_proj_in", "condition_proj": "context_embedder",
               "time_embedder.proj_in": "time_embedder.linear_1", "time_embedder.proj_out": "time_embedder.linear_2",
               "final_layer.norm": "norm_out.norm", "final_layer.adaln_proj.linear": "norm_out.linear",
               "final_layer.video_out": "proj_out", "final_layer.audio_out": "audio_proj_out"}
BLOCK_NAMES = {"attn.q_norm": "attn.norm_q", "attn.k_norm": "attn.norm_k", "attn.out_proj": "attn.to_out.0",
               "mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2"}


def diffusers_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem in WHOLE_NAMES:
        return WHOLE_NAMES[stem] + "." + kind
    for prefix, other in (("token_refiner.blocks.", "token_refiner.refiner_blocks."), ("blocks.", "transformer_blocks.")):
        if stem.startswith(prefix):
            layer, part = stem[len(prefix):].split(".", 1)
            return f"{other}{layer}.{BLOCK_NAMES.get(part, part)}.{kind}"
    return name


def to_diffusers(comfy):
    out = {}
    for name, tensor in comfy.items():
        if name == "rope.inv_freq":
            continue
        new = diffusers_name(name)
        if name.endswith(".qkv_proj.weight"):
            for letter, part in zip("qkv", thirds(tensor)):
                out[new.replace("qkv_proj", "to_" + letter)] = part
        else:
            out[new] = swap_halves(tensor) if name.endswith(".fc1.weight") else tensor
    return out


def config(comfy):
    shape = {name: t[1] for name, t in comfy.items()}
    head_dim = shape["blocks.0.attn.q_norm.weight"][0]
    layers = {name.split(".")[1] for name in comfy if name.startswith("blocks.")}
    refiner = {name.split(".")[2] for name in comfy if name.startswith("token_refiner.blocks.")}
    return {"_class_name": "MiniMaxH3Transformer3DModel", "_diffusers_version": "0.42.1",
            "num_attention_heads": shape["blocks.0.attn.qkv_proj.weight"][0] // (3 * head_dim), "attention_head_dim": head_dim,
            "hidden_size": shape["video_patch_proj.weight"][0], "num_layers": len(layers), "num_refiner_layers": len(refiner),
            "ffn_dim": shape["blocks.0.mlp.fc2.weight"][1], "in_channels": shape["video_patch_proj.weight"][1] // 4,
            "audio_in_channels": shape["audio_patch_proj.weight"][1], "patch_size": [1, 2, 2],
            "text_dim": shape["condition_proj.weight"][1], "freq_dim": shape["time_embedder.proj_in.weight"][1],
            "time_embed_hidden_dim": shape["time_embedder.proj_in.weight"][0],
            "time_embed_dim": shape["time_embedder.proj_out.weight"][0], "rope_freq_dim": shape["rope.inv_freq"][0],
            "rope_theta": 10000.0, "norm_eps": 1e-5, "qk_norm_eps": 1e-5, "final_norm_eps": 1e-5}


def write_sharded(folder, tensors):
    """Names in order; the first shard takes them until it has half of the bytes."""
    total, taken = sum(len(t[2]) for t in tensors.values()), 0
    shards = [{} for _ in range(SHARDS)]
    files = [f"diffusion_pytorch_model-{i + 1:05d}-of-{SHARDS:05d}.safetensors" for i in range(SHARDS)]
    where = {}
    for name in sorted(tensors):
        shard = 0 if taken < total // 2 else 1
        shards[shard][name] = tensors[name]
        where[name] = files[shard]
        taken += len(tensors[name][2])
    for file, shard in zip(files, shards):
        write(os.path.join(folder, file), shard, {"format": "pt"})
    write_json(os.path.join(folder, "diffusion_pytorch_model.safetensors.index.json"),
               {"metadata": {"total_size": total}, "weight_map": where})


# Numbers of e4m3 from 0 up, by code, and of e2m1.
E4M3 = [f * 2.0 ** -9 if e == 0 else (8 + f) * 2.0 ** (e - 10) for e in range(16) for f in range(8)][:127]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(table, x):
    at = bisect.bisect_left(table, x)
    return at if at == 0 or at < len(table) and table[at] - x < x - table[at - 1] else at - 1


def numbers(tensor):
    assert tensor[0] == "BF16"
    wide = bytearray(2 * len(tensor[2]))
    wide[2::4], wide[3::4] = tensor[2][::2], tensor[2][1::2]
    return struct.unpack(f"<{len(wide) // 4}f", wide)


def f32(*x):
    return struct.pack(f"<{len(x)}f", *x)


def to_fp8(stem, tensor):
    x = numbers(tensor)
    scale = max(map(abs, x)) / E4M3[-1]
    code = functools.cache(lambda v: nearest(E4M3, abs(v) / scale) | (0x80 if v < 0 else 0))
    return {stem + ".weight": ("F8_E4M3", tensor[1], bytes(map(code, x))), stem + ".weight_scale": ("F32", [], f32(scale)),
            stem + ".comfy_quant": marker("float8_e4m3fn")}


def to_nvfp4(stem, tensor):
    """fc1 with an input scale, as AWQ has them."""
    (rows, cols), x, whole = tensor[1], numbers(tensor), 2.0 ** -12
    ins = [1 + k % 5 / 8 if stem.endswith("fc1") else 1.0 for k in range(cols)]
    wide = (cols // 16 + 3) // 4 * 4
    tiles, codes = bytearray((rows + 127) // 128 * 128 * wide), []
    code = functools.cache(lambda v, step: nearest(E2M1, abs(v) / step) | (8 if v < 0 else 0))
    for r in range(rows):
        for c in range(cols // 16):
            at = r * cols + c * 16
            w = list(map(operator.truediv, x[at:at + 16], ins[c * 16:c * 16 + 16]))
            block = max(1, nearest(E4M3, max(map(abs, w)) / 6 / whole))
            tiles[(r // 128 * (wide // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = block
            codes += [code(v, E4M3[block] * whole) for v in w]
    out = {stem + ".weight": ("U8", [rows, cols // 2], bytes(a << 4 | b for a, b in zip(codes[::2], codes[1::2]))),
           stem + ".weight_scale": ("F8_E4M3", [(rows + 127) // 128 * 128, wide], bytes(tiles)),
           stem + ".weight_scale_2": ("F32", [], f32(whole)), stem + ".comfy_quant": marker("nvfp4")}
    if stem.endswith("fc1"):
        out[stem + ".pre_quant_scale"] = ("BF16", [cols], b"".join(f32(s)[2:] for s in ins))
    return out


def marker(name):
    text = json.dumps({"format": name}).encode()
    return "U8", [len(text)], text


def quantised(comfy, quantise):
    """The matrices of the blocks, as published files have them."""
    out = dict(comfy)
    for name in comfy:
        if name.startswith("blocks.") and name.split(".", 2)[2] in ("attn.qkv_proj.weight", "attn.out_proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"):
            out.update(quantise(name[:-len(".weight")], out.pop(name)))
    return out


def derive(data, out):
    comfy = read(os.path.join(data, "dit", "comfy.safetensors"))
    for name in ("comfy_pruned.safetensors", "comfy_int8.safetensors"):
        delta = read(os.path.join(data, "delta", name))
        kept = {n: t for n, t in comfy.items() if not ("adaln_t_table" in delta and n.startswith("time_embedder."))}
        write(os.path.join(out, name), {**kept, **delta})
    write(os.path.join(out, "comfy_fp8.safetensors"), quantised(comfy, to_fp8))
    write(os.path.join(out, "comfy_nvfp4.safetensors"), quantised(comfy, to_nvfp4))
    head_dim = comfy["blocks.0.attn.q_norm.weight"][1][0]
    write(os.path.join(out, "original.safetensors"),
          {name: interleave(t, head_dim) if name.endswith(".qkv_proj.weight") else t for name, t in comfy.items()})
    split = to_diffusers(comfy)
    write(os.path.join(out, "diffusers", "diffusion_pytorch_model.safetensors"), split, {"format": "pt"})
    write_json(os.path.join(out, "diffusers", "config.json"), config(comfy))
    write_sharded(os.path.join(out, "diffusers_sharded"), split)
    write_json(os.path.join(out, "diffusers_sharded", "config.json"), config(comfy))


def check(data, out):
    wrong = 0
    with open(os.path.join(data, "dit", "SHA256SUMS")) as sums:
        for line in sums:
            expected, name = line.split()
            with open(os.path.join(out, name), "rb") as f:
                if hashlib.sha256(f.read()).hexdigest() != expected:
                    print(f"{name}: not the bytes that SHA256SUMS expects", file=sys.stderr)
                    wrong += 1
    return wrong


def main():
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    derive(sys.argv[1], sys.argv[2])
    if check(sys.argv[1], sys.argv[2]):
        return 1
    if len(sys.argv) == 4:
        with open(sys.argv[3], "w") as f:
            f.write("derived\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
